"""Signals that keep the farm running: HUP brings new settings and code, TTIN tells where everybody is, recycling."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
from farming import Farm, Program, until

VERSIONED = """
from dataloader.pipelines import register

@register("versioned")
def versioned(args):
    return {"version": %d}
"""


def wish(**queues: int) -> str:
    return json.dumps([{"queue": queue, "concurrency": number} for queue, number in queues.items()])


def version(farm: Farm) -> int:
    found: int = farm.wait(farm.enqueue("versioned"), "succeeded")["progress"]["version"]
    return found


def reloadable(farm: Farm, folder: Path, **settings: object) -> tuple[Program, Path]:
    """A farm whose settings are in a .env of its own, and whose pipelines are in `folder`."""
    module = folder / "mine.py"
    module.write_text(VERSIONED % 1)
    path = os.pathsep.join([str(Path(__file__).parent), str(folder)])
    program = farm.ready(workers=2, dl_pipelines="farm_pipelines,mine", pythonpath=path, **settings)
    return program, module


def test_hup_brings_new_pipeline_code_while_jobs_run(farm: Farm, tmp_path: Path) -> None:
    """A running job finishes with the old code; never are two workers missing."""
    program, module = reloadable(farm, tmp_path, dl_claim_backoff_sec=600)
    before = {worker.pid for worker in program.workers()}
    running = farm.enqueue("recorded", args={"sec": 2})
    farm.wait(running, "running")
    assert version(farm) == 1
    module.write_text(VERSIONED % 2)
    os.utime(module, (time.time() + 5, time.time() + 5))  # not to be taken for the compiled file's source
    program.signal(signal.SIGHUP)
    fewest = 2

    def replaced() -> bool:
        nonlocal fewest
        now = {worker.pid for worker in program.workers()}
        fewest = min(fewest, len(now))
        return len(now) == 2 and not now & before

    until(replaced, "new workers")
    assert fewest >= 1
    assert farm.job(running)["status"] == "succeeded"
    assert farm.job(running)["attempt"] == 1
    assert version(farm) == 2
    assert program.stop() == 0


def test_hup_loses_and_delays_nothing_under_load(farm: Farm, tmp_path: Path) -> None:
    program, _ = reloadable(farm, tmp_path)
    jobs = []
    for number in range(60):
        jobs.append(farm.enqueue("recorded", args={"sec": 0.05}))
        if number % 20 == 5:
            program.signal(signal.SIGHUP)
        time.sleep(0.05)  # the rhythm of the load
    for job in jobs:
        assert farm.wait(job, "succeeded")["attempt"] == 1
        assert farm.story(job) == ["queued", "picked", "done"]
    slowest = farm.rows("SELECT max(extract(epoch FROM started_at - available_at)) FROM dl_jobs")[0][0]
    assert slowest < 10, "the figure itself is measured elsewhere"


def test_hup_with_other_queues_starts_the_new_and_ends_the_old(farm: Farm, tmp_path: Path) -> None:
    env = tmp_path / ".env"
    env.write_text(f"WORKERS_JSON={wish(q=2)}\n")
    program = farm.start(workers_json="", cwd=tmp_path)
    until(lambda: len(program.events("worker.started")) == 2)
    env.write_text(f"WORKERS_JSON={wish(q=1, other=1)}\n")
    program.signal(signal.SIGHUP)
    farm.wait(farm.enqueue("noop", "other"), "succeeded")
    until(
        lambda: sorted(worker.cmdline()[0].split()[2].split("#")[0] for worker in program.workers()) == ["other", "q"]
    )
    farm.wait(farm.enqueue("noop", "q"), "succeeded")


def test_hup_with_a_wrong_setting_changes_nothing(farm: Farm, tmp_path: Path) -> None:
    env = tmp_path / ".env"
    env.write_text(f"WORKERS_JSON={wish(q=1)}\n")
    program = farm.start(workers_json="", cwd=tmp_path)
    until(lambda: program.events("worker.started"))
    before = [worker.pid for worker in program.workers()]
    env.write_text("WORKERS_JSON=nonsense\n")
    program.signal(signal.SIGHUP)
    (refused,) = until(lambda: program.events("supervisor.reload.refused"))
    assert "WORKERS_JSON" in refused["error"]
    assert [worker.pid for worker in program.workers()] == before
    farm.wait(farm.enqueue("noop"), "succeeded")


def test_ttin_logs_the_stacks_even_of_a_worker_that_holds_the_gil(farm: Farm) -> None:
    program = farm.ready(workers=1)
    job = farm.enqueue("holds_the_gil", args={"n": 400_000_000})
    until(lambda: farm.rows("SELECT FROM runs"))
    program.signal(signal.SIGTTIN)
    (event,) = until(lambda: program.events("supervisor.worker.stacks"))
    assert "holds_the_gil" in event["stacks"]
    assert farm.wait(job, "succeeded")["attempt"] == 1


def test_a_worker_is_replaced_after_dl_max_jobs(farm: Farm) -> None:
    program = farm.ready(workers=1, dl_max_jobs=3)
    for _ in range(7):
        farm.wait(farm.enqueue("recorded", args={"sec": 0}), "succeeded")
    assert [count for (count,) in farm.rows("SELECT count(*) FROM runs GROUP BY pid ORDER BY min(started)")] == [
        3,
        3,
        1,
    ]
    assert program.events("worker.recycled")[0]["jobs"] == 3


def test_a_worker_that_has_grown_is_replaced_after_its_job(farm: Farm) -> None:
    program = farm.ready(workers=1, dl_max_rss_mb=200)
    farm.wait(farm.enqueue("grows", args={"mb": 300}), "succeeded")
    until(lambda: program.events("worker.recycled"))
    farm.wait(farm.enqueue("noop"), "succeeded")
    assert all(psutil.Process(worker.pid).memory_info().rss < 200 * 2**20 for worker in program.workers())


def test_quit_ends_at_once_and_hands_back(farm: Farm) -> None:
    program = farm.ready(workers=1, dl_drain_sec=600)
    job = farm.enqueue("spins")
    until(lambda: farm.rows("SELECT FROM runs"))
    program.signal(signal.SIGQUIT)
    assert program.process.wait(20) == 0
    assert (farm.job(job)["status"], farm.job(job)["attempt"]) == ("queued", 0)
