"""A session with the queue's database, lent to one piece of work at a time, and replaced when it is lost.

The worker, the keeper and the reaper have one each. A connection exists only as the argument of `Session.call`, and
only while it is open. So no code can use a closed one, and every loss is met in the same place: the next `call` opens
a new session and puts things right before any other work.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, TypeVar

import psycopg
from psycopg import errors

from dataloader.farm.common_log import FarmOutage
from dataloader.queue import db, lifecycle, migrations

PAUSE_MOST = 2.0  # seconds between two tries to open a session: a database that is back is found within this time
T = TypeVar("T")
Begin = Callable[[], lifecycle.Session]
Resume = Callable[[lifecycle.Session, Sequence[lifecycle.Session]], None]


def opened(
    dsn: str, name: str, schema: str, connect_sec: float, answer_sec: float, lock_sec: float
) -> lifecycle.Session:
    """Open a session on the queue; raises SchemaError where its schema is of another version."""
    conn = db.connect(
        dsn, name=name, schema=schema, connect_timeout=connect_sec, answer_within=answer_sec, lock_timeout=lock_sec
    )
    migrations.check(conn)
    return lifecycle.Session(conn)


class Lost(Exception):
    """The session broke during some work, or could not be opened; it is not known whether the work was done."""


class Session:
    """One session for all threads of a process, in turns."""

    def __init__(self, begin: Begin, resume: Resume, outage: FarmOutage, event: str) -> None:
        """`begin` opens a session; `resume` follows, with the sessions that were lost since the last success."""
        self._begin = begin
        self._resume = resume
        self._outage = outage
        self._event = event
        self._current: lifecycle.Session | None = None
        self._lost: list[lifecycle.Session] = []  # their backends may still be at a statement
        self.failures = 0  # calls that have lost the session since the last one that did not
        self._was_open = False
        self.tries = 0  # how often a session was opened, or was to be: its descriptor comes with the try
        self.lock = threading.RLock()  # held by the thread that uses the session, or changes what `resume` reads

    def call(self, work: Callable[[lifecycle.Session], T], answer_within: float | None = None) -> T:
        """Return `work(session)`; each of its statements has an answer within so many seconds (None: as opened).

        Raises Lost when the session breaks or none can be opened; whatever else `work` raises, as it is.
        """
        with self.lock:
            try:
                session = self._current or self._open()
                conn, patience = session.conn, session.conn.answer_within
                conn.answer_within = patience if answer_within is None else answer_within
                try:
                    done = work(session)
                finally:
                    conn.answer_within = patience
            except BaseException as error:
                if not db.is_passing(error):
                    self._forget_closed()
                    raise
                self.failures += 1
                if isinstance(error, errors.DiskFull):
                    db.Connection.disk_full_at = monotonic()
                self._outage.failed(self._event, error)
                if self._current is not None:
                    self._current.conn.close()
                    self._forget_closed()
                raise Lost(str(error).strip()) from error
            self.failures = 0
            self._outage.ended()
            return done

    @property
    def is_open(self) -> bool:
        """False before the first call, and from a loss until the next one."""
        return self._current is not None

    @property
    def pause_sec(self) -> float:
        """How long to wait before the next call after a loss: not at all at first, then longer, with jitter."""
        if self.failures <= 1:
            return 0.0
        most = min(PAUSE_MOST, 0.1 * 2 ** min(self.failures, 10))
        return random.uniform(most / 2, most)  # noqa: S311  jitter

    def _open(self) -> lifecycle.Session:
        self.tries += 1
        try:
            session = self._begin()
        except psycopg.Error as error:
            # A server that comes back, or is restored, may refuse for a while what it has granted before.
            if self._was_open and not db.is_passing(error):
                raise psycopg.OperationalError(str(error)) from error
            raise
        self._current = session
        try:
            self._resume(session, self._lost)
        except BaseException:
            session.conn.close()  # a session that could not be restored must not be used
            raise
        self._lost.clear()
        self._was_open = True
        return session

    def _forget_closed(self) -> None:
        if self._current is not None and self._current.conn.closed:
            self._lost.append(self._current)
            self._current = None


def read(conn: db.Connection) -> list[Any]:
    """The notifications that have come. Raises psycopg.Error where the server has said farewell, which ends a wait."""
    return list(conn.notifies(timeout=0))
