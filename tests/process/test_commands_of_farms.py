"""`run.command` on a real farm: its program and all that it has started end with the run, however that ends."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from farming import Farm, Program, until

from dataloader.queue import lifecycle

# A program with a child that has left its process group, as a daemon does.
CODE = """
import os, subprocess, sys, time
if os.path.exists("again"):
    sys.exit(print("done"))
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(os.getpid(), child.pid, file=open("again", "w"), flush=True)
print("begun", flush=True)
time.sleep(600)
"""


def ready(farm: Farm) -> Program:
    commands = json.dumps({"it": [sys.executable, "-c", CODE]})
    return farm.ready(workers=1, dl_commands=commands, dl_data_dir=farm.folder)


def pids(farm: Farm) -> list[int]:
    """The program and its child, once it has begun."""
    begun = Path(farm.folder / "again")
    until(lambda: begun.exists() and begun.read_text().endswith("\n"), "the program to begin")
    return [int(pid) for pid in begun.read_text().split()]


def are_gone(found: list[int]) -> bool:
    return not any(map(psutil.pid_exists, found))


@pytest.mark.parametrize("force", [False, True])
def test_a_cancellation_ends_the_program_and_what_it_has_started(farm: Farm, force: bool) -> None:
    ready(farm)
    job = farm.enqueue("run.command", args={"command": "it"})
    found = pids(farm)
    farm.begun(job)
    lifecycle.request_cancel(farm.conn, job, force=force)
    farm.wait(job, "canceled")
    until(lambda: are_gone(found), "the program to end")
    assert notes(farm, job) == ["begun"]


def test_the_death_of_its_worker_ends_the_program_and_what_it_has_started(farm: Farm) -> None:
    program = ready(farm)
    job = farm.enqueue("run.command", args={"command": "it"})
    found = pids(farm)
    program.workers()[0].kill()
    assert farm.wait(job, "succeeded")["attempt"] == 2
    until(lambda: are_gone(found), "the program to end")
    assert notes(farm, job) == ["done"]
    logged = until(lambda: program.events("done"), "the line in the log")
    assert [(line["logger"], line["job_id"]) for line in logged] == [("pipeline.run.command", str(job))]


def test_the_death_of_the_whole_farm_ends_the_program(farm: Farm) -> None:
    program = ready(farm)
    farm.enqueue("run.command", args={"command": "it"})
    found, (worker,) = pids(farm), program.workers()
    others = [child for child in psutil.Process(program.process.pid).children() if child.pid != worker.pid]
    for process in (psutil.Process(program.process.pid), *others, worker):
        process.suspend()
    for process in (psutil.Process(program.process.pid), *others, worker):
        process.kill()
    until(lambda: not psutil.pid_exists(found[0]), "the program to end")
    os.kill(found[1], signal.SIGKILL)  # nobody is left who would end it


def notes(farm: Farm, job: Any) -> list[str]:
    """What the journal of the job's last run has kept of the output."""
    return [note for _, payload in farm.journal(job) for note in payload.get("notes", [])]
