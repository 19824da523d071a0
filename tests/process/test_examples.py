"""examples/llm and examples/orders do what their READMEs show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
EXAMPLES = Path(__file__).parents[2] / "examples"
AFTER = re.compile(r"canceled (\d+\.\d) s after the request")
LINE = re.compile(r"^(\S.*?)  +(\d+) +(\d+) +([\d.]+)$", re.MULTILINE)


def output(example: str, dsn: str, home: Path, *options: str) -> str:
    env = os.environ | {"DL_DB_DSN": dsn, "DL_HOME": str(home)}
    command = [sys.executable, EXAMPLES / example / "run.py", *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def without_seconds(table: str) -> str:
    return AFTER.sub("canceled", re.sub(" +", " ", table))


def test_the_table_of_llm_is_the_readmes_and_a_cancellation_ends_the_run(own_db: str, tmp_path: Path) -> None:
    printed = output("llm", own_db, tmp_path)
    readme = (EXAMPLES / "llm" / "README.md").read_text()
    (shown,) = re.findall(r"^```text\n(case.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert without_seconds(printed) == without_seconds(shown)
    assert [float(seconds) < 10 for seconds in AFTER.findall(printed)] == [True]


def test_an_ordered_queue_leaves_no_order_stale_and_a_merged_one_calls_less_often(own_db: str, tmp_path: Path) -> None:
    """The rows that the plain queues leave depend on chance: only the promises are judged."""
    printed = output("orders", own_db, tmp_path, "--orders=8", "--versions=6", "--wave=24", "--workers=3")
    found = [(title, int(calls), int(stale)) for title, calls, stale, _ in LINE.findall(printed)]
    assert [title for title, _, _ in found] == [
        "plain queue, a key for each message",
        "plain queue, a key for each order",
        "ordered queue",
        "ordered and merged queue",
    ]
    assert all(calls >= 48 for _, calls, _ in found[:3])
    assert [stale for _, _, stale in found[2:]] == [0, 0]
    assert found[3][1] < 48
