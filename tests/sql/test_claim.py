"""A claim takes the best job that may run now, once, and says when the next one may."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import pytest
from foreign import Foreign
from hands import Worker, Workers, age, enqueue, journal, kinds, many, plain, quietly, row, started, state, value
from patience import PATIENCE

from dataloader.queue import db, lifecycle


def test_the_best_is_the_lowest_priority_then_the_oldest(conn: db.Connection, worker: Worker) -> None:
    young = plain(conn, priority=50, made_sec=-10)
    late = plain(conn, priority=100, made_sec=-99)
    old = plain(conn, priority=50, made_sec=-20)
    first = plain(conn, priority=0, made_sec=-1)
    claimed = [worker.take().job_id for _ in range(4)]
    assert claimed == [first, old, young, late]
    assert worker.claim().job is None


def test_the_order_holds_between_rows_that_were_parked_and_others(conn: db.Connection, workers: Workers) -> None:
    worker, other = workers(), workers()
    plain(conn, lock_key="k", priority=0)
    run = worker.take()
    parked = [plain(conn, lock_key="k", priority=priority) for priority in (1, 3, 5)]
    assert other.claim().job is None
    others = [plain(conn, priority=priority) for priority in (2, 4, 6)]
    worker.finish(run)
    for job_id in (job_id for pair in zip(parked, others, strict=True) for job_id in pair):
        job = worker.take()
        assert job.job_id == job_id
        worker.finish(job)


def test_only_its_own_queue_is_claimed(conn: db.Connection, worker: Worker) -> None:
    plain(conn, queue="other", priority=0)
    mine = plain(conn, queue="q")
    assert worker.take("q").job_id == mine
    assert worker.claim("q").job is None


def test_a_row_of_the_contracts_columns_is_all_a_producer_needs(conn: db.Connection, worker: Worker) -> None:
    job_id = plain(conn, lock_key="k", args='{"a": 1}', partition_key="p", idempotency_key="i")
    job = worker.take()
    assert (job.job_id, job.queue, job.task, job.args_json) == (job_id, "q", "t", '{"a": 1}')
    assert (job.lock_key, job.partition_key, job.idempotency_key) == ("k", "p", "i")
    assert (job.attempt, job.max_attempts, job.lease_ttl_sec, job.claimed_by) == (1, 5, 60, worker.name)
    assert worker.finish(job) == "succeeded"


def test_the_claim_is_recorded_with_lease_worker_and_backend(conn: db.Connection, worker: Worker) -> None:
    job_id = plain(conn, lease_ttl_sec=77)
    worker.take()
    found = row(conn, job_id)
    assert (found["status"], found["attempt"]) == ("running", 1)
    assert found["claimed_by"] == worker.name
    assert found["claimed_pid"] == worker.pid
    assert found["claimed_backend_start"] == worker.session.backend_start
    assert found["claimed_backend_start"] == value(
        conn, "SELECT backend_start FROM pg_stat_activity WHERE pid = %s", worker.pid
    )
    assert (found["lease_expires_at"] - found["heartbeat_at"]).total_seconds() == 77
    assert found["started_at"] == found["heartbeat_at"]
    assert found["finished_at"] is None
    assert journal(conn, job_id)[1:] == [("picked", {"attempt": 1, "worker": worker.name})]


def test_started_at_is_kept_from_the_first_start(conn: db.Connection, worker: Worker) -> None:
    job_id = plain(conn)
    worker.finish(worker.take(), "retry", error="again")
    age(conn, job_id, "started_at", 3_600)
    first = row(conn, job_id)["started_at"]
    assert worker.take().attempt == 2
    assert row(conn, job_id)["started_at"] == first


def test_a_row_of_the_future_is_not_claimed_and_its_time_is_told(conn: db.Connection, worker: Worker) -> None:
    plain(conn, in_sec=3_600)
    soon = plain(conn, in_sec=500)
    claim = worker.claim()
    assert claim.job is None
    assert not claim.look_again
    assert claim.due_in == pytest.approx(500, abs=5)
    assert (row(conn, soon)["blocked_on"], state(conn, soon)) == ("time", ("queued", 0))


def test_an_empty_queue_has_no_due_time(conn: db.Connection, worker: Worker) -> None:
    plain(conn, queue="other", in_sec=5)
    claim = worker.claim()
    assert (claim.job, claim.look_again, claim.due_in, claim.backoffs) == (None, False, None, 0)


def test_a_row_whose_time_came_is_claimed_without_anybody_waking_it(conn: db.Connection, worker: Worker) -> None:
    """Its time passes in earnest: nothing but the clock makes it claimable."""
    job_id = plain(conn, in_sec=1)
    assert worker.claim().job is None
    conn.execute("SELECT pg_sleep(1)")
    assert row(conn, job_id)["blocked_on"] == "time"
    assert worker.take().job_id == job_id


def test_a_plain_update_of_its_time_makes_a_row_claimable_or_not(conn: db.Connection, worker: Worker) -> None:
    job_id = plain(conn, in_sec=3_600)
    age(conn, job_id, "available_at", 3_601)
    assert row(conn, job_id)["blocked_on"] is None
    conn.execute("UPDATE dl_jobs SET available_at = now() + interval '1 hour' WHERE job_id = %s", (job_id,))
    assert worker.claim().job is None
    age(conn, job_id, "available_at", 3_601)
    assert worker.take().job_id == job_id


def test_many_rows_due_at_once_are_claimed_one_by_one_without_another_word(conn: db.Connection, worker: Worker) -> None:
    conn.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, available_at)"
        " SELECT gen_random_uuid(), 'q', 't', i::text, clock_timestamp() + interval '1.5 s'"
        "   FROM generate_series(1, 250) i"
    )
    assert worker.claim().job is None
    conn.execute("SELECT pg_sleep(1.6)")
    assert len({worker.take().job_id for _ in range(250)}) == 250
    assert worker.claim().job is None


@pytest.mark.parametrize("moment", ["infinity", "294276-01-01", "4714-11-24 BC", "-infinity"])
def test_f6_dates_that_python_cannot_read_disturb_nobody(conn: db.Connection, worker: Worker, moment: str) -> None:
    job_id = plain(conn, available_at=moment, priority=0)
    other = plain(conn)
    past = moment.startswith(("4714", "-"))
    assert worker.take().job_id == (job_id if past else other)
    claim = worker.claim()
    assert (claim.job.job_id if claim.job else None) == (other if past else None)
    status = lifecycle.status(conn, job_id)
    assert status is not None
    assert status["status"] == ("running" if past else "queued")


def test_spent_attempts_end_lost_at_the_claim_and_the_next_job_is_taken(conn: db.Connection, worker: Worker) -> None:
    spent = plain(conn, attempt=3, max_attempts=3, error="boom", priority=0)
    good = plain(conn)
    assert worker.take().job_id == good
    found = row(conn, spent)
    assert (found["status"], found["attempt"], found["started_at"]) == ("lost", 3, None)
    assert found["error"] == "no attempts left: 3 of 3\nboom"
    assert found["finished_at"] is not None
    assert journal(conn, spent)[1:] == [("lost", {"attempt": 3, "by": "claim"})]


def test_max_attempts_of_zero_still_means_one_run(conn: db.Connection, worker: Worker) -> None:
    job_id = plain(conn, max_attempts=0)
    worker.finish(worker.take(), "retry", error="again")
    assert state(conn, job_id) == ("queued", 1)
    assert worker.claim().job is None
    assert state(conn, job_id) == ("lost", 1)


def test_v12_a_cancellation_by_plain_update_ends_a_queued_job_at_the_claim(conn: db.Connection, worker: Worker) -> None:
    canceled = plain(conn, priority=0)
    conn.execute("UPDATE dl_jobs SET cancel_requested = true WHERE job_id = %s", (canceled,))
    good = plain(conn)
    assert worker.take().job_id == good
    found = row(conn, canceled)
    assert (found["status"], found["attempt"], found["started_at"]) == ("canceled", 0, None)
    assert found["finished_at"] is not None
    assert journal(conn, canceled)[1:] == [("canceled", {"attempt": 0, "by": "claim"})]


def test_one_claim_ends_any_number_of_canceled_rows_on_its_way(conn: db.Connection, worker: Worker) -> None:
    many(conn, 1_500, "k%s")
    conn.execute("UPDATE dl_jobs SET cancel_requested = true")
    good = plain(conn)
    looks = 1
    while (claim := worker.claim()).job is None:
        assert claim.look_again
        looks += 1
    assert claim.job.job_id == good
    assert looks <= 3
    assert value(conn, "SELECT count(*) FROM dl_jobs WHERE status = 'canceled'") == 1_500


def test_only_rows_of_busy_keys_are_parked(conn: db.Connection, worker: Worker) -> None:
    """Nobody would make a parked row ready whose key is free."""
    many(conn, 1_000, "k%s", priority=1)
    conn.execute("UPDATE dl_jobs SET cancel_requested = true")
    many(conn, 100, "free-%s", priority=2)
    worker.take()
    assert value(conn, "SELECT count(*) FROM dl_jobs WHERE blocked_on = 'key'") == 0


def test_eight_workers_claim_three_hundred_jobs_each_exactly_once(conn: db.Connection, workers: Workers) -> None:
    many(conn, 300, "k%s")
    crew = [workers() for _ in range(8)]

    def work(worker: Worker) -> list[UUID]:
        done = []
        while True:
            claim = worker.claim()
            if claim.job:
                assert worker.finish(claim.job) == "succeeded"
                done.append(claim.job.job_id)
            elif not claim.look_again and not value(worker.conn, "SELECT count(*) FROM dl_jobs WHERE status='queued'"):
                return done

    with ThreadPoolExecutor(8) as pool:
        times = Counter(job_id for done in pool.map(work, crew) for job_id in done)
    assert (len(times), set(times.values())) == (300, {1})
    assert value(conn, "SELECT count(*) FROM dl_job_events WHERE kind = 'picked'") == 300
    assert value(conn, "SELECT bool_and(attempt = 1 AND status = 'succeeded') FROM dl_jobs")


def test_c1_one_claim_never_takes_more_than_one_row(conn: db.Connection, worker: Worker) -> None:
    """With statistics of an empty table and plans that re-execute what they can."""
    conn.execute("ANALYZE dl_jobs")
    many(conn, 200, "k%s")
    for setting in ("enable_hashjoin", "enable_material", "enable_indexscan", "enable_bitmapscan"):
        worker.conn.execute(f"SET {setting} = off")
    for taken in range(1, 20):
        worker.take()
        assert value(conn, "SELECT count(*) FROM dl_jobs WHERE status = 'running'") == taken
        assert value(conn, "SELECT count(*) FROM dl_job_events WHERE kind = 'picked'") == taken


def test_a_locked_row_is_passed_over_not_waited_for(conn: db.Connection, worker: Worker) -> None:
    first, second = plain(conn, priority=0), plain(conn)
    with conn.transaction():
        conn.execute("SELECT FROM dl_jobs WHERE job_id = %s FOR UPDATE", (first,))
        assert worker.take().job_id == second
    assert worker.take().job_id == first


def test_a_claim_whose_only_row_is_at_another_claim_comes_back_soon(conn: db.Connection, workers: Workers) -> None:
    """The other claim may yet fail: then nobody else would tell that the row is free again."""
    one, two = workers(), workers()
    job_id = plain(conn)
    with one.conn.transaction(force_rollback=True):
        assert one.take().job_id == job_id
        claim = two.claim()
        assert claim.job is None
        assert claim.due_in is not None
        assert claim.due_in <= 0.1
    one.conn.execute("SELECT pg_advisory_unlock_all()")
    assert two.take().job_id == job_id


def test_a_row_younger_than_the_claim_that_sees_it_is_not_taken_for_one_of_the_future(
    conn: db.Connection, worker: Worker
) -> None:
    """A claim that waited has an old now(); what was inserted meanwhile is due all the same."""
    with worker.conn.transaction():
        value(worker.conn, "SELECT now()")
        job_id = plain(conn)
        assert worker.take().job_id == job_id


def test_a_row_that_was_never_placed_is_put_right_not_chewed_for_ever(conn: db.Connection, worker: Worker) -> None:
    """Triggers may be off where rows come from (a restore, a replica): a future row that looks claimable."""
    job_id = plain(conn, in_sec=3_600)
    conn.execute("UPDATE dl_jobs SET blocked_on = NULL WHERE job_id = %s", (job_id,))
    assert worker.claim().job is None
    assert worker.claim().due_in == pytest.approx(3_600, abs=5)
    assert row(conn, job_id)["blocked_on"] == "time"


def test_a_row_before_its_time_waits_for_it_also_with_max_attempts_0(conn: db.Connection, worker: Worker) -> None:
    """A job may run once, whatever its max_attempts."""
    job_id = plain(conn, in_sec=3_600, max_attempts=0)
    conn.execute("UPDATE dl_jobs SET blocked_on = NULL WHERE job_id = %s", (job_id,))
    assert worker.claim().job is None
    assert (state(conn, job_id), row(conn, job_id)["blocked_on"]) == (("queued", 0), "time")


def test_a_foreign_worker_claims_and_ends_jobs_beside_ours(
    conn: db.Connection, worker: Worker, foreign: Foreign
) -> None:
    jobs = [enqueue(conn, priority=priority) for priority in range(3)]
    theirs = foreign.claim()
    assert theirs is not None
    assert theirs[0] == jobs[0]
    assert worker.take().job_id == jobs[1]
    foreign.finish(*theirs)
    assert state(conn, jobs[0]) == ("succeeded", 1)
    assert kinds(conn, jobs[1]) == ["queued", "picked"]


def test_a_claim_waits_for_no_lock_on_queued_rows(conn: db.Connection, workers: Workers) -> None:
    """A transaction of somebody else that holds every queued row costs a claim nothing but those rows."""
    one = workers()
    many(conn, 50, "k%s")
    with conn.transaction():
        conn.execute("UPDATE dl_jobs SET priority = 7")
        with started(one.claim, None, conn) as claim:
            assert claim.result(PATIENCE).job is None
    assert one.take()


def test_a_start_is_journaled_at_its_time_and_not_at_the_claims_beginning(conn: db.Connection, worker: Worker) -> None:
    """The row may be younger than the claim that finds it."""
    with worker.conn.transaction():
        worker.conn.execute("SELECT now()")
        job_id = enqueue(conn)
        worker.take()
    queued, picked = conn.execute("SELECT ts FROM dl_job_events WHERE job_id = %s ORDER BY event_id", (job_id,))
    assert queued < picked


def test_a_claim_that_wakes_only_rows_that_may_not_start_looks_again_for_more(
    conn: db.Connection, worker: Worker
) -> None:
    """A claim wakes a hundred due rows at most."""
    many(conn, 101, "k%s")
    good = plain(conn)
    with quietly(conn):
        conn.execute("UPDATE dl_jobs SET blocked_on = 'time', available_at = created_at, cancel_requested = true")
        conn.execute(
            "UPDATE dl_jobs SET available_at = now(), cancel_requested = false WHERE job_id = %s",
            (good,),
        )
    claim = worker.claim()
    assert (claim.job, claim.look_again) == (None, True)
    assert worker.take().job_id == good
