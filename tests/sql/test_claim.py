"""A claim takes the best job that may run now, once, and says when the next one may."""

from typing import Any

import pytest
from hands import Conn, Worker, age, enqueue, journal, kinds, many, plain, quietly, row, state, value, waits

from dataloader.queue import lifecycle


def test_a_claim_needs_the_contracts_columns_and_records_lease_worker_and_backend(conn: Conn, worker: Worker) -> None:
    given = {"args": '{"a": 1}', "partition_key": "p", "idempotency_key": "i", "lease_ttl_sec": 77}
    job = worker.start_new(plain, lock_key="k", **given)
    assert (job.queue, job.task, job.args_json) == ("q", "t", '{"a": 1}')
    assert (job.lock_key, job.partition_key, job.idempotency_key) == ("k", "p", "i")
    assert (job.attempt, job.max_attempts, job.lease_ttl_sec, job.claimed_by) == (1, 5, 77, worker.name)
    found = row(conn, job.job_id)
    assert (found["status"], found["attempt"], found["claimed_by"]) == ("running", 1, worker.name)
    backend_start = value(conn, "SELECT backend_start FROM pg_stat_activity WHERE pid = %s", worker.pid)
    assert worker.session.backend_start == backend_start
    assert (found["claimed_pid"], found["claimed_backend_start"]) == (worker.pid, backend_start)
    assert (found["lease_expires_at"] - found["heartbeat_at"]).total_seconds() == 77
    assert (found["started_at"], found["finished_at"]) == (found["heartbeat_at"], None)
    assert journal(conn, job.job_id)[1:] == [("picked", {"attempt": 1, "worker": worker.name})]
    worker.finish(job, "retry", error="again")
    age(conn, job.job_id, "started_at", 3_600)
    first = row(conn, job.job_id)["started_at"]
    assert worker.take().attempt == 2
    assert row(conn, job.job_id)["started_at"] == first, "the first start stands"


def test_a_row_of_the_future_is_told_of_and_claimed_without_anybody_waking_it(conn: Conn, worker: Worker) -> None:
    """Its time passes in earnest: nothing but the clock makes it claimable."""
    later, soon = plain(conn, in_sec=3_600), plain(conn, in_sec=500)
    claim = worker.claim()
    assert claim.job is None
    assert not claim.look_again
    assert claim.due_in == pytest.approx(500, abs=60)
    assert state(conn, soon) == ("queued", 0)
    with quietly(conn):
        conn.execute("UPDATE dl_jobs SET available_at = now() + interval '10 ms' WHERE job_id = %s", (later,))
    conn.execute("SELECT pg_sleep(0.01)")
    assert waits(conn, soon, later) == ["time"] * 2
    assert worker.take().job_id == later


@pytest.mark.parametrize("moment", ["infinity", "294276-01-01", "4714-11-24 BC", "-infinity"])
def test_f6_dates_that_python_cannot_read_disturb_nobody(conn: Conn, worker: Worker, moment: str) -> None:
    job_id = plain(conn, available_at=moment, priority=0)
    other = plain(conn)
    past = moment.startswith(("4714", "-"))
    assert worker.take().job_id == (job_id if past else other)
    claim = worker.claim()
    assert (claim.job.job_id if claim.job else None) == (other if past else None)
    status = lifecycle.status(conn, job_id)
    assert status["status"] == ("running" if past else "queued")


@pytest.mark.parametrize(
    ("columns", "becomes", "error"),
    [
        ({"attempt": 3, "max_attempts": 3, "error": "boom"}, "lost", "no attempts left: 3 of 3\nboom"),
        ({"cancel_requested": True}, "canceled", None),
    ],
)
def test_v12_what_may_not_start_ends_at_the_claim_and_the_next_job_is_taken(
    conn: Conn, worker: Worker, columns: dict[str, Any], becomes: str, error: str | None
) -> None:
    odd = plain(conn, priority=0, **columns)
    good = plain(conn)
    assert worker.take().job_id == good
    found, attempt = row(conn, odd), columns.get("attempt", 0)
    assert (found["status"], found["attempt"], found["started_at"], found["error"]) == (becomes, attempt, None, error)
    assert found["finished_at"] is not None
    assert journal(conn, odd)[1:] == [(becomes, {"attempt": attempt, "by": "claim"})]


def test_c1_one_claim_never_takes_more_than_one_row(conn: Conn, worker: Worker) -> None:
    """With statistics of an empty table and plans that re-execute what they can."""
    conn.execute("ANALYZE dl_jobs")
    many(conn, 200, "k%s")
    for setting in ("enable_hashjoin", "enable_material", "enable_indexscan", "enable_bitmapscan"):
        worker.conn.execute(f"SET {setting} = off")
    for taken in range(1, 20):
        worker.take()
        assert value(conn, "SELECT count(*) FROM dl_jobs WHERE status = 'running'") == taken
        assert value(conn, "SELECT count(*) FROM dl_job_events WHERE kind = 'picked'") == taken


def test_a_row_younger_than_its_claim_is_due_and_starts_after_it_was_queued(conn: Conn, worker: Worker) -> None:
    """A claim that waited has an old now(), and what was inserted meanwhile is due all the same."""
    with worker.conn.transaction():
        value(worker.conn, "SELECT now()")
        by_sql, job_id = plain(conn), enqueue(conn)
        assert {worker.take().job_id, worker.take().job_id} == {by_sql, job_id}
    queued, picked = conn.execute("SELECT ts FROM dl_job_events WHERE job_id = %s ORDER BY event_id", (job_id,))
    assert queued < picked


@pytest.mark.parametrize("max_attempts", [5, 0])
def test_a_row_that_was_never_placed_is_put_right_for_good(conn: Conn, worker: Worker, max_attempts: int) -> None:
    """No trigger saw its insert (a restore, a replica). That is no step, so the journal has no line."""
    with quietly(conn):
        job_id = plain(conn, in_sec=3_600, max_attempts=max_attempts)
    assert worker.claim().job is None
    assert worker.claim().due_in == pytest.approx(3_600, abs=60)
    assert (state(conn, job_id), row(conn, job_id)["blocked_on"]) == (("queued", 0), "time")
    assert kinds(conn, job_id) == []


def test_a_claim_that_wakes_only_rows_that_may_not_start_looks_again_for_more(conn: Conn, worker: Worker) -> None:
    """A claim wakes a hundred due rows at most."""
    many(conn, 101, "k%s")
    good = plain(conn)
    with quietly(conn):
        conn.execute("UPDATE dl_jobs SET blocked_on = 'time', available_at = created_at, cancel_requested = true")
        conn.execute("UPDATE dl_jobs SET available_at = now(), cancel_requested = false WHERE job_id = %s", (good,))
    claim = worker.claim()
    assert (claim.job, claim.look_again) == (None, True)
    assert worker.take().job_id == good
