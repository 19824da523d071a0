"""The reaper takes what nobody renews any more, each job once, and ends the session that outlived its right."""

from __future__ import annotations

import pytest
from hands import (
    BACKOFF_SEC,
    Conn,
    Worker,
    Workers,
    age,
    enqueue,
    expire,
    journal,
    keys_held,
    plain,
    row,
    state,
    value,
)

from dataloader.queue import lifecycle
from dataloader.queue.job import Job


def test_a_live_lease_is_left_alone(conn: Conn, worker: Worker) -> None:
    job_id = plain(conn)
    worker.take()
    assert lifecycle.reap(conn) is None
    assert state(conn, job_id) == ("running", 1)


def test_an_expired_one_is_queued_again_at_once_the_first_time(conn: Conn, worker: Worker) -> None:
    job_id = enqueue(conn)
    worker.take()
    expire(conn, job_id)
    conn.execute("UPDATE dl_jobs SET heartbeat_at = '2001-02-03 04:05:06+00'")
    found = lifecycle.reap(conn)
    assert (found.job_id, found.status) == (job_id, "queued")
    after = row(conn, job_id)
    assert (after["status"], after["attempt"], after["blocked_on"]) == ("queued", 1, None)
    assert (after["lease_expires_at"], after["claimed_by"], after["finished_at"]) == (None, None, None)
    reason = "lease expired on attempt 1: no heartbeat since 2001-02-03T04:05:06Z"
    assert after["error"] == reason
    assert journal(conn, job_id)[-1] == ("requeue", {"reason": reason, "attempt": 1})
    assert lifecycle.reap(conn) is None


def gone(conn: Conn, dead: Worker) -> list[tuple[str, int]]:
    """Its machine is gone: nobody settles what it held, and the leases run out. The jobs afterwards, by priority."""
    dead.conn.execute("SELECT pg_advisory_unlock_all()")
    conn.execute(
        "UPDATE dl_jobs SET claimed_pid = NULL, lease_expires_at = now() - interval '1 s' WHERE status = 'running'"
    )
    while lifecycle.reap(conn):
        pass
    return conn.execute("SELECT status::text, attempt FROM dl_jobs ORDER BY priority").fetchall()


def ahead(conn: Conn, worker: Worker, number: int, **more: int) -> list[Job]:
    """Claim so many jobs at once, which all may run once."""
    for priority in range(number):
        enqueue(conn, priority=priority, **({"max_attempts": 1} | more))
    return lifecycle.step(worker.session, ["q"], BACKOFF_SEC, number).jobs


def test_what_was_claimed_ahead_and_never_begun_is_not_counted(conn: Conn, worker: Worker) -> None:
    jobs = ahead(conn, worker, 5)
    assert [row(conn, job.job_id)["heartbeat_at"] is None for job in jobs] == [False, True, True, True, True]
    assert gone(conn, worker) == [("lost", 1), *[("queued", 0)] * 4]
    last = row(conn, jobs[4].job_id)
    assert (last["error"], last["blocked_on"]) == (None, None)
    reason = "not started: the lease expired"
    assert journal(conn, jobs[4].job_id)[-1] == ("requeue", {"reason": reason, "attempt": 0})


@pytest.mark.parametrize("sign", ["beat", "progress", "keep"])
def test_what_was_claimed_ahead_and_begun_is_counted(conn: Conn, worker: Worker, sign: str) -> None:
    """Its worker has beaten for it, or the keeper has."""
    _, begun, _ = ahead(conn, worker, 3)
    if sign == "keep":
        assert lifecycle.keep(conn, [begun.job_id], [begun.attempt], begun.claimed_by)
    else:
        lifecycle.beat(worker.conn, [begun], '{"n": 1}' if sign == "progress" else None, sign == "beat")
    assert gone(conn, worker) == [("lost", 1), ("lost", 1), ("queued", 0)]


def test_v6_a_job_that_ends_its_machine_before_it_beats_is_lost_in_the_end(conn: Conn, workers: Workers) -> None:
    """It cannot be told from one that was not begun: each of its attempts is given back once."""
    enqueue(conn, priority=0, max_attempts=100), enqueue(conn, priority=1, max_attempts=2)
    worker, found = workers(), []
    for _ in range(4):
        conn.execute("UPDATE dl_jobs SET available_at = now() WHERE status = 'queued'")
        assert len(lifecycle.step(worker.session, ["q"], BACKOFF_SEC, 2).jobs) == 2
        found.append(gone(conn, worker)[1])
    assert found == [("queued", 0), ("queued", 1), ("queued", 1), ("lost", 2)]


@pytest.mark.parametrize(("attempt", "delay"), [(1, 0), (2, 5), (3, 25), (4, 125), (5, 600), (2_000_000, 600)])
def test_a_crash_waits_longer_each_time(conn: Conn, attempt: int, delay: float) -> None:
    job_id = plain(conn, status="running", attempt=attempt, max_attempts=3_000_000)
    conn.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s'")
    assert lifecycle.reap(conn)
    found = row(conn, job_id)
    assert (found["available_at"] - found["now"]).total_seconds() == pytest.approx(delay, abs=2)


def test_a_running_row_without_a_lease_has_one_from_its_last_sign_of_life(conn: Conn) -> None:
    silent = plain(conn, status="running", attempt=1, lease_ttl_sec=60, made_sec=-61)
    plain(conn, status="running", attempt=1, lease_ttl_sec=60, made_sec=-59)
    found = lifecycle.reap(conn)
    assert found.job_id == silent
    assert lifecycle.reap(conn) is None


def test_after_an_outage_a_living_worker_has_time_to_come_back(conn: Conn, worker: Worker) -> None:
    """For as long as it needs to reach the database, and a third of its lease, the longest pause between heartbeats."""
    job_id = enqueue(conn, lease_ttl_sec=30, max_attempts=1)
    worker.take()
    for column in ("heartbeat_at", "lease_expires_at", "created_at", "started_at"):
        age(conn, job_id, column, 100)
    for up_sec in (0, 60, 69.9):
        assert lifecycle.reap(conn, up_sec, patience_sec=60) is None
    assert lifecycle.reap(conn, 70.1, patience_sec=60)
    assert state(conn, job_id) == ("lost", 1)


@pytest.mark.parametrize("column", ["heartbeat_at", "lease_expires_at", "created_at"])
def test_a_worker_that_came_back_and_fell_silent_gets_no_more_time(conn: Conn, worker: Worker, column: str) -> None:
    """What renewed the lease last may have been the keeper; what has begun since was begun by the living."""
    job_id = enqueue(conn, lease_ttl_sec=1)
    worker.take()
    for aged in ("heartbeat_at", "lease_expires_at", "created_at"):
        age(conn, job_id, aged, 5 if aged == column else 100)
    assert lifecycle.reap(conn, 3, patience_sec=60) is None
    assert lifecycle.reap(conn, 10, patience_sec=60)


def test_the_zombies_session_is_ended_and_with_it_the_key(conn: Conn, workers: Workers) -> None:
    zombie, heir = workers(), workers()
    job_id = plain(conn, lock_key="k")
    zombie.take()
    expire(conn, job_id)
    lifecycle.reap(conn)
    assert keys_held(conn) == []
    assert value(conn, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", zombie.pid) == 0
    claim = heir.claim()
    assert claim.backoffs == 0
    assert claim.job.attempt == 2


def test_a_session_that_has_the_zombies_number_by_now_is_left_alone(conn: Conn, workers: Workers) -> None:
    zombie, bystander = workers(), workers()
    job_id = plain(conn)
    zombie.take()
    conn.execute("UPDATE dl_jobs SET claimed_pid = %s", (bystander.pid,))
    expire(conn, job_id)
    assert lifecycle.reap(conn)
    assert value(bystander.conn, "SELECT 1") == 1


def test_a_foreign_workers_expired_job_is_taken_too(conn: Conn) -> None:
    job_id = plain(conn)
    conn.execute("UPDATE dl_jobs SET status = 'running', attempt = 1, lease_expires_at = now() - interval '1 s'")
    assert lifecycle.reap(conn)
    assert state(conn, job_id) == ("queued", 1)
    assert row(conn, job_id)["error"] == "lease expired on attempt 1: no heartbeat since the start"


def test_a3_a_row_that_somebody_holds_is_skipped_not_waited_for(conn: Conn, workers: Workers) -> None:
    one, two = workers(), workers()
    plain(conn), plain(conn)
    held, other = one.take(), two.take()
    for job in (held, other):
        expire(conn, job.job_id)
    with one.conn.transaction():
        assert lifecycle.beat(one.conn, [held], None, False) is False
        found = lifecycle.reap(conn)
        assert found.job_id == other.job_id
        assert lifecycle.reap(conn) is None
    assert lifecycle.reap(conn) is None
    assert state(conn, held.job_id) == ("running", 1)
