"""`context.load`: rows that a pipeline has, in each form that people have them in."""

import enum
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import polars
import psycopg
import pyarrow
import pytest
from judging import TEXTS, TYPES, Load, Rows, fails_for_good

from dataloader.pipelines import Context, Progress, register
from dataloader.pipelines.rows import SAMPLE

pytestmark = pytest.mark.usefixtures("own_registry")
ORDERS = [{"id": 1, "name": "Ёж"}, {"id": 2, "name": None}]


class Color(enum.Enum):
    RED = "red"


@pytest.fixture
def load(job: Load) -> Callable[..., Any]:
    """Load rows as a job's pipeline; each run makes them anew."""
    given: dict[str, Any] = {}

    @register("load.rows")
    def pipeline(args: dict[str, Any], context: Context) -> dict[str, Any]:
        rows, more = given["rows"], given["more"]
        return context.load("t", rows() if callable(rows) else rows, **more)

    def load(rows: Any, how: dict[str, Any] | None = None, **more: Any) -> Any:
        given.update(rows=rows, more={"key": ["id"]} | more)
        return job("load.rows", {}, **(how or {}))

    return load


@pytest.mark.parametrize("row", [dict, lambda row: tuple(row.values()), lambda row: list(row.values())])
def test_dicts_and_tuples_give_a_table_with_their_types(load: Callable[..., Any], rows: Rows, row: Any) -> None:
    values = {
        "id": 1,
        "big": 2**70,
        "share": 0.5,
        "mixed": 1,
        "price": Decimal("1.50"),
        "is_open": True,
        "at": datetime(2026, 3, 29, 1, 30, tzinfo=UTC),
        "local": datetime(2026, 3, 29, 1, 30),  # noqa: DTZ001  a time without a zone
        "day": date(2026, 3, 29),
        "hour": time(1, 30),
        "shift": time(1, 30, tzinfo=timezone(timedelta(hours=2))),
        "length": timedelta(days=2, seconds=1),
        "uid": UUID(int=5),
        "raw": b"\x00\xff",
        "tags": ["a", {"b": None}],
        "color": Color.RED,
        "name": 'a,"\n\\.',
        "nothing": None,
    }
    second = values | {"id": 2, "mixed": 2.5}
    result = load([row(values), row(second)], columns=None if row is dict else list(values))
    assert result.status == "succeeded", result.error
    assert dict(rows(TYPES)) == {
        **{"id": "bigint", "big": "numeric", "share": "double precision", "mixed": "numeric"},
        **{"price": "numeric", "is_open": "boolean", "at": "timestamp with time zone"},
        **{"local": "timestamp without time zone", "day": "date", "hour": "time without time zone"},
        "shift": "time with time zone",
        **{"length": "interval", "uid": "uuid", "raw": "bytea", "tags": "jsonb", "color": "text", "name": "text"},
        "nothing": "text",
    }
    [got] = rows("SELECT * FROM t WHERE id = 1")
    assert got == tuple((values | {"color": "RED"}).values())


def test_each_text_arrives_as_it_is(load: Callable[..., Any], rows: Rows) -> None:
    texts = [*TEXTS, '"', "a\tb", "''", " ", "{}", "NULL"]
    assert load([{"id": n, "x": text} for n, text in enumerate(texts)]).status == "succeeded"
    assert [x for (x,) in rows("SELECT x FROM t ORDER BY id")] == texts


def frames() -> dict[str, Callable[[], Any]]:
    table = pyarrow.table({"id": [1, 2], "name": ["Ёж", None]})
    return {
        "polars": lambda: polars.DataFrame(ORDERS),
        "arrow": lambda: table,
        "reader": lambda: table.to_reader(1),
        "pandas": lambda: pytest.importorskip("pandas").DataFrame(ORDERS),
        "generator": lambda: (row for row in ORDERS),
        "any stream": lambda: SimpleNamespace(__arrow_c_stream__=table.__arrow_c_stream__),
    }


def test_bytes_and_categories_of_polars(load: Callable[..., Any], rows: Rows) -> None:
    values = [b"abc", b"\\x41", b"\xff\0", None]
    kinds = polars.Series(["x", None, "y", "x"], dtype=polars.Enum(["x", "y"]))
    frame = polars.DataFrame({"id": range(4), "raw": values, "of": kinds, "kind": kinds.cast(polars.Categorical)})
    for more in ({}, {"mode": "replace"}):
        assert load(frame, **more).error is None
        assert [raw for (raw,) in rows("SELECT raw FROM t ORDER BY id")] == values
        assert rows("SELECT of, kind FROM t ORDER BY id") == [("x", "x"), (None, None), ("y", "y"), ("x", "x")]
        rows("ALTER TABLE t ALTER of TYPE varchar(9)")


@pytest.mark.parametrize("kind", frames())
def test_frames_readers_and_generators(load: Callable[..., Any], rows: Rows, kind: str) -> None:
    assert load(frames()[kind]).result["processed"] == 2
    assert rows("SELECT * FROM t ORDER BY id") == [(1, "Ёж"), (2, None)]
    assert dict(rows(TYPES)) == {"id": "bigint", "name": "text"}


def test_an_empty_page_changes_nothing_and_finishes(load: Callable[..., Any], rows: Rows) -> None:
    done = []
    assert load([], finish=lambda conn: done.append(conn.info.dbname)).result == {"processed": 0, "total": 0}
    assert len(done) == 1
    assert rows("SELECT to_regclass('t')") == [(None,)]
    rows("CREATE TABLE t (id int PRIMARY KEY)")
    rows("INSERT INTO t VALUES (1)")
    for how in ({"mode": "replace"}, {"delete_missing": True}, {"delete_missing": "soft"}):
        fails_for_good(load([], **how), "columns: should be given where there may be no rows")
    assert rows("SELECT count(*) FROM t") == [(1,)]


@pytest.mark.parametrize(
    ("given", "more", "error"),
    [
        ([{"id": 1}, {"id": 2, "n": "x"}] * SAMPLE, {"columns": ["id"]}, "row 2: 'n' is not in `columns`"),
        ([{"id": 1}] * SAMPLE + [{"id": 2, "n": 1, None: 2}], {}, "'n' is no column of the first"),
        ([(1, 2)], {}, "columns: should name the values of each row"),
        ([(1, 2), (3,)], {"columns": ["id", "n"]}, "row 2: should be a dict, or a tuple of 2 values"),
        ([{"id": 1, "x": object()}], {}, "row 1: column x: PostgreSQL has no text for a object like this one"),
        ([{"id": 1, "x": "secret\ud800"}], {}, "row 1: column x: PostgreSQL has no text for a str like this one"),
        ([{"n": 1}], {}, "key: id should be in the rows"),
        ([{"id": 1, "": 2}], {}, "columns: should be a name of 1 to 63 bytes"),
        ([{"id": 1}], {"mode": "append", "key": []}, "finish: should save the checkpoint or a state"),
        ([{"id": 1}], {"speed": 9}, "speed: there is no such argument"),
        (polars.DataFrame({"n": [1]}), {}, "key: id should be in the rows"),
        ([{"id": n, "n": 1} for n in range(SAMPLE)] + [{"id": -1, "n": 0.5}], {}, f"row {SAMPLE + 1}: column n: in"),
        *(
            ([{"id": n, "n": like} for n in range(SAMPLE)] + [{"id": -1, "n": text}], {}, "column n: a str; ")
            for like, text in [(1, "007"), (Decimal("1.5"), "1e2"), (True, "1"), (b"a", "\\x41"), ({}, "[1]")]
        ),
    ],
)
def test_rows_that_do_not_fit_are_named_and_change_nothing(
    load: Callable[..., Any], rows: Rows, given: Any, more: dict[str, Any], error: str
) -> None:
    result = load(given, **more)
    fails_for_good(result, error, "secret")
    assert rows("SELECT to_regclass('t')") == [(None,)]


def test_a_cancellation_rolls_back_between_two_batches(load: Callable[..., Any], rows: Rows) -> None:
    result = load(({"id": n} for n in range(100)), {"cancel_at": 5}, batch_rows=10)
    assert result.status == "canceled"
    assert rows("SELECT to_regclass('t')") == [(None,)]


@pytest.mark.parametrize("point", [*range(1, 12), "end"])
def test_pages_and_their_checkpoint_commit_together(job: Load, rows: Rows, point: Any) -> None:
    """Append repeats no page, because the checkpoint is in the transaction of the rows."""

    @register("load.pages")
    def pages(args: dict[str, Any], context: Context) -> Iterator[Progress]:
        begin = (context.checkpoint or {"page": 0})["page"]
        for page in range(begin, 4):

            def finish(conn: psycopg.Connection, following: int = page + 1) -> None:
                context.save({"page": following})

            context.load("t", [{"page": page, "n": n} for n in range(3)], mode="append", finish=finish)
            yield Progress(page, 4)

    assert job("load.pages", crash_at=point).status == "succeeded"
    assert rows("SELECT page, count(*) FROM t GROUP BY page ORDER BY page") == [(page, 3) for page in range(4)]


def test_rows_that_do_not_fit_are_set_aside_where_that_is_wanted(load: Callable[..., Any], rows: Rows) -> None:
    given = [{"id": 1, "n": 1}, {"id": 2, "n": object()}, {"id": 3, "n": 3}]
    result = load([{**row, "n": Decimal("NaN")} if row["id"] == 3 else row for row in given], max_errors=2)
    assert result.status == "succeeded", result.error
    assert rows("SELECT id FROM t ORDER BY id") == [(1,), (3,)]
    assert result.result["rejected"] == 1


def test_a_column_of_integers_and_floats_keeps_each_digit(load: Callable[..., Any], rows: Rows) -> None:
    values = [2**53 + 1, 0.5, float("nan"), 1e-300, 10**18 + 1]
    assert load([{"id": n, "x": value} for n, value in enumerate(values)]).status == "succeeded"
    got = [x for (x,) in rows("SELECT x FROM t ORDER BY id")]
    assert got[:2] + got[3:] == [2**53 + 1, Decimal("0.5"), Decimal("1e-300"), 10**18 + 1]
    assert got[2].is_nan()


@pytest.mark.parametrize(
    ("usual", "late", "type_"),
    [
        (0.5, 2**53 + 1, "numeric"),
        (0.5, Decimal("0.12345678901234567890"), "numeric"),
        (0.5, "9007199254740993", "numeric"),
    ],
    ids=str,
)
def test_a_late_value_that_an_inferred_type_would_lose_is_refused(
    load: Callable[..., Any], rows: Rows, usual: Any, late: Any, type_: str
) -> None:
    given = [{"id": n, "x": usual} for n in range(SAMPLE)] + [{"id": SAMPLE, "x": None}, {"id": -1, "x": late}]
    fails_for_good(load(given), f"row {SAMPLE + 2}: column x: a {type(late).__name__}")
    assert load(given, columns={"id": "int", "x": type_}).status == "succeeded"
    [(x,)] = rows("SELECT x FROM t WHERE id = -1")
    assert (str(x) if isinstance(late, str) else x) == late
    assert load(given).status == "succeeded"  # a table that is there has its own type


def test_a_late_integer_that_a_float_holds_arrives(load: Callable[..., Any], rows: Rows) -> None:
    assert load([{"id": n, "x": 0.5} for n in range(SAMPLE)] + [{"id": -1, "x": 2**53}]).status == "succeeded"
    assert rows("SELECT x FROM t WHERE id = -1") == [(2.0**53,)]


def test_a_load_of_several_batches_reports_its_progress_and_a_small_one_does_not(load: Callable[..., Any]) -> None:
    reports = load([{"id": n} for n in range(25)], batch_rows=10).progress
    assert [report["processed"] for report in reports] == [10, 20, 25, 25, 25]
    assert {report["total"] for report in reports} == {25}
    assert reports[3]["phase"] == "merging"
    assert len(load([{"id": n} for n in range(25)], batch_rows=100).progress) == 1


def test_soft_deletes_of_a_load_have_one_time_behind_that_of_its_last_row(load: Callable[..., Any], rows: Rows) -> None:
    soft = {"delete_missing": "soft"}
    read_at = []

    def some() -> Iterator[dict[str, int]]:
        yield from ({"id": n} for n in range(4, 5 + SAMPLE))
        read_at.extend(rows("SELECT clock_timestamp()"))

    load([{"id": n} for n in range(5)], **soft)
    assert load(some, **soft).result["deleted"] == 4
    [(least, most)] = rows("SELECT min(deleted_at), max(deleted_at) FROM t")
    assert read_at[0][0] < least == most


def test_numbers_that_are_none_arrive(load: Callable[..., Any], rows: Rows) -> None:
    values = [float("nan"), float("inf"), float("-inf"), 1e-300, -0.0, 1e16]
    assert load([{"id": n, "x": value} for n, value in enumerate(values)]).status == "succeeded"
    assert [repr(x) for (x,) in rows("SELECT x FROM t ORDER BY id")] == [repr(value) for value in values]


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize(
    ("usual", "lost", "error", "type_"),
    [
        (date(2026, 3, 29), datetime(2026, 3, 29, 1, 30), "a time of day", "timestamp"),  # noqa: DTZ001
        (datetime(2026, 3, 29), datetime(2026, 3, 29, 1, tzinfo=UTC), "a time zone", "timestamptz"),  # noqa: DTZ001
        (time(1), time(1, tzinfo=UTC), "not a time of day alone", "timetz"),
    ],
)
def test_a_time_that_a_type_would_lose_a_part_of_is_refused(
    load: Callable[..., Any], rows: Rows, usual: Any, lost: Any, error: str, type_: str, is_late: bool
) -> None:
    """PostgreSQL would drop the time of a timestamp in a date, and a zone, without an error."""
    given = [{"id": n, "x": usual} for n in range(SAMPLE)] + [{"id": SAMPLE, "x": None}, {"id": -1, "x": lost}]
    assert is_late or load(given[:1]).status == "succeeded"
    fails_for_good(load(given if is_late else given[-1:]), f"row {SAMPLE + 2 if is_late else 1}: column x: {error}")
    rows("DROP TABLE IF EXISTS t")
    assert load(given[-1:], columns={"id": "int", "x": type_}).status == "succeeded"
    assert rows("SELECT x FROM t WHERE id = -1") == [(lost,)]


@pytest.mark.parametrize("rows_of", [list, polars.DataFrame, pyarrow.Table.from_pylist])
@pytest.mark.parametrize(
    ("type_", "value", "error"),
    [
        ("date", datetime(2026, 3, 29, 1), "a time of day that the type date would lose"),  # noqa: DTZ001
        ("date", "2026-03-29 01:00", "a time of day that the type date would lose"),
        ("date", "03/04/2026", "a date that two formats read differently"),
        ("timestamp", datetime(2026, 3, 29, 1, tzinfo=UTC), "a time zone that the type timestamp would lose"),
        ("time", datetime(2026, 3, 29, 1), "not a time of day alone"),  # noqa: DTZ001
        ("timetz", "01:30", "not a time of day with its zone"),
        ("date[]", "{03/04/2026}", "date/time field value out of range"),
        ("daterange", "[03/04/2026,04/04/2026)", "date/time field value out of range"),
    ],
)
def test_no_session_decides_how_a_time_is_read(
    load: Callable[..., Any], rows: Rows, rows_of: Any, type_: str, value: Any, error: str
) -> None:
    rows(f"CREATE TABLE t (id int PRIMARY KEY, x {type_})")
    result = load(rows_of([{"id": 1, "x": value}]))
    fails_for_good(result, f"row 1: column x: {error}")
    assert "date_format" not in result.error, "no argument of context.load"


@pytest.mark.parametrize("type_", ["date", "timestamp"])
def test_a_day_with_its_year_first_has_one_reading(load: Callable[..., Any], rows: Rows, type_: str) -> None:
    rows(f"CREATE TABLE t (id int PRIMARY KEY, x {type_})")
    for number, given in enumerate(("2026/03/01", "2026-3-1")):
        assert load([{"id": number, "x": given}]).error is None
        assert load(polars.DataFrame([{"id": number + 2, "x": given}])).error is None
    assert rows("SELECT DISTINCT x::date::text FROM t") == [("2026-03-01",)]
    fails_for_good(load([{"id": 9, "x": "2026/13/01"}]), "row 1: column x: ")


def test_a_midnight_is_a_date(load: Callable[..., Any], rows: Rows) -> None:
    rows("CREATE TABLE t (id int PRIMARY KEY, x date)")
    given = [{"id": n, "x": datetime(2026, 3, n)} for n in (1, 2)]  # noqa: DTZ001
    for some in (given[:1], polars.DataFrame(given[1:])):
        assert load(some).error is None
    assert rows("SELECT x::text FROM t ORDER BY id") == [("2026-03-01",), ("2026-03-02",)]


@pytest.mark.parametrize(
    ("values", "error"),
    [
        (
            pyarrow.array([[1]], pyarrow.list_(pyarrow.timestamp("ns"))),
            "timestamp[ns]> has a time with nanoseconds, or",
        ),
        (pyarrow.array([[2**62]], pyarrow.list_(pyarrow.timestamp("us"))), "outside of the years 1 to 9999"),
        (polars.Series([2**100], dtype=polars.Int128), "pyarrow cannot read the frame: "),
    ],
    ids=["nanoseconds", "far", "wide"],
)
def test_a_frame_that_no_value_of_python_holds_is_refused_in_a_sentence(
    load: Callable[..., Any], values: Any, error: str
) -> None:
    frame = values.to_frame("x") if isinstance(values, polars.Series) else pyarrow.table({"x": values})
    result = load(frame, key=[], mode="replace")
    fails_for_good(result, error)
    assert "Traceback" not in result.error


def test_runs_of_equal_values_have_the_type_of_these(load: Callable[..., Any], rows: Rows) -> None:
    runs = pyarrow.RunEndEncodedArray.from_arrays(pyarrow.array([2, 3], pyarrow.int32()), pyarrow.array([7, None]))
    assert load(pyarrow.table({"id": [1, 2, 3], "x": runs})).error is None
    assert rows("SELECT x, pg_typeof(x)::text FROM t ORDER BY id") == [(7, "bigint"), (7, "bigint"), (None, "bigint")]
