"""Parquet and ORC for `load.files`; Parquet needs the extra `parquet` alone.

The rows are copied in binary form, or as CSV records where PostgreSQL has to read a text. pyarrow is imported by the
first run: it costs a worker some 60 MB.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from dataloader.pipelines import PermanentError, csv_table
from dataloader.pipelines.csv_table import UNSEEN, Batch, Block, FileSource, Item, Place

if TYPE_CHECKING:
    from typing import BinaryIO

    from dataloader.pipelines.files import Files, Shape

_BUFFER = 2**20  # bytes of a column that are read at once
# Rows that are decoded at once: a long text that is repeated takes few bytes in a file. Bytes of them, and of one COPY.
_BATCH_ROWS, _BATCH_BYTES = 2_000, 2**22
# The type of a new table's column; what is not here is text there.
_TYPES = {
    "null": UNSEEN,
    **{"bool": "boolean", "date32[day]": "date", "date64[ms]": "date", "float": "real", "halffloat": "real"},
    **{"int8": "smallint", "uint8": "smallint", "int16": "smallint", "uint16": "integer", "int32": "integer"},
    **{"uint32": "bigint", "int64": "bigint", "uint64": "numeric", "double": "double precision"},
}


class ArrowFile(FileSource):
    """The rows of a file that pyarrow reads as CSV records, numbered from 1."""

    kind: str  # of file, for people
    remedy = "fetch it again, whole, or name it as what it is"
    chosen: Sequence[int] | None = None  # the places of the columns that `items` gives; by default all
    added: Sequence[Any] = ()  # as those of Shape
    lines = 0

    def __init__(self, path: str, descriptor: int, file: BinaryIO, wanted: Files) -> None:
        """Read what the file says of itself; raises PermanentError where it is no such file that can be loaded."""
        super().__init__(path, descriptor)
        self._select, self._renamed = wanted.select, wanted.columns
        with self._readable():
            schema = self._opened(file)
        self.columns = columns_of(path, schema)

    def _opened(self, file: BinaryIO) -> Any:
        """Open the file; returns its schema."""
        raise NotImplementedError

    def _batches(self, skipped: int) -> Iterator[Any]:
        """The rows behind so many, some at a time."""
        raise NotImplementedError

    def take(self, shape: Shape) -> bool:
        self.stored, self.chosen, self.added, self.lines = shape.stored, shape.places, shape.added, shape.lines
        return len(shape.places) + len(shape.added) + shape.lines == shape.width

    def items(self, begin: Place, size: int) -> Iterator[tuple[int, Item]]:
        self.close()  # two threads may not read one file
        self._count = begin.records  # at once, for `place`
        self._reading = self._items(size)
        return self._reading

    def _items(self, size: int) -> Generator[tuple[int, Item], None, None]:
        from dataloader.pipelines.binary_copy import ahead

        batches = self._whole(self._batches(self._count), self._count + 1)
        for batch in ahead(copied(batches, size, self.stored, self._block)):
            yield self._counted_batch(batch)
        self._require_all()

    def _whole(self, batches: Iterator[Any], number: int) -> Iterator[Any]:
        """The batches with the added columns behind the chosen ones; `number` is that of the first row."""
        for batch in batches:
            chosen = batch.columns if self.chosen is None else map(batch.column, self.chosen)
            behind = number + batch.num_rows
            yield widened(chosen, batch.num_rows, self.added, [range(number, behind)] * self.lines)
            number = behind

    def _block(self, batch: Any) -> Block:
        with self._readable():
            return block_of(batch)

    def records(self, begin: Place) -> Iterator[tuple[int, str]]:
        self.close()
        self._count = begin.records
        return self._records()

    def _records(self) -> Iterator[tuple[int, str]]:
        for batch in self._batches(self._count):
            with self._readable():
                texts = csv_records(batch)
            for text in texts:
                yield self._counted(text, len(text))
        self._require_all()

    def _require_all(self) -> None:
        if self._count != self.total:  # pyarrow ends where the pages of a row group end, without an error
            fault = f"it has {self._count} rows, and should have {self.total}"
            raise PermanentError(f"{self.origin}: is damaged: {fault}")

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Errors of pyarrow as ours: their texts may quote values."""
        import pyarrow

        try:
            yield
            return
        except pyarrow.ArrowNotImplementedError as e:  # its text names types alone
            raise PermanentError(f"{self.origin}: pyarrow cannot read it: {e}") from None
        except (pyarrow.ArrowException, OSError, UnicodeError) as e:
            if isinstance(e, OSError) and e.errno:
                raise
        self.require_unchanged()  # outside of the handler, for the chain of its error would show pyarrow's text
        raise PermanentError(f"{self.origin}: is no {self.kind} file, or is damaged; {self.remedy}")


class ParquetFile(ArrowFile):
    """A Parquet file; its row groups bound what is read at once."""

    kind = "Parquet"

    def _opened(self, file: BinaryIO) -> Any:
        from pyarrow import parquet

        # Nanoseconds, pyarrow's own choice for INT96, would give times before 1678 and after 2262 other values.
        self._parquet: Any = parquet.ParquetFile(
            file, buffer_size=_BUFFER, pre_buffer=False, coerce_int96_timestamp_unit="us"
        )
        self.total = self._parquet.metadata.num_rows
        for column in (self._parquet.schema.column(n) for n in range(len(self._parquet.schema))):
            if column.converted_type == "INTERVAL" and self._is_used(column.path.split(".")[0]):
                fault = f"pyarrow gives {column.path}, an INTERVAL, as bytes; write it as a text, or leave it out"
                raise PermanentError(f"{self.origin}: {fault}")
        return self._parquet.schema_arrow

    def _is_used(self, name: str) -> bool:
        """Whether the column may be in the table, by the name that it can have there."""
        from dataloader.pipelines.files import snake

        return not self._select or not {name, snake(name), self._renamed.get(name)}.isdisjoint(self._select)

    def _batches(self, skipped: int) -> Iterator[Any]:
        # Row groups before them are not read.
        metadata = self._parquet.metadata
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if skipped >= group.num_rows:
                skipped -= group.num_rows
                continue
            row_bytes = group.total_byte_size // max(1, group.num_rows)
            size = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, row_bytes)))
            batches = self._parquet.iter_batches(batch_size=size, row_groups=[number], use_threads=False)
            while True:
                with self._readable():
                    batch = next(batches, None)
                if batch is None:
                    break
                if skipped < batch.num_rows:
                    yield batch.slice(skipped)
                skipped = max(0, skipped - batch.num_rows)


class OrcFile(ArrowFile):
    """An ORC file, read stripe by stripe."""

    kind = "ORC"
    remedy = f"{ArrowFile.remedy}, or write times before 1678 and after 2262, which pyarrow lacks, as texts"

    def _opened(self, file: BinaryIO) -> Any:
        from pyarrow import orc

        self._orc: Any = orc.ORCFile(file)
        self.total = self._orc.nrows
        return self._orc.schema

    def _batches(self, skipped: int) -> Iterator[Any]:
        for number in range(self._orc.nstripes):
            with self._readable():
                stripe = self._orc.read_stripe(number)
            for begin in range(skipped, stripe.num_rows, _BATCH_ROWS):
                yield stripe.slice(begin, _BATCH_ROWS)
            skipped = max(0, skipped - stripe.num_rows)


def columns_of(origin: str, schema: Any) -> dict[str, str]:
    """The columns of an Arrow schema with the types of a new table; raises PermanentError for one name twice."""
    try:
        if not (names := csv_table.unique(schema.names)):
            raise ValueError("there are none")
    except ValueError as e:
        raise PermanentError(f"{origin}: the names of its columns: {e}; write it again with other names") from None
    return dict(zip(names, (_type(field.type) for field in schema), strict=True))


def widened(columns: Iterable[Any], rows: int, added: Iterable[Any], numbers: Iterable[Any]) -> Any:
    """PURE: a batch of the columns; behind them a column of each added value, and of each sequence of numbers."""
    import pyarrow

    arrays = [*columns, *(pyarrow.repeat(pyarrow.scalar(value), rows) for value in added)]
    arrays += [pyarrow.array(each, pyarrow.int64()) for each in numbers]
    return pyarrow.RecordBatch.from_arrays(arrays, [*map(str, range(len(arrays)))])


def copied(batches: Iterable[Any], size: int, stored: Sequence[str], block: Callable[[Any], Block]) -> Iterator[Batch]:
    """The rows of batches for COPY into columns of these types, up to `size` and some MB at once."""
    from dataloader.pipelines.binary_copy import encoded, gathered

    for batch in gathered(batches, size, _BATCH_ROWS, _BATCH_BYTES):
        binary = encoded(batch, stored) if stored else None
        yield Batch(batch.num_rows, batch.nbytes, binary, partial(_singles, block, batch))


def _singles(block: Callable[[Any], Block], batch: Any, number: int) -> Iterator[tuple[int, str]]:
    return block(batch).singles(number)


def block_of(batch: Any) -> Block:
    """PURE: the rows of a batch as CSV; raises pyarrow's errors."""
    return Block("\n".join([*csv_records(batch), ""]), batch.num_rows, has_lines=False)


def csv_records(batch: Any) -> list[str]:
    """PURE: the rows of a batch as CSV: every value in quotes, and a null as nothing."""
    from pyarrow import compute

    columns = []
    for column in batch.columns:
        escaped = compute.replace_substring(texts_of(column), '"', '""')
        columns.append(compute.fill_null(compute.binary_join_element_wise('"', escaped, '"', ""), ""))
    records: list[str] = compute.binary_join_element_wise(*columns, ",").to_pylist()
    return records


def decoded(column: Any) -> Any:
    """PURE: the column without a dictionary, runs or views, for which Arrow lacks functions."""
    from pyarrow import binary, compute, string, types

    if types.is_run_end_encoded(column.type):
        return decoded(compute.run_end_decode(column))
    if types.is_dictionary(column.type):
        return decoded(column.dictionary).take(column.indices)
    if types.is_string_view(column.type):
        return column.cast(string())
    return column.cast(binary()) if types.is_binary_view(column.type) else column


def texts_of(column: Any) -> Any:
    """PURE: the values of a column as PostgreSQL reads them; raises pyarrow's errors, and PermanentError."""
    import pyarrow
    from pyarrow import compute, types

    column = decoded(column)
    kind = column.type
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _python(column, str) if kind.extension_name == "arrow.uuid" else texts_of(column.storage)
    if types.is_duration(kind):
        cut = compute.CastOptions(pyarrow.duration("us"), allow_time_truncate=True)
        return _python(column.cast(options=cut).cast(pyarrow.int64()), "{} microseconds".format)
    if types.is_interval(kind):
        return _python(column, lambda of: f"{of.months} months {of.days} days {of.nanoseconds // 1000} microseconds")
    if types.is_timestamp(kind):
        if kind.unit == "ns":  # PostgreSQL would round, and so move a value into the next year
            column = compute.floor_temporal(column, unit="microsecond").cast(pyarrow.timestamp("us", kind.tz))
        if kind.tz:
            column = column.cast(pyarrow.timestamp(column.type.unit, "UTC"))
    elif types.is_time64(kind):
        column = column.cast(pyarrow.time64("us"), safe=False)
    elif types.is_float16(kind):
        column = column.cast(pyarrow.float32())
    elif types.is_nested(kind):
        # JSON's names are texts; a map by times or bytes stays a list of pairs.
        maps = None if re.search("map<(?!string|u?int)", str(kind)) else "lossy"  # of equal names the last counts
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Encountered key")  # its text has the name, which may be a secret
            try:
                values = column.to_pylist(maps_as_pydicts=maps)
            except (ValueError, OverflowError) as e:
                if isinstance(e, pyarrow.ArrowException | UnicodeError):
                    raise
                fault = f"a value of the type {kind} has a time with nanoseconds, or outside of the years 1 to 9999"
                raise PermanentError(f"{fault}; cast its times to microseconds, or the value to a text") from None
        return _texts(values, lambda value: json.dumps(value, default=_json, ensure_ascii=False))
    elif types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return _python(column, lambda value: f"\\x{value.hex()}")
    return column.cast(pyarrow.string())


def _json(value: Any) -> str:
    return f"\\x{value.hex()}" if isinstance(value, bytes) else str(value)


def _python(column: Any, text_of: Any) -> Any:
    return _texts(column.to_pylist(), text_of)


def _texts(values: list[Any], text_of: Any) -> Any:
    import pyarrow

    return pyarrow.array([None if value is None else text_of(value) for value in values], pyarrow.string())


def _type(kind: Any) -> str:
    """PURE: the type of a new table's column for one of pyarrow."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _type(kind.value_type)
    if isinstance(kind, pyarrow.BaseExtensionType):
        return {"arrow.uuid": "uuid", "arrow.json": "jsonb"}.get(kind.extension_name) or _type(kind.storage_type)
    if types.is_timestamp(kind):
        return "timestamp with time zone" if kind.tz else "timestamp"
    if types.is_decimal(kind) and kind.scale >= 0:
        return f"numeric({kind.precision},{kind.scale})"
    checks = {"is_decimal": "numeric", "is_time": "time", "is_nested": "jsonb"}
    checks |= dict.fromkeys(("is_duration", "is_interval"), "interval")
    checks |= dict.fromkeys(("is_binary", "is_large_binary", "is_fixed_size_binary", "is_binary_view"), "bytea")
    return next((ours for check, ours in checks.items() if getattr(types, check)(kind)), _TYPES.get(str(kind), "text"))
