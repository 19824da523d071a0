"""Schedules in the database: which due times get jobs, by which reaper, and what people and code change."""

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
import structlog
from hands import PATIENCE, Conn, value

from dataloader.config import Settings
from dataloader.farm import reaper
from dataloader.queue import db, operations
from dataloader.queue.hooks import AROUND_ENQUEUE
from dataloader.queue.plans import new_schedule, plan, schedules, times

DAY = datetime(2026, 3, 2, tzinfo=UTC)  # a Monday
JOBS = "SELECT * FROM dl_jobs ORDER BY created_at, idempotency_key"


def at(hour: float, day: int = 0) -> datetime:
    """An instant of the days from DAY on."""
    return DAY + timedelta(days=day, hours=hour)


def add(conn: Conn, name: str = "nightly", since: datetime | None = DAY, **fields: Any) -> dict[str, Any]:
    """A schedule at 03:00 in UTC, if nothing else is said, whose due times count from `since` on."""
    timing = {} if "interval_sec" in fields else {"cron": "0 3 * * *"}
    new = new_schedule.checked({"name": name, "task": "load", "queue": "q", **timing, **fields}, "UTC")
    added = schedules.add(conn, new, "me")
    if since:
        conn.execute("UPDATE dl_schedules SET next_due = %s WHERE name = %s", (first(new, since), name))
    return added


def first(new: dict[str, Any], since: datetime) -> datetime | None:
    return times.first(times.Timing(new["cron"], new["interval_sec"], new["timezone"]), since)


def tick(conn: Conn, now: datetime) -> list[plan.Made]:
    return list(schedules.tick(conn, now=now))


def due(conn: Conn) -> list[datetime]:
    """The due times of all jobs, as their keys say."""
    keys = conn.execute("SELECT idempotency_key FROM dl_jobs").fetchall()
    return sorted(found[1] for (key,) in keys if (found := times.due_of_key(key)))


def jobs(conn: Conn) -> list[dict[str, Any]]:
    with conn.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        return cursor.execute(JOBS).fetchall()


def stored(conn: Conn, name: str = "nightly") -> dict[str, Any]:
    found = schedules.schedule(conn, name)
    assert found is not None
    return found


def test_a_job_has_what_its_schedule_says_and_its_journal_and_key_name_the_schedule(conn: Conn) -> None:
    args = {"day": "{{ date }}", "hour": "{{ hour }}", "from": "{{ previous_due }}", "of": "{{schedule}} of {{ year }}"}
    same = {"priority": 7, "max_attempts": 2, "timeout_sec": 9, "lease_ttl_sec": 30}
    keys = {"affinity_key": "m{{ month }}", "partition_key": "p{{ weekday }}"}
    add(conn, args=args, timezone="Europe/Moscow", since=at(-1), **keys, **same)
    tick(conn, at(0))
    (job,) = jobs(conn)
    previous = "2026-03-01T03:00:00+03:00"
    assert job["args"] == {"day": "2026-03-02", "hour": 3, "from": previous, "of": "nightly of 2026"}
    made = {"queue": "q", "task": "load", "lock_key": "nightly", "affinity_key": "m3", "partition_key": "p1"} | same
    assert job | made == job
    assert (job["producer"], times.due_of_key(job["idempotency_key"])) == ("schedule nightly", ("nightly", at(0)))
    assert value(conn, "SELECT payload ->> 'by' FROM dl_job_events WHERE kind = 'queued'") == "schedule nightly"
    shown = stored(conn)
    assert (shown["last_job_id"], shown["last_job_status"], shown["last_due"]) == (job["job_id"], "queued", at(0))


@pytest.mark.parametrize(
    ("catch_up", "late_sec", "made"),
    [
        ("none", 3_600, []),
        ("last", 3_600, [at(3, 2)]),
        ("all", 3_600, [at(3), at(3, 1), at(3, 2)]),
        ("none", times.GRACE_SEC - 1, [at(3, 2)]),
        ("last", times.GRACE_SEC - 1, [at(3, 2)]),
    ],
)
def test_missed_due_times_go_by_catch_up(conn: Conn, catch_up: str, late_sec: float, made: list[datetime]) -> None:
    """One of the last minute is not missed, and stands for those before it."""
    add(conn, catch_up=catch_up)
    tick(conn, at(3, 2) + timedelta(seconds=late_sec))
    assert due(conn) == made
    tick(conn, at(3, 3))
    assert due(conn) == [*made, at(3, 3)]


def test_many_missed_due_times_are_made_in_bounded_steps(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "AT_ONCE", 10)
    add(conn, "each", interval_sec=60, catch_up="all")
    add(conn, "zeroth", interval_sec=3_600)
    assert tick(conn, at(0.4)) == [plan.Made("each", 10)]
    assert schedules.due_in(conn, at(0.4)) == pytest.approx(-13 * 60)
    assert tick(conn, at(1)) == [plan.Made("each", 10), schedules.Made("zeroth", 1)]
    while tick(conn, at(1)):
        pass
    each = [job["idempotency_key"] for job in jobs(conn) if job["task"] == "load" and "each" in job["lock_key"]]
    assert len(each) == len(set(each)) == 60
    assert schedules.due_in(conn, at(1)) == 60


def test_a_backlog_of_two_rounds_comes_last_in_the_second(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "AT_ONCE", 2)
    hour = value(conn, "SELECT date_trunc('hour', now())").astimezone(UTC)
    add(conn, "backlog", hour - timedelta(hours=5), interval_sec=600, catch_up="all")
    fresh = hour - timedelta(hours=1)
    add(conn, "fresh", fresh - times.TICK, cron=f"0 {fresh.hour} * * *")  # which is not due again while the test runs
    duty = reaper.Schedules(Settings(dl_db_dsn="postgresql://"), structlog.get_logger("reaper"))
    made = []
    for _ in range(4):  # each round has time for one transaction
        duty.make(conn, lambda: False)
        made.append(value(conn, "SELECT lock_key FROM dl_jobs ORDER BY created_at DESC LIMIT 1"))
        assert duty.due_at <= reaper.now(), "there is more to make"
    assert made == ["backlog", "fresh", "backlog", "backlog"]


def test_a_schedule_that_is_locked_or_whose_last_job_is_holds_up_no_other_one(dsn: str, conn: Conn) -> None:
    """A reaper leaves a schedule alone that another reaper has locked."""
    add(conn, "first", overlap="cancel_old")
    add(conn, "other")
    with db.connect(dsn, name="stranger", schema="public") as stranger:
        with stranger.transaction():
            stranger.execute("SELECT FROM dl_schedules WHERE name = 'first' FOR UPDATE")
            assert tick(conn, at(3)) == [plan.Made("other", 1)]
        assert tick(conn, at(3)) == [plan.Made("first", 1)]
        conn.execute("SET lock_timeout = '50ms'")
        with stranger.transaction():
            stranger.execute("SELECT FROM dl_jobs FOR UPDATE")
            locked, other = tick(conn, at(4, 1))
            assert "lock timeout" in (locked.error or "")
            assert other == plan.Made("other", 1)
            assert tick(conn, at(4, 1)) == []
    soon = at(4, 1) + timedelta(seconds=plan.CONTENDED_SEC)
    assert tick(conn, soon) == [plan.Made("first", 1)]
    assert stored(conn, "first")["error"] is None


def test_a_due_time_has_one_job_however_often_reapers_look_and_however_their_clocks_jump(conn: Conn) -> None:
    add(conn, catch_up="all")
    assert tick(conn, at(2.9)) == []
    assert tick(conn, at(3)) == [plan.Made("nightly", 1)]
    assert tick(conn, at(3)) == tick(conn, at(20)) == []
    assert stored(conn)["next_due"] == at(3, 1)
    for now in (at(1), at(3, 2), at(3), at(2, 2), at(4, 3)):
        tick(conn, now)
    assert due(conn) == [at(3), at(3, 1), at(3, 2), at(3, 3)]


def test_skip_leaves_due_times_without_a_job_while_the_one_before_has_not_ended(conn: Conn) -> None:
    add(conn, overlap="skip", catch_up="all")
    tick(conn, at(3, 1))
    assert due(conn) == [at(3)]
    assert (stored(conn)["skipped"], stored(conn)["last_skipped"]) == (1, at(3, 1))
    for day in (2, 3):
        assert tick(conn, at(3, day)) == [plan.Made("nightly", 0, 1)]
    conn.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now()")
    tick(conn, at(3, 4))
    assert due(conn) == [at(3), at(3, 4)]
    assert (stored(conn)["skipped"], stored(conn)["last_skipped"]) == (3, at(3, 3))


def test_cancel_old_asks_those_before_to_stop(conn: Conn) -> None:
    add(conn, overlap="cancel_old", catch_up="all")
    tick(conn, at(3))
    conn.execute("UPDATE dl_jobs SET status = 'running', attempt = 1, lease_expires_at = now() + interval '1 h'")
    tick(conn, at(3, 2))
    found = [(job["status"], job["cancel_requested"]) for job in jobs(conn)]
    assert found == [("running", True), ("canceled", True), ("queued", False)]


def test_jitter_delays_a_job_of_a_due_time_by_the_same_time_whoever_makes_it_and_none_of_this_moment(
    conn: Conn,
) -> None:
    for name in ("a", "b"):
        add(conn, name, jitter_sec=600, args={"due": "{{ due }}"})
    tick(conn, at(3))
    waits = [(job["available_at"] - at(3)).total_seconds() for job in jobs(conn)]
    assert sorted(waits) == sorted(times.delay(name, at(3), 600).total_seconds() for name in ("a", "b"))
    assert len(set(waits)) == 2
    assert all(0 <= wait < 600 for wait in waits)
    schedules.pause(conn, "a", "me")
    one, two = (schedules.run(conn, "a", "me") for _ in range(2))
    assert one[0] != two[0]
    assert (stored(conn, "a")["last_job_id"], stored(conn, "a")["next_due"]) == (two[0], at(3, 1))
    job = jobs(conn)[-1]
    assert abs(datetime.fromisoformat(job["args"]["due"]) - job["created_at"]) < timedelta(seconds=5)
    assert job["available_at"] <= job["created_at"]
    assert value(conn, "SELECT payload ->> 'by' FROM dl_job_events ORDER BY event_id DESC LIMIT 1") == "me"


def test_a_bad_schedule_keeps_its_error_and_stops_no_other(conn: Conn) -> None:
    """A zone may be gone, and another service may have written the row: it can be shown all the same."""
    changes = {
        "bad": ("""job = job || '{"priority": -1}'""", "priority: "),
        "mars": ("timezone = 'Mars/Olympus'", "no time zone 'Mars/Olympus'"),
        "noon": ("cron = 'at noon'", "should be five fields"),
        "right": ("retired_at = NULL", ""),
    }
    for name, (change, _) in changes.items():
        add(conn, name)
        conn.execute(f"UPDATE dl_schedules SET {change} WHERE name = %s", (name,))
    for made, (name, (_, error)) in zip(tick(conn, at(3)), changes.items(), strict=True):
        assert (made.name, error in (made.error or "")) == (name, True)
        assert stored(conn, name)["error"] == made.error
        assert name not in ("mars", "noon") or error in stored(conn, name)["words"]
    assert stored(conn, "right")["error"] is None
    assert tick(conn, at(3)) == [], "they are tried again later, not at once"
    assert schedules.due_in(conn, at(3)) == schedules.RETRY_SEC
    conn.execute("UPDATE dl_schedules SET job = job - 'priority' WHERE name = 'bad'")
    assert plan.Made("bad", 1) in tick(conn, at(3) + timedelta(seconds=schedules.RETRY_SEC))
    assert (stored(conn, "bad")["error"], stored(conn, "bad")["error_at"]) == (None, None)


def test_a_full_queue_takes_no_job_of_a_schedule_and_the_due_time_stays_due(conn: Conn) -> None:
    add(conn)
    operations.limit_length(conn, "q", 0, "me")
    assert "q is full" in (tick(conn, at(3))[0].error or "")
    operations.limit_length(conn, "q", None, "me")
    tick(conn, at(3.5))
    assert due(conn) == [at(3)]


def test_a_hook_around_the_adding_sees_the_jobs_of_schedules(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: dict[str, Any]) -> dict[str, Any]:
        if job["lock_key"] == "no":
            raise ValueError("not today")
        return job | {"args": {"by": "hook"}}

    monkeypatch.setattr(AROUND_ENQUEUE, "_functions", {})
    AROUND_ENQUEUE.add(refuse)
    add(conn, "no")
    add(conn, "yes")
    assert [made.error for made in tick(conn, at(3))] == ["not today", None]
    assert [job["args"] for job in jobs(conn)] == [{"by": "hook"}]


def test_a_pause_leaves_out_its_due_times_and_stands_over_a_second_one(conn: Conn) -> None:
    """As a schedule that is not paused stands over a resume."""
    add(conn)
    schedules.resume(conn, "nightly")
    assert stored(conn)["next_due"] == at(3)
    schedules.pause(conn, "nightly", "me")
    paused, before = schedules.pause(conn, "nightly", "you"), value(conn, "SELECT now()")
    assert (paused["paused_by"], paused["next"], paused["overdue_sec"]) == ("me", [], 0)
    assert tick(conn, at(3, 5)) == []
    assert schedules.due_in(conn, at(3, 5)) is None
    resumed = schedules.resume(conn, "nightly")
    assert resumed["paused_at"] is None
    assert resumed["next_due"] > before
    assert due(conn) == []


def test_a_change_is_of_one_schedule_and_counts_from_now_on_only_where_the_timing_is_another(conn: Conn) -> None:
    add(conn)
    add(conn, "other")
    changed = schedules.change(conn, "nightly", {"args": {"a": 1}, "priority": 3}, "UTC", "me")
    assert (changed["args"], changed["priority"]) == ({"a": 1}, 3)
    assert (changed["next_due"], changed["changed_by"]) == (at(3), "me")
    schedules.pause(conn, "nightly", "me")
    assert (stored(conn, "other")["priority"], stored(conn, "other")["paused_at"]) == (100, None)
    assert [made.name for made in tick(conn, at(3))] == ["other"]
    assert stored(conn)["next_due"] == at(3)
    before = value(conn, "SELECT now()")
    changed = schedules.change(conn, "nightly", {"interval_sec": 60, "priority": None}, "UTC", "me")
    assert (changed["cron"], changed["interval_sec"], changed["priority"], changed["args"]) == (None, 60, 100, {"a": 1})
    assert before < changed["next_due"] <= value(conn, "SELECT now() + interval '60 s'")


def declared(task: str = "load", **words: Any) -> dict[str, Any]:
    return new_schedule.checked({"name": task, "task": task, "cron": "0 3 * * *"} | words, "")


def test_code_tells_its_schedules_and_another_start_changes_only_what_is_new_and_retires_what_is_gone(
    conn: Conn,
) -> None:
    schedules.publish(conn, {"load": declared(), "other": declared("other"), "silent": None}, "Europe/Moscow")
    one = stored(conn, "load")
    assert (one["origin"], one["timezone"]) == ("code", "Europe/Moscow")
    assert one["words"] == "At 03:00 every day, Europe/Moscow"
    conn.execute("UPDATE dl_schedules SET next_due = %s", (at(3),))
    schedules.publish(conn, {"load": declared(args={"a": 1})}, "Europe/Moscow")
    assert (stored(conn, "load")["args"], stored(conn, "load")["next_due"]) == ({"a": 1}, at(3))
    schedules.publish(conn, {"load": None}, "Europe/Moscow")
    assert stored(conn, "load")["retired_at"] is not None
    assert stored(conn, "other")["retired_at"] is None, "this worker does not know the task"
    assert [made.name for made in tick(conn, at(3))] == ["other"]
    schedules.publish(conn, {"load": declared(args={"a": 1})}, "Europe/Moscow")
    assert [made.name for made in tick(conn, at(3))] == ["load"]
    before = value(conn, "SELECT now()")
    schedules.publish(conn, {"load": declared(cron="0 4 * * *")}, "Europe/Moscow")
    assert stored(conn, "load")["next_due"] > before


def test_what_people_have_changed_or_paused_or_added_outlives_the_next_start(conn: Conn) -> None:
    schedules.publish(conn, {"load": declared(), "hourly": declared("hourly", cron="0 * * * *")}, "UTC")
    schedules.change(conn, "load", {"cron": "0 5 * * *"}, "UTC", "me")
    schedules.pause(conn, "hourly", "me")
    add(conn, "mine", args={"mine": True})
    code = {"load": declared(), "hourly": declared("hourly", cron="30 * * * *"), "mine": declared("mine")}
    schedules.publish(conn, code, "UTC")
    assert (stored(conn, "load")["cron"], stored(conn, "load")["changed_by"]) == ("0 5 * * *", "me")
    assert (stored(conn, "hourly")["cron"], stored(conn, "hourly")["paused_by"]) == ("30 * * * *", "me")
    assert (stored(conn, "mine")["origin"], stored(conn, "mine")["args"]) == ("people", {"mine": True})
    schedules.publish(conn, {"load": None}, "UTC")
    assert stored(conn, "mine")["retired_at"] is None, "its job is of the task load, and people have made it"


def test_a_change_by_which_a_schedule_may_be_due_earlier_wakes_the_reapers(dsn: str, conn: Conn) -> None:
    with db.connect(dsn, name="reaper", schema="public") as ear:
        schedules.listen(ear)

        def heard() -> int:
            return len(list(ear.notifies(timeout=PATIENCE, stop_after=1)))

        add(conn)
        assert heard()
        schedules.change(conn, "nightly", {"interval_sec": 5}, "UTC", "me")
        assert heard()
        schedules.pause(conn, "nightly", "me")
        schedules.resume(conn, "nightly")
        assert heard()
        schedules.publish(conn, {"load": declared()}, "UTC")
        assert heard()
        schedules.publish(conn, {"load": declared()}, "UTC")
        schedules.publish(conn, {"load": None}, "UTC")
        assert heard()
        assert not list(ear.notifies(timeout=0))


def test_a_job_has_the_deadline_that_its_schedule_says(conn: Conn) -> None:
    add(conn, deadline="07:00", timezone="Europe/Moscow", since=at(-1))
    add(conn, "often", interval_sec=3_600, deadline_sec=600, since=at(0) - times.TICK)
    tick(conn, at(0))
    assert sorted(job["deadline"] for job in jobs(conn)) == [at(0) + timedelta(minutes=10), at(4)]
    assert (stored(conn)["deadline"], stored(conn, "often")["deadline_sec"]) == ("07:00", 600)
    schedules.change(conn, "nightly", {"deadline_sec": 60}, "UTC", "me")
    assert (stored(conn)["deadline"], stored(conn)["deadline_sec"]) == (None, 60), "the new one replaces the old one"
    schedules.change(conn, "nightly", {"deadline_sec": None}, "UTC", "me")
    assert (stored(conn)["deadline"], stored(conn)["deadline_sec"]) == (None, None)
