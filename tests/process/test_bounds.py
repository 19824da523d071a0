"""Every run ends when it has to, also one that gets nowhere: told, interrupted, or killed with all it has started."""

import itertools
import os
import re
import signal
from typing import Any
from uuid import UUID

import psutil
from farming import Farm, until

from dataloader.queue import lifecycle

GIL = {"sec": 60}
MARKS = itertools.count(os.getpid() * 1_000)  # for a child that can be told from those of other tests


def sleeping(mark: int) -> list[psutil.Process]:
    """The children that a pipeline has marked."""
    return [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[-1] == str(600 + mark)]


def stacks_of(farm: Farm, job_id: UUID) -> list[str]:
    return [payload["stacks"] for kind, payload in farm.journal(job_id) if kind == "stuck"]


def test_e4_a_run_that_takes_too_long_is_interrupted(farm: Farm) -> None:
    """Pure Python, a system call, a statement: the workers survive it, and nothing goes on in the database.

    A pipeline's own timeout is told at the next yield; the job's own, where it names one, counts more.
    """
    program = farm.ready(workers=4, dl_kill_grace_sec=60)
    workers = {worker.pid for worker in program.workers()}
    tasks = ("spins", "sleeps", "tidies_up", "queries")
    jobs = [farm.enqueue(task, args={"sec": 600}, timeout_sec=1, max_attempts=1) for task in tasks]
    late = farm.enqueue("within_a_second", args={"sec": 600})
    patient = farm.enqueue("within_a_second", args={"sec": 1.5}, timeout_sec=60)
    for job in jobs:
        assert farm.wait(job, "failed")["error"] == "timeout: the run took more than 1 s"
        kind, payload = farm.journal(job)[-1]
        assert (kind, payload["cpu_sec"] >= 0, payload["peak_mb"] > 1) == ("failed", True, True), payload
    assert farm.rows("SELECT FROM runs WHERE job_id = %s", jobs[2]), "it has tidied up"
    farm.succeeds(patient)
    until(lambda: farm.job(late)["error"] == "timeout: the run took more than 1 s", "the pipeline's own timeout")
    assert (farm.job(late)["status"], farm.job(late)["attempt"]) == ("queued", 1), "it is tried again as any error is"
    assert farm.journal(late)[-1][1]["delay_sec"] == 30
    assert {worker.pid for worker in program.workers()} == workers
    farm.no_sessions("dl-job:")


TOO_LONG = "timeout: the run took too long, did not stop and was killed on attempt 1"
STUCK = "stuck: the run reported nothing for its stall_sec and was killed"
TOO_LARGE = "out of memory: the run used [4-9].. MB, max_memory_mb is 400, and was killed"
KILLED: list[tuple[str, dict[str, Any], float | None, str, str]] = [  # task, args, timeout_sec, end, error
    ("deaf", {}, 1, "failed", TOO_LONG),
    ("holds_the_gil", GIL, 1, "failed", TOO_LONG),
    ("never.steps", {"how": "sleep"}, None, "failed", STUCK),
    ("never.steps", {"how": "C"}, None, "failed", STUCK),
    ("hungry", {}, None, "lost", TOO_LARGE),
    ("hungry", {"child": True}, None, "lost", TOO_LARGE),
]


def test_e1_e4_what_does_not_stop_is_killed_and_its_error_says_why(farm: Farm) -> None:
    program = farm.ready(workers=len(KILLED))
    jobs = [farm.enqueue(task, args=args, timeout_sec=sec, max_attempts=1) for task, args, sec, *_ in KILLED]
    for job, (task, args, _, end, error) in zip(jobs, KILLED, strict=True):
        assert re.match(error, farm.wait(job, "failed", "lost")["error"]), (task, args)
        kind, payload = farm.journal(job)[-1]
        assert (kind, payload["signal"]) == (end, signal.SIGKILL), (task, args)
        assert payload["cpu_sec"] > (0.1 if task == "deaf" else 0)
        # By another counter of the kernel, which is a few pages behind.
        assert payload["peak_mb"] > (395 if (task, args) == ("hungry", {}) else 1)
    for job, function in ((jobs[2], "never_steps"), (jobs[3], "hold_the_gil")):
        (stacks,) = stacks_of(farm, job)
        assert function in stacks.split("\n\n")[0], "the pipeline's thread comes first"
    assert {line["why"] for line in program.events("supervisor.worker.killed")} == {"timeout", "stuck", "memory"}
    until(lambda: len(program.children("idle")) == len(KILLED), "all places to be free")
    farm.works()


def test_i5_a_forced_cancellation_frees_the_slot_and_ends_all_that_the_run_has_started(farm: Farm) -> None:
    """Without force it waits for a safe point. One that the keeper missed is enforced when it is back."""
    program = farm.ready(workers=5)
    mark = {"mark": next(MARKS)}
    deaf, gil, *others = (
        farm.running(task, args=args)
        for task, args in (
            *(("deaf", {}), ("holds_the_gil", GIL), ("spins", {})),
            *(("waits_for_a_child", mark | {"daemon": daemon}) for daemon in (False, True)),
        )
    )
    assert len(sleeping(mark["mark"])) == 2
    lifecycle.request_cancel(farm.conn, deaf)
    until(lambda: "cancel_requested" in farm.story(deaf))
    before = farm.job(deaf)["heartbeat_at"]
    until(lambda: farm.job(deaf)["heartbeat_at"] > before)
    assert farm.job(deaf)["status"] == "running"
    for job in (deaf, *others):
        lifecycle.request_cancel(farm.conn, job, force=True)
    for job in (deaf, *others):
        assert farm.wait(job, "canceled")["error"].startswith("canceled by force")
    assert farm.story(deaf) == ["queued", "picked", "cancel_requested", "cancel_requested", "canceled"]
    until(lambda: not sleeping(mark["mark"]), "the children, which have been killed by now, to end")
    (keeper,) = program.children("keeper")
    keeper.suspend()
    lifecycle.request_cancel(farm.conn, gil, force=True)
    keeper.kill()
    farm.wait(gil, "canceled")
    until(lambda: len(program.children("idle")) == 5, "all places to be free")
    farm.works()


def test_i5_nothing_that_a_run_has_started_survives_it(farm: Farm) -> None:
    """Neither after a good end nor after a crash: not a child that made itself independent, not a statement."""
    farm.ready(workers=1)
    for die in (False, True):
        mark = next(MARKS)
        job = farm.enqueue("leaves_children", args={"mark": mark, "die": die}, max_attempts=1)
        farm.wait(job, "lost" if die else "succeeded")
        until(lambda mark=mark: not sleeping(mark), "the children to be gone")
    job = farm.running("queries", max_attempts=1)
    assert len(farm.sessions(f"dl-job:{job}:1")) == 1
    farm.worker(job).kill()
    farm.wait(job, "lost")
    farm.no_sessions("dl-job:")
    costs = []
    for task in ("leaves_a_busy_child", "noop"):
        job = farm.enqueue(task)
        farm.succeeds(job)
        costs.append(farm.journal(job)[-1][1]["cpu_sec"])
    assert costs[0] >= 0.3 > costs[1], "what a child has used counts for its own run"


def test_i5_a_child_does_not_survive_a_worker_that_is_killed_when_its_supervisor_is_dead(farm: Farm) -> None:
    """Only the keeper is left to see to it. Before, DL_CANCEL_GRACE_SEC has forced a cancellation by itself."""
    program = farm.ready(workers=1, dl_drain_sec=30, dl_cancel_grace_sec=1)
    job = farm.running("spins")
    lifecycle.request_cancel(farm.conn, job)
    assert farm.wait(job, "canceled")["error"] == "canceled by force"
    mark = next(MARKS)
    job = farm.running("waits_for_a_child", args={"mark": mark})
    (worker,) = program.workers()
    program.signal(signal.SIGKILL)
    program.process.wait()
    worker.kill()
    farm.wait(job, "queued")
    until(lambda: not sleeping(mark), "the child, which has been killed by now, to end")


def test_a_silent_run_is_reported_once_for_each_silence_and_shown(farm: Farm) -> None:
    """It goes on. A run that reports now and then is not stuck."""
    farm.ready(workers=4)
    for _ in range(2):
        farm.enqueue("silent", args={"sec": 30})
    silent, talks = farm.enqueue("silent", args={"sec": 2}), farm.enqueue("talks")
    farm.succeeds(talks)
    assert farm.wait(silent, "succeeded")["attempt"] == 1
    assert len(stacks_of(farm, silent)) in (2, 3), "where the end is written late, that is a silence too"
    assert stacks_of(farm, talks) == []
    seen = "SELECT count(*) FROM dl_workers WHERE state = 'stuck' AND seen_at - reported_at > interval '3 s'"
    until(lambda: farm.rows(seen) == [(2,)], "the workers of the first two to be shown as stuck")
