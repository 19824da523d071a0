"""The promises that all loaders share, for each kind of source: the same rows, at once or in parts."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from judging import LEFT, ROWS, TEXTS, Load, Rows

from dataloader.pipelines import csv_file, csv_table, json_file

EXPECTED = [(n, TEXTS[n % 5]) for n in range(1, ROWS + 1)]


def csv_of(rows: list[tuple[int, str | None]], end: str = "\n") -> str:
    fields = {name: "" if name is None else '"{}"'.format(name.replace('"', '""')) for name in TEXTS}
    return f"id,name{end}" + "".join(f"{n},{fields[name]}{end}" for n, name in rows)


def from_csv(folder: Path, rows: Rows, encoding: str = "utf-8") -> dict[str, Any]:
    (folder / "f").write_bytes(csv_of(EXPECTED, "\r\n").encode(encoding))
    return {"path": "f", "encoding": encoding}


def from_folder(folder: Path, rows: Rows) -> dict[str, Any]:
    (folder / "in").mkdir()
    for at in range(3):
        text = csv_of(EXPECTED[at * 1_000 : at * 1_000 + 1_000]) + "SUM,3\n"
        (folder / "in" / f"{at}.csv.gz").write_bytes(gzip.compress(text.encode()))
    return {"path": "in", "skip_footer": 1}


def from_json(folder: Path, rows: Rows) -> dict[str, Any]:
    objects = [json.dumps({"id": n, "name": name}, ensure_ascii=False) for n, name in EXPECTED]
    (folder / "f.json.gz").write_bytes(gzip.compress(f"[{','.join(objects)}]".encode()))
    return {"path": "f.json.gz"}


def from_parquet(folder: Path, rows: Rows) -> dict[str, Any]:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = arrow.table({"id": [n for n, _ in EXPECTED], "name": [name for _, name in EXPECTED]})
    parquet.write_table(table, folder / "f", row_group_size=700)
    return {"path": "f"}


def from_postgres(folder: Path, rows: Rows) -> dict[str, Any]:
    rows("CREATE TABLE orders (id int PRIMARY KEY, name text)")
    rows(f"INSERT INTO orders SELECT n, (ARRAY[NULL, '', E'Ёж,\"\\n\\r\\n', E'\\\\.', E'\\\\N'])[n % 5 + 1]"
         f" FROM generate_series(1, {ROWS}) n ORDER BY n")  # fmt: skip
    return {"source": "crm", "query": "SELECT * FROM orders"}


SOURCES: dict[str, Callable[[Path, Rows], dict[str, Any]]] = {
    **{f"csv {name}": partial(from_csv, encoding=name) for name in ("utf-8-sig", "cp1251", "utf-16", "shift_jis")},
    **{"csv": from_csv, "files folder": from_folder, "files json": from_json},
    **{"parquet": from_parquet, "postgres": from_postgres},
}


@pytest.fixture(params=SOURCES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[True, False], ids=["in parts", "at once"])
def in_parts(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def load(
    kind: str, in_parts: bool, job: Load, rows: Rows, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Load:
    """Load the source's 3,000 rows into the table `t` by `id`."""
    monkeypatch.setenv("DL_SOURCE_CRM", dsn)
    monkeypatch.setattr(csv_table, "PART_BYTES", 1 if in_parts else 2**23)
    for module, size in ((csv_file, "_CHUNK"), (json_file, "_CHUNK_BYTES")):
        monkeypatch.setattr(module, size, 2**10)
    args = SOURCES[kind](tmp_path, rows) | {"table": "t", "key": ["id"], "batch_rows": 100}
    return partial(job, f"load.{kind.partition(' ')[0]}", args | ({"resume": in_parts} if kind == "postgres" else {}))


def loaded(rows: Rows) -> tuple[list[Any], int]:
    return rows("SELECT id::int, name FROM t ORDER BY 1"), rows(LEFT)[0][0]


def test_the_rows_arrive_and_a_second_load_changes_none(load: Load, rows: Rows) -> None:
    result = load()
    assert (result.status, result.result["processed"], result.result["inserted"]) == ("succeeded", ROWS, ROWS)
    assert loaded(rows) == (EXPECTED, 0)
    done = [progress["processed"] for progress in result.progress]
    assert done == sorted(done)
    assert all(progress["processed"] <= progress.get("total", ROWS) for progress in result.progress)
    versions = rows("SELECT id, xmin, ctid FROM t ORDER BY id")
    assert load().status == "succeeded"
    assert rows("SELECT id, xmin, ctid FROM t ORDER BY id") == versions


@pytest.mark.parametrize("in_parts", [True], indirect=True)
@pytest.mark.parametrize("how", ["crash_at", "drain_at"])
def test_the_next_run_goes_on_behind_the_last_part(load: Load, kind: str, rows: Rows, how: str) -> None:
    result = load(**{how: 31})
    assert (result.status, result.attempts) == ("succeeded", 1)
    first, second = result.runs
    assert first.checkpoint is not None
    mark, _, number, *_ = first.checkpoint["place"]
    assert number > 500
    assert kind != "postgres" or mark == [str(number)]
    assert number < second.progress[0]["processed"] <= number + 100
    assert loaded(rows) == (EXPECTED, 0)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["csv", "parquet", "postgres"], indirect=True)
@pytest.mark.parametrize("typed", [True, False])
def test_killed_anywhere_the_rows_are_the_sources(load: Load, rows: Rows, in_parts: bool, typed: bool) -> None:
    def into_an_empty_table(**how: Any) -> Any:
        rows("DROP TABLE IF EXISTS t")
        if typed:
            rows("CREATE TABLE t (name text CHECK (name <> 'x'), id int PRIMARY KEY, line int, more text)")
        return load(**how)

    points = into_an_empty_table().steps
    for point in [1, 2, *range(3, points - 2, 13), *range(points - 2, points + 1), "end"]:
        result = into_an_empty_table(crash_at=point, max_attempts=3)
        assert (result.status, loaded(rows)) == ("succeeded", (EXPECTED, 0)), point
        if in_parts:  # a run behind the merge writes nothing
            assert (result.result["inserted"], result.result["unchanged"]) == (ROWS, 0), point


MEASURE = """
import json, resource, sys
from dataloader.testing import run

task, dsn, small, large = sys.argv[1:]
load = lambda args: run(task, json.loads(args) | {"table": "t", "key": ["id"]}, dsn=dsn, max_attempts=1).status
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
assert load(small) == "succeeded"
before = peak()
print(json.dumps([load(large), peak() - before]))
"""
LARGE, LONG = 200_000, 1_024  # rows, and characters of each


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "in_parts", "most_mb"),
    [("csv", True, 30), ("parquet", True, 60), ("postgres", True, 30), ("postgres", False, 30)],
    indirect=["kind", "in_parts"],
)
def test_200_mb_take_bounded_memory(
    load: Load, kind: str, in_parts: bool, most_mb: int, dsn: str, rows: Rows, tmp_path: Path
) -> None:
    small, large = ({"path": name} for name in ("f", "large"))
    if kind == "csv":
        with (tmp_path / "large").open("w") as file:
            file.writelines(["id,name\n", *(f'{n},"{os.urandom(LONG // 2).hex()}"\n' for n in range(LARGE))])
    elif kind == "parquet":
        subprocess.run([sys.executable, "-c", WRITE], cwd=tmp_path, check=True)
    else:
        query = f"SELECT n AS id, repeat(md5(n::text), {LONG // 32}) AS name FROM generate_series(1, {LARGE}) n"
        small = {"source": "crm", "query": "SELECT * FROM orders", "resume": in_parts}
        large = small | {"query": query}
        rows("TRUNCATE orders; INSERT INTO orders VALUES (1, 'x')")
    command = [sys.executable, "-c", MEASURE, f"load.{kind}", dsn, json.dumps(small), json.dumps(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    status, grown_mb = json.loads(done.stdout.splitlines()[-1])
    assert status == "succeeded"
    assert rows("SELECT count(*) >= 200000 FROM t") == [(True,)]
    assert grown_mb < most_mb


WRITE = """
import os, pyarrow
from pyarrow import parquet

schema = pyarrow.schema({"id": pyarrow.int64(), "name": pyarrow.string()})
with parquet.ParquetWriter("large", schema, compression="none", use_dictionary=False) as writer:
    for group in range(2):
        ids = range(group * 100_000, (group + 1) * 100_000)
        rows = pyarrow.table({"id": ids, "name": [os.urandom(512).hex() for _ in ids]}, schema)
        writer.write_table(rows, row_group_size=100_000)
"""
