"""idle: what a farm costs while it has nothing to do: statements and CPU seconds a minute.

Statements are counted as the database's ended transactions (each of ours is a statement), without those of the bench.
Other sessions in the same database would be counted too; a note says when there are any.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil

from dataloader import db
from dataloader.bench.farm import Farm
from dataloader.bench.line import Line
from dataloader.bench.place import SQL, Place

WORKERS = 4
WINDOW_SEC = 60.0
REPORTED_SEC = 11.0  # an idle session reports its numbers within 10 s


def measure(place: Place) -> Iterator[Line]:
    """Statements of each worker, with its share of the keeper's, and CPU seconds of the whole farm."""
    window = max(0.5, WINDOW_SEC * min(1.0, place.wish.scale))
    statements, cpu, others = [], [], 0
    with (
        Farm(place, WORKERS) as farm,
        place.connect(farm.schema) as conn,
        place.steps("idle", place.wish.rounds) as step,
    ):
        farm.warm()
        time.sleep(min(REPORTED_SEC, window))
        for _ in range(place.wish.rounds):
            before, burnt = _transactions(conn), _cpu_seconds(farm.processes())
            time.sleep(window)
            per_minute = 60 / window
            statements.append((_transactions(conn) - before - 2) * per_minute / WORKERS)
            cpu.append((_cpu_seconds(farm.processes()) - burnt) * per_minute)
            others = max(others, _number(conn, "neighbours"))
            step()
    note = f"{others} other sessions are counted too" if others else ""
    facts = {"workers": WORKERS, "window_sec": window}
    yield Line("idle", "statements per worker", "a minute", statements, note=note, facts=facts)
    yield Line("idle", f"CPU seconds of {WORKERS} workers", "a minute", cpu, facts=facts)


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def _transactions(conn: db.Connection) -> int:
    conn.execute("SELECT pg_stat_force_next_flush()")  # so our own are in it: this one and the last question
    return _number(conn, "transactions")


def _number(conn: db.Connection, statement: str) -> int:
    row = conn.execute(SQL[statement]).fetchone()
    return int(row[0]) if row else 0
