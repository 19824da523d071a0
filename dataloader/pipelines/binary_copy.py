"""Arrow's batches as PostgreSQL's binary COPY, without a loop over rows: half the work of text for the server.

Each value of a column becomes one element of an Arrow binary array, with its length in front; one call of
`binary_join_element_wise` joins the elements of all rows. Neighbours of fixed width and without nulls are laid into one
numpy record first, so that the join has few parts.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from dataloader.pipelines.parquet import decoded, texts_of

_HEADER, _TRAILER = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"  # the length -1
_EPOCH_DAYS, _DAY = 10_957, 86_400_000_000  # PostgreSQL counts days and microseconds from 2000-01-01
_YEARS = (-719_162, 2_932_896)  # the first and the last day of the years 1 to 9999, which have one text
_TEXTS = ("text", "character varying", "character", "json", "jsonb")
_INTEGERS = {"smallint": pa.int16(), "integer": pa.int32(), "bigint": pa.int64()}
NUMBERS = (*_INTEGERS, "real", "double precision", "numeric")
_PLAIN_LENGTH = 20  # of a number: within the limits of a float, and its point can move by 18 digits in Arrow
# The forms of texts that Arrow and PostgreSQL read in one way, with the type of Arrow: canonical numbers, of which a
# numeric keeps all digits and so stays a text, and a float is within its limits; times with minutes in zones of less
# than 16 hours.
_WHOLE, _FRACTION = "-?(?:0|[1-9][0-9]{0,29})", r"(?:\.[0-9]{1,30})?"
_MOMENT = r"[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,6})?)?"
_FORMS: dict[str, tuple[str, Any]] = {
    **{kind: (_WHOLE, of) for kind, of in _INTEGERS.items()},
    **{"numeric": (_WHOLE + _FRACTION, None), "real": (_WHOLE + _FRACTION, pa.float32())},
    "double precision": (rf"{_WHOLE}{_FRACTION}(?:[eE][-+]?[0-9]{{1,2}})?", pa.float64()),
    **{"boolean": ("true|false", pa.bool_()), "date": ("[0-9]{4}-[0-9]{2}-[0-9]{2}", pa.date32())},
    "timestamp without time zone": (_MOMENT, pa.timestamp("us")),
    "timestamp with time zone": (
        _MOMENT + "(?:Z|[+-](?:0[0-9]|1[0-5])(?::?[0-5][0-9])?)",
        pa.timestamp("us", "UTC"),
    ),
}
_SAME = {
    **{("bool", "boolean"): pa.bool_(), ("date32[day]", "date"): pa.date32(), ("float", "real"): pa.float32()},
    **{("halffloat", "real"): pa.float32(), ("double", "double precision"): pa.float64()},
}
_Numbers = np.ndarray[Any, Any]


def ahead(items: Iterator[Any]) -> Generator[Any, None, None]:
    """The items; a thread makes each while the one before it is in use, and ends with the generator."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


def gathered(batches: Iterable[Any], most: int, slice_rows: int, most_bytes: int) -> Iterator[Any]:
    """The rows in batches of up to `most` rows and some `most_bytes`, of which a few make one COPY: a COPY takes a
    transaction id. Dictionaries are decoded for `slice_rows` at once, for a slice counts the bytes of a whole one.
    """
    waiting: list[Any] = []
    rows = size = 0
    for batch in batches:
        for begin in range(0, batch.num_rows, slice_rows):
            part = _decoded(batch.slice(begin, slice_rows))
            step = max(1, min(most, part.num_rows * most_bytes // max(1, part.nbytes)))
            for at in range(0, part.num_rows, step):
                some = part.slice(at, step)
                if waiting and (rows + some.num_rows > most or size + some.nbytes > most_bytes):
                    yield _joined(waiting)
                    waiting, rows, size = [], 0, 0
                waiting.append(some)
                rows, size = rows + some.num_rows, size + some.nbytes
    if waiting:
        yield _joined(waiting)


def _decoded(batch: Any) -> Any:
    return pa.RecordBatch.from_arrays([*map(decoded, batch.columns)], names=batch.schema.names)


def _joined(batches: list[Any]) -> Any:
    [joined] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined


def encoded(batch: Any, kinds: Sequence[str]) -> list[Any] | None:
    """The rows for COPY into columns of these types; None where PostgreSQL has to read their texts, and may refuse."""
    try:
        columns = [_stored(*each) for each in zip(batch.columns, kinds, strict=True)]
        return [_HEADER, memoryview(_rows(columns, batch.num_rows)), _TRAILER]
    except (pa.ArrowException, ValueError, OverflowError):
        return None


def takes_texts(kind: str) -> bool:
    """PURE: whether `encoded` can take texts for a column of this type."""
    return _bare(kind) in _FORMS or _bare(kind) in _TEXTS


def exact(kind: str) -> Any:
    """PURE: the type of Arrow that has all values and their groups of four digits in 64 bits; None if there is none."""
    match = re.fullmatch(r"numeric\((\d+),(\d+)\)", kind)
    digits, scale = map(int, match.groups()) if match else (0, 0)
    return pa.decimal128(digits, scale) if scale <= min(digits, 16) and 0 < digits <= 18 else None


def parsed(kind: str) -> Any:
    """PURE: the same, for numbers that Arrow parses: it moves their points unchecked."""
    decimal = exact(kind)
    return decimal if decimal and decimal.precision + decimal.scale <= 18 else None


def _bare(kind: str) -> str:
    """The type without its bounds: `numeric` of `numeric(12,2)`."""
    return re.sub(r"\(.*?\)", "", kind)


def _stored(column: Any, kind: str) -> Any:
    """The column as its type in the table has it; an error where its text may have another value there, or none."""
    of, decimal, kind = column.type, exact(kind), _bare(kind)
    if kind in _TEXTS:
        texts = texts_of(column).cast(pa.binary())
        return pc.binary_join_element_wise(b"\x01", texts, b"") if kind == "jsonb" else texts
    if types.is_null(of):
        return pa.nulls(len(column), pa.binary())
    if types.is_integer(of) and kind in _INTEGERS:
        return column.cast(_INTEGERS[kind])
    if kind == "numeric" and (types.is_integer(of) or (types.is_decimal(of) and 0 <= of.scale <= 16)):
        scale, digits = (0, 18) if types.is_integer(of) else (of.scale, max(of.scale, min(of.precision, 18)))
        return (column.cast(pa.decimal128(20, 0)) if types.is_integer(of) else column).cast(
            pa.decimal128(digits, scale)
        )
    if types.is_timestamp(of) and kind == f"timestamp with{'' if of.tz else 'out'} time zone":
        column = pc.floor_temporal(column, unit="microsecond") if of.unit == "ns" else column
        return _between(column.cast(pa.timestamp("us", of.tz)), _YEARS[0] * _DAY, (_YEARS[1] + 1) * _DAY - 1)
    if types.is_time(of) and kind == "time without time zone":
        return _between(column.cast(pa.time64("us"), safe=False), 0, _DAY - 1)
    if kind == "bytea" and (types.is_binary(of) or types.is_large_binary(of) or types.is_fixed_size_binary(of)):
        return column.cast(pa.binary())
    if kind == "uuid" and getattr(of, "extension_name", "") == "arrow.uuid":
        return column.storage
    if types.is_string(of) and kind in _FORMS:
        form, known = _FORMS[kind]
        if kind in NUMBERS and (decimal or known) and _are_plain_numbers(column):
            with suppress(pa.ArrowInvalid):
                numbers = column.cast(decimal or known)
                # Zeros in front may show that the type is a wrong guess.
                if kind not in _INTEGERS or numbers.cast(pa.string()).equals(column):
                    return _stored(numbers, kind)
        if pc.all(pc.match_substring_regex(_typical(column), f"^(?:{form})$")).as_py() is False:
            raise pa.ArrowInvalid("PostgreSQL reads the text")
        with suppress(pa.ArrowInvalid):  # PostgreSQL rounds other digits
            column = column.cast(decimal) if decimal else column
        return _stored(column.cast(known), kind) if known else column
    if not (same := _SAME.get((str(of), kind))):
        raise pa.ArrowInvalid("PostgreSQL reads the text")
    return _between(column, *_YEARS) if kind == "date" else column.cast(same)


def _are_plain_numbers(column: Any) -> bool:
    """Whether the texts are short, of digits, points and signs: Arrow reads or refuses these as PostgreSQL does."""
    offsets, text = _offsets(column), column.buffers()[2] or b""
    are_short = np.diff(offsets).max(initial=0) <= _PLAIN_LENGTH
    return bool(are_short and not bytes(text[offsets[0] : offsets[-1]]).translate(None, b"-.0123456789"))


def _typical(column: Any) -> Any:
    """Texts that have one of the _FORMS only if all texts of the column have it; they are fewer where it is regular.

    Where the texts have one length, and other bytes only where all have digits, these are the texts of the least and of
    the greatest digits.
    """
    texts = column.drop_null()
    offsets = _offsets(texts)
    sizes = np.diff(offsets)
    if not sizes.any() or (sizes != sizes[0]).any():
        return column
    places = np.frombuffer(texts.buffers()[2], np.uint8)[offsets[0] : offsets[-1]].reshape(len(texts), -1)
    least, most = places.min(axis=0), places.max(axis=0)
    are_regular = (least == most) | ((least >= ord("0")) & (most <= ord("9")))
    return pa.array([bytes(least), bytes(most)]).cast(pa.string()) if are_regular.all() else column


def _between(column: Any, least: int, most: int) -> Any:
    bounds = pc.min_max(column.view(pa.int32() if types.is_date32(column.type) else pa.int64())).as_py()
    if bounds["min"] is not None and (bounds["min"] < least or bounds["max"] > most):
        raise pa.ArrowInvalid("PostgreSQL reads the text")
    return column


def _rows(columns: list[Any], count: int) -> Any:
    parts: list[Any] = []
    run: list[_Numbers] = [np.full(count, len(columns), ">i2")]  # fields of fixed width that are not yet a part
    for column in columns:
        if types.is_binary(column.type):  # its length belongs to the run before it
            lengths = _values(pc.fill_null(pc.binary_length(column), -1), "<i4").astype(">i4")
            parts += [_elements(count, [*run, lengths]), pc.fill_null(column, b"")]
            run = []
            continue
        values = _fixed(column)
        field = [np.full(count, values.dtype.itemsize * values[:1].size, ">i4"), values]
        if column.null_count:
            parts += [_elements(count, run)] if run else []
            parts.append(pc.if_else(column.is_valid(), _elements(count, field), _NULL))
            run = []
        else:
            run += field
    parts += [_elements(count, run)] if run else []
    joined = pc.binary_join_element_wise(*parts, b"")
    offsets = _offsets(joined)
    return joined.buffers()[2][offsets[0] : offsets[-1]]


def _fixed(column: Any) -> _Numbers:
    """The big-endian values of a column of fixed width; the value behind a null does not matter."""
    of = column.type
    if types.is_string(of):
        return _numeric_of_text(column)
    if types.is_decimal(of):
        return _numeric(column)
    if types.is_boolean(of):
        return _values(column.cast(pa.uint8()), "u1")
    width = of.bit_width // 8
    if types.is_fixed_size_binary(of):
        return _values(column, f"V{width}")
    if types.is_floating(of):
        values = _values(column, f"<f{width}")
        return np.where(np.isnan(values), np.nan, values).astype(f">f{width}")  # NaN has many forms
    epoch = _EPOCH_DAYS * _DAY if types.is_timestamp(of) else _EPOCH_DAYS if types.is_date32(of) else 0
    return (_values(column, f"<i{width}") - epoch).astype(f">i{width}")


def _numeric(column: Any) -> _Numbers:
    """Four int16 (digits, weight, sign, scale), then digits to the base 10,000; PostgreSQL drops leading zeros."""
    precision, scale = column.type.precision, column.type.scale
    before, after = max(1, -(-(precision - scale) // 4)), -(-scale // 4)
    value = np.frombuffer(column.buffers()[1], "<i8", 2 * len(column), 16 * column.offset)[::2]  # the low halves
    whole, fraction = np.divmod(np.abs(value), 10**scale)
    fraction *= 10 ** (4 * after - scale)
    words = np.empty((len(column), 4 + before + after), ">i2")
    words[:, 0], words[:, 1], words[:, 3] = before + after, before - 1, scale
    words[:, 2] = np.where(value < 0, 0x4000, 0)
    for at in range(3 + before, 3, -1):
        whole, words[:, at] = np.divmod(whole, 10_000)
    for at in range(3 + before + after, 3 + before, -1):
        fraction, words[:, at] = np.divmod(fraction, 10_000)
    return words


def _numeric_of_text(column: Any) -> _Numbers:
    """The same of digits with a point or none: PostgreSQL keeps all of them, the zeros at the end too."""
    column = pc.fill_null(column, "0")
    parts = pc.split_pattern(pc.binary_join_element_wise(column, "", "."), ".", max_splits=1)  # a point in each
    whole, fraction = pc.utf8_ltrim(pc.list_element(parts, 0), "-"), pc.utf8_rtrim(pc.list_element(parts, 1), ".")
    length, scale = (_values(pc.binary_length(part), "<i4") for part in (whole, fraction))
    before, after = (-(-int(size.max(initial=0)) // 4) for size in (length, scale))
    padded = pc.utf8_lpad(whole, 4 * before, "0"), pc.utf8_rpad(fraction, 4 * after, "0")
    digits = pc.binary_join_element_wise(*padded, "").cast(pa.binary(4 * (before + after)))
    fours = _values(digits, f"({before + after},4)u1") - ord("0")
    words = np.empty((len(column), 4 + before + after), ">i2")
    words[:, 0], words[:, 1], words[:, 3] = before + after, before - 1, scale
    words[:, 2] = np.where(pc.starts_with(column, "-"), 0x4000, 0)
    words[:, 4:] = fours @ np.array([1_000, 100, 10, 1], np.int16)
    return words


def _offsets(column: Any) -> _Numbers:
    """Where the texts of a column begin in its bytes, and where the last one ends."""
    return np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]


def _values(column: Any, kind: str) -> _Numbers:
    return np.frombuffer(column.buffers()[1], kind, len(column), column.offset * np.dtype(kind).itemsize)


def _elements(count: int, fields: list[_Numbers]) -> Any:
    """Fields of fixed width, side by side, as one binary array."""
    record = np.empty(count, [(str(at), field.dtype, field.shape[1:]) for at, field in enumerate(fields)])
    for at, field in enumerate(fields):
        record[str(at)] = field
    offsets = np.arange(count + 1, dtype=np.int32) * record.itemsize
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(record)])
