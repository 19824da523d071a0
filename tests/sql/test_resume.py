"""After a loss a living worker keeps what it runs and what it has run; a farm settles what dead workers had claimed."""

from __future__ import annotations

import pytest
from hands import Conn, Worker, Workers, journal, plain, row, state

from dataloader.queue import lifecycle
from dataloader.queue.job import Job

GONE = "the worker was gone"


def claimed(worker: Worker, count: int) -> list[Job]:
    """Jobs of one claim, of which the worker has begun none; the claim marks the first as begun."""
    return lifecycle.step(worker.session, ["q"], 15, count).jobs


def test_what_a_worker_does_not_know_goes_back_uncounted(conn: Conn, worker: Worker) -> None:
    held, unknown = [plain(conn) for _ in range(2)]
    jobs = {job.job_id: job for job in claimed(worker, 2)}
    assert lifecycle.hand_back(conn, worker.name, [jobs[held]], "the session was lost") == [(unknown, "queued")]
    assert (state(conn, held), state(conn, unknown)) == (("running", 1), ("queued", 0))
    assert journal(conn, unknown)[-1] == ("requeue", {"reason": "not started: the session was lost", "attempt": 0})


def test_a_claim_of_another_attempt_is_unknown(conn: Conn, worker: Worker) -> None:
    """A database that was set back has an older claim of this worker than the worker knows."""
    job_id = plain(conn)
    (job,) = claimed(worker, 1)
    newer = job._replace(attempt=2)
    assert lifecycle.still_held(conn, worker.name, [newer]) == set()
    assert lifecycle.hand_back(conn, worker.name, [newer], "the session was lost") == [(job_id, "queued")]


def test_what_others_hold_and_locked_rows_are_left_alone(conn: Conn, workers: Workers) -> None:
    one, two = workers(), workers()
    locked, other = plain(conn), plain(conn)
    (mine,) = claimed(one, 1)
    (theirs,) = claimed(two, 1)
    assert {mine.job_id, theirs.job_id} == {locked, other}
    with two.conn.transaction():
        two.conn.execute("SELECT FROM dl_jobs WHERE job_id = %s FOR UPDATE", (mine.job_id,))
        assert lifecycle.hand_back(conn, one.name, [], "the session was lost") == []
    assert lifecycle.still_held(conn, one.name, [mine, theirs]) == {mine.job_id}
    assert state(conn, theirs.job_id) == ("running", 1)


def test_of_a_dead_worker_only_what_it_had_begun_counts(conn: Conn, worker: Worker) -> None:
    jobs = [plain(conn) for _ in range(3)]
    claimed(worker, 3)
    begun = [job_id for job_id in jobs if row(conn, job_id)["heartbeat_at"] is not None]
    assert len(begun) == 1, "the claim marks its first job"
    settled = lifecycle.settle_gone(conn, worker.name, GONE)
    assert {each.job_id for each in settled} == set(jobs)
    for job_id in jobs:
        assert state(conn, job_id) == ("queued", 1 if job_id in begun else 0)
        how = f"{GONE} on attempt 1" if job_id in begun else f"not started: {GONE}"
        assert journal(conn, job_id)[-1][1]["reason"] == how
    assert lifecycle.settle_gone(conn, worker.name, GONE) == []


def test_a_job_that_ends_its_farm_at_once_is_handed_back_once(conn: Conn, workers: Workers) -> None:
    """It looks like one that was not begun, each time."""
    first, job_id = plain(conn, priority=1), plain(conn, priority=2)
    states = []
    for _ in range(3):
        worker = workers()
        claimed(worker, 2)
        lifecycle.settle_gone(conn, worker.name, GONE)
        states.append(state(conn, job_id))
        conn.execute("UPDATE dl_jobs SET available_at = now(), blocked_on = NULL WHERE job_id = %s", (first,))
    assert states == [("queued", 0), ("queued", 1), ("queued", 1)]


@pytest.mark.parametrize(("host", "found"), [("host", True), ("hos", False), ("host:1", True), ("%", False)])
def test_the_holders_of_a_host(conn: Conn, dsn: str, host: str, found: bool) -> None:
    worker = Worker(dsn, "host:1:a")
    plain(conn)
    worker.take()
    assert lifecycle.holders(conn, host) == ([worker.name] if found else [])
    worker.conn.close()
