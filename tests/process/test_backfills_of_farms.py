"""Backfills of real farms: each partition once in the target, never more runs at once than may, whatever is killed."""

from __future__ import annotations

import signal
from random import Random

import psutil
from farming import Farm, Program, until

from dataloader.queue import backfills, new_backfill

PARTITIONS = 60
MOST = 3
ENDED = "SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'"
# How many runs were under way behind each of their steps, by the journal.
UNDER_WAY = """
SELECT max(runs) FROM (
  SELECT sum(change) OVER (ORDER BY ts, change, event_id) AS runs FROM (
    SELECT ts, event_id, CASE kind WHEN 'picked' THEN 1 ELSE -1 END AS change
      FROM dl_job_events JOIN dl_jobs USING (job_id)
     WHERE kind IN ('picked', 'done', 'failed', 'canceled', 'lost', 'requeue') AND NOT payload ? 'backoffs'
       AND 'backfill:b' = ANY (limits)) steps) n
"""
TARGET = "CREATE TABLE filled (partition text NOT NULL, by_job uuid NOT NULL)"


def kill_one(programs: list[Program], random: Random) -> None:
    """A worker of any of the farms."""
    if workers := [worker for program in programs for worker in program.workers()]:
        try:
            random.choice(workers).send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            return


def test_each_partition_is_once_in_the_target_and_three_run_at_most_under_kills(farm: Farm) -> None:
    """Workers are killed all the while, and the reapers in the midst of the creation."""
    farm.conn.execute(TARGET)
    programs = [farm.ready(workers=2, dl_pipelines="backfill_pipelines") for _ in range(2)]
    reapers = [farm.start("reaper") for _ in range(2)]
    fields = {"name": "b", "task": "fills", "queue": "q", "since": "2019-01-01", "until": "2019-03-01", "step": "day"}
    args = {"day": "{{ date }}"}
    backfills.add(
        farm.conn, new_backfill.checked(fields | {"args": args, "max_running": MOST, "max_attempts": 100}), "t"
    )
    until(lambda: farm.rows("SELECT FROM dl_jobs LIMIT 1"), "the first job")
    reapers[0].signal(signal.SIGKILL)
    random, kills = Random(1), 0

    def all_ended() -> bool:
        nonlocal kills
        ended = farm.rows(ENDED)[0][0]
        if ended >= (kills + 1) * PARTITIONS / 9 and kills < 8:
            kill_one(programs, random)
            kills += 1
        return bool(ended == PARTITIONS)

    until(all_ended, "all partitions to be done", 120)
    assert kills == 8
    assert farm.rows(UNDER_WAY) == [(MOST,)]
    assert farm.rows("SELECT count(*), count(DISTINCT partition) FROM filled") == [(PARTITIONS, PARTITIONS)]
    shown = backfills.backfill(farm.conn, "b")
    assert shown
    assert (shown["state"], shown["counts"]["succeeded"]) == ("done", PARTITIONS)


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
