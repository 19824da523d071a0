"""memory: the memory that a further idle worker adds to a farm, as PSS, which divides shared pages among processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dataloader.bench.farm import Farm
from dataloader.bench.line import Line, Must
from dataloader.bench.place import Place

FEW = 2
MORE = 4
_PSS = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)


def measure(place: Place) -> Iterator[Line]:
    """The difference between two farms, divided by the difference of their workers."""
    if not Path("/proc/self/smaps_rollup").exists():
        yield Line.skipped("memory", "each further idle worker", "needs /proc/PID/smaps_rollup (Linux)")
        return
    fresh, warm, few = [], [], []
    with place.steps("memory", place.wish.rounds) as step:
        for _ in range(place.wish.rounds):
            small, large = _farm_mb(place, FEW), _farm_mb(place, FEW + MORE)
            few.append(small[1])
            fresh.append((large[0] - small[0]) / MORE)
            warm.append((large[1] - small[1]) / MORE)
            step()
    must = Must(most=10, aim=6)
    yield Line("memory", "each further idle worker, new", "MB PSS", fresh, must=must)
    yield Line("memory", "each further idle worker, after 100 jobs", "MB PSS", warm, must=must)
    yield Line("memory", f"a farm of {FEW} workers", "MB PSS", few, note="with supervisor and keeper")


def pss_mb(rollup: str) -> float:
    """The PSS in the text of a smaps_rollup, in MB of 10^6 bytes."""
    found = _PSS.search(rollup)
    if found is None:
        raise ValueError("a smaps_rollup should have a line Pss")
    return int(found[1]) * 1_024 / 1e6


def _farm_mb(place: Place, workers: int) -> tuple[float, float]:
    """MB of a whole farm, right after its start and after some jobs."""
    with Farm(place, workers) as farm:
        rollups = [Path(f"/proc/{process.pid}/smaps_rollup") for process in farm.processes()]
        new = sum(pss_mb(rollup.read_text("ascii")) for rollup in rollups)
        farm.warm()
        return new, sum(pss_mb(rollup.read_text("ascii")) for rollup in rollups)
