"""Storms on plain, ordered and merged queues: sessions add, claim, end, crash, cancel, requeue, delete, lock at once.

No two deliveries of a key side by side, no start before an earlier job of the key has ended, no job left out of a
delivery of all, nothing stranded, no deadlock: a session that PostgreSQL chose for one would raise.

Each key has one producer, whose jobs get their places by their times. A job of a smaller score that comes late, and one
that an operator has put back, may come after its successors: these have no place in the order that is checked. In a
plain queue, which a worker of another service serves too, nor has any job that came back.
"""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from uuid import UUID, uuid4

import pytest
from foreign import Foreign
from hands import Conn, Worker, expire, plain, until, value

from dataloader.queue import db, lifecycle, operations
from dataloader.queue.enqueue import NewJob, enqueue, enqueue_many
from dataloader.queue.job import Delivery, End, Job, Outcome, decide
from dataloader.queue.lifecycle import Ended

PATIENCE = 300.0  # seconds until the storm gives up on jobs that are left; on a busy machine it lasts half a minute
RETRY_SEC = 0.05
ALL = 1_000  # jobs of a delivery, more than a key has
LEFT = "SELECT count(*) FROM dl_jobs WHERE status IN ('queued', 'running')"
# The jobs before the last of these in their key that have not ended, or that run with the key.
BEFORE = """
SELECT o.job_id, o.status::text FROM dl_jobs o
  JOIN (SELECT * FROM dl_jobs WHERE job_id = ANY (%(ids)s)
         ORDER BY score DESC, created_at DESC, job_id DESC LIMIT 1) last
    ON o.lock_key = last.lock_key AND o.queue = last.queue
 WHERE o.job_id <> ALL (%(ids)s)
   AND (o.status = 'running' OR o.status = 'queued' AND (o.score, o.created_at, o.job_id)
                                                      < (last.score, last.created_at, last.job_id))
"""
# The jobs that a delivery of their key has to have, whether they are due or not.
STARTABLE = """
SELECT job_id FROM dl_jobs
 WHERE status = 'queued' AND NOT cancel_requested AND attempt < greatest(max_attempts, 1)
"""
WHERES = ("status = 'queued'", "status = 'running'", "blocked_on = 'key'", "blocked_on = 'time'")
# In a plain queue; a worker of another service makes a row running before it has the key.
BEFORE_IN_PLAIN = """
SELECT o.job_id, o.status::text FROM dl_jobs o
  JOIN dl_jobs last ON last.job_id = ANY (%(ids)s) AND o.lock_key = last.lock_key AND o.job_id <> last.job_id
 WHERE o.status = 'running' AND o.claimed_by IS NOT NULL AND o.lease_expires_at > now()
    OR o.status = 'queued' AND (o.created_at, o.job_id) < (last.created_at, last.job_id)
   AND NOT EXISTS (SELECT FROM dl_job_events e WHERE e.job_id IN (o.job_id, last.job_id) AND e.kind = 'requeue')
"""
IN_ORDER = "SELECT array_agg(job_id ORDER BY score, created_at, job_id) FROM dl_jobs WHERE job_id = ANY (%s)"


@dataclass
class Storm:
    """The state that the sessions share."""

    dsn: str
    seed: int
    ordered: bool
    limit: int | None  # of a delivery; None: the queue does not merge
    keys: int
    adding: int = 2  # producers that have not ended
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    keeping: threading.Lock = field(default_factory=threading.Lock)
    running: dict[str, list[UUID]] = field(default_factory=dict)
    moved: set[UUID] = field(default_factory=set)
    added: set[UUID] = field(default_factory=set)
    deleted: set[UUID] = field(default_factory=set)
    starts: int = 0
    wrong: list[str] = field(default_factory=list)

    def move(self, *job_ids: UUID) -> None:
        with self.lock:
            self.moved.update(job_ids)

    def begin(self, conn: Conn, jobs: tuple[Job, ...], startable: list[UUID]) -> None:
        """Judge a delivery that has just been claimed; these jobs of any key could start just before the claim."""
        ids, key = [job.job_id for job in jobs], jobs[0].lock_key
        before = conn.execute(BEFORE if self.ordered else BEFORE_IN_PLAIN, {"ids": ids}).fetchall()
        in_order = value(conn, IN_ORDER, ids)
        left_out = conn.execute(f"{STARTABLE} AND lock_key = %s AND job_id = ANY (%s)", (key, startable)).fetchall()
        with self.lock:
            self.starts += len(jobs)
            if key in self.running:
                self.wrong.append(f"{key} runs twice")
            self.running[key] = ids
            if ids != in_order:
                self.wrong.append(f"{key} is not in its order")
            if len({job.attempt for job in jobs}) > 1:
                self.wrong.append(f"{key} has several attempts")
            if self.limit == ALL and any(job_id not in self.moved for (job_id,) in left_out):
                self.wrong.append(f"{key} starts without {left_out}")
            for job_id, status in before:
                if job_id not in self.moved:
                    self.wrong.append(f"{key} starts before {job_id}, which is {status}")

    def end(self, jobs: tuple[Job, ...]) -> None:
        """The delivery is about to end."""
        with self.lock:
            self.running.pop(jobs[0].lock_key, None)


def work(storm: Storm, number: int) -> None:
    """A worker claims some, runs each for up to 2 ms, writes the ends with the next claim; now and then it dies."""
    chance = random.Random(f"{storm.seed} {number}")
    life = 0
    while not storm.over.is_set():
        life += 1
        live(storm, chance, Worker(storm.dsn, f"host:{number}:{life}"))


def live(storm: Storm, chance: random.Random, worker: Worker) -> None:
    ends: dict[UUID, Ended] = {}
    while not storm.over.is_set() or ends:
        most = 0 if storm.over.is_set() else chance.choice([1, 1, 3, 20])
        startable = [job_id for (job_id,) in worker.conn.execute(STARTABLE)]
        step = lifecycle.step(worker.session, ["q"], 0.2, most, list(ends.values()))
        ends = {job_id: ends[job_id] for job_id in step.locked}
        keys = Delivery(tuple(step.jobs)).keys() if step.jobs else {}
        deliveries = [Delivery(tuple(jobs)) for jobs in keys.values()]
        for delivery in deliveries:
            storm.begin(worker.conn, delivery.jobs, startable)
        if deliveries and not ends and chance.random() < 0.02:
            die(storm, chance, worker, deliveries)
            return
        for delivery in deliveries:
            time.sleep(chance.random() * 0.002)
            ends |= ended(storm, chance, worker, delivery)
            if chance.random() < 0.1:  # as a heartbeat does, between two claims
                written = lifecycle.finish_some(worker.conn, worker.name, list(ends.values()))
                ends = {job_id: ends[job_id] for job_id in written.locked}
        if not step.jobs and not step.look_again:
            list(worker.conn.notifies(timeout=min(step.due_in or 0.5, 0.5), stop_after=1))
    worker.conn.close()


def ended(storm: Storm, chance: random.Random, worker: Worker, delivery: Delivery) -> dict[UUID, Ended]:
    """The ends to write of a delivery's jobs."""
    end = chance.choices([End.DONE, End.ERROR, End.HANDED_BACK, End.PERMANENT], [70, 15, 12, 3])[0]
    if chance.random() < 0.3 and lifecycle.beat(worker.conn, delivery.jobs, None, False):
        end = End.CANCELED
    finishes = decide(delivery, Outcome(end, "storm", delay_sec=RETRY_SEC if end is End.ERROR else None))
    storm.end(delivery.jobs)
    return {
        job.job_id: Ended(job, finish)
        for job, finish in zip(delivery.jobs, finishes, strict=True)
        if finish is not None
    }


def die(storm: Storm, chance: random.Random, worker: Worker, deliveries: list[Delivery]) -> None:
    """The worker's session ends; the keeper, or the reaper, gives its jobs back, and they are due at once."""
    ids = [job.job_id for delivery in deliveries for job in delivery.jobs]
    for delivery in deliveries:
        storm.end(delivery.jobs)
    worker.conn.close()  # from here on a worker of another service may take the keys
    with storm.keeping, db.connect(storm.dsn, name="keeper", schema="public") as conn:
        if chance.random() < 0.5:
            begun = [job.job_id for job in deliveries[0].jobs]
            while not all(each.status for each in lifecycle.settle(conn, worker.name, "crash", "died", running=begun)):
                pass  # a stranger has some locked
        else:
            for job_id in ids:
                expire(conn, job_id)
            while value(conn, "SELECT count(*) FROM dl_jobs WHERE status = 'running' AND claimed_by = %s", worker.name):
                lifecycle.reap(conn)
        operations.change(conn, "run-now", ids, "keeper")


def produce(storm: Storm, number: int) -> None:
    """A producer adds jobs to its keys, as the API and as other services do, a tenth of them before all others."""
    chance = random.Random(f"{storm.seed} producer {number}")
    with db.connect(storm.dsn, name="producer", schema="public") as conn:
        for _ in range(150):
            key, way = str(chance.randrange(number, storm.keys, 2)), chance.random()
            if way < 0.1:
                job_id = uuid4()
                storm.move(job_id)
                storm.added.add(job_id)
                plain(conn, job_id=job_id, lock_key=key, score=chance.random())
            elif way < 0.4:
                storm.added.add(plain(conn, lock_key=key))
            elif way < 0.7:
                storm.added.add(enqueue(conn, NewJob("q", "t", key))[0])
            else:
                found = enqueue_many(conn, [NewJob("q", "t", key) for _ in range(4)])
                storm.added.update(each[0] for each in found)
            time.sleep(chance.random() * 0.01)
    with storm.lock:
        storm.adding -= 1


def operate(storm: Storm, number: int) -> None:
    """An operator cancels, requeues and deletes jobs of half of the keys."""
    chance = random.Random(f"{storm.seed} operator")
    with db.connect(storm.dsn, name="operator", schema="public") as conn:
        while not storm.over.is_set():
            match chance.randrange(3):
                case 0:
                    operations.change(conn, "cancel", some(conn, "queued", "running"), "storm")
                case 1 if storm.adding:  # the storm is to end
                    dead = some(conn, "failed", "lost", "canceled")
                    storm.move(*dead)
                    operations.change(conn, "requeue", dead, "storm")
                case _:
                    gone = operations.change(conn, "delete", some(conn, "queued", "failed"), "storm")
                    storm.deleted.update(job_id for job_id, outcome in gone.items() if outcome == "done")
            time.sleep(chance.random() * 0.02)


def some(conn: Conn, *statuses: str) -> list[UUID]:
    rows = conn.execute(
        "SELECT job_id FROM dl_jobs WHERE status::text = ANY (%s) AND lock_key::int %% 4 < 2 ORDER BY random() LIMIT 2",
        (list(statuses),),
    )
    return [job_id for (job_id,) in rows]


def hold(storm: Storm, number: int) -> None:
    """A stranger has heads, parked or running rows locked for a moment."""
    chance = random.Random(f"{storm.seed} stranger")
    with db.connect(storm.dsn, name="stranger", schema="public") as conn:
        while not storm.over.is_set():
            where = chance.choice(WHERES)
            with conn.transaction():
                conn.execute(
                    f"SELECT FROM dl_jobs WHERE {where} ORDER BY score, random() LIMIT 3 FOR UPDATE SKIP LOCKED"
                )
                time.sleep(chance.random() * 0.03)
            time.sleep(chance.random() * 0.03)


def serve(storm: Storm, number: int) -> None:
    """A worker of another service claims by the plain protocol, which knows no order."""
    chance = random.Random(f"{storm.seed} foreign")
    foreign = Foreign(storm.dsn, "q", backoff_sec=0.05)
    while not storm.over.is_set():
        if found := foreign.claim():
            job_id, key = found
            with storm.lock:
                if key in storm.running:
                    storm.wrong.append(f"{key} runs twice")
                storm.running[key] = [job_id]
            time.sleep(chance.random() * 0.002)
            with storm.lock:
                storm.running.pop(key, None)
            foreign.finish(job_id, key)
        time.sleep(chance.random() * 0.02)
    foreign.conn.close()


KINDS = {"plain": (False, None), "ordered": (True, None), "merged by 3": (True, 3), "merged": (True, ALL)}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [4, 8, 40])
def test_a_storm_breaks_no_order(conn: Conn, dsn: str, keys: int, kind: str) -> None:
    ordered, limit = KINDS[kind]
    storm = Storm(dsn, 1, ordered, limit, keys)
    workers = 12 if limit == ALL else 4
    conn.execute(
        "INSERT INTO dl_queues (queue, ordered, merge, merge_limit) VALUES ('q', %s, %s, %s)",
        (ordered, limit is not None, limit),
    )
    tasks = [*((work, n) for n in range(workers)), *((produce, n) for n in range(2)), (operate, 0), (hold, 0)]
    tasks += [] if ordered else [(serve, 0)]
    with ThreadPoolExecutor(len(tasks)) as pool:
        futures = [pool.submit(task, storm, number) for task, number in tasks]
        try:
            until(
                lambda: (
                    (storm.adding == 0 and value(conn, LEFT) == 0)
                    or any(future.done() and future.exception() for future in futures)
                ),
                "all to end",
                PATIENCE,
            )
        finally:
            storm.over.set()
        for future in futures:
            future.result()
    assert storm.wrong == []
    assert storm.starts > 100
    left = {job_id for (job_id,) in conn.execute("SELECT job_id FROM dl_jobs")}
    assert (storm.added - storm.deleted, value(conn, LEFT)) == (left, 0)
