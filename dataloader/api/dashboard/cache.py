"""Answers that many viewers share, so that a page open on twenty screens costs the database what one does.

May import nothing of the package.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")
FRESH_SEC = 1.0
OUTDATED_SEC = 5.0


class SharedAnswer(Generic[T]):
    """One answer for all who ask within a second, and for those who ask while it is found anew."""

    def __init__(self) -> None:
        self._at = 0.0
        self._answer: T | None = None
        self._asking = Lock()

    def ask(self, question: Callable[[], T]) -> T:
        """The answer, a second old at most; up to five while somebody else asks. Raises what the question raises."""
        age = monotonic() - self._at
        if self._answer is not None and age < FRESH_SEC:
            return self._answer
        if not self._asking.acquire(blocking=False):
            return self._answer if self._answer is not None and age < OUTDATED_SEC else question()
        try:
            self._answer, self._at = question(), monotonic()
            return self._answer
        finally:
            self._asking.release()
