"""The keeper, the reaper and a starting farm give back what dead workers had, each job once, after its session."""

from typing import Any
from uuid import UUID

import pytest
import structlog
from hands import Conn, Worker, Workers, age, enqueue, expire, plain, step
from psycopg.types.json import Jsonb
from readings import journal, keys_held, row, state, value

from dataloader.queue import lifecycle

LOG: Any = structlog.get_logger("worker")
REASON = "worker killed by signal 9"
GONE = "the worker was gone"


def delay(conn: Conn, job_id: UUID) -> float:
    """How many seconds after the last step in its journal the job is due."""
    waits = "SELECT extract(epoch FROM available_at - max(ts))::float8 FROM dl_jobs JOIN dl_job_events USING (job_id)"
    return float(value(conn, f"{waits} WHERE job_id = %s GROUP BY available_at", job_id))


def test_e1_a_crash_is_a_spent_attempt(conn: Conn, workers: Workers) -> None:
    dead, heir = workers(), workers()
    job_id = dead.start_new(lock_key="k", max_attempts=2).job_id
    assert lifecycle.settle(conn, heir.name, "crash", REASON) == [], "it held nothing"
    assert (state(conn, job_id), value(dead.conn, "SELECT 1")) == (("running", 1), 1)
    (found,) = lifecycle.settle(conn, dead.name, "crash", REASON)
    assert (found.job_id, found.status) == (job_id, "queued")
    assert state(conn, job_id) == ("queued", 1)
    assert row(conn, job_id)["error"] == f"{REASON} on attempt 1"
    assert journal(conn, job_id)[-1] == ("requeue", {"reason": f"{REASON} on attempt 1", "attempt": 1})
    assert heir.take().attempt == 2
    (found,) = lifecycle.settle(conn, heir.name, "crash", REASON)
    assert found.status == "lost"
    assert journal(conn, job_id)[-1] == ("lost", {"reason": f"{REASON} on attempt 2", "attempt": 2})


@pytest.mark.parametrize("by", ["the keeper", "the reaper"])
def test_a_dead_workers_session_is_ended_first_and_with_it_its_keys(conn: Conn, workers: Workers, by: str) -> None:
    """Its backend may outlive it for long when the machine or the link is gone."""
    dead, heir = workers(), workers()
    job_id = dead.start_new(plain, lock_key="k").job_id
    assert keys_held(conn) == [dead.pid]
    if by == "the reaper":
        expire(conn, job_id)
    assert lifecycle.reap(conn) if by == "the reaper" else lifecycle.settle(conn, dead.name, "crash", REASON)
    assert keys_held(conn) == []
    assert value(conn, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", dead.pid) == 0
    claim = heir.claim()
    assert (claim.backoffs, claim.job.attempt) == (0, 2)


def test_i8_uncounted_gives_the_attempt_back(conn: Conn, worker: Worker) -> None:
    job_id = worker.start_new(max_attempts=1).job_id
    (found,) = lifecycle.settle(conn, worker.name, "drain", "drain")
    assert found.status == "queued"
    after = row(conn, job_id)
    assert (after["attempt"], after["blocked_on"], after["lease_expires_at"], after["error"]) == (0, None, None, None)
    assert journal(conn, job_id)[-1] == ("requeue", {"reason": "drain", "attempt": 0})


def test_e4_a_timeout_is_an_error_of_the_job(conn: Conn, workers: Workers) -> None:
    first, second = workers(), workers()
    job_id = first.start_new(max_attempts=2).job_id
    (found,) = lifecycle.settle(conn, first.name, "timeout", REASON, {"signal": 9, "cpu_sec": 0.5})
    assert found.status == "queued"
    assert delay(conn, job_id) == 30
    reason = f"{REASON} on attempt 1"
    assert row(conn, job_id)["error"] == reason
    facts = {"reason": reason, "attempt": 1, "signal": 9, "cpu_sec": 0.5}
    assert journal(conn, job_id)[-1] == ("requeue", facts)
    conn.execute("UPDATE dl_jobs SET available_at = now()")
    second.take()
    (found,) = lifecycle.settle(conn, second.name, "timeout", REASON)
    assert found.status == "failed"


def test_a_live_lease_is_left_alone_and_an_expired_one_queued_again_at_once(conn: Conn, worker: Worker) -> None:
    job_id = worker.start_new().job_id
    assert lifecycle.reap(conn) is None
    assert state(conn, job_id) == ("running", 1)
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


@pytest.mark.parametrize("sign", [None, "beat", "progress", "keep"])
def test_what_was_claimed_ahead_is_counted_where_it_has_begun(conn: Conn, worker: Worker, sign: str | None) -> None:
    """Its worker has beaten for it, or the keeper has."""
    for priority in range(3):
        enqueue(conn, priority=priority, max_attempts=1)
    jobs = step(worker, 3).jobs
    assert [row(conn, job.job_id)["heartbeat_at"] is None for job in jobs] == [False, True, True]
    _, second, last = jobs
    if sign == "keep":
        assert lifecycle.keep(conn, [second.job_id], [second.attempt], second.claimed_by)
    elif sign:
        lifecycle.beat(worker.conn, [second], '{"n": 1}' if sign == "progress" else None, sign == "beat")
    assert gone(conn, worker) == [("lost", 1), ("lost", 1) if sign else ("queued", 0), ("queued", 0)]
    found = row(conn, last.job_id)
    assert (found["error"], found["blocked_on"]) == (None, None)
    assert journal(conn, last.job_id)[-1] == ("requeue", {"reason": "not started: the lease expired", "attempt": 0})


@pytest.mark.parametrize("by", ["the reaper", "the next farm"])
def test_v6_a_job_that_ends_its_machine_before_it_beats_is_lost_in_the_end(
    conn: Conn, workers: Workers, by: str
) -> None:
    """It cannot be told from one that was not begun: each of its attempts is given back once."""
    enqueue(conn, priority=0, max_attempts=100)
    job_id, found = enqueue(conn, priority=1, max_attempts=2), []
    for _ in range(4):
        worker = workers()
        conn.execute("UPDATE dl_jobs SET available_at = now() WHERE status = 'queued'")
        assert len(step(worker, 2).jobs) == 2
        gone(conn, worker) if by == "the reaper" else lifecycle.settle_gone(conn, worker.name, GONE)
        found.append(state(conn, job_id))
    assert found == [("queued", 0), ("queued", 1), ("queued", 1), ("lost", 2)]


@pytest.mark.parametrize(("attempt", "sec"), [(1, 0), (2, 5), (3, 25), (4, 125), (5, 600), (2_000_000, 600)])
def test_a_crash_waits_longer_each_time(conn: Conn, attempt: int, sec: int) -> None:
    """Also the job of another service's worker."""
    job_id = plain(conn, status="running", attempt=attempt, max_attempts=3_000_000)
    conn.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s'")
    assert lifecycle.reap(conn)
    assert (state(conn, job_id), delay(conn, job_id)) == (("queued", attempt), sec)
    assert row(conn, job_id)["error"] == f"lease expired on attempt {attempt}: no heartbeat since the start"


def test_a_running_row_without_a_lease_has_one_from_its_last_sign_of_life(conn: Conn) -> None:
    silent = plain(conn, status="running", attempt=1, lease_ttl_sec=600, made_sec=-601)
    plain(conn, status="running", attempt=1, lease_ttl_sec=600, made_sec=-300)
    found = lifecycle.reap(conn)
    assert found.job_id == silent
    assert lifecycle.reap(conn) is None


@pytest.mark.parametrize("column", ["lease_expires_at", "started_at", "heartbeat_at"])
@pytest.mark.parametrize("moment", ["4714-11-24 00:00+00 BC", "294276-12-31 00:00+00"])
def test_a_time_at_the_end_of_the_calendar_keeps_no_other_job(conn: Conn, column: str, moment: str) -> None:
    odd = plain(conn, status="running", attempt=1, lease_ttl_sec=2_147_483_647)
    conn.execute(f"UPDATE dl_jobs SET {column} = %s WHERE job_id = %s", (moment, odd))
    silent = plain(conn, status="running", attempt=1, lease_ttl_sec=60, made_sec=-61)
    reaped = [lifecycle.reap(conn, up_sec, patience_sec=60) for up_sec in (0, 3, 1e9, 1e9)]
    assert silent in {each.job_id for each in reaped if each}


def test_after_an_outage_a_living_worker_has_time_to_come_back(conn: Conn, worker: Worker) -> None:
    """For as long as it needs to reach the database, and a third of its lease, the longest pause between heartbeats."""
    job_id = worker.start_new(lease_ttl_sec=30, max_attempts=1).job_id
    for column in ("heartbeat_at", "lease_expires_at", "created_at", "started_at"):
        age(conn, job_id, column, 100)
    for up_sec in (0, 60, 69.9):
        assert lifecycle.reap(conn, up_sec, patience_sec=60) is None
    assert lifecycle.reap(conn, 70.1, patience_sec=60)
    assert state(conn, job_id) == ("lost", 1)


@pytest.mark.parametrize("column", ["heartbeat_at", "lease_expires_at", "created_at"])
def test_a_worker_that_came_back_and_fell_silent_gets_no_more_time(conn: Conn, worker: Worker, column: str) -> None:
    """The keeper may have renewed the lease last; a living worker has begun the runs since."""
    job_id = worker.start_new(lease_ttl_sec=1).job_id
    for aged in ("heartbeat_at", "lease_expires_at", "created_at"):
        age(conn, job_id, aged, 5 if aged == column else 100)
    assert lifecycle.reap(conn, 3, patience_sec=60) is None
    assert lifecycle.reap(conn, 10, patience_sec=60)


def test_a3_a_row_that_somebody_holds_is_skipped_not_waited_for(conn: Conn, one: Worker, two: Worker) -> None:
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


def test_what_a_worker_does_not_know_goes_back_uncounted(conn: Conn, worker: Worker) -> None:
    held, unknown = [plain(conn) for _ in range(2)]
    jobs = {job.job_id: job for job in step(worker, 2).jobs}
    assert lifecycle.hand_back(conn, worker.name, [jobs[held]], "the session was lost") == [(unknown, "queued")]
    assert (state(conn, held), state(conn, unknown)) == (("running", 1), ("queued", 0))
    # Not "not started": a standby may have lost the end of a run.
    handed_back = {"reason": "the session was lost", "attempt": 0, "worker": worker.name}
    assert journal(conn, unknown)[-1] == ("requeue", handed_back)
    ((step_of,),) = conn.execute("SELECT dl_step_of('requeue', %s)", (Jsonb(handed_back),)).fetchall()
    assert step_of == "handed_back"
    # A database that was set back has an older claim of this worker than the worker knows.
    newer = jobs[held]._replace(attempt=2)
    assert lifecycle.still_held(conn, worker.name, [newer]) == set()
    assert lifecycle.hand_back(conn, worker.name, [newer], "the session was lost") == [(held, "queued")]


@pytest.mark.parametrize(("host", "found"), [("host", True), ("hos", False), ("host:1", True), ("%", False)])
def test_the_holders_of_a_host(conn: Conn, dsn: str, host: str, found: bool) -> None:
    worker = Worker(dsn, "host:1:a")
    worker.start_new(plain)
    assert lifecycle.holders(conn, host) == ([worker.name] if found else [])
    worker.conn.close()
