"""Every run ends when it has to, also one that gets nowhere: told, interrupted, or killed with all it has started."""

import itertools
import os
import re
import signal
from typing import Any
from uuid import UUID

import psutil
import pytest
from farming import Farm, until

from dataloader.queue import lifecycle

GIL = {"sec": 60}
MARKS = itertools.count(os.getpid() * 1_000)  # for a child that can be told from those of other tests


def sleeping(mark: int) -> list[psutil.Process]:
    """The children that a pipeline has marked."""
    return [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[-1] == str(600 + mark)]


@pytest.mark.parametrize("task", ["spins", "sleeps", "tidies_up", "queries"])
def test_e4_a_plain_function_that_takes_too_long_is_interrupted(farm: Farm, task: str) -> None:
    """Pure Python, a system call, a statement: the worker survives it, and nothing goes on in the database."""
    program = farm.ready(workers=1, dl_kill_grace_sec=60)
    workers = [worker.pid for worker in program.workers()]
    job = farm.enqueue(task, args={"sec": 600}, timeout_sec=1, max_attempts=1)
    end = farm.wait(job, "failed")
    assert end["error"] == "timeout: the run took more than 1 s"
    kind, payload = farm.journal(job)[-1]
    assert kind == "failed"
    assert payload["cpu_sec"] >= 0
    assert payload["peak_mb"] > 1
    farm.works()
    assert [worker.pid for worker in program.workers()] == workers
    farm.no_sessions("dl-job:")
    if task == "tidies_up":
        assert farm.rows("SELECT FROM runs WHERE job_id = %s", job)


def test_e4_a_pipelines_own_timeout_is_told_at_the_next_yield(farm: Farm) -> None:
    """The job's own, where it names one, counts more. A timeout is tried again as any error is."""
    farm.ready(workers=1)
    late = farm.enqueue("within_a_second", args={"sec": 600})
    patient = farm.enqueue("within_a_second", args={"sec": 1.5}, timeout_sec=60)
    farm.succeeds(patient)
    end = farm.job(late)
    assert (end["status"], end["attempt"]) == ("queued", 1)
    assert end["error"] == "timeout: the run took more than 1 s"
    assert farm.journal(late)[-1][1]["delay_sec"] == 30


@pytest.mark.parametrize(("task", "args"), [("deaf", {}), ("holds_the_gil", GIL)])
def test_e4_what_does_not_stop_is_killed(farm: Farm, task: str, args: dict[str, Any]) -> None:
    farm.ready(workers=1)
    job = farm.enqueue(task, args=args, timeout_sec=1, max_attempts=1)
    end = farm.wait(job, "failed")
    assert end["error"] == "timeout: the run took too long, did not stop and was killed on attempt 1"
    kind, payload = farm.journal(job)[-1]
    assert (kind, payload["signal"]) == ("failed", signal.SIGKILL)
    assert payload["cpu_sec"] > (0.1 if task == "deaf" else 0)
    assert payload["peak_mb"] > 1
    farm.works()


def test_a_killed_runs_statement_ends_too(farm: Farm) -> None:
    """The server notices that nobody waits for its answer."""
    program = farm.ready(workers=1)
    job = farm.running("queries", max_attempts=1)
    assert len(farm.sessions(f"dl-job:{job}:1")) == 1
    program.workers()[0].kill()
    farm.wait(job, "lost")
    farm.no_sessions("dl-job:")


@pytest.mark.parametrize(("task", "args"), [("spins", {}), ("deaf", {}), ("holds_the_gil", GIL)])
def test_a_forced_cancellation_frees_the_slot(farm: Farm, task: str, args: dict[str, Any]) -> None:
    farm.ready(workers=1)
    job = farm.running(task, args=args)
    lifecycle.request_cancel(farm.conn, job, force=True)
    end = farm.wait(job, "canceled")
    assert end["error"].startswith("canceled by force")
    assert farm.journal(job)[-1][0] == "canceled"
    farm.works()


def test_without_force_a_cancellation_waits_for_a_safe_point_until_it_is_forced(farm: Farm) -> None:
    farm.ready(workers=1)
    job = farm.running("deaf")
    lifecycle.request_cancel(farm.conn, job)
    until(lambda: "cancel_requested" in farm.story(job))
    before = farm.job(job)["heartbeat_at"]
    until(lambda: farm.job(job)["heartbeat_at"] > before)
    assert farm.job(job)["status"] == "running"
    lifecycle.request_cancel(farm.conn, job, force=True)
    farm.wait(job, "canceled")
    assert farm.story(job) == ["queued", "picked", "cancel_requested", "cancel_requested", "canceled"]


def test_dl_cancel_grace_sec_forces_it_by_itself(farm: Farm) -> None:
    farm.ready(workers=1, dl_cancel_grace_sec=1)
    job = farm.running("spins")
    lifecycle.request_cancel(farm.conn, job)
    assert farm.wait(job, "canceled")["error"] == "canceled by force"


def test_a_cancellation_that_the_keeper_missed_is_enforced_when_it_is_back(farm: Farm) -> None:
    program = farm.ready(workers=1)
    job = farm.running("holds_the_gil", args=GIL)
    (keeper,) = program.children("keeper")
    keeper.suspend()
    lifecycle.request_cancel(farm.conn, job, force=True)
    keeper.kill()
    farm.wait(job, "canceled")


@pytest.mark.parametrize("child", [False, True])
def test_e1_too_much_memory_is_a_crash_that_says_so(farm: Farm, child: bool) -> None:
    program = farm.ready(workers=1)
    job = farm.enqueue("hungry", args={"child": child}, max_attempts=1)
    end = farm.wait(job, "lost")
    assert re.match("out of memory: the run used [4-9].. MB, max_memory_mb is 400, and was killed", end["error"])
    kind, payload = farm.journal(job)[-1]
    assert (kind, payload["signal"]) == ("lost", signal.SIGKILL)
    assert child or payload["peak_mb"] > 395  # by another counter of the kernel, which is a few pages behind
    assert program.events("supervisor.worker.killed")[0]["why"] == "memory"
    farm.works()


@pytest.mark.parametrize("die", [False, True])
def test_i5_no_child_survives_its_job(farm: Farm, die: bool) -> None:
    """Neither after a good end nor after a crash, not even one that made itself independent."""
    farm.ready(workers=1)
    mark = next(MARKS)
    job = farm.enqueue("leaves_children", args={"mark": mark, "die": die}, max_attempts=1)
    farm.wait(job, "lost" if die else "succeeded")
    until(lambda: not sleeping(mark), "the children to be gone")
    farm.works()


def test_what_a_child_has_used_counts_for_its_own_run(farm: Farm) -> None:
    """Also where the worker has to kill the child after the run."""
    farm.ready(workers=1)
    costs = []
    for task in ("leaves_a_busy_child", "noop"):
        job = farm.enqueue(task)
        farm.wait(job, "succeeded")
        costs.append(farm.journal(job)[-1][1]["cpu_sec"])
    assert costs[0] >= 0.3 > costs[1]


@pytest.mark.parametrize("daemon", [False, True])
def test_i5_a_child_does_not_survive_a_forced_end(farm: Farm, daemon: bool) -> None:
    farm.ready(workers=1)
    mark = next(MARKS)
    job = farm.running("waits_for_a_child", args={"mark": mark, "daemon": daemon})
    assert sleeping(mark)
    lifecycle.request_cancel(farm.conn, job, force=True)
    farm.wait(job, "canceled")
    until(lambda: not sleeping(mark), "the child, which has been killed by now, to end")


def test_i5_a_child_does_not_survive_a_worker_that_is_killed_when_its_supervisor_is_dead(farm: Farm) -> None:
    """Only the keeper is left to see to it."""
    program = farm.ready(workers=1, dl_drain_sec=30)
    mark = next(MARKS)
    job = farm.running("waits_for_a_child", args={"mark": mark})
    (worker,) = program.workers()
    program.signal(signal.SIGKILL)
    program.process.wait()
    worker.kill()
    farm.wait(job, "queued")
    until(lambda: not sleeping(mark), "the child, which has been killed by now, to end")


def stacks_of(farm: Farm, job_id: UUID) -> list[str]:
    return [payload["stacks"] for kind, payload in farm.journal(job_id) if kind == "stuck"]


@pytest.mark.parametrize(("how", "function"), [("sleep", "never_steps"), ("C", "hold_the_gil")])
def test_a_stuck_run_ends_as_an_error_with_its_stacks_in_the_journal(farm: Farm, how: str, function: str) -> None:
    farm.ready(workers=1, dl_heartbeat_sec=1)
    job = farm.enqueue("never.steps", args={"how": how}, max_attempts=1)
    end = farm.wait(job, "failed")
    assert end["error"].startswith("stuck: the run reported nothing for its stall_sec and was killed")
    (stacks,) = stacks_of(farm, job)
    assert function in stacks.split("\n\n")[0], "the pipeline's thread comes first"
    farm.works()


def test_a_stuck_run_is_reported_once_for_each_silence_and_goes_on(farm: Farm) -> None:
    farm.ready(workers=1)
    job = farm.enqueue("silent", args={"sec": 2})
    assert farm.wait(job, "succeeded")["attempt"] == 1
    assert len(stacks_of(farm, job)) in (2, 3), "where the end is written late, that is a silence too"


def test_a_run_that_reports_now_and_then_is_not_stuck(farm: Farm) -> None:
    farm.ready(workers=1)
    job = farm.enqueue("talks")
    farm.succeeds(job)
    assert stacks_of(farm, job) == []


def test_people_see_that_workers_are_stuck(farm: Farm) -> None:
    farm.ready(workers=2)
    for _ in range(2):
        farm.enqueue("silent", args={"sec": 30})
    seen = "SELECT state, seen_at - reported_at > interval '0.5 s' FROM dl_workers"
    until(lambda: farm.rows(seen) == [("stuck", True)] * 2, "both workers to be shown as stuck")
