"""examples/llm: jobs against nodes that fail, as its README shows them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "llm"
AFTER = re.compile(r"canceled (\d+\.\d) s after the request")


def without_seconds(table: str) -> str:
    return AFTER.sub("canceled", re.sub(" +", " ", table))


@pytest.mark.long
def test_the_table_is_the_readmes_and_a_cancellation_ends_the_run(own_db: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE / "run.py"],
        env=os.environ | {"DL_DB_DSN": own_db, "DL_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    (shown,) = re.findall(r"^```text\n(case.*?)^```", (EXAMPLE / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert without_seconds(done.stdout) == without_seconds(shown)
    assert [float(seconds) < 10 for seconds in AFTER.findall(done.stdout)] == [True]
