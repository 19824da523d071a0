"""idle: the cost of a farm without jobs: statements and CPU seconds a minute.

The bench reads the farm's sessions often, and counts each new start of a last statement; two statements within
LOOK_SEC count as one. (The database's count of transactions would include autovacuum's.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil

from dataloader.bench.farm import Farm
from dataloader.bench.line import Line
from dataloader.bench.place import SQL, Place
from dataloader.queue import db

WORKERS = 4
WINDOW_SEC = 60.0
LOOK_SEC = 0.02  # much shorter than the time between two statements of an idle session


def measure(place: Place) -> Iterator[Line]:
    """Statements of each worker, with its share of the keeper's, and CPU seconds of the whole farm."""
    window = max(0.5, WINDOW_SEC * min(1.0, place.wish.scale))
    statements, cpu = [], []
    with (
        Farm(place, WORKERS) as farm,
        place.connect(farm.schema) as conn,
        place.steps("idle", place.wish.rounds) as step,
    ):
        farm.warm()
        for _ in range(place.wish.rounds):
            burnt = _cpu_seconds(farm.processes())
            statements.append(_statements(conn, window) * 60 / window / WORKERS)
            cpu.append((_cpu_seconds(farm.processes()) - burnt) * 60 / window)
            step()
    facts = {"workers": WORKERS, "window_sec": window}
    yield Line("idle", "statements per worker", "a minute", statements, facts=facts)
    yield Line("idle", f"CPU seconds of {WORKERS} workers", "a minute", cpu, facts=facts)


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def _statements(conn: db.Connection, window: float) -> int:
    """The number of statements that the farm's sessions begin within `window` seconds."""
    until = time.monotonic() + window
    before = seen = set(conn.execute(SQL["last_statements"]).fetchall())
    while time.monotonic() < until:
        time.sleep(LOOK_SEC)
        seen = seen | set(conn.execute(SQL["last_statements"]).fetchall())
    return len(seen) - len(before)
