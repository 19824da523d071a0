"""Runs begin only while the host has room for them: within the bound, with little of it idle, and the big ones too."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import psutil
import pytest
from farming import Farm, until

from dataloader.farm.process import memory_used

MB = 2**20
WAITING = "SELECT count(*) FROM dl_jobs WHERE status = 'queued'"
UNFINISHED = "SELECT count(*) FROM dl_jobs WHERE status IN ('queued', 'running')"


class Hall:
    def __init__(self, farm: Farm, folder: Path) -> None:
        self.farm = farm
        self._notes = folder / "notes"
        self._notes.touch()

    def ready(self, workers: int, **settings: Any) -> Any:
        given = {"dl_host_memory": "600MB", "dl_host_cpu": 0, "dl_host_temperature": 0} | settings
        return self.farm.ready(workers=workers, dl_pipelines="heavy_pipelines", notes=self._notes, **given)

    def put(self, size: int, sec: float = 0.0, task: str = "", args: dict[str, Any] | None = None, **more: Any) -> UUID:
        return self.farm.enqueue(task or f"uses {size}", args={"mb": size, "sec": sec} | (args or {}), **more)

    def notes(self, what: str) -> list[tuple[float, float]]:
        """The size and the time of each begin, or each end."""
        lines = [line.split() for line in self._notes.read_text().splitlines()]
        return [(float(size), float(at)) for kind, size, at in lines if kind == what]

    def busy(self) -> list[psutil.Process]:
        running = [program for program in self.farm.programs if program.process.poll() is None]
        workers = [worker for program in running for worker in program.workers()]
        return [worker for worker in workers if " job=" in " ".join(worker.cmdline())]

    def used_mb(self) -> float:
        return sum(memory_used(worker.pid) for worker in self.busy()) / MB

    def count(self, question: str) -> int:
        return int(self.farm.rows(question)[0][0])


@pytest.fixture
def hall(farm: Farm, tmp_path: Path) -> Hall:
    return Hall(farm, tmp_path)


@pytest.fixture
def strangers() -> Iterator[list[subprocess.Popen[bytes]]]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    yield busy
    for each in busy:
        each.kill()
        each.wait()


def test_the_runs_stay_within_the_bound_and_use_most_of_it(hall: Hall, tmp_path: Path) -> None:
    """The first runs end only when they use most of the bound, so that the pace of the machine does not matter.

    Small jobs do not starve a big one.
    """
    gate = tmp_path / "gate"
    for _ in range(6):
        hall.put(100, args={"gate": str(gate)})
    sizes = [100] * 2 + [150, 200, 250] * 8
    Random(1).shuffle(sizes)
    for size in [500, *sizes]:
        hall.put(size, sec=0.6)
    hall.ready(workers=6, dl_reserve_sec=2)
    seen: list[float] = []
    until(lambda: seen.append(hall.used_mb()) or seen[-1] >= 0.7 * 600, "the runs to use most of the bound")
    gate.touch()
    until(lambda: seen.append(hall.used_mb()) or not hall.count(UNFINISHED), "all jobs to end")
    assert max(seen) <= 600
    began = [size for size, _ in hall.notes("begin")].index(500)
    assert began < 28, "the big one began long before the last small ones"
    in_vain = hall.count("SELECT count(*) FROM dl_job_events WHERE kind = 'requeue' AND payload ->> 'reason' <> ''")
    assert in_vain < 2 * 33, "workers race for room now and then; they do not claim again and again"


def test_processors_that_strangers_keep_busy_are_not_free(
    hall: Hall, strangers: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """They hold up every run but the first: this machine may have other strangers, so the others begin behind it."""
    gate = tmp_path / "gate"
    task = "takes a twentieth"
    program = hall.ready(workers=2, dl_host_memory=0, dl_host_cpu=100, dl_reserve_sec=0.1)
    first = hall.put(1, task=task, args={"gate": str(gate)})
    until(lambda: hall.notes("begin"), "the first run")
    later: dict[UUID, float] = {}

    def is_held_up() -> bool:
        # Many jobs would keep the workers busy, and the processors of the farm's own workers are no strangers'.
        if not hall.count(WAITING) and time.monotonic() > max(later.values(), default=0) + 2:
            later[hall.put(1, task=task)] = time.monotonic()
        return bool(program.events("worker.room.reserved"))

    until(is_held_up, "a run to wait for the strangers")
    assert hall.farm.job(first)["status"] == "running"
    gate.touch()
    hall.farm.succeeds(*later)


def test_what_never_fits_holds_nobody_up_and_a_killed_worker_leaves_its_room_to_others(hall: Hall) -> None:
    hall.ready(workers=2, dl_reserve_sec=0.1)
    hall.put(500, sec=60, max_attempts=1)
    until(lambda: hall.notes("begin"), "the big run")
    (worker,) = until(hall.busy, "its worker")
    waits = hall.put(400)
    worker.kill()
    hall.farm.wait(waits, "succeeded")
    never = hall.put(900)
    for _ in range(3):
        hall.farm.wait(hall.put(400), "succeeded")
    until(lambda: (hall.farm.job(never)["waiting_for"] or {}).get("reason") == "memory", "the keeper to show its host")
    reason = hall.farm.job(never)["waiting_for"]
    assert (reason["task"], reason["need_mb"], reason["room_mb"]) == ("uses 900", 900, 600)
    assert (hall.farm.job(never)["status"], hall.farm.story(never)) == ("queued", ["queued"])


def test_what_a_task_needs_is_learned_from_its_runs(hall: Hall) -> None:
    """The first run of a task that declares nothing tells; the workers that start later know."""
    first = hall.ready(workers=1)
    hall.farm.start("reaper")
    job = hall.put(400, sec=1.2, task="says nothing")
    hall.farm.wait(job, "succeeded")
    until(lambda: hall.count("SELECT count(*) FROM dl_needs WHERE memory_mb > 350"), "the reaper to sum up the journal")
    assert first.stop() == 0
    hall.ready(workers=2)
    later = [hall.put(400, sec=0.3, task="says nothing") for _ in range(2)]
    hall.farm.succeeds(*later)
    begun, ended = ([at for _, at in hall.notes(what)][-2:] for what in ("begin", "end"))
    assert min(ended) < max(begun), "one after the other"
