"""What `pip install` puts on a machine: the wheel holds the SQL and the types, and nothing of the tests."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "dataloader", "sql", "tests")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names of the wheel's files; it is built from a copy, since building leaves files in its sources."""
    if importlib.util.find_spec("pip") is None or importlib.util.find_spec("setuptools") is None:
        pytest.skip("building a wheel needs pip and setuptools in this venv")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", str(out), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("dataloader_farm-*.whl")
    with zipfile.ZipFile(built) as archive:
        return archive.namelist()


def shipped(folder: str, package: str) -> set[str]:
    """Every file below a folder of the checkout, by its name in the wheel."""
    files = [path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {f"{package}/{path}" for path in files if not {"__pycache__", ".mypy_cache"} & set(path.parts)}


def test_the_wheel_has_every_file_of_the_package_the_sql_and_the_licence_and_nothing_else(wheel: list[str]) -> None:
    """Modules, templates and whatever else lies there: setup.cfg names packages and data one by one.

    No tests, and no second package at the top level that another project might have too.
    """
    wanted = shipped("dataloader", "dataloader") | shipped("sql", "dataloader/sql")
    assert {"dataloader/py.typed", "dataloader/sql/adopt.sql"} <= wanted
    ours = {name for name in wheel if ".dist-info/" not in name}
    assert (wanted - ours, ours - wanted) == (set(), set())
    assert [name for name in wheel if name.endswith(".dist-info/licenses/LICENSE")]
