"""How many requests may be at the database at once, so that a database that stands still does not hold every thread.

`State` decides and knows no clock of its own; `Gate` waits. May import `db`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from threading import Condition
from time import monotonic

from dataloader.queue import db

STALL_SEC = 0.3  # without anybody coming or going, at a full gate
# Connections that fail, a server that stops or has no room; not a statement that took too long or was in another's way.
_AWAY = ("08", "57P", "53", "58")


class Busy(db.Silence):
    """The database is not asked at all: it has not answered others."""


class Verdict(Enum):
    """What becomes of a request that comes to the gate."""

    ENTER = 1
    WAIT = 2
    REFUSE = 3


class State:
    """A pure account of who is at the database; times are given in."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.inside = 0
        self.is_away = False  # the last one to leave had no answer
        self.moved_at = float("-inf")

    def verdict(self, now: float) -> Verdict:
        """While the database is away one at a time tries; at a full gate the others wait as long as it moves."""
        if self.is_away:
            return Verdict.REFUSE if self.inside else Verdict.ENTER
        if self.inside < self.most:
            return Verdict.ENTER
        return Verdict.WAIT if now < self.moved_at + STALL_SEC else Verdict.REFUSE

    def enter(self, now: float) -> None:
        """Somebody goes to the database."""
        self.inside += 1
        self.moved_at = now

    def leave(self, now: float, is_away: bool) -> None:
        """Somebody comes back from it."""
        self.inside -= 1
        self.moved_at = now
        self.is_away = is_away


class Gate:
    """The state, for threads."""

    def __init__(self, most: int) -> None:
        self._state = State(most)
        self._changed = Condition()

    def narrow(self, most: int) -> None:
        """Let at most so many in from now on, if that is fewer than before."""
        with self._changed:
            self._state.most = max(1, min(most, self._state.most))

    @contextmanager
    def passed(self, until: float) -> Iterator[None]:
        """For the time at the database. Raises Busy, at once or by `until` (monotonic), when that is no use."""
        self._enter(until)
        is_away = False
        try:
            yield
        except Exception as error:
            is_away = _is_away(error)
            raise
        finally:
            with self._changed:
                self._state.leave(monotonic(), is_away)
                self._changed.notify_all()

    def _enter(self, until: float) -> None:
        with self._changed:
            while (verdict := self._state.verdict(now := monotonic())) is Verdict.WAIT and now < until:
                self._changed.wait(min(until, self._state.moved_at + STALL_SEC) - now)
            if verdict is not Verdict.ENTER:
                raise Busy("the database has not answered other requests")
            self._state.enter(now)


def _is_away(error: Exception) -> bool:
    if not db.is_passing(error):
        return False
    state = getattr(error, "sqlstate", None)
    return state is None or state.startswith(_AWAY)
