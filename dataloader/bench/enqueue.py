"""enqueue: jobs per second into the queue, one by one, in bulk and through the API under gunicorn.

The bare limit is one COPY of the same rows into the contract's tables, without a journal. Before the clock starts,
both sides build their input in memory: the text of the COPY, the NewJobs, the requests' bodies. In bulk, the time of
both sides includes the commit; ours also includes the checks of the fields, the new ids and the journal.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from uuid import uuid4

import dataloader
from dataloader.bench.farm import Api
from dataloader.bench.line import Line, Must
from dataloader.bench.place import SQL, BenchError, Place, clear
from dataloader.queue import db, enqueue

BULK = 10_000
SINGLE = 1_000
CLIENTS = 4  # concurrent clients of the API, for single jobs
_MUST = {"bulk, Python": Must(least=0.6, aim=0.9), "bulk, API": Must(least=0.25, aim=0.9)}
Way = Callable[[db.Connection], float]


def measure(place: Place) -> Iterator[Line]:
    """A line for each way to enqueue."""
    jobs, singles = place.wish.scaled(BULK, least=100), place.wish.scaled(SINGLE, least=20)
    copied: list[float] = []
    with (
        Api(place) as api,
        place.connect(place.queue()) as conn,
        place.connect(place.bare()) as bare_conn,
        place.steps("enqueue", place.wish.rounds) as step,
    ):
        ways = _ways(conn, api, jobs, singles)
        rates: dict[str, list[float]] = {name: [] for name in ways}
        clear(bare_conn)
        for _ in range(place.wish.rounds):
            copied.append(_copy(bare_conn, jobs))
            for name, way in ways.items():
                rates[name].append(way(conn))
                _take_stock(conn, jobs if name.startswith("bulk") else singles)
            step()
    for name, sample in rates.items():
        facts = {"jobs": jobs if name.startswith("bulk") else singles, "bare": "COPY", "tables": place.wish.bare}
        yield Line("enqueue", name, "jobs/s", sample, copied, _MUST.get(name), facts=facts)


def _ways(conn: db.Connection, api: Api, jobs: int, singles: int) -> dict[str, Way]:
    """The ways to enqueue, the API warmed up by one request."""
    _api_bulk(api, 1)
    clear(conn)
    return {
        "single, Python": partial(_single, jobs=singles),
        f"single, API, {CLIENTS} clients": lambda _: api_single(api, singles),
        "bulk, Python": partial(_bulk, partial(dataloader.enqueue_many, schema=api.schema), jobs=jobs),
        "bulk, API": lambda _: _api_bulk(api, jobs),
    }


def _rate(jobs: int, action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return jobs / (time.perf_counter() - start)


def _single(conn: db.Connection, jobs: int) -> float:
    new = _new_jobs(jobs)
    return _rate(jobs, lambda: [enqueue.enqueue(conn, job) for job in new])


def _bulk(many: Callable[[db.Connection, list[enqueue.NewJob]], Any], conn: db.Connection, jobs: int) -> float:
    new = _new_jobs(jobs)

    def add() -> None:
        with conn.transaction():
            many(conn, new)

    return _rate(jobs, add)


def api_single(api: Api, jobs: int) -> float:
    """The jobs/s that CLIENTS clients trigger, each job by a request of its own."""
    each = jobs // CLIENTS

    def client(number: int) -> None:
        connection = _connection(api)
        for job in range(number * each, jobs if number == CLIENTS - 1 else (number + 1) * each):
            _require(_post(connection, "/api/v1/jobs/trigger", _encoded(_body(job))))

    with ThreadPoolExecutor(CLIENTS) as pool:
        return _rate(jobs, lambda: list(pool.map(client, range(CLIENTS))))


def _api_bulk(api: Api, jobs: int) -> float:
    body = _encoded({"jobs": [_body(number) for number in range(jobs)]})
    connection = _connection(api)
    return _rate(jobs, lambda: _require(_post(connection, "/api/v1/jobs/batch", body)))


def _copy(conn: db.Connection, jobs: int) -> float:
    rows = "".join(f'{uuid4()}\tbench\tbench.noop\t{{"n": {n}}}\tkey-{n}\n' for n in range(jobs)).encode()

    def copy() -> None:
        with conn.cursor().copy(SQL["copy"]) as out:
            out.write(rows)

    rate = _rate(jobs, copy)
    _take_stock(conn, jobs)
    return rate


def _take_stock(conn: db.Connection, jobs: int) -> None:
    """Check the number of jobs in the queue, and remove them."""
    row = conn.execute(SQL["unfinished"]).fetchone()
    if row != (jobs,):
        raise BenchError(f"{row and row[0]} jobs were in the queue after {jobs} had been enqueued")
    clear(conn)


def _new_jobs(jobs: int) -> list[enqueue.NewJob]:
    return [enqueue.NewJob("bench", "bench.noop", f"key-{n}", {"n": n}) for n in range(jobs)]


def _body(number: int) -> dict[str, Any]:
    return {"queue": "bench", "task": "bench.noop", "lock_key": f"key-{number}", "args": {"n": number}}


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _connection(api: Api) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", api.port, timeout=60)


def _post(connection: http.client.HTTPConnection, path: str, body: bytes) -> tuple[int, bytes]:
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def _require(answer: tuple[int, bytes]) -> None:
    if answer[0] != 200:
        raise BenchError(f"the API answered {answer[0]}: {answer[1][:500].decode('utf-8', 'replace')}")
