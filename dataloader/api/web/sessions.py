"""The API's database sessions, lent for a limited time; the schema is checked before the first use.

The limits together keep a promise: a request is answered within 3 s, with PG_COMMAND_TIMEOUT at its default of 2 s,
although the database is stopped, frozen or out of reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Condition
from time import monotonic

from psycopg import errors

from dataloader.config import ConfigError, Settings
from dataloader.queue import db, migrations

CONNECT_SEC = 2.0  # waiting for a session
PROBE_SEC = 0.7  # each test of an idle session
# A request has PG_COMMAND_TIMEOUT and this long, from the wait for a session to the last answer. The server gives up
# first: a slow statement is rolled back, and its outcome is known.
MARGIN_SEC = 0.8
STALL_SEC = 0.6  # at a full gate, without a request that enters or leaves: a checkpoint may stall a disk for less
# SQLSTATE classes of a server that is away: not of a statement that took too long or met a lock.
_AWAY = ("08", "57P", "53", "58")


class Busy(db.Silence):
    """The request was not sent to the database, which has not answered other requests."""


class Gate:
    """Admits `most` requests at once, and one at a time after a request that could not reach the database.

    psycopg_pool cannot tell a rush, which is to be served, from a frozen database: its `timeout` counts seconds and its
    `max_waiting` counts requests (tests/process/test_slow_clients.py, the rush). The gate sees whether requests return.
    """

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
            state = getattr(error, "sqlstate", None)
            was_away = db.is_passing(error) and (state is None or state.startswith(_AWAY))
            raise
        finally:
            with self._moved:
                self._inside -= 1
                self._moved_at, self._is_away = monotonic(), was_away
                self._moved.notify_all()


class Sessions:
    """Lends sessions of the queue's database to requests, from a pool or (PG_USE_POOL=false) one for each."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError when no database is configured; opens nothing yet."""
        if (dsn := settings.queue_dsn) is None:
            raise ConfigError("no database is configured: set DL_DB_DSN or PG_HOST, or run `dataloader up`")
        self._settings = settings
        self._request_sec = settings.pg_command_timeout + MARGIN_SEC
        self._schema_is_checked = False
        self._gate = Gate(settings.pg_pool_size + settings.pg_max_overflow)
        self._hosts, self._current = db.hosts(dsn), 0
        self._pool = db.pool(
            dsn,
            name="dl-api",
            schema=settings.pg_schema_queue,
            min_size=settings.pg_pool_size,
            max_size=settings.pg_pool_size + settings.pg_max_overflow,
            connect_timeout=settings.pg_connect_timeout,
            statement_timeout=settings.pg_command_timeout,
            max_lifetime=settings.pg_pool_recycle,
            configure=_prove,
        )
        self.close = self._pool.close

    def allow(self, borrowers: int) -> None:
        """Lend to at most `borrowers` at once, if that is fewer than there are sessions: other threads stay free."""
        self._gate.narrow(borrowers)

    @contextmanager
    def borrow(self) -> Iterator[db.Connection]:
        """A session for one request, which must end within PG_COMMAND_TIMEOUT and MARGIN_SEC from now.

        The session is in autocommit; behind a pooler the block is one transaction (db.in_force). Raises an error for
        which db.is_passing holds when the database is away or too slow, at once where it has not answered other
        requests; raises migrations.SchemaError while the schema does not fit this code.
        """
        until = monotonic() + self._request_sec
        with self._gate.passed(until), self._lent() as conn:
            conn.answer_within, conn.answer_by = self._request_sec, until
            try:
                with db.in_force(conn):
                    if not self._schema_is_checked:
                        migrations.check(conn)
                        self._schema_is_checked = True
                    yield conn
            except errors.DiskFull:
                db.Connection.disk_full_at = monotonic()
                raise
            finally:
                conn.answer_within, conn.answer_by = PROBE_SEC, None

    def _lent(self) -> AbstractContextManager[db.Connection]:
        if not self._settings.pg_use_pool:
            return self._new()
        self._pool.open(wait=False)  # at its first use, because its threads would not survive gunicorn's fork
        return self._pool.connection(timeout=CONNECT_SEC)

    def _new(self) -> db.Connection:
        """A session for one request, for a server-side pool such as PgBouncer.

        A request asks the host that answered last; where that one fails, the next request asks the next host.
        """
        asked = self._current
        try:
            return db.connect(
                self._hosts[asked],
                name="dl-api",
                schema=self._settings.pg_schema_queue,
                connect_timeout=CONNECT_SEC,
                statement_timeout=self._settings.pg_command_timeout,
            )
        except Exception:
            self._current = (asked + 1) % len(self._hosts)
            raise


def _prove(conn: db.Connection) -> None:
    """Read once from a new session whether it is direct, which every request needs."""
    conn.answer_within = CONNECT_SEC
    conn.is_direct  # noqa: B018  the property caches its value
    conn.answer_within = PROBE_SEC
