"""fair: how long one tenant's jobs wait behind another one's backlog, and what turns cost, beside a plain queue.

One transaction adds the backlog, as users do. When the first hundred jobs of it have ended, another transaction adds
the few jobs of the other tenant. The two queues take turns; the jobs do nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from dataloader.bench.farm import Farm
from dataloader.bench.line import Line, Must
from dataloader.bench.place import PATIENCE, SQL, BenchError, Place, add, await_drained, clear, drained
from dataloader.queue import db, operations

BACKLOG = 50_000
FEW = 100
WORKERS = 2


class Round(NamedTuple):
    """The figures of one round: a field for each line."""

    wait_sec: float  # from the commit of the few jobs to their median start
    jobs_per_sec: float
    added_per_sec: float


# The line of each field.
LINES: tuple[tuple[str, str, Must], ...] = (
    (f"{FEW} jobs of one tenant behind the backlog of another", "s", Must(most=0.1, aim=0.01)),
    ("the rate of both", "jobs/s", Must(least=0.9, aim=1.0)),
    ("adding the backlog", "jobs/s", Must(least=0.4, aim=0.6)),
)


def measure(place: Place) -> Iterator[Line]:
    """A line for each of LINES; the bare limit is a plain queue."""
    jobs = place.wish.scaled(BACKLOG, least=1_000)
    rounds: dict[str | None, list[Round]] = {"partition_key": [], None: []}
    place.in_turns("fair", *(partial(_kept, rounds[by], place, jobs, by) for by in rounds))
    facts = {"workers": WORKERS, "backlog": jobs, "bare": "a plain queue"}
    for at, (name, unit, must) in enumerate(LINES):
        fair, plain = ([each[at] for each in of_one] for of_one in rounds.values())
        yield Line("fair", name, unit, fair, plain, must, f"backlog: {jobs:,} jobs; bare: a plain queue", facts)


def _kept(rounds: list[Round], place: Place, jobs: int, by: str | None) -> float:
    rounds.append(_round(place, jobs, by))
    return rounds[-1].wait_sec


def _round(place: Place, jobs: int, by: str | None) -> Round:
    with Farm(place, WORKERS, place.wish.prefetch) as farm, place.connect(farm.schema) as conn:
        farm.warm()
        operations.set_order(conn, "bench", "bench", fair_by=by)
        begin = time.perf_counter()
        add(conn, jobs, share="large")
        added_per_sec = jobs / (time.perf_counter() - begin)
        _await_ends(conn)
        add(conn, FEW, share="small")
        await_drained(conn, farm.check)
        (wait_sec,) = conn.execute(SQL["wait_of_share"], {"share": "small"}).fetchone() or (0.0,)
        rate = (jobs + FEW) / drained(conn, jobs + FEW)
        operations.set_order(conn, "bench", "bench", fair_by=None)
        clear(conn)
    return Round(float(wait_sec), rate, added_per_sec)


def _await_ends(conn: db.Connection) -> None:
    """Return when FEW jobs have ended."""
    deadline = time.monotonic() + PATIENCE
    while len(conn.execute(SQL["some_ends"], {"most": FEW}).fetchall()) < FEW:
        if time.monotonic() > deadline:
            raise BenchError(f"fewer than {FEW} jobs have ended within {PATIENCE:g} s")
        time.sleep(0.005)
