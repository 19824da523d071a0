"""Forty files as people have them: each becomes the table that a person expects, or is refused with what helps."""

import runpy
from pathlib import Path
from typing import Any

import pytest
from judging import Load

from dataloader.pipelines import PermanentError

DIRTY = Path(__file__).parent.parent / "data" / "dirty"


CHECK = runpy.run_path(str(DIRTY / "check.py"))


@pytest.mark.parametrize("file", [entry["file"] for entry in CHECK["expected"]()])
def test_a_file_as_people_have_it(file: str, job: Load, dsn: str) -> None:
    def load(path: str, table: str, args: dict[str, Any]) -> None:
        result = job("load.files", {"path": path, "table": table} | args, data_dir=DIRTY)
        if result.status != "succeeded":
            raise PermanentError(result.error)

    [(_, verdict, text)] = CHECK["outcomes"](load, dsn, [file])
    assert verdict == "right", text
