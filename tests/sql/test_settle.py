"""The keeper settles what a dead worker held, at once, after its session is gone."""

from __future__ import annotations

import pytest
from hands import Conn, Worker, Workers, enqueue, journal, keys_held, plain, row, state, value

from dataloader.queue import lifecycle

REASON = "worker killed by signal 9"


def test_e1_a_crash_is_a_spent_attempt(conn: Conn, workers: Workers) -> None:
    dead, heir = workers(), workers()
    job_id = enqueue(conn, lock_key="k", max_attempts=2)
    dead.take()
    (found,) = lifecycle.settle(conn, dead.name, "crash", REASON)
    assert (found.job_id, found.status) == (job_id, "queued")
    assert state(conn, job_id) == ("queued", 1)
    assert row(conn, job_id)["error"] == f"{REASON} on attempt 1"
    assert journal(conn, job_id)[-1] == ("requeue", {"reason": f"{REASON} on attempt 1", "attempt": 1})
    assert heir.take().attempt == 2
    (found,) = lifecycle.settle(conn, heir.name, "crash", REASON)
    assert found.status == "lost"
    assert journal(conn, job_id)[-1] == ("lost", {"reason": f"{REASON} on attempt 2", "attempt": 2})


def test_the_dead_workers_session_is_ended_first(conn: Conn, workers: Workers) -> None:
    """Its backend may outlive it for long when the machine or the link is gone."""
    dead, heir = workers(), workers()
    plain(conn, lock_key="k")
    dead.take()
    assert keys_held(conn) == [dead.pid]
    assert lifecycle.settle(conn, dead.name, "crash", REASON)
    assert value(conn, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", dead.pid) == 0
    claim = heir.claim()
    assert (claim.backoffs, claim.job is None) == (0, False)


def test_i8_uncounted_gives_the_attempt_back(conn: Conn, worker: Worker) -> None:
    job_id = enqueue(conn, max_attempts=1)
    worker.take()
    (found,) = lifecycle.settle(conn, worker.name, "drain", "drain")
    assert found.status == "queued"
    after = row(conn, job_id)
    assert (after["attempt"], after["blocked_on"], after["lease_expires_at"], after["error"]) == (0, None, None, None)
    assert journal(conn, job_id)[-1] == ("requeue", {"reason": "drain", "attempt": 0})


def test_a_worker_that_held_nothing_settles_to_nothing(conn: Conn, workers: Workers) -> None:
    one, two = workers(), workers()
    job_id = enqueue(conn)
    one.take()
    assert lifecycle.settle(conn, two.name, "crash", REASON) == []
    assert state(conn, job_id) == ("running", 1)
    assert value(one.conn, "SELECT 1") == 1


def test_e4_a_timeout_is_an_error_of_the_job(conn: Conn, workers: Workers) -> None:
    first, second = workers(), workers()
    job_id = enqueue(conn, max_attempts=2)
    first.take()
    (found,) = lifecycle.settle(conn, first.name, "timeout", REASON, {"signal": 9, "cpu_sec": 0.5})
    assert found.status == "queued"
    after = row(conn, job_id)
    assert (after["available_at"] - after["now"]).total_seconds() == pytest.approx(30, abs=2)
    reason = f"{REASON} on attempt 1"
    assert after["error"] == reason
    facts = {"reason": reason, "attempt": 1, "signal": 9, "cpu_sec": 0.5}
    assert journal(conn, job_id)[-1] == ("requeue", facts)
    conn.execute("UPDATE dl_jobs SET available_at = now()")
    second.take()
    (found,) = lifecycle.settle(conn, second.name, "timeout", REASON)
    assert found.status == "failed"
