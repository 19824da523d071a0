"""keys: jobs over 64 keys against the same jobs with a key each, two workers with prefetch.

The bench then checks the jobs' own notes: jobs of a key ran in order, and never at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from dataloader.bench.farm import Farm
from dataloader.bench.line import Line, Must, disorder
from dataloader.bench.marks import read
from dataloader.bench.place import BenchError, Place, add, await_drained, clear, drained

JOBS = 10_000
KEYS = 64
WORKERS = 2


def measure(place: Place) -> Iterator[Line]:
    """One line; its bare limit is the rate of the same jobs without shared keys."""
    jobs = place.wish.scaled(JOBS, least=2 * KEYS)
    prefetch = place.wish.prefetch
    sides = [partial(_rate, place, jobs, keys, prefetch) for keys in (KEYS, 0)]
    shared, own = place.in_turns("keys", *sides)
    note = "in order per key, none overlapped"
    facts = {"jobs": jobs, "keys": KEYS, "workers": WORKERS, "prefetch": prefetch, "bare": "a key for each job"}
    yield Line("keys", f"{KEYS} keys, {WORKERS} workers", "jobs/s", shared, own, Must(least=0.7, aim=0.9), note, facts)


def _rate(place: Place, jobs: int, keys: int, prefetch: int) -> float:
    marks = place.folder / "keys.marks"
    marks.write_bytes(b"")
    with Farm(place, WORKERS, prefetch, marks) as farm, place.connect(farm.schema) as conn:
        farm.warm()
        add(conn, jobs, task="bench.mark", keys=keys)
        await_drained(conn, farm.check)
        rate = jobs / drained(conn, jobs)
        clear(conn)
    if keys and (wrong := disorder([(mark.number % keys, *mark) for mark in read(marks)])):
        raise BenchError(f"{len(wrong)} jobs ran out of order or side by side: {wrong[0]}")
    return rate
