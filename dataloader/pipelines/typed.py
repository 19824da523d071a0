"""Rows whose values have classes, as those of JSON and of workbooks: the columns and the CSV records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dataloader.pipelines import PermanentError
from dataloader.pipelines.csv_table import FileSource, Place, Rejected, identifier

_JSON = {"json", "jsonb"}

Row = Mapping[str, Any]
Writer = Mapping[type, Callable[[Any], str]]  # the CSV field of a value by its class


def number_type(text: str) -> str:
    """PURE: the type that holds this number exactly."""
    is_whole = text.removeprefix("-").isdecimal() and len(text) <= 20
    return "bigint" if is_whole and -(2**63) <= int(text) < 2**63 else "numeric"


def common_type(kinds: set[str]) -> str:
    """PURE: the type of a new table's column that keeps values of all these types."""
    if len(kinds) == 1:
        return next(iter(kinds))
    if "jsonb" in kinds:
        return "jsonb"
    if kinds == {"bigint", "numeric"}:
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

    def rows(self, begin: Place) -> Iterator[tuple[int, Row | Rejected]]:
        """The rows from there on, with the numbers by which people know them; the place is `begin` at once."""
        raise NotImplementedError

    def type_of(self, value: Any) -> str | None:
        """The type of a value; None for a null."""
        raise NotImplementedError

    def records(self, begin: Place) -> Iterator[tuple[int, str | Rejected]]:
        return self._records(self.rows(begin))

    def _records(self, rows: Iterator[tuple[int, Row | Rejected]]) -> Iterator[tuple[int, str | Rejected]]:
        names, known = list(self.columns), self.columns.keys()
        fields = [self.as_json if kind in _JSON else self.plain for kind in self.columns.values()]
        for number, row in rows:
            if isinstance(row, Rejected):
                yield number, row
                continue
            if not row.keys() <= known:
                new = next(name for name in row if name not in known)
                raise self.error(number, f"the first rows have no column {new}: name it in `types`")
            # Most rows have the columns in their order: this loop runs once for each value.
            values = row.values() if list(row) == names else map(row.get, names)
            text = ",".join([field[type(value)](value) for field, value in zip(fields, values, strict=True)])
            if not text.isascii() or "\0" in text:
                try:
                    text.encode()
                except UnicodeEncodeError:
                    yield number, Rejected("a byte that is not UTF-8 text, or half of a character", "")
                    continue
                if "\0" in text:
                    column = next(name for name in names if "\0" in str(row.get(name)))
                    fault = f"column {column}: a zero byte (0x00), which PostgreSQL cannot hold"
                    yield number, Rejected(f"{fault}; max_errors rejects such rows", text.replace("\0", "\ufffd"))
                    continue
            yield number, text

    def _columns(self, sample: Iterable[tuple[int, Row | Rejected]]) -> dict[str, str]:
        """The columns of the sample's rows with their types; raises PermanentError for a wrong name."""
        kinds: dict[str, set[str]] = {}
        refused: PermanentError | None = None
        for number, row in sample:
            if isinstance(row, Rejected):
                refused = refused or self.error(number, row.reason)
                continue
            for name, value in row.items():
                if name not in kinds:
                    try:
                        kinds[identifier(name)] = set()
                    except ValueError as e:
                        raise self.error(number, f"the name of a column: {e}") from None
                if kind := self.type_of(value):
                    kinds[name].add(kind)
        if refused and not kinds:
            raise refused
        return {name: common_type(found) for name, found in kinds.items()}
