"""The pipelines of a bench's jobs, and the times that jobs note themselves.

A mark is a record of 24 bytes, appended to a file or a pipe. All processes of the machine share its monotonic clock.
"""

from __future__ import annotations

import os
import struct
import time
from functools import cache
from typing import Any, NamedTuple

from dataloader.pipelines import register

MARKS = "DL_BENCH_MARKS"  # the variable that names the file or the pipe
RECORD = struct.Struct("=qdd")


class Mark(NamedTuple):
    """Job number `number` ran from `start` to `end`, in seconds of the monotonic clock."""

    number: int
    start: float
    end: float


def leave(mark: Mark) -> None:
    """Append a mark; its few bytes stay in one piece beside other writers."""
    os.write(_opened(os.environ[MARKS]), RECORD.pack(*mark))


@cache
def _opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND)


@register("bench.noop")
def noop(args: dict[str, Any]) -> None:
    """Do nothing."""


@register("bench.batch", batch_size=10)
def batch(keys: dict[str, list[dict[str, Any]]]) -> None:
    """Do nothing with the jobs of up to ten keys."""


@register("bench.mark")
def mark(args: dict[str, Any]) -> None:
    """Sleep `sleep` seconds, and note the begin and the end."""
    start = time.monotonic()
    if pause := args.get("sleep"):
        time.sleep(pause)
    leave(Mark(args["n"], start, time.monotonic()))


@register("bench.burn")
def burn_job(args: dict[str, Any]) -> None:
    """Burn `burn` rounds of CPU."""
    burn(args["burn"])


def burn(rounds: int) -> int:
    """Keep a core busy with pure Python for `rounds` rounds."""
    total = 0
    for number in range(rounds):
        total += number % 7
    return total


@cache
def rounds_for(seconds: float) -> int:
    """The rounds of `burn` that take `seconds` of CPU on this machine."""
    rounds, best = 100_000, float("inf")
    for _ in range(7):
        start = time.process_time()
        burn(rounds)
        best = min(best, time.process_time() - start)
    return max(1, round(rounds * seconds / best))
