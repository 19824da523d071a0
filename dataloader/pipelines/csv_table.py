"""The way of CSV records into a table, for all loaders: staged by COPY, merged by key.

A load is one transaction, or comes in parts. Each part is committed with its checkpoint to an unlogged staging table of
the job, so a later run goes on behind the last part. The target changes in the last transaction alone.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import time
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, LiteralString, NamedTuple
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row
from pydantic import AfterValidator, Field

from dataloader.pipelines import Arguments, Context, FilePath, PermanentError, Progress

PART_BYTES = 8 * 2**20  # a run that is killed reads as much once more, at most, and one batch
LONGEST_RECORD = 16 * 2**20  # characters: an unmatched quote must not read the rest of a large file into memory
_HEAD = 2**16  # bytes by which a file is recognized
_STAGING = "dl_load_csv"
_MERGED_AT_ONCE = 100_000  # records in one statement, between two safe points
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
# The target's types, checks and NOT NULL make COPY refuse every record that the target would, and name its line. An
# unlogged table needs no log, for its rows are written once more into the target. A crash of the server empties it.
_STAGING_TABLE = "CREATE {lifetime} TABLE {staging} ({line} bigint NOT NULL, {like})"
# The staging tables of jobs that have ended without their last transaction: canceled, lost, failed.
_LEFT_OVER = """
SELECT tablename FROM pg_tables
WHERE schemaname = current_schema() AND tablename ~ '^dl_load_csv_[0-9a-f]{{32}}$' AND NOT EXISTS (
  SELECT FROM dl_fence WHERE job_id = right(tablename, 32)::uuid AND raised_at > now() - interval '7 days')
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


# --- the arguments ---


def identifier(name: str) -> str:
    """The name; raises ValueError where PostgreSQL would take no such column."""
    if not name or "\0" in name or len(name.encode("utf-8", "replace")) > 63:
        raise ValueError("should be a name of 1 to 63 bytes")
    return name


def unique(names: list[str]) -> list[str]:
    """The names; raises ValueError where one of them occurs twice."""
    if len(set(names)) < len(names):
        raise ValueError("should name each column once")
    return names


def _table(name: str) -> str:
    parts = name.split(".")
    if len(parts) > 2 or not all(part and "\0" not in part and len(part.encode()) <= 63 for part in parts):
        raise ValueError("should be name or schema.name, each of 1 to 63 bytes")
    if parts[-1].startswith("dl_"):
        raise ValueError("should not be a table of the queue itself, whose names begin with dl_")
    if len(parts) == 2 and (parts[0].startswith("pg_") or parts[0] == "information_schema"):
        raise ValueError("should not be in a schema of PostgreSQL itself")
    return name


class FileArguments(Arguments):
    """The argument of a load from a file."""

    path: FilePath


class Target(Arguments):
    """The arguments of every load; docs/loaders.md explains each."""

    table: Annotated[str, AfterValidator(_table)]
    key: Annotated[list[Annotated[str, AfterValidator(identifier)]], Field(min_length=1), AfterValidator(unique)]
    batch_rows: int = Field(default=5_000, ge=1, le=1_000_000)


# --- the sources ---


class Place(NamedTuple):
    """Where a record begins: a mark of its source, and how many lines, records and literal quotes are before it."""

    mark: Any = None
    line: int = 0
    records: int = 0
    literal_quotes: int = 0


class Source:
    """CSV records in their order. They are read once, and people know them by their numbers from 1."""

    delimiter = ","
    names_columns = "file"  # the word for what names the columns
    hint = ""  # advice for an error about a missing column
    version: list[Any]  # JSON that differs for other records: a run goes on only behind the same ones
    columns: Mapping[str, str]  # with their types in a new table

    def __init__(self, origin: str) -> None:
        """`origin` is where the records come from, for people."""
        self.origin, self.begin = origin, Place()
        self._count = self._bytes = 0
        self._breaks: deque[tuple[int, int]] = deque()  # the records of several lines since the latest `place`

    @property
    def bytes_read(self) -> int:
        """How far reading has come."""
        return self._bytes

    @property
    def expected(self) -> int | None:
        """The largest possible number of records, or None."""
        return None

    def unchanged(self) -> bool:
        """False when the records may be others than when they were opened."""
        return True

    def records(self, begin: Place) -> Iterator[tuple[int, str]]:
        """The records from there on: the number by which people know each, and its text without a line end."""
        raise NotImplementedError

    def place(self) -> Place:
        """The place of the next record. `located` cannot locate the records before it any more."""
        self._breaks.clear()
        return Place(None, self._count, self._count)

    def located(self, begin: Place, reported: int) -> tuple[int, int]:
        """The place of PostgreSQL's error: the number of the record, and how many further lines it has.

        `reported` is the line in COPY's data, where line 1 replaces the header; `begin` is where that COPY began.
        """
        number = begin.records + reported - 1
        for row, lines in self._breaks:
            if row >= number:
                break
            number = max(row, number - lines)
        return number, 0

    def error(self, line: int, reason: str, extra_lines: int = 0) -> PermanentError:
        """The error of a record; it names the source and the record's number."""
        return PermanentError(f"{self.origin}, row {line}: {reason}")

    def _counted(self, text: str, size: int) -> tuple[int, str]:
        """The next record, of so many bytes; raises PermanentError for one that is too long."""
        self._count += 1
        self._bytes += size
        if size > LONGEST_RECORD:
            raise self.error(self._count, f"longer than {LONGEST_RECORD} bytes")
        if lines := text.count("\n"):
            self._breaks.append((self._count, lines))
        return self._count, text


class FileSource(Source):
    """The records of a file, which a program may change meanwhile."""

    def __init__(self, path: str, descriptor: int) -> None:
        super().__init__(path)
        self._descriptor = descriptor
        self.version = self._fingerprint()
        self.size: int = self.version[0]

    def unchanged(self) -> bool:
        """False when a program has written to the file since it was opened."""
        return self._fingerprint() == self.version

    def _fingerprint(self) -> list[Any]:
        status = os.fstat(self._descriptor)
        head = hashlib.sha256(os.pread(self._descriptor, _HEAD, 0)).hexdigest()
        return [status.st_size, status.st_mtime_ns, head]


def opened(folder: Path, path: str) -> int:
    """The file, open for reading; raises PermanentError unless it is a regular file below `folder`."""
    root = os.path.realpath(folder)
    real = os.path.realpath(os.path.join(root, path))
    if not Path(real).is_relative_to(root):
        raise PermanentError(f"path: {path} should be a file below the data folder")
    try:
        # NONBLOCK: opening a FIFO would wait for its writer. NOFOLLOW: links are resolved above.
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise PermanentError(f"path: {path}: there is no such file below the data folder") from None
    except OSError as e:
        if e.errno not in (errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO):
            raise
        raise PermanentError(f"path: {path}: cannot be read: {e.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PermanentError(f"path: {path} should be a regular file")
    return descriptor


# --- the load ---


def load(
    context: Context, wanted: Target, source: Source, in_parts: bool = False
) -> Generator[Progress | None, None, Place]:
    """Make the table's rows equal to the source's of the same keys, and return the source's end.

    Raises PermanentError for what the table refuses, and psycopg.Error for what another attempt may heal.
    """
    if missing := [name for name in wanted.key if name not in source.columns]:
        raise PermanentError(f"key: {_listed(missing)} should be in the {source.names_columns}{source.hint}")
    try:
        return (yield from (_in_parts if in_parts else _at_once)(context, wanted, source))
    except psycopg.Error as e:
        if not is_permanent(e):
            raise
        # Not `from e`: its DETAIL quotes rows.
        reason = reason_of(e, wanted.table, source.columns)
        raise PermanentError(f"{source.origin} into {wanted.table}: {reason}") from None


def _at_once(context: Context, wanted: Target, source: Source) -> Generator[Progress | None, None, Place]:
    with context.transaction() as conn:
        table = Table(conn, context.job_id, wanted, source)
        yield from table.find()
        table.make_staging()
        records, copied = source.records(source.begin), wanted.batch_rows
        while copied == wanted.batch_rows:
            if copied := table.copy(records):
                yield Progress(source.place().records, source.expected)
        table.require_unchanged()
        yield from table.merge()
        end = source.place()
        yield Progress(end.records, end.records)
    return end


def _in_parts(context: Context, wanted: Target, source: Source) -> Generator[Progress | None, None, Place]:
    """An error for good drops what is staged; other runs have committed parts, which are not read again."""
    saved = context.checkpoint or {}
    if saved.get("file") != source.version:
        saved = {}  # no checkpoint, or of another source: the target has no row of that source
    begin = Place(*saved["place"]) if saved else None
    if begin and "merged" in saved:
        yield Progress(begin.records, begin.records)
        return begin
    try:
        yield from _staged(context, wanted, source, begin)
        with context.transaction() as conn:
            table = Table(conn, context.job_id, wanted, source, is_lasting=True)
            table.require_staged()
            yield from table.find()
            yield from table.merge()
            _save(context, source, merged=True)
    except (PermanentError, psycopg.Error) as e:
        if isinstance(e, PermanentError) or is_permanent(e):
            with context.transaction() as conn:
                Table(conn, context.job_id, wanted, source, is_lasting=True).drop_staging()
        raise
    end = source.place()
    yield Progress(end.records, end.records)
    return end


def _staged(
    context: Context, wanted: Target, source: Source, begin: Place | None
) -> Generator[Progress | None, None, None]:
    """Stage the source part by part, from its staged end or from its begin."""
    with context.transaction() as conn:
        table = Table(conn, context.job_id, wanted, source, is_lasting=True)
        if begin is None or not table.is_staged():
            table.make_staging()
            begin = source.begin
    records, is_last = source.records(begin), False
    while not is_last:
        end = source.bytes_read + PART_BYTES
        with context.transaction() as conn:
            table = Table(conn, context.job_id, wanted, source, is_lasting=True)
            table.require_staged()
            while not is_last and source.bytes_read < end:
                is_last = table.copy(records) < wanted.batch_rows
                yield Progress(source.place().records, source.expected)
            table.require_unchanged()
            _save(context, source)


def _save(context: Context, source: Source, **more: bool) -> None:
    context.save({"file": source.version, "place": list(source.place())} | more)


def staging_of(job_id: UUID) -> str:
    """The name of a job's staging table."""
    return f"{_STAGING}_{job_id.hex}"


class Table:
    """The target of one load with its staging table, in one transaction of the caller."""

    def __init__(
        self, conn: psycopg.Connection[Any], job_id: UUID, wanted: Target, source: Source, is_lasting: bool = False
    ) -> None:
        """A lasting staging table is there for the other transactions of its job too."""
        self._wanted, self._source, self._staging = wanted, source, staging_of(job_id)
        self._cursor = conn.cursor(row_factory=tuple_row)
        *schema, name = wanted.table.split(".")
        # An unqualified `pg_class` would mean PostgreSQL's own.
        table = sql.Identifier(schema[0] if schema else self._schema(), name)
        staging = sql.Identifier(self._schema() if is_lasting else "pg_temp", self._staging)
        line = "dl_line"
        while line in source.columns:
            line += "_"
        values = [column for column in source.columns if column not in wanted.key]
        typed = [_formatted("{} ", column) + sql.SQL(kind) for column, kind in source.columns.items()]  # our own words
        # The values of the names in braces in the statements above.
        self._parts: dict[str, sql.Composable] = {
            "table": table,
            "table_name": sql.Literal(table.as_string()),
            "staging": staging,
            "staging_name": sql.Literal(staging.as_string()),
            "lifetime": sql.SQL("UNLOGGED" if is_lasting else "TEMPORARY"),
            "line": sql.Identifier(line),
            "delimiter": sql.Literal(source.delimiter),
            "columns": _joined("{}", source.columns),
            "typed": sql.SQL(", ").join(typed),
            "key": _joined("{}", wanted.key),
            "earlier_key": _joined("earlier.{}", wanted.key),
            "last_key": _joined("last.{}", wanted.key),
            "assignments": _joined("{0} = excluded.{0}", values),
            "old_values": _joined("old.{}", values),
            "new_values": _joined("excluded.{}", values),
        }
        self._merge = _MERGE + (_UPDATE if values else "DO NOTHING")

    def find(self) -> Iterator[None]:
        """Create the table when there is none; raises PermanentError when it does not fit the records."""
        if not self._kind():
            # Of two loads that create the table at once, one would fail.
            while not self._fetch(_LOCK)[0][0]:
                yield None
                time.sleep(_LOCK_PAUSE)
        if not self._kind():
            self._execute(_CREATE)
        self._fitting()

    def make_staging(self) -> None:
        """Make the staging table anew, as the target is now; while there is no target, of text columns."""
        for (name,) in self._fetch(_LEFT_OVER):
            self._execute("DROP TABLE IF EXISTS {left}", left=sql.Identifier(self._schema(), name))
        self.drop_staging()
        existing = self._fitting() if self._kind() else []
        like = "LIKE {table} INCLUDING CONSTRAINTS" if existing else "{typed}"
        self._execute(_STAGING_TABLE, like=self._composed(like))
        changes = [_formatted("DROP COLUMN {} CASCADE", name) for name in set(existing) - set(self._source.columns)]
        changes += [_formatted("ALTER COLUMN {} SET NOT NULL", name) for name in self._wanted.key]
        self._execute("ALTER TABLE {staging} {changes}", changes=sql.SQL(", ").join(changes))

    def is_staged(self) -> bool:
        """Whether the staging table is there with its rows: the server may have crashed."""
        [(is_there,)] = self._fetch("SELECT to_regclass({staging_name}) IS NOT NULL")
        return bool(is_there and self._fetch("SELECT EXISTS (SELECT FROM {staging})")[0][0])

    def require_staged(self) -> None:
        """Raise RuntimeError when records that this run or an earlier one has staged are gone."""
        if self._source.place().records and not self.is_staged():
            raise RuntimeError("the server has crashed, and lost what was staged: the next run begins anew")

    def require_unchanged(self) -> None:
        """Raise RuntimeError when a program has written to the source meanwhile."""
        if not self._source.unchanged():
            raise RuntimeError(f"a program wrote to {self._source.origin} during the load")

    def drop_staging(self) -> None:
        """Drop the staging table, if there is one."""
        self._execute("DROP TABLE IF EXISTS {staging}")

    def copy(self, records: Iterator[tuple[int, str]]) -> int:
        """Copy the next batch into the staging table; returns how many records it had.

        PostgreSQL reports an error at the end of a COPY, so a batch is one.
        """
        begin = self._source.place()
        try:
            self._copy(islice(records, self._wanted.batch_rows))
        except psycopg.Error as e:
            raise self._located(e, begin) from None
        return self._source.place().records - begin.records

    def merge(self) -> Iterator[None]:
        """Insert the new rows and update those that differ; the last record of each key counts."""
        self._execute(_DROP_EARLIER)
        self._execute("CREATE INDEX ON {staging} USING brin ({line})")
        # Without statistics the planner ignores the index, and scans the whole table for each slice.
        self._execute("ANALYZE {staging} ({line})")
        [(last,)] = self._fetch("SELECT coalesce(max({line}), 0) FROM {staging}")
        for line in range(0, last, _MERGED_AT_ONCE):
            self._execute(self._merge, after=sql.Literal(line), last=sql.Literal(line + _MERGED_AT_ONCE))
            yield None
        self.drop_staging()

    def _schema(self) -> str:
        [(name,)] = self._cursor.execute("SELECT current_schema()").fetchall()
        if name:
            return str(name)
        raise PermanentError(f"table: there is no schema for {self._wanted.table}; does PG_SCHEMA exist?")

    def _composed(self, statement: LiteralString, **more: sql.Composable) -> sql.Composed:
        return sql.SQL(statement).format(**self._parts, **more)

    def _execute(self, statement: LiteralString, **more: sql.Composable) -> None:
        self._cursor.execute(self._composed(statement, **more))

    def _fetch(self, statement: LiteralString) -> list[Any]:
        self._execute(statement)
        return self._cursor.fetchall()

    def _kind(self) -> str | None:
        rows = self._fetch(_KIND)
        return rows[0][0] if rows else None

    def _fitting(self) -> list[str]:
        """The columns of the target; raises PermanentError when it does not fit the records."""
        table, key = self._wanted.table, self._wanted.key
        if self._kind() not in ("r", "p"):
            raise PermanentError(f"table: {table} should be a table")
        existing = [name for (name,) in self._fetch(_COLUMNS)]
        if missing := [name for name in self._source.columns if name not in existing]:
            theirs = self._source.names_columns
            raise PermanentError(f"table: {table} should have the {theirs}'s columns, but lacks {_listed(missing)}")
        if not any(set(names) == set(key) for (names,) in self._fetch(_UNIQUE_KEYS)):
            raise PermanentError(f"key: {table} should have a unique index on exactly {_listed(key)}")
        return existing

    def _copy(self, records: Iterable[tuple[int, str]]) -> None:
        delimiter = self._source.delimiter
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

    def _located(self, error: psycopg.Error, begin: Place) -> Exception:
        """The error to raise for an error of COPY: it names source, line and column, and quotes no value."""
        match = re.search(rf"{self._staging}\D*(\d+)(?:, \S+ (.+?)(?:: |$))?", error.diag.context or "")
        if not match or not is_permanent(error):
            return error
        reason = reason_of(error, self._wanted.table, self._source.columns)
        if match[2] and f'"{match[2]}"' not in reason:
            reason = f"column {match[2]}: {reason}"
        line, more = self._source.located(begin, int(match[1]))
        return self._source.error(line, reason, more)


def is_permanent(error: psycopg.Error) -> bool:
    """Whether the next attempt would fail in the same way."""
    return error.sqlstate is not None and not error.sqlstate.startswith(_PASSING)


def reason_of(error: psycopg.Error, table: str, columns: Collection[str]) -> str:
    """PostgreSQL's message without the values in it, which may be secrets; the text of a function may be all values."""
    if error.diag.source_file in _LANGUAGES:
        named = re.match(r"(?:\w+ )?PL/pgSQL (?:\w+ )?([^\s(]+)\(", error.diag.context or "")
        source = f"the function {named[1]}" if named else "a function"
        return f"{source} raised an error ({error.sqlstate}), whose text may hold values"
    words = re.sub(rf"{_STAGING}_[0-9a-f]+", lambda _: table, error.diag.message_primary or str(error.sqlstate))
    if error.sqlstate and error.sqlstate.startswith("22"):
        words = re.sub('["«„](.*)["»“]', lambda m: m[0] if m[1] in columns else '"..."', words, flags=re.DOTALL)
    return words


def _joined(template: LiteralString, names: Iterable[str]) -> sql.Composed:
    return sql.SQL(", ").join(_formatted(template, name) for name in names)


def _formatted(template: LiteralString, name: str) -> sql.Composed:
    return sql.SQL(template).format(sql.Identifier(name))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
