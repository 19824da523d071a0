"""The pipelines of tests under fire: one that fails, gives up single keys, and notes each call; and loads."""

import json
import os
import random
import signal
import time
from collections.abc import Generator
from typing import Any

from dataloader.pipelines import Context, PermanentError, Progress, csv_table, register, resolve


@register("fire.sync", batch_size=3, retry_in=lambda attempt: 0.2)
def sync(keys: dict[str, list[dict[str, Any]]], context: Context) -> None:
    """Take some milliseconds; a line of begin and end for each key that the call has not given up."""
    began = time.monotonic()
    time.sleep(random.uniform(0, 0.02))
    chance = random.random()
    if chance < 0.003:
        os.kill(os.getpid(), signal.SIGKILL)
    if chance < 0.05:
        raise ValueError("some day")
    if chance < 0.06:
        raise PermanentError("never")
    for key in list(keys):
        if random.random() < 0.05:
            random.choice((lambda k: context.fail(k, "this one"), lambda k: context.retry(k, 0.1), context.skip))(key)
    context.check()
    for key, args in keys.items():
        note({"key": key, "n": [each["n"] for each in args], "began": began, "ended": time.monotonic()})


def note(line: dict[str, Any]) -> None:
    with open(os.environ["FIRE_NOTES"], "ab", buffering=0) as notes:
        notes.write(json.dumps(line).encode() + b"\n")


@register("fire.load", spares_attempts=True)
def load(args: dict[str, Any], context: Context) -> Generator[Progress | None, None, Progress]:
    """A load in parts of so many bytes."""
    csv_table.PART_BYTES = args["part_bytes"]
    return (yield from resolve(args["task"]).function(args["args"], context))
