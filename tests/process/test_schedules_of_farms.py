"""Schedules of real farms: told by workers, made by any number of reapers, in time."""

from __future__ import annotations

import signal
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from farming import Farm, until

from dataloader.queue.plans import new_schedule, schedules, times

MADE = (
    "SELECT idempotency_key, status::text, progress, created_at FROM dl_jobs WHERE task = 'ticks' ORDER BY created_at"
)


def due(farm: Farm) -> list[Any]:
    """The due times that have jobs."""
    return [found[1] for key, *_ in farm.rows(MADE) if (found := times.due_of_key(key))]


def test_a_schedule_of_code_makes_a_job_each_second_over_kills_of_its_reapers(farm: Farm) -> None:
    """Of two reapers one is killed, and another one starts: no second is left out, none comes twice."""
    settings = {"dl_pipelines": "schedule_pipelines", "scheduled": 1}
    farm.ready(workers=1, **settings)
    reapers = [farm.start("reaper", dl_reaper_period_sec=30) for _ in range(2)]
    until(lambda: len(due(farm)) >= 3, "the first jobs")
    reapers[0].signal(signal.SIGKILL)
    farm.end_sessions("dl-reaper")
    farm.start("reaper", dl_reaper_period_sec=30)
    so_far = len(due(farm))
    until(lambda: len(due(farm)) >= so_far + 4, "further jobs")
    until(lambda: sum(status == "succeeded" for _, status, *_ in farm.rows(MADE)) >= 5, "their runs")
    found = sorted(due(farm))
    assert {later - earlier for earlier, later in pairwise(found)} == {timedelta(seconds=1)}
    key, _, progress, _ = next(row for row in farm.rows(MADE) if row[1] == "succeeded")
    assert times.due_of_key(key) == ("ticks", datetime.fromisoformat(progress["due"]))


def test_a_job_is_made_within_about_a_second_of_its_due_time_though_the_reaper_rests(farm: Farm) -> None:
    """Its period is long; a new schedule wakes it, and then it wakes at the due times."""
    reaper = farm.start("reaper", dl_reaper_period_sec=60)
    until(lambda: reaper.events("reaper.started"), "the reaper")
    new = new_schedule.checked({"name": "n", "task": "ticks", "queue": "q", "interval_sec": 2}, "UTC")
    schedules.add(farm.conn, new, "test")
    until(lambda: len(due(farm)) >= 4, "jobs")
    late = [row[3] - found[1] for row in farm.rows(MADE) if (found := times.due_of_key(row[0]))]
    assert min(late) >= timedelta(0)
    assert sorted(late)[len(late) // 2] < timedelta(seconds=1), late
    made = reaper.events("reaper.schedule.made")
    assert (made[0]["schedule"], made[0]["jobs"]) == ("n", 1)
    assert reaper.stop() == 0


def test_a_bad_schedule_and_a_bad_hook_stop_neither_the_reaper_nor_the_others(farm: Farm) -> None:
    for name in ("bad", "good"):
        new = new_schedule.checked({"name": name, "task": "ticks", "queue": "q", "interval_sec": 1}, "UTC")
        schedules.add(farm.conn, new, "test")
    farm.conn.execute("""UPDATE dl_schedules SET job = job || '{"priority": -1}' WHERE name = 'bad'""")
    broken = farm.start("reaper", dl_hooks="no_such_module")
    until(lambda: broken.events("reaper.hooks.failed"), "its word of the hooks")
    assert due(farm) == []
    assert broken.stop() == 0
    reaper = farm.start("reaper")
    until(lambda: len(due(farm)) >= 2, "jobs of the good one")
    (failed,) = until(lambda: reaper.events("reaper.schedule.failed"), "its word of the bad one")
    assert failed["schedule"] == "bad"
    assert "priority" in failed["error"]
    assert [row["error"] is None for row in schedules.listed(farm.conn)] == [False, True]


def test_a_schedule_that_the_code_names_no_more_is_retired_at_the_next_start(farm: Farm) -> None:
    first = farm.ready(workers=1, dl_pipelines="schedule_pipelines", scheduled=1)
    (told,) = schedules.listed(farm.conn)
    assert (told["name"], told["origin"], told["words"], told["retired_at"]) == ("ticks", "code", "Every second", None)
    first.stop()
    farm.ready(workers=1, dl_pipelines="schedule_pipelines", scheduled=0)
    (told,) = schedules.listed(farm.conn)
    assert told["retired_at"] is not None
    assert told["next"] == []
