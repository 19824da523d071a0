"""Real farms: a job has its result whenever it has succeeded, whatever happens to its worker between the two writes."""

from __future__ import annotations

import json

import psycopg
import pytest
from farming import Farm, until

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


@pytest.mark.parametrize("prefetch", [1, 50])
def test_no_job_has_succeeded_without_its_result_also_over_lost_sessions(farm: Farm, prefetch: int) -> None:
    farm.conn.execute(MISSING)
    wish = json.dumps([{"queue": "q", "concurrency": 2, "prefetch": prefetch}])
    program = farm.ready(workers=2, workers_json=wish)
    jobs = [farm.enqueue("returns", args={"value": [number]}) for number in range(JOBS)]
    farm.end_sessions("dl-worker:")
    until(lambda: program.events("farm.database.lost"), "a lost session")
    for job in jobs:
        farm.wait(job, "succeeded")
    assert [farm.result(job) for job in jobs] == [[number] for number in range(JOBS)]
    assert farm.rows("SELECT job_id FROM missing") == []


def test_a_worker_killed_between_the_result_and_the_end_leaves_a_job_that_runs_again(farm: Farm) -> None:
    """A stranger's lock keeps the end from being written, not the result."""
    program = farm.ready(workers=1)
    go = farm.folder / "go"
    job = farm.enqueue("returns_its_claim", args={"go": str(go)})
    until(go.with_suffix(".runs").exists, "the run to begin")
    with psycopg.connect(farm.dsn) as stranger:
        stranger.execute("SELECT FROM dl_jobs WHERE job_id = %s FOR UPDATE", (job,))
        go.touch()
        until(lambda: program.events("worker.ends.locked"), "the worker to meet the lock")
        assert farm.rows("SELECT claim, result FROM dl_results") == [(1, 1)]
        assert (farm.job(job)["status"], farm.result(job)) == ("running", None)
        (worker,) = program.workers()
        worker.kill()
        worker.wait()
        stranger.rollback()
    assert farm.wait(job, "succeeded")["attempt"] == 2
    assert (farm.result(job), farm.rows("SELECT claim, result FROM dl_results")) == (2, [(2, 2)])


def test_a_result_that_is_too_large_fails_the_job_and_says_where_it_should_go(farm: Farm) -> None:
    farm.ready(workers=1, dl_result_kb=1)
    small, large = farm.enqueue("returns", args={"value": "x" * 1_022}), farm.enqueue("returns", args={"kb": 1})
    end = farm.wait(large, "failed")
    assert (end["attempt"], end["error"]) == (
        1,
        "the pipeline returned 1,026 bytes of JSON, and DL_RESULT_KB=1 allows 1,024: write large results to the target"
        " or to a file, and return their place",
    )
    farm.wait(small, "succeeded")
    assert (farm.result(small), farm.result(large)) == ("x" * 1_022, None)


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
    wish = json.dumps([{"queue": "q", "concurrency": 2, "prefetch": 50}])
    program = farm.ready(workers=2, workers_json=wish)
    for _ in range(60):  # a worker claims more at a time once its runs are short
        farm.enqueue("returns")
    jobs = [farm.enqueue("returns", lock_key=f"bad-{n}" if n % 20 == 7 else "", max_attempts=1) for n in range(80)]
    assert [farm.wait(job, "succeeded", "failed", "lost")["status"] for job in jobs] == [
        "failed" if n % 20 == 7 else "succeeded" for n in range(80)
    ]
    assert farm.job(jobs[7])["error"] == "the database refused the end of this run (succeed): no room for it"
    assert program.events("supervisor.worker.exited") == []
