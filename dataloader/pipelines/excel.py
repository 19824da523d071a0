"""Workbooks of Excel (xlsx, xlsm) for `load.files`: the rows of one sheet below its header.

A workbook is read whole: some 60 bytes a cell. Cells keep their classes: a text of digits stays a text, and a number is
the double that Excel has. Calamine reads a formula without a value, and an error such as #N/A, as an empty cell, and a
time below zero as one of the day before; so these are read from the sheet's XML.
"""

from __future__ import annotations

import datetime as dt
import posixpath
import re
import zipfile
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from types import NoneType
from typing import IO, TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from dataloader.pipelines import PermanentError
from dataloader.pipelines.csv_table import Place, Rejected
from dataloader.pipelines.files import Files, named
from dataloader.pipelines.rows import Row, TypedFile, Writer, number_type, quoted

if TYPE_CHECKING:
    from typing import BinaryIO

_CHUNK_BYTES = 2**20
_WHOLE = 2.0**53  # from here on a double has no fractions, and may stand for its neighbour
_SUSPECT = re.compile(rb'[<:]f[ />]|t="e"')  # what a sheet with formulas or errors has
_NEGATIVE = re.compile(rb"[<:]v>-")
_FROM_1904 = re.compile(rb"""date1904=["'](?:1|true)""")
_PLACE = re.compile(rb'\br="([A-Z]{1,3})([0-9]{1,7})"')  # of a cell
_MOST_CELLS = 25_000_000  # some 1.5 GB
_NO_WORKBOOK = 'should be a workbook of Excel, xlsx or xlsm, and be whole; format "text" reads a .csv under such a name'
_SINCE_1904 = (
    'date_format: the days of this workbook count from 1904, and those of "excel" from 1900; give the cells the format'
    " of a date in Excel, which needs no date_format"
)


class _Fault(str):
    """The reason why a cell has no value."""

    __slots__ = ()


_NO_VALUE = _Fault(
    "the formula has no value: open the workbook in Excel or LibreOffice and save it, or `select` other columns"
)
_BELOW_ZERO = _Fault(
    "a date or time below zero, which no type has: give the cells the format [h]:mm or that of a number, or `select`"
    " other columns"
)


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < _WHOLE else repr(value)


_TYPES = {bool: "boolean", dt.date: "date", dt.datetime: "timestamp", dt.time: "time", dt.timedelta: "interval"}
_FIELDS: Writer = {
    **dict.fromkeys((dt.date, dt.datetime, dt.time), str),
    **{NoneType: lambda _: "", str: quoted, bool: lambda value: str(value).lower(), float: _number},
    dt.timedelta: lambda value: f"{value.total_seconds()} seconds",
}
_NAMES: Writer = {NoneType: lambda _: "", str: str.strip, float: _number}


class Sheet(TypedFile):
    """The rows of a sheet, which people know by the numbers that Excel shows."""

    plain = _FIELDS
    as_json = _FIELDS
    _marked: Mapping[tuple[int, int], Any] = {}  # the cells that calamine may misread

    def __init__(self, path: str, descriptor: int, file: BinaryIO, wanted: Files) -> None:
        """Read the workbook; raises PermanentError where it, its sheet or its header is not as it should be."""
        super().__init__(path, descriptor)
        try:
            self._sheet, is_suspect, of_times = self._opened(file, wanted.sheet)
            with zipfile.ZipFile(file) as archive:
                if "excel" in wanted.formats and _FROM_1904.search(archive.read("xl/workbook.xml")):
                    raise PermanentError(f"{path}: {_SINCE_1904}")
                if is_suspect or of_times:
                    self._marked = dict(_marked(archive.open(_part(archive, self._sheet.name)), of_times))
        except (zipfile.BadZipFile, ET.ParseError, KeyError, OSError):
            raise PermanentError(f"{path}: {_NO_WORKBOOK}") from None
        self._footer = wanted.skip_footer
        number, first = next(self._cells(wanted.skip_rows), (wanted.skip_rows, []))
        if not first:
            raise PermanentError(f"{path}: the sheet {self._sheet.name} has no row behind skip_rows, so no header")
        self.begin = Place(None, number if wanted.header is True else number - 1)
        raw = [_NAMES.get(type(name), str)(name) for name in first]
        if wanted.header is not True:
            raw = wanted.header or [f"column_{n}" for n in range(1, len(first) + 1)]
        filled = {n for _, cells in self._cells(self.begin.line) for n, value in enumerate(cells) if value is not None}
        if not max(filled, default=-1) < len(raw) <= len(first):
            raise self.error(number, f"header: {len(raw)} names, but the sheet has {len(first)} columns")
        self._raw = [(n, name) for n, name in enumerate(raw) if name or n in filled]
        # No two columns may have one key.
        self._keys = [(n, name if raw.count(name) == 1 else f"{name} {n}") for n, name in self._raw]
        names = named(self.names, wanted, partial(self.error, number))
        self._left_out = {
            n for (n, _), name in zip(self._raw, names, strict=True) if name not in (wanted.select or names)
        }
        self.columns = dict.fromkeys((key for _, key in self._keys), "text") | self._columns(
            self.rows(self.begin), wanted.null
        )
        self.total = self._count

    @property
    def names(self) -> list[str]:
        return [name for _, name in self._raw]

    def rows(self, begin: Place) -> Iterator[tuple[int, Row | Rejected]]:
        self._count = begin.records
        return self._rows(begin)

    def _rows(self, begin: Place) -> Iterator[tuple[int, Row | Rejected]]:
        last: deque[tuple[int, list[Any]]] = deque()
        for number, cells in islice(self._cells(self.begin.line), begin.records, None):
            last.append((number, cells))
            if len(last) > self._footer:
                number, cells = last.popleft()
                self._count += 1
                used = [(n, name) for n, name in self._raw if n not in self._left_out]
                fault = next((f"column {name}: {cells[n]}" for n, name in used if type(cells[n]) is _Fault), None)
                if fault is None:
                    yield number, {key: None if n in self._left_out else cells[n] for n, key in self._keys}
                else:
                    yield number, Rejected(fault, "")

    def type_of(self, value: Any) -> str | None:
        if isinstance(value, float):
            return number_type(_number(value))
        return _TYPES.get(type(value), None if value is None else "text")

    def _opened(self, file: BinaryIO, name: str | int | None) -> tuple[Any, bool, set[int]]:
        """The sheet, whether calamine may misread some of its cells, and the columns that may have times below zero."""
        from python_calamine import CalamineError, CalamineWorkbook, PasswordError, SheetVisibleEnum

        try:
            book = CalamineWorkbook.from_filelike(file)
        except PasswordError:
            raise PermanentError(f"{self.origin}: is protected by a password; save it without one") from None
        except (CalamineError, OSError):
            raise PermanentError(f"{self.origin}: {_NO_WORKBOOK}") from None
        shown = [each.name for each in book.sheets_metadata if each.visible == SheetVisibleEnum.Visible]
        if name is None and len(shown) == 1:
            name = shown[0]
        if isinstance(name, int) and 0 < name <= len(book.sheet_names):
            name = book.sheet_names[name - 1]
        if name not in book.sheet_names:
            raise PermanentError(f"{self.origin}: sheet: should be one of {', '.join(book.sheet_names)}")
        cells, is_suspect, has_negatives = _scanned(file, str(name))
        if cells > _MOST_CELLS:
            raise PermanentError(
                f"{self.origin}: the sheet {name} has {cells} cells between its first and its last one, and at most"
                f" {_MOST_CELLS} can be read; delete what stands far away from the table, or save it as .csv"
            )
        sheet = book.get_sheet_by_name(name)
        left = (sheet.start or (0, 0))[1]
        rows = sheet.iter_rows() if has_negatives else ()
        return sheet, is_suspect, {left + n for row in rows for n, cell in enumerate(row, 1) if type(cell) is dt.time}

    def _cells(self, skipped: int) -> Iterator[tuple[int, list[Any]]]:
        """The rows that are not empty, with their numbers."""
        first, left = self._sheet.start or (0, 0)
        for number, row in enumerate(self._sheet.iter_rows(), first + 1):
            cells = [
                self._marked.get((number, left + n), value or None) if value == "" or type(value) is dt.time else value
                for n, value in enumerate(row, 1)
            ]
            if number > skipped and any(value is not None for value in cells):
                yield number, cells


def _part(archive: zipfile.ZipFile, name: str) -> str:
    """The member of a workbook that has the sheet of this name."""
    book = ET.parse(archive.open("xl/workbook.xml"))  # noqa: S314  expat bounds what entities may grow to
    sheets = {each.get("name"): value for each in book.iter() for key, value in each.items() if key.endswith("}id")}
    parts = ET.parse(archive.open("xl/_rels/workbook.xml.rels"))  # noqa: S314
    targets = {each.get("Id"): each.get("Target", "") for each in parts.iter()}
    return posixpath.join("/xl", targets[sheets[name]])[1:]


def _scanned(file: BinaryIO, name: str) -> tuple[int, bool, bool]:
    """The number of cells from A1 to the last one, whether calamine may misread some, and whether a number is negative.

    Calamine allocates memory for each of these cells, and reads a time below zero as one of the day before.
    """
    rows = columns = 0
    is_suspect, has_negatives, last = False, False, b""
    with zipfile.ZipFile(file) as archive, archive.open(_part(archive, name)) as text:
        while chunk := text.read(_CHUNK_BYTES):
            piece = last + chunk
            is_suspect = is_suspect or _SUSPECT.search(piece) is not None
            has_negatives = has_negatives or _NEGATIVE.search(piece) is not None
            for letters, number in _PLACE.findall(piece):
                rows, columns = max(rows, int(number)), max(columns, _column(letters.decode()))
            last = chunk[-16:]
    return rows * columns, is_suspect, has_negatives


def _marked(text: IO[bytes], of_times: Collection[int]) -> Iterator[tuple[tuple[int, int], Any]]:
    """The cells that calamine may misread: errors, by their names, formulas without a value, and negative times.

    Of a large sheet only the columns `of_times` may have these: each other negative number would take memory as well.
    """
    row = column = 0
    for event, element in ET.iterparse(text, ("start", "end")):  # noqa: S314
        kind = _local(element)
        if event == "start" and kind == "sheetData":
            rows = element
        elif event == "start" and kind == "row":
            row, column = int(element.get("r", row + 1)), 0
        elif event == "end" and kind == "row":
            rows.clear()
        elif event == "end" and kind == "c":
            column = _column(element.get("r", "")) or column + 1
            values = {_local(each): each.text for each in element}
            if element.get("t") == "e":
                yield (row, column), values.get("v") or "#ERROR"
            elif "f" in values and not values.get("v") and element.get("t") != "str":
                yield (row, column), _NO_VALUE
            elif column in of_times and (values.get("v") or "").startswith("-"):
                yield (row, column), _BELOW_ZERO


def _local(element: ET.Element) -> str:
    return element.tag.rpartition("}")[2]


def _column(place: str) -> int:
    number = 0
    for letter in place.rstrip("0123456789"):
        number = number * 26 + ord(letter) - ord("A") + 1
    return number
