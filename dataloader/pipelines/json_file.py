"""JSON for `load.files`: a file of lines, of objects behind each other, or of one array; each object is a row.

Numbers keep their text, so that PostgreSQL decides about them. Objects and lists within a row become jsonb.
"""

from __future__ import annotations

import codecs
import copy
import io
import json
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import islice, takewhile
from types import NoneType
from typing import TYPE_CHECKING, Any

from dataloader.pipelines import PermanentError
from dataloader.pipelines.csv_table import LONGEST_RECORD, PART_BYTES, Batch, Item, Place, Rejected
from dataloader.pipelines.files import Files, named, no_data
from dataloader.pipelines.parquet import whole
from dataloader.pipelines.rows import Row, TypedFile, number_type, quoted

if TYPE_CHECKING:
    from typing import BinaryIO

_CHUNK_BYTES = 2**16
_BLOCK_BYTES = 2**21  # that Arrow reads at once
_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\[")
_BETWEEN = re.compile("[ \t\r\n,]*+")  # objects
_NO_OBJECT = 'should be an object such as {"id": 1}, for a list or a single value has no names of columns'
_CUT = 16  # characters at the end of the text: the word or escape there may be cut


class Number(str):
    """A number as the file has it, 1e400 too."""

    __slots__ = ()


_DECODER = json.JSONDecoder(parse_int=Number, parse_float=Number, parse_constant=Number)
_TYPES = {bool: "boolean", str: "text", dict: "jsonb", list: "jsonb"}


def _written(value: Any) -> str:
    """PURE: the value as JSON; the json module would write each number anew."""
    if isinstance(value, Number):
        return value
    if isinstance(value, dict):
        return "{" + ",".join([f"{json.dumps(name)}:{_written(each)}" for name, each in value.items()]) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _quoted_json(value: Any) -> str:
    return quoted(_written(value))


class JsonFile(TypedFile):
    """The objects of a file, which people know by the numbers of their first lines."""

    unit = "line"
    as_json = dict.fromkeys((bool, Number, str, dict, list), _quoted_json) | {NoneType: lambda _: ""}
    plain = as_json | {bool: {True: "true", False: "false"}.__getitem__, Number: str, str: quoted}

    def __init__(self, path: str, descriptor: int, file: BinaryIO, wanted: Files) -> None:
        super().__init__(path, descriptor)
        self._file, self._wanted = file, wanted
        head = file.read(_CHUNK_BYTES)
        if reason := no_data(head):
            raise PermanentError(f"{path} {reason}")
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise self.error(1, "is UTF-16, and should be UTF-8")
        bracket = _ARRAY.match(head)
        self._is_array = bracket is not None
        begin = bracket.end() if bracket else 3 * head.startswith(codecs.BOM_UTF8)
        self.begin = Place(begin, 1 + head.count(b"\n", 0, begin))
        self._reached: tuple[Place, int] | None = None  # behind the batch in use, while a thread reads ahead
        self._reading: Generator[tuple[int, Item], None, None] | None = None
        self._offset, self._at = int(begin), 0

    @cached_property
    def columns(self) -> dict[str, str]:  # type: ignore[override]
        """The columns of a sample, and those of the arguments, which may come later."""
        wanted = self._wanted
        sample = takewhile(lambda _: self.bytes_read < PART_BYTES or self._count == 1, self.rows(self.begin))
        columns = dict.fromkeys(wanted.columns, "text") | self._columns(sample)
        known = named([*columns], wanted, partial(self.error, 1)) if columns else []
        columns |= dict.fromkeys((name for name in wanted.types if name not in [*known, *wanted.add]), "text")
        if not columns:
            raise PermanentError(f"{self.origin}: has no objects, so no columns: name these in `types`")
        if self.bytes_read < PART_BYTES:
            self.total = self._count
        return columns

    @property
    def bytes_read(self) -> int:
        """How far reading has come in the text of the file."""
        return int(self._reached[0].mark) if self._reached else self._offset + self._at

    @property
    def position(self) -> int:
        return self._reached[1] if self._reached else super().position

    def close(self) -> None:
        if self._reading:
            self._reading.close()
        self._reading = self._reached = None

    def items(self, begin: Place, size: int) -> Iterator[tuple[int, Item]]:
        """The rows in batches where Arrow reads a line as PostgreSQL would; a small file is not worth the import."""
        self.close()
        records = self.records(begin)
        if self.total or self._is_array or not (self.stored and self.by_arrow and find_spec("pyarrow")):
            return records
        from dataloader.pipelines import binary_copy

        names = list(self.columns)
        kinds = {
            names[at]: binary_copy.parsed_type(kind) for (at, _), kind in zip(self.by_arrow, self.stored, strict=False)
        }
        if not all(kinds.values()):
            return records
        self._reached = begin, self.position
        self._reading = self._in_use(binary_copy.ahead(self._batches(records, kinds, size)))
        return self._reading

    def _in_use(self, batches: Iterable[tuple[int, Batch, Place, int]]) -> Generator[tuple[int, Item], None, None]:
        for number, batch, place, position in batches:
            self._reached = place, position
            yield number, batch

    def _batches(
        self, records: Iterator[tuple[int, str | Rejected]], kinds: Mapping[str, Any], size: int
    ) -> Iterator[tuple[int, Batch, Place, int]]:
        """Some lines at once, and the places behind them; a record after the other where Arrow refuses a line."""
        from dataloader.pipelines.binary_copy import encoded

        lines = re.compile(b"(?:[^\n]*+\n){1,%d}+" % size)
        ahead = b""  # of the place, while `_text` is empty
        while True:
            enough = max(1, min(_BLOCK_BYTES, size * self._offset // max(1, self._count)))
            while len(ahead) < enough and (more := self._file.read(max(_CHUNK_BYTES, enough - len(ahead)))):
                ahead += more
            if not ahead:
                return
            begin, found = self._next(), lines.match(ahead)
            data = found[0] if found else b""
            again: bytes | list[tuple[int, str | Rejected]] = data
            if (batch := self._by_arrow(data, kinds)) is not None:
                self._offset += len(data)
                self._line += data.count(b"\n")
                self._count += batch.num_rows
                ahead = ahead[len(data) :]
            else:
                again, ahead = self._singles(records, ahead, begin.line + max(1, data.count(b"\n")))
            binary, place = batch and encoded(batch, self.stored), self._next()
            counts = place.records - begin.records, place.mark - begin.mark
            yield begin.line, Batch(*counts, binary, partial(self._again, again)), place, super().position

    def _singles(
        self, records: Iterator[tuple[int, str | Rejected]], ahead: bytes, end: int
    ) -> tuple[list[tuple[int, str | Rejected]], bytes]:
        """The records that begin before this line, and the bytes that are ahead then."""
        rows: list[tuple[int, str | Rejected]] = []
        self._text = self._utf8.decode(ahead)
        while self._has_more() and self._line < end:
            rows += islice(records, 1)
        self._drop()
        left = self._text.encode("utf-8", "surrogateescape") + self._utf8.getstate()[0]
        self._utf8.reset()
        self._text = ""
        return rows, left

    def _by_arrow(self, data: bytes, kinds: Mapping[str, Any]) -> Any | None:
        """The lines as the table's columns; None where Arrow refuses one, or may read it otherwise than PostgreSQL."""
        import pyarrow
        from pyarrow import json as arrow_json

        from dataloader.pipelines.binary_copy import typed

        if not data or codecs.BOM_UTF8 in data:
            return None
        try:
            read = arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 1)
            parse = arrow_json.ParseOptions(explicit_schema=pyarrow.schema(kinds.items()))
            table = arrow_json.read_json(pyarrow.BufferReader(data), read, parse).combine_chunks()
            table.validate(full=True)  # the encoding too
            if not set(table.schema.names) <= self.columns.keys():
                return None
            columns = [
                typed(table[name].chunk(0), kind, pattern, data)
                for name, kind, (_, pattern) in zip(kinds, self.stored, self.by_arrow, strict=False)
            ]
            return whole(columns, self.added)
        except pyarrow.ArrowException:
            return None

    def _again(
        self, data: bytes | list[tuple[int, str | Rejected]], number: int
    ) -> Iterator[tuple[int, str | Rejected]]:
        """The records of lines that Arrow has read, one by one; or those that were read so already."""
        if isinstance(data, list):
            return iter(data)
        single = copy.copy(self)
        single._file, single._reached = io.BytesIO(data), None
        return single.records(Place(0, number))

    def place(self) -> Place:
        return self._reached[0] if self._reached else self._next()

    def _next(self) -> Place:
        """Where the next object begins, or what is between; the mark is the offset of its byte."""
        mark: int = self._offset + len(self._text[: self._at].encode("utf-8", "surrogateescape"))
        return Place(mark, self._line, self._count)

    def type_of(self, value: Any) -> str | None:
        return number_type(value) if isinstance(value, Number) else _TYPES.get(type(value))

    def rows(self, begin: Place) -> Iterator[tuple[int, Row | Rejected]]:
        self._offset = begin.mark
        self._line, self._count = begin.line, begin.records
        self._file.seek(self._offset)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text, self._at = "", 0
        return self._rows()

    def _rows(self) -> Iterator[tuple[int, Row | Rejected]]:
        while self._has_more() and not (self._is_array and self._text[self._at] == "]"):
            line, self._count = self._line, self._count + 1
            yield line, self._row()
        if self._is_array:
            if self._at == len(self._text):
                raise self.error(self._line, "the array has no end: is the file cut?")
            self._pass(self._at + 1)
            if self._has_more():
                raise self.error(
                    self._line, "there is more behind the end of the array; one array should have all rows"
                )

    def _row(self) -> Row | Rejected:
        """The object that begins here, or why there is none; the next one begins behind it, or in the next line."""
        while True:
            try:
                row, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as e:
                fault, behind = f"no valid JSON: {e.msg.removesuffix(' at').removesuffix(' starting')}", e.pos
                is_cut = e.pos > len(self._text) - _CUT or e.msg.startswith("Unterminated string")
            except RecursionError:
                fault, behind, is_cut = "nested too deeply", self._at, False
            else:
                self._pass(end)
                return row if isinstance(row, dict) else Rejected(_NO_OBJECT, "")
            if is_cut and len(self._text) - self._at < LONGEST_RECORD and self._read():
                continue
            while (end := self._text.find("\n", self._at)) < 0 and len(self._text) <= LONGEST_RECORD and self._read():
                pass
            text = self._text[self._at : end] if end >= 0 else self._text[self._at :]
            lines = self._text.count("\n", self._at, max(self._at, behind - 1))
            fault += f" in line {self._line + lines}" * (lines > 0) + "; is the file cut?" * ("Unterminated" in fault)
            if len(text) > LONGEST_RECORD:
                fault = f"an object of over {LONGEST_RECORD} characters; the rows should be lines or one array"
            if self._is_array or len(text) > LONGEST_RECORD:
                raise self.error(self._line, fault)
            self._pass(self._at + len(text))
            return Rejected(fault, text)

    def _has_more(self) -> bool:
        """Pass what is between two objects; False at the end of the file."""
        while True:
            between = _BETWEEN.match(self._text, self._at)
            self._pass(between.end() if between else 0)
            if self._at < len(self._text):
                return True
            if not self._read():
                return False

    def _pass(self, end: int) -> None:
        self._line += self._text.count("\n", self._at, end)
        self._at = end

    def _read(self) -> bool:
        """Read as much again as there is of the object, and drop what is passed; False at the end of the file."""
        data = self._file.read(max(_CHUNK_BYTES, len(self._text) - self._at))
        self._drop()
        self._text += self._utf8.decode(data, final=not data)
        return bool(data)

    def _drop(self) -> None:
        self._offset = self._next().mark
        self._text, self._at = self._text[self._at :], 0
