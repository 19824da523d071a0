"""JSON for `load.files`: a file of lines, of objects behind each other, or of one array; each object is a row.

Numbers keep their text, so that PostgreSQL decides about them. Objects and lists within a row become jsonb.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import takewhile
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

from dataloader.pipelines import PermanentError
from dataloader.pipelines.csv_table import (
    LONGEST_RECORD,
    PART_BYTES,
    UNSEEN,
    Batch,
    Block,
    Item,
    Place,
    Rejected,
)
from dataloader.pipelines.files import Files, Shape, named, no_data
from dataloader.pipelines.rows import Row, TypedFile, common_type, number_type, quoted

if TYPE_CHECKING:
    from typing import BinaryIO

    from dataloader.pipelines.arrow_block import Copied
    from dataloader.pipelines.json_block import Lines

_CHUNK_BYTES = 2**16
_COPIED_BYTES = 2**21  # of a binary COPY, of which each is a statement
_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\[")
_MEMBER = re.compile(r'[ \t\r\n{,]*+("(?:[^"\\]|\\.)*+")[ \t\r\n]*+:[ \t\r\n]*+', re.DOTALL)  # its name and colon
_BETWEEN = re.compile("[ \t\r\n,\x1e]*+")  # objects; RFC 7464 has the last one
_NO_OBJECT = 'should be an object such as {"id": 1}, for a list or a single value has no names of columns'
_MENDED = '; a JSON library should write the file, format "text" reads CSV, and max_errors rejects rows that are lines'
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


class _Chunk(NamedTuple):
    text: bytes  # whole lines
    copied: Copied | None = None  # the same
    end: int | None = None  # where the thread that reads ahead came in the file


class JsonFile(TypedFile):
    """The objects of a file, which people know by the numbers of their first lines."""

    unit = "line"
    _lines: Lines | None = None
    as_json = dict.fromkeys((bool, Number, str, dict, list), _quoted_json) | {NoneType: lambda _: ""}
    plain = as_json | {bool: {True: "true", False: "false"}.__getitem__, Number: str, str: quoted}

    def __init__(self, path: str, descriptor: int, file: BinaryIO, wanted: Files) -> None:
        """Read a sample for the columns; the arguments can name others, which come later."""
        super().__init__(path, descriptor)
        self._file = file
        head = file.read(PART_BYTES if wanted.records else _CHUNK_BYTES)
        if reason := no_data(head):
            raise PermanentError(f"{path} {reason}")
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise self.error(1, "is UTF-16, and should be UTF-8")
        bracket = _ARRAY.match(head)
        self._around = self._before_rows(head, wanted.records.split(".")) if wanted.records else b""
        self._is_array = bool(bracket or self._around)
        begin = len(self._around) or (bracket.end() if bracket else 3 * head.startswith(codecs.BOM_UTF8))
        self.begin = Place(begin, 1 + head.count(b"\n", 0, begin))
        found = self._types() if self.has_parts and not (self._is_array or wanted.null) else {}
        if not found:
            sample = takewhile(lambda _: self.bytes_read < PART_BYTES or self._count == 1, self.rows(self.begin))
            found = self._columns(sample, wanted.null)
            self.total = self._count if self.bytes_read < PART_BYTES else 0
        self.columns, self.has_columns = dict.fromkeys(wanted.columns, UNSEEN) | found, bool(found)
        known = named(self.names, wanted, partial(self.error, 1)) if self.columns else []
        self.columns |= dict.fromkeys((name for name in wanted.types if name not in [*known, *wanted.add]), "text")

    def _types(self) -> dict[str, str]:
        """The columns of the first lines with their types, where pyarrow finds them in all of these; else none."""
        try:
            from dataloader.pipelines import json_block
        except ImportError:
            return {}
        kinds: dict[str, set[str]] = {}
        self._file.seek(self.begin.mark)
        for _ in range(0, PART_BYTES, _COPIED_BYTES):
            text = self._file.read(_COPIED_BYTES) + self._file.readline(LONGEST_RECORD)
            if (types := json_block.types_in(text) if text else {}) is None:
                return {}
            for name, some in types.items():
                kinds.setdefault(name, set()).update(some)
        return {name: common_type(some) for name, some in kinds.items()}

    @property
    def bytes_read(self) -> int:
        """How far reading has come in the text of the file."""
        return self._offset + self._at

    def place(self) -> Place:
        """Where the next object begins, or what is between; the mark is the offset of its byte."""
        mark: int = self._offset + len(self._text[: self._at].encode("utf-8", "surrogateescape"))
        return Place(mark, self._line, self._count)

    def type_of(self, value: Any) -> str | None:
        return number_type(value) if isinstance(value, Number) else _TYPES.get(type(value))

    def _before_rows(self, head: bytes, path: Sequence[str]) -> bytes:
        """The file up to the begin of the array at this path of names, with its bracket."""
        text = head.decode("utf-8", "surrogateescape")
        at = len("\ufeff") * text.startswith("\ufeff")
        with suppress(json.JSONDecodeError, RecursionError):
            for name in path:
                while (member := _MEMBER.match(text, at)) and json.loads(member[1]) != name:
                    at = _DECODER.raw_decode(text, member.end())[1]
                at = member.end() if member else len(text)
            if text[at : at + 1] == "[":
                return text[: at + 1].encode("utf-8", "surrogateescape")
        remedy = f'should be the way to an array of objects in the first {PART_BYTES} bytes, such as "result.items"'
        raise PermanentError(f"{self.origin}: records: {'.'.join(path)} {remedy}")

    def take(self, shape: Shape) -> bool:
        self._lines, self._fitted = None, shape.fitted
        with suppress(ImportError):
            from dataloader.pipelines.json_block import Lines

            if shape.is_usual:
                self._lines = Lines([*self.columns], shape.stored, shape.added, shape.lines, shape.guessed)
        return bool(shape.passing)

    def items(self, begin: Place, size: int) -> Iterator[tuple[int, Item]]:
        return self._records(self._from(begin, size))

    def rows(self, begin: Place) -> Iterator[tuple[int, Any]]:
        return self._from(begin, 0)

    def _from(self, begin: Place, most: int) -> Iterator[tuple[int, Any]]:
        self.close()
        self._reading = None
        self._offset: int = begin.mark
        self._line, self._count = begin.line, begin.records
        self._file.seek(self._offset)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text, self._at, self._end = "", 0, None
        self._next: _Chunk | None = None
        if self._lines and most and not self._is_array:
            from dataloader.pipelines.binary_copy import ahead

            self._reading = ahead(self._copies(self._lines, ahead(self._chunks(self._lines, most)), self._line))
        return self._rows()

    def _chunks(self, lines: Lines, most: int) -> Iterator[tuple[bytes, int, list[Any] | None, int]]:
        """The file in chunks of whole lines, with the number of these and their columns."""
        size = _CHUNK_BYTES
        while text := self._file.read(size) + self._file.readline(LONGEST_RECORD):
            columns = lines.read(text) if len(text) < 2 * _COPIED_BYTES else None
            count = len(columns[0]) if columns else max(1, text.count(b"\n"))
            yield text, count, columns if count <= most else None, self._read_to()
            size = min(_COPIED_BYTES, len(text) * most * 9 // (count * 10))

    @staticmethod
    def _copies(lines: Lines, chunks: Iterator[Any], line: int) -> Iterator[_Chunk]:
        for text, count, columns, end in chunks:
            yield _Chunk(text, lines.copied(columns, line) if columns else None, end)
            line += count

    def _batch(self, chunk: _Chunk, copied: Copied) -> tuple[int, Batch]:
        line, self._offset = self._line, self.place().mark + len(chunk.text)
        self._text, self._at, self._next, self._end = "", 0, None, chunk.end
        self._line += copied.records
        self._count += copied.records

        def singles(number: int) -> Iterator[tuple[int, str | Rejected]]:
            again = copy(self)
            again._file, again._reading = io.BytesIO(chunk.text), None
            for at, text in again.records(Place(0, number)):
                yield at, text if isinstance(text, Rejected) else self._fitted(at, Block(f"{text}\n", 1)).text[:-1]

        return line, Batch(copied.records, len(chunk.text), copied.binary, singles)

    def _rows(self) -> Iterator[tuple[int, Any]]:
        while self._has_more() and not (self._is_array and self._text[self._at] == "]"):
            if self._at == len(self._text) and self._next and self._next.copied:
                yield self._batch(self._next, self._next.copied)
                continue
            line, self._count = self._line, self._count + 1
            yield line, self._row()
        if self._is_array:
            if self._at == len(self._text):
                raise self.error(self._line, "the array has no end: is the file cut?")
            self._pass(self._at + 1)
            if self._around:
                self._require_end()
            elif self._has_more():
                raise self.error(
                    self._line, "there is more behind the end of the array; one array should have all rows"
                )

    def _require_end(self) -> None:
        """Raise PermanentError unless the text around the rows is one whole document."""
        while len(self._text) - self._at < LONGEST_RECORD and self._read():
            pass
        around = self._around.decode("utf-8-sig", "surrogateescape")
        try:
            json.loads(f"{around}]{self._text[self._at :]}")
        except (json.JSONDecodeError, RecursionError) as e:
            fault = "is no whole JSON behind them: is the file cut?"
            if len(self._text) - self._at >= LONGEST_RECORD:
                fault = f"has {LONGEST_RECORD} characters or more behind them; they should be its last member"
            if "Extra data" in str(e):
                fault = "has more behind its end; each document should be a file of its own"
            raise self.error(self._line, f"the document around the records {fault}") from None

    def _row(self) -> Row | Rejected:
        """The object that begins here, or why there is none; the next one begins behind it, or in the next line."""
        while True:
            try:
                row, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as e:
                fault, end = f"no valid JSON: {e.msg.removesuffix(' at').removesuffix(' starting')}", e.pos
                is_cut = end > len(self._text) - _CUT or e.msg.startswith("Unterminated string")
            except RecursionError:
                fault, end, is_cut = "nested too deeply", self._at, False
            else:
                if isinstance(row, dict):
                    self._pass(end)
                    return row
                fault, is_cut = _NO_OBJECT, isinstance(row, Number) and end > len(self._text) - _CUT
            # Both would be others once more is read.
            size, lines = end - self._at, self._text.count("\n", self._at, max(self._at, end - 1))
            if is_cut and len(self._text) - self._at < LONGEST_RECORD and self._read():
                continue
            if fault is _NO_OBJECT:
                self._pass(self._at + size)
                return Rejected(fault, "")
            while (end := self._text.find("\n", self._at)) < 0 and len(self._text) <= LONGEST_RECORD and self._read():
                pass
            text = self._text[self._at : end] if end >= 0 else self._text[self._at :]
            fault += f" in line {self._line + lines}" * (lines > 0)
            fault += "; is the file cut?" if "Unterminated" in fault else _MENDED * fault.startswith("no valid")
            if len(text) > LONGEST_RECORD:
                fault = f"an object of over {LONGEST_RECORD} characters; the rows should be lines or one array"
            if self._is_array or len(text) > LONGEST_RECORD:
                raise self.error(self._line, fault)
            self._pass(self._at + len(text))
            return Rejected(fault, text)

    def _has_more(self) -> bool:
        """Pass what is between two objects, up to lines that are copied; False at the end of the file."""
        while True:
            between = _BETWEEN.match(self._text, self._at)
            self._pass(between.end() if between else 0)
            if self._at < len(self._text):
                return True
            if self._reading and not self._next:
                self._next = next(self._reading, None)
            if self._next and self._next.copied:
                return True
            if not self._read():
                return False

    def _pass(self, end: int) -> None:
        self._line += self._text.count("\n", self._at, end)
        self._at = end

    def _read(self) -> bool:
        """Read as much again as there is of the object, and drop what is passed; False at the end of the file."""
        if self._reading:
            chunk, self._next = self._next or next(self._reading, _Chunk(b"")), None
            data, self._end = chunk.text, chunk.end
        else:
            data = self._file.read(max(_CHUNK_BYTES, len(self._text) - self._at))
        self._offset = self.place().mark
        self._text = self._text[self._at :] + self._utf8.decode(data, final=not data)
        self._at = 0
        return bool(data)
