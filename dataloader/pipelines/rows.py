"""Rows whose values have classes, as the records of csv_table: those of `context.load`, of JSON and of workbooks.

Dicts and tuples of a pipeline become text by psycopg's own rules. Whatever exports an Arrow stream (pandas, polars,
pyarrow, duckdb) comes batch by batch; pyarrow reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import chain, islice
from typing import Any
from uuid import UUID

import psycopg
from psycopg.adapt import PyFormat, Transformer

from dataloader.pipelines import Context, PermanentError, Progress, csv_table, parquet, validated
from dataloader.pipelines.columns import CUTTING, OF_TIME, Reader, Values, kind_of
from dataloader.pipelines.csv_table import (
    UNSEEN,
    FileSource,
    Finish,
    Item,
    Place,
    Rejected,
    Source,
    Target,
    identifier,
    unique,
)

SAMPLE = 1_000  # rows that decide the columns and the types of a new table
Columns = Sequence[str] | Mapping[str, str]
# The type of a new table's column whose values are all of these types: the first that fits, else text.
_TYPES: list[tuple[str, tuple[type, ...]]] = [
    *(("boolean", (bool,)), ("bigint", (int,)), ("double precision", (float,)), ("numeric", (int, float, Decimal))),
    *(("timestamp", (datetime,)), ("date", (date,)), ("time", (time,)), ("interval", (timedelta,)), ("uuid", (UUID,))),
    *(("bytea", (bytes, bytearray, memoryview)), ("jsonb", (dict, list, tuple))),
]


_DAY = re.compile(r"[0-9]{4}([-/])[0-9]{1,2}\1[0-9]{1,2}")  # PostgreSQL reads it in one way too


class _Guess(str):
    """The type of a new table's column by the first rows; nobody has given it."""


def _is_no_text(value: Any) -> bool:
    return not isinstance(value, str)


# The values that a guessed type keeps. PostgreSQL would read others by its own rules, 007 as 7.
_KEPT: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("bigint", "numeric", "boolean", *OF_TIME, "interval", "bytea", "jsonb"), _is_no_text),
    "double precision": lambda value: isinstance(value, float) or (isinstance(value, int) and abs(value) <= 2**53),
}


def load(
    context: Context,
    table: str,
    rows: Any,
    key: Sequence[str],
    columns: Columns | None,
    finish: Finish | None,
    how: Mapping[str, Any],
) -> dict[str, Any]:
    """Load the rows as `Context.load` promises."""
    wanted = validated(Target, {"table": table, **({"key": list(key)} if key else {}), **how})
    if how.get("mode") == "append" and finish is None:
        raise PermanentError("finish: should save the checkpoint or a state, or a second run of the job appends again")
    source = Frames(rows) if hasattr(rows, "__arrow_c_stream__") else Rows(rows, columns)
    if not source.columns:
        if how.get("mode") == "replace" or how.get("delete_missing"):
            raise PermanentError("columns: should be given where there may be no rows, for then the table's go")
        with context.transaction() as conn:
            if finish:
                finish(conn)
        return {"processed": 0, "total": 0}

    def report(step: Progress) -> None:
        # A page of an API is a small load; its pipeline reports the pages itself.
        context.progress(step) if step["processed"] >= wanted.batch_rows else context.check()

    return followed(csv_table.load(context, wanted, source, finish, is_job=False), report)


def followed(steps: Generator[Progress | None, None, Progress], each: Callable[[Progress], None]) -> dict[str, Any]:
    """Take a load's steps outside of a pipeline, and call `each` after each of them; return what was counted."""
    with closing(steps):
        while True:
            try:
                each(next(steps) or Progress(0))
            except StopIteration as e:
                return dict(e.value)


class Rows(Source):
    """Dicts, or tuples in the order of the columns."""

    names_columns = "rows"

    def __init__(self, rows: Iterable[Any], columns: Columns | None, written: Values | None = None) -> None:
        """`columns` are by default those of the first rows. Raises PermanentError for rows without names.

        `written` says how texts are written; without it PostgreSQL decides.
        """
        super().__init__("context.load")
        self._written = written
        self._nulls = frozenset(written.null if written else ())
        self.total = len(rows) if isinstance(rows, Sized) else 0
        self._unknown = (
            f"no column of the first {SAMPLE} rows: give `columns`" if columns is None else "not in `columns`"
        )
        rows = iter(rows)
        sample = list(islice(rows, SAMPLE))
        self._rows, self._dumpers = chain(sample, rows), Transformer()
        if columns is None and not all(isinstance(row, Mapping) for row in sample):
            raise PermanentError("columns: should name the values of each row, because the rows are no dicts")
        try:
            names = dict.fromkeys(name for row in sample for name in row) if columns is None else columns
            self._names = unique([identifier(name) for name in names])
            self._known = frozenset(self._names)
        except (ValueError, TypeError) as e:
            raise PermanentError(f"columns: {e}") from None
        values = [found for row in sample if isinstance(found := self._values(row), list)]
        inferred = {name: _Guess(_type([row[at] for row in values])) for at, name in enumerate(self._names)}
        self.columns = columns if isinstance(columns, Mapping) else inferred

    def records(self, begin: Place) -> Iterator[tuple[int, str | Rejected]]:
        # A caller may have given types since, and the table may be there.
        guesses = {n: kind for n, kind in self.columns.items() if isinstance(kind, _Guess) and n not in self.in_target}
        self._is_kept = [_KEPT.get(guesses.get(name, "")) for name in self._names]
        self._readers = [_reader(kind, self._written) for kind in self.stored or self.columns.values()]
        for row in self._rows:
            values = self._values(row)
            text = self._text(values) if isinstance(values, list) else values
            number, _ = self._counted(text if isinstance(text, str) else "", len(text))
            yield number, text

    def _values(self, row: Any) -> list[Any] | Rejected:
        """The values in the order of the columns; a dict may lack some."""
        if isinstance(row, Mapping):
            if not row.keys() <= self._known:
                other = min(map(repr, row.keys() - self._known))
                return Rejected(f"{other} is {self._unknown}", "")
            values = [row.get(name) for name in self._names]
        elif isinstance(row, list | tuple) and len(row) == len(self._names):
            values = list(row)
        else:
            return Rejected(f"should be a dict, or a tuple of {len(self._names)} values", "")
        if self._nulls:
            values = [None if isinstance(value, str) and value in self._nulls else value for value in values]
        return values

    def _text(self, values: list[Any]) -> str | Rejected:
        fields = []
        for name, value, is_kept, reader in zip(self._names, values, self._is_kept, self._readers, strict=True):
            if is_kept and value is not None and not is_kept(value):
                reason = f"{self.columns[name]}, the type of the first {SAMPLE} rows, may lose a part of it"
                remedy = "give `columns` or `types`"
                return Rejected(f"column {name}: a {type(value).__name__}; {reason}: {remedy}", "")
            if reader and value is not None and (reader.is_of_time or isinstance(value, str)):
                try:
                    value = None if self._written and value == "" else _read(reader, str(value), self._written)
                except ValueError as e:
                    return Rejected(f"column {name}: {e}", "")
            try:
                fields.append(self._field(value))
            except (psycopg.Error, ValueError, TypeError, RecursionError):
                return Rejected(f"column {name}: PostgreSQL has no text for a {type(value).__name__} like this one", "")
        return ",".join(fields)

    def _field(self, value: Any) -> str:
        """The value as CSV; raises an error of psycopg, or ValueError."""
        if type(value) in (int, float):  # the most frequent ones, in a tenth of the time
            return str(value)
        if isinstance(value, bytes | bytearray | memoryview):
            return f"\\x{value.hex()}"
        if isinstance(value, dict | list | tuple):
            value = json.dumps(value, ensure_ascii=False, default=str)
        elif value is not None and not isinstance(value, str):
            dumped = self._dumpers.get_dumper(value, PyFormat.TEXT).dump(value)
            value = None if dumped is None else bytes(dumped).decode()
        if value is None:
            return ""
        if not value.isascii():
            value.encode()  # a lone surrogate
        return quoted(value)


def _reader(type_: str, written: Values | None) -> Reader | None:
    """PURE: reads values for a type: with `written` texts, without it those that PostgreSQL would cut silently."""
    kind = kind_of(type_)
    return Reader(kind, written or Values()) if kind in CUTTING or (written and kind) else None


def _read(reader: Reader, text: str, written: Values | None) -> str:
    """PURE: the text as PostgreSQL reads it; raises ValueError as the reader does, with a remedy of this load.

    A load without `written` lacks the arguments that the reader's remedies name.
    """
    try:
        return reader.read(text)
    except ValueError as e:
        if written:
            raise
        if reader.kind in ("date", "timestamp") and _DAY.fullmatch(text):
            return text
        raise ValueError(f"{str(e).partition(';')[0]}; cast it, or give the column another type") from None


def _type(values: Sequence[Any]) -> str:
    """PURE: the type of a new table's column for these values of Python."""
    given = [value for value in values if value is not None]
    kinds = {type(value) for value in given}
    if not kinds or (len(kinds) > 1 and kinds & {bool, datetime}):  # each is an instance of another type too
        return "text"
    found = next((ours for ours, python in _TYPES if all(issubclass(kind, python) for kind in kinds)), "text")
    if found == "bigint" and not all(-(2**63) <= value < 2**63 for value in given):
        return "numeric"
    return f"{found}tz" if found in ("timestamp", "time") and any(value.tzinfo for value in given) else found


class Frames(Source):
    """The rows of an Arrow stream."""

    names_columns = "rows"

    def __init__(self, frame: Any, written: Values | None = None) -> None:
        """`written` says how texts are written, as for Rows. Raises PermanentError without pyarrow."""
        super().__init__("context.load")
        try:
            import pyarrow
        except ImportError:
            raise PermanentError("context.load reads frames by pyarrow: pip install 'dataloader-farm[files]'") from None
        try:
            stream, self._written = pyarrow.RecordBatchReader.from_stream(frame), written
        except pyarrow.ArrowException as e:  # its text names types alone
            raise PermanentError(f"{self.origin}: pyarrow cannot read the frame: {e}; cast it to other types") from None
        self.batches: Iterator[Any] = iter(stream)
        self.columns = parquet.columns_of(self.origin, stream.schema)
        self._given = [*self.columns.values()]

    def items(self, begin: Place, size: int) -> Iterator[tuple[int, Item]]:
        readers = [_reader(kind, self._written) for kind in self.stored or self.columns.values()]
        for at, (reader, given) in enumerate(zip(readers, self._given, strict=True)):
            if reader and given != "text" and (not reader.is_of_time or kind_of(given) == reader.kind):
                readers[at] = None
        if any(readers) or (self._written and self._written.null and "text" in self._given):
            return self._read_items(size, readers)
        # Not in a thread: a pipeline's own generator may make the batches.
        return map(self._counted_batch, parquet.copied(self.batches, size, self.stored, parquet.block_of))

    def _read_items(self, size: int, readers: Sequence[Reader | None]) -> Iterator[tuple[int, Item]]:
        from pyarrow import RecordBatch

        for batch in self.batches:
            faults: dict[int, str] = {}
            columns = batch.columns
            for at, (reader, given) in enumerate(zip(readers, self._given, strict=True)):
                if reader or (self._written and given == "text"):
                    columns[at] = self._read(columns[at], at, reader, faults)
            read = RecordBatch.from_arrays(columns, names=batch.schema.names)
            if not faults:
                yield from map(self._counted_batch, parquet.copied([read], size, self.stored, parquet.block_of))
                continue
            for row, text in enumerate(parquet.csv_records(read)):
                number, _ = self._counted(text, len(text))
                yield number, Rejected(faults[row], text) if row in faults else text

    def _read(self, column: Any, at: int, reader: Reader | None, faults: dict[int, str]) -> Any:
        """The column's texts as PostgreSQL reads them; `faults` gets the reasons of those that are refused, by row."""
        import pyarrow

        nulls = self._written.null if self._written else ()
        values: list[Any] = parquet.texts_of(column).to_pylist()
        for row, value in enumerate(values):
            if value in nulls or (reader and self._written and value == ""):
                values[row] = None
            elif reader and value is not None:
                try:
                    values[row] = _read(reader, value, self._written)
                except ValueError as e:
                    faults[row] = f"column {list(self.columns)[at]}: {e}"
        return pyarrow.array(values, pyarrow.string())


# --- the rows of files ---


Row = Mapping[str, Any]
Writer = Mapping[type, Callable[[Any], str]]  # the CSV field of a value by its class
_JSON = {"json", "jsonb"}
_INTEGERS = ("smallint", "integer", "bigint")  # the larger ones last
_UNFIT = re.compile("[\0\ud800-\udfff]")  # no text of PostgreSQL has them


def number_type(text: str) -> str:
    """PURE: the type that holds this number exactly."""
    is_whole = text.removeprefix("-").isdecimal() and len(text) <= 20
    return "bigint" if is_whole and -(2**63) <= int(text) < 2**63 else "numeric"


def common_type(kinds: set[str]) -> str:
    """PURE: the type of a new table's column that keeps values of all these types."""
    if len(kinds) < 2:
        return next(iter(kinds), UNSEEN)
    if "jsonb" in kinds:
        return "jsonb"
    if kinds <= {*_INTEGERS}:
        return max(kinds, key=_INTEGERS.index)
    if kinds == {"real", "double precision"}:
        return "double precision"
    if {kind_of(kind) for kind in kinds} <= {"integer", "number"}:
        return "numeric"
    return "timestamp" if kinds == {"date", "timestamp"} else "text"


def quoted(text: str) -> str:
    """PURE: the CSV field of a text that is not null."""
    return f'"{text}"' if '"' not in text else '"' + text.replace('"', '""') + '"'


class TypedFile(FileSource):
    """The rows as CSV records; a subclass reads them, and has the types and the fields of its values."""

    columns: dict[str, str]
    plain: Writer
    as_json: Writer

    def fit(self, types: Mapping[str, str]) -> None:
        for name, kind in types.items():
            if kind in _JSON or self.columns[name] in _JSON:
                self.columns[name] = kind

    def rows(self, begin: Place) -> Iterator[tuple[int, Any]]:
        """The rows from there on, with the numbers by which people know them; the place is `begin` at once."""
        raise NotImplementedError

    def type_of(self, value: Any) -> str | None:
        """The type of a value; None for a null."""
        raise NotImplementedError

    def records(self, begin: Place) -> Iterator[tuple[int, str | Rejected]]:
        return self._records(self.rows(begin))

    def _records(self, rows: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        names, known = list(self.columns), self.columns.keys()
        fields = [self.as_json if kind in _JSON else self.plain for kind in self.columns.values()]
        for number, row in rows:
            if isinstance(row, tuple):  # as it is
                yield number, row
                continue
            if not row.keys() <= known:
                new = next(name for name in row if name not in known)
                raise self.error(number, f"the first rows have no column {new}: name it in `types`")
            # Most rows have the columns in their order: this loop runs once for each value.
            values = row.values() if list(row) == names else map(row.get, names)
            try:
                written = [field[type(value)](value) for field, value in zip(fields, values, strict=True)]
            except RecursionError:
                yield number, Rejected("nested too deeply", "")
                continue
            text = ",".join(written)
            if (not text.isascii() or "\0" in text) and (unfit := _UNFIT.search(text)):
                column = next(name for name, field in zip(names, written, strict=True) if unfit[0] in field)
                fault = "a zero byte (0x00)" if unfit[0] == "\0" else "a byte that is not UTF-8, or half a character"
                reason = f"column {column}: {fault}, which PostgreSQL cannot hold; max_errors rejects such rows"
                yield number, Rejected(reason, _UNFIT.sub("\ufffd", text))
                continue
            yield number, text

    def _columns(self, sample: Iterable[tuple[int, Row | Rejected]], nulls: Sequence[str]) -> dict[str, str]:
        """The columns of the sample's rows with their types; raises PermanentError where no row is readable."""
        kinds: dict[str, set[str]] = {}
        refused: PermanentError | None = None
        for number, row in sample:
            if isinstance(row, Rejected):
                refused = refused or self.error(number, row.reason)
                continue
            for name, value in row.items():
                kinds.setdefault(name, set())
                if (kind := self.type_of(value)) and value not in nulls:
                    kinds[name].add(kind)
        if refused and not kinds:
            raise refused
        return {name: common_type(found) for name, found in kinds.items()}
