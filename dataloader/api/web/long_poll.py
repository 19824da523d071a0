"""Long polls: requests that wait for a job to change. One of them asks the database for all, every PERIOD_SEC.

A waiting request costs a thread of the server and no session.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum
from threading import Event, Lock
from time import monotonic
from uuid import UUID

PERIOD_SEC = 0.3  # between two questions
DEFAULT_ROOM = 8  # where the number of the server's threads is not known

Versions = Callable[[Collection[UUID]], dict[UUID, str]]


class Outcome(Enum):
    """The end of a wait."""

    CHANGED = 1
    SAME = 2  # the time is over, or the service stops
    FULL = 3  # too many requests wait; this one did not


class LongPolls:
    """The waiting requests of this process."""

    def __init__(self, versions: Versions) -> None:
        """`versions` reads the versions of jobs, without deleted ones; it may raise any exception."""
        self._versions = versions
        self._room = DEFAULT_ROOM
        self._waiting: dict[object, UUID] = {}
        self._is_over = Event()
        self._asking = Lock()
        self._asked_at = 0.0  # monotonic; when the last question began
        self._answer: Mapping[UUID, str] | Exception = {}

    def allow(self, waiting: int) -> None:
        """Let at most `waiting` requests wait at once."""
        self._room = max(1, waiting)

    def stop(self) -> None:
        """End all waits now; later waits end at once."""
        self._is_over.set()

    def wait(self, job_id: UUID, version: str, seconds: float) -> Outcome:
        """Wait up to `seconds` until the job has another version or is deleted. Raises the exception of `versions`."""
        until, me = monotonic() + seconds, object()
        self._waiting[me] = job_id
        try:
            if len(self._waiting) > self._room:
                return Outcome.FULL
            while (left := until - (now := monotonic())) > 0 and not self._is_over.wait(min(PERIOD_SEC, left)):
                if self._latest(since=now).get(job_id) != version:
                    return Outcome.CHANGED
            return Outcome.SAME
        finally:
            del self._waiting[me]

    def _latest(self, since: float) -> Mapping[UUID, str]:
        """The versions of all jobs that are waited for, by a question that began after `since`."""
        with self._asking:
            if self._asked_at <= since:
                self._asked_at = monotonic()
                try:
                    self._answer = self._versions(set(list(self._waiting.values())))  # a copy: it may change meanwhile
                except Exception as e:
                    self._answer = e
            if isinstance(self._answer, Exception):
                raise self._answer
            return self._answer
