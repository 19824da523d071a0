"""Long polls: requests that wait for a job to change. One thread asks the database for all of them together.

A waiting request costs a thread of the server and no session. The asking thread runs while a request waits; none starts
before the server's fork.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum
from threading import Condition, Thread
from time import monotonic
from uuid import UUID

PERIOD_SEC = 0.3  # between two polls
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
        self._changed = Condition()
        self._waiting: dict[object, UUID] = {}
        self._latest: dict[UUID, str | None] = {}
        self._round = 0  # the number of rounds of queries that have begun
        self._ended_round = 0  # the last round that has ended
        self._error: Exception | None = None  # of that round
        self._is_watched = False
        self._is_over = False

    def allow(self, waiting: int) -> None:
        """Let at most `waiting` requests wait at once."""
        self._room = max(1, waiting)

    def stop(self) -> None:
        """End all waits now; later waits end at once."""
        self._is_over = True
        with self._changed:
            self._changed.notify_all()

    def wait(self, job_id: UUID, version: str, seconds: float) -> Outcome:
        """Wait up to `seconds` until the job has another version or is deleted. Raises the exception of `versions`."""
        until = monotonic() + seconds
        me = object()
        with self._changed:
            if len(self._waiting) >= self._room:
                return Outcome.FULL
            self._waiting[me] = job_id
            try:
                return self._until_changed(job_id, version, until)
            finally:
                del self._waiting[me]

    def _until_changed(self, job_id: UUID, version: str, until: float) -> Outcome:
        self._watch()
        known = self._round  # a round that began earlier may not have asked for this job
        while not self._is_over and (left := until - monotonic()) > 0:
            self._changed.wait(left)
            if self._ended_round > known:
                if self._error:
                    raise self._error
                if self._latest.get(job_id) != version:
                    return Outcome.CHANGED
        return Outcome.SAME

    def _watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            Thread(target=self._poll, name="dl-long-polls", daemon=True).start()

    def _poll(self) -> None:
        while wanted := self._next_round():
            versions, error = {}, None
            try:
                versions = self._versions(wanted)
            except Exception as e:
                error = e
            with self._changed:
                self._latest, self._error, self._ended_round = dict(versions), error, self._round
                self._changed.notify_all()

    def _next_round(self) -> set[UUID]:
        """The jobs of the next query, after a pause; the thread ends if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, PERIOD_SEC)
            self._round += 1
            wanted = set() if self._is_over else set(self._waiting.values())
            self._is_watched = bool(wanted)
            return wanted
