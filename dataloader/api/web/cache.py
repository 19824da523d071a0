"""Answers that requests share: a page open on twenty screens costs the database as much as on one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from threading import Lock
from time import monotonic
from typing import Any, Generic, TypeVar

from flask import current_app

from dataloader import periods
from dataloader.api.web.endpoint import session
from dataloader.queue import operations
from dataloader.queue.db import Conn
from dataloader.queue.plans import backfills
from dataloader.queue.reports import predictions

T = TypeVar("T")
FRESH_SEC = 1.0
OUTDATED_SEC = periods.seconds("CACHE_OUTDATED_SEC", 5.0)
LATELY_SEC = periods.seconds("LATELY_FRESH_SEC", 5.0)  # figures of spans of five minutes and longer need not be newer
# The Python of an outlook takes the API up to 0.2 s, beside which its other answers wait.
OUTLOOKS_FRESH_SEC = periods.seconds("OUTLOOKS_FRESH_SEC", 15.0)
COUNTS_FRESH_SEC = periods.seconds("COUNTS_FRESH_SEC", 5.0)
MOST = 200  # answers that are kept
TASKS = 20  # of one request, up to which the answer about their schemas is kept


class SharedAnswer(Generic[T]):
    """One answer for all requests while it is fresh, and for requests while one of them renews it.

    It is fresh for `fresh_sec`, and outdated after twice that, or OUTDATED_SEC.
    """

    def __init__(self, fresh_sec: float = FRESH_SEC) -> None:
        self._fresh_sec, self._outdated_sec = fresh_sec, max(OUTDATED_SEC, 2 * fresh_sec)
        self._at = 0.0
        self._answer: T | None = None
        self._asking = Lock()

    def ask(self, question: Callable[[], T]) -> T:
        """The answer, renewed where it is not fresh. Raises the exceptions of `question`."""
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


def ask(read: Callable[..., T], *of: Any, fresh_sec: float = FRESH_SEC) -> T:
    """The answer of the database to `read(conn, *of)`, which this process shares between its requests."""

    def question() -> T:
        with session() as conn:
            return read(conn, *of)

    return _shared((read, of), question, fresh_sec)


def _kept(read: Callable[..., T], fresh_sec: float, conn: Conn, *of: Any) -> T:
    """The answer to `read(conn, *of)`, up to twice `fresh_sec` old."""
    return _shared((read, of), lambda: read(conn, *of), fresh_sec)


outlook = partial(_kept, predictions.outlook, OUTLOOKS_FRESH_SEC)
counts = partial(_kept, backfills.counts, COUNTS_FRESH_SEC)  # of the partitions of a large backfill


def schemas(conn: Conn, tasks: Collection[str]) -> Mapping[str, str | None]:
    """The schemas of the args of these tasks, about FRESH_SEC old: a trigger costs no question of its own."""
    if len(tasks) > TASKS:
        return operations.args_schemas(conn, tasks)
    return _kept(operations.args_schemas, FRESH_SEC, conn, frozenset(tasks))


def _shared(key: Any, question: Callable[[], T], fresh_sec: float) -> T:
    known: dict[Any, SharedAnswer[T]] = current_app.extensions.setdefault("shared", {})
    if len(known) >= MOST:
        known.clear()
    return known.setdefault(key, SharedAnswer(fresh_sec)).ask(question)
