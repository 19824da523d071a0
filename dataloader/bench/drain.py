"""drain: how fast a farm empties its queue of jobs that do nothing, one by one and with prefetch.

The workers wait, warmed up; then all jobs are committed at one instant. The clock runs from the first `started_at` to
the last `finished_at` in the rows, for pgbench too, which claims and finishes the same rows in the contract's tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dataloader.bench import pgbench
from dataloader.bench.farm import KNOWS_PREFETCH, NO_PREFETCH, Farm
from dataloader.bench.line import Line, Must
from dataloader.bench.place import Place, await_drained, clear, drained, seed

WORKERS = (1, 2, 4)
ONE_BY_ONE = 5_000
IN_BATCHES = 20_000
_MUST = {
    (1, False): Must(least=0.9, aim=1.2),
    (4, False): Must(least=0.9, aim=1.2),
    (2, True): Must(least=0.9, aim=1.3),
}
Rate = Callable[[Place, int, int], float]


def measure(place: Place) -> Iterator[Line]:
    """A line for each number of workers and each way to take jobs."""
    yield from _lines(place, "one by one", False, ONE_BY_ONE, pgbench.one_by_one)
    yield from _lines(place, f"prefetch {place.wish.prefetch}", True, IN_BATCHES, pgbench.in_batches)


def farm_rate(place: Place, workers: int, prefetch: int, jobs: int) -> float:
    """Jobs per second of a fresh, warmed farm."""
    with Farm(place, workers, prefetch) as farm, place.connect(farm.schema) as conn:
        farm.warm()
        seed(conn, jobs)
        await_drained(conn, farm.check)
        rate = jobs / drained(conn, jobs)
        clear(conn)
        return rate


def _lines(place: Place, way: str, in_batches: bool, jobs: int, bare_rate: Rate) -> Iterator[Line]:
    ours: dict[int, list[float]] = {workers: [] for workers in WORKERS}
    bare: dict[int, list[float]] = {workers: [] for workers in WORKERS}
    jobs = place.wish.scaled(jobs, least=100)
    prefetch = place.wish.prefetch if in_batches else 1
    has_farm = KNOWS_PREFETCH or not in_batches

    def measure_ours(workers: int) -> None:
        if has_farm:
            ours[workers].append(farm_rate(place, workers, prefetch, jobs))

    def measure_bare(workers: int) -> None:
        if place.pgbench:
            bare[workers].append(bare_rate(place, workers, jobs))

    with place.steps(f"drain, {way}", place.wish.rounds * len(WORKERS)) as step:
        for number in range(place.wish.rounds):
            for workers in WORKERS:
                # In turns, so that neither always has the warmer machine.
                for measure_one in (measure_ours, measure_bare)[:: 1 if number % 2 else -1]:
                    measure_one(workers)
                step()
    note = ", ".join(([] if has_farm else [NO_PREFETCH]) + ([] if place.pgbench else ["no pgbench was found"]))
    for workers in WORKERS:
        name = f"{way}, {workers} worker{'s' * (workers > 1)}"
        must = _MUST.get((workers, in_batches)) if ours[workers] and bare[workers] else None
        facts = {"workers": workers, "prefetch": prefetch, "jobs": jobs, "tables": place.wish.bare}
        yield Line("drain", name, "jobs/s", ours[workers], bare[workers], must, note, facts)
