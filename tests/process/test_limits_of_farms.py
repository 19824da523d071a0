"""Limits of the fleet with several farms: never more runs at once than a limit says, whatever is killed; its rate."""

from __future__ import annotations

import signal
from random import Random
from typing import Any

import psutil
import pytest
from farming import Farm, Program, until
from judge import UNDER_WAY
from psycopg.types.json import Jsonb

from dataloader.queue import operations

JOBS = 60
ENDED = "SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'"
STARTS = "SELECT extract(epoch FROM ts)::float8 FROM dl_job_events WHERE kind = 'picked' ORDER BY event_id OFFSET %s"


def put(farm: Farm, number: int, task: str, args: dict[str, Any] | None = None, limits: str = "{source}") -> None:
    """Add jobs with a key each."""
    farm.conn.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, args, limits, max_attempts)"
        " SELECT gen_random_uuid(), 'q', %s, %s || i, %s, %s, 100 FROM generate_series(1, %s) i",
        (task, task, Jsonb(args or {}), limits, number),
    )


def kill_one(programs: list[Program], random: Random) -> None:
    """A worker of any of the farms."""
    worker = random.choice([worker for program in programs for worker in program.workers()] or [None])
    if worker is not None:
        try:
            worker.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            return


def test_three_farms_run_three_jobs_of_a_limit_at_every_instant_under_kills(farm: Farm) -> None:
    operations.set_limit(farm.conn, "source", "test", most=3)
    farm.start("reaper")
    programs = [farm.ready(workers=3) for _ in range(3)]
    put(farm, JOBS, "recorded", {"sec": 0.3})
    random, kills = Random(1), 0

    def all_ended() -> bool:
        nonlocal kills
        ended = farm.rows(ENDED)[0][0]
        if ended >= (kills + 1) * JOBS / 12 and kills < 10:
            kill_one(programs, random)
            kills += 1
        return bool(ended == JOBS)

    until(all_ended, "all jobs to succeed")
    assert kills == 10
    assert farm.rows(UNDER_WAY, "source") == [(3,)]


def test_a_full_limit_leaves_the_other_jobs_alone(farm: Farm) -> None:
    operations.set_limit(farm.conn, "source", "test", most=0)
    put(farm, 3_000, "recorded", {"sec": 0})
    put(farm, 20, "returns", limits="{}")
    farm.ready(workers=2)
    until(lambda: farm.rows(ENDED) == [(20,)], "the jobs without the limit to succeed")
    operations.remove_limit(farm.conn, "source", "test")
    until(lambda: farm.rows(ENDED)[0][0] > 20, "jobs of the removed limit to succeed")


@pytest.mark.parametrize("per_minute", [1_200])
def test_starts_keep_the_rate(farm: Farm, per_minute: int) -> None:
    """Over 300 starts of three farms, behind the tokens that were there at the begin."""
    operations.set_limit(farm.conn, "source", "test", per_minute=per_minute)
    for _ in range(3):
        farm.ready(workers=1)
    put(farm, 340, "returns")
    until(lambda: farm.rows(ENDED) == [(340,)], "all jobs to succeed")
    starts, number = [at for (at,) in farm.rows(STARTS, 40)], per_minute // 60
    # A second's starts may come at once, behind a stall that has filled the bucket; a start is noted a little late.
    early = [j - i - number - (starts[j] - starts[i]) * number for j in range(len(starts)) for i in range(j)]
    assert max(early) < number
