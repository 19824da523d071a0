"""A key is held by the session and by the running row; what waits for one is passed over and never forgotten."""

import random
import select
import socket
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
        pauses.append((found["available_at"] - refused_at(conn, job_id)).total_seconds())
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


def refused_at(conn: Conn, job_id: UUID) -> datetime:
    return value(conn, "SELECT max(ts) FROM dl_job_events WHERE job_id = %s", job_id)


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


def test_claims_that_cannot_park_beside_an_end_come_back_soon(conn: Conn, workers: Workers) -> None:
    """No end will let them in: the one that is not committed has found no parked row."""
    one, late, early = workers(), workers(), workers()
    plain(conn, queue="a", lock_key="k")
    plain(conn, queue="b", lock_key="k"), plain(conn, queue="b", lock_key="k")
    end = one.take("a")
    early.notes()
    with one.conn.transaction():
        one.finish(end)
        for claim in (late.claim("b"), early.claim("b"), late.claim("b")):
            assert (claim.job, claim.due_in) == (None, 0.1)
        assert early.notes() == []  # else the idle would wake each other without end
    assert late.take("b")


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
WAIT_SEC = 4.0  # an idle worker's poll in the storm: whoever reaches it was forgotten


class Storm:
    """Workers that claim, run and finish, and wait for a notification or a due row, with no poll worth the name."""

    def __init__(self, dsn: str, seed: int, long_jobs: bool = False) -> None:
        self.dsn = dsn
        self.seed = seed
        self.long_jobs = long_jobs
        self.long = {"a": threading.Lock(), "b": threading.Lock()}
        self.forgotten: list[str] = []
        self.ends, self.over = socket.socketpair()
        self.left = 0
        self.guard = threading.Lock()

    def run(self) -> None:
        chance = random.Random(self.seed)
        queues = ("a", "b")
        keys = [f"k{number}" for number in range(chance.choice((1, 2, 3, 5)))]
        jobs = [(chance.choice(queues), chance.choice(keys), chance.randrange(3)) for _ in range(60)]
        self.left = len(jobs)
        with closing(self.ends), closing(self.over), ThreadPoolExecutor(12) as pool:
            futures = [
                pool.submit(self.work, name, random.Random(chance.random())) for name in queues for _ in range(3)
            ]
            futures += [pool.submit(self.foreign, name, random.Random(chance.random())) for name in queues]
            futures += [pool.submit(self.produce, jobs[half::2], random.Random(chance.random())) for half in (0, 1)]
            for future in futures:
                future.result()
        assert self.forgotten == []

    def produce(self, jobs: list[tuple[str, str, int]], chance: random.Random) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            for name, key, priority in jobs:
                plain(conn, queue=name, lock_key=key, priority=priority, in_sec=chance.choice((0, 0, 0, 0.01)))

    def finished(self) -> None:
        """One less; the last ends the storm."""
        with self.guard:
            self.left -= 1
            if self.left == 0:
                self.over.send(b"." * 64)

    def work(self, name: str, chance: random.Random) -> None:
        worker = Worker(self.dsn, f"{name}:{chance.random()}")
        with closing(worker.conn) as conn:
            while self.left and not self.forgotten:
                claim = worker.claim(name, backoff_sec=0.02)
                if claim.job:
                    self.busy(chance)
                    if self.long_jobs and chance.random() < 0.2:
                        self.linger(conn, name)
                    verb = chance.choice(("succeed", "succeed", "fail", "cancel"))
                    assert worker.finish(claim.job, verb, error="x" if verb == "fail" else None)
                    self.finished()
                elif not claim.look_again:
                    self.wait(conn, name, claim.due_in)

    def busy(self, chance: random.Random) -> None:
        if pause := chance.choice((0, 0, 0.001, 0.005)):
            time.sleep(pause)

    def linger(self, conn: psycopg.Connection[Any], name: str) -> None:
        """A long job: it lasts until the others of its queue have started whatever may run beside it."""
        if self.long[name].acquire(blocking=False):
            until(lambda: self.forgotten or not value(conn, CLAIMABLE, name), "the others to start what they may")
            self.long[name].release()

    def wait(self, conn: psycopg.Connection[Any], name: str, due_in: float | None) -> None:
        """As a worker waits: drain, select, drain. No notification comes for a row whose time comes."""
        deadline = time.monotonic() + (WAIT_SEC if due_in is None else due_in + 0.001)
        while not any(note.payload == name for note in conn.notifies(timeout=0)):
            pause = deadline - time.monotonic()
            if pause <= 0:
                # A slow machine is no lost wake-up: something must be there to claim, and no word of it under way.
                is_lost = due_in is None and value(conn, CLAIMABLE, name)
                if is_lost and not list(conn.notifies(timeout=2, stop_after=1)):
                    self.forgotten.append(name)
                return
            ready, _, _ = select.select([conn.fileno(), self.ends], [], [], pause)
            if self.ends in ready:
                return

    def foreign(self, name: str, chance: random.Random) -> None:
        """A worker of another service: it takes ten looks and goes, so that it rescues nobody."""
        other = Foreign(self.dsn, name, backoff_sec=0.02)
        with closing(other.conn):
            for _ in range(10):
                if found := other.claim():
                    self.busy(chance)
                    other.finish(*found)
                    self.finished()
                else:
                    self.busy(chance)


@pytest.mark.parametrize("long_jobs", [False, True], ids=["short jobs", "long jobs too"])
@pytest.mark.parametrize("seed", range(5))
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
