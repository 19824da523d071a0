"""Run the same messages through four queues, and print what each has cost and what it has left in the shop.

    DL_DB_DSN=postgresql://... python run.py

The database should be a scratch one: the example migrates it, and makes the tables of its shop anew. `dataloader` is
looked for beside this Python.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from orders import SHOP
from produce import produce, traffic

HERE = Path(__file__).parent
DATALOADER = (sys.executable, "-m", "dataloader")
PATIENCE_SEC = 120.0


class Way(NamedTuple):
    """One way to run the messages: the queue's settings, the task, what the producer says."""

    title: str
    queue: str
    task: str
    by_message: bool = False
    with_score: bool = True
    settings: tuple[str, ...] = ()


WAYS = (
    Way("plain queue, a key for each message", "example.plain", "orders.send", by_message=True),
    Way("plain queue, a key for each order", "example.keyed", "orders.send"),
    Way("ordered queue", "example.ordered", "orders.send", settings=("--ordered",)),
    Way("ordered and merged queue", "example.merged", "orders.sync", settings=("--ordered", "--merge")),
)


class Result(NamedTuple):
    """The cost of a way, and the rows that it has left."""

    title: str
    calls: int
    stale: int
    seconds: float


def main() -> None:
    """Read the options, run each way, print a line for each."""
    parser = argparse.ArgumentParser(description="The same messages through four queues of the database DL_DB_DSN.")
    parser.add_argument("--orders", type=int, default=30)
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--wave", type=int, default=50)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if not (dsn := os.environ.get("DL_DB_DSN")):
        sys.exit("set DL_DB_DSN to a scratch database")
    dataloader("migrate")
    waves = traffic(given.orders, given.versions, given.wave, given.seed)
    print(f"{given.orders} orders, {given.versions} messages about each, {given.workers} workers\n")  # noqa: T201
    print(f"{'':<38}{'calls':>8}{'stale orders':>15}{'seconds':>10}", flush=True)  # noqa: T201
    for way in WAYS:
        result = run(dsn, way, waves, given.versions, given.workers)
        line = f"{result.title:<38}{result.calls:>8}{result.stale:>15}{result.seconds:>10.1f}"
        print(line, flush=True)  # noqa: T201


def run(dsn: str, way: Way, waves: list[list[dict[str, Any]]], versions: int, workers: int) -> Result:
    """Run the messages one way; an order is stale whose last version is not what the shop has in the end."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        if waiting(conn, way.queue):
            sys.exit(f"the queue {way.queue} has jobs of an earlier run: use an empty database")
        conn.execute("DROP TABLE IF EXISTS shop_orders, shop_calls, shop_refusals; " + SHOP)
        if way.settings:
            dataloader("queue", "set", way.queue, *way.settings, "--new", "--direct")
        with farm(conn, way.queue, workers):
            began = time.monotonic()
            produce(dsn, waves, way.queue, way.task, way.by_message, way.with_score)
            until(lambda: not waiting(conn, way.queue), "all jobs to end")
            seconds = time.monotonic() - began
        calls = value(conn, "SELECT count(*) FROM shop_calls")
        stale = value(conn, "SELECT count(*) FROM shop_orders WHERE version < %s", versions)
    return Result(way.title, calls, stale, seconds)


def waiting(conn: psycopg.Connection[Any], queue: str) -> int:
    """How many jobs of the queue have not ended."""
    return value(conn, "SELECT count(*) FROM dl_jobs WHERE queue = %s AND status IN ('queued', 'running')", queue)


def value(conn: psycopg.Connection[Any], statement: str, *parameters: Any) -> int:
    """The only value of a statement's only row."""
    row = conn.execute(statement, parameters).fetchone()
    assert row is not None  # noqa: S101  these statements always have a row
    return int(row[0])


def until(question: Any, what: str) -> None:
    """Ask until the answer is true."""
    deadline = time.monotonic() + PATIENCE_SEC
    while not question():
        if time.monotonic() > deadline:
            sys.exit(f"waited {PATIENCE_SEC:g} s for {what}")
        time.sleep(0.05)


def dataloader(*command: str) -> None:
    """Run a command to its end."""
    done = subprocess.run([*DATALOADER, *command], cwd=HERE, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"dataloader {' '.join(command)} failed: {done.stderr or done.stdout}")


@contextmanager
def farm(conn: psycopg.Connection[Any], queue: str, workers: int) -> Iterator[None]:
    """A farm for this queue, with this folder's pipelines; it drains at the end."""
    settings = {"DL_PIPELINES": "orders", "WORKERS_JSON": json.dumps([{"queue": queue, "concurrency": workers}])}
    log = tempfile.TemporaryFile()  # noqa: SIM115  the farm has it until it ends
    program = subprocess.Popen([*DATALOADER, "workers"], cwd=HERE, env=os.environ | settings, stdout=log, stderr=log)
    try:
        ready = "SELECT count(*) FROM dl_workers WHERE queue = %s AND state = 'idle'"
        until(lambda: program.poll() is not None or value(conn, ready, queue) >= workers, "the workers to start")
        if program.poll() is not None:
            log.seek(0)
            sys.exit(f"the farm has not started: {log.read().decode(errors='replace')}")
        yield
    finally:
        program.send_signal(signal.SIGTERM)
        program.wait(PATIENCE_SEC)


if __name__ == "__main__":
    main()
