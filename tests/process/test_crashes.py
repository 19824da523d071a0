"""Workers that die: their jobs are settled by the keeper at once, and nobody else's are touched."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from uuid import uuid4

import psutil
import psycopg
import pytest
from farming import Farm, until
from judge import OVERLAPS, illegal


@pytest.mark.longest
@pytest.mark.parametrize("jobs", [600, pytest.param(2_000, marks=pytest.mark.slow)])
def test_many_jobs_over_shared_keys_survive_a_kill_every_200_ms(farm: Farm, jobs: int) -> None:
    """50 keys of which one has a third of the jobs, two queues, 4 workers; 3 or 10 s of kills."""
    for number in range(jobs):
        key = "hot" if number % 3 == 0 else f"key-{number % 49}"
        farm.enqueue("recorded", "ab"[number % 2], key, args={"sec": 0.01}, max_attempts=50)
    wish = '[{"queue": "a", "concurrency": 2}, {"queue": "b", "concurrency": 2}]'
    program = farm.start(workers_json=wish, dl_drain_sec=5)
    until(lambda: len(program.events("worker.started")) >= 4)
    kills = 0
    for _ in range(jobs // 40):
        time.sleep(0.2)  # the rhythm of the nemesis, not a wait for anything
        if workers := program.workers():
            random.choice(workers).kill()
            kills += 1
    assert kills >= jobs // 50

    left = "SELECT job_id, status::text, attempt FROM dl_jobs WHERE status IN ('queued', 'running')"
    try:
        until(lambda: not farm.rows(left), "the end of all jobs", patience=90)
    except AssertionError as e:
        stories = [(row, farm.journal(row[0])) for row in farm.rows(left)]
        raise AssertionError(f"{e}: {stories}") from None
    ends = Counter(status for (status,) in farm.rows("SELECT status::text FROM dl_jobs"))
    assert ends == {"succeeded": jobs}
    assert farm.rows(OVERLAPS) == []
    for job_id, status, kinds in farm.rows(
        "SELECT j.job_id, j.status::text, array_agg(e.kind ORDER BY e.event_id) FROM dl_jobs j"
        " JOIN dl_job_events e USING (job_id) GROUP BY 1, 2"
    ):
        assert illegal(kinds, status) is None, (job_id, kinds)
    assert program.stop() == 0


def test_e1_a_job_that_kills_its_worker_ends_lost(farm: Farm) -> None:
    """A crash is a spent attempt, with its reason; the neighbour's job is not touched."""
    program = farm.ready(workers=2)
    neighbour = farm.enqueue("recorded", args={"sec": 2})
    farm.wait(neighbour, "running", "succeeded")
    poison = farm.enqueue("kills_itself", max_attempts=1)
    end = farm.wait(poison, "lost")
    assert end["error"] == "worker killed by signal 9 on attempt 1"
    assert farm.story(poison) == ["queued", "picked", "lost"]
    assert farm.wait(neighbour, "succeeded")["attempt"] == 1
    assert program.stop() == 0


def test_a_claim_that_outlives_its_killed_worker_is_settled_too(farm: Farm) -> None:
    """The worker is killed while its claim is under way: the backend goes on, commits, and nobody would run the job."""
    program = farm.ready(workers=1)
    with psycopg.connect(farm.dsn) as blocker:
        # A lock in the claim's way, taken before the row exists.
        blocker.execute("LOCK TABLE dl_job_events IN ACCESS EXCLUSIVE MODE")
        with psycopg.connect(farm.dsn, autocommit=True) as producer:
            job = uuid4()
            producer.execute(
                # As a producer that keeps the journal itself: the trigger that does it for others would block here.
                "INSERT INTO dl_jobs (job_id, queue, task, lock_key, journaled) VALUES (%s, 'q', 'recorded', 'k', 1)",
                (job,),
            )
            claiming = (
                "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'dl-worker%' AND wait_event_type = 'Lock'"
                " AND datname = current_database()"
            )
            ((pid,),) = until(lambda: producer.execute(claiming).fetchall(), "the claim to be under way")
            program.workers()[0].kill()
            until(lambda: program.events("supervisor.worker.exited"))
            until(lambda: (pid,) not in producer.execute(claiming).fetchall(), "the keeper to end the claim")
    assert farm.wait(job, "succeeded", patience=45)["attempt"] == 1


def test_a_killed_workers_job_runs_again_within_a_second(farm: Farm) -> None:
    program = farm.ready(workers=1)
    go = farm.folder / "go"
    job = farm.enqueue("waits_for_a_file", args={"go": str(go)})
    until(go.with_suffix(".runs").exists, "the run to begin")
    killed = time.monotonic()
    program.workers()[0].kill()
    until(lambda: farm.job(job)["attempt"] == 2)
    assert time.monotonic() - killed < 30  # below the lease of 60 s; the bench measures the real figure
    go.touch()
    assert farm.wait(job, "succeeded")["attempt"] == 2
    assert farm.story(job) == ["queued", "picked", "requeue", "picked", "done"]


def test_an_exit_in_a_pipeline_is_the_jobs_error_and_the_worker_is_replaced(farm: Farm) -> None:
    program = farm.ready(workers=1)
    before = program.workers()[0].pid
    job = farm.enqueue("exits", max_attempts=1)
    assert "SystemExit: 3" in farm.wait(job, "failed")["error"]
    until(lambda: [w.pid for w in program.workers()] not in ([before], []), "a new worker")
    assert farm.wait(farm.enqueue("noop"), "succeeded")


def test_i5_children_of_a_killed_job_do_not_survive_it(farm: Farm) -> None:
    program = farm.ready(workers=1)
    job = farm.enqueue("leaves_a_child", max_attempts=1)
    child = until(lambda: farm.job(job)["progress"].get("child"))
    program.workers()[0].send_signal(signal.SIGKILL)
    farm.wait(job, "lost")
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
