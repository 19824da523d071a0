"""Every write to a running job names its claim: job, attempt, worker, running. Otherwise nothing is changed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hands import DONE, Conn, Worker, Workers, expire, many, plain, started, successor, until
from readings import journal, keys_held, kinds, row, state, value

from dataloader.queue import lifecycle
from dataloader.queue.job import Job
from dataloader.queue.lifecycle import Ended

VERBS: dict[str, Callable[[Worker, Job], Any]] = {
    "beat": lambda worker, job: lifecycle.beat(worker.conn, [job], '{"p": 1}', True) is not None,
    "keep": lambda worker, job: lifecycle.keep(worker.conn, [job.job_id], [job.attempt], job.claimed_by),
    "retake": lambda worker, job: lifecycle.retake(worker.session, [job]),
    "leap": lambda worker, job: lifecycle.leap(worker.conn, job, 7),
    "succeed": lambda worker, job: worker.finish(job, "succeed", progress='{"p": 1}'),
    "retry": lambda worker, job: worker.finish(job, "retry", error="boom", delay_sec=30),
    "fail": lambda worker, job: worker.finish(job, "fail", error="boom"),
    "cancel": lambda worker, job: worker.finish(job, "cancel"),
    "hand_back": lambda worker, job: worker.finish(job, "hand_back", error="drain"),
    "succeed, by a short claim": lambda worker, job: (
        lifecycle._step_plain(replace(worker.session, worker=job.claimed_by), "none", 1, [Ended(job, DONE)])[0].ended
    ),
}
STRANGERS: dict[str, Callable[[Job], Job]] = {
    "an earlier attempt": lambda job: job._replace(attempt=job.attempt - 1),
    "a later attempt": lambda job: job._replace(attempt=job.attempt + 1),
    "another worker": lambda job: job._replace(claimed_by="host:9:boot"),
}


def everything(conn: Conn) -> tuple[list[Any], list[Any]]:
    jobs = conn.execute("SELECT dl_jobs::text FROM dl_jobs ORDER BY job_id").fetchall()
    return jobs, conn.execute("SELECT dl_job_events::text FROM dl_job_events ORDER BY event_id").fetchall()


def test_a_beat_renews_the_lease_and_stores_news_and_may_stay_out_of_the_journal(conn: Conn, worker: Worker) -> None:
    job = worker.start_new(lease_ttl_sec=33)
    expire(conn, job.job_id)
    before = row(conn, job.job_id)
    assert lifecycle.beat(worker.conn, [job], '{"processed": 5}', True) is False
    after = row(conn, job.job_id)
    assert after["heartbeat_at"] > before["heartbeat_at"]
    assert (after["lease_expires_at"] - after["heartbeat_at"]).total_seconds() == 33
    assert after["progress"] == {"processed": 5}
    assert journal(conn, job.job_id)[-1] == ("heartbeat", {"attempt": 1, "progress": {"processed": 5}})
    for news in ('{"processed": 6}', None):
        lifecycle.beat(worker.conn, [job], news, False)
        assert row(conn, job.job_id)["progress"] == {"processed": 6}
    assert kinds(conn, job.job_id) == ["queued", "picked", "heartbeat"]


def test_the_keeper_renews_the_lease_but_is_no_heartbeat(conn: Conn, worker: Worker) -> None:
    job = worker.start_new(plain)
    conn.execute("UPDATE dl_jobs SET lease_expires_at = now() + interval '1 s'")
    beat = row(conn, job.job_id)["heartbeat_at"]
    assert lifecycle.keep(conn, [job.job_id], [job.attempt], job.claimed_by)
    found = row(conn, job.job_id)
    assert (found["lease_expires_at"] - found["now"]).total_seconds() == pytest.approx(60, abs=30)
    assert found["heartbeat_at"] == beat
    expire(conn, job.job_id)
    assert not lifecycle.keep(conn, [job.job_id], [job.attempt], job.claimed_by), "its key may be another job's by now"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("stranger", STRANGERS)
def test_a1_a2_nothing_changes_without_the_claims_name(conn: Conn, worker: Worker, verb: str, stranger: str) -> None:
    job = worker.start_new()
    before = everything(conn)
    assert not VERBS[verb](worker, STRANGERS[stranger](job))
    assert everything(conn) == before


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("status", ["queued", "succeeded", "failed", "canceled", "lost"])
def test_v3_nothing_is_written_to_a_job_that_does_not_run(conn: Conn, worker: Worker, verb: str, status: str) -> None:
    """Even where every other part of the claim's name still stands in the row."""
    job = worker.start_new()
    conn.execute("UPDATE dl_jobs SET status = %s WHERE job_id = %s", (status, job.job_id))
    conn.execute("UPDATE dl_jobs SET claimed_by = %s WHERE job_id = %s", (worker.name, job.job_id))
    before = everything(conn)
    assert not VERBS[verb](worker, job)
    assert everything(conn) == before


def test_a6_a_claim_leaps_over_every_number_that_was_given_out(conn: Conn, worker: Worker) -> None:
    """And the claims after it go on from there."""
    job = worker.start_new()
    assert [lifecycle.leap(conn, job, fence) for fence in (1, 99, 5)] == [2, 100, 101]
    worker.finish(job, "hand_back")
    assert worker.take().claim == 102
    assert state(conn, job.job_id) == ("running", 1)


def test_c4_heartbeats_are_heap_only_updates(conn: Conn, workers: Workers) -> None:
    """No index holds what a heartbeat writes, in a table as full as a queue in use."""
    many(conn, 2_000, "k%s")
    crew = [workers() for _ in range(10)]
    jobs = [one.take() for one in crew]
    for one in (conn, *(one.conn for one in crew)):
        one.execute("SELECT pg_stat_force_next_flush()")
    counted = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'dl_jobs'"
    before = conn.execute(counted).fetchone() or (0, 0)
    for _ in range(20):
        for one, job in zip(crew, jobs, strict=True):
            lifecycle.beat(one.conn, [job], None, False)
    for one in crew:
        one.conn.execute("SELECT pg_stat_force_next_flush()")
    updated, hot = conn.execute(counted).fetchone() or (0, 0)
    assert updated - before[0] == 200
    assert hot - before[1] >= 150  # not one, were the lease in an index; a full page makes a row move now and then


@pytest.mark.parametrize("is_gone", [True, False])
def test_b1_after_a_reconnect_the_key_is_held_again(conn: Conn, workers: Workers, is_gone: bool) -> None:
    """The old session ends, where the server still believes in it."""
    old, new, other = workers(), workers(), workers()
    job_id = plain(conn, lock_key="k")
    plain(conn, lock_key="k")
    job = old.take()
    assert keys_held(conn) == [old.pid]
    if is_gone:
        old.conn.close()
    session = successor(new, old)
    assert lifecycle.retake(session, [job])
    assert is_gone or value(conn, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", old.pid) == 0
    found = row(conn, job_id)
    assert (found["claimed_pid"], found["claimed_backend_start"]) == (new.pid, new.session.backend_start)
    assert (found["status"], found["attempt"], found["claimed_by"]) == ("running", 1, old.name)
    assert keys_held(conn) == [new.pid]
    assert other.claim().job is None
    assert new.finish(job) == "succeeded"
    assert keys_held(conn) == []


def test_a_retake_is_refused_when_somebody_has_the_key_and_then_holds_nothing(conn: Conn, workers: Workers) -> None:
    old, new = workers(), workers()
    job = old.start_new(plain, lock_key="k")
    old.conn.close()
    until(lambda: keys_held(conn) == [], "the lock to go with its session")
    conn.execute("SELECT pg_advisory_lock(hashtext('k'))")
    before = row(conn, job.job_id) | {"now": None}
    assert not lifecycle.retake(successor(new, old), [job])
    assert row(conn, job.job_id) | {"now": None} == before
    assert keys_held(conn) == [conn.info.backend_pid]


def test_a_run_that_is_refused_a_key_or_has_lost_a_job_gets_none_of_its_keys(conn: Conn, workers: Workers) -> None:
    old, new = workers(), workers()
    for key in "abc":
        plain(conn, lock_key=key)
    jobs = lifecycle.step(old.session, ["q"], 15, 3).jobs
    old.conn.close()
    until(lambda: keys_held(conn) == [], "the locks to go with their session")
    session = successor(new, old)
    for job in jobs:
        conn.execute("SELECT pg_advisory_lock(hashtext(%s))", (job.lock_key,))
        assert lifecycle.retake(session, jobs) is False
        assert keys_held(conn) == [conn.info.backend_pid]
        conn.execute("SELECT pg_advisory_unlock_all()")
    expire(conn, jobs[1].job_id)
    assert lifecycle.reap(conn)
    assert lifecycle.retake(session, jobs) is False
    assert keys_held(conn) == []


def test_a_retake_and_a_reap_are_never_both_right(conn: Conn, workers: Workers) -> None:
    old, new, reaper = workers(), workers(), workers()
    job = old.start_new(lock_key="k")
    old.conn.close()
    expire(conn, job.job_id)
    with reaper.conn.transaction():
        assert lifecycle.reap(reaper.conn)
        session = successor(new, old)
        with started(lambda: lifecycle.retake(session, [job]), new.pid, conn) as retake:
            reaper.conn.execute("COMMIT; BEGIN")
            assert retake.result() is False
    assert state(conn, job.job_id) == ("queued", 1)
    assert keys_held(conn) == []
