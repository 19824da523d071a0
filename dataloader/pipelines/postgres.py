"""`load.postgres`: the rows of a query in another PostgreSQL into a table, by key, all of it or nothing.

The rows stream from `COPY (query) TO STDOUT` in a transaction that may only read, as the CSV records of csv_table. By
default one transaction takes the rows of one. With `resume` they come in the order of the key and in parts. Each wait
for the source is a safe point. No error shows the source's DSN: the operator gives it a name (DL_SOURCE_...).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.postgres import types
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGresult

from dataloader import config
from dataloader.pipelines import Context, PermanentError, Progress, csv_table, cursor, register, validated
from dataloader.pipelines.columns import would_cut
from dataloader.pipelines.csv_table import Place, Source, identifier, is_permanent, reason_of, unique
from dataloader.pipelines.http import Unreachable, required

_CONNECT_SEC = 10
_CANCEL_SEC = 2.0
_FIELD = re.compile(r'(?:"((?:[^"]++|"")*+)"|([^,]*+))(?:,|\Z)')  # of a record; the csv module takes no long ones
# A dead link is noticed within some 15 s; a DSN may set other times.
_LINK = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 15_000}
# What a text of the source means must not depend on its role's settings.
_BEGIN = b"""
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;
SET LOCAL datestyle = 'ISO'; SET LOCAL intervalstyle = 'postgres'; SET LOCAL bytea_output = 'hex';
SET LOCAL extra_float_digits = 3
"""
_READ_ONLY = "25006"
# The types that a new table takes over; another one, such as an enum, is text there.
_TYPES = {
    *("bool", "int2", "int4", "int8", "float4", "float8", "numeric", "text", "varchar", "uuid", "json", "jsonb"),
    *("bytea", "date", "time", "timetz", "timestamp", "timestamptz", "interval", "inet", "cidr"),
}
# What may be shown of libpq's words, which also name the host, the user and the database.
_TROUBLES = (
    *("password authentication failed", "no password supplied", "no pg_hba.conf entry", "does not exist"),
    *("could not translate host name", "Connection refused", "timeout expired", "too many clients", "SSL"),
    *("starting up", "shutting down", "server closed the connection unexpectedly", "Permission denied"),
)


class Wanted(cursor.Wanted):
    """The `args` of `load.postgres`; docs/loaders.md explains each."""

    resume: bool = False


@register("load.postgres", spares_attempts=True)
def load_postgres(args: dict[str, Any], context: Context) -> Generator[Progress | None, None, Progress]:
    """Make the rows of `table` with the query's keys equal to the query's, in one transaction.

    The promises are those of `load.csv`. A query that the source refuses or that would write there raises
    PermanentError too; a source that does not answer raises Unreachable. With a cursor the largest value is written in
    the transaction that writes the rows, and the next job goes on there.
    """
    wanted = validated(Wanted, args)
    if wanted.resume and wanted.cursor:
        raise PermanentError("resume: a load with a cursor is one transaction: leave resume out")
    return (yield from cursor.load(context, wanted, partial(Query, wanted, context)))


class Query(Source):
    """The rows of one query as CSV records, in a session of its own."""

    names_columns = "query"

    def __init__(self, wanted: Wanted, context: Context) -> None:
        """Raises PermanentError for a query that the source does not take, Unreachable without the source."""
        super().__init__(f"source {wanted.source}")
        self._query, self._check = wanted.query.encode(), context.check
        self._key = wanted.key if wanted.resume else []  # of rows in its order, so that others may begin behind one
        self._last: str | None = None  # the latest record
        self._conn = self._connected(wanted.source, f"dl-load:{context.job_id}")
        self._pg = self._conn.pgconn
        try:
            self._ask(lambda: self._pg.send_query(_BEGIN))
            self.columns = self._described()
        except BaseException:
            self.close()
            raise
        query = hashlib.sha256(wanted.query.encode()).hexdigest()
        self.version = [wanted.source, query, self.columns]

    @property
    def has_parts(self) -> bool:
        return bool(self._key)

    def rows(self) -> Source:
        return self

    def kind_of(self, column: str) -> str:
        return self.columns[column]

    def limit(self, column: str, mark: str | None, least: str | None, is_once: bool) -> tuple[str | None, bool]:
        def typed(text: str | None) -> str | None:
            return None if text is None else f"{sql.Literal(text).as_string(self._conn)}::{self.columns[column]}"

        name = sql.Identifier("dl_rows", column).as_string(self._conn)
        facts, rows = cursor.statements(self._query.decode(), name, typed(mark), typed(least), is_once)
        self._query = rows.encode()
        # As a text of SQL, not of the type: a char(n) has blanks there that its comparison with a text does not have.
        facts = f"SELECT most::text, nulls FROM ({facts}) AS dl_facts (most, nulls)"  # noqa: S608
        found = self._ask(lambda: self._pg.send_query(facts.encode()))
        most = found.get_value(0, 0)
        return None if most is None else most.decode(), found.get_value(0, 1) != b"0"

    def close(self) -> None:
        """End the session, and the query if it goes on."""
        if self._pg.transaction_status == TransactionStatus.ACTIVE:
            with suppress(psycopg.Error):
                self._conn.cancel_safe(timeout=_CANCEL_SEC)
        self._conn.close()

    def records(self, begin: Place) -> Iterator[tuple[int, str]]:
        """The rows of one query are those of one state of its database."""
        for (name, given), stored in zip(self.columns.items(), self.stored, strict=False):
            if would_cut(given, stored):
                fault = f"{name} is a {given}, of which the table's {stored} would lose a part"
                raise PermanentError(f"query: {fault}; select CAST({name} AS {stored}) AS {name}")
        self._count = begin.records
        self._ask(lambda: self._pg.send_query(self._copy(begin.mark)))
        for data in self._rows():
            self._last = data[:-1].decode()
            yield self._counted(self._last, len(data))

    def place(self) -> Place:
        """Behind the latest row, with the values of its key where the rows are in its order."""
        place = super().place()
        if self._last is None or not self._key:
            return place
        parts = dict(zip(self.columns, _FIELD.finditer(self._last), strict=False))
        mark = [parts[name][2] if parts[name][1] is None else parts[name][1].replace('""', '"') for name in self._key]
        return place._replace(mark=mark)

    def _connected(self, source: str, name: str) -> psycopg.Connection[Any]:
        variable = config.SOURCES + source.upper()
        dsn = required(variable, config.source_dsn(source))
        given = _LINK | {"connect_timeout": _CONNECT_SEC} | conninfo_to_dict(dsn)
        given |= {"application_name": name, "client_encoding": "utf8"}
        try:
            return psycopg.connect(make_conninfo("", **given), autocommit=True, prepare_threshold=None)
        except psycopg.Error as e:
            why = next((trouble for trouble in _TROUBLES if trouble in str(e)), "there is no connection")
            if re.search("certificate file|private key file", str(e)):
                why = f"{variable} should name files of certificates and keys that this worker can read"
            raise Unreachable(f"{self.origin} cannot be reached: {why}") from None

    def _described(self) -> dict[str, str]:
        """The columns with their types. Prepared alone, the query is whole: it cannot end the COPY around it."""
        self._ask(lambda: self._pg.send_prepare(b"", self._query))
        result = self._ask(lambda: self._pg.send_describe_prepared(b""))
        try:
            names = unique([identifier((result.fname(n) or b"").decode()) for n in range(result.nfields)])
        except ValueError as e:
            raise PermanentError(f"query: the names of its columns: {e}") from None
        if not names or result.nparams:
            raise PermanentError("query: should be one SELECT, VALUES or TABLE, without parameters")
        return {name: _type(result.ftype(n)) for n, name in enumerate(names)}

    def _copy(self, mark: list[str] | None) -> bytes:
        """The statement that copies the rows, in the order of the key where there is one, behind a key's values."""
        query = self._query + b"\n"  # behind the line, for the query may end with a comment
        if self._key:
            key = csv_table.joined("dl_rows.{}", self._key)
            behind: sql.Composable = sql.SQL("")
            if mark is not None:
                # A null is in no order with a value, and comes last: it has to reach the target, which refuses it.
                nulls = csv_table.joined("dl_rows.{} IS NULL", self._key, " OR ")
                values = sql.SQL(", ").join(map(sql.Literal, mark))
                behind = sql.SQL("WHERE ({}) > ({}) OR {}").format(key, values, nulls)
            order = sql.SQL(") AS dl_rows {} ORDER BY {}").format(behind, key).as_bytes(self._conn)
            query = b"SELECT * FROM (" + query + order
        return b"COPY (" + query + b") TO STDOUT (FORMAT csv, ENCODING 'UTF8')"

    def _rows(self) -> Iterator[bytes]:
        """The messages of the COPY, of which each is a row."""
        with self._translated():
            while True:
                size, data = self._pg.get_copy_data(1)
                if size > 0:
                    yield bytes(data)
                elif size == 0:
                    csv_table.await_bytes(self._pg, self._check)
                else:
                    csv_table.answered(self._pg, self._check)
                    return

    def _ask(self, send: Callable[[], None]) -> PGresult:
        with self._translated():
            send()
            return csv_table.answered(self._pg, self._check)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise the errors of the source as ours, which quote no value."""
        try:
            yield
        except psycopg.Error as e:
            why = "the connection was lost" if e.sqlstate is None else reason_of(e)
            kind = PermanentError if is_permanent(e) or e.sqlstate == _READ_ONLY else Unreachable
            raise kind(f"{self.origin}: {why}") from None


def _type(oid: int) -> str:
    """The type of a new table's column for one of the source."""
    info = types.get(oid)
    if info is None or info.name not in _TYPES:
        return "text"
    return f"{info.regtype}[]" if oid == info.array_oid else info.regtype
