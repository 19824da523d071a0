"""The pipelines of a bench's jobs: they do nothing, or a measured piece of work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from dataloader.bench import marks
from dataloader.pipelines import register


@register("bench.noop")
def noop(args: dict[str, Any]) -> None:
    """Do nothing."""


@register("bench.batch", batch_size=10)
def batch(keys: dict[str, list[dict[str, Any]]]) -> None:
    """Do nothing with the jobs of up to ten keys."""


def model(args: dict[str, Any]) -> Iterator[None]:
    """Take `load_sec` seconds to load."""
    time.sleep(args["load_sec"])
    yield


@register("bench.model", prepare=model)
def ask(args: dict[str, Any]) -> None:
    """Sleep `sec` seconds, with a model loaded."""
    time.sleep(args["sec"])


@register("bench.mark")
def mark(args: dict[str, Any]) -> None:
    """Sleep `sleep` seconds, burn `burn` rounds of CPU, and note the begin and the end."""
    start = marks.now()
    if pause := args.get("sleep"):
        time.sleep(pause)
    burn(args.get("burn", 0))
    marks.leave(marks.Mark(args["n"], start, marks.now()))


@register("bench.writes")
def writes(args: dict[str, Any]) -> Iterator[None]:
    """Run for `sec` seconds, and print `lines_a_sec` lines in each."""
    end, number = time.monotonic() + args["sec"], 0
    while time.monotonic() < end:
        if args["lines_a_sec"]:
            print(f"row {number} of the file: 80 characters, as a usual line has; loaded without a word")  # noqa: T201  what is measured
        number += 1
        time.sleep(1 / (args["lines_a_sec"] or 100))
        yield


def burn(rounds: int) -> int:
    """Keep a core busy with pure Python for `rounds` rounds."""
    total = 0
    for number in range(rounds):
        total += number % 7
    return total


def rounds_for(seconds: float) -> int:
    """The rounds of `burn` that take `seconds` of CPU on this machine."""
    rounds, best = 100_000, float("inf")
    for _ in range(7):
        start = time.process_time()
        burn(rounds)
        best = min(best, time.process_time() - start)
    return max(1, round(rounds * seconds / best))
