"""Storms: sessions claim and end at once, beside everything that others may do to the rows. No overlap, no job of a key
before an earlier one, nothing stranded, no deadlock.

A worker notes the start and the end of each of its runs with the key; a job that came back, or that somebody put off,
has no place in the order any more.
"""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
import pytest
from foreign import Foreign
from hands import Worker, until, value

from dataloader.queue import db, lifecycle
from dataloader.queue.enqueue import NewJob, enqueue_many
from dataloader.queue.job import Finish, Job
from dataloader.queue.lifecycle import Ended, Head

PATIENCE = 90.0  # seconds until the storm gives up on jobs that are left
LEFT = "SELECT count(*) FROM dl_jobs WHERE status IN ('queued', 'running')"


@dataclass
class Storm:
    """What the sessions share: who runs which key, and the starts in their order."""

    dsn: str
    seed: int
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: dict[str, UUID] = field(default_factory=dict)
    starts: list[tuple[str, int, UUID]] = field(default_factory=list)
    moved: set[UUID] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def begin(self, lock_key: str, job_id: UUID, number: int) -> None:
        with self.lock:
            if lock_key in self.running:
                self.wrong.append(f"{lock_key} runs twice")
            self.running[lock_key] = job_id
            self.starts.append((lock_key, number, job_id))

    def end(self, lock_key: str) -> None:
        with self.lock:
            self.running.pop(lock_key, None)

    def move(self, *job_ids: UUID) -> None:
        with self.lock:
            self.moved.update(job_ids)

    def out_of_order(self) -> list[tuple[str, int, int]]:
        """Starts of a key after a later one."""
        latest: dict[str, int] = {}
        found = []
        for key, number, job_id in self.starts:
            if job_id not in self.moved:
                if number < latest.get(key, -1):
                    found.append((key, number, latest[key]))
                latest[key] = max(number, latest.get(key, -1))
        return found


def work(storm: Storm, number: int) -> None:
    """A worker: claims some, runs each for up to 2 ms, writes the ends with the next claim; a tenth it hands back."""
    chance = random.Random(f"{storm.seed} {number}")
    worker = Worker(storm.dsn, f"host:{number}:boot")
    ends: dict[UUID, Ended] = {}
    head = Head()
    while not storm.over.is_set():
        most, head = chance.choice([1, 1, 3, 20]), head if chance.random() < 0.5 else Head()
        step = lifecycle.step(worker.session, ["q"], 0.2, most, list(ends.values()), head)
        ends, head = {job_id: ends[job_id] for job_id in step.locked}, step.head or head
        for job in step.jobs:
            storm.begin(job.lock_key, job.job_id, json.loads(job.args_json)["n"])
        for job in step.jobs:
            time.sleep(chance.random() * 0.002)
            ends[job.job_id] = ended(storm, job, is_back=chance.random() < 0.1)
            if chance.random() < 0.1:  # as a heartbeat does, between two claims
                written = lifecycle.finish_some(worker.conn, worker.name, list(ends.values()))
                ends = {job_id: ends[job_id] for job_id in written.locked}
        if not step.jobs and not step.look_again:
            list(worker.conn.notifies(timeout=min(step.due_in or 0.5, 0.5), stop_after=1))
    while ends:
        ends = {
            job_id: ends[job_id]
            for job_id in lifecycle.finish_some(worker.conn, worker.name, list(ends.values())).locked
        }
    worker.conn.close()


def ended(storm: Storm, job: Job, is_back: bool) -> Ended:
    if is_back:
        storm.move(job.job_id)
    storm.end(job.lock_key)
    return Ended(job, Finish("hand_back", "storm") if is_back else Finish("succeed"))


def other_worker(storm: Storm, chance: random.Random, conn: psycopg.Connection[Any], foreign: Foreign) -> None:
    """Another service claims one job by the plain protocol, and finishes it."""
    found = foreign.claim()
    storm.move(*ids(conn, "SELECT job_id FROM dl_job_events WHERE payload ->> 'by' = 'another service'"))
    if found:
        job_id, lock_key = found
        storm.begin(lock_key, job_id, 0)
        time.sleep(chance.random() * 0.002)
        storm.end(lock_key)
        foreign.finish(job_id, lock_key)


def cancel(storm: Storm, chance: random.Random, conn: psycopg.Connection[Any], foreign: Foreign) -> None:
    """An operator, and a service that knows only the column, cancel a head and a random job."""
    lifecycle.request_cancels(conn, some(conn, 1, "random()"), force=False, by="storm")
    of_column = "UPDATE dl_jobs SET cancel_requested = true WHERE job_id = ANY (%s) AND status = 'queued'"
    conn.execute(of_column, (some(conn, 1, chance.choice(["created_at", "random()"])),))


def delete(storm: Storm, chance: random.Random, conn: psycopg.Connection[Any], foreign: Foreign) -> None:
    chosen = some(conn, 2, chance.choice(["created_at", "random()"]))
    conn.execute("DELETE FROM dl_jobs WHERE job_id = ANY (%s) AND status = 'queued'", (chosen,))


def put_off(storm: Storm, chance: random.Random, conn: psycopg.Connection[Any], foreign: Foreign) -> None:
    """A bulk update: many jobs later, at once."""
    chosen = some(conn, 20, chance.choice(["created_at", "random()"]))
    storm.move(*chosen)
    conn.execute(
        "UPDATE dl_jobs SET available_at = now() + interval '50 ms' WHERE job_id IN ("
        " SELECT job_id FROM dl_jobs WHERE job_id = ANY (%s) AND status = 'queued' FOR UPDATE SKIP LOCKED)",
        (chosen,),
    )


def hold(storm: Storm, chance: random.Random, conn: psycopg.Connection[Any], foreign: Foreign) -> None:
    """An open transaction on heads, or on running rows."""
    where = chance.choice(["status = 'queued'", "status = 'running'", "blocked_on = 'key'"])
    with conn.transaction():
        conn.execute(f"SELECT FROM dl_jobs WHERE {where} ORDER BY created_at LIMIT 5 FOR UPDATE SKIP LOCKED")
        time.sleep(chance.random() * 0.05)


DISTURBANCES = {each.__name__: each for each in (other_worker, cancel, delete, put_off, hold)}


def disturb(storm: Storm, name: str) -> None:
    chance = random.Random(f"{storm.seed} {name}")
    foreign = Foreign(storm.dsn, "q", backoff_sec=0.05)
    with db.connect(storm.dsn, name=name, schema="public") as conn:
        while not storm.over.is_set():
            DISTURBANCES[name](storm, chance, conn, foreign)
            time.sleep(chance.random() * 0.02)
    foreign.conn.close()


def some(conn: psycopg.Connection[Any], count: int, order: str) -> list[UUID]:
    return ids(conn, f"SELECT job_id FROM dl_jobs WHERE status = 'queued' ORDER BY {order} LIMIT {count}")


def ids(conn: psycopg.Connection[Any], query: str) -> list[UUID]:
    return [job_id for (job_id,) in conn.execute(query.encode())]


@pytest.mark.long
@pytest.mark.parametrize("disturbances", [(), tuple(DISTURBANCES)], ids=["alone", "disturbed"])
@pytest.mark.parametrize("keys", [2, 6, 60, 1_000])
@pytest.mark.parametrize("seed", [1])
def test_a_storm_breaks_nothing(
    conn: db.Connection, dsn: str, seed: int, keys: int, disturbances: tuple[str, ...]
) -> None:
    storm, jobs = Storm(dsn, seed), min(1_500, 250 * keys)
    enqueue_many(conn, [NewJob("q", "t", f"key {random.randrange(keys)}", {"n": n}) for n in range(jobs)])
    tasks = [*((work, number) for number in range(6)), *((disturb, name) for name in disturbances)]
    with ThreadPoolExecutor(len(tasks)) as pool:
        futures = [pool.submit(task, storm, which) for task, which in tasks]
        try:
            until(lambda: value(conn, LEFT) == 0 or any(future.done() for future in futures), "all to end", PATIENCE)
        finally:
            storm.over.set()
        for future in futures:
            future.result()
    assert (storm.wrong, storm.out_of_order()) == ([], [])
    assert value(conn, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 0
