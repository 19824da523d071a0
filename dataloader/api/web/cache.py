"""Answers that requests share: a page open on twenty screens costs the database as much as on one."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, Thread
from time import monotonic
from typing import Any, Generic, TypeVar

import structlog
from flask import current_app

from dataloader import periods
from dataloader.api.web.sessions import Sessions
from dataloader.queue.db import Conn
from dataloader.queue.plans import backfills
from dataloader.queue.plans.plan import Rows
from dataloader.queue.reports import predictions
from dataloader.queue.reports.predictions import Outlook

T = TypeVar("T")
FRESH_SEC = 1.0
OUTDATED_SEC = periods.seconds("CACHE_OUTDATED_SEC", 5.0)
# The Python of an outlook takes the API up to 0.2 s, beside which its other answers wait.
OUTLOOKS_FRESH_SEC = periods.seconds("OUTLOOKS_FRESH_SEC", 15.0)
OUTLOOKS_OUTDATED_SEC = periods.seconds("OUTLOOKS_OUTDATED_SEC", 30.0)
COUNTS_FRESH_SEC = periods.seconds("COUNTS_FRESH_SEC", 5.0)
COUNTS_OUTDATED_SEC = periods.seconds("COUNTS_OUTDATED_SEC", 10.0)
MOST = 200  # queues, or backfills, of which an answer is kept
log = structlog.get_logger("api")


class SharedAnswer(Generic[T]):
    """One answer for all requests while it is fresh, and for requests while one of them renews it.

    It is fresh for `fresh_sec`, and outdated after `outdated_sec`.
    """

    def __init__(self, fresh_sec: float = FRESH_SEC, outdated_sec: float = OUTDATED_SEC) -> None:
        self._fresh_sec, self._outdated_sec = fresh_sec, outdated_sec
        self._at = 0.0
        self._answer: T | None = None
        self._asking = Lock()

    def ask(self, question: Callable[[], T]) -> T:
        """The answer, not older than that. Raises the exceptions of `question`."""
        age = monotonic() - self._at
        if self._answer is not None and age < self._fresh_sec:
            return self._answer
        if not self._asking.acquire(blocking=False):
            return self._answer if self._answer is not None and age < self._outdated_sec else question()
        try:
            self._answer, self._at = question(), monotonic()
            return self._answer
        finally:
            self._asking.release()


class RenewedAnswers(Generic[T]):
    """Answers by name that take long: one that is not fresh any more is given all the same, and renewed meanwhile.

    A request waits only for the first answer of a name, and for one that nobody has asked for in `outdated_sec`. One
    answer at a time is renewed, by a thread with a session of its own, and up to `most` are kept.
    """

    def __init__(
        self, sessions: Sessions, read: Callable[[Conn, str], T], fresh_sec: float, outdated_sec: float, most: int
    ) -> None:
        self._sessions, self._read = sessions, read
        self._fresh_sec, self._outdated_sec, self._most = fresh_sec, outdated_sec, most
        self._kept: dict[str, tuple[float, T]] = {}
        self._renewing = Lock()

    def of(self, conn: Conn, name: str) -> T:
        """The answer, not older than `outdated_sec`. Raises the exceptions of `read`."""
        at, answer = self._kept.get(name, (None, None))
        age = monotonic() - at if at is not None else self._outdated_sec
        if answer is None or age >= self._outdated_sec:
            return self._keep(name, self._read(conn, name))
        if age >= self._fresh_sec and self._renewing.acquire(blocking=False):
            self._start(name)
        return answer

    def _start(self, name: str) -> None:
        try:
            Thread(target=self._renew, args=(name,), name="dl-api-renew", daemon=True).start()
        except RuntimeError as error:  # the host has no thread left: the next request tries again
            self._renewing.release()
            log.warning("api.renew.failed", error=str(error))

    def _renew(self, name: str) -> None:
        try:
            with self._sessions.borrow() as conn:
                self._keep(name, self._read(conn, name))
        except Exception as error:  # the request that finds the answer outdated asks itself, and is told why
            log.warning("api.renew.failed", error=str(error))
        finally:
            self._renewing.release()

    def _keep(self, name: str, answer: T) -> T:
        if len(self._kept) >= self._most and name not in self._kept:
            self._kept.clear()
        self._kept[name] = (monotonic(), answer)
        return answer


def kept(name: str, make: Callable[[], T]) -> T:
    """The object that this process keeps for all requests under a name; made at the first use."""
    found: Any = current_app.extensions.setdefault(name, make())
    return found  # type: ignore[no-any-return]


def outlook(conn: Conn, queue: str) -> Outlook:
    """The outlook on a queue: OUTLOOKS_FRESH_SEC old, or up to OUTLOOKS_OUTDATED_SEC where nobody has asked since."""
    sessions = current_app.extensions["sessions"]
    renewed = kept(
        "outlooks",
        lambda: RenewedAnswers(sessions, predictions.outlook, OUTLOOKS_FRESH_SEC, OUTLOOKS_OUTDATED_SEC, MOST),
    )
    return renewed.of(conn, queue)


def counts(conn: Conn, backfill: str) -> Rows:
    """The counts of a large backfill's partitions, in the same way."""
    sessions = current_app.extensions["sessions"]
    renewed = kept(
        "backfill_counts",
        lambda: RenewedAnswers(sessions, backfills.counts, COUNTS_FRESH_SEC, COUNTS_OUTDATED_SEC, MOST),
    )
    return renewed.of(conn, backfill)
