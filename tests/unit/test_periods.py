"""Every period of 5 s or more can be shortened by a test of real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dataloader import periods


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
