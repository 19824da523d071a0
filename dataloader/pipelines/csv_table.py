"""The way of CSV records into a table, for all loaders: staged by COPY, merged by key.

A load is one transaction, or comes in parts. Each part is committed with its checkpoint to an unlogged staging table of
the job, so a later run goes on behind the last part. The target changes in the last transaction alone.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import select
import stat
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, LiteralString, NamedTuple
from uuid import UUID

import psycopg
from psycopg import errors, sql
from psycopg.adapt import Transformer
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.rows import tuple_row
from pydantic import AfterValidator, Field

from dataloader.pipelines import Arguments, Context, PermanentError, Progress
from dataloader.queue import db

PART_BYTES = 8 * 2**20  # of a file that comes at once
_COMMITTED_BYTES = 4  # PART_BYTES between commits: a killed run reads at most these and a batch again
_DIRECT_BYTES = 64  # in PART_BYTES: a larger file takes several transactions, because a killed run repeats one
Finish = Callable[[psycopg.Connection[Any]], None]
LONGEST_RECORD = 16 * 2**20  # characters: an unmatched quote must not read the rest of a large file into memory
_HEAD = 2**16  # bytes by which a file is recognized
_STAGING = "dl_load_csv"
_REJECTS = "_rejects"  # the name of the table of rejected records ends so
_LONGEST_NAME = 63 - len(_REJECTS)
_SLICE_MS = 200  # between two safe points while a server is silent
_CANCEL_SEC = 5.0  # for the server to end a statement
_COPIED_AT_ONCE = 2**16  # characters in one message to the server
_BATCH_SIZE = 2**22  # characters: a batch is kept until PostgreSQL has checked it, so long records are fewer
_RECORD_SIZE = 100  # beside its characters
_LINE_ENDS = re.compile("\r\n?|\n")
# Where COPY is, without the text of the record behind a colon; in a Korean server's words too.
_IN_COPY = re.compile(r'(?m)^[^:"\n]*(?:COPY|복사)[^:\n]*')
_COUNTS = ("inserted", "updated", "unchanged", "deleted", "duplicate_keys", "rejected")
_BITS = {"smallint": 16, "integer": 32, "bigint": 64}
_UNLIMITED = {"numeric": "numeric", "character varying": "text"}
_ALIASES = {
    **{"int2": "smallint", "int": "integer", "int4": "integer", "int8": "bigint"},
    **{"decimal": "numeric", "float4": "real", "float8": "double precision"},
}

# SQLSTATE classes of what another attempt may heal: the connection, a failover, a conflict, a limit or a fault of the
# server; and what another session has just created. Any other error is one of the data, the table, its functions or our
# rights, and the next attempt would fail in the same way.
_PASSING = ("08", "25", "26", "28", "3D", "40", "53", "55", "57", "58", "72", "F0", "HV", "XX", "42P07", "42710")
# The source files of PostgreSQL that raise the errors of procedural languages' functions.
_LANGUAGES = ("pl_exec.c", "plpy_elog.c", "plperl.c", "pltcl.c")

_SQL = db.statements("load.sql")
_VERSIONS = {
    "valid_from": "timestamptz NOT NULL DEFAULT now()",
    "valid_to": "timestamptz",
    "is_current": "boolean NOT NULL DEFAULT true",
}

# --- the arguments ---


def identifier(name: str) -> str:
    """The name; raises ValueError where PostgreSQL would take no such column."""
    if not name or "\0" in name or len(name.encode("utf-8", "replace")) > 63:
        raise ValueError("should be a name of 1 to 63 bytes")
    return name


def unique(names: list[str]) -> list[str]:
    """The names; raises ValueError where one of them occurs twice."""
    if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
        raise ValueError(f"should name each column once, not {twice} twice")
    return names


def visible(text: str) -> str:
    """PURE: the text for a message; characters that nobody sees are named."""
    unseen = "[^\\S ]|[\u00ad\u0300-\u036f\u200b-\u200f\u2060\ufeff]"
    return re.sub(unseen, lambda match: f"<U+{ord(match[0]):04X}>", text)


def _table(name: str) -> str:
    parts = name.split(".")
    if len(parts) > 2 or not all(part and "\0" not in part and len(part.encode()) <= 63 for part in parts):
        raise ValueError("should be name or schema.name, each of 1 to 63 bytes")
    if parts[-1].startswith("dl_"):
        raise ValueError("should not be a table of the queue itself, whose names begin with dl_")
    if len(parts) == 2 and (parts[0].startswith("pg_") or parts[0] == "information_schema"):
        raise ValueError("should not be in a schema of PostgreSQL itself")
    return name


_Name = Annotated[str, AfterValidator(identifier)]


class Target(Arguments):
    """The arguments of every load; docs/loaders.md explains each."""

    table: Annotated[str, AfterValidator(_table)]
    key: Annotated[list[_Name], Field(min_length=1), AfterValidator(unique)] = Field(default_factory=list)
    mode: Literal["append", "merge", "replace", "scd2"] = "merge"
    partition: dict[_Name, str | int | float | bool | None] = Field(default_factory=dict)
    delete_missing: bool | Literal["soft"] = False
    deleted_column: _Name = "deleted_at"
    max_delete: float = Field(default=1.0, ge=0, le=1)
    max_errors: int = Field(default=0, ge=0)
    schema_change: Literal["refuse", "add", "widen"] = "refuse"
    batch_rows: int = Field(default=20_000, ge=1, le=1_000_000)


# --- the sources ---


class Rejected(NamedTuple):
    """A record that its reader refuses: `Source.records` yields one in place of the record's text."""

    reason: str  # without values
    text: str


class Block(NamedTuple):
    """Records as COPY reads them, each with its line end: `Source.items` yields one in place of a record's text."""

    text: str
    records: int
    has_lines: bool = True  # people know its records by their lines, else by their rows

    def singles(self, number: int) -> Iterator[tuple[int, str]]:
        """The records alone; `number` is that of the first."""
        lines: list[str] = []
        is_open, has_cr = 0, "\r" in self.text  # whether a quote is open
        for line in self.text.split("\n")[:-1]:
            lines.append(line)
            is_open ^= line.count('"') & 1
            if not is_open:
                record = "\n".join(lines)
                yield number, record
                ends = len(_LINE_ENDS.findall(record)) + 1 if has_cr else len(lines)
                number += ends if self.has_lines else 1
                lines.clear()


class Batch(NamedTuple):
    """Rows of Arrow: `Source.items` yields one in place of records."""

    records: int
    bytes: int
    binary: Sequence[Any] | None  # a whole binary COPY; None where PostgreSQL has to read the text
    singles: Callable[[int], Iterable[tuple[int, str | Rejected]]]  # the records; the number is that of the first


class Place(NamedTuple):
    """Where a record begins: a mark of its source, and how many lines, records and oddities are before it."""

    mark: Any = None
    line: int = 0
    records: int = 0
    literal_quotes: int = 0
    repeated_headers: int = 0


Item = str | Block | Rejected | Batch


class _OtherTypesError(RuntimeError):
    """The target has come, or has changed, since the rows were staged."""


class _NotDirectlyError(Exception):
    """COPY into the target would have another result than the mode has."""


class _Unseen(str):
    __slots__ = ()


UNSEEN = _Unseen("text")  # the type of a column without a value: where another file has one, that file decides


class Source:
    """CSV records in their order. A source numbers its records from 1; errors name these numbers."""

    delimiter = ","
    is_typed = True  # else its values are text, and `load.files` infers their types
    names_columns = "file"  # where columns come from, in errors
    unit = "row"  # a record's name in errors
    header_line = 1
    version: list[Any]  # JSON that identifies the records: a run resumes only while it is unchanged
    columns: Mapping[str, str] = {}  # with their types in a new table
    has_columns = True  # which are not those of the arguments alone
    in_target: Collection[str] = ()  # the columns of the table, whose types are its own
    stored: Sequence[str] = ()  # the types of the columns where COPY writes, once they are known
    size = 0  # bytes
    total = 0  # records, where the source knows their number
    dialect: Mapping[str, Any] = {}  # what was recognized: for people
    _reading: Generator[Any, None, None] | None = None  # by a thread ahead

    def __init__(self, origin: str) -> None:
        """`origin` is where the records come from, for people."""
        self.origin, self.begin = origin, Place()
        self._count = self._bytes = 0
        self.version = []

    def close(self) -> None:
        """End the thread that reads ahead, if there is one."""
        if self._reading:
            self._reading.close()

    @property
    def names(self) -> list[str]:
        """The columns as the source names them."""
        return list(self.columns)

    @property
    def bytes_read(self) -> int:
        """How far reading has come."""
        return self._bytes

    @property
    def expected(self) -> int | None:
        """The largest possible number of records, or None."""
        return self.total or None

    @property
    def has_parts(self) -> bool:
        """Whether the records are committed part by part, so that a run that is killed repeats at most one part."""
        return self.size > PART_BYTES

    def take(self, shape: Any) -> bool:
        """Let `items` give the records that fit the table as this `files.Shape` says; False where `records` has to."""
        return False

    def fit(self, types: Mapping[str, str]) -> None:
        """Take note of the types that these columns of the source have in the table."""

    def require_unchanged(self) -> None:
        """Raise RuntimeError when a program has written to the source since it was opened."""

    def records(self, begin: Place) -> Iterator[tuple[int, str | Rejected]]:
        """The records from there on: the number by which people know each, and its text without a line end."""
        raise NotImplementedError

    def items(self, begin: Place, size: int) -> Iterator[tuple[int, Item]]:
        """The same records, of which many may come in one block; a block has at most `size` of them."""
        return self.records(begin)

    def place(self) -> Place:
        """The place of the next record."""
        return Place(None, self._count, self._count)

    def where(self, number: int) -> tuple[str, int]:
        """The file of the record of this number, and the record's number there."""
        return self.origin, number

    def error(self, line: int, reason: str, extra_lines: int = 0) -> PermanentError:
        """The error of a record; it names the source and the record's number."""
        return PermanentError(f"{self.origin}, {self.unit} {line}: {reason}")

    def _counted(self, text: str, size: int) -> tuple[int, str]:
        """The next record, of so many bytes; raises PermanentError for one that is too long."""
        self._count += 1
        self._bytes += size
        if size > LONGEST_RECORD:
            raise self.error(self._count, f"longer than {LONGEST_RECORD} bytes")
        return self._count, text

    def _counted_batch(self, batch: Batch) -> tuple[int, Batch]:
        """The next rows, with the number of the first."""
        self._count += batch.records
        self._bytes += batch.bytes
        return self._count - batch.records + 1, batch


class FileSource(Source):
    """The records of a file, which a program may change meanwhile."""

    _end: int | None = None  # where the file's part ends that is in use, while a thread reads ahead

    def __init__(self, path: str, descriptor: int) -> None:
        super().__init__(path)
        self._descriptor = descriptor
        self.version = self._fingerprint()
        self.size: int = self.version[0]

    @property
    def position(self) -> int:
        """Where reading has come in the file, some thousand bytes ahead of the records."""
        return self._read_to() if self._end is None else self._end

    @property
    def expected(self) -> int:
        """The number of records, or an estimate by the length of those that were read."""
        return self.total or max(self._count, self._count * self.size // max(1, self.position))

    def require_unchanged(self) -> None:
        if self._fingerprint() != self.version:
            raise RuntimeError(f"a program wrote to {self.origin} during the load")

    def _read_to(self) -> int:
        return os.lseek(self._descriptor, 0, os.SEEK_CUR)

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
    context: Context, wanted: Target, source: Source, finish: Finish | None = None, is_job: bool = True
) -> Generator[Progress | None, None, Progress]:
    """Bring the source's records into the table in the wanted mode; return what was counted: the job's result.

    The table changes in one transaction, and `finish` is called at its end, on its connection. Unless the load
    `is_job`, all that its job does, it leaves the job's checkpoint alone. Raises PermanentError for what the table
    refuses, and psycopg.Error for what another attempt may heal.
    """
    _require_sense(wanted, source)
    with permanent(f"{source.origin} into {wanted.table}", wanted.table, source.columns):
        return (yield from _Load(context, wanted, source, finish, is_job).steps())


def _require_sense(wanted: Target, source: Source) -> None:
    """Raise PermanentError where arguments contradict each other, or the source lacks a column of theirs."""
    mode, columns = wanted.mode, source.columns
    for name in columns:
        try:
            identifier(name)
        except ValueError as e:
            raise PermanentError(f'{source.origin}: the column "{visible(name[:100])}": {e}') from None
    if mode in ("merge", "scd2") and not wanted.key:
        raise PermanentError(f"key: mode {mode} needs the columns that identify a row; append and replace need none")
    for argument, names in {"key": wanted.key, "partition": [*wanted.partition]}.items():
        if missing := [name for name in names if name not in columns]:
            raise PermanentError(f"{argument}: {_listed(missing)} should be in the {source.names_columns}")
    if wanted.partition and mode != "replace":
        raise PermanentError(f"partition: mode {mode} has no partition, only replace has one")
    if wanted.delete_missing and (mode not in ("merge", "scd2") or (mode, wanted.delete_missing) == ("scd2", "soft")):
        raise PermanentError(f"delete_missing: mode {mode} should not have {json.dumps(wanted.delete_missing)}")
    if wanted.max_errors and len(wanted.table.rpartition(".")[2].encode()) > _LONGEST_NAME:
        raise PermanentError(f"table: should have at most {_LONGEST_NAME} bytes, because max_errors adds {_REJECTS}")
    if taken := [name for name in _own_columns(wanted) if name in columns]:
        raise PermanentError(f"{_listed(taken)} should not be in the {source.names_columns}: the load writes it")


def _own_columns(wanted: Target) -> dict[str, str]:
    """The columns with their types that the load itself writes."""
    if wanted.mode == "scd2":
        return _VERSIONS
    return {wanted.deleted_column: "timestamptz"} if wanted.delete_missing == "soft" else {}


def appended(context: Context, wanted: Target) -> Progress | None:
    """The counts of an earlier run that appended all rows, for a job appends once; None if no run of it did."""
    saved = context.checkpoint or {}
    return _again(saved["counts"]) if wanted.mode == "append" and "counts" in saved else None


def _again(counts: dict[str, Any]) -> Progress:
    """The result of an earlier run of the job."""
    return Progress(counts.pop("processed"), counts.pop("total"), **counts)


class _Load:
    """One load, and the ways by which its records come to the table."""

    def __init__(self, context: Context, wanted: Target, source: Source, finish: Finish | None, is_job: bool) -> None:
        self._context, self._wanted, self._source, self._is_job = context, wanted, source, is_job
        self._finish = finish or (lambda conn: None)
        self._began = time.monotonic()

    def steps(self) -> Generator[Progress | None, None, Progress]:
        """Load by the quickest way; all ways have the same result."""
        if not self._is_job:
            return (yield from self._at_once())
        saved = self._context.checkpoint or {}
        if "counts" in saved and (self._wanted.mode == "append" or saved.get("file") == self._source.version):
            return _again(saved["counts"])
        # A file can be read again by another way.
        if not saved and 0 < self._source.size <= _DIRECT_BYTES * PART_BYTES:
            with suppress(_NotDirectlyError):
                return (yield from self._at_once(is_direct=True))
        return (yield from (self._in_parts() if self._source.has_parts else self._at_once()))

    @contextmanager
    def _table(self, is_lasting: bool = False) -> Iterator[Table]:
        with self._context.transaction() as conn:
            yield Table(conn, self._context, self._wanted, self._source, is_lasting)

    def _at_once(self, is_direct: bool = False) -> Generator[Progress | None, None, Progress]:
        """The load in one transaction, which may run twice: the second run changes nothing.

        With `is_direct` COPY fills the target itself, new or not; raises _NotDirectlyError.
        """
        try:
            with self._table() as table:
                is_filled = is_direct and bool(table.columns())
                if not is_filled:
                    table.make_staging()
                elif not table.takes_copy():
                    raise _NotDirectlyError
                yield from self._copied(table, table.items(self._source.begin))
                return (yield from self._end(table, is_filled))
        except (errors.UniqueViolation, errors.ForeignKeyViolation) as e:
            # A key is in the file twice, or a foreign key's row comes later.
            if not is_direct or (self._wanted.mode == "append" and isinstance(e, errors.UniqueViolation)):
                raise
            raise _NotDirectlyError from None

    def _in_parts(self) -> Generator[Progress | None, None, Progress]:
        """The load from its newest part on.

        A permanent error or a changed type of the target drops the parts. Any other end leaves committed parts, which
        the next run does not read again.
        """
        saved = self._context.checkpoint or {}
        is_same = saved.get("file") == self._source.version  # else there may be no checkpoint
        try:
            # The place that another version saved may be longer; for a query its fifth value is 0 in each version.
            yield from self._staged(Place(*saved["place"][: len(Place._fields)]) if is_same else None)
            with self._table(is_lasting=True) as table:
                table.require_staged()
                return (yield from self._end(table))
        except (PermanentError, psycopg.Error, _OtherTypesError) as e:
            if not isinstance(e, psycopg.Error) or is_permanent(e):
                with self._table(is_lasting=True) as table:
                    table.drop_staging()
            raise

    def _staged(self, begin: Place | None) -> Generator[Progress | None, None, None]:
        """Stage the source part by part, from its staged end or from its begin."""
        with self._table(is_lasting=True) as table:
            if begin is None or not table.is_staged():
                table.make_staging()
                begin = self._source.begin
            items = table.items(begin)
        while not table.is_done:
            with self._table(is_lasting=True) as table:
                table.require_staged()
                yield from self._copied(table, items, self._source.bytes_read + _COMMITTED_BYTES * PART_BYTES)
                self._save()

    def _copied(
        self, table: Table, items: Iterator[tuple[int, Item]], end: float = math.inf
    ) -> Generator[Progress | None, None, None]:
        """Copy the records, until so many bytes of the source are read."""
        while not table.is_done and self._source.bytes_read < end:
            if table.copy(items):
                yield Progress(self._source.place().records, self._source.expected)
        self._source.require_unchanged()

    def _end(self, table: Table, is_filled: bool = False) -> Generator[Progress | None, None, Progress]:
        """Write the staged rows to the target unless COPY has filled it; returns the counts, the job's result."""
        end, read = self._source.place(), time.monotonic()
        counts: dict[str, Any] = dict.fromkeys(_COUNTS, 0) | {"inserted": table.copied}
        if not is_filled:
            yield Progress(end.records, end.records, phase="merging")
            counts = table.write()
        oddities = {"literal_quotes": end.literal_quotes, "repeated_headers": end.repeated_headers}
        counts |= {name: number for name, number in oddities.items() if number}
        seconds = {"reading": round(read - self._began, 3), "merging": round(time.monotonic() - read, 3)}
        counts |= {"bytes": self._source.bytes_read, "seconds": seconds}
        result = Progress(end.records, end.records, **counts)
        self._finish(table.conn)
        if self._is_job:
            self._save(counts=result)
        return result

    def _save(self, **more: Any) -> None:
        """Save where the next run goes on; a source without parts needs no place, and its columns may be many."""
        where = {"file": self._source.version, "place": list(self._source.place())} if self._source.has_parts else {}
        self._context.save(where | more)


def staging_of(job_id: UUID) -> str:
    """The name of a job's staging table."""
    return f"{_STAGING}_{job_id.hex}"


class Table:
    """The target of one load with its staging table, in one transaction of the caller."""

    def __init__(
        self,
        conn: psycopg.Connection[Any],
        context: Context,
        wanted: Target,
        source: Source,
        is_lasting: bool = False,
    ) -> None:
        """A lasting staging table is there for the other transactions of its job too."""
        self.is_done, self.copied = False, 0  # whether `copy` has come to the end of the records; the rows until then
        self.conn, self._check = conn, context.check
        self._wanted, self._source, self._staging = wanted, source, staging_of(context.job_id)
        self._rejected: int | None = None  # records, once they are counted: a count for each would be slow
        self._cursor = conn.cursor(row_factory=tuple_row)
        self._parts: dict[str, sql.Composable] = {}  # the values of the names in braces in the statements
        [(self._schema, *_)] = self._rows("begin")
        if not self._schema:
            raise PermanentError(f"table: there is no schema for {wanted.table}; does PG_SCHEMA exist?")
        schema, _, name = wanted.table.rpartition(".")
        # A table keeps the default rights of the schema where it was made.
        self._is_here, schema = schema in ("", self._schema), schema or self._schema
        # An unqualified `pg_class` would mean PostgreSQL's own.
        table, rejects = (sql.Identifier(schema, name + end) for end in ("", _REJECTS))
        values = [column for column in source.columns if column not in wanted.key]
        back = [wanted.deleted_column] if wanted.delete_missing == "soft" else []  # NULL in a row that comes back
        self._parts = {
            **{"table": table, "table_name": sql.Literal(table.as_string()), "name": sql.Identifier(name)},
            **{"rejects": rejects, "rejects_name": sql.Literal(rejects.as_string())},
            "delimiter": sql.Literal(source.delimiter),
            "columns": joined("{}", source.columns),
            "new_columns": joined("new.{}", source.columns),
            "typed": sql.SQL(", ").join(_typed("{} ", column, kind) for column, kind in source.columns.items()),
            "key": joined("{}", wanted.key),
            "key_names": sql.SQL(", ").join(map(sql.Literal, wanted.key)),
            "new_key": joined("new.{}", wanted.key),
            "match": joined("old.{0} = new.{0}", wanted.key, " AND "),
            "old_values": joined("old.{}", values),
            "job_id": sql.Literal(str(context.job_id)),
        }
        self._place_staging(*((self._schema, "UNLOGGED") if is_lasting else ("pg_temp", "TEMPORARY")))

        # Without values all columns are the key: equal keys are equal rows, for no ROW() differs from another.
        returns = [_formatted("old.{} IS NOT NULL", name) for name in back]
        for name, new in (("differs", joined("new.{}", values)), ("conflicts", joined("excluded.{}", values))):
            self._parts[name] = sql.SQL(" OR ").join([self._composed("differs", new_values=new), *returns])
        self._parts["changes"] = joined("{0} = excluded.{0}", [*values, *back] or wanted.key)

    def _place_staging(self, schema: str, lifetime: LiteralString) -> None:
        staging = sql.Identifier(schema, self._staging)
        name = sql.Literal(staging.as_string())
        self._parts |= {"staging": staging, "staging_name": name, "lifetime": sql.SQL(lifetime)}
        self._parts["staged_rejects"] = sql.Identifier(schema, self._staging + _REJECTS)

    def find(self) -> bool:
        """True if the staging table can become the missing target; else create or change the target as needed.

        Raises PermanentError when the table does not fit the records.
        """
        if not self._value("kind"):
            self._do("lock")
        if not self._value("kind"):
            if self._value("is_future"):
                return True
            self._do("CREATE TABLE {table} ({typed})")
            self._complete()
        self._change()
        return False

    def columns(self, name: str = "table_name", types: LiteralString = "columns") -> dict[str, str]:
        """The columns of the target, or of its staging table, with their types; none where it is missing."""
        return dict(self._rows(types, table_name=self._parts[name]))

    def takes_copy(self) -> bool:
        """Whether COPY may fill the target itself: it appends, or the target is empty; then no other load writes to it.

        Raises PermanentError when the table does not fit the records.
        """
        wanted = self._wanted
        if wanted.mode == "scd2" or wanted.partition or wanted.delete_missing or wanted.max_errors:
            return False
        existing, columns, is_append = self._fitting(), self._source.columns, wanted.mode == "append"
        self._parts["is_free"] = self._composed("true" if is_append else "NOT EXISTS (SELECT FROM {table})")
        if not existing.keys() >= columns.keys() or self._wider(existing) or not self._value("takes_copy"):
            return False
        # Any lock keeps the types, which `items` reads; an empty table has to stay so.
        self._do("LOCK TABLE {table} IN " + ("" if is_append else "SHARE ") + "ROW EXCLUSIVE MODE")
        self._parts |= {"staging": self._parts["table"], "staging_name": self._parts["table_name"]}
        return bool(self._value("takes_copy"))

    def make_staging(self) -> None:
        """Make the staging table anew, as the target is now; while there is no target, of the source's types."""
        for (name,) in self._rows("left_over"):
            self._do("DROP TABLE IF EXISTS {left}", left=sql.Identifier(self._schema, name))
        existing = self._fitting() if self._value("kind") else {}
        self._source.in_target = existing
        if not existing and self._is_here:
            self._place_staging(self._schema, "")  # the staging table becomes the target
        like = "LIKE {table} INCLUDING CONSTRAINTS" if existing else "{typed}"
        self._do("stage", like=self._composed(like))
        if self._wanted.max_errors:
            self._do("stage_rejects")
        columns = self._source.columns
        changes = [_formatted("DROP COLUMN {} CASCADE", name) for name in existing if name not in columns]
        changes += [_formatted("ALTER COLUMN {} SET NOT NULL", name) for name in self._wanted.key]
        if existing:
            changes += [_typed("ADD COLUMN {} ", name, columns[name]) for name in columns if name not in existing]
            changes += [_typed("ALTER COLUMN {} TYPE ", name, new) for name, new in self._wider(existing).items()]
        if changes:
            self._do("ALTER TABLE {staging} {changes}", changes=sql.SQL(", ").join(changes))

    def is_staged(self) -> bool:
        """Whether the staging table is there with its rows: the server may have crashed."""
        is_there = self._value("SELECT to_regclass({staging_name}) IS NOT NULL")
        # All records of the parts may be rejected.
        tables = ["staging", "staged_rejects"][: 1 + bool(self._wanted.max_errors)]
        exists: LiteralString = "SELECT EXISTS (SELECT FROM {rows})"
        return bool(is_there and any(self._value(exists, rows=self._parts[table]) for table in tables))

    def require_staged(self) -> None:
        """Raise RuntimeError when records that this run or an earlier one has staged are gone."""
        if self._source.place().records and not self.is_staged():
            raise RuntimeError("the server has crashed, and lost what was staged: the next run begins anew")

    def drop_staging(self) -> None:
        """Drop the staging table, if there is one."""
        self._do("DROP TABLE IF EXISTS {staging}, {staged_rejects}")

    def items(self, begin: Place) -> Iterator[tuple[int, Item]]:
        """The source's items from there on, for `copy`."""
        types = self.columns("staging_name", "base_types")
        is_utf8 = self.conn.info.encoding == "utf-8"  # the encoding of texts in a binary COPY
        self._source.stored = [types[name] for name in self._source.columns] if is_utf8 else ()
        return self._source.items(begin, self._wanted.batch_rows)

    def copy(self, items: Iterator[tuple[int, Item]]) -> int:
        """Copy the next batch into the staging table; returns how many records it had.

        PostgreSQL reports an error at the end of a COPY, so a batch is one; rows of Arrow behind its text are another.
        """
        before = self._source.place().records
        following = next(items, None)
        self.is_done = following is None
        while following is not None:
            number, item = following
            if not isinstance(item, Batch):
                following = self._copy_as_text(chain([following], items))
                continue
            if not item.binary or not self._copied_in_binary(item.binary):
                self._copy_each(item.singles(number))
            following = None
        return self._source.place().records - before

    def _copied_in_binary(self, parts: Sequence[Any]) -> bool:
        """True if PostgreSQL takes the binary rows. Else `copy` sends them as text: its errors name a row."""
        try:
            with self.conn.transaction(), self._cursor.copy(self._composed("copy_binary")) as copy:
                for part in parts:
                    copy.write(part)
        except psycopg.Error as e:
            if not is_permanent(e):
                raise
            return False
        self.copied += self._cursor.rowcount
        return True

    def _copy_each(self, items: Iterable[tuple[int, Item]]) -> None:
        """Copy all these records, a batch at a time."""
        left = iter(items)
        while (first := next(left, None)) is not None:
            self._copy_as_text(chain([first], left))

    def _copy_as_text(self, items: Iterator[tuple[int, Item]]) -> tuple[int, Batch] | None:
        """Copy the next records, up to a batch of them; where PostgreSQL refuses one, copy each half alone.

        Returns the rows of Arrow that end the batch, if they do. Raises the error of the first record beyond
        `max_errors`, behind which none is copied.
        """
        # Two lists: a tuple for each record would cost a fifth of the time of records that come one by one.
        numbers, sent = list[int](), list[Item]()
        rejects: list[tuple[int, Rejected]] = []
        chunk: list[str] = []
        following: tuple[int, Batch] | None = None
        error: psycopg.Error | None = None
        rows = size = unsent = 0
        try:
            with self.conn.transaction(), self._cursor.copy(self._composed("copy")) as copy:
                copy.write(b"\n")  # the header
                for number, item in items:
                    count = 1
                    if isinstance(item, str):  # most are
                        # Before PostgreSQL 18 a line `\\.` ends the data.
                        text = f"{item}\n" if item != "\\." else '"\\."\n'
                        size += len(text) + _RECORD_SIZE
                    elif isinstance(item, Batch):
                        following = number, item
                        break
                    elif isinstance(item, Block):
                        text, count = item.text, item.records
                        size += len(text)
                    else:
                        rejects.append((number, item))
                        text = ""
                        size += len(item.text)
                    numbers.append(number)
                    sent.append(item)
                    chunk.append(text)
                    rows, unsent = rows + count, unsent + len(text)
                    if unsent > _COPIED_AT_ONCE:  # a call for each record would be slow
                        copy.write("".join(chunk).encode())
                        chunk, unsent = [], 0
                    if rows >= self._wanted.batch_rows or size > _BATCH_SIZE or len(rejects) > self._wanted.max_errors:
                        break
                copy.write("".join(chunk).encode())
        except psycopg.Error as e:
            is_twice = isinstance(e, errors.UniqueViolation) and self._wanted.mode != "append"  # for `_at_once`
            if not (sent and _IN_COPY.search(e.diag.context or "")) or is_twice or not is_permanent(e):
                raise
            error = e
        else:
            self.copied += self._cursor.rowcount
        if error:  # outside of its handler: in the chain of another error its DETAIL would quote a row
            self._copy_halves([*zip(numbers, sent, strict=True)], error)
        elif rejects:
            self._reject(rejects)
        return following

    def _copy_halves(self, sent: list[tuple[int, Item]], error: psycopg.Error) -> None:
        """Copy each half of the records that PostgreSQL has refused with this error; a single one is rejected."""
        number, item = sent[0]
        if len(sent) == 1 and isinstance(item, Block):
            sent = [*item.singles(number)]
        if len(sent) == 1:
            self._reject([(number, Rejected(self._reason(error), str(sent[0][1])))])
            return
        half = len(sent) // 2
        self._copy_each(sent[:half])
        self._copy_each(sent[half:])

    def _reject(self, rejects: list[tuple[int, Rejected]]) -> None:
        most = self._wanted.max_errors
        if most and self._rejected is None:  # earlier transactions may have staged some
            self._rejected = self._value("SELECT count(*) FROM {staged_rejects}")
        left = most - (self._rejected or 0)
        if len(rejects) > left:
            number, (reason, text) = rejects[left]
            reason += f"; more rows are wrong than max_errors allows ({most})" if most else ""
            raise self._source.error(number, reason, len(_LINE_ENDS.findall(text)))
        rows = [
            (*self._source.where(number), text.replace("\0", "\ufffd").encode("utf-8", "replace").decode(), reason)
            for number, (reason, text) in rejects
        ]
        self._cursor.executemany(self._composed("INSERT INTO {staged_rejects} VALUES (%s, %s, %s, %s)"), rows)
        self._rejected = most - left + len(rejects)

    def _keep_rejects(self) -> int:
        """Move the rejected records to the target's own table of them; returns their number."""
        if not self._wanted.max_errors:
            return 0
        self._do("lock")
        if self._value("SELECT to_regclass({rejects_name}) IS NULL"):
            self._do("create_rejects")
            for (statement,) in self._rows("rights_to_rejects"):
                self._cursor.execute(statement.encode())
        return self._do("keep_rejects")

    def write(self) -> dict[str, int]:
        """Bring the staged rows into the target, and drop the staging table; returns the numbers of rows."""
        is_new, scope = self.find(), self._scope()
        counts = dict.fromkeys(_COUNTS, 0) | (self._adopt() if is_new else self._merge(scope))
        counts["rejected"] = self._keep_rejects()
        self.drop_staging()
        return counts

    def _merge(self, scope: sql.Composable) -> dict[str, int]:
        wanted = self._wanted
        self._do("SET LOCAL work_mem = '64MB'")
        [(staged, distinct)] = self._rows("count_staged" if wanted.key else "SELECT count(*), count(*) FROM {staging}")
        if wanted.key:
            self._do("ANALYZE {staging} ({key})")
            self._parts["last"] = self._composed("last" if distinct < staged else "{staging}")
        has_rejects: LiteralString = "SELECT EXISTS (SELECT FROM {staged_rejects})"
        # A rejected record may be the row that seems to be missing.
        is_whole = not (wanted.max_errors and self._value(has_rejects))
        deletes = wanted.mode == "replace" or (bool(wanted.delete_missing) and is_whole)
        if deletes or wanted.mode == "scd2":
            # No other writes; readers go on.
            self._do("LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE")
        # Not now(): the transaction may have begun before the versions that another load has made meanwhile.
        now = self._value("SELECT clock_timestamp()::text")  # psycopg reads ISO dates alone
        self._parts["now"] = sql.SQL("{}::timestamptz").format(sql.Literal(now))
        counted: LiteralString = "SELECT count(*) FROM {table} AS old WHERE {scope}"
        before = self._value(counted, scope=scope) if deletes else 0
        deleted = self._vanish(scope) if deletes else 0
        inserted, updated = self._insert()
        vanished = deleted if wanted.key else max(0, deleted - inserted)
        if vanished > wanted.max_delete * before:
            raise PermanentError(
                f"max_delete: {vanished} of the {before} rows would vanish, and it allows"
                f" {wanted.max_delete:.0%}; does the {self._source.names_columns} lack rows?"
            )
        unchanged = 0 if wanted.mode == "append" or not wanted.key else distinct - inserted - updated
        counts = {"inserted": inserted, "updated": updated, "unchanged": unchanged, "deleted": deleted}
        return counts | {"duplicate_keys": staged - distinct}

    def _scope(self) -> sql.Composable:
        """The condition of the rows that the load may delete: those of the partition, or those that are there."""
        wanted = self._wanted
        if wanted.mode == "scd2":
            return sql.SQL("old.is_current")
        if wanted.delete_missing == "soft":
            return _formatted("old.{} IS NULL", wanted.deleted_column)
        is_in = [
            _formatted("old.{} ", name) + (sql.SQL("IS NULL") if value is None else sql.SQL("= {}").format(str(value)))
            for name, value in wanted.partition.items()
        ]
        scope = sql.SQL(" AND ").join(is_in) if is_in else sql.SQL("true")
        unfit: LiteralString = "SELECT count(*) FROM {staging} AS old WHERE ({scope}) IS NOT TRUE"
        if is_in and self._value(unfit, scope=scope):
            raise PermanentError(f"partition: the {self._source.names_columns} has rows of another one")
        return scope

    def _vanish(self, scope: sql.Composable) -> int:
        """Delete or close the rows that the source lacks; without a key all rows, which then come anew.

        Not TRUNCATE and no swap of tables: a reader whose snapshot is older would see an empty table.
        """
        wanted = self._wanted
        missing = self._composed("missing", scope=scope) if wanted.key else scope
        if wanted.mode == "scd2":
            change = "UPDATE {table} AS old SET valid_to = {now}, is_current = false WHERE {missing}"
        elif wanted.delete_missing == "soft":
            change = "UPDATE {table} AS old SET {deleted} = {now} WHERE {missing}"
        else:
            change = "DELETE FROM {table} AS old WHERE {missing}"
        return self._do(change, missing=missing, deleted=sql.Identifier(wanted.deleted_column))

    def _insert(self) -> tuple[int, int]:
        """Insert what is new, and update what differs; the numbers of both."""
        wanted = self._wanted
        if wanted.mode == "scd2":
            closed = self._do("close")
            opened = self._do("open")
            return opened - closed, closed
        if wanted.mode == "append" or not wanted.key:
            return self._do("append"), 0
        [before] = self._rows("written")
        self._do("merge")
        [after] = self._rows("written")
        return after[0] - before[0], after[1] - before[1]

    def _do(self, statement: LiteralString, **more: sql.Composable) -> int:
        """Execute a statement; returns the number of rows."""
        return self._result(statement, **more).command_tuples or 0

    def _rows(self, statement: LiteralString, **more: sql.Composable) -> list[tuple[Any, ...]]:
        result = self._result(statement, **more)
        values = Transformer(self.conn)
        values.set_pgresult(result)
        return values.load_rows(0, result.ntuples, tuple)

    def _value(self, statement: LiteralString, **more: sql.Composable) -> Any:
        [[value]] = self._rows(statement, **more)
        return value

    def _result(self, statement: LiteralString, **more: sql.Composable) -> PGresult:
        """The result of a statement, which may be long; a stop at its safe points ends it in the server too."""
        pg = self.conn.pgconn
        pg.send_query(self._composed(statement, **more).as_bytes(self.conn))
        try:
            return answered(pg, self._check)
        except psycopg.Error:
            raise
        except BaseException:
            with suppress(psycopg.Error):
                self.conn.cancel_safe(timeout=_CANCEL_SEC)
            raise
        finally:
            deque(iter(pg.get_result, None), 0)

    def _adopt(self) -> dict[str, int]:
        """Make the staging table the target, which is quicker than to write the rows once more."""
        wanted, duplicates = self._wanted, 0
        self._do("ALTER TABLE {staging} RESET (autovacuum_enabled)")
        self._do("ALTER TABLE {staging} RENAME TO {name}")
        try:
            with self.conn.transaction():
                self._complete()
        except errors.UniqueViolation:
            if wanted.mode == "append":
                raise
            duplicates = self._do("drop_earlier")
            self._complete()
        return {"inserted": self._value("SELECT count(*) FROM {table}"), "duplicate_keys": duplicates}

    def _complete(self) -> None:
        """Give a new table the load's own columns, and its key."""
        wanted, own = self._wanted, _own_columns(self._wanted)
        key = [*wanted.key, "valid_from"] if wanted.mode == "scd2" else wanted.key
        changes = [_typed("ADD COLUMN {} ", name, kind) for name, kind in own.items()]
        changes += [sql.SQL("ADD PRIMARY KEY ({})").format(joined("{}", key))] if key else []
        if changes:
            self._do("ALTER TABLE {table} {changes}", changes=sql.SQL(", ").join(changes))
        if wanted.mode == "scd2":
            self._do("CREATE UNIQUE INDEX ON {table} ({key}) WHERE is_current")

    def _composed(self, statement: LiteralString, **more: sql.Composable) -> sql.Composed:
        """The statement of this name in load.sql, or this one."""
        return sql.SQL(_SQL.get(statement, statement)).format(**(self._parts | more))

    def _fitting(self) -> dict[str, str]:
        """The columns of the target with their types; raises PermanentError when it does not fit the records."""
        table, key = self._wanted.table, self._wanted.key
        if self._value("kind") not in ("r", "p"):
            raise PermanentError(f"table: {table} should be a table")
        existing = self.columns()
        missing = [name for name in [*self._source.columns, *_own_columns(self._wanted)] if name not in existing]
        if missing and self._wanted.schema_change == "refuse":
            theirs, remedy = self._source.names_columns, 'schema_change "add" adds columns'
            raise PermanentError(
                f"table: {table} should have the {theirs}'s columns, but lacks {_listed(missing)}; {remedy}"
            )
        is_merged = bool(key) and self._wanted.mode in ("merge", "replace")
        if is_merged and not any(set(names) == set(key) for (names,) in self._rows("unique_keys")):
            raise PermanentError(f"key: {table} should have a unique index on exactly {_listed(key)}")
        return existing

    def _wider(self, existing: Mapping[str, str]) -> dict[str, str]:
        """The columns that may have to be wider, with their new types."""
        columns = self._source.columns if self._wanted.schema_change == "widen" else {}
        return {name: new for name in columns if name in existing and (new := wider(existing[name], columns[name]))}

    def _needs(self, name: str, old: str, new: str) -> bool:
        """Whether the staged values of a column of the new type would be others in the old one, or none."""
        cast = sql.SQL("{name}::" + old + "::" + new).format(name=sql.Identifier(name))
        try:
            with self.conn.transaction():
                return bool(self._value("unfit", value=sql.Identifier(name), cast=cast))
        except (errors.DataError, errors.FeatureNotSupported):  # the latter for NaN and infinity
            return True

    def _change(self) -> None:
        """Add the columns that the target lacks, and widen those for which a staged value is too large."""
        existing = self._fitting()
        columns = {**self._source.columns, **_own_columns(self._wanted)}
        changes = [_typed("ADD COLUMN {} ", name, kind) for name, kind in columns.items() if name not in existing]
        back: list[sql.Composed] = []
        for name, new in self._wider(existing).items():
            is_needed = self._needs(name, existing[name], new)
            kind = new if is_needed else existing[name]
            (changes if is_needed else back).append(_typed("ALTER COLUMN {} TYPE ", name, kind))
        for table, some in {"{table}": changes, "{staging}": back}.items():
            if some:
                self._do("ALTER TABLE " + table + " {changes}", changes=sql.SQL(", ").join(some))
        types, staged = self.columns(), self.columns("staging_name")
        if others := [name for name in self._source.columns if types[name] != staged[name]]:
            # A cast would change values without a word: 1.5 would become 2.
            names = _listed(others)
            raise _OtherTypesError(f"{names}: other types since the rows were staged; the next run begins anew")

    def _reason(self, error: psycopg.Error) -> str:
        """The reason why COPY refuses a record, with the column if COPY knows one."""
        place = _IN_COPY.search(error.diag.context or "")
        column = re.search(r", \S+ \d+, \S+ (.+?) ?$", place[0] if place else "")
        reason = reason_of(error, self._wanted.table, self._source.columns)
        return f"column {column[1]}: {reason}" if column and f'"{column[1]}"' not in reason else reason


def answered(pg: PGconn, check: Callable[[], None]) -> PGresult:
    """The last result of the sent statement, or the first of COPY TO STDOUT; raises psycopg.Error."""
    last: PGresult | None = None
    while True:
        while (left := pg.flush()) or pg.is_busy():
            await_bytes(pg, check, select.POLLIN | select.POLLOUT * left)
        if (result := pg.get_result()) is None:
            assert last is not None  # noqa: S101  each statement has a result
            return last
        if result.status == ExecStatus.FATAL_ERROR:
            raise errors.error_from_result(result, "utf-8")
        if result.status == ExecStatus.COPY_OUT:
            return result
        last = result


def await_bytes(pg: PGconn, check: Callable[[], None], events: int = select.POLLIN) -> None:
    """Wait until the server has sent something, or takes more; `check` is called while it is silent."""
    poll = select.poll()
    poll.register(pg.socket, events)
    while not poll.poll(_SLICE_MS):
        check()
    pg.consume_input()


def is_permanent(error: psycopg.Error) -> bool:
    """Whether the next attempt would fail in the same way."""
    return not (error.sqlstate is None or error.sqlstate.startswith(_PASSING) or db.is_outage(error))


@contextmanager
def permanent(subject: str, table: str, columns: Collection[str] = ()) -> Iterator[None]:
    """Raise PermanentError, which begins with the subject, for an error that the next attempt would meet again."""
    try:
        yield
    except psycopg.Error as e:
        if not is_permanent(e):
            raise
        # Not `from e`: its DETAIL quotes rows.
        raise PermanentError(f"{subject}: {reason_of(e, table, columns)}") from None


def reason_of(error: psycopg.Error, table: str = "", columns: Collection[str] = ()) -> str:
    """PostgreSQL's message without the values in it, which may be secrets; the text of a function may be all values."""
    if error.diag.source_file in _LANGUAGES:
        named = re.match(r"(?:\w+ )?PL/pgSQL (?:\w+ )?([^\s(]+)\(", error.diag.context or "")
        source = f"the function {named[1]}" if named else "a function"
        return f"{source} raised an error ({error.sqlstate}), whose text may hold values"
    words = re.sub(rf"{_STAGING}_[0-9a-f]+", lambda _: table, error.diag.message_primary or str(error.sqlstate))
    if error.sqlstate and error.sqlstate.startswith("22"):
        words = re.sub('["«„](.*)["»“]', lambda m: m[0] if m[1] in columns else '"..."', words, flags=re.DOTALL)
    return words


def joined(template: LiteralString, names: Iterable[str], between: LiteralString = ", ") -> sql.Composed:
    """The template with each name, as a list in SQL."""
    return sql.SQL(between).join(_formatted(template, name) for name in names)


def _typed(template: LiteralString, name: str, kind: str) -> sql.Composed:
    return _formatted(template, name) + sql.SQL(kind)  # our own words, or those of PostgreSQL


def wider(old: str, new: str) -> str | None:
    """PURE: the type that holds the values of both types; None where that is the old one.

    An integer may become a larger one or numeric, and numbers and texts may lose their limits.
    """
    name = new.partition("(")[0].strip().lower()
    new, (kind, limit, _) = _ALIASES.get(name, name), old.partition("(")
    is_larger = kind in _BITS and (new == "numeric" or _BITS.get(new, 0) > _BITS[kind])
    is_without = limit and new == _UNLIMITED.get(kind)
    return new if is_larger or is_without or (kind, new) == ("real", "double precision") else None


def _formatted(template: LiteralString, name: str) -> sql.Composed:
    return sql.SQL(template).format(sql.Identifier(name))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
