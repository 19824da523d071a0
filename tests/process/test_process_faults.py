"""Processes fail: a heartbeat breaks, reapers are many or stopped, the host is suspended, versions are mixed.

Names begin with the fault: A ownership, E poison, I processes.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psutil
import pytest
from farming import Farm, Program, until
from judge import illegal

NEVER = 600  # seconds


def is_legal(farm: Farm, job: UUID) -> bool:
    """Whether the job's journal is a legal story."""
    return illegal([kind for kind, _ in farm.journal(job)], farm.job(job)["status"]) is None


# A7: the heartbeat -------------------------------------------------------------------------------------------

RAISES = ["_beat"]
DIES = ["_beat", "_log"]  # the second is used where the first is caught


@pytest.mark.parametrize("methods", [RAISES, DIES], ids=["raises", "dies"])
def test_a7_a_run_without_a_heartbeat_is_stopped_and_handed_back(farm: Farm, methods: list[str]) -> None:
    """At its next safe point; it runs again, and the worker's place is not lost."""
    program = farm.ready(workers=1)
    job = farm.enqueue("breaks_the_heartbeat", args={"methods": methods})
    assert farm.wait(job, "succeeded")["attempt"] == 1
    assert farm.story(job) == ["queued", "picked", "requeue", "picked", "done"]
    assert farm.wait(farm.enqueue("recorded", args={"sec": 1.5}), "succeeded")["attempt"] == 1
    assert program.stop() == 0


def test_a7_a_run_without_heartbeat_and_safe_points_is_ended(farm: Farm) -> None:
    """Before its lease is over, by the process's end; it runs again."""
    farm.ready(workers=1)
    job = farm.enqueue("breaks_the_heartbeat_silently", args={"methods": RAISES, "sec": 600}, lease_ttl_sec=4)
    assert farm.wait(job, "succeeded")["attempt"] == 1
    assert is_legal(farm, job)
    assert farm.wait(farm.enqueue("noop"), "succeeded")["attempt"] == 1


@pytest.mark.parametrize("methods", [RAISES, DIES], ids=["raises", "dies"])
def test_a7_a_run_that_is_over_before_it_is_noticed_hangs_nothing(farm: Farm, methods: list[str]) -> None:
    """A plain function returns after its heartbeat has broken."""
    program = farm.ready(workers=1)
    job = farm.enqueue("breaks_the_heartbeat_silently", args={"methods": methods, "sec": 2}, lease_ttl_sec=60)
    assert farm.wait(job, "succeeded")["attempt"] == 1
    assert farm.story(job) == ["queued", "picked", "done"]
    assert farm.wait(farm.enqueue("recorded", args={"sec": 1.5}), "succeeded")["attempt"] == 1
    assert program.stop() == 0
