"""Where somebody has a job's row locked when its run is over, the end is written later; no other job waits for it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import psycopg
import pytest
from farming import Farm, Program, until


@contextmanager
def ended_behind_a_lock(farm: Farm, prefetch: int = 1, **settings: object) -> Iterator[tuple[Program, UUID]]:
    """A farm of one worker, and a job whose run has ended while a stranger has its row locked, as in the block."""
    wish = json.dumps([{"queue": "q", "concurrency": 1, "prefetch": prefetch}])
    program = farm.ready(workers=1, workers_json=wish, dl_heartbeat_sec=600, **settings)
    go = farm.folder / "go"
    job = farm.enqueue("waits_for_a_file", args={"go": str(go)}, max_attempts=1)
    until(go.with_suffix(".runs").exists, "the run to begin")
    with psycopg.connect(farm.dsn, application_name="stranger") as stranger:
        stranger.execute("SELECT FROM dl_jobs WHERE job_id = %s FOR UPDATE", (job,))
        go.touch()
        until(lambda: program.events("worker.ends.locked"), "the worker to meet the lock")
        yield program, job
        stranger.rollback()


def runs(farm: Farm) -> int:
    return len((farm.folder / "go.runs").read_text().splitlines())


@pytest.mark.parametrize("prefetch", [1, 50])
def test_other_jobs_run_and_its_end_is_written_when_the_lock_goes(farm: Farm, prefetch: int) -> None:
    with ended_behind_a_lock(farm, prefetch) as (program, job):
        for _ in range(20):
            assert farm.wait(farm.enqueue("noop"), "succeeded")["attempt"] == 1
        assert farm.job(job)["status"] == "running"
        assert len(program.events("worker.ends.locked")) == 1
    assert farm.wait(job, "succeeded")["attempt"] == 1
    assert (runs(farm), farm.story(job)) == (1, ["queued", "picked", "done"])


def test_its_end_is_written_beside_a_long_run(farm: Farm) -> None:
    with ended_behind_a_lock(farm) as (_, job):
        long = farm.enqueue("sleeps", args={"sec": 4})
        until(lambda: farm.rows("SELECT FROM runs WHERE job_id = %s", long), "the long run to begin")
    assert farm.wait(job, "succeeded")["attempt"] == 1
    assert farm.job(long)["status"] == "running"
    assert farm.wait(long, "succeeded")["attempt"] == 1


def test_a_drain_writes_it_when_the_lock_goes_in_time(farm: Farm) -> None:
    with ended_behind_a_lock(farm, dl_drain_sec=20) as (program, job):
        program.signal(signal.SIGTERM)
        until(lambda: program.events("supervisor.draining"), "the drain to begin")
    assert program.stop() == 0
    assert farm.job(job)["status"] == "succeeded"
    assert runs(farm) == 1


def test_a_drain_ends_in_time_though_the_lock_stays(farm: Farm) -> None:
    with ended_behind_a_lock(farm, dl_drain_sec=1, dl_kill_grace_sec=1) as (program, job):
        program.stop(patience=15)
        assert "rows are locked" in program.events("worker.end.unwritten")[0]["error"]
        assert farm.job(job)["status"] == "running"


def test_a_lost_session_does_not_hand_back_a_job_that_has_run(farm: Farm) -> None:
    """What the former session may have claimed is handed back by the next one; this job is none of that."""
    with ended_behind_a_lock(farm) as (program, job):
        farm.end_sessions("dl-worker:")
        until(lambda: program.events("farm.database.lost"), "the worker to notice")
    assert farm.wait(job, "succeeded")["attempt"] == 1
    assert runs(farm) == 1
