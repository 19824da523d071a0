"""logs: the cost of the logs of jobs.

A job that writes 100 lines a second beside one that writes nothing for as long, in CPU seconds of the farm and KB of
WAL (of the whole server); then short jobs that write nothing, with logs on and off. The best of the rounds counts: all
else that the machine does only adds to a round.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from dataloader.bench.farm import Farm
from dataloader.bench.line import Line
from dataloader.bench.place import Place, add, await_drained, clear
from dataloader.queue import db

LINES_A_SEC = 100
RUN_SEC = 10.0
QUIET_JOBS = 4_000


def measure(place: Place) -> Iterator[Line]:
    """Two lines for the job that writes, one for the jobs that do not."""
    seconds = max(1.0, RUN_SEC * min(1.0, place.wish.scale))
    facts = {"lines_a_sec": LINES_A_SEC, "run_sec": seconds}
    writing, silent = _runs(place, seconds)
    for unit, of in (("CPU seconds of the farm", 0), ("KB of WAL", 1)):
        ours, others = (min(sample[of] for sample in side) for side in (writing, silent))
        name = f"a run of {seconds:g} s that writes {LINES_A_SEC} lines a second, and one that writes nothing"
        yield Line("logs", name, unit, [ours], [others], facts=facts)
    jobs = place.wish.scaled(QUIET_JOBS, least=100)
    rates: dict[str, list[float]] = {"256": [], "0": []}
    with place.steps("logs: jobs that write nothing", 2 * place.wish.rounds) as step:
        for number in range(place.wish.rounds):
            for kept in [*rates][:: -1 if number % 2 else 1]:
                rates[kept].append(_rate(place, jobs, kept))
                step()
    name = f"{jobs} jobs that write nothing, with DL_JOB_LOG_KB of 256 and of 0"
    yield Line("logs", name, "jobs/s", [max(rates["256"])], [max(rates["0"])], facts={"jobs": jobs})


def _runs(place: Place, seconds: float) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """CPU seconds and KB of WAL of each run that writes, and of each that does not."""
    sides: tuple[list[tuple[float, float]], list[tuple[float, float]]] = [], []
    with (
        Farm(place, 1) as farm,
        place.connect(farm.schema) as conn,
        place.steps("logs", 2 * place.wish.rounds) as step,
    ):
        farm.warm()
        for number in range(place.wish.rounds):
            for lines, side in [(LINES_A_SEC, sides[0]), (0, sides[1])][:: -1 if number % 2 else 1]:
                side.append(_cost(farm, conn, lines, seconds))
                step()
    return sides


def _cost(farm: Farm, conn: db.Connection, lines: int, seconds: float) -> tuple[float, float]:
    clear(conn)
    conn.execute("CHECKPOINT")  # or one side alone pays for the first images of pages
    cpu, wal = _cpu_sec(farm), _wal(conn)
    add(conn, 1, task="bench.writes", lines_a_sec=lines, sec=seconds)
    await_drained(conn, farm.check)
    return _cpu_sec(farm) - cpu, (_wal(conn) - wal) / 1024


def _cpu_sec(farm: Farm) -> float:
    times = [process.cpu_times() for process in farm.processes()]
    return sum(each.user + each.system for each in times)


def _wal(conn: db.Connection) -> float:
    row = conn.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
    return float(row[0]) if row else 0.0


def _rate(place: Place, jobs: int, kept: str) -> float:
    with Farm(place, 1, settings={"DL_JOB_LOG_KB": kept}) as farm, place.connect(farm.schema) as conn:
        farm.warm()
        began = time.perf_counter()
        add(conn, jobs)
        await_drained(conn, farm.check)
        taken = time.perf_counter() - began
        clear(conn)
    return jobs / taken
