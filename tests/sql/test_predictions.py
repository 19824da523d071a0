"""Predicted ends out of the queue's tables: what is read, what is noted, how right it was, which deadlines are told."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hands import Conn, Worker, Workers, enqueue, journal, kinds, many, quietly, row, took, value

from dataloader.queue import db, lifecycle, operations
from dataloader.queue.reports import predictions, stats
from dataloader.queue.reports.predictions import outlook

SOON = timedelta(minutes=30)


@pytest.fixture(autouse=True)
def known(conn: Conn) -> None:
    """Runs of the task t take 100 s, and two workers serve the queue q."""
    conn.execute(
        "INSERT INTO dl_durations (task, seconds, runs, learned_at)"
        " VALUES ('t', array_fill(100::real, ARRAY[200]), 200, now())"
    )
    serve(conn, 2)


def serve(conn: Conn, number: int, *queues: str) -> None:
    served = list(queues or ["q"])
    alike = {"queue": served[0], "queues": served, "state": "idle", "jobs": 0}
    stats.show_workers(conn, "farm", "h", [alike | {"worker": f"h:{nth}:b", "pid": nth} for nth in range(number)])


def seconds(conn: Conn, *job_ids: UUID, queue: str = "q") -> list[int | None]:
    """In how many seconds these jobs are predicted to end, to the next ten."""
    seen = outlook(conn, queue)
    return [round(seen.ends[job_id].middle / 10) * 10 if job_id in seen.ends else None for job_id in job_ids]


def of_job(conn: Conn, job_id: UUID) -> dict[str, Any]:
    job = predictions.job(conn, job_id)
    return predictions.job_prediction(outlook(conn, job["queue"]), job)


def noted(conn: Conn, job_id: UUID) -> dict[str, Any] | None:
    with conn.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        return cursor.execute("SELECT * FROM dl_predictions WHERE job_id = %s", (job_id,)).fetchone()


def test_a_queue_ends_when_its_workers_have_done_all_that_waits(conn: Conn) -> None:
    jobs = [enqueue(conn) for _ in range(4)]
    assert seconds(conn, *jobs) == [100, 100, 200, 200]
    shown = predictions.queue_prediction(outlook(conn, "q"))
    assert shown["reason"] is None
    assert shown["earliest"] < shown["ends_at"] < shown["latest"]
    assert (shown["ends_at"] - shown["at"]).total_seconds() == pytest.approx(200, rel=0.1)
    assert shown["accuracy"] == {"predictions": 0, "error": None, "within": None}


def test_a_queue_ends_with_the_work_that_is_due_and_not_with_jobs_of_tomorrow(
    conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many these are."""
    monkeypatch.setattr(predictions, "LINE", 3)
    tomorrow = [enqueue(conn, available_at=datetime.now(UTC) + timedelta(days=1)) for _ in range(4)]
    shown = predictions.queue_prediction(outlook(conn, "q"))
    assert (shown["reason"], shown["ends_at"]) == ("nothing", None)
    due = enqueue(conn)
    shown = predictions.queue_prediction(outlook(conn, "q"))
    assert shown["reason"] is None
    assert (shown["ends_at"] - shown["at"]).total_seconds() == pytest.approx(100, rel=0.1)
    assert seconds(conn, due, tomorrow[0]) == [100, 86_500]


def test_jobs_come_in_the_order_of_the_claim(conn: Conn) -> None:
    last, first = enqueue(conn, priority=200), enqueue(conn, priority=1)
    serve(conn, 1)
    assert seconds(conn, first, last) == [100, 200]
    urgent = enqueue(conn, priority=200, deadline=datetime.now(UTC) + SOON)
    assert seconds(conn, first, urgent, last) == [100, 200, 300]


def test_what_is_parked_and_what_waits_for_its_time_is_in_the_line(conn: Conn, workers: Workers) -> None:
    running = enqueue(conn, lock_key="k")
    workers().take()
    parked, later = enqueue(conn, lock_key="k"), enqueue(conn, available_at=datetime.now(UTC) + timedelta(seconds=500))
    assert workers().claim().job is None
    assert row(conn, parked)["blocked_on"] == "key"
    assert seconds(conn, running, parked, later) == [100, 200, 600]


def test_jobs_that_a_worker_has_claimed_ahead_run_after_its_first(conn: Conn, worker: Worker) -> None:
    conn.execute("DELETE FROM dl_workers WHERE pid = 1")
    jobs = [enqueue(conn) for _ in range(4)]
    assert len(lifecycle.step(worker.session, ["q"], 15, 3, None).jobs) == 3
    assert seconds(conn, *jobs) == [100, 200, 300, 400]


def test_a_worker_counts_unless_it_is_gone_or_stopped_by_its_part_for_each_queue_that_has_ready_jobs(
    conn: Conn,
) -> None:
    serve(conn, 3)
    jobs = [enqueue(conn) for _ in range(2)]
    conn.execute("UPDATE dl_workers SET state = 'stopped' WHERE pid = 0")
    conn.execute("UPDATE dl_workers SET seen_at = now() - interval '1 min' WHERE pid = 1")
    assert seconds(conn, *jobs) == [100, 200]
    serve(conn, 2, "q", "other")
    assert seconds(conn, *jobs) == [100, 100], "the other queue has no job"
    enqueue(conn, queue="other")
    assert seconds(conn, *jobs) == [100, 200]


def test_what_runs_in_another_queue_is_none_of_its_line(conn: Conn, worker: Worker) -> None:
    worker.start_new(queue="other")
    job_id = enqueue(conn)
    assert list(outlook(conn, "q").jobs) == [job_id]
    judged(conn, 30, predicted_sec=100, took_sec=100)
    assert outlook(conn, "other").accuracy["predictions"] == 0


def test_jobs_at_a_full_limit_wait_for_each_other(conn: Conn, workers: Workers) -> None:
    """A limit that jobs of another queue use has less room; one of starts in a minute alone is not looked at."""
    operations.set_limit(conn, "starts", "test", per_minute=1)
    quick = [enqueue(conn, limits=["starts"]) for _ in range(2)]
    assert seconds(conn, *quick) == [100, 100]
    operations.change(conn, "delete", quick, "test")
    for name in ("source", "elsewhere"):
        operations.set_limit(conn, name, "test", most=1)
    workers().start_new(queue="other", limits=["elsewhere"])
    jobs = [enqueue(conn, limits=["source"]) for _ in range(3)]
    workers().take()
    assert workers().claim().job is None
    assert row(conn, jobs[1])["blocked_on"] == "limit:source"
    assert seconds(conn, *jobs) == [100, 200, 300]
    assert of_job(conn, enqueue(conn, limits=["elsewhere"]))["reason"] == "held"


def test_of_a_long_queue_the_first_jobs_are_played(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "LINE", 100)
    many(conn, 1_000, "k%s")
    stats.note_lengths(conn, 0)
    shown = predictions.queue_prediction(outlook(conn, "q"))
    assert (shown["ends_at"] - shown["at"]).total_seconds() == pytest.approx(50_000, rel=0.1)
    last = value(conn, "SELECT job_id FROM dl_jobs ORDER BY created_at DESC LIMIT 1")
    found = of_job(conn, last)
    assert (found["earliest"] - found["at"]).total_seconds() == pytest.approx(5_000, rel=0.15)
    assert shown["ends_at"] > found["ends_at"] > found["earliest"], "somewhere behind the first 100"
    assert found["latest"] == pytest.approx(shown["latest"], abs=SOON)


def test_no_read_of_a_prediction_grows_with_the_queue(conn: Conn, dsn: str) -> None:
    with quietly(conn):
        many(conn, 20_000, "k%s")
    conn.execute("ANALYZE dl_jobs")
    statements = predictions._SQL
    for name in ("queue", "running", "waiting", "room"):
        with conn.transaction(force_rollback=True):
            db.by_index(conn)
            [(plan,)] = conn.execute(
                "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) " + statements[name], {"queue": "q", "most": 50}
            ).fetchall()
        touched = plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"]
        assert touched < 300, f"{name} has touched {touched} pages"


@pytest.mark.parametrize("company", [0, 1])
def test_a_job_whose_key_a_dead_job_holds_has_no_end(conn: Conn, worker: Worker, company: int) -> None:
    operations.set_order(conn, "q", "anna", ordered=True, on_dead="hold")
    _, behind = (enqueue(conn, lock_key="k", score=score) for score in (1.0, 2.0))
    worker.finish(worker.take(), "fail", error="broken")
    worker.claim()
    for _ in range(company):
        enqueue(conn, lock_key="other", score=1.0)
    found = of_job(conn, behind)
    assert (found["reason"], found["ends_at"]) == ("held", None)


def test_each_reason_why_nothing_is_predicted(conn: Conn, worker: Worker) -> None:
    assert predictions.queue_prediction(outlook(conn, "q"))["reason"] == "nothing"
    job_id, new = enqueue(conn), enqueue(conn, task="new")
    child = enqueue(conn, depends_on=[job_id])
    assert of_job(conn, new)["reason"] == "no_runs"
    assert of_job(conn, child)["reason"] == "parents"
    operations.pause(conn, "q", "test")
    assert of_job(conn, job_id)["reason"] == "paused"
    operations.resume(conn, "q", "test")
    serve(conn, 2, "other")
    assert of_job(conn, job_id)["reason"] == "no_worker"
    conn.execute("DELETE FROM dl_durations")
    serve(conn, 1)
    assert of_job(conn, job_id)["reason"] == "no_runs"
    worker.finish(worker.take())
    assert of_job(conn, job_id)["reason"] == "over"
    operations.set_order(conn, "q", "test", ordered=True, merge=True)
    assert of_job(conn, new)["reason"] == "merge"


def test_the_journal_teaches_how_long_runs_take(conn: Conn, worker: Worker) -> None:
    """The newest come first, what failed teaches nothing, and the latest 200 are kept."""

    def learned(*columns: str) -> list[float]:
        while stats.aggregate(conn) > 0:
            pass
        return value(conn, f"SELECT ARRAY[{', '.join(columns)}] FROM dl_durations")

    enqueue(conn)
    worker.finish(worker.take())
    first, *rest = learned("seconds[1]", "seconds[200]", "cardinality(seconds)", "runs")
    assert (first < 10, rest) == (True, [100, 200, 201])
    conn.execute("DELETE FROM dl_durations")
    for sec in (50, 70):
        job_id = enqueue(conn)
        job = worker.take()
        for kind in ("stuck", "deadline"):
            conn.execute("INSERT INTO dl_job_events (job_id, queue, kind) VALUES (%s, 'q', %s)", (job_id, kind))
        worker.finish(job)
        took(conn, job_id, sec)
    enqueue(conn)
    worker.finish(worker.take(), "fail", error="no")
    assert learned("seconds[1]", "seconds[2]", "runs", "cardinality(seconds)") == [70, 50, 2, 2]
    assert not [row for row in stats.totals(conn) if row["kind"] in ("stuck", "deadline")]


def noted_all(conn: Conn) -> list[tuple[str, int]]:
    """A round of the reaper, which counts the queues before: each queue's name, and how many jobs were told."""
    conn.execute("DELETE FROM dl_lengths")
    stats.note_lengths(conn, 0)
    found, after = [], ""
    while done := predictions.note(conn, after):
        assert done.error is None
        found.append((done.queue, done.late))
        after = done.queue
    return found


def test_a_round_notes_a_sample_of_each_queue_by_one_reaper_at_a_time(conn: Conn, dsn: str) -> None:
    many(conn, 50, "k%s")
    enqueue(conn, queue="another")
    with psycopg.connect(dsn) as other:
        other.execute("SELECT pg_advisory_xact_lock(%s)", (predictions.LOCK,))
        assert noted_all(conn) == []
    assert noted_all(conn) == [("another", 0), ("q", 0)]
    assert value(conn, "SELECT count(*) FROM dl_predictions WHERE queue = 'q'") == predictions.SAMPLE
    spread = value(conn, "SELECT max(plain_sec) - min(plain_sec) FROM dl_predictions")
    assert spread > 1_500, "from all over the line"


def test_the_first_prediction_stays_and_is_compared_with_the_end(conn: Conn, worker: Worker) -> None:
    job_id = enqueue(conn)
    noted_all(conn)
    first = noted(conn, job_id)
    assert first is not None
    job = worker.take()
    noted_all(conn)
    assert noted(conn, job_id) == first
    worker.finish(job)
    conn.execute(
        "UPDATE dl_predictions SET made_at = finished_at - interval '100 s', ends_at = finished_at + interval '25 s'"
        "  FROM dl_jobs j WHERE j.job_id = dl_predictions.job_id"
    )
    noted_all(conn)
    found = noted(conn, job_id)
    assert found["ended_at"] == row(conn, job_id)["finished_at"]
    accuracy = outlook(conn, "q").accuracy
    assert accuracy["predictions"] == 1
    assert accuracy["error"] == pytest.approx(0.25)


def judged(conn: Conn, number: int, predicted_sec: float, took_sec: float, plain_sec: float | None = None) -> None:
    """So many predictions of the last day, that jobs would end in some seconds, and when they did."""
    conn.execute(
        "INSERT INTO dl_predictions (job_id, queue, made_at, ends_at, earliest, latest, plain_sec, ended_at)"
        " SELECT gen_random_uuid(), 'q', at, at + make_interval(secs => %(ends)s),"
        "        at + make_interval(secs => %(ends)s * 0.9), at + make_interval(secs => %(ends)s * 1.1), %(plain)s,"
        "        at + make_interval(secs => %(took)s)"
        "   FROM (SELECT now() - interval '1 h' AS at FROM generate_series(1, %(number)s)) made",
        {"number": number, "ends": predicted_sec, "took": took_sec, "plain": plain_sec},
    )


def test_how_right_the_last_day_was_and_what_follows_for_what_waits(conn: Conn, worker: Worker) -> None:
    judged(conn, 20, predicted_sec=100, took_sec=150, plain_sec=100)
    judged(conn, 20, predicted_sec=100, took_sec=150)  # these ran already
    judged(conn, 10, predicted_sec=100, took_sec=100)
    running, waits = enqueue(conn, lock_key="k"), enqueue(conn)
    worker.take()
    assert outlook(conn, "q").accuracy == {
        "predictions": 50,
        "error": pytest.approx(1 / 3),
        "within": pytest.approx(1 / 5),
    }
    assert seconds(conn, running, waits) == [100, 150], "what runs is as long as its runs are"
    older = "UPDATE dl_predictions SET made_at = made_at - interval '2 days', ended_at = ended_at - interval '2 days'"
    conn.execute(older)
    assert outlook(conn, "q").accuracy["predictions"] == 0
    assert seconds(conn, waits) == [150], "three nights teach more than one"
    conn.execute(older)
    assert seconds(conn, waits) == [100]


def test_what_ended_otherwise_or_is_gone_or_is_old_is_forgotten(conn: Conn, worker: Worker) -> None:
    canceled, failed, gone = (enqueue(conn, max_attempts=1) for _ in range(3))
    judged(conn, 1, 100, 100)
    noted_all(conn)
    lifecycle.request_cancels(conn, [canceled], False, "test")
    job = worker.take()
    assert job.job_id == failed
    worker.finish(job, "fail", error="no")
    operations.change(conn, "delete", [gone], "test")
    conn.execute("UPDATE dl_predictions SET ended_at = ended_at - interval '4 days'")
    noted_all(conn)
    assert value(conn, "SELECT count(*) FROM dl_predictions") == 0


def test_a_deadline_that_is_going_to_be_missed_is_told_once_while_there_is_time(conn: Conn) -> None:
    for _ in range(20):
        enqueue(conn, priority=1)
    late = enqueue(conn, deadline=datetime.now(UTC) + timedelta(seconds=500))
    right = enqueue(conn, deadline=datetime.now(UTC) + timedelta(hours=1))
    assert noted_all(conn) == [("q", 1)]
    assert noted_all(conn) == [("q", 0)], "once"
    assert kinds(conn, late) == ["queued", "deadline"]
    assert kinds(conn, right) == ["queued"]
    payload = journal(conn, late)[-1][1]
    assert (
        datetime.fromisoformat(payload["deadline"])
        == row(conn, late)["deadline"]
        < datetime.fromisoformat(payload["expected_at"])
    )
    conn.execute("UPDATE dl_predictions SET queue = 'z', alerted_at = NULL WHERE job_id = %s", (late,))
    assert noted_all(conn) == [("q", 0)], "of this queue alone"
    conn.execute("UPDATE dl_predictions SET queue = 'q', alerted_at = now() WHERE job_id = %s", (late,))
    assert (of_job(conn, late)["is_late"], of_job(conn, right)["is_late"]) == (True, False)
    assert stats.overview(conn)["queues"][0]["at_risk"] == 1
    first = noted(conn, late)
    serve(conn, 20)
    assert noted_all(conn) == [("q", 0)]
    assert stats.overview(conn)["queues"][0]["at_risk"] == 0, "there are more workers"
    found = noted(conn, late)
    assert found["expected_at"] < first["expected_at"]
    assert found["ends_at"] == first["ends_at"], "the first prediction is the one to be compared"


@pytest.mark.parametrize("why", ["paused", "no worker", "no runs"])
def test_a_deadline_that_has_passed_is_told_though_nothing_could_be_predicted(conn: Conn, why: str) -> None:
    if why == "no runs":
        conn.execute("DELETE FROM dl_durations")
    if why == "no worker":
        serve(conn, 0)
    if why == "paused":
        operations.pause(conn, "q", "test")
    job_id = enqueue(conn, deadline=datetime.now(UTC) - timedelta(seconds=1))
    later = enqueue(conn, deadline=datetime.now(UTC) + SOON)
    assert noted_all(conn) == [("q", 1)]
    assert kinds(conn, job_id)[-1] == "deadline"
    assert kinds(conn, later)[-1] == "queued"
    assert stats.overview(conn)["queues"][0]["at_risk"] == 1


def test_a_job_that_has_ended_meanwhile_is_not_told(conn: Conn, worker: Worker) -> None:
    """Ends are compared at the begin of a round, and a round of many queues takes a while."""
    job_id = enqueue(conn, deadline=datetime.now(UTC) + SOON)
    noted_all(conn)
    conn.execute("UPDATE dl_predictions SET expected_at = deadline + interval '1 h'")
    worker.finish(worker.take())
    enqueue(conn)
    assert predictions.note(conn, "p") == ("q", 0, None)
    assert "deadline" not in kinds(conn, job_id)


@pytest.mark.parametrize(
    ("at", "plain_sec"),
    [
        *((at, None) for at in ("infinity", "294276-01-01", "-infinity", "4713-01-01 BC")),
        ("yesterday", 5e-324),  # a day divided by it is beyond the range of a float8
    ],
)
def test_odd_times_and_seconds_spoil_no_prediction(conn: Conn, at: str, plain_sec: float | None) -> None:
    """A role that may write the table may write any time into it."""
    conn.execute(
        "INSERT INTO dl_predictions (job_id, queue, made_at, ends_at, earliest, latest, plain_sec, ended_at)"
        " VALUES (gen_random_uuid(), 'q', %(at)s, %(at)s, now(), now(), %(sec)s, greatest(now(), %(at)s))",
        {"at": at, "sec": plain_sec},
    )
    assert predictions.outlook(conn, "q").accuracy is not None
    assert plain_sec is None or predictions.outlook(conn, "q").accuracy["predictions"] == 1
