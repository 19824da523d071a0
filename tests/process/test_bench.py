"""`python -m bench` for real, tiny: each figure measures, and the bench leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from farming import CHECKOUT, environment, until

pytestmark = pytest.mark.long


# Of each figure a line, and whether it has a bare limit.
LINES = {
    "drain": ("a fresh farm, 2 workers", True),
    "keys": ("64 keys, 2 workers", True),
    "kinds": ("merged, 1,000 keys, 5 workers", True),
    "claim": ("100,000 of one busy key (here 1,000)", True),
    "latency": ("commit to start, p50", True),
    "handover": ("next job of a hot key, p50", False),
    "cpu": ("jobs of 20 ms, 2 workers", True),
    "enqueue": ("bulk, API", True),
    "idle": ("statements per worker", False),
    "memory": ("each further idle worker, new", False),
}
LEFT = """
SELECT nspname FROM pg_namespace WHERE nspname LIKE 'dl\\_bench%'
UNION ALL
SELECT application_name FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'dl-%'
"""


@pytest.mark.parametrize("figure", LINES)
def test_a_figure_is_measured_in_schemas_of_its_own(own_db: str, tmp_path: Path, figure: str) -> None:
    name, has_bare = LINES[figure]
    out = tmp_path / "result.json"
    given = environment() | {"DL_HOME": str(tmp_path), "DL_DB_DSN": own_db}  # nobody's settings
    command = [sys.executable, "-m", "bench", figure, "--rounds=1", "--scale=0.01", f"--json={out}"]
    bench = subprocess.run(command, env=given, cwd=CHECKOUT, capture_output=True, text=True)
    assert bench.returncode == 0, bench.stderr
    assert f"| {figure} | " in bench.stdout
    (line,) = [line for line in json.loads(out.read_text())["lines"] if line["name"] == name]
    assert line["ours"]
    assert (line["ratio"] is not None) == has_bare
    with psycopg.connect(own_db, autocommit=True) as conn:
        until(lambda: conn.execute(LEFT).fetchall() == [], "the bench's sessions to end")
    assert [*tmp_path.glob("bench-*")] == []
