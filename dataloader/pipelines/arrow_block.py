"""Text of CSV as PostgreSQL's binary COPY, by Arrow: only what both read in one way; other text has no rows here.

Arrow reads what it reads as PostgreSQL does. Other values stay texts, and `binary_copy` knows which forms have one
reading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv

from dataloader.pipelines.binary_copy import encoded, parsed, takes_texts
from dataloader.pipelines.parquet import widened

_QUOTE, _END, _RETURN = b'"\n\r'
# The types of which Arrow reads no other text than PostgreSQL.
_TYPES = {"boolean": pa.bool_(), "date": pa.date32()}


class Copied(NamedTuple):
    """Records as a whole binary COPY."""

    records: int
    lines: int
    binary: list[Any]


def reader(
    delimiter: str,
    nulls: Sequence[str],
    stored: Sequence[str],
    added: Sequence[Any],
    lines: int,
    others: Sequence[str],
) -> Callable[[bytes, int], Copied | None] | None:
    """A function of whole lines and the number of the line before them; None where a type has no forms.

    `nulls` are the words for null. `stored` are the types where COPY writes: of the fields, behind them those of the
    `added` values, which all rows have, and of so many columns with the number of each row's line. Text with one of
    `others` is not read.
    """
    kinds = stored[: len(stored) - len(added) - lines]
    arrow = [*map(_type, kinds)]
    if len(kinds) < 2 or None in arrow:  # in one column a line may end the data
        return None
    doubtful = [word.encode() for word in (*others, *(f'"{word}"' for word in nulls), "\0", "\x1a")]
    names = [*map(str, range(len(kinds)))]
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    convert = csv.ConvertOptions(
        column_types=dict(zip(names, arrow, strict=True)),
        **{"null_values": ["", *nulls], "strings_can_be_null": True, "quoted_strings_can_be_null": False},
        **{"true_values": ["t", "true"], "false_values": ["f", "false"]},
    )
    beside = np.zeros(256, bool)  # the bytes that may be beside a quote
    beside[[ord(delimiter), *b'"\r\n']] = True

    def read(text: bytes, line: int) -> Copied | None:
        returns = text.count(b"\r") if b"\r" in text else 0
        if any(mark in text for mark in doubtful) or (returns and (lines or returns != text.count(b"\r\n"))):
            return None
        data = np.frombuffer(b"\n" + text, np.uint8)
        quotes, ends = np.flatnonzero(data == _QUOTE), np.flatnonzero(data == _END)
        around = np.append(quotes[::2] - 1, quotes[1::2] + 1)  # by turns they open and close
        is_between = np.searchsorted(quotes, ends) % 2 == 0
        begins = data[ends[:-1][is_between[:-1]] + 1]  # of the records; a blank line is none
        is_blank = (begins == _END).any() or (begins == _RETURN).any()
        if ends[-1] != len(text) or is_blank or len(quotes) % 2 or not beside[data[around]].all():
            return None
        options = csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=names)
        try:
            [batch] = csv.read_csv(pa.BufferReader(text), options, parse, convert).to_batches()
        except (pa.ArrowException, ValueError):
            return None
        numbers = line + 1 + np.flatnonzero(is_between[:-1])
        binary = encoded(widened(batch.columns, batch.num_rows, added, [numbers] * lines), stored)
        return Copied(batch.num_rows, len(ends) - 1, binary) if binary else None

    return read


def _type(kind: str) -> Any:
    """PURE: the type of Arrow as which a field of this type is read, a text too; None where Arrow cannot."""
    return parsed(kind) or _TYPES.get(kind) or (pa.string() if takes_texts(kind) else None)
