"""Prepared resources: outside the time of the run, kept for the next job of the affinity key, released in the end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import psutil
import pytest
from farming import Farm, until
from psycopg.types.json import Jsonb


class Notes:
    """What the pipelines have noted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def __call__(self) -> list[str]:
        return [" ".join(line.split()[:2]) for line in self.path.read_text().splitlines()]


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes(tmp_path / "notes")


def put(
    farm: Farm, task: str, affinity_key: str | None = None, args: dict[str, Any] | None = None, tries: int = 5
) -> UUID:
    """Add a job by a plain insert."""
    insert = (
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, args, affinity_key, max_attempts)"
        " VALUES (gen_random_uuid(), 'q', %s, gen_random_uuid()::text, %s, %s, %s) RETURNING job_id"
    )
    found: UUID = farm.rows(insert, task, Jsonb(args or {}), affinity_key, tries)[0][0]
    return found


def ready(farm: Farm, notes: Notes, workers: int = 1, **settings: Any) -> Any:
    return farm.ready(workers=workers, dl_pipelines="warm_pipelines", notes=notes.path, **settings)


def test_a_resource_is_prepared_once_for_all_jobs_of_its_key(farm: Farm, notes: Notes) -> None:
    program = ready(farm, notes)
    jobs = [put(farm, "ask", affinity_key="a") for _ in range(3)]
    for job in jobs:
        assert farm.wait(job, "succeeded")["progress"] == {"model": "model a"}
    assert program.stop() == 0
    assert notes() == ["load a", "ask a", "ask a", "ask a", "release a"]


def test_the_least_recently_used_resource_makes_room(farm: Farm, notes: Notes) -> None:
    ready(farm, notes)
    for key in "abac":
        farm.wait(put(farm, "ask", affinity_key=key), "succeeded")
    assert notes() == ["load a", "ask a", "load b", "ask b", "ask a", "release b", "load c", "ask c"]


def test_a_job_without_a_key_keeps_nothing_warm(farm: Farm, notes: Notes) -> None:
    ready(farm, notes)
    farm.wait(put(farm, "ask"), "succeeded")
    assert notes() == ["load None", "ask None", "release None"]


@pytest.mark.parametrize(("args", "ends"), [({"fail": True}, False), ({"drop": True}, True), ({"sec": 60}, True)])
def test_which_runs_cost_the_resource(farm: Farm, notes: Notes, args: dict[str, Any], ends: bool) -> None:
    """One that had to stop, or says so; an error leaves it warm."""
    ready(farm, notes)
    farm.wait(put(farm, "ask", affinity_key="a", args=args, tries=1), "succeeded", "failed")
    farm.wait(put(farm, "ask", affinity_key="a"), "succeeded")
    assert Counter(notes())["load a"] == (2 if ends else 1)


def test_what_is_prepared_has_a_time_of_its_own(farm: Farm, notes: Notes) -> None:
    """Longer than `timeout_sec` of the run, which begins behind it; `prepare_sec` bounds it."""
    ready(farm, notes)
    slow = put(farm, "ask", affinity_key="a", args={"load_sec": 1.5})
    assert farm.wait(slow, "succeeded")["attempt"] == 1
    late = put(farm, "impatient", affinity_key="b", args={"load_sec": 60}, tries=1)
    assert farm.wait(late, "failed")["error"] == "timeout: prepare took more than 0.5 s"
    assert "load b" not in notes()


def test_a_process_of_a_resource_outlives_its_runs_and_others_do_not(farm: Farm, notes: Notes) -> None:
    program = ready(farm, notes)
    seen = [farm.wait(put(farm, "asks_a_server", affinity_key="a"), "succeeded")["progress"] for _ in range(2)]
    assert seen[0]["server"] == seen[1]["server"]
    assert seen[1]["alive"]
    last = farm.wait(put(farm, "asks_a_server", affinity_key="a", args={"stray": True}), "succeeded")["progress"]
    assert last["server"] == seen[0]["server"]
    assert not psutil.pid_exists(last["stray"])
    until(lambda: not psutil.pid_exists(last["server"]), "the server to end with the worker that the stray has cost")
    assert program.stop() == 0


def test_two_workers_share_the_models_out(farm: Farm, notes: Notes) -> None:
    """In random order each job would find another model; the claims look for what is warm."""
    keys = [f"m{number % 8}" for number in range(200)]
    Random(1).shuffle(keys)
    jobs = [put(farm, "ask", affinity_key=key, args={"load_sec": 0.2}) for key in keys]
    ready(farm, notes, workers=2, dl_lookahead=400)
    for job in jobs:
        farm.wait(job, "succeeded")
    assert sum(note.startswith("load") for note in notes()) <= 12


def test_a_job_is_passed_over_for_so_long_and_no_longer(farm: Farm, notes: Notes) -> None:
    """Others whose resource is warm would all go before it."""
    for key in ["a"] * 3 + ["b"] + ["a"] * 100:
        put(farm, "ask", affinity_key=key, args={"sec": 0.1})
    ready(farm, notes, dl_lookahead=400, dl_affinity_wait_sec=2)
    until(lambda: "ask b" in notes(), "the job that was passed over")
    before = notes().index("ask b")
    assert 5 < before < 60, "it went by the order of the queue, or waited for all others"
