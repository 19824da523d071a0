"""Pipelines for outages: what they do is told by a file of their own, whatever becomes of the database."""

import os
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farm_pipelines import hold_the_gil

from dataloader.pipelines import Context, Progress, register


@register("witnessed")
def witnessed(args: dict[str, Any], context: Context) -> Iterator[Any]:
    """Run for `sec` seconds, and on until the file `go` exists; begin and end are added to the file `witness`."""
    seconds, go = args.get("sec", 0.0), Path(args["go"]) if args.get("go") else None
    begun = time.monotonic()
    assert context.checkpoint in (None, {"seen": 1})
    _note(args, context, "begin")
    print("has begun")  # a line of the job's log
    word = "stop"
    try:
        while time.monotonic() < begun + seconds or not (go is None or go.exists()):
            select.select([], [], [], 0.02)
            yield Progress(int(50 * (time.monotonic() - begun)), None, checkpoint={"seen": 1})
        word = "end"
        return {"pid": os.getpid()}
    finally:
        _note(args, context, word)


@register("holds_the_gil_in_its_first_run")
def holds_the_gil_in_its_first_run(args: dict[str, Any], context: Context) -> None:
    """One C call of minutes that lets no other thread run; later runs end at once."""
    if context.claim == 1:
        hold_the_gil(600)


def _note(args: dict[str, Any], context: Context, word: str) -> None:
    line = f"{word} {context.job_id} {context.lock_key} {context.claim} {os.getpid()} {time.monotonic()}\n"
    with Path(args["witness"]).open("a") as file:
        file.write(line)
