"""The jobs of a key start in their order, also when one comes back or is parked while a claim is under way.

A claim stops where these tests want it: between its look at the queue and its lock on a key, at a gate. The gate is a
function in front of PostgreSQL's own, found by the claiming session's search_path alone.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest
from hands import BACKOFF_SEC, Conn, Worker, ended_beside, expire, ids, locked, many, plain, quietly, started
from readings import keys_held, row, value, waits

from dataloader.queue import lifecycle
from dataloader.queue.job import Job

GATE = """
CREATE SCHEMA gate;
CREATE FUNCTION gate.wait() RETURNS void LANGUAGE sql VOLATILE AS $$
  SELECT pg_advisory_lock_shared(7, 7); SELECT pg_advisory_unlock_shared(7, 7)
$$;
"""
BEFORE_THE_LOCK = """
CREATE FUNCTION gate.pg_try_advisory_lock(key_hash int) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  PERFORM gate.wait();
  RETURN pg_catalog.pg_try_advisory_lock(key_hash);
END $$;
"""


@contextmanager
def at_gate(conn: Conn, gate: str, worker: Worker, step: Callable[[], Any]) -> Iterator[Future[Any]]:
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


def two_of_a_key(conn: Conn) -> tuple[UUID, UUID]:
    return plain(conn, lock_key="k", priority=1), plain(conn, lock_key="k", priority=2)


def parked(conn: Conn, claimant: Worker, **columns: Any) -> UUID:
    """A row of a busy key that a claim has found and parked."""
    job_id = plain(conn, **columns)
    assert claimant.claim().job is None
    assert row(conn, job_id)["blocked_on"] == "key"
    return job_id


COME_BACK: dict[str, Callable[[Conn, Worker, Job], object]] = {
    "hand_back": lambda conn, worker, job: worker.finish(job, "hand_back", error="why"),
    "retry at once": lambda conn, worker, job: worker.finish(job, "retry", error="e", delay_sec=0.0),
    "drain": lambda conn, worker, job: lifecycle.settle(conn, worker.name, "drain", "gone"),
    "crash": lambda conn, worker, job: lifecycle.settle(conn, worker.name, "crash", "gone"),
    "reap": lambda conn, worker, job: (expire(conn, job.job_id), lifecycle.reap(conn)),
}


@pytest.mark.parametrize("come_back", COME_BACK)
def test_a_job_that_comes_back_beside_a_claim_goes_first(conn: Conn, one: Worker, two: Worker, come_back: str) -> None:
    """When the claim looked at the queue it was running; when the claim has its key, it waits again."""
    old, _ = two_of_a_key(conn)
    job = one.take()
    with at_gate(conn, BEFORE_THE_LOCK, two, two.claim) as claim:
        COME_BACK[come_back](conn, one, job)
    assert ids(claim.result()) == [old]


def test_a_parked_row_whose_key_becomes_free_beside_a_claim_goes_first(conn: Conn, one: Worker, two: Worker) -> None:
    """It was parked when the claim looked, so it was no candidate; a later job of the key was one."""
    job = one.start_new(plain, lock_key="k", priority=0)
    old = parked(conn, two, lock_key="k", priority=1)
    plain(conn, lock_key="k", priority=2)
    other = plain(conn, priority=3)
    with at_gate(conn, BEFORE_THE_LOCK, two, lambda: lifecycle.step(two.session, ["q"], BACKOFF_SEC, 5, ())) as claim:
        one.finish(job)
    assert ids(claim.result()) == [old, other]
    assert len(keys_held(conn)) == 2


def test_a_key_that_becomes_free_on_the_way_is_its_first_jobs(conn: Conn, worker: Worker) -> None:
    """The first try at its lock fails, and no later one."""
    old, _ = two_of_a_key(conn)
    conn.execute(
        """
        CREATE SCHEMA gate;
        CREATE FUNCTION gate.pg_try_advisory_lock(key_hash int) RETURNS boolean LANGUAGE sql AS $$
          SELECT set_config('gate.tries', (current_setting('gate.tries')::int + 1)::text, false) <> '1'
             AND pg_catalog.pg_try_advisory_lock(key_hash)
        $$;
        """
    )
    worker.conn.execute("SET search_path = gate, public, pg_catalog; SET gate.tries = 0")
    assert ids(worker.claim()) == [old]
    assert value(worker.conn, "SELECT current_setting('gate.tries')::int") > 1


def test_beside_a_row_that_is_being_changed_the_next_of_its_key_waits(conn: Conn, one: Worker, two: Worker) -> None:
    old, new = two_of_a_key(conn)
    with one.conn.transaction():
        one.conn.execute("UPDATE dl_jobs SET progress = '{}' WHERE job_id = %s", (old,))
        claim = two.claim()
        assert claim.job is None
        assert claim.look_again or (claim.due_in or 99) <= 0.1
        assert (row(conn, new)["blocked_on"], keys_held(conn)) == (None, [])
    assert ids(two.claim()) == [old]


@pytest.mark.parametrize(
    "odd", [None, "cancel_requested = true", "attempt = max_attempts", "available_at = now() + interval '1 h'"]
)
def test_a_parked_row_that_nobody_could_make_ready_goes_before_a_ready_one_unless_it_may_not_start(
    conn: Conn, one: Worker, two: Worker, odd: str | None
) -> None:
    """Somebody had it locked when the run of its key ended; a later job of the key is ready."""
    job = one.start_new(plain, lock_key="k", priority=0)
    old = parked(conn, two, lock_key="k", priority=1)
    new = plain(conn, lock_key="k", priority=2)
    with ended_beside(conn, one, job, old):
        assert odd or two.claim().job is None
    assert waits(conn, old, new) == ["key", None]
    if odd:
        with quietly(conn):
            conn.execute(f"UPDATE dl_jobs SET {odd} WHERE job_id = %s", (old,))
            conn.execute("UPDATE dl_freed SET since = since - interval '1 s'")
    assert ids(two.claim()) == [new if odd else old]


def test_a_row_that_somebody_holds_on_to_hides_no_other_key(conn: Conn, one: Worker, two: Worker) -> None:
    """However many jobs of its key stand before the others: then the order has to wait."""
    first = plain(conn, lock_key="k")
    many(conn, 1_200, "k", created_at="now() + i * interval '1 us'")
    other = plain(conn, lock_key="other", made_sec=1)
    with locked(one.conn, first):
        claims = [two.claim() for _ in range(5)]
        assert [job_id for step in claims for job_id in ids(step)] == [other]
    assert ids(two.claim()) == [first]
