"""Schedules, backfills and limits of real farms: each job once and in time, never more at once than may, over kills."""

import signal
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import pairwise
from random import Random
from typing import Any

import psutil
import pytest
from farming import Farm, until
from judge import UNDER_WAY

from dataloader.queue import operations
from dataloader.queue.plans import backfills, new_backfill, new_schedule, schedules, times

MADE = "SELECT idempotency_key, status::text, progress, created_at FROM dl_jobs WHERE task = 'ticks' ORDER BY 4"


def due(farm: Farm) -> list[Any]:
    return [found[1] for key, *_ in farm.rows(MADE) if (found := times.due_of_key(key))]


def test_a_schedule_of_code_makes_a_job_each_second_over_kills_of_its_reapers(farm: Farm) -> None:
    """Of two reapers one is killed, and another one starts: no second is left out, none comes twice."""
    farm.ready(workers=1, scheduled=1)
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
    """Its period is long; a new schedule wakes it, and then it wakes at the due times. A bad hook stops it alone."""
    broken = farm.start("reaper", dl_hooks="no_such_module")
    broken.logged("reaper.hooks.failed")
    reaper = farm.reaper(dl_reaper_period_sec=60)
    new = new_schedule.checked({"name": "n", "task": "ticks", "queue": "q", "interval_sec": 2}, "UTC")
    schedules.add(farm.conn, new, "test")
    until(lambda: len(due(farm)) >= 4, "jobs")
    late = [row[3] - found[1] for row in farm.rows(MADE) if (found := times.due_of_key(row[0]))]
    assert min(late) >= timedelta(0)
    assert sorted(late)[len(late) // 2] < timedelta(seconds=1), late
    made = reaper.logged("reaper.schedule.made")
    assert (made[0]["schedule"], made[0]["jobs"]) == ("n", 1)
    assert reaper.stop() == broken.stop() == 0
    assert not broken.events("reaper.schedule.made"), "no job goes past the hooks"


MOST = 3
ENDED = "SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'"
TARGET = """
CREATE TABLE filled (partition text NOT NULL, by_job uuid NOT NULL);
CREATE INDEX ix_filled ON filled (partition);
"""
# In turn, again and again.
KILLED = (*("worker", "reaper", "worker", "supervisor"), *("worker", "worker", "reaper", "worker"))


PROGRAMS = [("supervisor", "workers", 3), ("reaper", "reaper", 2)]


class Fire:
    """Three farms and two reapers, of which something is killed now and then; what does not come back is replaced."""

    def __init__(self, farm: Farm) -> None:
        self._farm, self._random, self.kills = farm, Random(1), 0
        self._programs = {name: [farm.start(command) for _ in range(number)] for name, command, number in PROGRAMS}

    def kill(self) -> None:
        """The next of KILLED by SIGKILL."""
        victim = KILLED[self.kills % len(KILLED)]
        self.kills += 1
        if victim == "worker":
            workers = [worker for program in self._programs["supervisor"] for worker in program.workers()]
            with suppress(psutil.NoSuchProcess, IndexError):
                self._random.choice(workers).send_signal(signal.SIGKILL)
        else:
            self._programs[victim].pop(0).signal(signal.SIGKILL)
            self._programs[victim].append(self._farm.start("workers" if victim == "supervisor" else "reaper"))


@pytest.mark.parametrize(("partitions", "kills"), [(60, 8), pytest.param(1_500, 40, marks=pytest.mark.slow)])
def test_each_partition_is_once_in_the_target_and_a_limit_has_three_runs_at_most_under_kills(
    farm: Farm, partitions: int, kills: int
) -> None:
    """One limit is the backfill's own, another one is named by as many jobs beside them."""
    farm.conn.execute(TARGET)
    operations.set_limit(farm.conn, "source", "test", most=MOST)
    fire = Fire(farm)
    span = {"since": "1", "until": str(partitions), "step": "1"}
    fields = {"name": "b", "task": "fills", "queue": "q", "args": {"day": "{{ partition }}"}, "max_attempts": 100}
    backfills.add(farm.conn, new_backfill.checked(fields | span | {"max_running": MOST}), "t")
    for _ in range(partitions):
        farm.enqueue("recorded", args={"sec": 0.1}, limits=["source"], max_attempts=100)

    def all_ended() -> bool:
        ended = farm.rows(ENDED)[0][0]
        if ended >= (fire.kills + 1) * 2 * partitions / (kills + 1) and fire.kills < kills:
            fire.kill()
        return bool(ended == 2 * partitions)

    until(all_ended, "all jobs to succeed", 2 * partitions)
    assert fire.kills == kills
    assert farm.rows(UNDER_WAY, "backfill:b") == [(MOST,)]
    assert farm.rows(UNDER_WAY, "source") == [(MOST,)]
    assert farm.rows("SELECT count(*), count(DISTINCT partition) FROM filled") == [(partitions, partitions)]
    shown = backfills.backfill(farm.conn, "b")
    assert shown
    assert (shown["state"], shown["counts"]["succeeded"]) == ("done", partitions)
