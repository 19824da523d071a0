"""Tasks that need a library of an extra: what they say without it, and that a farm without such jobs imports none."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
sys.modules[{library!r}] = None
from dataloader import pipelines
pipelines.load(())
lazy = {{"httpx", "dask", "ray", "pyarrow", "dataloader.pipelines.engines.over_http"}} - {{{library!r}}}
assert not lazy & set(sys.modules)
assert "run.ray" in pipelines.tasks() and {task!r} not in pipelines.tasks()
try:
    pipelines.resolve({task!r})
except pipelines.UnknownTask as e:
    print(e)
"""


@pytest.mark.parametrize(
    ("task", "library", "extra"),
    [
        ("load.parquet", "pyarrow", "parquet"),
        ("run.dask", "distributed", "dask"),
        ("llm.generate", "httpx", "llm"),
    ],
)
def test_without_its_library_a_task_says_what_to_install(task: str, library: str, extra: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(task=task, library=library)], capture_output=True, text=True
    )
    advice = f"it needs {library}: pip install 'dataloader-farm[{extra}]'"
    assert (done.stdout, done.stderr) == (f"the pipeline {task!r} is not installed here: {advice}\n", "")
