"""A cancellation ends a queued job at once, tells a running one, and leaves what has ended alone."""

import pytest
from hands import Conn, Worker, Workers, enqueue, heard, journal, plain, row, state

from dataloader.queue import lifecycle


def test_v12_a_queued_job_is_canceled_at_once_tells_nobody_and_never_starts(conn: Conn, worker: Worker) -> None:
    job_id = enqueue(conn)
    worker.notes()
    status = lifecycle.request_cancel(conn, job_id)
    assert (heard(worker.conn, "dl_cancel"), worker.notes()) == ([], [])
    assert (status["status"], status["attempt"]) == ("canceled", 0)
    assert status["finished_at"] is not None
    assert journal(conn, job_id)[-1] == ("canceled", {"attempt": 0, "by": "request"})
    assert worker.claim().job is None


@pytest.mark.parametrize("place", ["time", "key"])
def test_a_job_that_waits_is_canceled_wherever_it_stands(conn: Conn, workers: Workers, place: str) -> None:
    worker, other = workers(), workers()
    if place == "key":
        plain(conn, lock_key="k")
        other.take()
    job_id = plain(conn, lock_key="k", in_sec=60 if place == "time" else 0)
    assert worker.claim().job is None
    assert row(conn, job_id)["blocked_on"] == place
    lifecycle.request_cancel(conn, job_id)
    assert (state(conn, job_id), row(conn, job_id)["blocked_on"]) == (("canceled", 0), None)
    claim = worker.claim()
    assert (claim.job, claim.due_in, claim.look_again) == (None, None, False)


def test_a_running_job_is_told_by_its_row_and_by_a_notification(conn: Conn, worker: Worker) -> None:
    job = worker.start_new()
    status = lifecycle.request_cancel(conn, job.job_id)
    assert (status["status"], status["cancel_requested"], status["finished_at"]) == ("running", True, None)
    assert heard(worker.conn, "dl_cancel") == [str(job.job_id)]
    assert journal(conn, job.job_id)[-1] == ("cancel_requested", {"attempt": 1, "by": "request"})
    assert lifecycle.beat(worker.conn, [job], None, False) is True
    assert worker.finish(job, "cancel") == "canceled"
