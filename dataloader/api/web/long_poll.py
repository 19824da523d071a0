"""Requests that wait for a job to change: one thread asks the database for all of them together.

So a waiting request costs a thread of the server and no session. A thread of ours runs only while somebody waits, and
none is made before the server's fork. May import nothing of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum
from threading import Condition, Thread
from time import monotonic
from uuid import UUID

PERIOD_SEC = 0.3  # between two looks
DEFAULT_ROOM = 8  # where the number of the server's threads is not known

Versions = Callable[[Collection[UUID]], dict[UUID, str]]


class Outcome(Enum):
    """Why a wait is over."""

    CHANGED = 1
    SAME = 2  # the time is over, or the service stops
    FULL = 3  # too many wait already; nothing was waited for


class LongPolls:
    """The requests that wait in this process."""

    def __init__(self, versions: Versions) -> None:
        """`versions` asks for the versions of these jobs, without those that are gone; it may raise anything."""
        self._versions = versions
        self._room = DEFAULT_ROOM
        self._changed = Condition()
        self._waiting: dict[object, UUID] = {}
        self._seen: dict[UUID, str | None] = {}
        self._round = 0  # of the looks that have begun
        self._looked = 0  # the round of the last one that has ended
        self._error: Exception | None = None  # of that one
        self._is_watched = False
        self._is_over = False

    def allow(self, waiting: int) -> None:
        """Let so many wait at once."""
        self._room = max(1, waiting)

    def stop(self) -> None:
        """End all waits now, and those to come at their beginning."""
        self._is_over = True
        with self._changed:
            self._changed.notify_all()

    def wait(self, job_id: UUID, version: str, seconds: float) -> Outcome:
        """Until the job has another version than this one, or is gone; raises what asking for it has raised."""
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
        known = self._round  # a look that had begun before us may not have asked for our job
        while not self._is_over and (left := until - monotonic()) > 0:
            self._changed.wait(left)
            if self._looked > known:
                if self._error:
                    raise self._error
                if self._seen.get(job_id) != version:
                    return Outcome.CHANGED
        return Outcome.SAME

    def _watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            Thread(target=self._look_again_and_again, name="dl-long-polls", daemon=True).start()

    def _look_again_and_again(self) -> None:
        while wanted := self._next_round():
            seen, error = {}, None
            try:
                seen = self._versions(wanted)
            except Exception as e:
                error = e
            with self._changed:
                self._seen, self._error, self._looked = dict(seen), error, self._round
                self._changed.notify_all()

    def _next_round(self) -> set[UUID]:
        """Whom to ask for next, after a pause; nobody: the thread has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, PERIOD_SEC)
            self._round += 1
            wanted = set() if self._is_over else set(self._waiting.values())
            self._is_watched = bool(wanted)
            return wanted
