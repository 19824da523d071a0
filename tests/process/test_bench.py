"""`dataloader bench` for real, tiny: what it measures, what it says, what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from farming import until

from dataloader.bench import pgbench
from dataloader.bench.program import FIGURES, INTERRUPTED
from dataloader.cli import main
from dataloader.config import Settings

pytestmark = pytest.mark.long

FEW = ("drain", "latency", "cpu", "enqueue", "memory")


def environment(folder: Path, **given: str) -> dict[str, str]:
    """This process's without anybody's settings, and so with an embedded PostgreSQL unless a DSN is given."""
    ours = {name.upper() for name in Settings.model_fields} - {"DL_PG_BIN"}
    return {k: v for k, v in os.environ.items() if k not in ours} | {"DL_HOME": str(folder)} | given


def bench(folder: Path, *arguments: str, command: str = "bench", **given: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    words = [sys.executable, "-m", "dataloader", command, *arguments]
    return subprocess.run(
        words, env=environment(folder, **given), cwd=folder, capture_output=True, text=True, check=False
    )


def left_behind(dsn: str, folder: Path) -> list[Any]:
    """Schemas, sessions and files that a bench has not removed; a session ends a little after its program."""
    with psycopg.connect(dsn) as conn:
        schemas = conn.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'dl\\_bench%'").fetchall()
        sessions = conn.execute(
            "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'dl-%'"
        ).fetchall()
    return [*schemas, *sessions, *folder.glob("bench-*")]


@pytest.mark.longest
def test_it_measures_in_a_schema_of_its_own(own_db: str, tmp_path: Path) -> None:
    with psycopg.connect(own_db) as conn:
        conn.execute(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key) VALUES (gen_random_uuid(), 'bench', 't', 'k')"
        )
    done = bench(tmp_path, *FEW, "--rounds=1", "--scale=0.01", "--json=-", "--dsn", own_db)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    measured = {(line["figure"], line["name"]): line for line in result["lines"]}
    assert {figure for figure, _ in measured} == set(FEW)
    assert result["machine"]["postgresql"]["fsync"] in ("on", "off")
    assert len(measured["drain", "one by one, 2 workers"]["ours"]) == 1
    assert measured["drain", "one by one, 2 workers"]["ours_median"] > 0
    assert measured["drain", "a fresh farm, 2 workers"]["ratio"] > 0
    assert (measured["drain", "prefetch 200, 2 workers"]["bare_median"] is None) == (pgbench.find(None) is None)
    assert 0 < measured["latency", "commit to start, p50"]["ours_median"] < 1_000
    assert measured["cpu", "jobs of 20 ms, 2 workers"]["ratio"] > 0  # at so few jobs it is noise
    assert measured["enqueue", "single, Python"]["ratio"] > 0
    assert measured["memory", "each further idle worker, new"]["ours_median"] > 0
    assert "one by one, 2 workers" in done.stderr  # the table, since stdout has the JSON
    with psycopg.connect(own_db) as conn:
        assert conn.execute("SELECT status FROM dl_jobs").fetchall() == [("queued",)]
    until(lambda: left_behind(own_db, tmp_path) == [], "nothing to be left")


def test_the_other_figures_measure_too(own_db: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    figures = ("keys", "claim", "fair", "idle")
    done = bench(tmp_path, *figures, "--rounds=1", "--scale=0.01", f"--json={out}", DL_DB_DSN=own_db)
    assert done.returncode == 0, done.stderr
    lines = {line["name"]: line for line in json.loads(out.read_text())["lines"]}
    assert lines["64 keys, 2 workers"]["ratio"] > 0
    assert lines["100,000 of one busy key (here 1,000)"]["facts"]["pages"] > 0
    assert lines["1,000,000 finished (here 10,000)"]["ratio"] > 0
    assert lines["5,000 of keys busy elsewhere (here 50)"]["ratio"] > 0
    assert lines["2,000 locked at the head (here 20)"]["ratio"] > 0
    assert lines["just after 200 hand-backs"]["ratio"] > 0
    assert lines["few rows, not analysed"]["ratio"] > 0
    assert lines["100 jobs of one tenant behind the backlog of another"]["ratio"] > 0
    assert lines["statements per worker"]["ours_median"] >= 0
    assert "64 keys, 2 workers" in done.stdout
    until(lambda: left_behind(own_db, tmp_path) == [], "nothing to be left")


def test_capacity_measures_costs_and_forecasts_from_them_again(own_db: str, tmp_path: Path) -> None:
    out = tmp_path / "forecast.json"
    done = bench(
        tmp_path, "--scale=0.05", f"--json={out}", "--jobs-per-day=50000", command="capacity", DL_DB_DSN=own_db
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(out.read_text())
    costs = told["costs"]
    assert all(value > 0 for name, value in costs.items() if name not in ("ways", "session_bytes"))
    assert set(costs["ways"]["one by one"]["jobs_a_sec"]) == {"1", "3", "9"}
    single, batches = (costs["ways"][way]["server_sec"] for way in ("one by one", "in batches"))
    assert all(single[workers] > batches[workers] for workers in ("1", "3", "9"))
    assert costs["journal_rows"] >= 3
    assert [day["load"]["jobs_a_day"] for day in told["days"]] == [5e4, 5e5, 5e6, 5e7]
    assert "breaks first" in done.stdout
    again = bench(tmp_path, f"--costs={out}", "--json=-", command="capacity", DL_DB_DSN=own_db)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["costs"] == costs
    until(lambda: left_behind(own_db, tmp_path) == [], "nothing to be left")


def test_it_brings_its_own_postgresql() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folder is closed to other users
        home = Path(name)
        home.chmod(0o755)
        done = bench(home, "handover", "--rounds=1", "--scale=0.01")
        assert done.returncode == 0, done.stderr
        assert "next job of a hot key, p50" in done.stdout
        assert list(home.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing(own_db: str, tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dataloader", "bench", "latency"],
        env=environment(tmp_path, DL_DB_DSN=own_db),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    with psycopg.connect(own_db, autocommit=True) as conn:
        # Of this database alone: another test's bench may be at work beside us, and ours not yet take signals.
        worker = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE application_name LIKE 'dl-worker:bench%' AND datname = current_database()"
        )
        until(lambda: conn.execute(worker).fetchone() != (0,), "a worker of the bench")
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == INTERRUPTED
    assert "interrupted" in said
    assert "Traceback" not in said
    until(lambda: left_behind(own_db, tmp_path) == [], "nothing to be left")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["drian"], "there is no figure 'drian'; there are " + ", ".join(FIGURES)),
        (["--rounds=0"], "--rounds"),
        (["--scale=0"], "--scale"),
        (["--prefetch=1"], "--prefetch"),
        (["--dsn", "host"], "--dsn"),
        (["--json", "/nowhere/at/all"], "/nowhere/at/all should be a file that can be written"),
        (["--json", "/tmp"], "/tmp should be a file"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["bench", *arguments], env={"DL_HOME": str(tmp_path)})
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = bench(tmp_path, "drain", "--dsn", "host=127.0.0.1 port=1 dbname=none connect_timeout=2")
    assert done.returncode == 1
    assert "port 1 failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.glob("bench-*")) == []
