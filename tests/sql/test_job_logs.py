"""The logs of jobs in the database: who may write them, what stays of a long one, their days, when they go."""

import os
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hands import Conn, Worker, value

from dataloader.farm import keeper
from dataloader.farm.capture import Output
from dataloader.farm.slots import SharedSlots
from dataloader.queue import db, lifecycle, logs
from dataloader.queue.job import Job
from dataloader.queue.run_log import RunLog


def written(job: Job, *texts: str, most: int = 65_536) -> RunLog:
    run = RunLog(job, most, monotonic())
    for text in texts:
        run.add(monotonic(), "info", "stdout", text)
    return run


def texts(conn: Conn, job_id: UUID, **more: Any) -> list[str]:
    return [line["text"] for line in logs.page(conn, job_id, **more).rows]


@pytest.fixture
def running(worker: Worker) -> tuple[Worker, Job]:
    return worker, worker.start_new()


def test_lines_have_the_databases_time_and_their_own_order(conn: Conn, running: Any) -> None:
    _, job = running
    run = written(job)
    run.add(monotonic() - 30, "warning", "stderr", "half a minute old")
    run.add(monotonic(), "info", "log", "new")
    logs.write(conn, [run], monotonic())
    old, new = logs.page(conn, job.job_id).rows
    now = value(conn, "SELECT now()")
    assert timedelta(seconds=29) < now - old["at"] < timedelta(seconds=60)
    assert (old["line"], old["level"], old["source"], old["attempt"]) == (1, "warning", "stderr", 1)
    assert (new["line"], new["level"], new["source"], new["left_out"]) == (2, "info", "log", 0)


@pytest.mark.parametrize("wrong", [{"attempt": 2}, {"claimed_by": "host:2:boot"}])
def test_a_worker_without_the_claim_writes_nothing(conn: Conn, running: Any, wrong: dict[str, Any]) -> None:
    _, job = running
    stale = written(job._replace(**wrong), "stale")
    logs.write(conn, [stale, written(job, "fresh")], monotonic())
    assert texts(conn, job.job_id) == ["fresh"]
    assert not stale.has_news


def test_the_end_of_a_run_is_written_with_its_last_lines_and_nothing_later(conn: Conn, running: Any) -> None:
    worker, job = running
    ended = lifecycle.Ended(job, lifecycle.Finish("succeed"), log=written(job, "the last one"))
    lifecycle.finish_some(worker.conn, job.claimed_by, [ended])
    assert value(conn, "SELECT status::text FROM dl_jobs") == "succeeded"
    logs.write(conn, [written(job, "one", "late")], monotonic())
    assert texts(conn, job.job_id) == ["the last one"]


@pytest.mark.parametrize(
    "trouble",
    [
        "LOCK TABLE dl_job_logs IN SHARE MODE",  # VACUUM FULL may last for hours, and the lease be over
        "ALTER TABLE dl_job_logs ADD CONSTRAINT no_more CHECK (text <> 'dropped')",
    ],
)
def test_logs_that_cannot_be_written_hold_up_no_end_of_a_run(own: Conn, own_db: str, trouble: str) -> None:
    worker = Worker(own_db, "host:1:boot")
    job = worker.start_new()
    run = written(job, "dropped")
    worker.conn.execute("SET lock_timeout = '50ms'")
    with worker.conn, db.connect(own_db, name="operator", schema="public") as operator, operator.transaction():
        operator.execute(trouble.encode())
        if not trouble.startswith("LOCK"):
            operator.execute("COMMIT; BEGIN")
        ended = lifecycle.Ended(job, lifecycle.Finish("succeed"), log=run)
        assert lifecycle.finish_some(worker.conn, job.claimed_by, [ended]).ended
    assert (value(own, "SELECT status::text FROM dl_jobs"), texts(own, job.job_id)) == ("succeeded", [])
    assert not run.has_news


def test_locked_jobs_cost_no_line_of_a_run(dsn: str, running: Any) -> None:
    """The end waits for the lock, and the lines with it."""
    worker, job = running
    run = written(job, "kept")
    worker.conn.execute("SET lock_timeout = '50ms'")
    with db.connect(dsn, name="operator", schema="public") as operator, operator.transaction():
        operator.execute("LOCK TABLE dl_jobs IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            lifecycle.finish_some(
                worker.conn, job.claimed_by, [lifecycle.Ended(job, lifecycle.Finish("succeed"), log=run)]
            )
    assert run.has_news


def test_a_job_that_another_service_has_ended_keeps_its_log_as_it_is(conn: Conn, running: Any) -> None:
    _, job = running
    run = written(job, *"abc")
    logs.write(conn, [run], monotonic())
    with conn.transaction():  # the trigger at its end would take the claim away
        conn.execute("UPDATE dl_jobs SET status = 'succeeded'")
        logs.write(conn, [written(job, "late")], monotonic())
        logs._leave_out(conn, run, (1, 3), monotonic())
        assert texts(conn, job.job_id) == [*"abc"]


def test_only_lines_of_the_run_itself_are_left_out(conn: Conn, one: Worker, two: Worker) -> None:
    job, other = one.start_new(), two.start_new()
    logs.write(conn, [written(job, *"abc"), written(other, *"abc")], monotonic())
    one.finish(job, "retry", error="no")
    again = one.take()
    run = written(again, *"def")
    logs.write(conn, [run], monotonic())
    for stranger in (job, again._replace(claimed_by="host:9:boot")):
        logs._leave_out(conn, written(stranger), (1, 3), monotonic())
    assert texts(conn, job.job_id) == [*"abcdef"]
    logs._leave_out(conn, run, (1, 2), monotonic())
    assert (texts(conn, job.job_id), texts(conn, other.job_id)) == ([*"abcf"], [*"abc"])


def test_what_was_written_in_doubt_is_there_once(conn: Conn, running: Any) -> None:
    _, job = running
    run = written(job, "one")
    logs.write(conn, [run], monotonic())
    run.add(monotonic(), "info", "log", "two")
    todo = run.unwritten()
    logs._insert(conn, [(run, line) for line in todo.lines], monotonic())  # committed, but its answer was lost
    run.is_in_doubt = True
    run.add(monotonic(), "info", "log", "three")
    logs.write(conn, [run], monotonic())
    assert texts(conn, job.job_id) == ["one", "two", "three"]


def test_last_words_of_a_dead_worker_are_there_once(conn: Conn, running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker died between its commit and the note that tells the keeper of it; one line was an hour old."""
    _, job = running
    slot = SharedSlots(1).slots[0]
    slot.occupy(job.claimed_by)
    slot.claim([job.job_id], [job.attempt])
    slot.begin(0, 1, 60.0, monotonic())
    outputs = [Output(name) for name in keeper.NAMES]
    slot.log_files[:] = [output.fd for output in outputs]
    slot.logs = True
    os.write(outputs[0].fd, b"one\nthree\n")
    os.write(outputs[1].fd, b"two\n")
    salvage = keeper.Salvage(1_024)
    monkeypatch.setattr(salvage, "_echoes", dict.fromkeys(keeper.SOURCES, lambda raw: None))
    salvage.open_new([slot])
    run = written(job)
    run.add(monotonic() - 3_600, "info", "stdout", "one")
    run.add(monotonic(), "warning", "stderr", "two")
    logs.write(conn, [run], monotonic())
    salvage.write(conn, slot)
    assert sorted(texts(conn, job.job_id)) == ["one", "three", "two"]


def test_pages_follow_each_other_over_attempts(conn: Conn, running: Any) -> None:
    worker, job = running
    logs.write(conn, [written(job, *"abc")], monotonic())
    worker.finish(job, "retry", error="no")
    again = worker.take()
    logs.write(conn, [written(again, *"de")], monotonic())
    found, after = [], None
    while True:
        page = logs.page(conn, job.job_id, after, limit=2)
        found += page.rows
        if page.next is None:
            break
        after = page.next
    assert [line["text"] for line in found] == [*"abcde"]
    assert [line["attempt"] for line in found] == [1, 1, 1, 2, 2]
    assert {line["left_out"] for line in found} == {0}
    assert texts(conn, job.job_id, attempt=1) == [*"abc"]
    assert texts(conn, job.job_id, after=found[0]["place"], attempt=1) == [*"bc"]
    assert [line["text"] for line in logs.last(conn, job.job_id, 1, 2)] == [*"bc"]
    assert logs.last(conn, job.job_id, None, 2)[0]["text"] == "d"
    assert logs.attempts(conn, job.job_id) == [1, 2]


def days(conn: Conn) -> list[str]:
    rows = conn.execute(
        "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
        " WHERE i.inhparent = 'dl_job_logs'::regclass ORDER BY 1"
    )
    return [name for (name,) in rows]


def of_day(conn: Conn, ahead: int) -> str:
    today: datetime = value(conn, "SELECT now()")
    return f"dl_job_logs_{today.astimezone(UTC) + timedelta(days=ahead):%Y%m%d}"


def put(conn: Conn, days_ago: float, text: str = "x") -> None:
    conn.execute(
        "INSERT INTO dl_job_logs SELECT gen_random_uuid(), 1, 1, 1, now() - %s * interval '1 day', 'info', 'log', %s",
        (days_ago, text),
    )


@pytest.fixture
def own(own_db: str) -> Any:
    with db.connect(own_db, name="test", schema="public") as conn:
        yield conn


@pytest.fixture
def one_day(own: Conn) -> Any:
    """A transaction, in which it is never midnight."""
    with own.transaction():
        yield own


def test_the_days_ahead_are_made_and_take_rows_of_the_default_partition_and_old_days_are_dropped(one_day: Conn) -> None:
    put(one_day, 0, "of today")
    put(one_day, 400, "of long ago")
    assert logs.keep_days(one_day, None) == 3
    expected = [*(of_day(one_day, ahead) for ahead in range(3)), "dl_job_logs_rest"]
    assert days(one_day) == expected
    assert value(one_day, f"SELECT text FROM {of_day(one_day, 0)}") == "of today"
    assert value(one_day, "SELECT text FROM dl_job_logs_rest") == "of long ago"
    assert logs.keep_days(one_day, None) == 0
    put(one_day, -1, "of tomorrow")
    assert value(one_day, f"SELECT text FROM {of_day(one_day, 1)}") == "of tomorrow"
    assert value(one_day, f"SELECT count(*) FROM pg_indexes WHERE tablename = '{of_day(one_day, 0)}'") == 1
    one_day.execute(
        "CREATE TABLE dl_job_logs_20250101 PARTITION OF dl_job_logs"
        " FOR VALUES FROM ('2025-01-01 Z') TO ('2025-01-02 Z')"
    )
    one_day.execute("CREATE TABLE dl_job_logs_20250102 (a int)")  # a table of this name that is no partition
    put(one_day, 5, "young")
    assert logs.keep_days(one_day, 10) == 1
    assert days(one_day) == expected
    assert value(one_day, "SELECT to_regclass('dl_job_logs_20250102') IS NOT NULL")
    left = [text for (text,) in one_day.execute("SELECT text FROM dl_job_logs ORDER BY at")]
    assert left == ["young", "of today", "of tomorrow"]


def test_a_reader_who_holds_a_day_delays_the_change_and_a_second_reaper_leaves_it_to_the_first(
    own: Conn, own_db: str
) -> None:
    with psycopg.connect(own_db) as reader:
        reader.execute("SELECT * FROM dl_job_logs")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            logs.keep_days(own, None)
    with psycopg.connect(own_db) as other:
        other.execute("SELECT dl_log_days(NULL)")
        assert logs.keep_days(own, None) is None
        other.rollback()
    assert logs.keep_days(own, None) == 3
