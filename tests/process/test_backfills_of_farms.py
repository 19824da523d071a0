"""Backfills of real farms: each partition once in the target, never more runs at once than may, whatever is killed."""

from __future__ import annotations

import signal
from contextlib import suppress
from random import Random

import psutil
import pytest
from farming import Farm, Program, until
from judge import UNDER_WAY

from dataloader.queue.plans import backfills, new_backfill

MOST = 3
ENDED = "SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'"
TARGET = """
CREATE TABLE filled (partition text NOT NULL, by_job uuid NOT NULL);
CREATE INDEX ix_filled ON filled (partition);
"""
# In turn, again and again.
KILLED = (*("worker", "reaper", "worker", "supervisor"), *("worker", "worker", "reaper", "worker"))


class Fire:
    """Two farms and two reapers, of which something is killed now and then; what does not come back is started anew."""

    def __init__(self, farm: Farm) -> None:
        self._farm = farm
        self._random = Random(1)
        self._programs = [self._start() for _ in range(2)]
        self._reapers = [farm.start("reaper") for _ in range(2)]
        self.kills = 0

    def kill(self) -> None:
        """The next of KILLED by SIGKILL."""
        what = KILLED[self.kills % len(KILLED)]
        self.kills += 1
        {"worker": self._kill_worker, "reaper": self._kill_reaper, "supervisor": self._kill_supervisor}[what]()

    def _start(self) -> Program:
        return self._farm.start(workers=2, dl_pipelines="backfill_pipelines")

    def _kill_worker(self) -> None:
        workers = [worker for program in self._programs for worker in program.workers()]
        with suppress(psutil.NoSuchProcess, IndexError):
            self._random.choice(workers).send_signal(signal.SIGKILL)

    def _kill_reaper(self) -> None:
        self._reapers.pop(0).signal(signal.SIGKILL)
        self._reapers.append(self._farm.start("reaper"))

    def _kill_supervisor(self) -> None:
        self._programs.pop(0).signal(signal.SIGKILL)
        self._programs.append(self._start())


@pytest.mark.parametrize(("partitions", "kills"), [(60, 8), pytest.param(1_500, 40, marks=pytest.mark.slow)])
def test_each_partition_is_once_in_the_target_and_three_run_at_most_under_kills(
    farm: Farm, partitions: int, kills: int
) -> None:
    farm.conn.execute(TARGET)
    fire = Fire(farm)
    span = {"since": "1", "until": str(partitions), "step": "1"}
    fields = {"name": "b", "task": "fills", "queue": "q", "args": {"day": "{{ partition }}"}, "max_attempts": 100}
    backfills.add(farm.conn, new_backfill.checked(fields | span | {"max_running": MOST}), "t")

    def all_ended() -> bool:
        ended = farm.rows(ENDED)[0][0]
        if ended >= (fire.kills + 1) * partitions / (kills + 1) and fire.kills < kills:
            fire.kill()
        return bool(ended == partitions)

    until(all_ended, "all partitions to be done", 2 * partitions)
    assert fire.kills == kills
    assert farm.rows(UNDER_WAY, "backfill:b") == [(MOST,)]
    assert farm.rows("SELECT count(*), count(DISTINCT partition) FROM filled") == [(partitions, partitions)]
    shown = backfills.backfill(farm.conn, "b")
    assert shown
    assert (shown["state"], shown["counts"]["succeeded"]) == ("done", partitions)


def test_a_killed_creation_is_completed_with_a_job_for_each_partition(farm: Farm) -> None:
    """Reapers are killed in the midst of it; each partition has one job, and no job has no partition."""
    fields = {"name": "b", "task": "fills", "queue": "q", "since": "1", "until": "10000", "step": "1"}
    reaper = farm.start("reaper")
    until(lambda: reaper.events("reaper.started"), "the reaper")
    backfills.add(farm.conn, new_backfill.checked(fields), "t")
    for upto in (1_000, 4_000):
        until(lambda most=upto: farm.rows("SELECT made FROM dl_backfills")[0][0] >= most, "some of it")  # type: ignore[misc]
        reaper.signal(signal.SIGKILL)
        farm.end_sessions("dl-reaper")
        reaper = farm.start("reaper")
    until(lambda: farm.rows("SELECT made FROM dl_backfills") == [(10_000,)], "the rest")
    rows = farm.rows("SELECT count(*), count(DISTINCT idempotency_key) FROM dl_jobs JOIN dl_partitions USING (job_id)")
    assert rows == [(10_000, 10_000)]
    assert farm.rows("SELECT count(*) FROM dl_jobs") == [(10_000,)]


def test_a_canceled_backfill_ends_its_running_jobs_and_a_paused_one_starts_none(farm: Farm) -> None:
    farm.ready(workers=2)
    farm.start("reaper")
    fields = {"name": "b", "task": "recorded", "queue": "q", "since": "1", "until": "30", "step": "1"}
    backfills.add(farm.conn, new_backfill.checked(fields | {"args": {"sec": 60}, "max_running": 2}), "t")
    until(lambda: farm.rows("SELECT count(*) FROM dl_jobs WHERE status = 'running'") == [(2,)], "two runs")
    backfills.cancel(farm.conn, "b", "t")
    until(lambda: farm.rows("SELECT count(*) FROM dl_jobs WHERE status = 'canceled'") == [(30,)], "all to be canceled")
    fields |= {"name": "c", "task": "returns"}
    backfills.add(farm.conn, new_backfill.checked(fields), "t")
    until(lambda: farm.rows("SELECT made FROM dl_backfills WHERE name = 'c'") == [(30,)], "the other one")
    until(lambda: farm.rows(ENDED) == [(30,)], "its jobs to end")
