"""A farm beside rows that nobody should have written: its workers live, and the other jobs run."""

from __future__ import annotations

import os
import random

import psycopg
from farming import Farm, until
from hostile import QUEUE, Rows

LEFT = "SELECT count(*) FROM dl_jobs WHERE lock_key LIKE 'healthy %%' AND status <> 'succeeded'"
ASIDE = """
SELECT count(*) FROM dl_jobs WHERE lock_key LIKE 'bad %%' AND status = 'failed' AND error LIKE 'no worker can%%'
"""
HEALTHY = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key)
SELECT gen_random_uuid(), %s, 'returns', 'healthy ' || n FROM generate_series(1, 20) n
"""


def test_a_row_that_no_claim_can_take_is_set_aside_and_no_worker_dies(farm: Farm) -> None:
    """Such a row ended each worker of its queue at its first claim, for ever."""
    farm.conn.execute("ALTER TABLE dl_jobs DROP CONSTRAINT dl_jobs_chk_counters")
    farm.conn.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, claims, max_attempts)"
        " SELECT gen_random_uuid(), 'q', 'returns', 'bad ' || n, 2147483647, 1 FROM generate_series(1, 3) n"
    )
    farm.conn.execute(HEALTHY, ("q",))
    program = farm.ready(workers=2)
    pids = {worker.pid for worker in program.workers()}
    until(lambda: farm.rows(LEFT) == [(0,)], "the healthy jobs to run")
    until(lambda: farm.rows(ASIDE) == [(3,)], "the others to be set aside")
    assert {event["queue"] for event in program.events("worker.job.set_aside")} == {"q"}
    assert not program.events("process.crashed")
    assert {worker.pid for worker in program.workers()} == pids


def test_hostile_rows_end_no_worker_and_no_reaper(farm: Farm) -> None:
    seed = int(os.environ.get("DL_HOSTILE_SEED", random.randrange(10**9)))
    print("seed", seed)
    reaper = farm.start("reaper", DL_REAPER_PERIOD_SEC=1)
    program = farm.ready(workers=2, queue=QUEUE)
    with psycopg.connect(farm.dsn, autocommit=True) as conn:
        rows = Rows(conn, random.Random(seed))
        for _ in range(4):
            rows.add(150, ["dl_jobs"])
            conn.execute("DELETE FROM dl_queues")
            farm.conn.execute(HEALTHY, (QUEUE,))
            until(lambda: farm.rows(LEFT) == [(0,)], f"the healthy jobs to run, seed {seed}")
    crashed = [event for part in (program, reaper) for event in part.events("process.crashed")]
    assert not crashed, seed
    assert reaper.process.poll() is None


REFUSES = """
CREATE FUNCTION refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'this job stays'; END $$;
CREATE TRIGGER refuses BEFORE UPDATE ON dl_jobs FOR EACH ROW
  WHEN (OLD.status = 'running' AND NEW.status = 'queued' AND NEW.lock_key = 'stays') EXECUTE FUNCTION refuses()
"""


def test_a_row_that_takes_no_end_costs_no_keeper(farm: Farm) -> None:
    """The keeper settles what a killed worker held. Such a row ended the keeper, again and again."""
    farm.conn.execute(REFUSES)
    program = farm.ready(workers=1)
    job = farm.enqueue("recorded", lock_key="stays", args={"sec": 600})
    farm.begun(job)
    (keeper,) = program.children("keeper")
    program.workers()[0].kill()
    until(lambda: program.events("keeper.settle.failed"), "the refusal")
    assert farm.wait(farm.enqueue("noop"), "succeeded")["attempt"] == 1
    assert [each.pid for each in program.children("keeper")] == [keeper.pid]
    assert not program.events("process.crashed")
