"""Rows of Arrow by binary COPY: the same values as by their text, or the same refusal."""

import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pyarrow as pa
import pytest
from judging import TYPES, Load, Rows, ends_its_threads
from pyarrow import parquet as pq

from dataloader.pipelines import Context, PermanentError, binary_copy, csv_table, files, parquet

KINDS = [
    *("boolean", "smallint", "integer", "bigint", "real", "double precision"),
    *("numeric", "numeric(12,2)", "numeric(5,0)"),
    *("date", "timestamp", "timestamp(3)", "timestamptz", "timestamptz(0)", "time", "text", "varchar(3)", "char(3)"),
    *("uuid", "bytea", "jsonb", "interval", "small"),
]
SAME = "SELECT ROW((SELECT array_agg(v) FROM a))::record *= ROW((SELECT array_agg(v) FROM b))::record"  # byte by byte
_DAY = 86_400_000_000
DAYS = [0, -1, -719_162, -719_163, -2_000_000, 2_932_896, 2_932_897, 10_957, 2**31 - 1, -(2**31), None]
NUMBERS = [0, 1, -1, 127, -128, 32_767, 2**31 - 1, 2**53 + 1, 2**63 - 1, -(2**63), None]
FLOATS = [
    *(0.0, -0.0, 0.1, 1.5, -1.0, 1e15, 1e16, 1e300, 5e-324, 1.4e-45),
    *(float("nan"), -float("nan"), float("inf"), float("-inf"), None),
]
TEXTS = ["", "a", "Ёж", "a\0b", 'q"\n\r\n', "\\.", "\\N", "NULL", "abc ", "abcd", "1", "1.50", "{}", "2026-01-02", None]
SCALES = [(5, 0), (5, 2), (12, 2), (18, 16), (18, 18), (38, 2), (38, 10), (2, 5), (9, 4), (5, -2)]


def numbered(kind: Any, values: list[Any]) -> Any:
    """An array of a type that is stored as a number."""
    width = pa.int32() if kind.bit_width == 32 else pa.int64()
    bounds = 2 ** (kind.bit_width - 1)
    return pa.array([v if v is None or -bounds <= v < bounds else 0 for v in values], width).view(kind)


def decimals(digits: int, scale: int) -> Any:
    whole = [0, 1, -1, 10**digits - 1, -(10**digits) + 1, 10 ** (digits - 1), 12_345 % 10**digits, None]
    data = b"".join((n or 0).to_bytes(16, "little", signed=True) for n in whole)
    valid = pa.array([n is not None for n in whole]).buffers()[1]
    return pa.Array.from_buffers(pa.decimal128(digits, scale), len(whole), [valid, pa.py_buffer(data)])


def odd() -> dict[str, Any]:
    """Arrays of all types, with their extremes, nulls and oddities."""
    arrays = [pa.array([True, False, None]), pa.array([None, None]), *(decimals(*size) for size in SCALES)]
    for bits in (8, 16, 32, 64):
        arrays.append(pa.array([n for n in NUMBERS if n is None or abs(n + 0.5) < 2 ** (bits - 1)], f"int{bits}"))
        arrays.append(pa.array([0, 1, 2**bits - 1, 2 ** (bits - 1), None], f"uint{bits}"))
    arrays += [pa.array(FLOATS, kind) for kind in (pa.float16(), pa.float32(), pa.float64())]
    arrays += [numbered(pa.date32(), DAYS), numbered(pa.time32("ms"), [0, 1, 86_399_999, 86_400_000, -1, None])]
    arrays += [numbered(pa.time64(unit), [0, 1_999, _DAY - 1, _DAY, -1, None]) for unit in ("us", "ns")]
    for unit, second in {"s": 1, "ms": 1_000, "us": 10**6, "ns": 10**9}.items():
        days = [day * 86_400 * second + more for day in DAYS[:-3] for more in (0, -1)]
        instants = [1, 999_999, 946_684_800 * second, 2**63 - 1, -(2**63), *days, None]
        arrays += [numbered(pa.timestamp(unit, zone), instants) for zone in (None, "UTC", "Europe/Moscow", "+03:00")]
    arrays += [pa.array(TEXTS, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())]
    arrays += [pa.array(TEXTS).dictionary_encode(), arrays[-3].dictionary_encode()]
    arrays += [pa.array([b"", b"\0\xff", b"abc", None], kind) for kind in (pa.binary(), pa.large_binary())]
    arrays += [pa.array([b"abc", None], pa.binary(3)), pa.array([UUID(int=7).bytes, None], pa.uuid())]
    arrays += [pa.array(['{"a": 1.50}', "no json", None], pa.json_()), pa.array([[1, None], None, []])]
    arrays += [pa.array([{"a": "ё\0"}, None]), pa.array([1, None], pa.duration("s")), numbered(pa.date64(), DAYS)]
    return {str(array.type): array for array in arrays}


ODD = odd()


@pytest.fixture
def conn(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(dsn, client_encoding="utf8", options="-c timezone=Asia/Tokyo") as conn:
        conn.execute("CREATE DOMAIN small AS int CHECK (VALUE < 100)")
        yield conn
        conn.rollback()


def is_taken(conn: psycopg.Connection[Any], parts: list[Any], how: str) -> bool:
    """Whether PostgreSQL takes the rows."""
    try:
        with conn.transaction(), conn.cursor().copy(f"COPY {how}".encode()) as copy:
            for part in parts:
                copy.write(part)
    except psycopg.Error:
        return False
    return True


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_each_value_that_goes_in_binary_form_is_that_of_its_text(conn: psycopg.Connection[Any], kind: str) -> None:
    conn.execute(f"CREATE TABLE a (v {kind}); CREATE TABLE b (v {kind})".encode())
    [(_, stored)] = conn.execute(TYPES.replace("'t'", "'a'").encode())

    def goes(part: Any) -> bool:
        parts = binary_copy.encoded(part, [stored])
        if not parts or not is_taken(conn, parts, "a FROM STDIN (FORMAT binary)"):
            return False  # the text decides
        text = "\n".join(["", *parquet.csv_records(part), ""]).encode()
        assert is_taken(conn, [text], "b FROM STDIN (FORMAT csv, HEADER, ENCODING 'UTF8')"), part
        same = conn.execute(SAME).fetchone()
        assert same == (True,), (part, conn.execute("TABLE a UNION ALL TABLE b").fetchall())
        conn.execute("TRUNCATE a, b")
        return True

    in_binary = set()
    for name, values in ODD.items():
        batch = pa.record_batch([values], ["v"])
        singles = [] if goes(batch) else [batch.slice(at, 1) for at in range(len(values))]
        if any([not singles, *map(goes, [batch.slice(1, 2), batch.slice(0, 0), *singles])]):
            in_binary.add(name)
    assert in_binary > {"null"} or kind in ("interval", "small")


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """The outcome of a load by binary COPY, which has to be that by text."""

    def both(outcome: Callable[[], Any]) -> Any:
        in_binary = outcome()
        with monkeypatch.context() as patch:
            patch.setattr(binary_copy, "encoded", lambda batch, kinds: None)
            assert outcome() == in_binary
        return in_binary

    return both


@pytest.fixture
def loaded(context: Context, job: Load, rows: Rows, tmp_path: Path) -> Callable[..., Any]:
    """Load a table of Arrow into `t`; the error or the counts, and what is in the table and in that of its rejects."""

    def loaded(table: Any, way: str, ddl: str = "", row_group_size: int = 70, **how: Any) -> Any:
        rows(f"DROP TABLE IF EXISTS t, t_rejects; {ddl}")
        wanted = {"table": "t", "key": ["id"]} | how
        try:
            if way == "frame":
                result = context.load(rows=table, **wanted, finish=lambda conn: None)
            else:
                pq.write_table(table, tmp_path / "f.parquet", row_group_size=row_group_size)
                ended = job(way, wanted | {"path": "f.parquet"})
                if ended.status != "succeeded":
                    return ended.error, [], []
                result = ended.result
        except (PermanentError, pa.ArrowException) as e:
            return str(e), [], []
        counts = {name: count for name, count in result.items() if name not in ("seconds", "bytes")}
        tables = ["t", "t_rejects"] if rows("SELECT to_regclass('t_rejects')") != [(None,)] else ["t"]
        columns = {"t": "t", "t_rejects": "(line, row, reason)"}
        return counts, *(
            [text for (text,) in rows(f"SELECT {columns[at]}::text FROM {at} ORDER BY 1")] for at in tables
        )

    return loaded


def random_load(chance: random.Random, way: str) -> tuple[Any, str, dict[str, Any]]:
    """Rows with a random schema, the statement that makes their table or none, and the arguments of the load."""
    count, oddity = chance.choice([0, 1, 50, 300]), chance.choice([0, 0.01, 0.3])
    ids = list(range(count))
    ids[-1:] = [0] if count and chance.random() < 0.2 else ids[-1:]  # twice
    columns, kinds = {"id": pa.array(ids, pa.int64())}, ["id bigint PRIMARY KEY"]
    for at, name in enumerate(chance.sample([name for name in ODD if name != "string_view"], chance.randrange(1, 7))):
        values = ODD[name].take(
            pa.array([chance.randrange(len(ODD[name])) * (chance.random() < oddity) for _ in ids], pa.int64())
        )
        if way != "frame" and re.search(r"dictionary|duration|null|timestamp.s|32.5, -2|128.2, 5|128.5, -2", name):
            continue
        columns[f"v{at}"] = values
        kind = chance.choice(KINDS[:-1]) if chance.random() < oddity else parquet._type(values.type)
        kinds.append(f"v{at} {kind}" + " NOT NULL" * (chance.random() < 0.1))
    how: dict[str, Any] = {
        "mode": chance.choice(["merge", "append", "replace"]),
        "max_errors": chance.choice([0, 9, 999]),
    }
    how |= {"batch_rows": chance.choice([7, 100, 20_000])}
    ddl = f"CREATE TABLE t ({', '.join(kinds)})" if chance.random() < 0.7 else ""
    return pa.table(columns), ddl, how


@pytest.mark.long
@pytest.mark.parametrize("way", ["frame", "load.files"])
@pytest.mark.parametrize("seed", range(6))
def test_random_loads_end_as_they_do_by_text(
    seed: int, way: str, loaded: Any, both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(parquet, "_BATCH_BYTES", chance.choice([500, 2**22]))
    for _ in range(3):
        table, ddl, how = random_load(chance, way)
        size = chance.choice([13, 70, 1_000])
        both(lambda: loaded(table, way, ddl, size, **how))  # noqa: B023


PLAIN = {
    "id": pa.array(range(300), pa.int64()),
    "name": pa.array([["Ёж", None, 'a"\n', ""][n % 4] for n in range(300)]),
    "price": pa.array(range(300), pa.int32()).cast(pa.decimal128(12, 2)),
    "at": pa.array(range(300), pa.timestamp("ms", "UTC")),
    "tags": pa.array([[n] for n in range(300)]),
}


@pytest.mark.parametrize("part_bytes", [1, 2**23])
@pytest.mark.parametrize(
    "ddl", ["", "CREATE TABLE t (id int PRIMARY KEY, price numeric, name text, at timestamptz, tags json)"]
)
@pytest.mark.parametrize("way", ["frame", "load.files"])
def test_plain_rows_need_no_text(
    way: str, ddl: str, part_bytes: int, loaded: Any, monkeypatch: pytest.MonkeyPatch, rows: Rows
) -> None:
    monkeypatch.setattr(csv_table, "PART_BYTES", part_bytes)
    monkeypatch.setattr(parquet, "csv_records", None)
    how = {"columns": {"at": "seen"}, "select": ["name", "id", "price", "seen", "tags"]} if way == "load.files" else {}
    counts, *_ = loaded(pa.table(PLAIN), way, ddl.replace(" at ", " seen " if how else " at "), batch_rows=50, **how)
    assert counts["inserted"] == 300, counts
    assert rows("SELECT name, price::text, tags::text FROM t WHERE id = 6") == [('a"\n', "6.00", "[6]")]


def test_files_of_other_formats_and_columns_may_lie_beside(
    job: Load, rows: Rows, tmp_path: Path, both: Callable[[Callable[[], Any]], Any]
) -> None:
    """The last row of a key counts, and each wrong row is known by its file and its number there."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.csv").write_text("id,v\n1,1\nx,2\n")
    pq.write_table(pa.table({"id": [1, 2, 3], "v": ["2", "\0", "2"]}), tmp_path / "in/b.parquet")
    pq.write_table(pa.table({"id": [3]}), tmp_path / "in/c.parquet")
    (tmp_path / "in/d.csv").write_text("id,v\n4,4\n4,5\ny,5\n")
    pq.write_table(pa.table({"id": [4, 2**40], "v": ["6", "7"]}), tmp_path / "in/e.parquet")

    def outcome() -> Any:
        rows("DROP TABLE IF EXISTS t, t_rejects; CREATE TABLE t (id int PRIMARY KEY, v text)")
        how = {"path": "in", "table": "t", "key": ["id"], "max_errors": 9, "schema_change": "add"}
        assert job("load.files", how | {"types": {"id": "int"}}).error is None
        return rows("SELECT * FROM t ORDER BY id"), rows("SELECT file, line FROM t_rejects ORDER BY 1, 2")

    wrong = [("in/a.csv", 3), ("in/b.parquet", 2), ("in/d.csv", 4), ("in/e.parquet", 2)]
    assert both(outcome) == ([(1, "2"), (3, None), (4, "6")], wrong)


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        ("name varchar(4)", "column name: value too long for type character varying(4)"),
        ("name text NOT NULL", 'null value in column "name" of relation "t" violates not-null constraint'),
        ("name text CHECK (name <> 'secret')", 'new row for relation "t" violates check constraint "t_name_check"'),
        ("name text, price numeric(1,0)", "column price: numeric field overflow"),
    ],
)
@pytest.mark.parametrize("way", ["frame", "load.files"])
def test_a_row_that_the_table_refuses_is_named(way: str, rule: str, error: str, loaded: Any, both: Any) -> None:
    names = ["a\nb"] * 300
    names[256:257] = [None] if "NULL" in rule else ["secret"]
    columns = {"id": PLAIN["id"], "name": pa.array(names)}
    if "price" in rule:
        columns["price"] = pa.array([0] * 256 + [99] + [0] * 43).cast(pa.decimal128(20, 0))
    ddl = f"CREATE TABLE t (id bigint PRIMARY KEY, {rule})"
    result = both(lambda: loaded(pa.table(columns), way, ddl, batch_rows=100))
    origin = "context.load" if way == "frame" else "f.parquet"
    assert result[0].partition(";")[0] == f"{origin}, row 257: {error}"
    counts, table, rejects = both(lambda: loaded(pa.table(columns), way, ddl, batch_rows=100, max_errors=1))
    assert (counts["rejected"], len(table), rejects[0].startswith("(257,")) == (1, 299, True)


def test_an_end_ends_the_thread_that_reads_ahead(context: Context, tmp_path: Path, rows: Rows) -> None:
    """A log may keep the exception, and so all variables of the load."""
    pq.write_table(pa.table({"id": range(300), "v": ["x"] * 300}), tmp_path / "f.parquet")
    args = {"path": "f.parquet", "table": "t", "key": ["id"], "batch_rows": 10}
    ends_its_threads(files.load_files(args, context), 1)
    others = {*threading.enumerate()}
    rows("CREATE TABLE t (id bigint PRIMARY KEY, v text CHECK (v <> 'x'))")
    with pytest.raises(PermanentError, match="row 1: new row") as kept:
        [*files.load_files(args, context)]
    assert kept.value.__traceback__
    assert not {*threading.enumerate()} - others


def test_texts_survive_a_session_of_another_encoding(loaded: Any, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "latin1")
    assert loaded(pa.table({"id": [1], "name": ["é"]}), "load.files")[1] == ["(1,é)"]


def test_few_batches_become_one_copy_whatever_their_sizes() -> None:
    texts = pa.array(["x" * 10_000, "y"] * 1_500).dictionary_encode()
    batches = [pa.record_batch([pa.array([n])], ["v"]) for n in range(5_000)]
    assert [each.num_rows for each in binary_copy.gathered(iter(batches), 2_000, 500, 2**20)] == [2_000, 2_000, 1_000]
    for batch in binary_copy.gathered([pa.record_batch([texts], ["v"])], 2_000, 500, 2**20):
        assert batch.column(0).type == pa.string()
        assert 2**19 < batch.nbytes <= 2**20 + 10_000 or batch.num_rows < 500
