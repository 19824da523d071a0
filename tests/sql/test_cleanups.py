"""Work that canceled jobs leave behind elsewhere: the reaper adds one job that ends it, as the checkpoint says."""

import json
from typing import Any
from uuid import UUID

import pytest
from hands import Conn, Worker, enqueue, remove, started, state, value
from patience import PATIENCE

from dataloader.queue import cleanups, db, lifecycle, operations
from dataloader.queue.job import Checkpoint, Finish, Job

LIVES_ON = {"id": "p-1", "on_cancel": "stop"}


def keep(worker: Worker, job: Job, checkpoint: dict[str, Any]) -> None:
    lifecycle.keep_checkpoint(worker.conn, job, Checkpoint(json.dumps(checkpoint)))


@pytest.fixture
def left(conn: Conn, worker: Worker) -> UUID:
    """A job that has left something behind, and waits for its next run."""
    job_id = enqueue(conn, args={"n": 1}, lock_key="k", partition_key="p", priority=7, lease_ttl_sec=33)
    job = worker.take()
    keep(worker, job, LIVES_ON)
    worker.finish(job, "retry", delay_sec=3_600)
    return job_id


def cleaned(conn: Conn) -> list[UUID]:
    """Do a round of the reaper; the canceled jobs that have got a cleanup."""
    found = [job_id for job_id in cleanups.due(conn) if cleanups.add(conn, job_id)]
    cleanups.forget(conn)
    return found


def listed(conn: Conn) -> list[UUID]:
    return [job_id for (job_id,) in conn.execute("SELECT job_id FROM dl_cleanups")]


def test_a_canceled_job_is_cleaned_up_behind(conn: Conn, worker: Worker, left: UUID) -> None:
    operations.limit_length(conn, "q", 0, "test")  # a full queue keeps nothing alive
    lifecycle.request_cancel(conn, left)
    assert cleaned(conn) == [left]
    cleanup = worker.take()
    assert (cleanup.task, cleanup.queue, json.loads(cleanup.args_json), cleanup.attempt) == ("t", "q", {"n": 1}, 1)
    assert (cleanup.lock_key, cleanup.max_attempts, cleanup.lease_ttl_sec) == (f"cleanup of {left}", 40, 33)
    columns = "SELECT (partition_key, priority, producer)::text FROM dl_jobs WHERE job_id = %s"
    assert value(conn, columns, cleanup.job_id) == "(p,0,cleanups)"
    checkpoint = lifecycle.checkpoints(conn, [cleanup.job_id])[cleanup.job_id]
    assert json.loads(checkpoint.text or "") == {"id": "p-1", "canceled": str(left)}
    assert cleanup.claim > 1, "a worker asks for the checkpoints of such jobs alone"
    assert (cleaned(conn), listed(conn)) == ([], [])
    operations.change(conn, "requeue", [left], "test")
    assert lifecycle.checkpoints(conn, [left])[left].text is None, "it begins at the start"


@pytest.mark.parametrize("verb", ["retry", "fail", "hand_back"])
def test_a_job_that_is_not_canceled_keeps_what_it_has(conn: Conn, worker: Worker, verb: str) -> None:
    job = worker.start_new()
    keep(worker, job, LIVES_ON)
    worker.finish(job, verb)
    assert cleanups.due(conn) == [], "nobody locks it in vain"
    assert (cleaned(conn), listed(conn)) == ([], [job.job_id])
    assert cleanups.add(conn, job.job_id) is None
    assert json.loads(lifecycle.checkpoints(conn, [job.job_id])[job.job_id].text or "") == LIVES_ON


@pytest.mark.parametrize("gone", [False, True])
def test_a_run_that_has_cleaned_up_itself_and_a_job_that_is_gone_leave_nothing(
    conn: Conn, worker: Worker, gone: bool
) -> None:
    job = worker.start_new()
    keep(worker, job, LIVES_ON)
    end = Finish("cancel", "canceled")
    last = Checkpoint(json.dumps(LIVES_ON if gone else {"id": "p-1"}))
    lifecycle.finish_some(worker.conn, worker.name, [lifecycle.Ended(job, end, checkpoint=last)])
    assert state(conn, job.job_id)[0] == "canceled"
    if gone:
        remove(conn, job.job_id, by="another service")
    assert cleanups.due(conn) == [], "nobody locks it in vain"
    assert (cleaned(conn), listed(conn)) == ([], [])


def test_a_worker_that_dies_at_a_cancellation_leaves_it_to_the_reaper(conn: Conn, worker: Worker) -> None:
    job_id = enqueue(conn)
    keep(worker, worker.take(), LIVES_ON)
    lifecycle.request_cancel(conn, job_id)
    conn.execute("UPDATE dl_jobs SET claimed_pid = NULL")
    (settled,) = lifecycle.settle(conn, worker.name, "crash", "killed")
    assert settled.status == "canceled"
    assert cleaned(conn) == [job_id]


def test_a_second_reaper_passes_a_job_over_that_the_first_one_has_locked(dsn: str, conn: Conn, left: UUID) -> None:
    """And adds no second cleanup, though it has looked before the first one."""
    lifecycle.request_cancel(conn, left)
    assert cleanups.due(conn) == [left]
    with db.connect(dsn, name="other", schema="public") as other, other.transaction():
        assert cleanups.add(other, left) is not None
        with started(lambda: cleaned(conn), None, other) as second:
            assert second.result(PATIENCE) == []
    assert cleanups.add(conn, left) is None
    assert (cleaned(conn), value(conn, "SELECT count(*) FROM dl_jobs")) == ([], 2)


@pytest.mark.parametrize("how", ["requeue", "start-over"])
def test_a_cleanup_that_people_queue_again_only_cleans_up(conn: Conn, worker: Worker, left: UUID, how: str) -> None:
    lifecycle.request_cancel(conn, left)
    cleaned(conn)
    cleanup = worker.take()
    kept = lifecycle.checkpoints(conn, [cleanup.job_id])[cleanup.job_id]
    end = lifecycle.Ended(cleanup, Finish("succeed"), checkpoint=kept)
    lifecycle.finish_some(worker.conn, worker.name, [end])
    operations.change(conn, how, [cleanup.job_id], "test")
    assert worker.take().job_id == cleanup.job_id
    assert lifecycle.checkpoints(conn, [cleanup.job_id])[cleanup.job_id].text == kept.text


def test_a_job_that_may_leave_something_stays_listed(conn: Conn, worker: Worker) -> None:
    """Else the list would lose a job that saves the key while the reaper looks."""
    job = worker.start_new()
    keep(worker, job, LIVES_ON)
    keep(worker, job, {"id": "p-1"})
    cleaned(conn)
    assert listed(conn) == [job.job_id]
    worker.finish(job, "retry", delay_sec=3_600)
    cleaned(conn)
    assert listed(conn) == [job.job_id]
    lifecycle.request_cancel(conn, job.job_id)
    assert (cleaned(conn), listed(conn)) == ([], [])
