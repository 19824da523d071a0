"""Tasks and formats that need a library of an extra: what they say without it, and that a farm imports none early."""

import subprocess
import sys
from pathlib import Path

ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
LIBRARIES = {"f.parquet": "pyarrow", "f.orc": "pyarrow", "f.xlsx": "python_calamine", "f.csv.zst": ZSTD}
CODE = f"""
import sys
from contextlib import ExitStack
from pathlib import Path
sys.modules |= dict.fromkeys(["pyarrow", "distributed", "python_calamine", {ZSTD!r}])  # their imports fail
from dataloader import pipelines
from dataloader.pipelines import PermanentError, files
pipelines.load(())
assert "run.ray" in pipelines.tasks()
for task in ("load.parquet", "run.dask"):
    assert task not in pipelines.tasks()
    try:
        pipelines.resolve(task)
    except pipelines.UnknownTask as e:
        print(e)
for name in {[*LIBRARIES]}:
    try:
        files.opener(files.Entry(Path(), name), files.Files(path="f", table="t", key=["id"]), ExitStack())
    except PermanentError as e:
        print(e)
"""


def test_without_its_library_a_task_or_a_format_says_what_to_install(tmp_path: Path) -> None:
    for name in LIBRARIES:
        (tmp_path / name).write_bytes(b"\x28\xb5\x2f\xfd")
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stderr, done.stdout.splitlines()) == (
        "",
        [
            f"the pipeline '{task}' is not installed here: it needs {library}: pip install 'dataloader-farm[{extra}]'"
            for task, library, extra in (("load.parquet", "pyarrow", "parquet"), ("run.dask", "distributed", "dask"))
        ]
        + [f"format: needs {library}: pip install 'dataloader-farm[files]'" for library in LIBRARIES.values()],
    )


def test_a_farm_imports_no_library_of_an_extra_before_a_job_needs_it() -> None:
    code = "import sys; from dataloader import pipelines; pipelines.load(()); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    held = {*done.stdout.split()}
    assert "dataloader.pipelines.files" in held
    assert not {"httpx", "dask", "ray", "pyarrow", "dataloader.pipelines.engines.over_http"} & held
