"""Workers that die: their jobs are settled by the keeper at once, and nobody else's are touched."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections import Counter
from contextlib import suppress
from uuid import UUID, uuid4

import psutil
import psycopg
import pytest
from farming import Farm, Program, until
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


def killed(*programs: Program) -> None:
    """End all processes of these programs, so that none can do anything about the end of another."""
    members = [psutil.Process(program.process.pid) for program in programs]
    members += [child for member in members for child in member.children(recursive=True)]
    for act in (psutil.Process.suspend, psutil.Process.kill):
        for member in members:
            with suppress(psutil.NoSuchProcess):
                act(member)
    for program in programs:
        program.process.wait(60)


def test_a_farm_that_starts_recovers_at_once_what_the_killed_farm_of_its_host_had_claimed(farm: Farm) -> None:
    """A run that had begun has spent an attempt; jobs that were claimed ahead have not. The leases are of a minute."""
    wish = json.dumps([{"queue": "q", "concurrency": 2, "prefetch": 10}])
    settings = {"workers_json": wish, "dl_pipelines": "farm_pipelines outage_pipelines"}
    program = farm.ready(workers=2, **settings)
    go = farm.folder / "go"
    begun = farm.enqueue("waits_for_a_file", args={"go": str(go)})
    until(lambda: farm.journal(begun)[-1][0] == "heartbeat", "a renewal")
    (keeper,) = program.children("dataloader: keeper")
    keeper.suspend()  # it would hand back what waits behind a run that holds the GIL
    with farm.conn.transaction():
        for _ in range(7):
            farm.enqueue("noop", priority=0)  # short jobs: the worker's next claim takes several
        holding = farm.enqueue("holds_the_gil_in_its_first_run", priority=1)
        ahead = [farm.enqueue("noop", priority=2) for _ in range(5)]
    claimed = "SELECT FROM dl_jobs WHERE job_id = ANY(%s) AND status = 'running'"
    until(lambda: len(farm.rows(claimed, [holding, *ahead])) > 2, "some to be claimed ahead")
    killed(program)
    was_ahead = [job for job in ahead if farm.job(job)["status"] == "running"]
    assert len(was_ahead) >= 2
    started = time.monotonic()
    again = farm.start(**settings)
    for job in (holding, *ahead):
        farm.wait(job, "succeeded", patience=30)
    until(lambda: len(farm.rows("SELECT FROM dl_job_events WHERE job_id = %s AND kind = 'picked'", begun)) == 2)
    assert time.monotonic() - started < 30, "far less than the leases"
    assert {farm.job(job)["attempt"] for job in ahead} == {1}
    go.touch()
    assert farm.wait(begun, "succeeded")["attempt"] == 2
    for job in (begun, holding, *ahead):
        assert illegal([kind for kind, _ in farm.journal(job)], "succeeded") is None
    settled = {event["job_id"] for event in again.events("keeper.settled")}
    assert settled >= set(map(str, (begun, holding, *was_ahead)))


IN_A_CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc"]
AFTER_A_BOOT = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount --bind "$BOOT_ID" /proc/sys/kernel/random/boot_id; exec "$@"',
    "-",
]


@pytest.mark.parametrize("elsewhere", [IN_A_CONTAINER, AFTER_A_BOOT], ids=["a container", "another boot"])
def test_a_farm_that_starts_leaves_alone_what_others_of_its_host_name_hold(farm: Farm, elsewhere: list[str]) -> None:
    """The workers of a living farm of this host, and those of another pid namespace or boot, living or not."""
    boot_id = farm.folder / "boot_id"
    boot_id.write_text("00000000-0000-4000-8000-000000000000\n")
    env = os.environ | {"BOOT_ID": str(boot_id)}
    if subprocess.run([*elsewhere, "true"], env=env, capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here: they need root")
    go = farm.folder / "go"

    def held_by(queue: str, before: list[str]) -> tuple[Program, UUID, str]:
        """A farm that runs a job, and the name of the worker."""
        farm.before = before
        program = farm.ready(workers=1, queue=queue, boot_id=boot_id)
        job = farm.enqueue("waits_for_a_file", queue, args={"go": str(go)}, lease_ttl_sec=600)
        until(lambda: farm.journal(job)[-1][0] == "heartbeat", "a renewal")
        return program, job, farm.rows("SELECT claimed_by FROM dl_jobs WHERE job_id = %s", job)[0][0]

    living, gone, dead = held_by("living", []), held_by("gone", elsewhere), held_by("dead", [])
    assert len({name.split(":")[0] for *_, name in (living, gone, dead)}) == 1, "one host name"
    killed(gone[0], dead[0])
    farm.before = []
    farm.ready(workers=1, queue="dead")
    until(lambda: farm.rows("SELECT FROM dl_jobs WHERE job_id = %s AND attempt = 2", dead[1]), "the dead one's job")
    names = dict(farm.rows("SELECT job_id, claimed_by FROM dl_jobs WHERE status = 'running'"))
    assert (names[living[1]], names[gone[1]]) == (living[2], gone[2])
    go.touch()
    assert farm.wait(living[1], "succeeded")["attempt"] == 1
