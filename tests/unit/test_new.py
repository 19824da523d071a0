"""`dataloader new`: the new pipeline passes the new test; wrong names are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dataloader.cli.main import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def new(name: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["new", name])
    return done.exit_code, done.output


@pytest.mark.long
def test_what_is_written_passes_its_test_and_the_linter(folder: Path) -> None:
    status, said = new("sales")
    assert status == 0, said
    assert "DL_PIPELINES=sales dataloader up" in said.replace(str(Path(sys.executable).parent) + "/", "")
    assert 'trigger sales --args \'{"path": "example.csv"}\' --wait' in said
    assert "FROM STDIN" in (folder / "sales.py").read_text()
    assert "my_loader" not in said + "".join(path.read_text() for path in folder.iterdir())
    options = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-W", "error", "--rootdir", str(folder)]
    command = [sys.executable, "-P", "-m", "pytest", *options, str(folder / "test_sales.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert "7 passed" in done.stdout, done.stdout + done.stderr
    config = Path(__file__).parents[2] / "pyproject.toml"
    for check in (["check", "--ignore", "S101,PLR"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--no-cache", "--config", str(config), "."]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("my-loader", "letters, digits and _, no keyword, such as my_loader"),
        ("class", "no keyword"),
        ("../evil", "cannot be a module's name"),
        ("__main__", "hide a running module"),
        ("json", "hide the module of Python's standard library"),
        ("psycopg", "hide an installed module"),
        ("dataloader", "hide an installed module"),
        ("test_it", "would be taken for a test"),
        ("a" * 51, "at most 50 characters"),
        ("there", "there.py exists already"),
        ("tested", "test_tested.py exists already"),
        ("package", "package exists already"),
    ],
)
def test_refusals_leave_the_folder_as_it_is(name: str, why: str, folder: Path) -> None:
    (folder / "there.py").write_text("mine")
    (folder / "test_tested.py").write_text("mine")
    (folder / "package").mkdir()
    status, said = new(name)
    assert status == 1
    assert why in said
    assert "Traceback" not in said
    assert sorted(path.name for path in folder.iterdir()) == ["package", "test_tested.py", "there.py"]
    assert (folder / "there.py").read_text() == "mine"
