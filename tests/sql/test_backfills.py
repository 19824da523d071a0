"""Backfills in the database: their jobs and their ledger, by whichever reaper, and what people change."""

from typing import Any

import pytest
from hands import Conn, Workers, enqueue, value

from dataloader.queue import db, operations
from dataloader.queue.plans import backfills, new_backfill, plan
from dataloader.queue.reports import stats


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next bunch comes at once."""
    monkeypatch.setattr(backfills, "REST", 0.0)


def new(name: str = "b", **fields: Any) -> dict[str, Any]:
    """A backfill of five days, if nothing else is said."""
    span = {} if "partitions" in fields else {"since": "2019-01-01", "until": "2019-01-05", "step": "day"}
    args = {"day": "{{ partition }}"}
    return new_backfill.checked({"name": name, "task": "load", "queue": "q", "args": args, **span, **fields})


def add(conn: Conn, name: str = "b", **fields: Any) -> dict[str, Any]:
    return backfills.add(conn, new(name, **fields), "me")


def tick(conn: Conn) -> list[plan.Made]:
    """All that is to be done."""
    made: list[plan.Made] = []
    while found := backfills.tick(conn):
        made.append(found)
        assert found.error is None, found
        assert len(made) < 100, "it comes to no end"
    return made


def counts(conn: Conn, name: str = "b") -> dict[str, int]:
    """The counts that are not 0."""
    return {status: count for status, count in backfills.backfill(conn, name)["counts"].items() if count}


def ledger(conn: Conn, name: str = "b", status: str | None = None) -> list[tuple[str, str]]:
    return [(row["partition"], row["status"]) for row in backfills.ledger_rows(conn, name, 0, 1_000, status)]


def end(conn: Conn, status: str, *days: str) -> None:
    conn.execute(
        "UPDATE dl_jobs SET status = %s::dl_status, finished_at = now(), started_at = now() - interval '10 s'"
        " WHERE partition_key = ANY (%s)",
        (status, list(days)),
    )


def test_each_partition_gets_one_job_with_its_args_its_key_and_its_limit(conn: Conn) -> None:
    """Beside the limits of its pipeline."""
    operations.publish_tasks(conn, {"load": {"limits": ["cbr"]}})
    added = add(conn, max_running=3)
    assert (added["state"], added["total"], added["counts"]["missing"]) == ("making", 5, 5)
    assert [(made.name, made.jobs) for made in tick(conn)] == [("b", 5)]
    assert backfills.tick(conn) is None
    days = [f"2019-01-0{day}" for day in range(1, 6)]
    jobs = conn.execute("SELECT partition_key, args ->> 'day' FROM dl_jobs ORDER BY 1").fetchall()
    assert jobs == [(day, day) for day in days]
    (job,) = stats.jobs(conn, stats.Wanted(queue="q"), 1).rows
    assert (job["priority"], job["limits"], job["producer"]) == (200, ["cbr", "backfill:b"], "backfill b")
    assert value(conn, "SELECT payload ->> 'producer' FROM dl_job_events LIMIT 1") == "backfill b"
    assert value(conn, "SELECT most FROM dl_limits WHERE name = 'backfill:b'") == 3
    assert counts(conn) == {"queued": 5}
    assert backfills.backfill(conn, "b")["state"] == "running"
    with pytest.raises(operations.Conflict, match="a backfill b already"):
        add(conn, max_running=7)
    assert value(conn, "SELECT most FROM dl_limits") == 3
    assert value(conn, "SELECT count(*) FROM dl_partitions") == 5


def test_the_jobs_come_in_bunches_in_turn_with_those_of_others_and_a_killed_bunch_comes_again(
    conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfills, "AT_ONCE", 2)
    add(conn)
    add(conn, "c", partitions=["x", "y", "z"])
    with monkeypatch.context() as killed:
        killed.setitem(backfills._PLANS, "done_up_to", "SELECT 1 / 0")
        failed = backfills.tick(conn)
    assert (failed.name, failed.error) == ("b", "division by zero")
    assert value(conn, "SELECT count(*) FROM dl_jobs") == value(conn, "SELECT count(job_id) FROM dl_partitions") == 0
    assert backfills.backfill(conn, "b")["error"] == "division by zero"
    conn.execute("UPDATE dl_backfills SET next_at = now() WHERE name = 'b'")
    assert [(made.name, made.jobs) for made in tick(conn)] == [("c", 2), ("b", 2), ("c", 1), ("b", 2), ("b", 1)]
    assert backfills.backfill(conn, "b")["error"] is None
    assert value(conn, "SELECT count(*) FROM dl_jobs") == 8


@pytest.mark.parametrize("has_ended", [False, True])
def test_beside_jobs_of_others_a_bunch_is_followed_by_a_rest_whichever_reaper_makes_the_next(
    conn: Conn, workers: Workers, monkeypatch: pytest.MonkeyPatch, has_ended: bool
) -> None:
    worker = workers()
    job = worker.start_new(lock_key="of somebody else")
    if has_ended:
        worker.finish(job)
        conn.execute("UPDATE dl_jobs SET finished_at = now() + interval '1 h'")  # else it counts for a second
    monkeypatch.setattr(backfills, "AT_ONCE", 2)
    monkeypatch.setattr(backfills, "REST", 1e5)
    add(conn)
    for change in (lambda: None, lambda: backfills.cancel(conn, "b", "me")):
        change()
        assert backfills.tick(conn)
        assert backfills.tick(conn) is None
        assert backfills.due_in(conn) > 1
    add(conn, "c")
    assert [made.name for made in tick(conn)] == ["c"], "others have their turn"


def test_a_backfill_alone_is_made_without_a_rest(conn: Conn, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backfills, "AT_ONCE", 2)
    monkeypatch.setattr(backfills, "REST", 1e5)
    job_id = enqueue(conn)
    conn.execute(
        "UPDATE dl_jobs SET status = 'succeeded', finished_at = now() - interval '1 h' WHERE job_id = %s", (job_id,)
    )
    add(conn)
    backfills.tick(conn)
    worker = workers()
    worker.finish(worker.take())
    worker.take()
    assert [made.jobs for made in tick(conn)] == [2, 1]


def test_a_change_wakes_the_reapers(conn: Conn, dsn: str) -> None:
    backfills.listen(conn)
    with db.connect(dsn, name="people", schema="public") as people:
        for change in (
            lambda: add(people),
            lambda: backfills.pause(people, "b", "me") and backfills.resume(people, "b", "me"),
            lambda: backfills.cancel(people, "b", "me"),
        ):
            change()
            assert [note.channel for note in conn.notifies(timeout=20, stop_after=1)] == ["dl_backfills"]
            assert backfills.due_in(conn) <= 0
    tick(conn)
    assert backfills.due_in(conn) is None


def test_a_paused_backfill_makes_and_starts_no_jobs_and_a_new_cap_counts_from_its_end_on(
    conn: Conn, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfills, "AT_ONCE", 3)
    add(conn, max_running=1)
    backfills.tick(conn)
    worker = workers()
    job = worker.take()
    paused = backfills.pause(conn, "b", "me")
    assert (paused["state"], paused["paused_by"], paused["eta_sec"]) == ("paused", "me", None)
    assert tick(conn) == []
    worker.finish(job)
    assert worker.claim().job is None, "the limit is 0"
    backfills.set_most(conn, "b", 2, "me")
    assert worker.claim().job is None
    resumed = backfills.resume(conn, "b", "me")
    assert (resumed["state"], resumed["max_running"]) == ("making", 2)
    operations.remove_limit(conn, backfills.limit_of("b"), "somebody")
    backfills.set_most(conn, "b", 2, "me")
    assert value(conn, "SELECT most FROM dl_limits") == 2
    assert [made.jobs for made in tick(conn)] == [2]
    first, second = worker.take(), workers().take()
    assert first.job_id != second.job_id
    assert workers().claim().job is None
    backfills.set_most(conn, "b", None, "me")
    assert workers().take()


def test_a_canceled_backfill_makes_no_more_jobs_and_cancels_its_own_alone_in_bunches(
    conn: Conn, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfills, "AT_ONCE", 2)
    add(conn, max_running=2)
    backfills.tick(conn)
    backfills.tick(conn)
    add(conn, "c", partitions=["x"])
    conn.execute("UPDATE dl_backfills SET next_at = NULL WHERE name = 'c'")
    running = workers().take()
    canceled = backfills.cancel(conn, "b", "me")
    assert canceled["state"] == "canceled"
    assert value(conn, "SELECT most FROM dl_limits WHERE name = 'backfill:b'") == 0
    assert [made.canceled for made in tick(conn)] == [2, 2, 0]
    assert value(conn, "SELECT cancel_requested FROM dl_jobs WHERE job_id = %s", running.job_id) is True
    assert counts(conn) == {"missing": 1, "running": 1, "canceled": 3}
    assert value(conn, "SELECT most FROM dl_limits WHERE name = 'backfill:b'") == 2, "for jobs that are requeued"
    for change in (backfills.pause, backfills.resume):
        with pytest.raises(operations.Conflict, match="is canceled"):
            change(conn, "b", "me")


def test_retry_requeues_the_dead_jobs_alone_step_by_step(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    add(conn)
    tick(conn)
    end(conn, "failed", "2019-01-01", "2019-01-03")
    end(conn, "lost", "2019-01-04")
    end(conn, "succeeded", "2019-01-05")
    monkeypatch.setattr(backfills, "RETRIED_AT_ONCE", 2)
    assert backfills.retry(conn, "b", "me") == (2, 3)
    assert backfills.retry(conn, "b", "me", 3) == (1, None)
    assert counts(conn) == {"queued": 4, "succeeded": 1}


def test_two_reapers_make_a_bunch_once_and_the_ledger_keeps_how_deleted_jobs_had_ended(conn: Conn, dsn: str) -> None:
    add(conn)
    with db.connect(dsn, name="other", schema="public") as other, other.transaction():
        other.execute("SELECT FROM dl_backfills FOR UPDATE")
        assert backfills.tick(conn) is None
    assert len(tick(conn)) == 1
    end(conn, "succeeded", "2019-01-01")
    end(conn, "failed", "2019-01-02")
    conn.execute("DELETE FROM dl_jobs WHERE partition_key <= '2019-01-03'")
    assert counts(conn) == {"succeeded": 1, "failed": 1, "missing": 1, "queued": 2}
    assert ledger(conn, status="missing") == [("2019-01-03", "missing")]
    assert [status for _, status in ledger(conn)] == ["succeeded", "failed", "missing", "queued", "queued"]


def test_the_state_and_the_time_left_follow_the_jobs(conn: Conn) -> None:
    add(conn)
    tick(conn)
    end(conn, "succeeded", "2019-01-01", "2019-01-02")
    shown = backfills.backfill(conn, "b")
    assert shown["state"] == "running"
    assert 10 < shown["eta_sec"] < 60, "three are left, two came in some ten seconds"
    conn.execute("UPDATE dl_jobs SET available_at = now() + interval '1 h' WHERE partition_key = '2019-01-03'")
    assert 3_590 < backfills.backfill(conn, "b")["eta_sec"] <= 3_600, "one is due in an hour"
    conn.execute("UPDATE dl_partitions SET is_skipped = true WHERE partition = '2019-01-03'")
    assert backfills.backfill(conn, "b")["eta_sec"] < 60, "it is another backfill's work"
    conn.execute("UPDATE dl_partitions SET is_skipped = false")
    end(conn, "succeeded", *(f"2019-01-0{day}" for day in range(3, 6)))
    shown = backfills.backfill(conn, "b")
    assert (shown["state"], shown["eta_sec"]) == ("done", None)


def test_skip_done_leaves_out_what_is_done_with_the_same_args_and_version(conn: Conn) -> None:
    add(conn, code_version="1")
    tick(conn)
    end(conn, "succeeded", "2019-01-01", "2019-01-02")
    end(conn, "failed", "2019-01-03")
    conn.execute("DELETE FROM dl_jobs WHERE partition_key = '2019-01-02'")
    for version, skipped in (("1", 2), ("2", 0)):
        assert backfills.preview(conn, new(skip_done=True, code_version=version))["skipped"] == skipped
    add(conn, "again", skip_done=True, code_version="1")
    add(conn, "newer", skip_done=True, code_version="2", lock_key="n{{ partition }}")
    add(conn, "all", code_version="1", lock_key="a{{ partition }}")
    assert {made.name: (made.jobs, made.skipped) for made in tick(conn)} == {
        "again": (3, 2),
        "newer": (5, 0),
        "all": (5, 0),
    }
    assert counts(conn, "again") == {"skipped": 2, "queued": 3}
    (first, *_) = backfills.ledger_rows(conn, "again", 0, 1)
    assert first["job_id"] == value(conn, "SELECT job_id FROM dl_jobs WHERE idempotency_key = 'backfill:b:2019-01-01'")
    backfills.cancel(conn, "again", "me")
    assert sum(made.canceled for made in tick(conn)) == 3, "those of its own"
    assert counts(conn, "again") == {"skipped": 2, "canceled": 3}
    assert counts(conn)["succeeded"] == 2


def test_a_full_queue_stops_a_backfill_until_there_is_room_and_one_that_has_ended_can_be_removed(conn: Conn) -> None:
    """Its jobs stay."""
    operations.limit_length(conn, "q", 1, "me")
    add(conn, "first", partitions=["x"])
    tick(conn)
    add(conn, max_running=1)
    assert "the queue q is full" in backfills.tick(conn).error
    assert 0 < backfills.due_in(conn) <= backfills.RETRY_SEC
    assert backfills.tick(conn) is None, "it rests"
    operations.limit_length(conn, "q", None, "me")
    conn.execute("UPDATE dl_backfills SET next_at = now() WHERE next_at IS NOT NULL")
    with pytest.raises(operations.Conflict, match="cancel it, and wait"):
        backfills.remove(conn, "b", "me")
    assert [made.jobs for made in tick(conn)] == [5]
    with pytest.raises(operations.Conflict, match="cancel it, and wait"):
        backfills.remove(conn, "b", "me")
    end(conn, "succeeded", *(f"2019-01-0{day}" for day in range(1, 6)))
    backfills.remove(conn, "b", "me")
    with pytest.raises(plan.Unknown):
        backfills.remove(conn, "b", "me")
    for table, left in (("dl_partitions", 1), ("dl_limits", 0), ("dl_jobs", 6)):
        assert value(conn, f"SELECT count(*) FROM {table}") == left
