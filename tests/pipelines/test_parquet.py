"""`load.parquet`: files of pyarrow into tables. Where pyarrow is missing, only what the farm then says is tried."""

from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from judging import LEFT, ROWS, TEXTS, TYPES, Load, Rows, fails_for_good

from dataloader.testing import Result

EXPECTED = [(n, TEXTS[n % 5]) for n in range(ROWS)]
Written = Callable[..., None]  # a file of these columns


@pytest.fixture
def arrow() -> Any:
    return pytest.importorskip("pyarrow")


@pytest.fixture
def written(arrow: Any, tmp_path: Path) -> Written:
    """Write these columns, or an `id` and a `name`, to `f.parquet` in row groups of some 700 rows."""
    from pyarrow import parquet

    def written(row_group_size: int = 700, **columns: Any) -> None:
        given = columns or {"id": [n for n, _ in EXPECTED], "name": [name for _, name in EXPECTED]}
        parquet.write_table(arrow.table(given), tmp_path / "f.parquet", row_group_size=row_group_size)

    return written


@pytest.fixture
def load(job: Load, arrow: Any) -> Load:
    """Load `f.parquet` into the table `t` by `id`; one attempt."""

    def load(how: dict[str, Any] | None = None, **args: Any) -> Result:
        wanted = {"path": "f.parquet", "table": "t", "key": ["id"], "batch_rows": 100} | args
        return job("load.parquet", wanted, **({"max_attempts": 1} | (how or {})))

    return load


def test_each_type_arrives_as_itself(load: Load, arrow: Any, written: Written, rows: Rows) -> None:
    moscow = datetime(2026, 3, 29, 1, 30, 0, 123456, timezone(timedelta(hours=3)))
    naive, some = datetime(2026, 1, 31, 12), uuid4()  # noqa: DTZ001
    values = {
        "id": (arrow.int64(), 2**62, "bigint", 2**62),
        "a": (arrow.int8(), -1, "smallint", -1),
        "b": (arrow.uint64(), 2**64 - 1, "numeric", Decimal(2**64 - 1)),
        "c": (arrow.float64(), 0.1, "double precision", 0.1),
        "d": (arrow.float16(), 0.5, "real", 0.5),
        "e": (arrow.decimal128(20, 4), Decimal("12345.6700"), "numeric(20,4)", Decimal("12345.6700")),
        "f": (arrow.bool_(), False, "boolean", False),
        "g": (arrow.date32(), date(1900, 1, 31), "date", date(1900, 1, 31)),
        "h": (arrow.timestamp("us", "Europe/Moscow"), moscow, "timestamp with time zone", moscow.astimezone(UTC)),
        "i": (arrow.timestamp("ms"), naive, "timestamp without time zone", naive),
        "j": (arrow.time64("us"), time(1, 2, 3), "time without time zone", time(1, 2, 3)),
        "k": (arrow.binary(), b'\x00\xff"', "bytea", b'\x00\xff"'),
        "l": (arrow.list_(arrow.string()), ['x"', None], "jsonb", ['x"', None]),
        "s": (arrow.list_(arrow.binary()), [b"\x00\xff"], "jsonb", ["\\x00ff"]),
        "m": (arrow.struct([("n", arrow.int32())]), {"n": 5}, "jsonb", {"n": 5}),
        "n": (arrow.dictionary(arrow.int8(), arrow.string()), "Ёж", "text", "Ёж"),
        "o": (arrow.large_string(), "x", "text", "x"),
        "p": (arrow.null(), None, "text", None),
        "q": (arrow.duration("ms"), timedelta(1, 2), "interval", timedelta(1, 2)),
        "r": (arrow.uuid(), some.bytes, "uuid", some),
    }
    written(**{name: arrow.array([value], kind) for name, (kind, value, _, _) in values.items()})
    result = load()
    assert result.status == "succeeded", result.error
    assert rows(TYPES) == [(name, kind) for name, (_, _, kind, _) in values.items()]
    assert rows("SELECT * FROM t") == [tuple(value for _, _, _, value in values.values())]


def test_a_single_column_with_nulls(load: Load, written: Written, rows: Rows) -> None:
    written(id=["a", ""])
    assert load().status == "succeeded"
    written(id=["b", None])
    assert "f.parquet, row 2: " in str(load().error)
    assert rows("SELECT id FROM t ORDER BY id") == [("",), ("a",)]


@pytest.mark.parametrize(
    ("place", "said", "error"),
    [
        (0, 1_001, "it has 1000 rows, and should have 1001"),
        (0, 999, "it has 1000 rows, and should have 999"),
        (-1, 999, "it has 999 rows, and should have 1000"),
    ],
)
@pytest.mark.usefixtures("in_parts")
def test_a_file_that_has_not_the_rows_that_it_says_is_damaged(
    load: Load, written: Written, rows: Rows, tmp_path: Path, place: int, said: int, error: str
) -> None:
    """A file says its number of rows first as a whole, and last for its row group, which pyarrow believes."""
    written(row_group_size=1_000, id=list(range(1_000)))
    file = tmp_path / "f.parquet"
    whole = file.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    at = [at for at in range(footer, len(whole)) if whole.startswith(_varint(1_000), at)][place]
    file.write_bytes(whole[:at] + _varint(said) + whole[at + 2 :])
    assert load().error == f"f.parquet: is damaged: {error}"
    assert (rows("SELECT to_regclass('t')"), rows(LEFT)) == ([(None,)], [(0,)])


def _varint(number: int) -> bytes:
    """A number of two bytes in the footer."""
    return bytes([number * 2 & 127 | 128, number * 2 >> 7])


@pytest.mark.parametrize("damage", ["text", "short", "middle"])
def test_a_damaged_file_leaves_nothing(load: Load, written: Written, rows: Rows, tmp_path: Path, damage: str) -> None:
    written()
    file = tmp_path / "f.parquet"
    whole = file.read_bytes()
    middle = bytes([whole[100] ^ 255]) * 300
    file.write_bytes({"text": b"id,name\n", "short": whole[:-10], "middle": whole[:100] + middle + whole[400:]}[damage])
    result = load({"max_attempts": 3})
    assert (result.status, result.attempts) == ("failed", 1)
    assert (
        result.error == "f.parquet: is no Parquet file, or is damaged; fetch it again, whole, or name it as what it is"
    )
    assert rows("SELECT to_regclass('t')") == [(None,)]


def test_nanoseconds_are_cut(load: Load, arrow: Any, written: Written, rows: Rows) -> None:
    instants = [1_767_225_599_999_999_999, -1]  # the last ones of a year
    columns = {f"at_{zone}": arrow.array(instants, arrow.timestamp("ns", zone)) for zone in (None, "UTC")}
    columns["clock"] = arrow.array([86_399_999_999_999, 1], arrow.time64("ns"))
    columns["long"] = arrow.array([3_600_000_001_999, None], arrow.duration("ns"))
    written(id=[1, 2], **columns)
    result = load()
    assert result.status == "succeeded", result.error
    ends = ["2025-12-31 23:59:59.999999", "1969-12-31 23:59:59.999999"]
    found = rows("""SELECT "at_None"::text, ("at_UTC" AT TIME ZONE 'UTC')::text FROM t ORDER BY id""")
    assert found == [(end, end) for end in ends]
    assert rows("SELECT clock::text, long::text FROM t ORDER BY id") == [
        ("23:59:59.999999", "01:00:00.000001"),
        ("00:00:00", None),
    ]


def test_an_int96_far_from_today_keeps_its_value(load: Load, arrow: Any, rows: Rows, tmp_path: Path) -> None:
    """Spark writes such times, and 9999-12-31 for "no end": 64 bits of nanoseconds end in 2262."""
    from pyarrow import parquet

    far = [datetime(1500, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999)]  # noqa: DTZ001
    columns = {"id": [1, 2], "at": arrow.array(far, arrow.timestamp("us"))}
    parquet.write_table(arrow.table(columns), tmp_path / "f.parquet", use_deprecated_int96_timestamps=True)
    assert load().error is None
    assert rows("SELECT at FROM t ORDER BY id") == [(each,) for each in far]


def test_files_whose_types_differ_get_a_type_that_holds_all(job: Load, arrow: Any, rows: Rows, tmp_path: Path) -> None:
    from pyarrow import parquet

    (tmp_path / "in").mkdir()
    kinds = {
        "id": (arrow.int32(), arrow.int64(), "bigint"),
        "a": (arrow.float32(), arrow.float64(), "double precision"),
        "b": (arrow.decimal128(10, 2), arrow.decimal128(14, 3), "numeric"),
        "c": (arrow.int64(), arrow.float64(), "numeric"),
        "d": (arrow.null(), arrow.int16(), "smallint"),
        "e": (arrow.date32(), arrow.null(), "date"),
        "f": (arrow.string(), arrow.int64(), "text"),
    }
    values = {"id": [1, 2**40], "a": [1.5, 0.1], "b": [Decimal("1.50"), Decimal("7.125")], "c": [2**60, 0.1]}
    values |= {"d": [None, 5], "e": [date(2026, 3, 5), None], "f": ["007", 7]}
    for at in (0, 1):
        columns = {name: arrow.array([values[name][at]], kinds[name][at]) for name in kinds}
        parquet.write_table(arrow.table(columns), tmp_path / "in" / f"{at}.parquet")
    result = job("load.files", {"path": "in", "table": "t", "key": ["id"]}, max_attempts=1)
    assert result.error is None
    assert rows(TYPES) == [(name, kind) for name, (*_, kind) in kinds.items()]
    values |= {"c": [2**60, Decimal("0.1")], "f": ["007", "7"]}
    assert rows("SELECT * FROM t ORDER BY id") == [tuple(given[at] for given in values.values()) for at in (0, 1)]


def test_a_map_is_an_object_of_json_where_its_keys_can_be_names(
    load: Load, arrow: Any, written: Written, rows: Rows
) -> None:
    names, times = (arrow.map_(key, arrow.int32()) for key in (arrow.string(), arrow.date32()))
    inner = arrow.array([{"m": [("x", 1)]}], arrow.struct([("m", names)]))
    written(
        id=[1], m=arrow.array([[("a", 7), ("a", 1)]], names), s=inner, d=arrow.array([[(date(2026, 1, 5), 1)]], times)
    )
    assert load().error is None
    assert rows("SELECT m, s, d FROM t") == [({"a": 1}, {"m": {"x": 1}}, [["2026-01-05", 1]])]


def test_an_interval_of_parquet_which_pyarrow_gives_as_bytes_is_refused_where_it_is_used(
    load: Load, job: Load, rows: Rows, tmp_path: Path
) -> None:
    duckdb = pytest.importorskip("duckdb")
    duckdb.sql(f"COPY (SELECT 1 AS id, INTERVAL 1 MONTH AS Of) TO '{tmp_path / 'f.parquet'}' (FORMAT parquet)")
    fault = "f.parquet: pyarrow gives Of, an INTERVAL, as bytes; write it as a text, or leave it out"
    fails_for_good(load(), fault)
    args = {"path": "f.parquet", "table": "t", "key": ["id"]}
    for more in ({"select": ["id", "of"], "names": "snake"}, {"select": ["id", "x"], "columns": {"Of": "x"}}):
        fails_for_good(job("load.files", args | more), fault)
    assert job("load.files", args | {"select": ["id"]}).error is None
    assert rows("SELECT * FROM t") == [(1,)]


def test_a_file_without_columns_is_refused(job: Load, arrow: Any, tmp_path: Path) -> None:
    from pyarrow import parquet

    parquet.write_table(arrow.table({}), tmp_path / "f.parquet")
    result = job("load.parquet", {"path": "f.parquet", "table": "t", "mode": "append"})
    fails_for_good(result, "f.parquet: the names of its columns: there are none")


def test_orc_is_read_stripe_by_stripe(job: Load, arrow: Any, rows: Rows, tmp_path: Path) -> None:
    from pyarrow import orc

    at = arrow.array([datetime(2026, 1, 1, tzinfo=UTC)] * ROWS, arrow.timestamp("us", "UTC"))
    columns = {"id": [n for n, _ in EXPECTED], "name": [name for _, name in EXPECTED], "at": at}
    orc.write_table(arrow.table(columns), tmp_path / "f.orc", stripe_size=1_024, batch_size=500)
    wanted = {"path": "f.orc", "table": "t", "key": ["id"], "batch_rows": 100}
    result = job("load.files", wanted)
    assert result.status == "succeeded", result.error
    assert rows("SELECT id, name FROM t ORDER BY id") == EXPECTED
    assert rows("SELECT DISTINCT at, pg_typeof(id)::text FROM t") == [(datetime(2026, 1, 1, tzinfo=UTC), "bigint")]
    columns["at"] = arrow.array([datetime(9999, 12, 31)] * ROWS, arrow.timestamp("us"))  # noqa: DTZ001
    orc.write_table(arrow.table(columns), tmp_path / "f.orc")
    fails_for_good(job("load.files", wanted), "write times before 1678 and after 2262, which pyarrow lacks, as texts")
    (tmp_path / "f.orc").write_bytes(b"ORC" * 99)
    fails_for_good(job("load.files", wanted), "f.orc: is no ORC file, or is damaged")


def test_load_files_names_a_bad_row(job: Load, arrow: Any, written: Written) -> None:
    written(id=[1, 2, 3], v=arrow.array([None, [1.5], [float("nan")]], arrow.list_(arrow.float64())))
    wanted = {"path": "f.parquet", "table": "t", "key": ["id"], "batch_rows": 2}
    fails_for_good(job("load.files", wanted), "f.parquet, row 3: column v: ")


@pytest.mark.parametrize("is_new", [True, False])
def test_columns_of_folders_and_added_ones_are_copied_in_binary(
    job: Load, rows: Rows, written: Written, tmp_path: Path, in_text: list[int], is_new: bool
) -> None:
    days = ("2026-03-01", "__HIVE_DEFAULT_PARTITION__")
    for number, day in enumerate(days):
        folder = tmp_path / "in" / f"day={day}" / "n=7" / "of=a%20b"
        folder.mkdir(parents=True)
        written(id=[number, number + 2])
        (tmp_path / "f.parquet").rename(folder / "f.parquet")
    if not is_new:
        rows("CREATE TABLE t (id int PRIMARY KEY, day date, n text, of text, at timestamptz, path text, row text)")
    added = {"at": "now", "row": "line", "path": "file"}
    args = {"path": "in", "table": "t", "key": ["id"], "add": added}
    result = job("load.files", args, max_attempts=1)
    assert (result.status, sum(in_text)) == ("succeeded", 0), result.error
    paths = [f"in/day={day}/n=7/of=a%20b/f.parquet" for day in days]
    assert rows("SELECT id::int, day::text, n::text, of, at <= now(), path, row::text FROM t ORDER BY id") == [
        (0, days[0], "7", "a b", True, paths[0], "1"),
        (1, None, "7", "a b", True, paths[1], "1"),
        (2, days[0], "7", "a b", True, paths[0], "2"),
        (3, None, "7", "a b", True, paths[1], "2"),
    ]
    assert job("load.files", {"path": "in", "table": "days", "mode": "append", "select": ["day"]}).error is None
    assert rows("SELECT day::text, count(*) FROM days GROUP BY 1 ORDER BY 1") == [(days[0], 2), (None, 2)]


@pytest.mark.parametrize(
    ("kind", "value", "error"),
    [
        ("date", datetime(2026, 3, 1, 9), "a time of day that the type date would lose"),  # noqa: DTZ001
        ("date", "2026-03-01 09:00", "a time of day that the type date would lose"),
        ("time", datetime(2026, 3, 1), "not a time of day alone"),  # noqa: DTZ001
        ("timestamp", datetime(2026, 3, 1, tzinfo=UTC), "a time zone that the type timestamp would lose"),
        ("timetz", time(9), "not a time of day with its zone"),
    ],
)
def test_a_time_that_the_column_would_lose_a_part_of_is_refused(
    load: Load, written: Written, rows: Rows, kind: str, value: Any, error: str
) -> None:
    rows(f"CREATE TABLE t (id int PRIMARY KEY, v {kind})")
    written(id=[1], v=[value])
    fails_for_good(load(), f"f.parquet, row 1: column v: {error}")
