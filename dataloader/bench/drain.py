"""drain: the rate at which a farm empties its queue of jobs that do nothing, one by one and with prefetch.

The workers are warm and wait; then one commit adds all jobs. Last comes a new farm that finds its jobs in a table which
no statistics describe, against the same farm after an ANALYZE. The clock runs from the first `started_at` to the last
`finished_at` in the rows. For pgbench it does too; pgbench claims and finishes such rows in the contract's tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

from dataloader.bench import pgbench
from dataloader.bench.farm import Farm
from dataloader.bench.line import Line, Must
from dataloader.bench.place import Place, add, await_drained, clear, drained

WORKERS = (1, 2, 4)
FRESH = 20_000
_numbers = count()


@dataclass(frozen=True, slots=True)
class Way:
    """A way to claim jobs, the number of jobs, and the nearest way of pgbench."""

    name: str
    jobs: int
    in_batches: bool
    bare: Callable[[Place, int, int], float]  # of clients and jobs: jobs per second
    must: dict[int, Must]  # by the number of workers


WAYS = (
    Way("one by one", 5_000, False, pgbench.one_by_one, dict.fromkeys((1, 4), Must(least=0.9, aim=1.2))),
    Way("prefetch", 20_000, True, pgbench.in_batches, {2: Must(least=0.9, aim=1.3)}),
)


def measure(place: Place) -> Iterator[Line]:
    """A line for each way to claim jobs and each number of workers."""
    for way in WAYS:
        for workers in WORKERS:
            yield _line(place, way, workers)
    yield _fresh(place)


def _line(place: Place, way: Way, workers: int) -> Line:
    jobs, prefetch = place.wish.scaled(way.jobs, least=100), place.wish.prefetch if way.in_batches else 1
    name = f"{way.name}{f' {prefetch}' if way.in_batches else ''}, {workers} worker{'s' * (workers > 1)}"
    ours, bare = place.in_turns(
        f"drain: {name}",
        partial(_farm_rate, place, workers, prefetch, jobs),
        partial(way.bare, place, workers, jobs) if place.pgbench else None,
    )
    note = "" if place.pgbench else "no pgbench was found"
    facts = {"workers": workers, "prefetch": prefetch, "jobs": jobs, "tables": place.wish.bare}
    return Line("drain", name, "jobs/s", ours, bare, way.must.get(workers) if bare else None, note, facts)


def _farm_rate(place: Place, workers: int, prefetch: int, jobs: int) -> float:
    """Jobs per second of a new farm, warmed up."""
    with Farm(place, workers, prefetch) as farm, place.connect(farm.schema) as conn:
        farm.warm()
        add(conn, jobs)
        await_drained(conn, farm.check)
        rate = jobs / drained(conn, jobs)
        clear(conn)
        return rate


def _fresh(place: Place) -> Line:
    jobs, workers = place.wish.scaled(FRESH, least=100), 2
    sides = [partial(_fresh_rate, place, workers, jobs, is_analysed=is_analysed) for is_analysed in (False, True)]
    fresh, analysed = place.in_turns("drain: a fresh farm", *sides)
    facts = {"workers": workers, "prefetch": place.wish.prefetch, "jobs": jobs, "bare": "the same, analysed"}
    note = "bare: the same, analysed"
    return Line("drain", "a fresh farm, 2 workers", "jobs/s", fresh, analysed, Must(least=0.9, aim=1), note, facts)


def _fresh_rate(place: Place, workers: int, jobs: int, is_analysed: bool) -> float:
    """Jobs per second of a farm that begins on a table which has just been filled for the first time."""
    schema = place.queue(f"fresh_{next(_numbers)}")
    with place.connect(schema) as conn:
        add(conn, jobs)
        if is_analysed:
            conn.execute("ANALYZE dl_jobs")
        with Farm(place, workers, place.wish.prefetch, schema=schema) as farm:
            await_drained(conn, farm.check)
        return jobs / drained(conn, jobs)
