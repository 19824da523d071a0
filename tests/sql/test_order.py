"""The jobs of a key start in their order, also when one comes back or is marked hot while a claim is under way.

A claim stops where these tests want it: between its look at the queue and its lock on a key, at a gate. The gate is a
function in front of PostgreSQL's own, found by the claiming session's search_path alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest
from hands import BACKOFF_SEC, Worker, expire, keys_held, plain, row, started, state, value

from dataloader.queue import db, lifecycle
from dataloader.queue.job import Job
from dataloader.queue.lifecycle import Step

Workers = Callable[[], Worker]
GATE = """
CREATE SCHEMA gate;
CREATE FUNCTION gate.wait() RETURNS void LANGUAGE sql VOLATILE AS $$
  SELECT pg_advisory_lock_shared(7, 7); SELECT pg_advisory_unlock_shared(7, 7)
$$;
"""
BEFORE_THE_LOCK = """
CREATE FUNCTION gate.pg_try_advisory_lock(slot int) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  PERFORM gate.wait();
  RETURN pg_catalog.pg_try_advisory_lock(slot);
END $$;
"""
BEHIND_THE_HOT_SLOTS = """
CREATE FUNCTION gate.dl_hot_slots(p_queue text) RETURNS int[] LANGUAGE plpgsql AS $$
DECLARE
  slots int[] := public.dl_hot_slots(p_queue);
BEGIN
  PERFORM gate.wait();
  RETURN slots;
END $$;
"""


@contextmanager
def at_gate(conn: db.Connection, gate: str, worker: Worker, step: Callable[[], Any]) -> Iterator[Future[Any]]:
    """A step of this worker that stands at the gate in the block; after it, it has ended."""
    conn.execute(GATE + gate)
    worker.conn.execute("SET search_path = gate, public, pg_catalog")
    conn.execute("SELECT pg_advisory_lock(7, 7)")
    with started(step, worker.pid, conn) as found:
        try:
            yield found
        finally:
            conn.execute("SELECT pg_advisory_unlock(7, 7)")
        found.result()


def ids(step: Step) -> list[UUID]:
    return [job.job_id for job in step.jobs]


def two_of_a_key(conn: db.Connection) -> tuple[UUID, UUID]:
    return plain(conn, lock_key="k", priority=1), plain(conn, lock_key="k", priority=2)


def hand_back(conn: db.Connection, worker: Worker, job: Job) -> None:
    worker.finish(job, "hand_back", error="why")


def retry_at_once(conn: db.Connection, worker: Worker, job: Job) -> None:
    worker.finish(job, "retry", error="e", delay_sec=0.0)


def drain(conn: db.Connection, worker: Worker, job: Job) -> None:
    lifecycle.settle(conn, worker.name, "drain", "gone")


def crash(conn: db.Connection, worker: Worker, job: Job) -> None:
    lifecycle.settle(conn, worker.name, "crash", "gone")


def reap(conn: db.Connection, worker: Worker, job: Job) -> None:
    expire(conn, job.job_id)
    lifecycle.reap(conn)


@pytest.mark.parametrize("come_back", [hand_back, retry_at_once, drain, crash, reap])
def test_a_job_that_comes_back_beside_a_claim_goes_before_the_next_of_its_key(
    conn: db.Connection, workers: Workers, come_back: Callable[[db.Connection, Worker, Job], None]
) -> None:
    """When the claim looked at the queue it was running; when the claim has its key, it waits again."""
    one, two = workers(), workers()
    old, _ = two_of_a_key(conn)
    job = one.take()
    with at_gate(conn, BEFORE_THE_LOCK, two, two.claim) as claim:
        come_back(conn, one, job)
    assert ids(claim.result()) == [old]


def test_what_comes_back_later_goes_last(conn: db.Connection, workers: Workers) -> None:
    """Its time has not come, so nothing waits for it."""
    one, two = workers(), workers()
    old, new = two_of_a_key(conn)
    job = one.take()
    with at_gate(conn, BEFORE_THE_LOCK, two, two.claim) as claim:
        one.finish(job, "retry", error="e", delay_sec=60.0)
    assert ids(claim.result()) == [new]
    assert not row(conn, old)["hot"]


def test_a_hot_row_whose_key_becomes_free_beside_a_claim_goes_before_a_cold_one(
    conn: db.Connection, workers: Workers
) -> None:
    """Its slot was busy when the claim looked, so it was no candidate; a later job of the key was one."""
    one, two = workers(), workers()
    plain(conn, lock_key="k", priority=0)
    old, _ = two_of_a_key(conn)
    other = plain(conn, priority=3)
    job = one.take()
    conn.execute("UPDATE dl_jobs SET hot = true WHERE job_id = %s", (old,))
    with at_gate(conn, BEFORE_THE_LOCK, two, lambda: lifecycle.step(two.session, "q", BACKOFF_SEC, 5, ())) as claim:
        one.finish(job)
    assert ids(claim.result()) == [old, other]
    assert len(keys_held(conn)) == 2


def test_a_row_marked_beside_a_second_look_goes_before_the_next_of_its_key(
    conn: db.Connection, workers: Workers
) -> None:
    """The look has the hot slots, but not yet the cold rows: it finds the row in neither, and lets others go by."""
    two = workers()
    hot = plain(conn, lock_key="hot", priority=9)
    conn.execute("UPDATE dl_jobs SET hot = true WHERE job_id = %s", (hot,))
    old, new = two_of_a_key(conn)
    with at_gate(conn, BEHIND_THE_HOT_SLOTS, two, two.look) as claim:
        conn.execute("UPDATE dl_jobs SET hot = true WHERE job_id = %s", (old,))
    assert ids(claim.result()) == [hot]
    assert len(keys_held(conn)) == 1
    assert [ids(two.look()), ids(two.look())] == [[old], []]
    assert state(conn, new) == ("queued", 0)


def test_a_key_that_becomes_free_on_the_way_is_its_first_jobs(conn: db.Connection, worker: Worker) -> None:
    old, _ = two_of_a_key(conn)
    conn.execute(
        """
        CREATE SCHEMA gate;
        CREATE FUNCTION gate.pg_try_advisory_lock(slot int) RETURNS boolean LANGUAGE sql AS $$
          SELECT set_config('gate.tries', (current_setting('gate.tries')::int + 1)::text, false) <> '1'
             AND pg_catalog.pg_try_advisory_lock(slot)
        $$;
        """
    )
    worker.conn.execute("SET search_path = gate, public, pg_catalog; SET gate.tries = 0")
    assert ids(worker.claim()) == [old]
    assert value(worker.conn, "SELECT current_setting('gate.tries')") == "2"


@pytest.mark.parametrize("look", ["claim", "look"])
def test_beside_a_row_that_is_being_marked_the_next_of_its_key_waits(
    conn: db.Connection, workers: Workers, look: str
) -> None:
    """Nor is the next one marked before it: a claim takes the first hot row of a key for the first of its key."""
    one, two = workers(), workers()
    old, new = two_of_a_key(conn)
    with one.conn.transaction():
        one.conn.execute("UPDATE dl_jobs SET hot = true WHERE job_id = %s", (old,))
        claim: Step = getattr(two, look)()
        assert claim.job is None
        assert claim.look_again or (claim.due_in or 99) <= 0.1
        assert not row(conn, new)["hot"]
    assert ids(getattr(two, look)()) == [old]


def test_a_row_that_somebody_holds_on_to_hides_no_other_key(conn: db.Connection, workers: Workers) -> None:
    """However many jobs of its key stand before the others: then the order has to wait."""
    one, two = workers(), workers()
    first = plain(conn, lock_key="k")
    conn.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, created_at)"
        " SELECT gen_random_uuid(), 'q', 't', 'k', now() + i * interval '1 us' FROM generate_series(1, 1200) i"
    )
    other = plain(conn, lock_key="other", made_sec=1)
    with one.conn.transaction():
        one.conn.execute("SELECT FROM dl_jobs WHERE job_id = %s FOR UPDATE", (first,))
        claims = [two.claim() for _ in range(5)]
        assert [job_id for step in claims for job_id in ids(step)] == [other]
    assert ids(two.claim()) == [first]
