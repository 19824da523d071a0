"""`python -m bench` for real, tiny: each figure measures, and the bench leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from farming import CHECKOUT, until

from dataloader.config import Settings

pytestmark = pytest.mark.long

# A line of each figure, and whether it has a bare limit.
LINES = {
    ("drain", "a fresh farm, 2 workers"): True,
    ("keys", "64 keys, 2 workers"): True,
    ("kinds", "merged, 1,000 keys, 5 workers"): True,
    ("kinds", "fair, 5 workers"): True,
    ("claim", "100,000 of one busy key (here 1,000)"): True,
    ("claim", "2,000 locked at the head (here 20)"): True,
    ("latency", "commit to start, p50"): True,
    ("handover", "next job of a hot key, p50"): False,
    ("cpu", "jobs of 20 ms, 2 workers"): True,
    ("enqueue", "bulk, API"): True,
    ("idle", "statements per worker"): False,
    ("memory", "each further idle worker, new"): False,
}


def started(folder: Path, dsn: str, *arguments: str) -> subprocess.Popen[str]:
    """A bench without anybody's settings."""
    ours = {name.upper() for name in Settings.model_fields} - {"DL_PG_BIN"}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"DL_HOME": str(folder), "DL_DB_DSN": dsn}
    command = [sys.executable, "-m", "bench", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=CHECKOUT, stdout=pipe, stderr=pipe, text=True)


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
def test_each_figure_is_measured_in_schemas_of_its_own(own_db: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    with started(tmp_path, own_db, "--rounds=1", "--scale=0.01", f"--json={out}") as bench:
        printed, errors = bench.communicate()
    assert bench.returncode == 0, errors
    measured = {(line["figure"], line["name"]): line for line in json.loads(out.read_text())["lines"]}
    for line, has_bare in LINES.items():
        assert measured[line]["ours"], line
        assert (measured[line]["ratio"] is not None) == has_bare, line
    lives = [line for (figure, _), line in measured.items() if figure == "life"]
    assert all(line["ratio"] or "pg_walinspect" in line["note"] for line in lives)
    assert "| keys | 64 keys, 2 workers |" in printed
    until(lambda: left_behind(own_db, tmp_path) == [], "the bench's remains to go")


def test_a_terminated_bench_leaves_nothing(own_db: str, tmp_path: Path) -> None:
    with started(tmp_path, own_db, "latency") as bench, psycopg.connect(own_db, autocommit=True) as conn:
        worker = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE application_name LIKE 'dl-worker:bench%' AND datname = current_database()"
        )
        until(lambda: conn.execute(worker).fetchone() != (0,), "a worker of the bench")
        bench.send_signal(signal.SIGTERM)
        _, errors = bench.communicate()
    assert bench.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    until(lambda: left_behind(own_db, tmp_path) == [], "the bench's remains to go")
