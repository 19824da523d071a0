"""Jobs claimed ahead: each runs once and in order, none waits behind a long one, and a death costs only what ran."""

import signal
from typing import Any
from uuid import UUID

import pytest
from farming import Farm, Program, until
from judge import illegal

from dataloader.queue import enqueue

PREFETCH = 20
LEARNING = 1 + 2 + 4  # jobs after which a worker that was idle claims up to eight at once


def ready(farm: Farm, workers: int = 1, **settings: Any) -> Program:
    """A farm that claims ahead, and whose workers have run jobs."""
    settings = {"dl_pipelines": "farm_pipelines,doubling"} | settings
    program = farm.ready(workers=workers, prefetch=PREFETCH, **settings)
    for _ in range(3 * workers):
        farm.wait(farm.enqueue("noop"), "succeeded")
    return program


def learning(farm: Farm) -> None:
    """Add short jobs that come before the others of this transaction: a worker claims the first jobs one by one."""
    for _ in range(LEARNING):
        farm.enqueue("noop", priority=0)


def together(farm: Farm, *tasks: str, **args: Any) -> list[UUID]:
    """Add jobs that become claimable at one instant, in this order; each may run once."""
    with farm.conn.transaction():
        learning(farm)
        return [farm.enqueue(task, priority=number, max_attempts=1, args=args) for number, task in enumerate(tasks, 1)]


def claimed_together(farm: Farm, jobs: list[UUID]) -> list[set[UUID]]:
    """Those of these jobs that one claim took, for each claim of any."""
    one_claim = "SELECT array_agg(job_id) FROM dl_job_events WHERE kind = 'picked' AND job_id = ANY (%s) GROUP BY ts"
    return [set(found) for (found,) in farm.rows(f"{one_claim} ORDER BY ts", jobs)]


def test_each_runs_once_and_in_the_order_of_its_key(farm: Farm) -> None:
    ready(farm, workers=2)
    with farm.conn.transaction():
        jobs = [farm.enqueue("recorded", lock_key=f"k{number % 7}", args={"sec": 0}) for number in range(210)]
    farm.succeeds(*jobs)
    started = farm.rows("SELECT lock_key, job_id FROM runs ORDER BY started")
    for key in {key for key, _ in started}:
        assert [job for lock_key, job in started if lock_key == key] == [
            job for number, job in enumerate(jobs) if f"k{number % 7}" == key
        ]


def test_none_waits_behind_a_long_one_and_no_result_for_it(farm: Farm) -> None:
    """While the second runs, the first is written, the others are handed back, uncounted, and a neighbour runs them.

    Its row shows that it was begun, before its first heartbeat is due.
    """
    ready(farm, dl_heartbeat_sec=600)
    go = farm.folder / "go"
    first, long, *others = together(farm, "noop", "waits_for_a_file", "noop", "noop", go=str(go))
    farm.succeeds(first)
    assert farm.job(first)["heartbeat_at"] is not None
    until(lambda: farm.job(long)["heartbeat_at"], "a beat")
    until(lambda: all("requeue" in farm.story(job) for job in others), "the others to go back")
    assert {farm.job(job)["attempt"] for job in others} == {0}
    farm.ready(workers=1)
    farm.succeeds(*others)
    assert farm.job(long)["status"] == "running"
    go.touch()
    farm.succeeds(long)


def test_e1_a_job_that_kills_its_worker_costs_the_others_nothing_and_after_a_pause_one_is_claimed(farm: Farm) -> None:
    ready(farm)
    jobs = together(farm, "noop", "kills_itself", "noop", "noop")
    assert farm.wait(jobs[1], "lost")["error"].startswith("worker killed by signal 9 on attempt")
    farm.succeeds(jobs[0], *jobs[2:])
    jobs = together(farm, *["noop"] * 20)
    farm.succeeds(*jobs)
    assert max(map(len, claimed_together(farm, jobs))) > 1
    with farm.conn.transaction():
        after = [farm.enqueue("noop", priority=number) for number in range(3)]
    farm.succeeds(*after)
    assert claimed_together(farm, after)[0] == {after[0]}


def test_i8_a_drain_hands_back_what_was_not_begun(farm: Farm) -> None:
    program = ready(farm)
    go = farm.folder / "go"
    running, *others = together(farm, "waits_for_a_file", "noop", "noop", go=str(go))
    farm.begun(running)
    program.signal(signal.SIGTERM)
    program.logged("supervisor.draining")
    go.touch()
    assert program.stop() == 0
    assert farm.job(running)["status"] == "succeeded"
    assert {(farm.job(job)["status"], farm.job(job)["attempt"]) for job in others} == {("queued", 0)}
    farm.no_sessions()  # nor their locks


def test_i1_a_job_whose_lease_ran_out_behind_a_c_call_is_not_begun(farm: Farm) -> None:
    """Its farm cannot hand it back: the call holds the GIL, the keeper is stopped. The reaper does; it runs once."""
    program = ready(farm)
    farm.start("reaper")
    (keeper,) = program.children("dataloader: keeper")
    keeper.suspend()
    with farm.conn.transaction():
        learning(farm)
        call = farm.enqueue("holds_the_gil", priority=1, args={"sec": 5}, lease_ttl_sec=60)
        waiting = farm.enqueue("recorded", priority=2, args={"sec": 0}, lease_ttl_sec=2)
    farm.wait(waiting, "succeeded")
    farm.succeeds(call)
    keeper.resume()
    assert farm.rows("SELECT count(*) FROM runs WHERE job_id = %s", waiting) == [(1,)]
    assert illegal([kind for kind, _ in farm.journal(waiting)], "succeeded") is None


def test_a_neighbour_takes_what_waits_behind_a_call_that_holds_the_gil(farm: Farm) -> None:
    """The keeper hands it back, for the heartbeat cannot; and not the job before, whose end is still to be written."""
    program = ready(farm)
    (worker,) = program.workers()
    (neighbour,) = farm.ready(workers=1).workers()
    neighbour.suspend()
    with farm.conn.transaction():
        learning(farm)
        tasks = [("noop", 0), ("holds_the_gil", 8), ("recorded", 0), ("recorded", 0), ("recorded", 0)]
        before, call, *others = (
            farm.enqueue(task, priority=number, max_attempts=1, args={"sec": sec, "at_once": True})
            for number, (task, sec) in enumerate(tasks, 1)
        )
    until(lambda: "picked" in farm.story(call), "the claim")
    assert claimed_together(farm, [before, call, *others]) == [{before, call, *others}]
    program.logged("keeper.taken_back")
    neighbour.resume()
    farm.succeeds(*others)
    assert {farm.job(job)["status"] for job in (before, call)} == {"running"}
    farm.succeeds(before, call)
    assert [farm.story(job).count("picked") for job in (before, call)] == [1, 1]
    runs = farm.rows("SELECT job_id, pid FROM runs")
    assert sorted(runs) == sorted([(call, worker.pid), *((job, neighbour.pid) for job in others)])
    assert program.workers() == [worker]


@pytest.mark.parametrize(("prefetch", "together_at_most"), [(None, 100), (1, 1), (7, 7)])
def test_a_worker_claims_short_jobs_together_by_itself(farm: Farm, prefetch: int | None, together_at_most: int) -> None:
    program = farm.ready(workers=1, prefetch=prefetch)
    new = [enqueue.NewJob("q", "noop", f"key-{number}") for number in range(300)]
    enqueue.enqueue_many(farm.conn, new)
    until(lambda: farm.rows("SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'") == [(300,)], "the jobs to end")
    claims = farm.rows("SELECT count(*) FROM dl_job_events WHERE kind = 'picked' GROUP BY ts")
    assert 1 <= max(count for (count,) in claims) <= together_at_most
    assert (max(count for (count,) in claims) > 1) == (together_at_most > 1)
    assert program.stop() == 0
    finished = program.events("worker.job.finished")
    assert len({line["job_id"] for line in finished if line["status"] == "succeeded"}) == 300
    assert all(line["duration_ms"] >= 0 and line["peak_mb"] > 0 and line["cpu_sec"] >= 0 for line in finished)
