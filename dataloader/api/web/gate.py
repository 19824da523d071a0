"""A limit to the requests that are at the database at once, so that a frozen database does not hold every thread.

psycopg_pool cannot tell a rush, which is to be served, from a frozen database: its `timeout` counts seconds and its
`max_waiting` counts requests (tests/process/test_slow_clients.py, the rush). The gate sees whether requests return.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition
from time import monotonic

from dataloader.queue import db

STALL_SEC = 0.3  # at a full gate, without a request that enters or leaves
# SQLSTATE classes of a server that is away: not of a statement that took too long or met a lock.
_AWAY = ("08", "57P", "53", "58")


class Busy(db.Silence):
    """The request was not sent to the database, which has not answered other requests."""


class Gate:
    """Admits `most` requests at once, and one at a time after a request that could not reach the database."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside = 0
        self._is_away = False  # by the last request that left
        self._moved_at = float("-inf")
        self._moved = Condition()

    def narrow(self, most: int) -> None:
        """Admit at most so many from now on, if that is fewer than before."""
        with self._moved:
            self._most = max(1, min(most, self._most))

    @contextmanager
    def passed(self, until: float) -> Iterator[None]:
        """Hold a place for the block. Raises Busy where the gate is full and does not move, or after `until`."""
        with self._moved:
            while self._inside >= (1 if self._is_away else self._most):
                left = min(until, self._moved_at + STALL_SEC) - monotonic()
                if self._is_away or left <= 0:
                    raise Busy("the database has not answered other requests")
                self._moved.wait(left)
            self._inside += 1
            self._moved_at = monotonic()
        was_away = False
        try:
            yield
        except Exception as error:
            was_away = is_away(error)
            raise
        finally:
            with self._moved:
                self._inside -= 1
                self._moved_at, self._is_away = monotonic(), was_away
                self._moved.notify_all()


def is_away(error: Exception) -> bool:
    """Whether the error says that the database cannot be reached."""
    if not db.is_passing(error):
        return False
    state = getattr(error, "sqlstate", None)
    return state is None or state.startswith(_AWAY)
