"""How a run ends: the row, its journal and its key, in one statement each."""

import math
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hands import Conn, Worker, enqueue, journal, keys_held, plain, row, value

from dataloader.queue import db, lifecycle
from dataloader.queue.job import LEADS_TO, Finish
from dataloader.queue.lifecycle import Ended


def ended(conn: Conn, worker: Worker, verb: str, cancel: bool = False, **how: Any) -> dict[str, Any]:
    """Run a job to this end and return its row, with the kind and payload of its last event."""
    job_id = enqueue(conn, lock_key="k")
    job = worker.take()
    conn.execute("UPDATE dl_jobs SET cancel_requested = %s, progress = '{\"old\": 1}'", (cancel,))
    status = worker.finish(job, verb, **how)
    found = row(conn, job_id)
    assert status == found["status"]
    kind, payload = journal(conn, job_id)[-1]
    return found | {"kind": kind, "payload": payload, "story": [kind for kind, _ in journal(conn, job_id)]}


@pytest.mark.parametrize(
    ("verb", "how", "status", "attempt", "kind", "facts"),
    [
        ("succeed", {"progress": '{"new": 2}'}, "succeeded", 1, "done", {}),
        ("retry", {"error": "boom", "delay_sec": 60}, "queued", 1, "requeue",
         {"reason": "error", "error": "boom", "delay_sec": 60}),
        ("retry", {"error": "boom", "delay_sec": 86_400, "progress": '{"new": 2}'}, "queued", 1, "requeue",
         {"reason": "error", "error": "boom", "delay_sec": 86_400}),
        ("fail", {"error": "boom"}, "failed", 1, "failed", {"error": "boom"}),
        ("cancel", {"progress": '{"new": 2}'}, "canceled", 1, "canceled", {}),
        ("hand_back", {"error": "drain", "progress": '{"new": 2}'}, "queued", 0, "requeue", {"reason": "drain"}),
    ],
)  # fmt: skip
def test_what_each_end_writes(
    conn: Conn, worker: Worker, verb: str, how: Any, status: str, attempt: int, kind: str, facts: Any
) -> None:
    end = ended(conn, worker, verb, **how)
    assert (end["status"], end["attempt"], end["error"]) == (status, attempt, facts.get("error"))
    assert end["progress"] == ({"new": 2} if "progress" in how else {"old": 1})
    assert (end["finished_at"] is None) == (status == "queued")
    assert end["story"] == ["queued", "picked", kind]
    assert end["payload"] == {"attempt": attempt, "worker": worker.name} | facts
    if status == "queued":
        wait = how.get("delay_sec", 0)
        assert max((end["available_at"] - end["now"]).total_seconds(), 0) == pytest.approx(wait, abs=30)
        assert end["blocked_on"] == ("time" if wait else None)
    assert (end["lease_expires_at"], end["claimed_by"], end["claimed_pid"]) == (None, None, None)
    assert keys_held(conn) == []


def test_v12_a_success_after_an_acknowledged_cancellation_says_that_its_work_stands(conn: Conn, worker: Worker) -> None:
    end = ended(conn, worker, "succeed", cancel=True, progress='{"processed": 9}')
    assert end["status"] == "canceled"
    assert end["error"] == end["payload"]["reason"] == "canceled when the pipeline had finished: its work stands"
    assert end["progress"] == {"processed": 9}


@pytest.fixture
def own(own_db: str) -> Iterator[tuple[Conn, Worker]]:
    """A database whose tables the test may change, and a worker."""
    worker = Worker(own_db, "host:1:boot")
    with db.connect(own_db, name="test", schema="public") as conn, worker.conn:
        yield conn, worker


def refuse(conn: Conn, timing: str, condition: str) -> None:
    """Let a trigger refuse writes to rows of the key `bad`, as a user's trigger or rule may."""
    conn.execute(
        f"""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
          RAISE EXCEPTION 'not this one, password=canary-91';
        END $$;
        CREATE TRIGGER refuse {timing} ON dl_jobs FOR EACH ROW WHEN (NEW.lock_key = 'bad' AND {condition})
          EXECUTE FUNCTION refuse();
        """
    )


CHECK = "ALTER TABLE dl_jobs ADD CONSTRAINT no_success CHECK (lock_key <> 'bad' OR status <> 'succeeded')"
NO_RESULT = "ALTER TABLE dl_results ADD CONSTRAINT no_result CHECK (result <> '\"refused\"')"
BEFORE = "BEFORE UPDATE"


@pytest.mark.parametrize(
    ("prepare", "end", "reason"),
    [
        (None, Finish("retry", "e", delay_sec=math.inf), "out of range"),
        (None, Finish("retry", "e", delay_sec=1e300), "out of range"),
        (None, Finish("hand_back", "e", delay_sec=math.nan), ""),
        (None, Finish("succeed", result='"\\u0000"'), "unsupported Unicode escape sequence"),
        (None, Finish("succeed", result='{"a": 1e999999}'), "value overflows numeric format"),
        (lambda conn: conn.execute(CHECK), Finish("succeed"), 'violates check constraint "no_success"'),
        (lambda conn: conn.execute(NO_RESULT), Finish("succeed", result='"refused"'), "no_result"),
        (lambda conn: refuse(conn, BEFORE, "NEW.status = 'succeeded'"), Finish("succeed"), "not this one, pass"),
        (lambda conn: refuse(conn, "AFTER UPDATE", "NEW.status = 'queued'"), Finish("retry", "e"), "not this"),
    ],
)  # fmt: skip
def test_an_end_that_is_refused_costs_no_other_one_and_fails_its_job_with_the_reason(
    own: tuple[Conn, Worker], prepare: Any, end: Finish, reason: str
) -> None:
    conn, worker = own
    if prepare:
        prepare(conn)
    for key in ("good", "bad", "too"):
        enqueue(conn, lock_key=key)
    jobs = lifecycle.step(worker.session, ["q"], 15, 3, None).jobs
    ends = [Ended(job, end if job.lock_key == "bad" else Finish("succeed", result="1")) for job in jobs]
    with pytest.raises(psycopg.Error):
        lifecycle.step(worker.session, ["q"], 15, 0, ends)
    written = lifecycle.finish_some(worker.conn, worker.name, ends)
    found = {job.lock_key: row(conn, job.job_id) for job in jobs}
    assert {key: each["status"] for key, each in found.items()} == {
        "good": "succeeded", "bad": "failed", "too": "succeeded",
    }  # fmt: skip
    assert sorted(written.ended.values()) == ["failed", "succeeded", "succeeded"]
    assert found["bad"]["error"].startswith(f"the database refused the end of this run ({end.verb}): ")
    assert reason in found["bad"]["error"]
    assert "canary-91" not in found["bad"]["error"]
    assert keys_held(conn) == []


@pytest.mark.parametrize(
    ("end", "facts"),
    [
        (Finish("succeed", progress='{"p": "\\ud800"}'), None),
        (Finish("succeed", progress="{" * 9_000), None),
        (Finish("succeed"), {"cpu_sec": math.nan}),
        (Finish("hand_back", "drain \ud800"), None),
        (Finish("retry", "a\0b", error_group="\0"), {"cpu_sec": math.inf}),
        (Finish("retry", "e", error_group="\ud800"), None),
    ],
)
def test_what_a_run_tells_besides_does_not_change_its_end(conn: Conn, worker: Worker, end: Finish, facts: Any) -> None:
    jobs = [enqueue(conn, lock_key=key) for key in ("bad", "good")]
    bad, good = lifecycle.step(worker.session, ["q"], 15, 2, None).jobs
    ends = [Ended(bad, end, facts), Ended(good, Finish("succeed"))]
    assert lifecycle.finish_some(worker.conn, worker.name, ends).ended == {
        jobs[0]: LEADS_TO[end.verb],
        jobs[1]: "succeeded",
    }
    assert keys_held(conn) == []


def test_a9_an_end_whose_answer_was_lost_is_found(conn: Conn, worker: Worker) -> None:
    """The repeated finish changes nothing; the journal says that the first one stands."""
    for verb in ("succeed", "fail", "cancel", "hand_back", "retry"):
        enqueue(conn)
        job = worker.take()
        assert not lifecycle.has_ended(conn, job)
        worker.finish(job, verb, delay_sec=600)
        assert worker.finish(job, verb) is None
        assert lifecycle.has_ended(conn, job)
        conn.execute("DELETE FROM dl_jobs")


@pytest.mark.parametrize(("attempt", "sec"), [(0, 0), (1, 30), (2, 60), (2_880, 86_400), (2**31 - 1, 86_400)])
def test_f3_the_delay_of_a_retry_grows_with_the_attempts_up_to_a_day(conn: Conn, attempt: int, sec: int) -> None:
    assert value(conn, "SELECT dl_retry_delay(%s)", attempt) == sec


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_retry_without_a_delay_waits_as_its_attempts_say(conn: Conn, worker: Worker, attempts: int) -> None:
    """Also one that its keeper has ended, which took too long."""
    job_id = plain(conn, attempt=attempts - 1)
    assert worker.finish(worker.take(), "retry", error="boom", delay_sec=None) == "queued"
    found = row(conn, job_id)
    assert found["blocked_on"] == "time"
    assert (found["available_at"] - found["now"]).total_seconds() == pytest.approx(30 * attempts, abs=14)
    assert journal(conn, job_id)[-1][1]["delay_sec"] == 30 * attempts
    conn.execute("UPDATE dl_jobs SET available_at = now()")
    conn.execute("UPDATE dl_jobs SET attempt = %s", (attempts - 1,))
    worker.take()
    lifecycle.settle(conn, worker.name, "timeout", "too long")
    found = row(conn, job_id)
    assert (found["available_at"] - found["now"]).total_seconds() == pytest.approx(30 * attempts, abs=14)


def test_a_cancelled_job_whose_run_failed_waits_for_no_retry(conn: Conn, worker: Worker) -> None:
    job = worker.start_new()
    lifecycle.request_cancel(conn, job.job_id)
    assert worker.finish(job, "retry", error="why", delay_sec=60.0) == "canceled"
    assert row(conn, job.job_id)["blocked_on"] is None
    kind, payload = journal(conn, job.job_id)[-1]
    assert (kind, payload["error"]) == ("canceled", "why")
    assert "delay_sec" not in payload
