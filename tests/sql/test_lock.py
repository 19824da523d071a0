"""A key is held by the session and by the running row; what waits for one is passed over and never forgotten."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
import pytest
from foreign import Foreign
from hands import Conn, Worker, Workers, enqueue, expire, many, plain, started, successor, until
from readings import blocked, journal, keys_held, row, state, value
from test_order import at_gate

from dataloader.queue import lifecycle

BEFORE_THE_NEXT_LOOK = """
CREATE FUNCTION gate.pg_sleep(sec float8) RETURNS void LANGUAGE sql VOLATILE AS $$
  SELECT gate.wait() WHERE sec > 0
$$;
"""
COLLIDING = ("customer:13679", "customer:78688")  # hashtext makes one of these two


def test_b4_colliding_keys_exclude_each_other_and_nothing_worse(conn: Conn, one: Worker, two: Worker) -> None:
    assert len({value(conn, "SELECT hashtext(%s)", key) for key in COLLIDING}) == 1
    first, second = (enqueue(conn, lock_key=key) for key in COLLIDING)
    job = one.take()
    assert job.job_id == first
    claim = two.claim()
    assert (claim.job, claim.backoffs) == (None, 0)
    two.notes()
    one.finish(job)
    assert two.notes() == ["q"]
    two.finish(two.take())
    assert state(conn, first) == state(conn, second) == ("succeeded", 1)


def test_a_key_held_by_a_foreign_session_backs_off_growing_to_the_bound(conn: Conn, worker: Worker) -> None:
    conn.execute("SELECT pg_advisory_lock(hashtext('k'))")
    job_id = plain(conn, lock_key="k", attempt=1)
    pauses = []
    for backoffs in range(1, 8):
        claim = worker.claim(backoff_sec=1.0)
        assert (claim.job, claim.backoffs) == (None, 1)
        found = row(conn, job_id)
        refused_at: datetime = value(conn, "SELECT max(ts) FROM dl_job_events WHERE job_id = %s", job_id)
        pauses.append((found["available_at"] - refused_at).total_seconds())
        assert (found["status"], found["attempt"], found["backoffs"]) == ("queued", 1, backoffs)
        conn.execute("UPDATE dl_jobs SET available_at = now() WHERE job_id = %s", (job_id,))
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0])
    assert keys_held(conn) == [conn.info.backend_pid]
    story = journal(conn, job_id)[1:]
    assert [payload.pop("backoffs") for _, payload in story] == list(range(1, 8))
    assert {kind for kind, _ in story} == {"requeue"}
    assert story[0][1] == {"reason": "the key is held by another session", "attempt": 1}
    conn.execute("SELECT pg_advisory_unlock_all()")
    assert worker.take().attempt == 2, "a back-off costs none"
    assert row(conn, job_id)["backoffs"] == 0


def test_b8_a_lost_race_for_a_key_waits_for_its_winner_not_for_a_back_off(conn: Conn, one: Worker, two: Worker) -> None:
    """The loser sees the lock before it sees the winner's row; the winner commits a moment later."""
    first, second = plain(conn, lock_key="k", priority=0), plain(conn, lock_key="k")
    with one.conn.transaction():
        assert one.take().job_id == first
        with at_gate(conn, BEFORE_THE_NEXT_LOOK, two, two.claim) as claim:
            one.conn.execute("COMMIT; BEGIN")
        assert (claim.result().job, claim.result().backoffs) == (None, 0)
    assert (row(conn, second)["blocked_on"], state(conn, second)) == ("key", ("queued", 0))
    two.notes()
    lifecycle.settle(conn, one.name, "drain", "gone")
    assert two.notes() == ["q"]
    assert two.take().job_id == first


def test_a_finish_that_comes_second_sees_the_parked_rows_and_tells(conn: Conn, one: Worker, two: Worker) -> None:
    plain(conn, queue="a", lock_key="k")
    plain(conn, queue="b", lock_key="k")
    job = one.take("a")
    with two.conn.transaction():
        assert two.claim("b").job is None
        with started(lambda: one.finish(job), one.pid, conn) as end:
            two.conn.execute("COMMIT; BEGIN")
            assert end.result() == "succeeded"
    assert "b" in two.notes()


def test_c5_v15_an_idle_claim_that_awaits_a_changed_row_stops_no_heartbeat_and_is_no_deadlock(
    conn: Conn, workers: Workers
) -> None:
    """Somebody changes every running job of two keys in one transaction; the claim has locks on other rows."""
    one, two, idle = workers(), workers(), workers()
    for key in "kl":
        plain(conn, queue="a", lock_key=key), plain(conn, queue="b", lock_key=key)
    running = [(one, one.take("a")), (two, two.take("a"))]
    for session in (conn, idle.conn):
        session.execute("SET deadlock_timeout = '20ms'")
    change = "UPDATE dl_jobs SET progress = '{}' WHERE job_id = %s"
    for (_, first), (holder, second) in (running, running[::-1]):
        holder.conn.execute("SET lock_timeout = '20s'")
        with conn.transaction():
            conn.execute(change, (first.job_id,))
            with started(lambda: idle.claim("b"), None, conn) as claim:
                until(lambda: claim.done() or stands(one.conn, idle), "the claim to meet the change")
                try:
                    assert lifecycle.beat(holder.conn, [second], None, False) is False
                    conn.execute(change, (second.job_id,))
                finally:
                    conn.execute("COMMIT; BEGIN")
                assert claim.result().job is None


def stands(observer: Conn, worker: Worker) -> bool:
    """Does the worker wait for a lock, or pause before it looks again?

    In a transaction an observer sees the other sessions as they were at its first look.
    """
    event = value(observer, "SELECT wait_event FROM pg_stat_activity WHERE pid = %s", worker.pid)
    return event == "PgSleep" or blocked(observer, worker.pid)


def test_a_retake_does_not_run_beside_another_run_of_its_key(conn: Conn, workers: Workers) -> None:
    """Both sessions are gone; the lease of the first ran out and the second job of the key started."""
    one, two, again = workers(), workers(), workers()
    first, _ = plain(conn, lock_key="k", priority=0), plain(conn, lock_key="k", priority=1)
    job = one.take()
    one.conn.close()
    until(lambda: keys_held(conn) == [], "the lock to go with its session")
    expire(conn, first)
    assert two.take().lock_key == "k"
    two.conn.close()
    until(lambda: keys_held(conn) == [], "the lock to go with its session")
    assert not lifecycle.retake(successor(again, one), [job])
    assert keys_held(conn) == []


CLAIMABLE = """
SELECT EXISTS (SELECT FROM dl_jobs j WHERE queue = %s AND status = 'queued' AND available_at <= now()
                  AND NOT EXISTS (SELECT FROM dl_jobs r WHERE r.status = 'running' AND r.lock_key = j.lock_key))
"""
JOBS = 60
WAIT_SEC = 4.0  # an idle worker's poll in the storm: whoever reaches it was forgotten


class Storm:
    """Workers that claim, run and finish, and wait for a notification or a due row, with no poll worth the name."""

    def __init__(self, dsn: str, seed: int, long_jobs: bool) -> None:
        self.dsn, self.chance, self.long_jobs = dsn, random.Random(seed), long_jobs
        self.long = {"a": threading.Lock(), "b": threading.Lock()}
        self.forgotten: list[str] = []
        self.ended: list[UUID] = []

    def run(self) -> None:
        tasks = [*[self.work] * 3, self.foreign]
        with ThreadPoolExecutor(9) as pool:
            pairs = [(task, queue, random.Random(self.chance.random())) for queue in "ab" for task in tasks]
            futures = [pool.submit(self.produce), *(pool.submit(*pair) for pair in pairs)]
            for future in futures:
                future.result()
        assert self.forgotten == []

    def produce(self) -> None:
        chance = self.chance
        keys = [f"k{number}" for number in range(chance.choice((1, 2, 3, 5)))]
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            for _ in range(JOBS):
                more = {"queue": chance.choice("ab"), "lock_key": chance.choice(keys), "priority": chance.randrange(3)}
                plain(conn, in_sec=chance.choice((0, 0, 0, 0.01)), **more)

    @property
    def is_over(self) -> bool:
        return len(self.ended) == JOBS or bool(self.forgotten)

    def end(self, conn: psycopg.Connection[Any], job_id: UUID) -> None:
        self.ended.append(job_id)
        if self.is_over:
            conn.execute("SELECT pg_notify('dl_jobs', 'over')")

    def work(self, queue: str, chance: random.Random) -> None:
        worker = Worker(self.dsn, f"{queue}:{chance.random()}")
        with closing(worker.conn) as conn:
            while not self.is_over:
                claim = worker.claim(queue, backoff_sec=0.02)
                if claim.job:
                    time.sleep(chance.choice((0, 0, 0.001, 0.005)))
                    if self.long_jobs and chance.random() < 0.2:
                        self.linger(conn, queue)
                    verb = chance.choice(("succeed", "succeed", "fail", "cancel"))
                    assert worker.finish(claim.job, verb, error="x" if verb == "fail" else None)
                    self.end(conn, claim.job.job_id)
                elif not claim.look_again:
                    self.wait(conn, queue, claim.due_in)

    def linger(self, conn: psycopg.Connection[Any], queue: str) -> None:
        """A long job: it lasts until the others of its queue have started whatever may run beside it."""
        if self.long[queue].acquire(blocking=False):
            until(lambda: self.forgotten or not value(conn, CLAIMABLE, queue), "the others to start what they may")
            self.long[queue].release()

    def wait(self, conn: psycopg.Connection[Any], queue: str, due_in: float | None) -> None:
        """As a worker waits. No notification comes for a row whose time comes."""
        for note in conn.notifies(timeout=WAIT_SEC if due_in is None else due_in + 0.001):
            if note.payload in (queue, "over"):
                return
        # A slow machine is no lost wake-up: something must be there to claim, and no word of it under way.
        if due_in is None and value(conn, CLAIMABLE, queue) and not list(conn.notifies(timeout=2, stop_after=1)):
            self.forgotten.append(queue)

    def foreign(self, queue: str, chance: random.Random) -> None:
        """A worker of another service: it takes ten looks and goes, so that it rescues nobody."""
        other = Foreign(self.dsn, queue, backoff_sec=0.02)
        with closing(other.conn) as conn:
            for _ in range(10):
                found = other.claim()
                time.sleep(chance.choice((0, 0, 0.001, 0.005)))
                if found:
                    other.finish(*found)
                    self.end(conn, found[0])


@pytest.mark.parametrize("long_jobs", [False, True], ids=["short jobs", "long jobs too"])
@pytest.mark.parametrize("seed", range(3))
def test_no_wake_up_is_lost_in_a_storm_of_claims_and_finishes(dsn: str, conn: Conn, seed: int, long_jobs: bool) -> None:
    """Two queues share keys, foreign workers finish without a guard; no wait may reach its poll, no lock be left.

    Beside a long job what a claim leaves over must reach the workers that left before it, not wait for its next claim.
    """
    Storm(dsn, seed, long_jobs).run()
    assert value(conn, "SELECT count(*) FROM dl_jobs WHERE status IN ('queued', 'running')") == 0
    until(lambda: keys_held(conn) == [], "sessions to end")


def test_a_held_key_costs_one_wait_however_many_rows_it_has(conn: Conn, worker: Worker, foreign: Foreign) -> None:
    """One refusal puts all of them off, and one line in the journal says so."""
    foreign.conn.execute("SELECT pg_advisory_lock(hashtext('k'))")
    many(conn, 1_000, "k", priority=0)
    free = enqueue(conn, lock_key="free", priority=1)
    assert worker.take().job_id == free
    assert worker.claim().backoffs == 1
    assert value(conn, "SELECT count(*) FROM dl_jobs WHERE blocked_on = 'time' AND backoffs = 1") == 1_000
    assert value(conn, "SELECT count(*) FROM dl_job_events WHERE kind = 'requeue'") == 1
