"""examples/orders: the same messages through four queues, as its README shows them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "orders"
LINE = re.compile(r"^(\S.*?)  +(\d+) +(\d+) +([\d.]+)$", re.MULTILINE)


@pytest.mark.long
def test_an_ordered_queue_leaves_no_order_stale_and_a_merged_one_calls_less_often(own_db: str, tmp_path: Path) -> None:
    """What the plain queues leave depends on chance: only what is promised is judged."""
    options = ["--orders", "8", "--versions", "6", "--wave", "24", "--workers", "3"]
    done = subprocess.run(
        [sys.executable, EXAMPLE / "run.py", *options],
        env=os.environ | {"DL_DB_DSN": own_db, "DL_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = {title: (int(calls), int(stale)) for title, calls, stale, _ in LINE.findall(done.stdout)}
    assert list(found) == [
        "plain queue, a key for each message",
        "plain queue, a key for each order",
        "ordered queue",
        "ordered and merged queue",
    ]
    for title in list(found)[:3]:
        assert found[title][0] >= 48, title
    assert found["ordered queue"][1] == 0
    assert found["ordered and merged queue"][1] == 0
    assert found["ordered and merged queue"][0] < 48
