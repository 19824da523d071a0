"""Pipelines for tests of two hosts: what they do is seen from outside the database, which may be out of reach."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dataloader.pipelines import Context, Progress, register

STEP_SEC = 0.02


@register("diary")
def diary(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Note each step's attempt and time in `file`; attempt 1 goes on until the file `until[0]` exists, and so on."""
    for _ in _steps(args, context):
        yield {"processed": 0}


@register("stubborn_diary")
def stubborn_diary(args: dict[str, Any], context: Context) -> None:
    """The same without a safe point."""
    for _ in _steps(args, context):
        pass


def _steps(args: dict[str, Any], context: Context) -> Iterator[None]:
    with Path(args["file"]).open("a", buffering=1) as file:
        while True:
            print(context.attempt, time.time(), file=file)
            if Path(args["until"][context.attempt - 1]).exists():
                return
            time.sleep(STEP_SEC)
            yield
