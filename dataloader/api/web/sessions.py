"""The API's database sessions, lent for a limited time; the schema is checked before the first use.

The limits together keep a promise: a request is answered within 3 s, with PG_COMMAND_TIMEOUT at its default of 2 s,
although the database is stopped, frozen or out of reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from time import monotonic

from dataloader.api.web.gate import Gate
from dataloader.config import ConfigError, Settings
from dataloader.queue import db, migrations

CONNECT_SEC = 2.0  # waiting for a session
PROBE_SEC = 0.7  # each test of an idle session
# A request has PG_COMMAND_TIMEOUT and this long, from the wait for a session to the last answer. The server gives up
# first: a slow statement is rolled back, and its outcome is known.
MARGIN_SEC = 0.8


class Sessions:
    """Lends sessions of the queue's database to requests, from a pool or (PG_USE_POOL=false) one for each."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError when no database is configured; opens nothing yet."""
        dsn = settings.queue_dsn
        if dsn is None:
            raise ConfigError("no database is configured: set DL_DB_DSN or PG_HOST, or run `dataloader up`")
        self._request_sec = settings.pg_command_timeout + MARGIN_SEC
        self._schema_is_checked = False
        self._lender = _Pooled(dsn, settings) if settings.pg_use_pool else _Single(dsn, settings)
        self.close = self._lender.close
        self._gate = Gate(settings.pg_pool_size + settings.pg_max_overflow)

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
        with self._gate.passed(until), self._lender.lend() as conn:
            conn.answer_within, conn.answer_by = self._request_sec, until
            try:
                with db.in_force(conn):
                    self._check_schema_once(conn)
                    yield conn
            finally:
                conn.answer_within, conn.answer_by = PROBE_SEC, None

    def _check_schema_once(self, conn: db.Connection) -> None:
        if not self._schema_is_checked:
            migrations.check(conn)
            self._schema_is_checked = True


class _Pooled:
    """PG_POOL_SIZE open sessions, and up to PG_MAX_OVERFLOW more while they are needed."""

    def __init__(self, dsn: str, settings: Settings) -> None:
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

    @contextmanager
    def lend(self) -> Iterator[db.Connection]:
        # The pool opens at its first use, because its threads would not survive gunicorn's fork.
        self._pool.open(wait=False)
        with self._pool.connection(timeout=CONNECT_SEC) as conn:
            yield conn

    def close(self) -> None:
        """Close the sessions and end the pool's threads, for good."""
        self._pool.close()


class _Single:
    """A new session for each request, for a server-side pool such as PgBouncer."""

    def __init__(self, dsn: str, settings: Settings) -> None:
        self._schema = settings.pg_schema_queue
        self._statement_timeout = settings.pg_command_timeout
        self._hosts = db.hosts(dsn)
        self._best = self._hosts[0]  # the host that answered last
        most = len(self._hosts) * (settings.pg_pool_size + settings.pg_max_overflow)
        # Threads connect, because connect_timeout counts for each host: a silent one would take all of the time.
        self._dialers = ThreadPoolExecutor(most, "dl-api-connect")

    @contextmanager
    def lend(self) -> Iterator[db.Connection]:
        with self._dialed() as conn:
            yield conn

    def _dialed(self) -> db.Connection:
        """A session with the best host, or after half of the time with the first host that answers."""
        best, until = self._best, monotonic() + CONNECT_SEC
        dials = {self._dial(best): best}
        answered = _answered(dials, CONNECT_SEC / 2)
        if answered is None:
            dials |= {self._dial(host): host for host in self._hosts if host != best}
            answered = _answered(dials, until - monotonic())
        failures = [dial.exception() for dial in dials if dial.done()]
        for dial in dials.keys() - {answered}:
            dial.cancel()
            dial.add_done_callback(_hang_up)
        if answered:
            self._best = dials[answered]
            return answered.result()
        if len(failures) == len(dials) and failures[0]:
            raise failures[0]
        raise db.Silence(f"no session with the database within {CONNECT_SEC:g} s")

    def _dial(self, host: str) -> Future[db.Connection]:
        return self._dialers.submit(self._connect, host)

    def _connect(self, host: str) -> db.Connection:
        return db.connect(
            host,
            name="dl-api",
            schema=self._schema,
            connect_timeout=CONNECT_SEC,
            statement_timeout=self._statement_timeout,
        )

    def close(self) -> None:
        """Wait for the connection attempts in progress."""
        self._dialers.shutdown()


def _prove(conn: db.Connection) -> None:
    """Read once from a new session whether it is direct, which every request needs."""
    conn.answer_within = CONNECT_SEC
    conn.is_direct  # noqa: B018  the property caches its value
    conn.answer_within = PROBE_SEC


def _answered(dials: Iterable[Future[db.Connection]], seconds: float) -> Future[db.Connection] | None:
    """The first attempt that succeeds within `seconds`."""
    with suppress(TimeoutError):
        for dial in as_completed(dials, max(0.0, seconds)):
            if not dial.exception():
                return dial
    return None


def _hang_up(future: Future[db.Connection]) -> None:
    if not future.cancelled() and not future.exception():
        future.result().close()
