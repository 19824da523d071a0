"""`load.csv` of a large file: in parts, of which a later run reads none again, and still all or nothing."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from judging import LEFT, ROWS, Load, Rows

from dataloader.pipelines import csv_file, csv_table

Between = Callable[[Callable[[], Any]], None]
LOAD = {"path": "f.csv", "table": "t", "key": ["id"], "batch_rows": 100}


@pytest.fixture
def load(job: Load, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load `f.csv` into the table `t` by `id`, in parts of a few thousand bytes."""
    monkeypatch.setattr(csv_table, "PART_BYTES", 1)
    monkeypatch.setattr(csv_file, "_CHUNK", 2**10)
    return lambda args=LOAD, **how: job("load.csv", args, **how)


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Have something happen before the first run of this process, which is the one after those that are killed."""
    here, opened, left = os.getpid(), csv_table.opened, iter([True])

    def prepare(happens: Callable[[], Any]) -> None:
        def open_file(*args: Any) -> int:
            if os.getpid() == here and next(left, False):
                happens()
            return opened(*args)

        monkeypatch.setattr(csv_table, "opened", open_file)

    return prepare


def written(folder: Path, text: str = "") -> None:
    """A file with quoted line ends, blank lines and letters of several bytes."""
    records = "".join(f'{n},"Ёж\r\nи ""уж"" {n}"\r\n' + "\r\n" * (n % 7 == 0) for n in range(ROWS))
    (folder / "f.csv").write_bytes(("id,name\r\n" + records + text).encode())


def loaded(rows: Rows) -> list[Any]:
    return rows("SELECT id::int, name FROM t ORDER BY 1")


EXPECTED = [(n, f'Ёж\r\nи "уж" {n}') for n in range(ROWS)]


@pytest.mark.parametrize("point", [33, "end"])
def test_literal_quotes_are_counted_over_all_runs(load: Load, rows: Rows, tmp_path: Path, point: int | str) -> None:
    records = "".join(f'{n},{n}" pipe\n' for n in range(ROWS))
    (tmp_path / "f.csv").write_text(f"id,name\n{records}")
    result = load(crash_at=point)
    assert (result.result["processed"], result.result["literal_quotes"]) == (ROWS, ROWS)
    assert loaded(rows) == [(n, f'{n}" pipe') for n in range(ROWS)]


@pytest.mark.parametrize("change", ["content", "time"])
def test_a_file_that_has_changed_is_loaded_from_its_beginning(
    load: Load, rows: Rows, tmp_path: Path, between: Between, change: str
) -> None:
    written(tmp_path)
    more = [(9000, "new")] if change == "content" else []
    between(lambda: written(tmp_path, "9000,new\r\n") if more else os.utime(tmp_path / "f.csv", (1, 1)))
    result = load(crash_at=41)
    assert result.progress[0]["processed"] <= 100
    assert (loaded(rows), rows(LEFT)) == ([*EXPECTED, *more], [(0,)])


@pytest.mark.parametrize("is_new", [True, False])
def test_a_file_that_is_small_now_is_loaded_at_once(
    load: Load, rows: Rows, tmp_path: Path, between: Between, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    def shrink() -> None:
        assert rows(LEFT) == [(1,)]
        monkeypatch.setattr(csv_table, "PART_BYTES", 2**23)
        (tmp_path / "f.csv").write_text("id,name\n1,a\n")

    if not is_new:
        rows("CREATE TABLE t (id int PRIMARY KEY, name text)")
    written(tmp_path)
    between(shrink)
    assert load(crash_at=41).status == "succeeded"
    assert (loaded(rows), rows(LEFT)) == ([(1, "a")], [(0,)])


@pytest.mark.parametrize("statement", ["TRUNCATE {}", "DROP TABLE {}"])
def test_staged_rows_that_a_crash_of_the_server_took_are_read_again(
    load: Load, rows: Rows, tmp_path: Path, between: Between, statement: str
) -> None:
    def crash() -> None:
        ((staging, kind),) = rows("SELECT relname, relpersistence::text FROM pg_class WHERE relname ~ '^dl_load_csv'")
        assert kind == "u"
        rows(statement.format(staging))

    rows("CREATE TABLE t (id int PRIMARY KEY, name text)")  # the staging table of a new target is logged
    written(tmp_path)
    between(crash)
    result = load(crash_at=41)
    assert (result.status, result.progress[0]["processed"] <= 100) == ("succeeded", True)
    assert (loaded(rows), rows(LEFT)) == (EXPECTED, [(0,)])


@pytest.mark.parametrize("at", [0, 3, "merge"])
def test_a_server_that_crashes_between_two_parts_costs_no_row(
    load: Load, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int | str
) -> None:
    """It empties what is staged. The run has no session then that would be lost."""
    written(tmp_path)
    is_staged, merge_next = csv_table.Table.is_staged, itertools.chain([ROWS], itertools.repeat(0))
    asked = itertools.count()

    def after_a_crash(self: csv_table.Table) -> bool:
        staged = self._value("SELECT count(*) FROM {staging}")
        if next(asked) == at or (at == "merge" and staged == ROWS and next(merge_next)):
            self._do("TRUNCATE {staging}")
        return is_staged(self)

    monkeypatch.setattr(csv_table.Table, "is_staged", after_a_crash)
    result = load()
    assert "the server has crashed, and lost what was staged" in (result.runs[0].error or "")
    assert (result.status, loaded(rows)) == ("succeeded", EXPECTED)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x,\r\n", f"f.csv, line {2 * ROWS + 431}: column id: invalid input syntax"),
        ('5,"', f"f.csv, line {2 * ROWS + 431}: unterminated quote"),
        ("9000,\x00\r\n", "0x00"),
    ],
)
def test_a_bad_record_far_in_leaves_nothing(load: Load, rows: Rows, tmp_path: Path, text: str, reason: str) -> None:
    rows("CREATE TABLE t (id int PRIMARY KEY, name text); INSERT INTO t VALUES (1, 'before')")
    written(tmp_path, text)
    result = load(crash_at=41)
    assert result.status == "failed"
    assert reason in (result.error or "")
    assert (loaded(rows), rows(LEFT)) == ([(1, "before")], [(0,)])


def test_what_ended_jobs_have_staged_goes_after_a_week(load: Load, rows: Rows, tmp_path: Path) -> None:
    written(tmp_path)
    old, young = (load(crash_at=41, cancel_at=1).job_id for _ in range(2))
    rows(f"UPDATE dl_fence SET raised_at = now() - interval '8 days' WHERE job_id = '{old}'")
    assert rows(LEFT) == [(2,)]
    assert load().status == "succeeded"
    assert rows(f"{LEFT} AND relname = '{csv_table.staging_of(young)}'") == [(1,)]
    assert rows(LEFT) == [(1,)]
