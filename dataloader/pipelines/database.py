"""`load.database`: the rows of a query in SQLite, DuckDB, MySQL or MariaDB into a table, by key, all of it or nothing.

The drivers are Python's own, DuckDB's export of Arrow (its tuples change infinities and months) and PyMySQL: connectorx
refuses decimals of ten places, panics with the value of a zero date, and repeats a wrong password for 30 s, and ADBC's
driver of SQLite rounds numbers. A driver waits in a thread, so a run has safe points while its database is silent.
"""

from __future__ import annotations

import re
import socket
import sqlite3
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from pydantic import Field

from dataloader import config, log
from dataloader.pipelines import Context, PermanentError, Progress, cursor, register, validated
from dataloader.pipelines.columns import Type, Values
from dataloader.pipelines.csv_table import Source
from dataloader.pipelines.cursor import Origin
from dataloader.pipelines.http import Unreachable, required
from dataloader.pipelines.postgres import load_postgres
from dataloader.pipelines.rows import Frames, Rows

_CONNECT_SEC = 10
_SLICE_SEC = 0.2  # between two safe points while the source is silent
_AT_ONCE = 1_000  # rows
# A session whose times are in UTC, which may only read, and which waits while the target is slow.
_OF_MYSQL = "SET time_zone = '+00:00', net_write_timeout = 3600"
_READ_ONLY = "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY"
# DuckDB reads and writes any file of its machine, unless it is told not to.
_OF_DUCKDB: dict[str, Any] = {"enable_external_access": "false", "lock_configuration": "true"}
_OF_TLS = ("ssl_ca", "ssl_cert", "ssl_key", "ssl_key_password", "ssl_verify_cert", "ssl_verify_identity")
# Another attempt may heal these classes of errors, except for the faults of a query in these SQLSTATEs or of SQLite.
_PASSING = {"OperationalError", "InternalError", "InterfaceError"}
_OF_VALUES = {"DataError", "InvalidInputException"}  # these show values also without quotes
_FAULTS = ("42", "22", "21", "25", "SQLITE_ERROR", "SQLITE_READONLY", "SQLITE_NOTADB")
# The types of a cursor's column; those of PostgreSQL are for its lag.
_KINDS: dict[type, str] = {
    **{int: "numeric", Decimal: "numeric", float: "double precision", str: "text"},
    **{date: "date", datetime: "timestamp"},
}
_POSTGRES = ("", "postgres", "postgresql")
_NO_ROWS = "query: should be the name of a table, or one SELECT"
T = TypeVar("T")


class Wanted(cursor.Wanted, Values):
    """The `args` of `load.database`; docs/loaders.md explains each."""

    types: dict[str, Type] = Field(default_factory=dict)


@register("load.database", spares_attempts=True)
def load_database(args: dict[str, Any], context: Context) -> Generator[Progress | None, None, Progress]:
    """Load the rows of `query`, a SELECT or the name of a table, with the promises of `load.postgres`.

    A source that is a PostgreSQL is loaded by that. A query that the source refuses, a missing driver and an unknown
    kind of database raise PermanentError, and a source that does not answer raises Unreachable.
    """
    name = validated(Origin, {key: args[key] for key in ("source", "query") if key in args}).source
    variable = config.SOURCES + name.upper()
    url = required(variable, config.source_url(name))
    log.learn_secret(url)
    try:
        parts = urlsplit(url)
        _ = parts.scheme in _POSTGRES or parts.port  # a wrong port raises; a PostgreSQL may have several
    except ValueError:  # its words show a part of the password
        raise PermanentError(f"{variable} should be a URL; percent-encode its password") from None
    if (scheme := parts.scheme) in _POSTGRES:
        return (yield from load_postgres(args, context))
    if scheme not in _DRIVERS:
        kinds = ", ".join(_DRIVERS)
        raise PermanentError(f"{variable} should be a URL of {kinds} or postgresql, as mysql://USER:PASSWORD@host/db")
    wanted = validated(Wanted, args)
    return (yield from cursor.load(context, wanted, partial(_DRIVERS[scheme], parts, wanted, context.check)))


class Session:
    """A session in a source, which may only read. Each wait for an answer is a safe point."""

    _place, _quote = "?", '"'  # of a parameter, of a name

    def __init__(self, url: SplitResult, wanted: Wanted, check: Callable[[], None]) -> None:
        """Raises PermanentError without the driver, Unreachable without an answer of the source."""
        query, self._name, self._check = wanted.query.strip(), wanted.source, check
        self._variable = config.SOURCES + wanted.source.upper()
        query = query.rstrip("; \n")  # it may be put into brackets
        self._query = f"SELECT * FROM {query}" if re.fullmatch(r"[\w.]+", query) else query  # noqa: S608
        self._parts, self._path, self._types = url, unquote(url.path), wanted.types
        self._written = wanted.model_copy(update={"timezone": wanted.timezone or "UTC"})  # as SQLite's own functions
        self._values: list[Any] = []  # of the query's parameters
        self._like: Any = None  # a value of the cursor's column
        self._thread = ThreadPoolExecutor(1, "dl-source")
        self._conn: Any = None
        try:
            self._conn = self._ask(self._connected)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the session, behind a call that was interrupted."""
        self._thread.shutdown()
        with suppress(Exception):  # the server may be gone
            self._conn.close()

    def rows(self) -> Source:
        """The rows of the query, with the types of the first ones."""
        source = self._opened_rows()
        source.origin, source.names_columns = f"source {self._name}", "query"
        if unknown := self._types.keys() - source.columns.keys():
            raise PermanentError(f"types: {min(unknown)} should be in the query")
        source.columns = {**source.columns, **self._types}
        return source

    def kind_of(self, column: str) -> str | None:
        """As in cursor.Rows. A text that is a time may have a lag of time, for SQLite has no other times."""
        rows = f"FROM ({self._query}\n) AS dl_rows"
        if column not in [each[0] for each in self._all(f"SELECT * {rows} LIMIT 0")[0]]:
            raise KeyError(column)
        name = self._named(column)
        described, values = self._all(f"SELECT {name} {rows} WHERE {name} IS NOT NULL ORDER BY 1 DESC LIMIT 1")
        if not values:
            return None
        self._like = like = values[0][0]
        if type(like) not in _KINDS or str(described[0][1]).endswith("_NS"):
            raise PermanentError(f"cursor: {column} should be a text, a number, or a time without nanoseconds")
        is_time = isinstance(like, str) and re.match(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d|$)", like)
        return "timestamp" if is_time else "timestamptz" if getattr(like, "tzinfo", None) else _KINDS[type(like)]

    def limit(self, column: str, mark: str | None, least: str | None, is_once: bool) -> tuple[str | None, bool]:
        """As in cursor.Rows."""
        place = None if mark is None else self._place
        facts, query = cursor.statements(self._query, self._named(column), place, place, is_once)
        if isinstance(self._like, str) and mark and least and least != mark:  # in the mark's form, to the second
            least = f"{least[:10]}{mark[10:11]}{least[11:19]}"[: len(mark)]
        try:
            last, values = ([] if text is None else [_typed(text, self._like)] for text in (mark, least))
            [(most, nulls)] = self._all(facts, last)[1]
            self._query, self._values = query, values
            return None if most is None else str(_typed(str(most), self._like)), nulls > 0
        except (ValueError, ArithmeticError):
            raise PermanentError(f"cursor: {column} and its state should be values of one type") from None

    def _opened_rows(self) -> Source:
        result = self._ask(partial(self._executed, self._query, self._values))
        if result.description is None:
            raise PermanentError(_NO_ROWS)

        def fetched() -> Iterator[Any]:
            while some := self._ask(partial(result.fetchmany, _AT_ONCE)):
                yield from some

        return Rows(fetched(), [each[0] for each in result.description], self._written)

    def _all(self, statement: str, values: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
        """The description and the rows of a result."""
        result = self._ask(partial(self._executed, statement, values))
        return result.description, list(self._ask(result.fetchall))

    def _named(self, column: str) -> str:
        return f"dl_rows.{self._quote}{column.replace(self._quote, self._quote * 2)}{self._quote}"

    def _connected(self) -> Any:
        raise NotImplementedError

    def _executed(self, statement: str, values: Sequence[Any]) -> Any:
        """The driver's cursor of a statement. All statements are in one transaction."""
        return self._conn.execute(statement, values)

    def _interrupt(self) -> None:
        self._conn.interrupt()

    def _ask(self, call: Callable[[], T]) -> T:
        """The result of the call. Its errors become ours, and these quote no value."""
        answer = self._thread.submit(call)
        try:
            while not wait([answer], _SLICE_SEC).done:
                self._check()
        except BaseException:
            if self._conn is not None:
                with suppress(Exception):
                    self._interrupt()
            raise
        if (error := answer.exception()) is None:
            return answer.result()
        if isinstance(error, ImportError):
            raise PermanentError(f"source: needs {error.name}: pip install 'dataloader-farm[databases]'")
        if not {"Error", "ArrowException"} & (kinds := {each.__name__ for each in type(error).__mro__}):
            raise error
        state = str(getattr(error, "sqlstate", None) or getattr(error, "sqlite_errorname", ""))
        is_passing = bool(kinds & _PASSING) and not state.startswith(_FAULTS)
        words = str(error.args[-1] if error.args else error).partition("\n")[0]
        is_of_values = bool(kinds & _OF_VALUES)
        words = _without_values(words, "" if is_of_values else self._query)
        if is_of_values:
            words = re.sub(r"(?<!\w)-?\d.*", "...", words)
        if self._conn is None:
            words += f"; its URL is in {self._variable}"
        raise (Unreachable if is_passing else PermanentError)(f"source {self._name}: {words}")


def _typed(text: str, like: Any) -> Any:
    """PURE: the value of a text, of the type of another value; raises ValueError or ArithmeticError."""
    if isinstance(like, datetime):
        at = datetime.fromisoformat(text)
        return at.astimezone(UTC) if like.tzinfo and at.tzinfo else at.replace(tzinfo=like.tzinfo and UTC)
    if isinstance(like, date):
        return date.fromisoformat(text)
    if isinstance(like, str | float | Decimal):
        return type(like)(text)
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def _without_values(words: str, query: str) -> str:
    """PURE: a message up to its first quoted word that is not in the query."""
    for match in re.finditer(r"""(?<!\w)(['"])(.*?)\1""", words):
        name = match[2].rpartition(".")[2]
        if not name or not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", query):
            return f"{words[: match.start()]}{match[1]}...{match[1]}"
    return words


class _Sqlite(Session):
    def _connected(self) -> Any:
        conn = sqlite3.connect(f"file:{quote(self._path)}?mode=ro", uri=True, check_same_thread=False)
        conn.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")  # Rows names what is no text
        conn.set_authorizer(_reads)
        conn.execute("BEGIN")
        return conn


def _reads(action: int, _: str | None, value: str | None, *__: str | None) -> int:
    """PURE: whether SQLite may do this. ATTACH and VACUUM make files; a PRAGMA with a value may bind the process."""
    is_pragma = action == sqlite3.SQLITE_PRAGMA and value is not None
    return sqlite3.SQLITE_DENY if is_pragma or action == sqlite3.SQLITE_ATTACH else sqlite3.SQLITE_OK


class _DuckDb(Session):
    def _connected(self) -> Any:
        import duckdb

        return duckdb.connect(self._path, read_only=True, config=_OF_DUCKDB)

    def _opened_rows(self) -> Source:
        is_one = len(self._ask(lambda: self._conn.extract_statements(self._query))) == 1
        if not is_one or (result := self._ask(lambda: self._conn.sql(self._query, params=self._values))) is None:
            raise PermanentError(_NO_ROWS)
        for name, kind in zip(result.columns, map(str, result.types), strict=True):
            if kind in ("TIME WITH TIME ZONE", "BIT", "BIGNUM"):
                reason = f"DuckDB gives a part of {name}, a {kind}: select CAST({name} AS text) AS {name}"
                raise PermanentError(f"query: {reason}")
        source = Frames(self._ask(lambda: result.to_arrow_reader(_AT_ONCE)), self._written)
        stream = source.batches

        def batches() -> Iterator[Any]:
            while (batch := self._ask(partial(next, stream, None))) is not None:
                yield batch

        source.batches = batches()
        return source


class _MySql(Session):
    _place, _quote = "\0", "`"  # no query has a zero
    _result: Any = None

    def _connected(self) -> Any:
        conn = self._opened()
        conn.cursor().execute(_READ_ONLY)
        conn._read_timeout = None  # a query may take its time
        return conn

    def _opened(self) -> Any:
        """A connection that waits no longer than _CONNECT_SEC for each answer."""
        import pymysql
        from pymysql.constants.FIELD_TYPE import TIMESTAMP
        from pymysql.converters import conversions, convert_datetime

        def instant(text: Any) -> Any:
            at = convert_datetime(text)  # a zero date stays text, which PostgreSQL refuses
            return at.replace(tzinfo=UTC) if isinstance(at, datetime) else at

        parts = self._parts
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        if not given.keys() <= set(_OF_TLS):
            raise PermanentError(f"{self._variable} should have only {', '.join(_OF_TLS)} behind its ?")
        # PyMySQL checks nothing by a CA alone, and takes the word false for true.
        checks = {"ssl_verify_cert": True, "ssl_verify_identity": True} if "ssl_ca" in given else {}
        tls: Any = checks | {name: value.lower() not in ("false", "0", "no") and value for name, value in given.items()}
        try:
            return pymysql.connect(
                host=parts.hostname or "",
                port=parts.port or 3306,
                user=unquote(parts.username or ""),
                password=unquote(parts.password or ""),
                database=self._path.strip("/"),
                conv={**conversions, TIMESTAMP: instant},
                connect_timeout=_CONNECT_SEC,
                read_timeout=_CONNECT_SEC,
                cursorclass=pymysql.cursors.SSCursor,
                init_command=_OF_MYSQL,
                **tls,
            )
        except OSError as e:  # PyMySQL's own errors are none
            files = ", ".join(name for name in _OF_TLS[:3] if name in given)
            why = f"{files} should name PEM files that this worker can read ({e.strerror})"
            raise Unreachable(f"{self._variable}: {why}") from None

    def _executed(self, statement: str, values: Sequence[Any]) -> Any:
        from pymysql.constants.FIELD_TYPE import FLOAT

        result = self._conn.cursor()
        result.execute(statement.replace("%", "%%").replace(self._place, "%s"), values)
        self._result = result._result
        for name, kind, *_ in result.description or ():
            if kind == FLOAT:
                raise PermanentError(f"query: MySQL rounds {name}, a FLOAT: select {name} + 0e0 AS {name}")
        return result

    def close(self) -> None:
        if self._result is not None:
            self._result.unbuffered_active = False  # else PyMySQL reads all other rows first
        super().close()

    def _interrupt(self) -> None:
        try:
            with closing(self._opened()) as other:
                other.cursor().execute(f"KILL {self._conn.thread_id()}")
        finally:  # a lost server ends no query
            self._conn._sock.shutdown(socket.SHUT_RDWR)


_DRIVERS: dict[str, type[Session]] = {"sqlite": _Sqlite, "duckdb": _DuckDb, "mysql": _MySql, "mariadb": _MySql}
