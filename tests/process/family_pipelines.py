"""Pipelines that add jobs, wait for others, and note in a file what they do."""

import os
import time
from typing import Any

from dataloader.pipelines import Context, PermanentError, register


def note(line: str) -> None:
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(line + "\n")


@register("part")
def part(args: dict[str, Any]) -> int:
    note(f"part {args['n']}")
    if args["n"] < 0:
        raise PermanentError("below zero")
    time.sleep(0.05)  # so that a test which kills workers finds parts that are not done yet
    return 2 * int(args["n"])


@register("whole")
def whole(args: dict[str, Any], context: Context) -> dict[str, Any]:
    note(f"whole {context.attempt}")
    parts = [context.trigger("part", {"n": n}) for n in args["parts"]]
    return {"sum": sum(context.gather(parts)), "attempt": context.attempt}


@register("sums")
def sums(args: dict[str, Any], context: Context) -> dict[str, Any]:
    return {"of": [parent.result for parent in context.parents], "states": [p.status for p in context.parents]}


@register("triggers badly")
def triggers_badly(args: dict[str, Any], context: Context) -> None:
    context.trigger("part", nonsense=1)
