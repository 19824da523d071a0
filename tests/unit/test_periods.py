"""Every period of 5 s or more can be shortened by a test of real processes."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dataloader
from dataloader import periods

ROOT = Path(dataloader.__file__).parent

# Numbers of seconds that no process waits for.
NO_PERIODS = {
    "DAY_SEC": "a unit",
    "MONTH_SEC": "a unit",
    "BOUNDS_SEC": "the bounds of a histogram",
    "BUCKETS_SEC": "the bounds of a histogram",
    "WAIT_MOST_SEC": "the largest value that a pipeline may give",
    "NEVER_SEC": "the largest value that is shown",
    "FULL_RETRY_AFTER_SEC": "a value in an answer",
    "LIVE_SPAN_SEC": "the span of a report",
    "queue/job.py RETRY_SEC": "a factor of the retry's delay, which a function of the database knows as well",
}


def bare_numbers(path: Path) -> Iterator[tuple[str, float]]:
    """The constants of a module that name seconds, and the numbers in them."""
    for statement in ast.parse(path.read_text("utf-8")).body:
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
            continue
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            names = [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
            if any(name.endswith(("_SEC", "_WITHIN")) for name in names):
                yield ", ".join(names), max(numbers(statement.value), default=0)


def numbers(node: ast.expr) -> Iterator[float]:
    """The numbers in an expression that are not the default of a period."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node.value
    elif not (isinstance(node, ast.Call) and ast.unparse(node.func) == "periods.seconds"):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from numbers(child)


@pytest.mark.parametrize("room", ["farm", "api", "queue", "log", "local"])
def test_no_period_of_five_seconds_is_a_bare_number(room: str) -> None:
    for path in sorted((ROOT / room).rglob("*.py")):
        for name, longest in bare_numbers(path):
            if longest >= 5 and not {name, f"{path.relative_to(ROOT)} {name}"} & NO_PERIODS.keys():
                pytest.fail(f"{path.relative_to(ROOT)}: {name} = {longest:g}; make it a period (dataloader/periods.py)")


def test_each_period_has_a_name_of_its_own() -> None:
    names = periods.declared()
    assert "LEARN_SEC" in names
    assert len(names) == len(set(names))


def learn_sec(given: str) -> subprocess.CompletedProcess[str]:
    """A process that is started with this DL_PERIODS, and prints a worker's LEARN_SEC."""
    command = [sys.executable, "-c", "from dataloader.farm import worker; print(worker.LEARN_SEC)"]
    return subprocess.run(command, env=os.environ | {"DL_PERIODS": given}, capture_output=True, text=True, check=False)


def test_a_test_shortens_a_period_of_a_process() -> None:
    assert learn_sec(json.dumps({"LEARN_SEC": 0.5})).stdout == "0.5\n"
    assert learn_sec("").stdout == "60.0\n"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("LEARN_SEC=1", "DL_PERIODS is no JSON"),
        ("[1]", "DL_PERIODS should be an object"),
        ('{"LERN_SEC": 1}', "DL_PERIODS names 'LERN_SEC'; the periods are"),
        ('{"LEARN_SEC": "1"}', "DL_PERIODS gives LEARN_SEC '1'"),
        ('{"LEARN_SEC": true}', "DL_PERIODS gives LEARN_SEC True"),
        ('{"LEARN_SEC": 0}', "DL_PERIODS gives LEARN_SEC 0"),
        ('{"LEARN_SEC": NaN}', "DL_PERIODS gives LEARN_SEC nan"),
    ],
)
def test_a_bad_dl_periods_is_refused(given: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DL_PERIODS", given)
    with pytest.raises(ValueError, match=error):
        periods.seconds("LEARN_SEC", 60.0)
