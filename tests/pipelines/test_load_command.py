"""`dataloader load`: one load from the command line, without a farm."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from judging import Command, Rows

from dataloader.exits import EXIT_FAILED
from dataloader.pipelines import Context, Retry, files, remote

CSV = "id;Price;Day\n1;1 234,50;2024-02-01\n2;5,00;NA\n"
HOW = ("--table", "orders", "--arg", "thousands= ", "--arg", "decimal=,", "--arg", 'null=["NA"]')


@pytest.fixture
def load(command: Command, tmp_path: Path) -> Command:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "o.csv").write_text(CSV)
    return partial(command, "load")


def test_a_plan_shows_what_a_load_would_do_and_changes_nothing(load: Command, rows: Rows) -> None:
    shown = load("in/o.csv", *HOW, "--key", "id", "--plan")
    assert shown.exit_code == 0, shown.output
    assert 'CREATE TABLE "orders" ("id" bigint, "Price" numeric, "Day" date' in shown.stdout
    assert "1234.50" in shown.stdout
    plan = json.loads(load("in/o.csv", *HOW, "--key", "id", "--plan", "--json").stdout)
    assert plan["columns"] == {"id": "bigint", "Price": "numeric", "Day": "date"}
    assert plan["rows"] == [["1", "1234.50", "2024-02-01"], ["2", "5.00", None]]
    assert plan["dialect"]["delimiter"] == ";"
    assert rows("SELECT to_regclass('orders'), to_regclass('dl_fence')") == [(None, None)]


def test_a_plan_needs_no_key(load: Command) -> None:
    shown = load("in/o.csv", *HOW, "--plan")
    assert shown.exit_code == 0, shown.output
    assert 'CREATE TABLE "orders" ("id" bigint, "Price" numeric, "Day" date);' in shown.stdout
    assert "merge needs --key" in load("in/o.csv", *HOW).stderr
    assert "scd2 needs --key" in load("in/o.csv", *HOW, "--mode", "scd2").stderr
    assert load("in/o.csv", *HOW, "--mode", "replace").exit_code == 0


def test_a_plan_passes_the_rows_that_may_be_wrong(load: Command, tmp_path: Path) -> None:
    (tmp_path / "in" / "o.csv").write_text("id,n\n1,1\n2\n3\n4,4\n5,5\n6,6\n7,7\n8,8\n")
    how = ("in/o.csv", "--table", "t", "--key", "id", "--json")
    shown = load(*how, "--plan", "--arg", "max_errors=2")
    assert [row[0] for row in json.loads(shown.stdout)["rows"]] == ["1", "4", "5", "6", "7"]
    for more in (("--plan",), ()):
        assert "line 4: 1 fields, but the header has 2" in load(*how, *more, "--arg", "max_errors=1").stderr


@pytest.mark.parametrize("more", [("--plan",), ("--key", "id")])
def test_a_source_that_is_not_there_is_refused_in_one_line(
    load: Command, tmp_path: Path, more: tuple[str, ...]
) -> None:
    done = load("o.csv", "--table", "t", *more, "--arg", "source=nope")
    assert done.exit_code == EXIT_FAILED
    assert done.stderr == "dataloader: the variable DL_SOURCE_NOPE is not set in the environment of this worker\n"
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_plan_keeps_no_copy(load: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(path: str, source: str, context: Context) -> Iterator[str]:
        context.data_dir.mkdir(parents=True)
        (context.data_dir / "o.csv").write_text(CSV)
        return path
        yield

    monkeypatch.setattr(remote, "fetched", fetched)
    assert "1234.50" in load("o.csv", *HOW, "--plan", "--arg", "source=lake").stdout
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    "error",
    [RuntimeError("a program wrote to o.csv during the load"), Retry(7, "127.0.0.1 answered 429")],
)
def test_a_load_that_may_be_tried_again_is_refused_in_one_line(
    load: Command, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(files.Shaped, "require_unchanged", Mock(side_effect=error))
    done = load("in/o.csv", *HOW, "--key", "id")
    assert (done.exit_code, done.stderr) == (EXIT_FAILED, f"dataloader: {error}\n")


@pytest.mark.parametrize("path", ["in/o.csv", "in/*.csv", "{}/in/o.csv", "../{}/in/o.csv"])
def test_a_load_writes_the_table_and_says_what_it_has_done(
    load: Command, rows: Rows, tmp_path: Path, path: str
) -> None:
    path = path.format(tmp_path if path[0] == "{" else tmp_path.name)
    done = load(path, *HOW, "--key", "id", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["processed"] == 2
    assert [(n, str(price)) for n, price in rows('SELECT id, "Price" FROM orders ORDER BY id')] == [
        (1, "1234.50"),
        (2, "5.00"),
    ]
    again = load(path, *HOW, "--key", "id")
    assert "processed" in again.stdout
    assert rows("SELECT count(*) FROM orders") == [(2,)]


def test_a_file_of_another_folder_is_loaded(
    load: Command, rows: Rows, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other") / "o.csv"
    other.write_text(CSV)
    assert load(str(other), *HOW, "--key", "id").exit_code == 0
    assert rows("SELECT count(*) FROM orders") == [(2,)]


def test_what_does_not_fit_is_refused_in_one_line(load: Command, rows: Rows) -> None:
    missing = load("in/none.csv", *HOW, "--key", "id")
    assert missing.exit_code == EXIT_FAILED
    assert missing.stderr.startswith("dataloader: path: ")
    assert missing.stderr.count("\n") == 1
    assert "add --force" in load("in/o.csv", *HOW, "--mode", "append").stderr
    assert "should be NAME=VALUE" in load("in/o.csv", *HOW, "--arg", "decimal").stderr
    assert "speed: there is no such argument" in load("in/o.csv", *HOW, "--key", "id", "--arg", "speed=9").stderr
    assert rows("SELECT to_regclass('orders')") == [(None,)]
