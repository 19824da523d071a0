"""Rows that strangers hold on to, in transactions that they leave open, stop no other row; nor is there a dead-lock."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar
from uuid import UUID

import psycopg
import pytest
from hands import BACKOFF_SEC, DONE, Conn, Worker, Workers, enqueue, expire, ids, many, plain, step, until
from readings import blocked, keys_held, row, state, value
from test_lock import BEFORE_THE_NEXT_LOOK
from test_order import at_gate

from dataloader.queue import lifecycle, operations
from dataloader.queue.lifecycle import Ended

T = TypeVar("T")


@contextmanager
def locked(dsn: str, where: str, *parameters: object) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """In the block a stranger has these rows locked, and does nothing with them."""
    with psycopg.connect(dsn, application_name="stranger") as stranger:
        stranger.execute(f"SELECT FROM dl_jobs WHERE {where} FOR UPDATE", parameters or None)
        yield stranger
        stranger.rollback()


def test_a_locked_row_keeps_its_own_end_alone(conn: Conn, dsn: str, worker: Worker) -> None:
    enqueue(conn), enqueue(conn), enqueue(conn)
    jobs = step(worker, 3).jobs
    following = enqueue(conn)
    ends = [Ended(job, DONE) for job in jobs]
    with locked(dsn, "job_id = %s", jobs[0].job_id):
        found = step(worker, 1, *ends)
        assert found.ended == dict.fromkeys(ids(jobs[1:]), "succeeded")
        assert list(found.locked) == [jobs[0].job_id]
        assert ids(found.jobs) == [following]
    found = step(worker, 0, ends[0], Ended(found.jobs[0], DONE))
    assert (set(found.ended.values()), list(found.locked)) == ({"succeeded"}, [])
    assert state(conn, jobs[0].job_id) == ("succeeded", 1)


def test_an_end_waits_a_moment_for_a_claim_that_looks_at_its_row(conn: Conn, workers: Workers, dsn: str) -> None:
    """Where the row is free before the last look, the end is written, and nobody is told that it was locked."""
    one, other = workers(), workers()
    job = one.start_new()
    end = freed_after_a_look(conn, one, other, job.job_id, lambda: step(one, 0, Ended(job, DONE)))
    assert (end.ended, list(end.locked)) == ({job.job_id: "succeeded"}, [])


def test_what_ended_at_the_first_look_is_told_with_what_ended_at_a_later_one(conn: Conn, workers: Workers) -> None:
    """And the keys of both are free: it is the heartbeat's write, in the middle of a run."""
    one, other = workers(), workers()
    ids_of = [plain(conn, lock_key=key, priority=place) for place, key in enumerate("abc")]
    canceled, held, running = step(one, 3).jobs
    assert ids([canceled, held, running]) == ids_of
    operations.change(conn, "cancel", [canceled.job_id], "test")
    ends = [Ended(canceled, DONE), Ended(held, DONE)]
    written = freed_after_a_look(conn, one, other, held.job_id, lambda: lifecycle.finish_some(one.conn, one.name, ends))
    assert written == ({canceled.job_id: "canceled", held.job_id: "succeeded"}, ())
    free = [value(other.conn, "SELECT pg_try_advisory_lock(hashtext(%s))", job.lock_key) for job in (canceled, held)]
    assert (free, value(other.conn, "SELECT pg_try_advisory_lock(hashtext(%s))", "c")) == ([True, True], False)


def freed_after_a_look(conn: Conn, worker: Worker, other: Worker, job_id: UUID, write: Callable[[], T]) -> T:
    """The result of the worker's write, which finds the job's row locked, and free when it looks again."""
    with other.conn.transaction(force_rollback=True):
        other.conn.execute("SELECT FROM dl_jobs WHERE job_id = %s FOR SHARE", (job_id,))
        with at_gate(conn, BEFORE_THE_NEXT_LOOK, worker, write) as end:
            other.conn.execute("ROLLBACK; BEGIN")
    return end.result()


def test_the_row_of_a_run_whose_end_waits_still_speaks_for_its_key(conn: Conn, dsn: str, workers: Workers) -> None:
    one, other = workers(), workers()
    job = one.start_new(plain, lock_key="k", priority=1)
    plain(conn, lock_key="k", priority=2)
    with locked(dsn, "job_id = %s", job.job_id):
        assert list(step(one, 1, Ended(job, DONE)).locked) == [job.job_id]
        assert keys_held(conn) == []
        assert step(other, 1).jobs == []
    assert one.finish(job) == "succeeded"
    assert other.take().lock_key == "k"


def test_a_late_end_takes_no_key_from_the_next_run(conn: Conn, dsn: str, worker: Worker) -> None:
    """Its lease ran out while its row was locked, so its own worker has claimed the next job of the key."""
    plain(conn, lock_key="k", priority=1), plain(conn, lock_key="k", priority=2)
    late = worker.take()
    with locked(dsn, "job_id = %s", late.job_id):
        assert list(step(worker, 0, Ended(late, DONE)).locked) == [late.job_id]
    expire(conn, late.job_id)
    assert step(worker, 1).job
    assert list(lifecycle.finish_some(worker.conn, worker.name, [Ended(late, DONE)]).ended) == [late.job_id]
    assert keys_held(conn) == [worker.pid]


def waiting_or_done(conn: Conn, worker: Worker, future: Future[object]) -> None:
    until(lambda: future.done() or blocked(conn, worker.pid), "a statement to end or wait")


def cancel(worker: Worker, job_ids: Sequence[UUID]) -> None:
    lifecycle.request_cancels(worker.conn, job_ids, False, "test")


@pytest.mark.parametrize("claimed", [1, -1])
@pytest.mark.parametrize("ended", [1, -1])
@pytest.mark.parametrize("scans", ["on", "off"])
def test_c5_a_bulk_cancel_beside_a_batchs_end_is_no_deadlock(
    conn: Conn, dsn: str, workers: Workers, claimed: int, ended: int, scans: str
) -> None:
    """Each stands at a row of its own, in the middle, until the other has begun; then both go on."""
    one, other = workers(), workers()
    other.conn.execute(f"SET enable_indexscan = {scans}; SET enable_bitmapscan = {scans}; SET enable_seqscan = on")
    low, mine, others, high = (UUID(int=number) for number in range(1, 5))
    for priority, job_id in enumerate([low, mine, others, high][::claimed]):
        plain(conn, job_id=job_id, priority=priority)
    jobs = sorted((one.take() for _ in range(4)), key=lambda job: job.job_id)
    ends = [job for job in jobs if job.job_id != others][::ended]
    with (
        locked(dsn, "job_id = %s", mine) as before_mine,
        locked(dsn, "job_id = %s", others) as before_others,
        ThreadPoolExecutor(2) as pool,
    ):
        canceling = pool.submit(cancel, other, [low, others, high])
        waiting_or_done(conn, other, canceling)
        ending = pool.submit(lifecycle.step, one.session, ["q"], BACKOFF_SEC, 0, [Ended(job, DONE) for job in ends])
        waiting_or_done(conn, one, ending)
        before_mine.rollback()
        waiting_or_done(conn, one, ending)
        before_others.rollback()
        canceling.result()
        ending.result()


Call = tuple[Worker, Callable[[], object]]


def both_begin(conn: Conn, dsn: str, first_row: UUID, *calls: Call) -> list[object]:
    """The results of two calls, each of which begins and waits while a stranger has this row locked."""
    with locked(dsn, "job_id = %s", first_row) as stranger, ThreadPoolExecutor(2) as pool:
        futures = []
        for worker, call in calls:
            futures.append(pool.submit(call))
            waiting_or_done(conn, worker, futures[-1])
        stranger.rollback()
        return [future.result() for future in futures]


@pytest.mark.parametrize("verb", ["requeue", "run-now", "delete"])
def test_c5_two_changes_of_the_same_rows_are_no_deadlock(conn: Conn, dsn: str, workers: Workers, verb: str) -> None:
    one, other = workers(), workers()
    low, middle, high = (UUID(int=number) for number in range(1, 4))
    for job_id in (high, middle, low):  # in the table the other way round
        plain(conn, job_id=job_id, in_sec=100, status="queued" if verb == "run-now" else "failed")
    one.conn.execute("SET enable_indexscan = off; SET enable_bitmapscan = off; SET enable_seqscan = on")
    all_three = one, lambda: operations.change(one.conn, verb, [low, middle, high], "test")
    two_of_them = other, lambda: operations.change(other.conn, verb, [low, high], "test")
    both_begin(conn, dsn, middle, all_three, two_of_them)


def test_c5_a_cancellation_beside_a_deliverys_heartbeat_is_no_deadlock(conn: Conn, dsn: str, workers: Workers) -> None:
    """The cancellation waits for its first row, then the heartbeat comes, whose jobs stand the other way round."""
    one, other = workers(), workers()
    low, high = UUID(int=1), UUID(int=2)
    for priority, job_id in enumerate([high, low]):
        plain(conn, job_id=job_id, priority=priority)
    jobs = [one.take(), one.take()]
    assert ids(jobs) == [high, low]
    canceling = other, lambda: cancel(other, [low, high])
    _, renewed = both_begin(conn, dsn, low, canceling, (one, lambda: lifecycle.beat(one.conn, jobs, None, False)))
    assert renewed is not None


def test_the_keeper_renews_no_locked_row_and_waits_for_none(conn: Conn, dsn: str, worker: Worker) -> None:
    """It serves all workers of its host, and a transaction may stay open for hours."""
    jobs = [worker.start_new() for _ in range(2)]
    attempts, before = [job.attempt for job in jobs], [row(conn, job_id)["lease_expires_at"] for job_id in ids(jobs)]
    with locked(dsn, "job_id = %s", jobs[0].job_id):
        conn.execute("SET lock_timeout = '50ms'")
        assert not lifecycle.keep(conn, ids(jobs), attempts, worker.name)
        conn.execute("RESET lock_timeout")
    renewed = [row(conn, job_id)["lease_expires_at"] > at for job_id, at in zip(ids(jobs), before, strict=True)]
    assert renewed == [False, True]


def test_c5_a_cancellation_beside_a_faster_rate_is_no_deadlock(conn: Conn, dsn: str, workers: Workers) -> None:
    one, other = workers(), workers()
    low, high = UUID(int=1), UUID(int=2)
    operations.set_limit(conn, "l", "test", per_minute=0.01)
    for job_id in (UUID(int=9), high, low):  # the first takes the token
        plain(conn, job_id=job_id, limits=["l"], priority=1 + (job_id.int < 9))
    assert one.take().job_id == UUID(int=9)
    for job_id in (high, low):  # both wait for the next token, as after the claims of two queues
        conn.execute(
            "UPDATE dl_jobs SET blocked_on = 'time', available_at = next_at FROM dl_limit_state('{l}')"
            " WHERE job_id = %s",
            (job_id,),
        )
    canceling = other, lambda: cancel(other, [low, high])
    both_begin(conn, dsn, low, canceling, (one, lambda: operations.set_limit(one.conn, "l", "test", per_minute=60_000)))


@pytest.mark.parametrize(
    ("most", "made_sec", "parked"), [(1, 0.001, False), (20, 0.001, False), (1, 0, True), (20, 0, False), (20, 0, True)]
)
def test_rows_that_are_locked_at_the_head_hide_nothing_behind_them(
    conn: Conn, dsn: str, workers: Workers, most: int, made_sec: float, parked: bool
) -> None:
    """Also where they were all made at one time, and where a parked row waits for its key."""
    worker, holder = workers(), workers()
    plain(conn, queue="other", priority=0)
    if parked:
        plain(conn, lock_key="busy", priority=0), plain(conn, lock_key="busy", priority=0, made_sec=1)
        holder.take()
        assert worker.claim().job is None
    keys = "CASE WHEN i <= 2500 THEN 'locked-' ELSE 'free-' END || i"
    many(conn, 2_530, lock_key=keys, created_at=f"now() + i * interval '{made_sec} s'")
    with locked(dsn, "lock_key LIKE 'locked-%'"):
        found = step(worker, most)
        assert len(found.jobs) == most
        assert all(job.lock_key.startswith("free-") for job in found.jobs)
        assert keys_held(conn).count(worker.pid) == most
        assert worker.take().lock_key.startswith("free-")
    assert step(worker, 1).jobs[0].lock_key.startswith("locked-")


def test_beside_locked_rows_alone_a_claim_comes_back_later(conn: Conn, dsn: str, worker: Worker) -> None:
    """No notification comes when they are free; each try costs, so the more there are, the later they are tried."""
    many(conn, 2_500, "locked-%s")
    with locked(dsn, "true"):
        found = step(worker, 20)
        assert (found.jobs, found.look_again, found.due_in) == ([], False, 1)
    with locked(dsn, "job_id IN (SELECT job_id FROM dl_jobs ORDER BY created_at LIMIT 400)"):
        conn.execute("DELETE FROM dl_jobs WHERE job_id IN (SELECT job_id FROM dl_jobs FOR UPDATE SKIP LOCKED)")
        found = step(worker, 20)
        assert (found.jobs, found.look_again, found.due_in) == ([], False, 0.4)


def test_behind_locked_rows_no_later_job_of_their_keys_is_started(conn: Conn, dsn: str, worker: Worker) -> None:
    many(conn, 1_200, "k%s", priority=1)
    many(conn, 5, "k%s", priority=2)
    other = plain(conn, priority=3)
    with locked(dsn, "priority = 1"):
        assert ids(step(worker, 20).jobs) == [other]
    assert value(conn, "SELECT count(*) FROM dl_jobs WHERE status = 'running'") == 1
