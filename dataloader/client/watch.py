"""A job watched until its end, by long polls: each request names the known version and waits for another."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any, Protocol

from dataloader.client.errors import Unavailable, WaitTimeout
from dataloader.client.plans import Plan, carry_out
from dataloader.client.wire import Answer, understood
from dataloader.model.jobs import Status

POLL_SEC = 25  # the longest wait of one request for a change
OUTAGE_SEC = 600.0  # the longest absence of the service that a wait tolerates
_QUICK = 0.3  # seconds; the service did not wait for a change before a faster answer without news

# Requests a job's status: the seconds to wait for a change, the headers, the seconds for repetitions.
Ask = Callable[[int, Mapping[str, str], float], Answer]

CarryOut = Callable[[Plan[Status]], Any]  # plans.carry_out, or one that is awaited


class Watch:
    """One job, requested again and again; each request waits for a change as long as the service allows."""

    def __init__(self, ask: Ask, carry_out: CarryOut = carry_out) -> None:
        self._ask, self._carry_out = ask, carry_out
        self._etag: str | None = None
        self._job: Status | None = None
        self.pause = 0.0  # seconds until the next request

    def look(self, within: float, patience: float) -> Status:
        """The job, as soon as it differs from the last answer, or after `within` seconds."""
        found: Status = self._carry_out(self._looking(within, patience))
        return found

    def _looking(self, within: float, patience: float) -> Plan[Status]:
        begun = time.monotonic()
        seconds = int(within) if self._job else 0  # the first answer is always news
        headers = {"If-None-Match": self._etag} if self._etag else {}
        answer: Answer = yield partial(self._ask, seconds, headers, patience)
        is_news = answer.status == 200 and (job := understood(Status, answer.document)) != self._job
        if is_news:
            self._job = job
        self._etag = answer.etag or self._etag
        self.pause = self._next_pause(answer, is_news, time.monotonic() - begun)
        assert self._job is not None  # noqa: S101  a 304 answers an ETag, so an earlier answer had a job
        return self._job

    def _next_pause(self, answer: Answer, is_news: bool, took: float) -> float:
        """The seconds until the next request; a busy or old service does not wait for a change."""
        if answer.retry_after:
            return answer.retry_after
        if is_news or took > _QUICK:
            return 0.05
        return min(2.0, max(0.1, 1.5 * self.pause))


class Watched(Protocol):
    """A job that can be requested again and again; `pause` is in seconds."""

    pause: float

    def look(self, within: float, patience: float) -> Status: ...


def wait_for(
    watch: Watched,
    timeout: float | None = None,
    on_progress: Callable[[Status], object] | None = None,
    *,
    patience: float = OUTAGE_SEC,
) -> Status:
    """Wait for the end of a watched job; see Farm.wait."""
    return carry_out(waiting(watch, timeout, on_progress, patience=patience, sleep=time.sleep))


def waiting(
    watch: Watched,
    timeout: float | None,
    on_progress: Callable[[Status], object] | None,
    *,
    patience: float,
    sleep: Callable[[float], object],
) -> Plan[Status]:
    """The plan of `wait_for`."""
    until = inf if timeout is None else time.monotonic() + timeout
    seen: Status | None = None
    while True:
        left = max(0.0, until - time.monotonic())
        try:
            job: Status = yield partial(watch.look, min(POLL_SEC, left), min(patience, left))
        except Unavailable as e:
            if e.is_lasting or patience < left:
                raise
            raise WaitTimeout(seen, timeout or 0) from None
        if on_progress and job != seen:
            yield partial(on_progress, job)
        seen = job
        if job.is_final:
            return job
        if time.monotonic() >= until:
            raise WaitTimeout(job, timeout or 0)
        yield partial(sleep, min(watch.pause, max(0.0, until - time.monotonic())))
