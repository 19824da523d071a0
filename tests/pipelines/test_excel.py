"""Workbooks that openpyxl writes; tests/data/dirty has some with formulas."""

import datetime as dt
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from judging import TYPES, Load, Rows

from dataloader.pipelines import Context, PermanentError, csv_table
from dataloader.pipelines.csv_table import Target
from dataloader.pipelines.files import Files

openpyxl = pytest.importorskip("openpyxl")
pytest.importorskip("python_calamine")
from openpyxl.utils.datetime import CALENDAR_MAC_1904, CALENDAR_WINDOWS_1900  # noqa: E402

from dataloader.pipelines import excel  # noqa: E402  it needs the latter

Read = Callable[..., Any]
Loaded = Callable[..., list[Any]]


@pytest.fixture
def read(tmp_path: Path) -> Iterator[Read]:
    """A sheet of these rows; `book` changes the workbook before it is saved."""
    with ExitStack() as opened:

        def read(*rows: list[Any], book: Callable[[Any], None] = id, **args: Any) -> excel.Sheet:
            made = openpyxl.Workbook()
            made.active.title = "March"
            for row in rows:
                made.active.append(row)
            book(made)
            made.save(tmp_path / "f.xlsx")
            file = opened.enter_context((tmp_path / "f.xlsx").open("rb"))
            return excel.Sheet("f.xlsx", file.fileno(), file, Files(path="f.xlsx", table="t", key=["id"], **args))

        yield read


@pytest.fixture
def loaded(read: Read, context: Context, rows: Rows) -> Loaded:
    def loaded(*cells: list[Any], **how: Any) -> list[Any]:
        for _ in csv_table.load(context, Target(table="t", key=["id"]), read(*cells, **how)):
            pass
        return rows("SELECT * FROM t ORDER BY 1")

    return loaded


def test_cells_keep_their_kinds(read: Read, loaded: Loaded) -> None:
    day, moment = dt.date(2026, 3, 2), dt.datetime(2026, 3, 2, 19, 30)  # noqa: DTZ001
    cells = [
        ["id", "code", "n", "price", "day", "at", "ok", "clock", "long", "mixed"],
        [1, "00071", 2**40, 1 / 3, day, moment, True, dt.time(1, 2, 3), dt.timedelta(hours=25, minutes=10), 5],
        [2, None, -7, 1000, day, moment, False, dt.time(0, 0), dt.timedelta(0), "5x"],
    ]
    types = {"id": "bigint", "code": "text", "n": "bigint", "price": "numeric", "day": "date", "at": "timestamp"}
    assert read(*cells).columns == types | {"ok": "boolean", "clock": "time", "long": "interval", "mixed": "text"}
    [first, second] = loaded(*cells)
    assert first[:3] == (1, "00071", 2**40)
    assert float(first[3]) == 1 / 3
    assert first[4:] == (day, moment, True, dt.time(1, 2, 3), dt.timedelta(hours=25, minutes=10), "5")
    assert second[:4] == (2, None, -7, 1000)


def test_rows_above_and_below_and_empty_ones_are_no_data(read: Read) -> None:
    sheet = read(["Sales of March"], [], ["id", "v"], [1, "a"], [], [2, None], ["Total", 3], skip_rows=2, skip_footer=1)
    assert list(sheet.records(sheet.begin)) == [(4, '1,"a"'), (6, "2,")]
    assert list(sheet.records(sheet.begin._replace(records=1))) == [(6, "2,")]
    assert (list(sheet.columns), sheet.expected) == (["id", "v"], 2)


def test_an_error_is_the_text_that_people_see(loaded: Loaded, read: Read) -> None:
    assert loaded(["id", "v"], [1, "#N/A"], [2, 5]) == [(1, "#N/A"), (2, "5")]
    assert read(["id", "v"], [1, "#N/A"], [2, 5], null=["#N/A"]).columns == {"id": "bigint", "v": "bigint"}


def test_one_sheet_that_is_shown_needs_no_name(read: Read) -> None:
    def hidden(book: Any) -> None:
        book.create_sheet("Lists").sheet_state = "hidden"

    def more(book: Any) -> None:
        book.create_sheet("April").append(["id"])

    assert list(read(["id"], [1], book=hidden).columns) == ["id"]
    with pytest.raises(PermanentError, match=r"f\.xlsx: sheet: should be one of March, April"):
        read(["id"], [1], book=more)
    with pytest.raises(PermanentError, match=r"f\.xlsx: sheet: should be one of March, April"):
        read(["id"], [1], book=more, sheet="May")
    assert read(["v"], [1], book=more, sheet="April").expected == 0


def test_what_is_no_workbook_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f.xlsx").write_text("id,v\n1,a\n")
    with (
        (tmp_path / "f.xlsx").open("rb") as file,
        pytest.raises(PermanentError, match="should be a workbook of Excel, xlsx or xlsm, and be whole"),
    ):
        excel.Sheet("f.xlsx", file.fileno(), file, Files(path="f.xlsx", table="t", key=["id"]))


def test_a_sheet_with_a_header_alone_makes_a_table_without_rows(
    read: Read, job: Load, rows: Rows, tmp_path: Path
) -> None:
    read(["id", "v"])
    result = job("load.files", {"path": "f.xlsx", "table": "t", "key": ["id"]})
    assert result.status == "succeeded", result.error
    assert dict(rows(TYPES)) == {"id": "text", "v": "text"}


def test_names_and_the_header_are_as_for_text(read: Read) -> None:
    rows = ["id", "", "Unit price", None, "Unit price"], [1, 2, 3, None, 5]
    assert read(*rows, names="snake").names == ["id", "", "Unit price", "Unit price"]
    with pytest.raises(
        PermanentError, match='row 1: header: column 2 has no name; columns 3 and 4 are named "Unit price"'
    ):
        read(*rows)
    sheet = read([1, "a"], [2, "b"], header=["id", "v"])
    assert (sheet.columns, list(sheet.records(sheet.begin))) == (
        {"id": "bigint", "v": "text"},
        [(1, '1,"a"'), (2, '2,"b"')],
    )
    assert read([1, "a"], header=False).names == ["column_1", "column_2"]
    assert read(["id", 2025, 2.5, dt.date(2026, 1, 1), True], [1, 2, 3, 4, 5]).names == [
        *("id", "2025", "2.5", "2026-01-01", "True")
    ]


def test_a_sheet_of_several_batches_is_loaded_whole(read: Read, job: Load, rows: Rows) -> None:
    read(["id", "v"], *([n, f"v{n}"] for n in range(350)))
    result = job("load.files", {"path": "f.xlsx", "table": "t", "key": ["id"], "batch_rows": 100, "skip_footer": 1})
    assert result.status == "succeeded", result.error
    assert rows("SELECT id::int, v FROM t ORDER BY id") == [(n, f"v{n}") for n in range(349)]


def stray(book: Any) -> None:
    book.active["XFD1048576"] = 1


@pytest.mark.parametrize(
    ("cells", "how", "error"),
    [
        ([], {}, "the sheet March has no row behind skip_rows, so no header"),
        ([[1, 2], [3, 4]], {"header": ["id"]}, "row 1: header: 1 names, but the sheet has 2 columns"),
        ([[1, 2], [3, 4]], {"header": ["id", "a", "b"]}, "row 1: header: 3 names, but the sheet has 2 columns"),
        # It is refused before memory is taken for all cells between.
        ([["id"], [1]], {"book": stray}, r"March has 17179869184 cells .*; delete what stands far away"),
    ],
)
def test_a_sheet_without_a_table_is_refused(read: Read, cells: list[Any], how: dict[str, Any], error: str) -> None:
    with pytest.raises(PermanentError, match=error):
        read(*cells, **how)


@pytest.mark.parametrize("shown", ["h:mm", "yyyy-mm-dd hh:mm"])
@pytest.mark.parametrize("epoch", [CALENDAR_WINDOWS_1900, CALENDAR_MAC_1904])
def test_a_time_below_zero_is_refused_where_it_is_used(read: Read, loaded: Loaded, epoch: Any, shown: str) -> None:
    """Calamine reads -0.25 as 18:00; Excel shows it as #### or as -6:00."""

    def times(book: Any) -> None:
        book.epoch = epoch
        book.active["B2"].number_format = book.active["B3"].number_format = shown

    rows = [["id", "at", "n"], [1, 0.5, -1], [2, -0.25, -2]]
    with pytest.raises(PermanentError, match="row 3: column at: a date or time below zero"):
        loaded(*rows, book=times)
    assert loaded(*rows, book=times, select=["id", "n"]) == [(1, None, -1), (2, None, -2)]


def test_only_negative_times_take_memory(read: Read) -> None:
    """A sheet with a formula may have millions of negative amounts."""
    rows = [["id", "n", "at"], *([n, -n, dt.time(9)] for n in range(1, 99)), [99, -99, -0.25]]

    def book(made: Any) -> None:
        made.active["C100"].number_format = "h:mm"
        made.active["D1"], made.active["D2"] = "f", "=B2"

    assert read(*rows, book=book)._marked.keys() == {(100, 3), (2, 4)}


def test_serial_days_from_1904_need_no_date_format(read: Read, loaded: Loaded) -> None:
    def book(made: Any) -> None:
        made.epoch = CALENDAR_MAC_1904
        made.active["B2"].number_format = "yyyy-mm-dd"

    rows = [["id", "day"], [1, 40_000]]
    assert loaded(*rows, book=book) == [(1, dt.date(2013, 7, 7))]
    with pytest.raises(PermanentError, match="date_format: the days of this workbook count from 1904"):
        read(*rows, book=book, date_format="excel")
