"""Results of pipelines: stored by the claim, before the end; shown only of a job that succeeded by the same claim."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from foreign import Foreign
from hands import Conn, Worker, enqueue, expire, plain, quietly, remove, row, value

from dataloader.queue import db, lifecycle, operations
from dataloader.queue.job import Checkpoint, Finish, Job
from dataloader.queue.lifecycle import Ended
from dataloader.queue.reports import stats


def result(conn: Conn, job_id: UUID) -> Any:
    """As it is shown."""
    found = stats.result(conn, job_id)
    assert found.keys() == {"job_id", "status", "result"}
    return found["result"]


def kept(conn: Conn) -> list[Any]:
    return conn.execute("SELECT claim, result FROM dl_results ORDER BY claim").fetchall()


def returned(job: Job, text: str) -> Ended:
    return Ended(job, Finish("succeed", result=text))


# The tables in which a run stores values beside its row.
KEEP: dict[str, Callable[[Worker, Job], None]] = {
    "dl_results": lambda worker, job: lifecycle.keep_results(worker.conn, [returned(job, "1")]),
    "dl_checkpoints": lambda worker, job: lifecycle.keep_checkpoint(worker.conn, job, Checkpoint('{"at": 1}')),
}


def of_jobs(conn: Conn, table: str) -> list[UUID]:
    """Those of which something is stored."""
    return [job_id for (job_id,) in conn.execute(f"SELECT job_id FROM {table}".encode())]


def test_each_end_of_a_step_has_its_own_and_any_json_comes_back_as_it_was(conn: Conn, worker: Worker) -> None:
    texts = ["1", None, '{"a": [1, 0.5, "ü \\\\ \\""]}', "0", "false", '""', "[]", '"{\\"a\\": 1}"']
    for _ in texts:
        enqueue(conn)
    jobs = lifecycle.step(worker.session, ["q"], 15, len(texts), None).jobs
    assert result(conn, jobs[0].job_id) is None
    ends = [Ended(job, Finish("succeed", result=text)) for job, text in zip(jobs, texts, strict=True)]
    assert set(lifecycle.step(worker.session, ["q"], 15, 0, ends).ended.values()) == {"succeeded"}
    assert [result(conn, job.job_id) for job in jobs] == [text and db.parsed(text) for text in texts]
    assert len(kept(conn)) == len(texts) - 1
    assert stats.result(conn, UUID(int=7)) is None


@pytest.mark.parametrize("later", ['"of its successor"', None])
def test_it_is_there_before_the_end_and_that_of_a_dead_run_never_shows(
    conn: Conn, worker: Worker, later: str | None
) -> None:
    """The worker may die in between: then the job runs again, and the result is the later run's, or nothing."""
    job_id = enqueue(conn)
    lifecycle.keep_results(worker.conn, [returned(worker.take(), '"of a dead run"')])
    assert (kept(conn), result(conn, job_id)) == ([(1, "of a dead run")], None)
    expire(conn, job_id)
    conn.execute("UPDATE dl_jobs SET claimed_pid = NULL")
    assert lifecycle.reap(conn)
    again = worker.take()
    assert (again.claim, result(conn, job_id)) == (2, None)
    assert worker.finish(again, result=later) == "succeeded"
    assert kept(conn) == ([(2, "of its successor")] if later else [(1, "of a dead run")])
    assert result(conn, job_id) == (later and "of its successor")
    canceled = worker.start_new()
    lifecycle.request_cancel(conn, canceled.job_id)
    assert worker.finish(canceled, result="1") == "canceled"
    assert result(conn, canceled.job_id) is None


@pytest.mark.parametrize("table", KEEP)
def test_who_does_not_name_the_claim_of_a_running_job_stores_nothing(conn: Conn, worker: Worker, table: str) -> None:
    """Nor does who names it when another service has ended the job, and left the claim in the row."""
    job = worker.start_new()
    for wrong in ({"attempt": 2}, {"claimed_by": "host:9:x"}):
        KEEP[table](worker, job._replace(**wrong))
    for status, stored in (("succeeded", []), ("running", [job.job_id])):
        with quietly(conn):
            conn.execute("UPDATE dl_jobs SET status = %s", (status,))
        assert row(conn, job.job_id)["claimed_by"] == worker.name
        KEEP[table](worker, job)
        assert of_jobs(conn, table) == stored


def test_that_of_a_later_claim_is_not_replaced_and_a_repetition_changes_nothing(conn: Conn, worker: Worker) -> None:
    """The first would be the statement of a worker that was stopped in its midst."""
    job = worker.start_new()
    lifecycle.keep_results(worker.conn, [returned(job, '"first"')])
    before = value(conn, "SELECT ctid::text FROM dl_results")
    lifecycle.keep_results(worker.conn, [returned(job, '"first"')])
    assert value(conn, "SELECT ctid::text FROM dl_results") == before
    conn.execute("UPDATE dl_results SET claim = 2, result = '\"later\"'")
    assert worker.finish(job, result='"first"') == "succeeded"
    assert (kept(conn), result(conn, job.job_id)) == ([(2, "later")], None)


@pytest.mark.parametrize("by", ["operator", "plain update"])
def test_a_job_that_is_put_back_has_none_any_more(conn: Conn, worker: Worker, by: str) -> None:
    """Another change of a job that has succeeded leaves it its result."""
    job_id, other = enqueue(conn), enqueue(conn)
    for _ in range(2):
        worker.finish(worker.take(), result="1")
    if by == "operator":
        operations.change(conn, "requeue", [job_id], "test")
    else:
        conn.execute("UPDATE dl_jobs SET status = 'queued' WHERE job_id = %s", (job_id,))
    conn.execute("UPDATE dl_jobs SET queue = 'other', status = 'succeeded' WHERE job_id = %s", (other,))
    assert (result(conn, job_id), result(conn, other)) == (None, 1)
    assert value(conn, "SELECT count(*) FROM dl_results") == 1


def test_a_run_of_another_service_has_not_that_of_our_dead_run(conn: Conn, worker: Worker, foreign: Foreign) -> None:
    """Its claim does not count: the row's number is still that of ours."""
    job_id = plain(conn)
    job = worker.take()
    lifecycle.keep_results(worker.conn, [returned(job, "1")])
    worker.finish(job, "hand_back")
    assert foreign.claim()
    foreign.conn.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now() WHERE job_id = %s", (job_id,))
    assert (row(conn, job_id)["claims"], row(conn, job_id)["status"]) == (1, "succeeded")
    assert (result(conn, job_id), kept(conn)) == (None, [])


@pytest.mark.parametrize("table", KEEP)
@pytest.mark.parametrize("by", ["operator", "retention", "plain delete"])
def test_it_goes_with_its_job(conn: Conn, worker: Worker, table: str, by: str) -> None:
    job_id, other = enqueue(conn), enqueue(conn)
    for _ in range(2):
        job = worker.take()
        KEEP[table](worker, job)
        worker.finish(job, "fail")
    remove(conn, job_id, by)
    assert of_jobs(conn, table) == [other]
