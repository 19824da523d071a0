"""Runs that are alive and get nowhere: their stacks are in the journal, and where the pipeline says so they end."""

from __future__ import annotations

import pytest
from farming import Farm, until

MODULES = "stuck_pipelines"


def stacks_of(farm: Farm, job_id: object) -> list[str]:
    return [payload["stacks"] for kind, payload in farm.journal(job_id) if kind == "stuck"]  # type: ignore[arg-type]


@pytest.mark.parametrize(("how", "function"), [("sleep", "never"), ("C", "hold_the_gil")])
def test_a_stuck_run_ends_as_an_error_with_its_stacks_in_the_journal(farm: Farm, how: str, function: str) -> None:
    farm.ready(workers=1, dl_pipelines=MODULES, dl_heartbeat_sec=1)
    job = farm.enqueue("never.steps", args={"how": how}, max_attempts=1)
    end = farm.wait(job, "failed")
    assert end["error"].startswith("stuck: the run reported nothing for its stall_sec and was killed")
    (stacks,) = stacks_of(farm, job)
    assert function in stacks.split("\n\n")[0], "the pipeline's thread comes first"
    assert farm.wait(farm.enqueue("good"), "succeeded")


def test_a_stuck_run_is_reported_once_for_each_silence_and_goes_on(farm: Farm) -> None:
    farm.ready(workers=1, dl_pipelines=MODULES)
    job = farm.enqueue("silent", args={"sec": 2})
    assert farm.wait(job, "succeeded")["attempt"] == 1
    assert len(stacks_of(farm, job)) == 2


def test_a_run_that_reports_now_and_then_is_not_stuck(farm: Farm) -> None:
    farm.ready(workers=1, dl_pipelines=MODULES)
    job = farm.enqueue("talks")
    assert farm.wait(job, "succeeded")["attempt"] == 1
    assert stacks_of(farm, job) == []


def test_people_see_that_workers_are_stuck(farm: Farm) -> None:
    farm.ready(workers=2, dl_pipelines=MODULES)
    jobs = [farm.enqueue("silent", args={"sec": 30}) for _ in range(2)]
    seen = "SELECT state, seen_at - reported_at > interval '0.5 s' FROM dl_workers"
    until(lambda: farm.rows(seen) == [("stuck", True)] * 2, "both workers to be shown as stuck")
    for job in jobs:
        farm.rows("UPDATE dl_jobs SET cancel_requested = true WHERE job_id = %s RETURNING 1", job)
