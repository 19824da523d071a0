"""What the jobs of a bench do: nothing, or a little that can be measured. May import `pipelines`."""

from __future__ import annotations

import time
from typing import Any

from dataloader.bench import marks
from dataloader.pipelines import register


@register("bench.noop")
def noop(args: dict[str, Any]) -> None:
    """Nothing at all."""


@register("bench.mark")
def mark(args: dict[str, Any]) -> None:
    """Sleep `sleep` seconds, burn `burn` rounds of CPU, and say when that was."""
    start = marks.now()
    if pause := args.get("sleep"):
        time.sleep(pause)
    burn(args.get("burn", 0))
    marks.leave(marks.Mark(args["n"], start, marks.now()))


def burn(rounds: int) -> int:
    """Pure Python that keeps a core busy."""
    total = 0
    for number in range(rounds):
        total += number % 7
    return total


def rounds_for(seconds: float) -> int:
    """How many rounds of `burn` take so long on this machine, when it does nothing else."""
    rounds, best = 100_000, float("inf")
    for _ in range(7):
        start = time.process_time()
        burn(rounds)
        best = min(best, time.process_time() - start)
    return max(1, round(rounds * seconds / best))
