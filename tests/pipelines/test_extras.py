"""Tasks that need a library of an extra: what they say without it, and that a farm without such jobs imports none."""

import subprocess
import sys
from pathlib import Path

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
    ],
)
def test_without_its_library_a_task_says_what_to_install(task: str, library: str, extra: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(task=task, library=library)], capture_output=True, text=True
    )
    advice = f"it needs {library}: pip install 'dataloader-farm[{extra}]'"
    assert (done.stdout, done.stderr) == (f"the pipeline {task!r} is not installed here: {advice}\n", "")


FILES = """
import sys
from contextlib import ExitStack
from pathlib import Path
sys.modules[{library!r}] = None
from dataloader.pipelines import PermanentError, files
try:
    files.opener(files.Entry(Path({folder!r}), {name!r}), files.Files(path="f", table="t", key=["id"]), ExitStack())
except PermanentError as e:
    print(e)
"""


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("f.parquet", "pyarrow"),
        ("f.orc", "pyarrow"),
        ("f.xlsx", "python_calamine"),
        ("f.csv.zst", "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"),
    ],
)
def test_without_its_library_a_format_says_what_to_install(tmp_path: Path, name: str, library: str) -> None:
    (tmp_path / name).write_bytes(b"\x28\xb5\x2f\xfd")
    code = FILES.format(library=library, folder=str(tmp_path), name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"format: needs {library}: pip install 'dataloader-farm[files]'\n", "")
