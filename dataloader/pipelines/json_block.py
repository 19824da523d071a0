"""Lines of JSON as PostgreSQL's binary COPY, without a loop over rows: objects with one reading.

Arrow parses values without parts whose types have an exact type of Arrow. For others numpy reads objects of one layout:
a program mostly writes the objects of a file with the same names in the same order. So the quotes and the names of many
lines are found at once, and the texts between them become columns of Arrow. Other lines have no rows here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib.stride_tricks import sliding_window_view
from pyarrow import json as arrow_json
from pyarrow import types

from dataloader.pipelines.arrow_block import Copied
from dataloader.pipelines.binary_copy import NUMBERS, encoded, parsed, takes_texts
from dataloader.pipelines.parquet import widened

# The characters behind a backslash, with bytes that no text has: these stand for them while quotes are found.
_ESCAPES = {ord(of): mark for mark, of in enumerate('\\"/bfnrt', 1)}
_MARKS = np.zeros(256, np.uint8)
_MARKS[[1, *_ESCAPES]] = [1, *_ESCAPES.values()]
_UNMARKED = bytes.maketrans(bytes(_ESCAPES.values()), b'\\"/\b\f\n\r\t')
_BY_NUMBER = re.compile(rb"\\u(?!00[01]|0022|005[cC])[0-9a-fA-F]{4}")
_NUMBER = r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?$"
_DOUBTS = (pa.ArrowException, ValueError, LookupError, RecursionError)
_DEEPEST = 100  # JsonFile and PostgreSQL have limits of their own
_PARSED = {
    **{"boolean": pa.bool_(), "smallint": pa.int16(), "integer": pa.int32(), "bigint": pa.int64()},
    **{"real": pa.float32(), "double precision": pa.float64(), "jsonb": None},
}
_SMALL = (b"e-", b"E-", b"0" * 36)  # one of these is in each number that is too small for a float
_BARE = ("boolean", *NUMBERS, "jsonb")


class Lines:
    """Reads lines as columns, and these as a binary COPY: two threads may share the work.

    `names` are those of the first `stored` columns in the objects; the `guessed` ones take no texts. The other
    arguments are as in `arrow_block.reader`.
    """

    def __init__(
        self,
        names: Sequence[str],
        stored: Sequence[str],
        added: Sequence[Any],
        lines: int,
        guessed: Collection[str] = (),
    ) -> None:
        self._guessed = guessed
        self._kinds = {name: re.sub(r"\(.*?\)", "", kind) for name, kind in zip(names, stored, strict=False)}
        self._stored, self._added, self._lines = stored, added, lines
        self._is_known = "json" not in self._kinds.values() and all(map(takes_texts, self._kinds.values()))
        parsers = [
            (name, parsed(kind) if bare == "numeric" else _PARSED.get(bare, pa.string()))
            for (name, bare), kind in zip(self._kinds.items(), stored, strict=False)
        ]
        self._schema = pa.schema(parsers) if self._is_known and all(kind for _, kind in parsers) else None

    def read(self, text: bytes) -> list[Any] | None:
        """The values or their texts, a column for each name; None where there is any doubt."""
        if self._schema:
            with suppress(*_DOUBTS):
                return _parsed(text, self._schema)
        with suppress(*_DOUBTS):
            return _columns(text, self._kinds, self._guessed) if self._is_known else None
        return None

    def copied(self, columns: list[Any], line: int) -> Copied | None:
        """The rows, of which the first is this line; None where PostgreSQL has to read their texts."""
        rows = len(columns[0])
        numbers = [range(line, line + rows)] * self._lines
        binary = encoded(widened(columns, rows, self._added, numbers), self._stored)
        return Copied(rows, rows, binary) if binary else None


def types_in(text: bytes) -> dict[str, set[str]] | None:
    """The types of the values in these lines, by name; None where Arrow finds no single type for a name."""
    with suppress(*_DOUBTS):
        return {field.name: {_inferred(field.type)} - {""} for field in _batch(text).schema}
    return None


def _inferred(of: Any) -> str:
    """The type in PostgreSQL of values without one, as Arrow has found them; "" where all are null."""
    if types.is_nested(of):
        return "jsonb"
    if types.is_string(of) or types.is_timestamp(of):
        return "text"
    return {pa.null(): "", pa.bool_(): "boolean", pa.int64(): "bigint", pa.float64(): "numeric"}[of]


def _read(text: bytes, has_nested: bool) -> tuple[list[str], bytes, set[int], tuple[Any, ...]]:
    """The names of the objects in these lines, `_marked` text, and `_spans` there; an error for another layout."""
    text = text.replace(b"\r\n", b"\n") if b"\r" in text else text
    text = text if text.endswith(b"\n") else text + b"\n"
    offsets = pa.py_buffer(np.array([0, len(text)], np.int32))
    whole = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(text)])
    whole.cast(pa.string())  # raises an error for what is not UTF-8
    data = np.frombuffer(text, np.uint8)
    if np.count_nonzero(data < ord(" ")) != np.count_nonzero(data == ord("\n")) or not text.startswith(b"{"):
        raise ValueError("a control character, or no object")
    names = [*json.loads(text[: text.index(b"\n")])]
    marked, marks = _marked(text, data)
    return names, marked, marks, _spans(np.frombuffer(marked, np.uint8), names, has_nested)


def _batch(text: bytes, schema: Any = None) -> Any:
    """The values of these lines, with the columns of the schema or those in the text; an error for other layouts."""
    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    begins = (ends[:-1] if text.endswith(b"\n") else ends) + 1
    stops = ends - 1 - (data[ends - 1] == ord("\r"))
    # A null in front of all objects crashes Arrow.
    if not (text.startswith(b"{") and (data[begins] == ord("{")).all() and (data[stops] == ord("}")).all()):
        raise ValueError("an object in several lines, or lines without one")
    options = arrow_json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    others = "error" if schema else "infer"
    parse = arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=others)
    [batch] = arrow_json.read_json(pa.BufferReader(text), options, parse).to_batches()
    if batch.num_rows != len(begins) + 1:
        raise ValueError("a line of several objects")
    return batch


def _parsed(text: bytes, schema: Any) -> list[Any]:
    """The values of these lines, a column for each name; an error unless each line is an object of these names."""
    columns: list[Any] = _batch(text, schema).columns
    for column in (each for each in columns if types.is_floating(each.type)):
        has_zero, are_finite = pc.any(pc.equal(column, 0)).as_py(), pc.all(pc.is_finite(column)).as_py()
        if are_finite is False or (has_zero and any(mark in text for mark in _SMALL)):
            raise ValueError("too large or too small for a float")
    return columns


def _columns(text: bytes, kinds: dict[str, str], guessed: Collection[str]) -> list[Any]:
    """The texts of the values of these lines, a column for each name; an error for lines of another layout."""
    names, marked, marks, spans = _read(text, "jsonb" in kinds.values())
    raw, final = pa.py_buffer(marked), pa.py_buffer(marked.translate(_UNMARKED))
    columns = {name: pa.nulls(spans[0].shape[1], pa.string()) for name in kinds}
    for name, begin, end, is_quoted, is_null in zip(names, *spans, strict=True):
        if kinds[name] == "jsonb":
            columns[name] = _escaped(_texts(raw, begin, end, is_null), marks)
            continue
        if kinds[name] not in _BARE and not (is_quoted | is_null).all():
            raise ValueError("a value without quotes")
        if name in guessed and is_quoted.any():
            raise ValueError("a text, which has another type than the first values")
        columns[name] = _texts(final, begin + is_quoted, end - is_quoted, is_null)
        if kinds[name] in NUMBERS and pc.all(pc.match_substring_regex(columns[name], _NUMBER)).as_py() is False:
            raise ValueError("no number of JSON")
    return [*columns.values()]


def _marked(text: bytes, data: Any) -> tuple[bytes, set[int]]:
    """The text with a byte in place of each character that is escaped, and these bytes."""
    escapes = np.flatnonzero(data == ord("\\"))
    if not len(escapes):
        return text, set()
    if (np.diff(escapes) == 1).any():  # the second one of two is a character
        data = np.frombuffer(text.replace(b"\\\\", b"\\\1"), np.uint8)
        escapes = np.flatnonzero(data == ord("\\"))
    marks = _MARKS[data[escapes + 1]]
    data, known = data.copy(), escapes[marks > 0]
    data[known], data[known + 1] = 0, marks[marks > 0]
    text = data.tobytes().translate(None, b"\0")
    if len(known) < len(escapes):
        if text.count(b"\\") != len(_BY_NUMBER.findall(text)):
            raise ValueError("an escape")
        numbered = text.decode().encode("ascii", "backslashreplace").decode("unicode_escape")
        text = numbered.encode("utf-16", "surrogatepass").decode("utf-16").encode()  # joins halves of characters
    return text, {*marks.tolist()} - {0}


def _escaped(column: Any, marks: set[int]) -> Any:
    for escape, mark in _ESCAPES.items():
        if mark in marks:
            column = pc.replace_substring(column, chr(mark), f"\\{chr(escape)}")
    return column


def _spans(data: Any, names: list[str], has_nested: bool) -> tuple[Any, Any, Any, Any]:
    """Where the values of each line begin and end, a row for each name; whether they are in quotes, and null."""
    ends, quotes = np.flatnonzero(data == ord("\n")), np.flatnonzero(data == ord('"'))
    opens, closes = quotes[::2], quotes[1::2]
    is_name = data[closes + 1] == ord(":")
    if has_nested:
        is_name &= _depths(data, quotes, opens) == 1
    at = np.flatnonzero(is_name).reshape(len(ends), len(names)).T.copy()
    names_at, behind = opens[at], closes[at] + 1
    colon = b": " if data[behind[0, 0] + 1] == ord(" ") else b":"
    comma = b", " if data[names_at[-1, 0] - 1] == ord(" ") else b","
    begins = behind + len(colon)
    stops = np.vstack([names_at[1:] - len(comma), ends - 1])
    lines = np.append(0, ends[:-1] + 1)
    marks = [(lines, b"{"), (ends - 1, b"}"), (stops[:-1].ravel(), comma)]
    marks += [(where, f'"{name}"'.encode() + colon) for where, name in zip(names_at, names, strict=True)]
    is_right = (names_at[0] == lines + 1).all() and len(data) == ends[-1] + 1
    is_right &= (data[[begins, stops - 1]] != ord(" ")).all()  # beside a null
    # A value has the quotes around it alone, or none; those within a nested one are its own.
    is_quoted = data[begins] == ord('"')
    text = at[is_quoted] + 1
    is_right &= (opens[text] == begins[is_quoted]).all() and (closes[text] == stops[is_quoted] - 1).all()
    is_null = (data[begins] == ord("n")) & (stops - begins == len(b"null"))
    marks.append((begins[is_null], b"null"))
    for where, mark in marks:
        is_right &= (sliding_window_view(data, len(mark))[where] == np.frombuffer(mark, np.uint8)).all()
    if not (is_right and (stops > begins).all()):
        raise ValueError("another layout")
    return begins, stops, is_quoted, is_null


def _depths(data: Any, quotes: Any, places: Any) -> Any:
    """In how many objects and lists each of these places is."""
    folded = data | 0x20  # [ is { then
    brackets = np.flatnonzero((folded == ord("{")) | (folded == ord("}")))
    brackets = brackets[np.searchsorted(quotes, brackets) % 2 == 0]
    depths = np.cumsum(np.where(folded[brackets] == ord("{"), 1, -1))
    if depths.max() > _DEEPEST:
        raise ValueError("nested too deeply")
    return depths[np.searchsorted(brackets, places) - 1]


def _texts(buffer: Any, begins: Any, ends: Any, is_null: Any) -> Any:
    """The texts between these places of the buffer."""
    offsets = np.column_stack([begins, ends]).astype(np.int32).ravel()
    texts = pa.Array.from_buffers(pa.string(), len(offsets) - 1, [None, pa.py_buffer(offsets), buffer])
    every_other = np.arange(0, len(offsets), 2)  # between them is the text between two values
    return texts.take(pa.array(every_other, mask=is_null))
