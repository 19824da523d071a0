"""The costs that `capacity` needs, measured on the user's own database in about a minute.

A farm drains jobs that do nothing, in both ways to claim, with 1, 3 and 9 workers. Then come triggers, arrivals of
single jobs, renewals of leases, sessions that listen, and idle workers. The server's CPU time is read where the server
is on this machine. Elsewhere it is what explains the rates (capacity.unread_demand); of smaller costs the whole time of
a statement counts, and those that no time shows are ELSEWHERE.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from dataloader.bench import server_cpu
from dataloader.bench.capacity import IN_BATCHES, ONE_BY_ONE, Costs, Way, unread_demand
from dataloader.bench.enqueue import api_single
from dataloader.bench.farm import Api, Farm
from dataloader.bench.memory import pss_mb
from dataloader.bench.place import SQL, Place, add, await_drained, clear, drained
from dataloader.queue import db, enqueue, lifecycle
from dataloader.queue.job import Job

WORKERS = (1, 3, 9)
ARRIVE_AT = 3  # workers that wait; of those who hear of a job, one more than needed looks for it
JOBS = {ONE_BY_ONE: 3_000, IN_BATCHES: 30_000}
TRIGGERS = 600
ARRIVALS_A_SEC = 50.0
ARRIVALS_SEC = 6.0
BEATS = 1_500
LOOKS = 1_000
LISTENERS = 50
IDLE_SEC = 4.0
ELSEWHERE = {"arrival_sec": 3e-3, "listen_sec": 30e-6, "idle_sec": 200e-6}  # as on the machine of docs/scaling.md


@dataclass
class Reading:
    """The cost of a block of code: seconds by the clock, CPU seconds, bytes of WAL.

    The CPU seconds are of the server (None: it is elsewhere) and of a farm.
    """

    seconds: float = 0.0
    server_sec: float | None = None
    farm_sec: float = 0.0
    wal_bytes: float = 0.0

    def server_or(self, otherwise: float) -> float:
        """The CPU seconds of the server, or what is to stand for them."""
        return otherwise if self.server_sec is None else self.server_sec


class Meter:
    """Reads clocks around a block."""

    def __init__(self, conn: db.Connection) -> None:
        self._conn = conn
        self._server = server_cpu.of_server(conn)

    @contextmanager
    def reading(self, program: Farm | Api | None = None) -> Iterator[Reading]:
        """The reading is complete at the end of the block."""
        read, before = Reading(), self._look(program)
        yield read
        after = self._look(program)
        read.seconds, read.wal_bytes, read.farm_sec, server = (
            late - early for late, early in zip(after, before, strict=True)
        )
        read.server_sec = server if self._server else None

    def _look(self, program: Farm | Api | None) -> tuple[float, float, float, float]:
        (wal,) = self._conn.execute(SQL["wal"]).fetchone() or (0,)
        farm = server_cpu.of_processes(program.processes()) if program else 0.0
        return time.perf_counter(), float(wal), farm, self._server() if self._server else 0.0


@dataclass(frozen=True, slots=True)
class Drain:
    """A farm empties its queue: its jobs/s, and for each job the CPU seconds, the bytes of WAL, and the bytes kept."""

    jobs_a_sec: float
    server_sec: float | None
    worker_sec: float
    wal_bytes: float
    add_sec: float
    kept_bytes: float
    journal_rows: float


def measure(place: Place, cores: int) -> Costs:
    """The costs of a server that has `cores` processors."""
    with place.connect(place.queue()) as conn, place.steps("capacity", len(JOBS) * len(WORKERS) + len(_PARTS)) as step:
        meter = Meter(conn)
        drains: dict[str, dict[int, list[Drain]]] = {}
        for name in JOBS:
            drains[name] = {}
            for workers in WORKERS:
                drains[name][workers] = [drain(place, conn, meter, name, workers)]
                step()
        found: dict[str, Any] = {}
        for part in _PARTS:
            found |= part(place, conn, meter)
            clear(conn)
            step()
    return Costs(cores, {name: way(drains[name], cores) for name in JOBS}, **_of_drains(drains), **found)


def _of_drains(drains: dict[str, dict[int, list[Drain]]]) -> dict[str, float]:
    single, many = drains[ONE_BY_ONE][WORKERS[-1]][0], drains[IN_BATCHES][WORKERS[0]][0]
    return {"add_sec": many.add_sec, "kept_bytes": single.kept_bytes, "journal_rows": single.journal_rows}


# --- drains ---


def drain(place: Place, conn: db.Connection, meter: Meter, name: str, workers: int) -> Drain:
    """A new farm, warmed up, empties the queue of jobs that do nothing, by one way to claim."""
    prefetch, jobs = place.wish.prefetch if name == IN_BATCHES else 1, place.wish.scaled(JOBS[name], least=200)
    with Farm(place, workers, prefetch) as farm:
        farm.warm()
        before = _size(conn)
        with ExitStack() as stack:
            with conn.transaction():  # until it ends no worker sees a job, so the readings do not mix
                with meter.reading() as added:
                    add(conn, jobs)
                read = stack.enter_context(meter.reading(farm))
            await_drained(conn, farm.check)
        found = Drain(
            jobs / drained(conn, jobs),
            read.server_sec and read.server_sec / jobs,
            read.farm_sec / jobs,
            (added.wal_bytes * (name == IN_BATCHES) + read.wal_bytes) / jobs,
            added.server_or(added.seconds) / jobs,
            **_left(conn, jobs, before),
        )
        clear(conn)
    return found


def way(drains: Mapping[int, Sequence[Drain]], cores: int) -> Way:
    """PURE: the costs of one way to claim, as the medians of drains with some numbers of workers."""
    rates = {workers: statistics.median(one.jobs_a_sec for one in some) for workers, some in drains.items()}
    worker = {workers: statistics.median(one.worker_sec for one in some) for workers, some in drains.items()}
    read = {workers: [one.server_sec for one in some if one.server_sec is not None] for workers, some in drains.items()}
    server = {workers: statistics.median(some) for workers, some in read.items() if some}
    last = max(rates)
    if not server:
        server, worker = {last: unread_demand(rates[min(rates)], last, rates[last], cores)}, {last: 0.0}
    return Way(rates, server, worker, statistics.median(one.wal_bytes for one in drains[last]))


def _left(conn: db.Connection, jobs: int, before: int) -> dict[str, float]:
    """The rows and bytes that a job keeps in the tables after its end."""
    (rows,) = conn.execute(SQL["journal_rows"]).fetchone() or (0,)
    return {"kept_bytes": (_size(conn) - before) / jobs, "journal_rows": rows / jobs}


def _size(conn: db.Connection) -> int:
    (size,) = conn.execute(SQL["size"]).fetchone() or (0,)
    return int(size)


def arrivals(place: Place, conn: db.Connection, meter: Meter) -> float | None:
    """CPU seconds of the server for a job that comes alone, from its trigger to its end; None: it is elsewhere."""
    jobs = place.wish.scaled(int(ARRIVALS_SEC * ARRIVALS_A_SEC), least=20)
    with Farm(place, ARRIVE_AT) as farm:
        farm.warm()
        with meter.reading() as read:
            _arrive(conn, jobs)
            await_drained(conn, farm.check)
    clear(conn)
    return None if read.server_sec is None else read.server_sec / jobs


def _arrive(conn: db.Connection, jobs: int) -> None:
    began = time.perf_counter()
    for number in range(jobs):
        time.sleep(max(0.0, began + number / ARRIVALS_A_SEC - time.perf_counter()))
        enqueue.enqueue(conn, enqueue.NewJob("bench", "bench.noop", f"key-{number}"))


def _idle(place: Place, conn: db.Connection, meter: Meter) -> dict[str, float | None]:
    """The cost of workers that wait for jobs, and the memory of their sessions."""
    with Farm(place, WORKERS[-1]) as farm:
        farm.warm()
        with meter.reading() as read:
            time.sleep(place.wish.scaled(int(IDLE_SEC * 10), least=5) / 10)
        memory = _session_bytes(conn)
    idle = read.server_or(ELSEWHERE["idle_sec"] * WORKERS[-1] * read.seconds)
    return {"idle_sec": idle / read.seconds / WORKERS[-1], "session_bytes": memory}


def _session_bytes(conn: db.Connection) -> float | None:
    """The memory of a worker's session in the server, as PSS; None where it cannot be read."""
    pids = [pid for (pid,) in conn.execute(SQL["worker_sessions"])]
    try:
        each = [pss_mb(Path(f"/proc/{pid}/smaps_rollup").read_text("ascii")) for pid in pids]
    except (OSError, ValueError):
        return None
    return statistics.mean(each) * 1e6 if each else None


# --- the rest ---


def _triggers(place: Place, conn: db.Connection, meter: Meter) -> dict[str, float]:
    """Triggers, each in a transaction of its own; the wait of the commit is its time beside that of a SELECT."""
    jobs = place.wish.scaled(TRIGGERS, least=50)
    commits = []
    with meter.reading() as read:
        for number in range(jobs):
            conn.execute("BEGIN")
            enqueue.enqueue(conn, enqueue.NewJob("bench", "bench.noop", f"key-{number}"))
            commits.append(_seconds(conn, "COMMIT"))
    trips = [_seconds(conn, "SELECT 1") for _ in range(jobs)]
    trip = statistics.median(trips)
    return {
        "trigger_sec": read.server_or(read.seconds - sum(commits)) / jobs,
        "trigger_wal": read.wal_bytes / jobs,
        "commit_sec": max(1e-6, statistics.median(commits) - trip),
    }


def _seconds(conn: db.Connection, statement: str) -> float:
    began = time.perf_counter()
    conn.execute(statement)
    return time.perf_counter() - began


def _by_api(place: Place, conn: db.Connection, meter: Meter) -> dict[str, float]:
    jobs = place.wish.scaled(TRIGGERS, least=50)
    with Api(place) as api:
        api_single(api, 20)
        with meter.reading(api) as read:
            api_single(api, jobs)
    return {"api_sec": read.farm_sec / jobs}


def _beats(place: Place, conn: db.Connection, meter: Meter) -> dict[str, float]:
    """Renewals of the leases of some running jobs, as their workers' heartbeats make them."""
    conn.execute(SQL["hold"], {"key": "beat", "keys": 20})
    runs = [_run(*row) for row in conn.execute(SQL["take_held"])]
    beats = place.wish.scaled(BEATS, least=100)
    before = _size(conn)
    with meter.reading() as read:
        for number in range(beats):
            lifecycle.beat(conn, [runs[number % len(runs)]], None, True)
    size = (_size(conn) - before) / beats
    return {
        "beat_sec": read.server_or(read.seconds) / beats,
        "beat_wal": read.wal_bytes / beats,
        "beat_bytes": max(0.0, size),
    }


def _run(job_id: Any, attempt: int, claimed_by: str) -> Job:
    return Job(job_id, "held", "bench.noop", "{}", None, "beat", "", attempt, 5, 60, None, 1, claimed_by)


def _listeners(place: Place, conn: db.Connection, meter: Meter) -> dict[str, float]:
    """Arrivals beside sessions that listen, and without them."""
    alone = arrivals(place, conn, meter)
    if alone is None:
        return {name: ELSEWHERE[name] for name in ("arrival_sec", "listen_sec")}
    with listening(place, LISTENERS):
        beside = arrivals(place, conn, meter) or alone
    return {"arrival_sec": alone, "listen_sec": max(1e-7, (beside - alone) / LISTENERS), "look_sec": 0.0}


_PARTS: tuple[Callable[[Place, db.Connection, Meter], dict[str, Any]], ...] = (
    _listeners,
    _idle,
    _triggers,
    _by_api,
    _beats,
)


@contextmanager
def listening(place: Place, sessions: int) -> Iterator[None]:
    """So many sessions that listen and read what they hear."""
    over = threading.Event()
    with ExitStack() as stack:
        conns = [stack.enter_context(_listener(place)) for _ in range(sessions)]
        reader = threading.Thread(target=_read, args=(conns, over), daemon=True)
        reader.start()
        try:
            yield
        finally:
            over.set()
            reader.join()


def _listener(place: Place) -> psycopg.Connection[Any]:
    conn = psycopg.connect(place.dsn, autocommit=True)
    conn.execute(f"LISTEN {lifecycle.JOBS_CHANNEL}")
    return conn


def _read(conns: list[psycopg.Connection[Any]], over: threading.Event) -> None:
    while not over.wait(0.05):
        for conn in conns:
            list(conn.notifies(timeout=0))
