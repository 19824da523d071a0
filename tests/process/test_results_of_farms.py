"""Real farms: results, checkpoints, args by a model, odd rows, locked ends, jobs that wait for others."""

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from farming import Farm, LongJob, Program, until
from hostile import QUEUE, Rows
from psycopg.types.json import Jsonb

from dataloader.queue import args_schema, operations

JOBS = 200
# Each result that was not there when its job's end was written. The trigger of the test looks at that instant.
MISSING = """
CREATE TABLE missing (job_id uuid);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO missing SELECT NEW.job_id
    WHERE NOT EXISTS (SELECT FROM dl_results WHERE job_id = NEW.job_id AND claim = NEW.claims);
  RETURN NULL;
END $$;
CREATE TRIGGER note AFTER UPDATE ON dl_jobs FOR EACH ROW WHEN (NEW.status = 'succeeded') EXECUTE FUNCTION note();
"""


def test_no_job_has_succeeded_without_its_result_also_over_lost_sessions(farm: Farm) -> None:
    farm.conn.execute(MISSING)
    program = farm.ready(workers=2, prefetch=50)
    jobs = [farm.enqueue("returns", args={"value": [number]}) for number in range(JOBS)]
    farm.end_sessions("dl-worker:")
    program.logged("farm.database.lost")
    for job in jobs:
        farm.wait(job, "succeeded")
    assert [farm.result(job) for job in jobs] == [[number] for number in range(JOBS)]
    assert farm.rows("SELECT job_id FROM missing") == []


def test_an_end_that_the_database_refuses_costs_no_other_job_and_no_worker(farm: Farm) -> None:
    farm.conn.execute(
        """
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
          RAISE EXCEPTION 'no room for it' USING ERRCODE = 'numeric_value_out_of_range';
        END $$;
        CREATE TRIGGER refuse BEFORE UPDATE ON dl_jobs FOR EACH ROW
          WHEN (NEW.status = 'succeeded' AND NEW.lock_key LIKE 'bad%') EXECUTE FUNCTION refuse();
        """
    )
    program = farm.ready(workers=2, prefetch=50)
    for _ in range(60):  # a worker claims more at a time once its runs are short
        farm.enqueue("returns")
    jobs = [farm.enqueue("returns", lock_key=f"bad-{n}" if n % 20 == 7 else "", max_attempts=1) for n in range(80)]
    assert [farm.wait(job, "succeeded", "failed", "lost")["status"] for job in jobs] == [
        "failed" if n % 20 == 7 else "succeeded" for n in range(80)
    ]
    assert farm.job(jobs[7])["error"] == "the database refused the end of this run (succeed): no room for it"
    assert program.events("supervisor.worker.exited") == []


def test_the_model_of_a_pipelines_args_is_published_and_wrong_args_fail_for_good(farm: Farm) -> None:
    farm.ready(workers=1, dl_pipelines="args_pipelines")
    args = {"limit": 0, "password": "hunter2hunter2"}
    text = operations.args_schemas(farm.conn, ["typed"])["typed"]
    assert text is not None
    assert sorted(map(str, args_schema.Allowance().faults(text, args))) == [
        "day is required",
        "limit should be 1 or more",
    ]
    (wrong,) = farm.insert(task="'typed'", args=f"'{json.dumps(args)}'")
    failed = farm.wait(wrong, "failed")
    assert failed["attempt"] == 1
    assert "limit: Input should be greater than or equal to 1" in failed["error"]
    assert "hunter2" not in failed["error"]


LEFT = "SELECT count(*) FROM dl_jobs WHERE lock_key LIKE 'healthy %%' AND status <> 'succeeded'"
ASIDE = """
SELECT count(*) FROM dl_jobs WHERE lock_key LIKE 'bad %%' AND status = 'failed' AND error LIKE 'no worker can%%'
"""
HEALTHY = {"task": "'returns'", "lock_key": "'healthy ' || n"}


REFUSES = """
CREATE FUNCTION refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'this job stays'; END $$;
CREATE TRIGGER refuses BEFORE UPDATE ON dl_jobs FOR EACH ROW
  WHEN (OLD.status = 'running' AND NEW.status = 'queued' AND NEW.lock_key = 'stays') EXECUTE FUNCTION refuses()
"""


def test_a_row_that_no_claim_can_take_costs_no_worker_and_one_that_takes_no_end_no_keeper(farm: Farm) -> None:
    """The first is set aside: it ended each worker of its queue at its first claim. The other one ended the keeper."""
    farm.conn.execute("DROP TRIGGER dl_jobs_check ON dl_jobs")
    farm.conn.execute(REFUSES)
    farm.insert(3, task="'returns'", lock_key="'bad ' || n", claims="2147483647", max_attempts="1")
    farm.insert(20, **HEALTHY)
    program = farm.ready(workers=2)
    pids = {worker.pid for worker in program.workers()}
    until(lambda: farm.rows(LEFT) == [(0,)], "the healthy jobs to run")
    until(lambda: farm.rows(ASIDE) == [(3,)], "the others to be set aside")
    assert {event["queue"] for event in program.logged("worker.job.set_aside")} == {"q"}
    assert {worker.pid for worker in program.workers()} == pids
    job = farm.enqueue("recorded", lock_key="stays", args={"sec": 600})
    farm.begun(job)
    (keeper,) = program.children("keeper")
    farm.worker(job).kill()
    program.logged("keeper.settle.failed")
    farm.works()
    assert [each.pid for each in program.children("keeper")] == [keeper.pid]
    assert not program.events("process.crashed")


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
            farm.insert(20, queue=f"'{QUEUE}'", **HEALTHY)
            until(lambda: farm.rows(LEFT) == [(0,)], f"the healthy jobs to run, seed {seed}")
    crashed = [event for part in (program, reaper) for event in part.events("process.crashed")]
    assert not crashed, seed
    assert reaper.process.poll() is None


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes").touch()
    return tmp_path / "notes"


def test_a_run_triggers_and_gathers_other_jobs(farm: Farm, notes: Path) -> None:
    """The run that waits does not keep its worker, which else could never run the parts."""
    farm.ready(workers=1, notes=notes)
    job = farm.enqueue("whole", args={"parts": [1, 2, 3]})
    farm.wait(job, "succeeded")
    assert farm.result(job) == {"sum": 12, "attempt": 1}
    assert sorted(notes.read_text().splitlines()) == ["part 1", "part 2", "part 3", "whole 1", "whole 1"]
    assert farm.story(job) == ["queued", "picked", "requeue", "picked", "done"]
    fails = farm.wait(farm.enqueue("whole", args={"parts": [1, -1]}), "failed")
    assert "1 of 2 gathered jobs did not succeed" in fails["error"]
    parts = [farm.enqueue("part", args={"n": n}) for n in (5, 6)]
    child = farm.enqueue("sums", depends_on=[parts[1], parts[0]])
    farm.wait(child, "succeeded")
    assert farm.result(child) == {"of": [12, 10], "states": ["succeeded"] * 2}, "of the parents in their order"
    wrong = farm.wait(farm.enqueue("triggers badly"), "failed")
    assert "nonsense" in wrong["error"], "what a run triggers is checked as from everybody"


def test_a_worker_that_is_killed_while_its_job_gathers_adds_nothing_twice(farm: Farm, notes: Path) -> None:
    program = farm.ready(workers=2, notes=notes)
    jobs = [farm.enqueue("whole", args={"parts": list(range(10))}) for _ in range(5)]
    unfinished = "SELECT FROM dl_jobs WHERE status <> 'succeeded'"
    for _ in range(3):
        begun = len(notes.read_text().splitlines())
        until(
            lambda begun=begun: len(notes.read_text().splitlines()) > begun + 2 or not farm.rows(unfinished),
            "some runs",
        )
        os.kill(program.workers()[0].pid, signal.SIGKILL)
    for job in jobs:
        farm.wait(job, "succeeded")
        assert farm.result(job)["sum"] == 90
    assert farm.rows("SELECT count(*) FROM dl_jobs WHERE task = 'part'")[0][0] == 50
    assert farm.rows("SELECT count(*) FROM dl_waiting")[0][0] == 0


@contextmanager
def ended_behind_a_lock(farm: Farm, **settings: object) -> Iterator[tuple[Program, UUID]]:
    """A farm of one worker, and a job whose run has ended while a stranger has its row locked, as in the block."""
    program = farm.ready(workers=1, prefetch=1, dl_heartbeat_sec=600, **settings)
    long = LongJob(farm, max_attempts=1)
    job = long.job_id
    with psycopg.connect(farm.dsn, application_name="stranger") as stranger:
        stranger.execute("SELECT FROM dl_jobs WHERE job_id = %s FOR UPDATE", (job,))
        long.go.touch()
        program.logged("worker.ends.locked")
        yield program, job
        stranger.rollback()


def runs(farm: Farm) -> int:
    return len((farm.folder / "go.runs").read_text().splitlines())


def test_other_jobs_run_and_its_end_is_written_when_the_lock_goes(farm: Farm) -> None:
    """Also while a long run has begun in another session."""
    with ended_behind_a_lock(farm) as (program, job):
        for _ in range(20):
            farm.works()
        assert farm.job(job)["status"] == "running"
        assert len(program.events("worker.ends.locked")) == 1
        farm.end_sessions("dl-worker:")
        program.logged("farm.database.lost")
        long = LongJob(farm, "long")
    farm.succeeds(job)
    assert (runs(farm), farm.story(job)) == (1, ["queued", "picked", "done"])
    assert farm.job(long.job_id)["status"] == "running"
    long.ends_well()


@pytest.mark.parametrize("how", ["a drain", "a lost session"])
def test_neither_a_drain_nor_a_lost_session_forgets_it_or_runs_it_again(farm: Farm, how: str) -> None:
    """The next session hands back what the former one may have claimed, and finds the row of this job free again."""
    with ended_behind_a_lock(farm, dl_drain_sec=20) as (program, job):
        if how == "a drain":
            program.signal(signal.SIGTERM)
            program.logged("supervisor.draining")
        else:
            farm.end_sessions("dl-worker:")
            program.logged("farm.database.lost")
    farm.succeeds(job)
    assert runs(farm) == 1
    assert program.stop() == 0


def test_a_drain_ends_in_time_though_the_lock_stays(farm: Farm) -> None:
    with ended_behind_a_lock(farm, dl_drain_sec=1, dl_kill_grace_sec=1) as (program, job):
        program.stop(patience=15)
        assert "rows are locked" in program.events("worker.end.unwritten")[0]["error"]
        assert farm.job(job)["status"] == "running"


def test_a_drained_run_goes_on_elsewhere(farm: Farm) -> None:
    farm.conn.execute("CREATE TABLE written (number int); CREATE TABLE begun (done int)")
    first = farm.ready(workers=1, dl_drain_sec=0)
    job = farm.enqueue("goes_on", args={"to": 1_000_000})
    until(lambda: farm.rows("SELECT count(*) FROM written")[0][0] > 50, "rows")
    assert first.stop() == 0
    status = farm.job(job)
    assert (status["status"], status["attempt"]) == ("queued", 0)
    ((kept,),) = farm.rows("SELECT checkpoint ->> 'done' FROM dl_checkpoints")
    assert farm.rows("SELECT max(number)::text FROM written") == [(kept,)]  # the last words before the release
    to = int(kept) + 200
    farm.conn.execute("UPDATE dl_jobs SET args = %s", (Jsonb({"to": to}),))
    farm.ready(workers=1)
    assert farm.wait(job, "succeeded")["attempt"] == 1
    rows = farm.rows("SELECT number, count(*) FROM written GROUP BY 1 ORDER BY 1")
    assert rows == [(number, 2) for number in range(1, to + 1)]
    assert farm.rows("SELECT done::text FROM begun") == [(None,), (kept,)]
    until(lambda: farm.rows("SELECT checkpoint, target_claim FROM dl_checkpoints") == [(None, 3)], "it to be spent")


def test_it_is_written_while_the_run_goes_on_and_shows_nowhere(farm: Farm, tmp_path: Path) -> None:
    program = farm.ready(workers=1)
    go, secret = tmp_path / "go", "hunter2-of-the-checkpoint"
    job = farm.enqueue("waits_behind_a_checkpoint", args={"go": str(go), "secret": secret})
    until(lambda: farm.rows("SELECT checkpoint FROM dl_checkpoints") == [({"password": secret},)], "the first write")
    program.workers()[0].kill()
    until(lambda: farm.job(job)["attempt"] == 2, "the next run")
    go.touch()
    farm.wait(job, "succeeded")
    assert farm.result(job) == ["password"]
    shown = farm.rows("SELECT row_to_json(j)::text FROM (SELECT * FROM dl_jobs) j") + farm.journal(job)
    assert secret not in str(shown).replace(farm.rows("SELECT args::text FROM dl_jobs")[0][0], "")
    assert secret not in program.log.read_text()
