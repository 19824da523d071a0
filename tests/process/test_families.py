"""Jobs that wait for others, on real farms: fan-out and gather, results of parents, workers that are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from uuid import UUID

import pytest
from farming import Farm, until


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes").touch()
    return tmp_path / "notes"


@pytest.fixture
def family(farm: Farm, notes: Path) -> Farm:
    farm.ready(workers=1, dl_pipelines="family_pipelines", notes=notes)
    return farm


def test_one_worker_fans_out_and_gathers(family: Farm, notes: Path) -> None:
    """The run that waits does not keep its worker, which else could never run the parts."""
    job = family.enqueue("whole", args={"parts": [1, 2, 3]})
    family.wait(job, "succeeded")
    assert family.result(job) == {"sum": 12, "attempt": 1}
    assert sorted(notes.read_text().splitlines()) == ["part 1", "part 2", "part 3", "whole 1", "whole 1"]
    assert family.story(job) == ["queued", "picked", "requeue", "picked", "done"]


def test_a_gathered_job_that_fails_fails_the_whole(family: Farm) -> None:
    job = family.enqueue("whole", args={"parts": [1, -1]})
    error = family.wait(job, "failed")["error"]
    assert "1 of 2 gathered jobs did not succeed" in error


def test_the_results_of_the_parents_are_there_in_their_order(family: Farm) -> None:
    parts = [family.enqueue("part", args={"n": n}) for n in (5, 6)]
    job = family.enqueue("sums", depends_on=[parts[1], parts[0]])
    family.wait(job, "succeeded")
    assert family.result(job) == {"of": [12, 10], "states": ["succeeded"] * 2}


def test_what_a_run_triggers_is_checked_as_from_everybody(family: Farm) -> None:
    error = family.wait(family.enqueue("triggers badly"), "failed")["error"]
    assert "nonsense" in error


def have_ended(farm: Farm, jobs: list[UUID]) -> bool:
    return all(farm.job(job)["status"] == "succeeded" for job in jobs)


def test_a_worker_that_is_killed_while_its_job_gathers_adds_nothing_twice(farm: Farm, notes: Path) -> None:
    program = farm.ready(workers=2, dl_pipelines="family_pipelines", notes=notes)
    jobs = [farm.enqueue("whole", args={"parts": list(range(10))}) for _ in range(5)]
    for _ in range(3):
        begun = len(notes.read_text().splitlines())
        until(lambda: len(notes.read_text().splitlines()) > begun + 2 or have_ended(farm, jobs), "some runs")  # noqa: B023  asked at once
        os.kill(program.workers()[0].pid, signal.SIGKILL)
    for job in jobs:
        farm.wait(job, "succeeded")
        assert farm.result(job)["sum"] == 90
    assert farm.rows("SELECT count(*) FROM dl_jobs WHERE task = 'part'")[0][0] == 50
    assert farm.rows("SELECT count(*) FROM dl_waiting")[0][0] == 0
