"""An answer that viewers share: a page open on twenty screens costs the database as much as on one."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")
FRESH_SEC = 1.0
OUTDATED_SEC = 5.0


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
