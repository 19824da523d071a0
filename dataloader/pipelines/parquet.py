"""`load.parquet`: a Parquet file into a table, by key, all of it or nothing. It needs the extra `parquet`.

The rows become CSV records, so the staging, the merge and the rules for the table are those of `load.csv`. pyarrow is
imported by the first run: it costs a worker some 60 MB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dataloader.pipelines import Context, PermanentError, Progress, absent, csv_table, register, validated
from dataloader.pipelines.csv_table import FileArguments, FileSource, Place, Target, identifier, opened, unique

if TYPE_CHECKING:
    from typing import BinaryIO

TASK = "load.parquet"
_BUFFER = 2**20  # bytes of a column that are read at once
_BATCH_ROWS, _BATCH_BYTES = 1_000, 2**22  # that are decoded at once
# The type of a new table's column; what is not here is text there.
_TYPES = {
    **{"bool": "boolean", "date32[day]": "date", "date64[ms]": "date", "float": "real", "halffloat": "real"},
    **{"int8": "smallint", "uint8": "smallint", "int16": "smallint", "uint16": "integer", "int32": "integer"},
    **{"uint32": "bigint", "int64": "bigint", "uint64": "numeric", "double": "double precision"},
}


class Wanted(Target, FileArguments):
    """The `args` of `load.parquet`; docs/loaders.md explains each."""


def load_parquet(args: dict[str, Any], context: Context) -> Iterator[Progress | None]:
    """Make the rows of `table` with the file's keys equal to the file's, in one transaction.

    A second run changes nothing. The last of several rows with the same key counts. A wrong argument, a file that is
    damaged, a value that the table refuses and a table that does not fit raise PermanentError and leave the table
    unchanged. A run after another one that ended in the middle of a large file goes on there, unless the file has
    changed.
    """
    wanted = validated(Wanted, args)
    with open(opened(context.data_dir, wanted.path), "rb", buffering=0) as file:
        source = ParquetFile(wanted.path, file)
        yield from csv_table.load(context, wanted, source, in_parts=source.size > csv_table.PART_BYTES)


class ParquetFile(FileSource):
    """The rows of a file as CSV records, numbered from 1."""

    def __init__(self, path: str, file: BinaryIO) -> None:
        """Read what the file says of itself; raises PermanentError where it is no Parquet file that can be loaded."""
        from pyarrow import parquet

        super().__init__(path, file.fileno())
        with self._readable():
            self._parquet: Any = parquet.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False)
        schema = self._parquet.schema_arrow
        try:
            names = unique([identifier(name) for name in schema.names])
        except ValueError as e:
            raise PermanentError(f"{path}: the names of its columns: {e}") from None
        self.columns = dict(zip(names, (_type(field.type) for field in schema), strict=True))

    @property
    def expected(self) -> int:
        """How many rows there are."""
        return int(self._parquet.metadata.num_rows)

    def records(self, begin: Place) -> Iterator[tuple[int, str]]:
        """See Source."""
        self._count = begin.records
        for batch in self._batches(self._count):
            with self._readable():
                texts = _records(batch)
            for text in texts:
                yield self._counted(text, len(text))
        if self._count != self.expected:  # pyarrow ends where the pages of a row group end, without an error
            fault = f"it has {self._count} rows, and should have {self.expected}"
            raise PermanentError(f"{self.origin}: is damaged: {fault}")

    def _batches(self, skipped: int) -> Iterator[Any]:
        """The rows behind so many, some at a time; row groups before them are not read."""
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

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Errors of pyarrow as ours: their texts may quote values."""
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError, UnicodeError) as e:
            if isinstance(e, OSError) and e.errno:
                raise
            if not self.unchanged():
                raise RuntimeError(f"a program wrote to {self.origin} during the load") from None
            raise PermanentError(f"{self.origin}: is no Parquet file, or is damaged") from None


def _records(batch: Any) -> list[str]:
    """PURE: the rows of a batch as CSV: every value in quotes, and a null as nothing."""
    from pyarrow import compute

    columns = []
    for column in batch.columns:
        escaped = compute.replace_substring(_texts(column), '"', '""')
        columns.append(compute.fill_null(compute.binary_join_element_wise('"', escaped, '"', ""), ""))
    records: list[str] = compute.binary_join_element_wise(*columns, ",").to_pylist()
    return records


def _texts(column: Any) -> Any:
    """PURE: the values of a column as PostgreSQL reads them; raises pyarrow's errors."""
    import pyarrow
    from pyarrow import types

    kind = column.type
    if types.is_dictionary(kind):
        return _texts(column.dictionary_decode())
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _python(column, str) if kind.extension_name == "arrow.uuid" else _texts(column.storage)
    if types.is_duration(kind):
        return _python(column.cast(pyarrow.duration("us")).cast(pyarrow.int64()), "{} microseconds".format)
    if types.is_timestamp(kind) and kind.tz:
        column = column.cast(pyarrow.timestamp(kind.unit, "UTC"))
    elif types.is_float16(kind):
        column = column.cast(pyarrow.float32())
    elif types.is_nested(kind):
        return _python(column, lambda value: json.dumps(value, default=str, ensure_ascii=False))
    elif types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return _python(column, lambda value: f"\\x{value.hex()}")
    return column.cast(pyarrow.string())


def _python(column: Any, text_of: Any) -> Any:
    import pyarrow

    return pyarrow.array([None if value is None else text_of(value) for value in column.to_pylist()], pyarrow.string())


def _type(kind: Any) -> str:
    """PURE: the type of a new table's column for one of pyarrow."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(kind):
        return _type(kind.value_type)
    if isinstance(kind, pyarrow.BaseExtensionType):
        return {"arrow.uuid": "uuid", "arrow.json": "jsonb"}.get(kind.extension_name) or _type(kind.storage_type)
    if types.is_timestamp(kind):
        return "timestamp with time zone" if kind.tz else "timestamp"
    checks = {"is_decimal": "numeric", "is_time": "time", "is_duration": "interval", "is_nested": "jsonb"}
    checks |= dict.fromkeys(("is_binary", "is_large_binary", "is_fixed_size_binary"), "bytea")
    return next((ours for check, ours in checks.items() if getattr(types, check)(kind)), _TYPES.get(str(kind), "text"))


if find_spec("pyarrow"):
    register(TASK, spares_attempts=True)(load_parquet)
else:
    absent(TASK, "it needs pyarrow: pip install 'dataloader-farm[parquet]'")
