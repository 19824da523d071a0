"""`python -m bench` for real, tiny: each figure measures, and the bench leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from farming import CHECKOUT, environment, until

pytestmark = pytest.mark.long

# Of each figure a line, and whether it has a bare limit.
LINES = [
    ("drain", "a fresh farm, 2 workers", True),
    ("keys", "64 keys, 2 workers", True),
    ("kinds", "merged, 1,000 keys, 5 workers", True),
    ("claim", "100,000 of one busy key (here 1,000)", True),
    ("latency", "commit to start, p50", True),
    ("handover", "next job of a hot key, p50", False),
    ("cpu", "jobs of 20 ms, 2 workers", True),
    ("enqueue", "bulk, API", True),
    ("idle", "statements per worker", False),
    ("memory", "each further idle worker, new", False),
]


def started(folder: Path, dsn: str, *arguments: str) -> subprocess.Popen[str]:
    """A bench without anybody's settings."""
    given = environment() | {"DL_HOME": str(folder), "DL_DB_DSN": dsn}
    command = [sys.executable, "-m", "bench", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=given, cwd=CHECKOUT, stdout=pipe, stderr=pipe, text=True)


def left_behind(dsn: str, folder: Path) -> list[Any]:
    """Schemas, sessions and files that a bench has not removed; a session ends a little after its program."""
    with psycopg.connect(dsn) as conn:
        schemas = conn.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'dl\\_bench%'").fetchall()
        sessions = conn.execute(
            "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'dl-%'"
        ).fetchall()
    return [*schemas, *sessions, *folder.glob("bench-*")]


def measured(folder: Path, dsn: str, figure: str) -> dict[str, Any]:
    out = folder / "result.json"
    with started(folder, dsn, figure, "--rounds=1", "--scale=0.01", f"--json={out}") as bench:
        printed, errors = bench.communicate()
    assert bench.returncode == 0, errors
    assert f"| {figure} | " in printed
    until(lambda: left_behind(dsn, folder) == [], "the bench's remains to go")
    return {line["name"]: line for line in json.loads(out.read_text())["lines"]}


@pytest.mark.parametrize(("figure", "name", "has_bare"), LINES)
def test_a_figure_is_measured_in_schemas_of_its_own(
    own_db: str, tmp_path: Path, figure: str, name: str, has_bare: bool
) -> None:
    line = measured(tmp_path, own_db, figure)[name]
    assert line["ours"]
    assert (line["ratio"] is not None) == has_bare
