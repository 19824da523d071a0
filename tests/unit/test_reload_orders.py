"""The supervisor's orders during reloads, against workers that follow them one small step after the other."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from dataloader import config
from dataloader.farm import supervisor
from dataloader.farm.slots import Order, Slot, State

CLAIMS = ("awake", "claim", "run")  # a worker in one of these may be at a claim or a run


class Worker:
    """What farm/worker.py does between two looks at its slot; each step reads or writes the slot once."""

    def __init__(self, slot: Slot, chance: random.Random, starts: int) -> None:
        self.slot, self.chance = slot, chance
        self.phase = "start"
        self.starts = starts  # steps until it is ready; negative: it dies instead

    def step(self) -> None:
        """One step; the phase "gone" is the last."""
        if self.phase == "start":
            self.starts -= 1 if self.starts > 0 else 0
            self.phase = "gone" if self.starts < 0 else "start" if self.starts else "look"
        elif self.phase == "look":
            self.phase = {Order.WORK: "awake", Order.WAIT: "rest", Order.LEAVE: "gone"}[self.slot.order]
        elif self.phase in ("rest", "awake"):
            self.slot.state = State.RESTING if self.phase == "rest" else State.AWAKE
            self.phase = "look" if self.phase == "rest" else "claim"
        elif self.phase == "claim":
            self.slot.state = self.chance.choice((State.BUSY, State.IDLE))
            self.phase = "run" if self.slot.state == State.BUSY else "idle"
        elif self.phase == "gone":
            return
        elif self.chance.random() < 0.1 or (self.phase == "idle" and self.slot.order != Order.WORK):
            self.slot.state = State.AWAKE if self.phase == "run" else self.slot.state
            self.phase = "look"


class Farm:
    """A supervisor without processes: a start makes a Worker."""

    def __init__(self, wished_for: int, chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(supervisor.os, "kill", lambda *_: None)
        settings = config.Settings.model_construct(workers_json=[config.WorkerSpec(queue="q", concurrency=wished_for)])
        self.supervisor = supervisor.Supervisor(config.load, settings, *[lambda *_: 0] * 2)
        self.supervisor._wish = Counter(q=wished_for)
        self.wished_for, self.chance = wished_for, chance
        self.workers: dict[int, Worker] = {}
        self.starts = 0
        self.is_broken = False

    @property
    def children(self) -> dict[int, Any]:
        """The supervisor's own view."""
        return self.supervisor._workers

    def tick(self) -> None:
        """What one tick does about workers."""
        for pid in [pid for pid, worker in self.workers.items() if worker.phase == "gone"]:
            del self.workers[pid], self.children[pid]
        for _ in range(self.supervisor._wanted()["q"] - len(self.children)):
            self.start()
        self.supervisor._give_orders()

    def start(self) -> None:
        self.starts += 1
        slot = self.supervisor._shared.slots[self.starts]
        slot.take(0, self.supervisor._generation)
        self.children[self.starts] = supervisor.Child(self.starts, slot, "q", self.supervisor._generation, 0.0, 0)
        steps = -1 if self.is_broken else self.chance.randint(1, 9)
        self.workers[self.starts] = Worker(slot, self.chance, steps)

    def go_on(self, steps: int) -> None:
        """So many random steps; no more workers claim or run than are wished for, and none that runs has to leave."""
        for _ in range(steps):
            if self.chance.random() < 0.3:
                self.tick()
            elif self.workers:
                self.chance.choice(list(self.workers.values())).step()
            assert sum(worker.phase in CLAIMS for worker in self.workers.values()) <= self.wished_for
            assert len(self.workers) <= self.wished_for + 1
            leaving = [child.slot for child in self.children.values() if child.slot.order == Order.LEAVE]
            assert all(slot.state == State.RESTING for slot in leaving), "the first to finish leaves, not one that runs"

    def generations(self) -> set[int]:
        """Those of the workers that are left."""
        return {child.generation for child in self.children.values()}


@pytest.fixture(params=range(60))
def farm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Farm:
    chance = random.Random(request.param)
    farm = Farm(chance.randint(1, 3), chance, monkeypatch)
    farm.go_on(chance.randint(0, 200))
    return farm


def test_every_worker_is_replaced_and_never_do_too_many_claim(farm: Farm) -> None:
    for _ in range(2):  # the second may come while the first is under way
        farm.supervisor._generation += 1
        farm.go_on(farm.chance.randint(0, 100))
    farm.go_on(3_000)
    assert farm.generations() == {2}
    assert len(farm.workers) == farm.wished_for
    assert all(child.slot.order == Order.WORK for child in farm.children.values())


def test_broken_code_keeps_the_old_workers_at_work(farm: Farm) -> None:
    farm.go_on(1_000)
    before = dict(farm.workers)
    farm.supervisor._generation += 1
    farm.is_broken = True
    farm.go_on(1_000)
    assert before.items() <= farm.workers.items()
    assert all(farm.children[pid].slot.order == Order.WORK for pid in before)


def test_one_worker_at_a_time_is_missing(farm: Farm) -> None:
    farm.go_on(1_000)
    farm.supervisor._generation += 1
    for _ in range(3_000):
        farm.go_on(1)
        ready = sum(worker.phase not in ("start", "gone") for worker in farm.workers.values())
        assert ready >= farm.wished_for - 1
    assert farm.generations() == {1}
