"""What one more worker costs a machine while it has nothing to do."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from farming import Farm, Program

FORKED = """
import os
import sys

modules = set()
os.register_at_fork(after_in_child=lambda: modules.update(sys.modules))
"""
LATE = """
import sys
import forked
from dataloader.pipelines import register

@register("late")
def late(args, context):
    with context.transaction() as conn:
        conn.execute("SELECT 'text'")
    return {"late": sorted(set(sys.modules) - forked.modules)}
"""


def memory(program: Program) -> int:
    """The memory (bytes) of a program and its children; what they share is counted once."""
    parent = psutil.Process(program.process.pid)
    return sum(process.memory_full_info().pss for process in [parent, *parent.children(recursive=True)])


def test_a_further_idle_worker_costs_at_most_thirteen_megabytes(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without coverage, which would be in each of them."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    farm.executes = True
    few = farm.ready(workers=1)
    small = memory(few)
    few.stop()
    assert (memory(farm.ready(workers=5)) - small) / 4 <= 13e6


def test_all_but_dl_pipelines_is_imported_before_the_fork(farm: Farm, tmp_path: Path) -> None:
    farm.executes = True
    (tmp_path / "forked.py").write_text(FORKED)
    (tmp_path / "late_pipelines.py").write_text(LATE)
    farm.ready(workers=1, dl_pipelines="late_pipelines", dl_preload="forked", pythonpath=tmp_path)
    found = farm.wait(farm.enqueue("late"), "succeeded")["progress"]["late"]
    assert [name for name in found if not name.startswith("coverage")] == ["late_pipelines"]


def test_a_dl_preload_that_cannot_be_imported_stops_the_start(farm: Farm) -> None:
    program = farm.start(dl_preload="no_such_module")
    assert program.process.wait(60) == 78
    assert "DL_PRELOAD: no_such_module cannot be imported" in program.log.read_text()
