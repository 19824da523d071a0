"""The model's predictions beside runs, with numbers of workers and of listeners that `costs` has not measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dataloader.bench import costs
from dataloader.bench.capacity import Compared, Costs, cpu_a_sec, jobs_a_sec
from dataloader.bench.place import Place
from dataloader.queue import db

WORKERS = (2, 4, 8)
SESSIONS = (10, 20, 100, 200)
SPARE = 20  # sessions that the farm of a comparison needs


def compare(place: Place, found: Costs, free: int) -> Iterator[Compared]:
    """Runs with 2, 4 and 8 workers in both ways to claim, then arrivals beside 10 to 200 sessions that listen.

    `free` is the number of sessions that the server has left; arrivals beside more are left out.
    The program measures the runs from which it predicts in turns with those that it predicts, for the speed of a
    machine changes.
    """
    with place.connect(place.queue()) as conn:
        meter = costs.Meter(conn)
        for name in costs.JOBS:
            yield from _rates(place, conn, meter, name, found.cores)
        yield from _sessions(place, conn, meter, found, [n for n in SESSIONS if n <= free - SPARE])


def _rates(place: Place, conn: db.Connection, meter: costs.Meter, name: str, cores: int) -> Iterator[Compared]:
    known: dict[int, list[costs.Drain]] = {workers: [] for workers in costs.WORKERS}
    asked: dict[int, list[costs.Drain]] = {workers: [] for workers in WORKERS}
    with place.steps(f"predicted beside measured: {name}", place.wish.rounds * (len(known) + len(asked))) as step:
        for _ in range(place.wish.rounds):
            for pair in zip(known, asked, strict=True):
                for workers in pair:
                    some = known if workers in known else asked
                    some[workers].append(costs.drain(place, conn, meter, name, workers))
                    step()
    way = costs.way(known, cores)
    for workers, drains in asked.items():
        measured = statistics.median(drain.jobs_a_sec for drain in drains)
        predicted = jobs_a_sec(way, workers, cores)
        yield Compared(f"{name}, {workers} workers", predicted, measured, "jobs/s")


def _sessions(
    place: Place, conn: db.Connection, meter: costs.Meter, found: Costs, asked: Sequence[int]
) -> Iterator[Compared]:
    known = (0, costs.LISTENERS)
    each: dict[int, list[float]] = {sessions: [] for sessions in sorted({*known, *asked})}
    with place.steps("predicted beside measured: sessions", place.wish.rounds * len(each)) as step:
        for _ in range(place.wish.rounds):
            for sessions, measured in each.items():
                with costs.listening(place, sessions):
                    taken = costs.arrivals(place, conn, meter)
                if taken is None:
                    return
                measured.append(taken)
                step()
    alone, beside = (statistics.median(each[sessions]) for sessions in known)
    here = replace(found, arrival_sec=alone, listen_sec=max(0.0, beside - alone) / costs.LISTENERS)
    for sessions in asked:
        predicted = cpu_a_sec(here, alone=costs.ARRIVALS_A_SEC, listeners=sessions)
        measured_sec = statistics.median(each[sessions]) * costs.ARRIVALS_A_SEC
        what = f"{costs.ARRIVALS_A_SEC:g} single jobs/s, {sessions} sessions listen"
        yield Compared(what, predicted * 1_000, measured_sec * 1_000, "ms CPU/s")
