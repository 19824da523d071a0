"""PostgreSQL connections: how to open one, how long a server may stay silent, which errors pass; named statements."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache, cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from random import shuffle
from time import monotonic
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar

import psycopg
from psycopg import errors
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Loader
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo, Format
from psycopg.rows import dict_row
from psycopg.types.json import set_json_loads
from psycopg_pool import ConnectionPool, PoolTimeout, TooManyRequests
from tenacity import Retrying, retry_if_exception, wait_random_exponential

from dataloader import log, periods
from dataloader.queue import fields

Error = psycopg.Error
Conn = psycopg.Connection[Any]  # one of ours, or a caller's
Row = dict[str, Any]
T = TypeVar("T")

CANCEL_SEC = 2.0  # time limit of a request to cancel an abandoned statement

# The queue's statements rely on these settings, which may differ from those of the server, database or role: each
# statement of a function has its own snapshot, and psycopg reads times in this style only.
_RELIED_ON = {"default_transaction_isolation": "read committed", "DateStyle": "ISO", "quote_all_identifiers": "off"}

EARLIEST, LATEST = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)  # the same in dl_readable
PREPARE_THRESHOLD = 5  # a direct session prepares a statement that comes more often: planning takes longer than most

RECONNECT_SEC = periods.seconds("RECONNECT_SEC", 5.0)  # the longest pause between two tries of `patiently`

# Then a pool leaves the next attempt to its next user, instead of backing off for minutes.
POOL_RECONNECT_SEC = 1.5
REFUSED_SEC = periods.seconds("REFUSED_SEC", 60.0)  # for how long a refusal explains that no session can be had

DISK_FULL_SEC = 60.0  # for how long a write that failed for lack of space counts
# Where no row can be written, the session's name tells other processes of it, and when (stats.fitness).
_DISK_FULL = """
SELECT pg_catalog.set_config('application_name', pg_catalog.left(pg_catalog.current_setting('application_name'), 45)
       || ' full@' || pg_catalog.floor(extract(epoch FROM pg_catalog.clock_timestamp()))::bigint, false)"""
_SET = "SELECT pg_catalog.set_config(key, value, true) FROM pg_catalog.json_each_text(%s::pg_catalog.json)"

# Outages that a new connection heals in time (PostgreSQL, appendix A): connection exceptions, shutdown and crash
# recovery, a timeout that ends sessions, a demoted primary, too many connections, a full disk.
_OUTAGE = ("08", "57P", "25P03", "25P04", "25006", "53", "58030")
# Of these, what one statement may meet while the server serves others: too little memory or room for locks, a limit on
# temporary files, a block that cannot be read.
_LIMIT = ("53200", "53400", "58030")
# Near a wraparound these functions of the server refuse each write by 54000; its other errors are of a statement.
_REFUSES_IDS = ("GetNewTransactionId", "GetNewMultiXactId")
# Another session is in the way: serialization, deadlock, a lock that is held, a statement that was canceled.
_CONTENTION = ("40001", "40P01", "55P03", "57014")


class Silence(errors.OperationalError):
    """The server has not answered within the time that this connection allows."""


class Connection(psycopg.Connection[Any]):
    """A psycopg connection whose every wait ends: after its deadline it is closed, and raises Silence.

    Neither TCP keepalives nor `statement_timeout` see a stopped backend, or a dead host whose kernel acknowledges.
    """

    answer_within: float = 60.0  # seconds, for each answer
    answer_by: float | None = None  # a monotonic instant, for all of them
    # Of this process: why the latest try to connect failed; the monotonic instant of a write that found the disk full.
    refusal: ClassVar[tuple[float, str]] = (-math.inf, "")
    disk_full_at: ClassVar[float] = -math.inf
    wanted: Mapping[str, str] = MappingProxyType({})  # the settings that this session was opened with, see in_force

    @classmethod
    def connect(cls, *args: Any, **kwargs: Any) -> Self:
        """As psycopg's; a pool's PoolTimeout does not say why it has no connection, so `refusal` does."""
        try:
            conn = super().connect(*args, **kwargs)
        except Error as e:
            # Everybody may ask /ready: only the words of server or system, without host, port, role and database.
            reason = re.search(r"failed: (?:.*failed: )?(.*)", str(e))
            words = re.sub(r" for host .*|[\"„«»][^\"“”«»]*[\"“”«»]", "…", reason[1]) if reason else ""
            words = words.replace("No such file or directory", "its socket does not exist: no server runs there")
            cls.refusal = (monotonic(), " ".join(words.split()))
            raise
        cls.refusal = (-math.inf, "")
        return conn

    def notifies(self, **limits: Any) -> Generator[psycopg.Notify]:
        """As psycopg's, which asks the socket alone: first what libpq has read behind the answer of a statement."""
        while note := self.pgconn.notifies():
            if self.pgconn.notify_handler:
                self.pgconn.notify_handler(note)
        return super().notifies(**limits)

    @cached_property
    def is_direct(self) -> bool:
        """True when PostgreSQL itself opened this session: a pooler hands out cancellation keys of its own making.

        One round trip, once. Statements are prepared from then on; behind a pooler a name may be another client's.
        """
        is_direct: bool = self.execute("SELECT pg_backend_pid()").fetchone() == (self.info.backend_pid,)
        if is_direct:
            self.prepare_threshold = PREPARE_THRESHOLD
        return is_direct

    @cached_property
    def repeating(self) -> psycopg.Cursor[Any]:
        """A cursor for a statement that comes again and again: it does not read the types of its columns again."""
        return self.cursor()

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        seconds = self.answer_within
        if self.answer_by is not None:
            seconds = min(seconds, max(0.05, self.answer_by - monotonic()))
        try:
            return super().wait(gen, interval, seconds)
        except errors.OperationalError as e:
            if type(e) is not errors._WaitTimeout:
                raise
            self.pgconn.finish()
            raise Silence(f"no answer from the database within {seconds:.1f} s") from None
        except BaseException as e:
            if not isinstance(e, Exception):
                with suppress(Error):
                    self.cancel_safe(timeout=CANCEL_SEC)
                self.pgconn.finish()
            raise


class _Readable(Loader):
    """Reads a time that Python does not know, such as infinity, as the nearest that people's time zones can show."""

    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        self._plainly = psycopg.adapters.get_loader(oid, Format.TEXT)(oid, context).load  # type: ignore[misc]

    def load(self, data: Buffer) -> datetime:
        try:
            at: datetime = self._plainly(data)
            return max(EARLIEST, min(at, LATEST))
        except (psycopg.DataError, OverflowError):
            return _nearest(bytes(data).decode())


def parsed(text: str | bytes) -> Any:
    """JSON as PostgreSQL has it; a number too long for Python is left as text, and what is nested too deep is cut."""
    try:
        return json.loads(text)
    except RecursionError:
        return {"…": f"nested too deep to be shown: {len(text)} characters"}
    except ValueError:
        return json.loads(text, parse_int=str)


def instant(text: str) -> datetime:
    """The time that PostgreSQL has written into JSON, or the nearest one that Python knows."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return _nearest(text)


def _nearest(text: str) -> datetime:
    return EARLIEST if text.startswith("-") or text.endswith("BC") else LATEST


def _read_anything(conn: Connection) -> None:
    conn.adapters.register_loader("timestamptz", _Readable)
    set_json_loads(parsed, conn)


def connect(
    dsn: str,
    *,
    name: str,
    schema: str,
    connect_timeout: float = 5,
    answer_within: float = 60,
    statement_timeout: float = 0,
    lock_timeout: float = 0,
    idle_in_transaction_timeout: float = 60,
    keeps_defaults: bool = False,
) -> Connection:
    """Open an autocommit session on `schema`, in UTC, that notices a dead link within some 15 s.

    Times are in seconds; 0 is without limit, unless the DSN's own options set one. `keeps_defaults`: the role's
    settings stay, for pipelines. A multi-host DSN finds the writable primary. Raises OperationalError, without the
    password.
    """
    limits = {
        "statement_timeout": statement_timeout,
        "lock_timeout": lock_timeout,
        "idle_in_transaction_session_timeout": idle_in_transaction_timeout,
    }
    conninfo, wanted = _conninfo(dsn, name, schema, connect_timeout, limits, keeps_defaults)
    conn = Connection.connect(conninfo, autocommit=True, prepare_threshold=None)
    conn.answer_within, conn.wanted = answer_within, wanted
    if not keeps_defaults:  # a run's session in the target keeps the name by which later runs find it
        if monotonic() - Connection.disk_full_at < DISK_FULL_SEC:
            conn.execute(_DISK_FULL)
        _read_anything(conn)
    return conn


def pool(
    dsn: str,
    *,
    name: str,
    schema: str,
    max_size: int,
    min_size: int = 1,
    connect_timeout: float = 5,
    statement_timeout: float = 30,
    max_lifetime: float = 1800,
    configure: Callable[[Connection], None] = lambda conn: None,
) -> ConnectionPool[Connection]:
    """A pool, not yet open, of sessions as `connect` makes them; it is emptied where a tested one is dead."""

    def check(conn: Connection) -> None:
        try:
            ConnectionPool.check_connection(conn)
        except psycopg.Error:
            made.drain()
            raise

    limits = {"statement_timeout": statement_timeout, "lock_timeout": 0, "idle_in_transaction_session_timeout": 60}
    conninfo, wanted = _conninfo(dsn, name, schema, connect_timeout, limits)

    def configured(conn: Connection) -> None:
        conn.wanted = wanted
        _read_anything(conn)
        configure(conn)

    made = ConnectionPool(
        conninfo,
        connection_class=Connection,
        kwargs={"autocommit": True, "prepare_threshold": None},
        min_size=min(min_size, max_size),
        max_size=max_size,
        timeout=2,
        max_lifetime=max_lifetime,
        reconnect_timeout=POOL_RECONNECT_SEC,
        check=check,
        configure=configured,
        open=False,
    )
    return made


@contextmanager
def in_force(conn: Connection) -> Iterator[None]:
    """For this block the settings hold that `conn` was opened with, its search_path among them.

    A pooler drops them, so behind one the block is a transaction that sets them for itself.
    """
    if conn.is_direct:
        yield
        return
    conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED  # set by BEGIN: a transaction's default is too late
    with conn.transaction():
        conn.execute(_SET, (json.dumps(dict(conn.wanted)),))
        yield


def _conninfo(
    dsn: str, name: str, schema: str, connect_timeout: float, limits: Mapping[str, float], keeps_defaults: bool = False
) -> tuple[str, dict[str, str]]:
    wanted = {"search_path": '"' + schema.replace('"', '""') + '"', "TimeZone": "UTC"}
    wanted |= {} if keeps_defaults else _RELIED_ON
    wanted |= {limit: str(int(seconds * 1000)) for limit, seconds in limits.items() if seconds}
    given = conninfo_to_dict(dsn)
    options = "-c idle_session_timeout=0"
    for setting, value in wanted.items():
        options += f" -c {setting}=" + value.replace("\\", "\\\\").replace(" ", "\\ ")
    # The server's side of a dead link, or of a client that gave up: it lets go of our locks in well under a minute.
    options += " -c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"
    options += " -c tcp_user_timeout=15000 -c client_connection_check_interval=2000"
    ours: dict[str, Any] = {
        "application_name": name[:63],
        "connect_timeout": max(2, round(connect_timeout)),
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 15_000,
        "target_session_attrs": "read-write",
    }
    if not keeps_defaults:
        ours["client_encoding"] = "utf8"
    ours |= {key: value for key, value in given.items() if key in ours and key != "application_name"}
    unlimited = " ".join(f"-c {limit}=0" for limit, seconds in limits.items() if not seconds)
    ours["options"] = f"{unlimited} {given.get('options') or ''} {options}".strip()
    return make_conninfo(dsn, **ours), wanted


def shown(dsn: str) -> str:
    """The DSN as people may see it: without its password."""
    secret = {option.keyword.decode() for option in Conninfo.get_defaults() if option.dispchar == b"*"}
    parts = {k: v for k, v in conninfo_to_dict(dsn).items() if k not in secret}
    return make_conninfo("", **parts)


def hosts(dsn: str) -> list[str]:
    """A DSN for each host that this one names, in the order in which they are to be tried."""
    given = conninfo_to_dict(dsn)
    named = {key: str(given[key]).split(",") for key in ("host", "hostaddr", "port") if given.get(key)}
    count = max(map(len, named.values()), default=1)
    if any(len(values) not in (1, count) for values in named.values()):
        return [dsn]  # libpq will report the fault
    each = [{key: values[n % len(values)] for key, values in named.items()} for n in range(count)]
    if given.get("load_balance_hosts") == "random":
        shuffle(each)
    return [make_conninfo(dsn, **one) for one in each]


def words(error: psycopg.Error) -> str:
    """The error in one line, with its secrets masked."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return log.masked("; ".join(filter(None, lines)))


def reason(error: BaseException) -> str:
    """The server's own words on a passing error, or on the latest try to connect; empty where it does not answer."""
    if isinstance(error, Error) and error.sqlstate:
        return log.masked(error.diag.message_primary or "")
    at, reason = Connection.refusal
    return log.masked(reason) if monotonic() - at < REFUSED_SEC else ""


def is_passing(error: BaseException) -> bool:
    """True when a new connection may heal the error: the session or the server is gone, not the statement."""
    is_contended = isinstance(error, psycopg.Error) and (error.sqlstate or "").startswith(_CONTENTION)
    return is_contended or is_outage(error)


def is_outage(error: BaseException) -> bool:
    """True when the session or the server is gone, or does no work, and a new connection may heal that."""
    if isinstance(error, PoolTimeout | TooManyRequests):
        return True
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return error.sqlstate.startswith(_OUTAGE) or error.diag.source_function in _REFUSES_IDS


def is_limit(error: BaseException) -> bool:
    """True for an outage that may be one of this statement alone."""
    return isinstance(error, psycopg.Error) and error.sqlstate in _LIMIT


def patiently(
    attempt: Callable[[], T], *, sleep: Callable[[float], None], give_up: Callable[[], bool] = lambda: False
) -> T:
    """Call `attempt` until it succeeds, over passing errors, with pauses up to RECONNECT_SEC, unless `give_up()`."""
    retrying = Retrying(
        retry=retry_if_exception(is_passing),
        wait=wait_random_exponential(multiplier=0.1, max=RECONNECT_SEC),
        stop=lambda state: give_up(),
        sleep=sleep,
        reraise=True,
    )
    return retrying(attempt)


def sql_folder() -> Traversable:
    """The folder of .sql files: part of an installed package, beside the package in a bare checkout."""
    try:
        return files("dataloader.sql")
    except ModuleNotFoundError:
        return Path(__file__).parents[2] / "sql"


def by_index(conn: Conn, *, bitmaps: bool = False, sorts: bool = True) -> None:
    """Until the commit: read by indexes whatever the statistics say, in their order where there are no `sorts`."""
    conn.execute(
        "SELECT set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true),"
        " set_config('enable_bitmapscan', %s, true), set_config('enable_sort', %s, true)",
        (str(bitmaps), str(sorts)),
    )


def give_up_after(conn: Conn, seconds: float, lock_sec: float | None = None) -> None:
    """Until the commit: a statement fails after so many seconds, a wait for a lock after `lock_sec`."""
    conn.execute(
        "SELECT set_config('statement_timeout', %s, true),"
        " set_config('lock_timeout', coalesce(%s, current_setting('lock_timeout')), true)",
        (f"{seconds * 1_000:.0f}ms", None if lock_sec is None else f"{lock_sec * 1_000:.0f}ms"),
    )


def rows(
    conn: Conn, statement: str, parameters: Mapping[str, Any] | None = None, *, prepare: bool | None = None
) -> list[Row]:
    """The rows of a statement as dicts; with `prepare` False it is planned anew each time, for these values."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement.encode(), parameters, prepare=prepare).fetchall()


class Statements(dict[str, str]):
    """The statements of a file by name. `rows` plans them anew each time, for these values."""

    def do(self, conn: Conn, statement: str, /, **parameters: Any) -> int:
        """Carry out a statement; returns the number of its rows."""
        return conn.execute(self[statement].encode(), parameters).rowcount

    def rows(self, conn: Conn, statement: str, /, **parameters: Any) -> list[Row]:
        """The rows of a statement."""
        return rows(conn, self[statement], parameters, prepare=False)

    def first(self, conn: Conn, statement: str, /, **parameters: Any) -> Row | None:
        """The first row of a statement, or None."""
        return next(iter(self.rows(conn, statement, **parameters)), None)

    def value(self, conn: Conn, statement: str, /, **parameters: Any) -> Any:
        """The first value of a statement; None without a row."""
        row = self.first(conn, statement, **parameters)
        return next(iter(row.values())) if row else None


def now(conn: Conn) -> datetime:
    """The time of the transaction by the database's clock."""
    ((at,),) = conn.execute("SELECT now()").fetchall()
    time: datetime = at
    return time


def call(conn: Conn, function: str, *arguments: Any) -> list[Any]:
    """The rows of a function of the queue, as tuples."""
    called = f"SELECT * FROM {function}({', '.join(['%s'] * len(arguments))})"  # noqa: S608  a name of ours
    return conn.execute(called.encode(), arguments).fetchall()


def as_text(value: Any) -> str | None:
    """PURE: a value as PostgreSQL reads it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return array(value)
    return value.isoformat() if isinstance(value, datetime) else str(value)


def array(values: Sequence[Any]) -> str:
    """PURE: a list as PostgreSQL reads it."""
    texts = [text and text.replace("\\", "\\\\").replace('"', '\\"') for text in map(as_text, values)]
    return "{" + ",".join(["NULL" if text is None else f'"{text}"' for text in texts]) + "}"


@cache
def statements(file: str, *parts: str) -> Statements:
    """The statements of one `sql/` file, by the name that a line `-- name: verb` gives them.

    Those of `parts` stand in the others in the place of {their name}.
    """
    texts: dict[str, str] = {}
    name = ""
    for line in (sql_folder() / file).read_text("utf-8").splitlines(keepends=True):
        if line.startswith("-- name:"):
            name = line.removeprefix("-- name:").split()[0]
            if name in texts:
                raise ValueError(f"{file} names {name} twice")
            texts[name] = ""
        elif name and not line.startswith("--"):
            texts[name] = texts[name] + line
    texts = {name: fields.filled(text.strip().rstrip(";")) for name, text in texts.items()}
    for part in parts:
        texts = {name: text.replace(f"{{{part}}}", texts[part]) for name, text in texts.items()}
    return Statements(texts)
