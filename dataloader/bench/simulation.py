"""PURE workers against a server, event by event: checks the law of `capacity` beyond what one machine can run."""

from __future__ import annotations

from heapq import heapify, heapreplace
from random import Random


def jobs_a_sec(workers: int, demand_sec: float, elsewhere_sec: float, cores: int, jobs: int = 20_000) -> float:
    """The jobs/s of so many workers that never lack work, by simulation of `jobs` jobs; the same at each call.

    A job spends `elsewhere_sec` beside the server, and then waits for one of its processors, in the order in which jobs
    come. All times are exponential, with these means.
    """
    chance = Random(0)  # noqa: S311  a simulation, no secret
    asks = [chance.expovariate(1) * elsewhere_sec for _ in range(workers)]
    free = [0.0] * cores
    heapify(asks)
    warm, begun = jobs // 5, 0.0
    for number in range(jobs):
        begin = max(asks[0], free[0])
        end = begin + chance.expovariate(1) * demand_sec
        heapreplace(free, end)
        heapreplace(asks, end + chance.expovariate(1) * elsewhere_sec)
        if number == warm:
            begun = begin
    return (jobs - warm) / (max(free) - begun)
