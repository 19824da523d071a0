"""The table of all figures: FIGURES. A figure yields its lines; README.md says what each measures.

Most figures are drains (DRAINS): a farm empties a queue, beside another farm or the bare limit.
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPConnection
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import dataloader
from bench import bare, claim
from bench.claim import KINDS
from bench.pipelines import RECORD, Mark, rounds_for
from bench.place import PATIENCE, SQL, BenchError, Farm, Place, add, answer, api, await_drained, clear, new_jobs, rate
from bench.results import Line, disorder, percentile
from dataloader.queue import db, operations
from dataloader.queue.enqueue import enqueue

PREFETCH = 200


@dataclass(frozen=True, slots=True)
class Drain:
    """`workers` that claim `prefetch` jobs at a time empty a queue; the jobs have `keys` keys, or one each.

    The workers are warm and wait; then one commit adds all jobs. `kind` is the queue's, of KINDS; with `batch`, a call
    gets the jobs of so many keys. `young`: the farm starts on jobs that wait in a table which has just been filled for
    the first time; "analysed": the bench has analysed it.
    """

    jobs: int
    workers: int
    prefetch: int = 1
    task: str = "bench.noop"
    keys: int = 0
    kind: str = "plain"
    batch: int = 0
    young: str = ""


class Row(NamedTuple):
    """A line of a figure: our drain, the other side, and the least ratio; a bare side gets workers and jobs."""

    figure: str
    name: str
    ours: Drain
    bare: Drain | Callable[[Place, int, int], float]
    least: float | None
    note: str = ""


YOUNG = Drain(20_000, 2, PREFETCH, young="as it is")
MARKS_64 = Drain(10_000, 2, PREFETCH, "bench.mark", keys=64)
FIVE = Drain(20_000, 5, PREFETCH)
BURNS = "jobs of 20 ms, 2 workers"
IN_KEYS = Drain(20_000, 5, PREFETCH, keys=1_000)
PLAIN = "bare: a plain queue"
DRAINS = (
    *(Row("drain", f"one by one, {n} workers", Drain(5_000, n), bare.one_by_one, 0.9) for n in (1, 2, 4)),
    *(Row("drain", f"prefetch 200, {n} workers", Drain(20_000, n, PREFETCH), bare.in_batches, 0.9) for n in (1, 2, 4)),
    Row("drain", "a fresh farm, 2 workers", YOUNG, replace(YOUNG, young="analysed"), 0.9, "bare: the same, analysed"),
    Row("keys", "64 keys, 2 workers", MARKS_64, replace(MARKS_64, keys=0), 0.7, "in order, none overlapped"),
    Row("kinds", "ordered, a key a call, 5 workers", replace(FIVE, kind="ordered", batch=1), FIVE, 0.7, PLAIN),
    Row("kinds", "ordered, 10 keys a call, 5 workers", replace(FIVE, kind="ordered", batch=10), FIVE, 0.7, PLAIN),
    Row("kinds", "merged, 1,000 keys, 5 workers", replace(IN_KEYS, kind="merged", batch=1), IN_KEYS, 0.7, PLAIN),
    Row("kinds", "fair, 5 workers", replace(FIVE, kind="fair"), FIVE, 0.9, PLAIN),
    Row("cpu", BURNS, Drain(400, 2, task="bench.burn"), bare.burning, 0.96),
    Row("cpu", f"{BURNS}, prefetch 200", Drain(400, 2, PREFETCH, "bench.burn"), bare.burning, 0.96),
)
_young = count()


def drains(figure: str, place: Place) -> Iterator[Line]:
    """The lines of DRAINS that this figure has."""
    for row in DRAINS:
        if row.figure == figure:
            jobs = max(place.scaled(row.ours.jobs, least=100), row.ours.keys * 2) // 4 * 4
            side = (
                partial(_rate, place, row.bare)
                if isinstance(row.bare, Drain)
                else partial(row.bare, place, row.ours.workers)
            )
            ours, others = place.in_turns(partial(_rate, place, row.ours, jobs), partial(side, jobs))
            yield Line(figure, row.name, "jobs/s", ours, others, row.least, note=row.note)


def _rate(place: Place, drain: Drain, jobs: int) -> float:
    """Jobs/s of a new farm."""
    schema, task = place.queue(f"young_{next(_young)}" if drain.young else drain.kind), drain.task
    with ExitStack() as stack:
        conn = stack.enter_context(place.connect(schema))
        if drain.kind != "plain":
            task = "bench.batch" if drain.batch else task
            operations.set_order(conn, "bench", "bench", **KINDS[drain.kind], batch=drain.batch or None)
        if drain.young:
            add(conn, jobs)
            if drain.young == "analysed":
                conn.execute("ANALYZE dl_jobs")
        farm = stack.enter_context(Farm(place, drain.workers, drain.prefetch, schema))
        if drain.young:
            await_drained(conn, farm.check)
            return rate(conn, jobs)
        farm.warm(conn, task if drain.batch else "bench.noop")
        args = {"burn": rounds_for(bare.BURN_SEC)} if task == "bench.burn" else {}
        share = "tenant" if drain.kind == "fair" else ""
        farm.run(conn, jobs, task=task, keys=drain.keys, share=share, **args)
        marks = farm.noted()
        if drain.keys and (faults := disorder([(mark.number % drain.keys, *mark) for mark in marks])):
            raise BenchError(f"{len(faults)} jobs ran out of order or side by side: {faults[0]}")
        return rate(conn, jobs)


def latency(place: Place) -> Iterator[Line]:
    """From the commit of an insert to the start of its job on an idle farm, beside a bare LISTEN loop.

    Farm and loop run all the time, and take turns. The clock starts right before COMMIT is sent. It stops when the
    job's function begins, or when the bare loop has its row. The bare loop's table has the contract's triggers.
    """
    samples, schema = place.scaled(200, least=10), place.bare(triggers=True)
    fifo = place.folder / "latency"
    os.mkfifo(fifo)
    with ExitStack() as stack:
        pipe = os.open(fifo, os.O_RDWR)  # also for writing: the pipe has no end while writers come and go
        stack.callback(os.close, pipe)
        farm = stack.enter_context(Farm(place, 2, marks=fifo.name))
        conns = [stack.enter_context(place.connect(each)) for each in (farm.schema, schema)]
        stack.enter_context(bare.listener(place.dsn_of(schema), fifo))
        farm.warm(conns[0])
        _latency_ms(conns[0], pipe, 0)
        rounds: list[list[list[float]]] = []
        for _ in range(place.rounds):
            pairs = [[_latency_ms(conn, pipe, n) for conn in conns] for n in range(samples)]
            rounds.append([list(side) for side in zip(*pairs, strict=True)])
    for percent, most in ((50, 1.3), (90, None), (99, 1.5)):
        ours, others = ([percentile(each[at], percent) for each in rounds] for at in (0, 1))
        yield Line("latency", f"commit to start, p{percent}", "ms", ours, others, most=most)


def _latency_ms(conn: db.Connection, pipe: int, number: int) -> float:
    time.sleep(random.uniform(0.02, 0.03))  # all workers wait again, and no pause is in step with a timer
    conn.execute("BEGIN")
    conn.execute(SQL["insert_one"], {"n": number})
    sent = time.monotonic()
    conn.execute("COMMIT")
    readable, _, _ = select.select([pipe], [], [], PATIENCE)
    mark = Mark(*RECORD.unpack(os.read(pipe, RECORD.size))) if readable else None
    if mark is None or mark.number != number:
        raise BenchError(f"job {number} was not started, but {mark}")
    return (mark.start - sent) * 1_000


def handover(place: Place) -> Iterator[Line]:
    """From the end of a job to the start of the next one of its key, by the jobs' own clocks."""
    jobs, rounds = place.scaled(300, least=10), []
    for _ in range(place.rounds):
        with place.connect(place.queue()) as conn, Farm(place, 2) as farm:
            farm.warm(conn)
            # Long enough for the other worker to wait for the key.
            farm.run(conn, jobs, task="bench.mark", keys=1, sleep=0.005)
            runs = sorted(mark[1:] for mark in farm.noted())
            clear(conn)
        gaps = [after[0] - before[1] for before, after in pairwise(runs)]
        if len(gaps) != jobs - 1 or min(gaps) < 0:
            raise BenchError(f"{len(runs)} of {jobs} jobs of one key ran, the closest {min(gaps):.6f} s apart")
        rounds.append(gaps)
    for percent, most in ((50, 3.0), (99, None)):
        ours = [percentile(gaps, percent) * 1_000 for gaps in rounds]
        yield Line("handover", f"next job of a hot key, p{percent}", "ms", ours, most=most)


def adding(place: Place) -> Iterator[Line]:
    """Jobs/s into the queue, beside one COPY of the same rows into the contract's tables, without a journal.

    Before the clock starts, both sides build their input in memory. In bulk, the time includes the commit.
    """
    jobs, singles = place.scaled(10_000, least=100), place.scaled(1_000, least=20)
    with api(place) as port, place.connect(place.queue()) as conn, place.connect(place.bare()) as bare_conn:
        _post(HTTPConnection("127.0.0.1", port, timeout=60), "jobs/trigger", _body(0))
        clear(conn)
        clear(bare_conn)
        ways: dict[str, tuple[int, Callable[[], float]]] = {
            "single, Python": (singles, partial(_single, conn, singles)),
            "single, API, 4 clients": (singles, partial(_by_api, port, singles)),
            "bulk, Python": (jobs, partial(_bulk, conn, jobs, place.queue())),
            "bulk, API": (jobs, partial(_bulk_by_api, port, jobs)),
            "bare": (jobs, partial(_copy, bare_conn, jobs)),
        }

        def stocked(name: str) -> float:
            (number, way), where = ways[name], bare_conn if name == "bare" else conn
            speed = number / way()
            if (added := answer(where, "unfinished")) != number:
                raise BenchError(f"{added} jobs were in the queue after {number} had been enqueued")
            clear(where)
            return speed

        samples = dict(zip(ways, place.in_turns(*(partial(stocked, name) for name in ways)), strict=True))
    copied, least = samples.pop("bare"), {"bulk, Python": 0.6, "bulk, API": 0.25}
    for name, sample in samples.items():
        yield Line("enqueue", name, "jobs/s", sample, copied, least.get(name))


def _timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _single(conn: db.Connection, jobs: int) -> float:
    new = new_jobs(jobs)
    return _timed(lambda: [enqueue(conn, job) for job in new])


def _bulk(conn: db.Connection, jobs: int, schema: str) -> float:
    new = new_jobs(jobs)

    def bulk() -> None:
        with conn.transaction():
            dataloader.enqueue_many(conn, new, schema=schema)

    return _timed(bulk)


def _copy(conn: db.Connection, jobs: int) -> float:
    rows = "".join(f'{uuid4()}\tbench\tbench.noop\t{{"n": {n}}}\tkey-{n}\n' for n in range(jobs)).encode()

    def copy() -> None:
        with conn.cursor().copy(SQL["copy"]) as out:
            out.write(rows)

    return _timed(copy)


def _by_api(port: int, jobs: int) -> float:
    """The seconds in which four clients trigger these jobs, each job by a request of its own."""

    def client(first: int) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        for number in range(first, jobs, 4):
            _post(connection, "jobs/trigger", _body(number))

    with ThreadPoolExecutor(4) as pool:
        return _timed(lambda: list(pool.map(client, range(4))))


def _bulk_by_api(port: int, jobs: int) -> float:
    body = {"jobs": [_body(number) for number in range(jobs)]}
    return _timed(lambda: _post(HTTPConnection("127.0.0.1", port, timeout=60), "jobs/batch", body))


def _body(number: int) -> dict[str, Any]:
    return {"queue": "bench", "task": "bench.noop", "lock_key": f"key-{number}", "args": {"n": number}}


def _post(connection: HTTPConnection, path: str, body: dict[str, Any]) -> None:
    connection.request("POST", f"/api/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if (text := reply.read()) and reply.status != 200:
        raise BenchError(f"the API answered {reply.status}: {text[:500].decode('utf-8', 'replace')}")


def idle(place: Place) -> Iterator[Line]:
    """Statements and CPU seconds a minute of four workers without jobs.

    The bench reads the sessions' last statements fifty times a second; two within 20 ms count as one.
    """
    workers, window = 4, max(0.5, 60.0 * min(1.0, place.scale))
    statements, cpu = [], []
    with place.connect(place.queue()) as conn, Farm(place, workers) as farm:
        farm.warm(conn)
        for _ in range(place.rounds):
            burnt, until = _cpu_sec(farm), time.monotonic() + window
            before = seen = set(conn.execute(SQL["last_statements"]).fetchall())
            while time.monotonic() < until:
                time.sleep(0.02)
                seen = seen | set(conn.execute(SQL["last_statements"]).fetchall())
            statements.append((len(seen) - len(before)) * 60 / window / workers)
            cpu.append((_cpu_sec(farm) - burnt) * 60 / window)
    yield Line("idle", "statements per worker", "a minute", statements)
    yield Line("idle", f"CPU seconds of {workers} workers", "a minute", cpu)


def _cpu_sec(farm: Farm) -> float:
    times = [process.cpu_times() for process in farm.processes()]
    return sum(each.user + each.system for each in times)


def memory(place: Place) -> Iterator[Line]:
    """The memory that a further idle worker adds to a farm, as PSS, which divides shared pages among processes."""
    few, more = 2, 4
    rounds = []
    for _ in range(place.rounds):
        small, large = _farm_mb(place, few), _farm_mb(place, few + more)
        rounds.append([(large[0] - small[0]) / more, (large[1] - small[1]) / more, small[1]])
    fresh, warm, whole = ([each[at] for each in rounds] for at in range(3))
    yield Line("memory", "each further idle worker, new", "MB PSS", fresh, most=10)
    yield Line("memory", "each further idle worker, after 100 jobs", "MB PSS", warm, most=10)
    yield Line("memory", f"a farm of {few} workers", "MB PSS", whole, note="with supervisor and keeper")


def _farm_mb(place: Place, workers: int) -> tuple[float, float]:
    """MB of a whole farm, right after its start and after some jobs."""

    def pss_mb() -> float:
        rollups = [Path(f"/proc/{process.pid}/smaps_rollup").read_text("ascii") for process in farm.processes()]
        return sum(int(kb) for rollup in rollups for kb in re.findall(r"(?m)^Pss:\s+(\d+) kB$", rollup)) * 1_024 / 1e6

    with place.connect(place.queue()) as conn, Farm(place, workers) as farm:
        new = pss_mb()
        farm.warm(conn)
        return new, pss_mb()


FIGURES: dict[str, Callable[[Place], Iterator[Line]]] = {
    "drain": partial(drains, "drain"),
    "keys": partial(drains, "keys"),
    "kinds": partial(drains, "kinds"),
    "claim": claim.behind_backlogs,
    "life": claim.life,
    "latency": latency,
    "handover": handover,
    "cpu": partial(drains, "cpu"),
    "enqueue": adding,
    "idle": idle,
    "memory": memory,
}
