"""Forty files as people have them: each becomes the table that a person expects, or is refused with what helps."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from judging import Load

from dataloader.pipelines import PermanentError

DIRTY = Path(__file__).parent.parent / "data" / "dirty"


def _check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check", DIRTY / "check.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = _check()
FILES = [entry["file"] for entry in check.expected()]


@pytest.mark.parametrize("file", FILES)
def test_a_file_as_people_have_it(file: str, job: Load, dsn: str) -> None:
    def load(path: str, table: str, args: dict[str, Any]) -> None:
        result = job("load.files", {"path": path, "table": table} | args, data_dir=DIRTY)
        if result.status != "succeeded":
            raise PermanentError(result.error)

    [(_, verdict, text)] = check.outcomes(load, dsn, [file])
    assert verdict == "right", text
