"""A job watched until its end, by long polls: each look says what is known already and waits for news.

May import the other modules of this package.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import inf
from typing import Protocol

from dataloader.client.errors import Unavailable, WaitTimeout
from dataloader.client.results import Job, read
from dataloader.client.transport import Answer

POLL_SEC = 25  # how long one question may wait for a change
OUTAGE_SEC = 600.0  # that a wait sits out
_QUICK = 0.3  # seconds; an answer without news that came sooner has not waited

# For a job's status, within so many seconds, with these headers; and for how long it may be sent again.
Ask = Callable[[int, Mapping[str, str], float], Answer]


class Watch:
    """One job, looked at again and again: each look waits for news as long as the service lets it."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._etag: str | None = None
        self._job: Job | None = None
        self.pause = 0.0  # seconds until the next look should be

    def look(self, within: float, patience: float) -> Job:
        """The job as soon as it is otherwise than at the last look, at the latest after `within` seconds."""
        begun = time.monotonic()
        seconds = int(within) if self._job else 0  # the first answer is news anyway
        headers = {"If-None-Match": self._etag} if self._etag else {}
        answer = self._ask(seconds, headers, patience)
        is_news = answer.status == 200 and (job := read(Job, answer.document)) != self._job
        if is_news:
            self._job = job
        self._etag = answer.etag or self._etag
        self.pause = self._next_pause(answer, is_news, time.monotonic() - begun)
        assert self._job is not None  # noqa: S101  a 304 answers an ETag, and so a job was seen before
        return self._job

    def _next_pause(self, answer: Answer, is_news: bool, took: float) -> float:
        """How long to leave the service alone: it may not wait for us, be it too busy or too old."""
        if answer.retry_after:
            return answer.retry_after
        if is_news or took > _QUICK:
            return 0.05
        return min(2.0, max(0.1, 1.5 * self.pause))


class Watched(Protocol):
    """What `wait_for` needs of a Watch."""

    pause: float

    def look(self, within: float, patience: float) -> Job: ...


def wait_for(
    watch: Watched,
    timeout: float | None = None,
    on_progress: Callable[[Job], object] | None = None,
    *,
    patience: float = OUTAGE_SEC,
) -> Job:
    """`Client.wait` for whatever lets a job be looked at."""
    until = inf if timeout is None else time.monotonic() + timeout
    seen: Job | None = None
    while True:
        left = max(0.0, until - time.monotonic())
        try:
            job = watch.look(min(POLL_SEC, left), min(patience, left))
        except Unavailable as e:
            if e.is_lasting or patience < left:
                raise
            raise WaitTimeout(seen, timeout or 0) from None
        if on_progress and job != seen:
            on_progress(job)
        seen = job
        if job.is_final:
            return job
        if time.monotonic() >= until:
            raise WaitTimeout(job, timeout or 0)
        time.sleep(min(watch.pause, max(0.0, until - time.monotonic())))
