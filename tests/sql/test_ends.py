"""How a run ends: the row, its journal and its key, in one statement each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hands import Worker, enqueue, journal, keys_held, plain, row, state, value

from dataloader.queue import db, lifecycle

ENDS = ("succeed", "retry", "fail", "cancel", "hand_back")


def ended(conn: db.Connection, worker: Worker, verb: str, cancel: bool = False, **how: Any) -> dict[str, Any]:
    """Run a job to this end and return its row, with the kind and payload of its last event."""
    job_id = enqueue(conn, lock_key="k")
    job = worker.take()
    conn.execute("UPDATE dl_jobs SET cancel_requested = %s, progress = '{\"old\": 1}'", (cancel,))
    status = worker.finish(job, verb, **how)
    found = row(conn, job_id)
    assert status == found["status"]
    kind, payload = journal(conn, job_id)[-1]
    return found | {"kind": kind, "payload": payload, "story": [kind for kind, _ in journal(conn, job_id)]}


def test_succeed(conn: db.Connection, worker: Worker) -> None:
    end = ended(conn, worker, "succeed", progress='{"processed": 9}')
    assert (end["status"], end["attempt"], end["error"]) == ("succeeded", 1, None)
    assert end["progress"] == {"processed": 9}
    assert end["finished_at"] >= end["started_at"]
    assert end["story"] == ["queued", "picked", "done"]
    assert end["payload"] == {"attempt": 1, "worker": worker.name}


def test_success_clears_the_error_of_an_earlier_attempt(conn: db.Connection, worker: Worker) -> None:
    job_id = plain(conn)
    worker.finish(worker.take(), "retry", error="boom")
    assert row(conn, job_id)["error"] == "boom"
    worker.finish(worker.take(), "succeed")
    found = row(conn, job_id)
    assert (found["status"], found["error"], found["attempt"]) == ("succeeded", None, 2)


def test_retry_waits_its_delay(conn: db.Connection, worker: Worker) -> None:
    end = ended(conn, worker, "retry", error="boom", delay_sec=60)
    assert (end["status"], end["attempt"], end["error"]) == ("queued", 1, "boom")
    assert (end["available_at"] - end["now"]).total_seconds() == pytest.approx(60, abs=5)
    assert (end["blocked_on"], end["finished_at"]) == ("time", None)
    assert end["story"] == ["queued", "picked", "requeue"]
    assert end["payload"] == {
        "attempt": 1,
        "worker": worker.name,
        "reason": "error",
        "error": "boom",
        "delay_sec": 60,
    }
    assert worker.claim().due_in == pytest.approx(60, abs=5)


def test_f3_the_longest_delay_can_be_written(conn: db.Connection, worker: Worker) -> None:
    assert ended(conn, worker, "retry", delay_sec=86_400.0)["status"] == "queued"


def test_fail_is_for_good(conn: db.Connection, worker: Worker) -> None:
    end = ended(conn, worker, "fail", error="boom")
    assert (end["status"], end["attempt"], end["error"]) == ("failed", 1, "boom")
    assert end["finished_at"] is not None
    assert end["story"] == ["queued", "picked", "failed"]
    assert end["payload"] == {"attempt": 1, "worker": worker.name, "error": "boom"}
    assert worker.claim().job is None


def test_cancel(conn: db.Connection, worker: Worker) -> None:
    end = ended(conn, worker, "cancel", progress='{"processed": 3}')
    assert (end["status"], end["attempt"], end["error"]) == ("canceled", 1, None)
    assert end["progress"] == {"processed": 3}
    assert end["finished_at"] is not None
    assert end["story"] == ["queued", "picked", "canceled"]


def test_v11_hand_back_gives_the_attempt_back_and_is_due_at_once(conn: db.Connection, worker: Worker) -> None:
    end = ended(conn, worker, "hand_back", error="drain")
    assert (end["status"], end["attempt"], end["finished_at"]) == ("queued", 0, None)
    assert (end["blocked_on"], end["available_at"] <= end["now"]) == (None, True)
    assert end["story"] == ["queued", "picked", "requeue"]
    assert end["payload"] == {"attempt": 0, "worker": worker.name, "reason": "drain"}
    assert worker.take().attempt == 1


def test_a_hand_back_keeps_the_error_of_an_earlier_attempt(conn: db.Connection, worker: Worker) -> None:
    job_id = plain(conn)
    worker.finish(worker.take(), "retry", error="boom")
    worker.finish(worker.take(), "hand_back", error="drain")
    found = row(conn, job_id)
    assert (found["error"], found["attempt"]) == ("boom", 1)


@pytest.mark.parametrize("verb", ENDS)
def test_every_end_clears_lease_and_claim_and_lets_go_of_the_key(
    conn: db.Connection, worker: Worker, verb: str
) -> None:
    end = ended(conn, worker, verb)
    assert (end["lease_expires_at"], end["claimed_by"], end["claimed_pid"]) == (None, None, None)
    assert keys_held(conn) == []


@pytest.mark.parametrize("verb", ENDS)
def test_progress_is_kept_unless_there_is_news(conn: db.Connection, worker: Worker, verb: str) -> None:
    assert ended(conn, worker, verb)["progress"] == {"old": 1}
    conn.execute("TRUNCATE dl_jobs CASCADE")
    assert ended(conn, worker, verb, progress='{"new": 2}')["progress"] == {"new": 2}


@pytest.mark.parametrize("verb", ENDS)
def test_j2_what_was_asked_to_cancel_ends_canceled_and_is_never_tried_again(
    conn: db.Connection, worker: Worker, verb: str
) -> None:
    end = ended(conn, worker, verb, cancel=True, error="boom" if verb in ("retry", "fail") else None)
    assert (end["status"], end["kind"]) == ("canceled", "canceled")
    assert end["finished_at"] is not None
    assert worker.claim().job is None


def test_v12_a_success_after_an_acknowledged_cancellation_says_that_its_work_stands(
    conn: db.Connection, worker: Worker
) -> None:
    end = ended(conn, worker, "succeed", cancel=True, progress='{"processed": 9}')
    assert end["status"] == "canceled"
    assert end["error"] == end["payload"]["reason"] == "canceled when the pipeline had finished: its work stands"
    assert end["progress"] == {"processed": 9}


@pytest.mark.parametrize("verb", ENDS)
@pytest.mark.parametrize(
    ("error", "progress"), [("\x00", None), ("boom", '{"p": "\\u0000"}'), (None, '{"p": "\\ud800"}')]
)
def test_g1_what_cannot_be_stored_does_not_keep_a_job_from_ending(
    conn: db.Connection, worker: Worker, verb: str, error: str | None, progress: str | None
) -> None:
    job_id = plain(conn)
    assert worker.finish(worker.take(), verb, error=error, progress=progress) is not None
    assert state(conn, job_id)[0] != "running"
    assert keys_held(conn) == []


def test_a9_an_end_whose_answer_was_lost_is_found(conn: db.Connection, worker: Worker) -> None:
    """The repeated finish changes nothing; the journal says that the first one stands."""
    for verb in ("succeed", "fail", "cancel", "hand_back", "retry"):
        enqueue(conn)
        job = worker.take()
        assert not lifecycle.has_ended(conn, job)
        worker.finish(job, verb, delay_sec=600)
        assert worker.finish(job, verb) is None
        assert lifecycle.has_ended(conn, job)
        conn.execute("DELETE FROM dl_jobs")


def test_a_finish_repeated_after_an_unknown_commit_writes_nothing_twice(
    conn: db.Connection, workers: Callable[[], Worker]
) -> None:
    """A9: the reply to the first was lost; by its name the second finds that nothing is left to do."""
    one, two = workers(), workers()
    job_id = enqueue(conn)
    job = one.take()
    assert one.finish(job) == "succeeded"
    assert two.finish(job) is None
    assert [kind for kind, _ in journal(conn, job_id)] == ["queued", "picked", "done"]


@pytest.mark.parametrize(("attempt", "sec"), [(0, 0), (1, 30), (2, 60), (2_880, 86_400), (2**31 - 1, 86_400)])
def test_f3_the_delay_of_a_retry_grows_with_the_attempts_up_to_a_day(
    conn: db.Connection, attempt: int, sec: int
) -> None:
    assert value(conn, "SELECT dl_retry_delay(%s)", attempt) == sec


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_retry_without_a_delay_waits_as_its_attempts_say(conn: db.Connection, worker: Worker, attempts: int) -> None:
    """Also one that its keeper has ended, which took too long."""
    job_id = plain(conn, attempt=attempts - 1)
    assert worker.finish(worker.take(), "retry", error="boom", delay_sec=None) == "queued"
    found = row(conn, job_id)
    assert found["blocked_on"] == "time"
    assert (found["available_at"] - found["now"]).total_seconds() == pytest.approx(30 * attempts, abs=5)
    assert journal(conn, job_id)[-1][1]["delay_sec"] == 30 * attempts
    conn.execute("UPDATE dl_jobs SET available_at = now()")
    conn.execute("UPDATE dl_jobs SET attempt = %s", (attempts - 1,))
    worker.take()
    lifecycle.settle(conn, worker.name, "timeout", "too long")
    found = row(conn, job_id)
    assert (found["available_at"] - found["now"]).total_seconds() == pytest.approx(30 * attempts, abs=5)


def test_a_cancelled_job_whose_run_failed_waits_for_no_retry(conn: db.Connection, worker: Worker) -> None:
    job_id = enqueue(conn)
    job = worker.take()
    lifecycle.request_cancel(conn, job_id)
    assert worker.finish(job, "retry", error="why", delay_sec=60.0) == "canceled"
    assert row(conn, job_id)["blocked_on"] is None
    kind, payload = journal(conn, job_id)[-1]
    assert (kind, payload["error"]) == ("canceled", "why")
    assert "delay_sec" not in payload
