"""The table of a load by CSV records: created or checked, staged by COPY, merged by key, in the caller's transaction.

A load by one transaction is staged in a temporary table, one by several in a table that the other transactions of its
job find again. The records come from a file (`csv_source`) or from a query in another database (`pg_source`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, LiteralString, Protocol
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from dataloader.pipelines import PermanentError, Progress
from dataloader.pipelines.csv_source import Place

_STAGING = "dl_load_csv"  # no digits: the first number after this name in an error's context is the line
_MERGED_AT_ONCE = 100_000  # lines of the file in one statement, between two safe points
_COPIED_AT_ONCE = 2**16  # characters in one message to the server
_LOCK_PAUSE = 0.2  # seconds between two tries for the lock, while another load creates the table

# SQLSTATE classes of what another attempt may heal: the connection, a failover, a conflict, a limit or a fault of the
# server; and what another session has just created. Any other error is one of the data, the table, its functions or our
# rights, and the next attempt would fail in the same way.
_PASSING = ("08", "25", "26", "28", "3D", "40", "53", "55", "57", "58", "72", "F0", "HV", "XX", "42P07", "42710")
# The files of PostgreSQL's source that raise what a function in a procedural language raises.
_LANGUAGES = ("pl_exec.c", "plpy_elog.c", "plperl.c", "pltcl.c")

# Values are literals in these statements: beside parameters, a % in a column's name would be a placeholder.
_KIND = "SELECT relkind FROM pg_class WHERE oid = to_regclass({table_name})"
_COLUMNS = """
SELECT attname FROM pg_attribute
WHERE attrelid = {table_name}::regclass AND attnum > 0 AND NOT attisdropped
"""
# The indexes that ON CONFLICT can use: unique, not deferred, of plain columns, over all rows.
_UNIQUE_KEYS = """
SELECT array_agg(a.attname::text)
FROM pg_index i
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
WHERE i.indrelid = {table_name}::regclass AND i.indisunique AND i.indimmediate AND i.indisvalid
  AND i.indpred IS NULL AND i.indexprs IS NULL
GROUP BY i.indexrelid
"""
# Locks of two integers are distinct from the locks of one bigint that workers hold for their jobs' keys.
_LOCK = "SELECT pg_try_advisory_xact_lock(hashtext('load.csv'), hashtext({table_name}))"
_CREATE = "CREATE TABLE {table} ({typed}, PRIMARY KEY ({key}))"
# The target's types, checks and NOT NULL make COPY refuse every record that the target would, and name its line.
_STAGING_TABLE = """
CREATE TEMPORARY TABLE {staging} ({line} bigint NOT NULL, LIKE {table} INCLUDING CONSTRAINTS) ON COMMIT DROP
"""
# Without a log, for it is written once more into the target. After a crash of the server it is empty: see `is_staged`.
_LASTING_TABLE = """
CREATE UNLOGGED TABLE {staging} ({line} bigint NOT NULL, LIKE {table} INCLUDING CONSTRAINTS)
"""
_LASTING_TEXTS = "CREATE UNLOGGED TABLE {staging} ({line} bigint NOT NULL, {typed})"
# The staging tables of jobs that have ended without their last transaction: canceled, lost, failed.
_LEFT_OVER = """
SELECT tablename FROM pg_tables
WHERE schemaname = current_schema() AND tablename ~ '^dl_load_csv_[a-p]{{32}}$' AND NOT EXISTS (
  SELECT FROM dl_fence
  WHERE job_id = translate(right(tablename, 32), 'abcdefghijklmnop', '0123456789abcdef')::uuid
    AND raised_at > now() - interval '7 days')
"""
# From a header line COPY learns the line end before the first record; without one it counts CR in quotes.
_COPY = """
COPY {staging} ({line}, {columns}) FROM STDIN
(FORMAT csv, HEADER, DELIMITER {delimiter}, ENCODING 'UTF8')
"""
_DROP_EARLIER = """
DELETE FROM {staging} AS earlier
USING (SELECT {key}, max({line}) AS {line} FROM {staging} GROUP BY {key} HAVING count(*) > 1) AS last
WHERE ({earlier_key}) = ({last_key}) AND earlier.{line} < last.{line}
"""
_MERGE = """
INSERT INTO {table} AS old ({columns})
SELECT {columns} FROM {staging} WHERE {line} > {after} AND {line} <= {last}
ON CONFLICT ({key})
"""
# *<> compares the stored bytes: it takes any type (json has no =), and finds 1.0 and 1.00 different.
_UPDATE = """
DO UPDATE SET {assignments} WHERE ROW({old_values})::record *<> ROW({new_values})::record
"""


class Wanted(Protocol):
    """The wishes of a load's job: its table, its key, and the words for people in errors."""

    @property
    def table(self) -> str: ...
    @property
    def key(self) -> list[str]: ...
    @property
    def batch_rows(self) -> int: ...
    @property
    def delimiter(self) -> str: ...
    @property
    def names_columns(self) -> str:
        """The word for what names the columns, such as "header"."""

    @property
    def hint(self) -> str:
        """Advice for an error about a missing column; "" for none."""

    @property
    def origin(self) -> str:
        """Where the records come from."""


class Source(Protocol):
    """CSV records in their order, with their numbers."""

    def records(self, begin: Place | None = None) -> Iterator[tuple[int, str]]:
        """The records from there on, by default all: the number by which people know each, and its text."""

    def place(self) -> Place:
        """Where the next record begins."""

    def identity(self) -> list[Any]:
        """What tells these records from others, as JSON: a run goes on only behind the same ones."""

    def unchanged(self) -> bool:
        """False when the records may be others than when they were opened."""

    def error(self, line: int, reason: str, extra_lines: int = 0) -> PermanentError:
        """The error of the record of this number."""

    def located(self, begin: Place, reported: int) -> tuple[int, int]:
        """The number of the record at this line of the COPY that began there, and the number of its further lines."""

    @property
    def bytes_read(self) -> int:
        """How far reading has come, in bytes."""

    @property
    def expected(self) -> int | None:
        """How many records there may be; None: nobody knows."""


def name_of(job_id: UUID) -> str:
    """The name of a job's staging table: with letters for its id, see _STAGING."""
    return f"{_STAGING}_{job_id.hex.translate(str.maketrans('0123456789abcdef', 'abcdefghijklmnop'))}"


class Load:
    """One load, in the caller's transaction."""

    def __init__(
        self, conn: psycopg.Connection[Any], wanted: Wanted, columns: Mapping[str, str], lasting: str | None = None
    ) -> None:
        """`columns` have the types that a new table gets.

        `lasting` names the staging table of a load by several transactions; None: it is a temporary one.
        """
        if missing := [name for name in wanted.key if name not in columns]:
            raise PermanentError(f"key: {_listed(missing)} should be in the {wanted.names_columns}{wanted.hint}")
        self._wanted, self._columns = wanted, list(columns)
        self._cursor = conn.cursor(row_factory=tuple_row)
        schema, table = self._qualified()
        self._parts = self._names(schema, table) | {"typed": _typed(columns)}
        if lasting is not None:
            self._parts["staging"] = staging = sql.Identifier(self._schema(), lasting)
            self._parts["staging_name"] = sql.Literal(staging.as_string())
            self._parts["line"] = sql.Identifier(_unlike("dl_line", columns))

    def find_table(self) -> Iterator[None]:
        """Create the table when there is none; raises PermanentError when it does not fit the records."""
        if not self._kind():
            yield from self._lock()
        if not self._kind():
            self._execute(_CREATE)
        self._check_fit()

    def stage(self, source: Source, total: int | None) -> Iterator[Progress]:
        """Copy the source, of so many records where somebody knows, into a temporary table, in batches."""
        existing = self._check_fit()
        self._parts["line"] = sql.Identifier(_unlike("line", existing))
        self._execute(_STAGING_TABLE)
        self._narrow(existing)
        records, copied = source.records(), self._wanted.batch_rows
        while copied == self._wanted.batch_rows:
            if copied := self.copy(source, records):
                yield Progress(source.place().records, total)
        self.require_unchanged(source)

    def make_staging(self) -> None:
        """Make the lasting table anew, as the target is now; while there is no target, of text columns."""
        for (name,) in self._fetch(_LEFT_OVER):
            self._execute_for("DROP TABLE IF EXISTS {dropped}", dropped=sql.Identifier(self._schema(), name))
        self.drop_staging()
        if self._kind():
            existing = self._check_fit()
            self._execute(_LASTING_TABLE)
            self._narrow(existing)
        else:
            self._execute(_LASTING_TEXTS)
            self._narrow([])

    def is_staged(self) -> bool:
        """Whether the lasting table is there with its rows; each part asks, for the server may have crashed."""
        (found,) = self._fetch("SELECT to_regclass({staging_name}) IS NOT NULL")
        return bool(found[0] and self._fetch("SELECT EXISTS (SELECT FROM {staging})")[0][0])

    def drop_staging(self) -> None:
        """Drop the lasting table, if there is one."""
        self._execute("DROP TABLE IF EXISTS {staging}")

    def copy(self, source: Source, records: Iterator[tuple[int, str]]) -> int:
        """Copy the next batch into the staging table; returns how many records it had.

        PostgreSQL reports an error at the end of a COPY, so a batch is one.
        """
        begin = source.place()
        try:
            self._copy(islice(records, self._wanted.batch_rows))
        except psycopg.Error as e:
            raise self._located(e, source, begin) from None
        return source.place().records - begin.records

    def require_unchanged(self, source: Source) -> None:
        """Raise RuntimeError when a program has written to the file meanwhile."""
        if not source.unchanged():
            raise RuntimeError(f"a program wrote to {self._wanted.origin} during the load")

    def merge(self) -> Iterator[None]:
        """Insert the new rows and update those that differ; the last record of each key counts."""
        self._execute(_DROP_EARLIER)
        self._execute("CREATE INDEX ON {staging} USING brin ({line})")
        # Without statistics the planner ignores the index, and scans the whole table for each slice.
        self._execute("ANALYZE {staging} ({line})")
        [(last,)] = self._fetch("SELECT coalesce(max({line}), 0) FROM {staging}")
        changing = set(self._columns) > set(self._wanted.key)
        for line in range(0, last, _MERGED_AT_ONCE):
            self._parts |= {"after": sql.Literal(line), "last": sql.Literal(line + _MERGED_AT_ONCE)}
            self._execute(_MERGE + (_UPDATE if changing else "DO NOTHING"))
            yield None

    def _qualified(self) -> tuple[str, str]:
        """The schema and the table; an unqualified `pg_class` would mean PostgreSQL's own."""
        *schema, table = self._wanted.table.split(".")
        return (schema[0] if schema else self._schema()), table

    def _schema(self) -> str:
        self._cursor.execute("SELECT current_schema()")
        for (name,) in self._cursor:
            if name:
                return str(name)
        raise PermanentError(f"table: there is no schema for {self._wanted.table}; does PG_SCHEMA exist?")

    def _names(self, schema: str, table: str) -> dict[str, sql.Composable]:
        """The values of the names in braces in the statements above."""
        key, columns = self._wanted.key, self._columns
        values = [name for name in columns if name not in key]
        return {
            "table": sql.Identifier(schema, table),
            "table_name": sql.Literal(sql.Identifier(schema, table).as_string()),
            "staging": sql.Identifier("pg_temp", _STAGING),
            "delimiter": sql.Literal(self._wanted.delimiter),
            "columns": _joined("{}", columns),
            "key": _joined("{}", key),
            "earlier_key": _joined("earlier.{}", key),
            "last_key": _joined("last.{}", key),
            "assignments": _joined("{0} = excluded.{0}", values),
            "old_values": _joined("old.{}", values),
            "new_values": _joined("excluded.{}", values),
        }

    def _execute_for(self, statement: LiteralString, **names: sql.Composable) -> None:
        self._cursor.execute(sql.SQL(statement).format(**names))

    def _composed(self, statement: LiteralString) -> sql.Composed:
        return sql.SQL(statement).format(**self._parts)

    def _execute(self, statement: LiteralString) -> None:
        self._cursor.execute(self._composed(statement))

    def _fetch(self, statement: LiteralString) -> list[Any]:
        self._execute(statement)
        return self._cursor.fetchall()

    def _kind(self) -> str | None:
        found = self._fetch(_KIND)
        return found[0][0] if found else None

    def _lock(self) -> Iterator[None]:
        """Wait for another load that creates this table; of two concurrent CREATE TABLE one would fail."""
        while not self._fetch(_LOCK)[0][0]:
            yield None
            time.sleep(_LOCK_PAUSE)

    def _check_fit(self) -> list[str]:
        """The columns of the target; raises PermanentError when it does not fit the records."""
        table, key = self._wanted.table, self._wanted.key
        if self._kind() not in ("r", "p"):
            raise PermanentError(f"table: {table} should be a table")
        existing = [name for (name,) in self._fetch(_COLUMNS)]
        if missing := [name for name in self._columns if name not in existing]:
            theirs = self._wanted.names_columns
            raise PermanentError(f"table: {table} should have the {theirs}'s columns, but lacks {_listed(missing)}")
        if not any(set(names) == set(key) for (names,) in self._fetch(_UNIQUE_KEYS)):
            raise PermanentError(f"key: {table} should have a unique index on exactly {_listed(key)}")
        return existing

    def _narrow(self, existing: list[str]) -> None:
        """Leave the staging table the records' columns, and refuse nulls in the key."""
        changes = [_formatted("DROP COLUMN {} CASCADE", name) for name in set(existing) - set(self._columns)]
        changes += [_formatted("ALTER COLUMN {} SET NOT NULL", name) for name in self._wanted.key]
        self._parts["changes"] = sql.SQL(", ").join(changes)
        self._execute("ALTER TABLE {staging} {changes}")

    def _copy(self, records: Iterable[tuple[int, str]]) -> None:
        delimiter = self._wanted.delimiter
        with self._cursor.copy(self._composed(_COPY)) as copy:
            copy.write(b"\n")  # the header
            chunk: list[str] = []
            size = 0
            for line, text in records:
                # The line's number in front also keeps a record `\.` from ending the data (PostgreSQL < 18).
                chunk.append(f"{line}{delimiter}{text}\n")
                size += len(text)
                if size > _COPIED_AT_ONCE:
                    copy.write("".join(chunk).encode())
                    chunk, size = [], 0
            copy.write("".join(chunk).encode())

    def _located(self, error: psycopg.Error, source: Source, begin: Place) -> Exception:
        """The error to raise for an error of COPY: it names source, line and column, and quotes no value."""
        found = re.search(rf"{_STAGING}\D*(\d+)(?:, \S+ (.+?)(?:: |$))?", error.diag.context or "")
        if not found or not is_permanent(error):
            return error
        reason = reason_of(error, self._wanted.table, self._columns)
        if found[2] and f'"{found[2]}"' not in reason:
            reason = f"column {found[2]}: {reason}"
        line, more = source.located(begin, int(found[1]))
        return source.error(line, reason, more)


def is_permanent(error: psycopg.Error) -> bool:
    """Whether the next attempt would fail in the same way."""
    return error.sqlstate is not None and not error.sqlstate.startswith(_PASSING)


def reason_of(error: psycopg.Error, table: str, columns: Collection[str]) -> str:
    """PostgreSQL's message without the values in it, which may be secrets; the text of a function may be all values."""
    if error.diag.source_file in _LANGUAGES:
        named = re.match(r"(?:\w+ )?PL/pgSQL (?:\w+ )?([^\s(]+)\(", error.diag.context or "")
        who = f"the function {named[1]}" if named else "a function"
        return f"{who} raised an error ({error.sqlstate}), whose text may hold values"
    words = re.sub(rf"{_STAGING}(_[a-p]+)?", lambda _: table, error.diag.message_primary or str(error.sqlstate))
    if error.sqlstate and error.sqlstate.startswith("22"):
        words = re.sub('["«„](.*)["»“]', lambda m: m[0] if m[1] in columns else '"..."', words, flags=re.DOTALL)
    return words


def _unlike(name: str, names: Iterable[str]) -> str:
    """A name that is none of these."""
    while name in names:
        name += "_"
    return name


def _typed(columns: Mapping[str, str]) -> sql.Composed:
    """The columns of a new table; the types are our own words, see `pg_source`."""
    return sql.SQL(", ").join(_formatted("{} ", name) + sql.SQL(kind) for name, kind in columns.items())


def _joined(template: LiteralString, names: Iterable[str]) -> sql.Composed:
    return sql.SQL(", ").join(_formatted(template, name) for name in names)


def _formatted(template: LiteralString, name: str) -> sql.Composed:
    return sql.SQL(template).format(sql.Identifier(name))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
