"""A random graph of jobs, worked off by several threads, each of which ends its jobs in every way that there is.

Every job begins after its parents have let it go, and no child is left waiting. Each `on_parent_failure` is obeyed.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from random import Random
from time import monotonic
from typing import Any
from uuid import UUID

import psycopg
from foreign import Foreign
from hands import Conn, Worker, Workers

from dataloader.queue import db, lifecycle
from dataloader.queue.enqueue import NewJob, enqueue_many
from dataloader.queue.job import Job

THREADS = 4
SIZE, BATCH = 400, 150  # jobs in all, and of a list
FAMILY = 40  # jobs that may wait for each other: in one graph of all, one early failure may hold nearly all of them
WORKED_OFF_SEC = 20  # they take half a second
UNFINISHED = """
SELECT count(*) FROM dl_jobs
 WHERE status = 'running' OR status = 'queued' AND blocked_on IS DISTINCT FROM 'parent'"""
# Of jobs that have begun, those that a parent has not let go.
TOO_EARLY = """
SELECT c.job_id FROM dl_jobs c JOIN dl_parents e ON e.job_id = c.job_id JOIN dl_jobs p ON p.job_id = e.parent_id
 WHERE c.job_id = ANY (%s)
   AND (p.status IN ('queued', 'running') OR c.partition_key <> 'run' AND p.status <> 'succeeded')"""
# Those canceled for a parent, although all have succeeded; those that were not, although one has not.
WRONGLY_CANCELED = """
SELECT c.job_id FROM dl_jobs c
 WHERE (c.status = 'canceled' AND c.error LIKE 'canceled: its parent%') <> (
         c.partition_key = 'cancel' AND c.started_at IS NULL AND c.producer IS NULL AND EXISTS (
           SELECT FROM dl_parents e JOIN dl_jobs p ON p.job_id = e.parent_id
            WHERE e.job_id = c.job_id AND p.status NOT IN ('queued', 'running', 'succeeded')))"""
# Those that wait although nothing holds them.
STRANDED = """
SELECT c.job_id FROM dl_jobs c
 WHERE c.status = 'queued' AND NOT EXISTS (
         SELECT FROM dl_parents e JOIN dl_jobs p ON p.job_id = e.parent_id
          WHERE e.job_id = c.job_id
            AND (p.status = 'queued' OR c.partition_key = 'hold' AND p.status <> 'succeeded'))"""


def graph(conn: Conn, random: Random) -> list[UUID]:
    """Jobs of which each waits for up to three earlier ones: of its family by place, of lists before by id."""
    ids: list[UUID] = []
    while len(ids) < SIZE:
        new = []
        for number in range(min(BATCH, SIZE - len(ids))):
            on = random.choice(["cancel"] * 2 + ["hold"] + ["run"] * 4)
            elders = range(number - number % FAMILY, number)
            of: list[UUID | int] = [random.choice(elders) for _ in range(random.randrange(4)) if elders]
            of += [random.choice(ids[-500:]) for _ in range(random.randrange(2)) if ids]
            new.append(NewJob("q", "t", f"k{random.randrange(SIZE)}", partition_key=on, depends_on=of or None,
                              on_parent_failure=on, max_attempts=random.choice([1, 3])))  # fmt: skip
        ids += [job_id for job_id, _ in enqueue_many(conn, new)]
    return ids


class Hand:
    """One thread: a worker of ours, one of another service, and somebody who cancels."""

    def __init__(self, dsn: str, worker: Worker, ids: list[UUID], random: Random) -> None:
        self.dsn, self.worker, self.ids, self.random = dsn, worker, ids, random

    def work(self) -> None:
        """Until all jobs have ended, or wait for good; fails where that takes WORKED_OFF_SEC for each hundred."""
        until = monotonic() + WORKED_OFF_SEC * len(self.ids) / 100
        foreign = Foreign(self.dsn, backoff_sec=0.1)
        with closing(foreign.conn), db.connect(self.dsn, name="observer", schema="public") as conn:
            while conn.execute(UNFINISHED).fetchone() != (0,) or conn.execute("TABLE dl_freed").fetchone():
                assert monotonic() < until, "some jobs never end"
                if self.random.random() < 0.02:
                    # By someone else: told by the producer's name, for the judge. In between no parent cancels it.
                    job_id = self.random.choice(self.ids)
                    tell = "UPDATE dl_jobs SET producer = 'x' WHERE job_id = %s AND status = 'queued'"
                    with conn.transaction():
                        conn.execute(tell, (job_id,))
                        lifecycle.request_cancel(conn, job_id)
                elif self.random.random() < 0.1:
                    if claimed := foreign.claim():
                        assert found(conn, TOO_EARLY, [claimed[0]]) == []
                        foreign.finish(*claimed)
                else:
                    jobs = lifecycle.step(self.worker.session, ["q"], 0.1, self.random.randrange(1, 8), None).jobs
                    assert found(conn, TOO_EARLY, [job.job_id for job in jobs]) == []
                    for job in jobs:
                        self.end(conn, job)

    def end(self, conn: Conn, job: Job) -> None:
        """End a run in one of the ways."""
        match self.random.randrange(12):
            case 0:
                self.worker.finish(job, "fail", error="no")
            case 1:
                self.worker.finish(job, "retry" if job.attempt < job.max_attempts else "fail", error="no")
            case 2:
                self.worker.finish(job, "hand_back", error="drain")
            case 3 if job.attempt == 1:  # a later one would wait for seconds
                self._crash(conn, job)
            case 4:
                conn.execute("UPDATE dl_jobs SET status = 'failed' WHERE job_id = %s AND claimed_by = %s",
                             (job.job_id, job.claimed_by))  # fmt: skip
                self.worker.conn.execute("SELECT pg_advisory_unlock(hashtext(%s))", (job.lock_key,))
            case _:
                self.worker.finish(job)

    def _crash(self, conn: Conn, job: Job) -> None:
        """As the keeper writes it; the worker's session stays, and lets the key go.

        By two statements: one that locks evaluates what it selects before it has the lock.
        """
        held = "SELECT 1 FROM dl_jobs WHERE job_id = %s AND claimed_by = %s AND status = 'running' FOR NO KEY UPDATE"
        with conn.transaction():
            if conn.execute(held, (job.job_id, job.claimed_by)).fetchone():
                conn.execute("SELECT dl_give_back(%s, 'crash', 'killed', '{}')", (job.job_id,))
        self.worker.conn.execute("SELECT pg_advisory_unlock(hashtext(%s))", (job.lock_key,))


def test_a_random_graph_is_worked_off(dsn: str, conn: Conn, workers: Workers) -> None:
    seed = Random().randrange(10**6)
    print(f"seed {seed}")
    random = Random(seed)
    ids = graph(conn, random)
    hands = [Hand(dsn, workers(), ids, Random(random.random())) for _ in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(hand.work) for hand in hands]:
            done.result(600)
    assert found(conn, WRONGLY_CANCELED) == []
    assert found(conn, STRANDED) == []
    kept = found(conn, "SELECT job_id FROM dl_waiting")
    assert set(kept) == set(found(conn, "SELECT job_id FROM dl_jobs WHERE status = 'queued'"))
    ended = dict(conn.execute("SELECT status::text, count(*) FROM dl_jobs GROUP BY 1").fetchall())
    print(ended, f"{len(kept)} held")
    assert ended["succeeded"] > SIZE / 10
    assert ended["canceled"] > SIZE / 100


def found(conn: psycopg.Connection[Any], question: str, *parameters: Any) -> list[UUID]:
    return [job_id for (job_id,) in conn.execute(question, parameters or None)]
