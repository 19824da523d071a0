"""Which idle workers are woken for a notification: as many as there are jobs and one, and none is forgotten."""

from __future__ import annotations

import math

import pytest

from dataloader.farm import ear as module
from dataloader.farm import slots as slots_module
from dataloader.farm.ear import ANSWER_SEC, CHECK_SEC, CLAIM_SEC, POLL_SEC, SPREAD_MOST, Ear
from dataloader.farm.slots import DEAF_SEC, SharedSlots, Slot, State
from dataloader.queue.lifecycle import Look


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.at = 1_000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "now", clock)
    monkeypatch.setattr(slots_module, "now", clock)
    return clock


@pytest.fixture(autouse=True)
def stopped(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The slots whose processes are stopped."""
    found: set[int] = set()
    monkeypatch.setattr(module, "is_running", lambda pid: pid not in found)
    return found


def farm(*kinds: int, queue: str = "q") -> SharedSlots:
    """Idle workers of these kinds; those of kind 0 serve `queue`, others the queue of their number."""
    shared = SharedSlots(len(kinds))
    for slot, kind in zip(shared.slots, kinds, strict=True):
        slot.take(kind)
        slot.occupy(f"w{slot.index}", [queue if kind == 0 else f"q{kind}"])
        slot.fields.pid = slot.index
        slot.state = State.IDLE
    return shared


def run(slot: Slot) -> None:
    """The worker has found a job and runs it."""
    if slot.state is not State.BUSY:
        slot.state = State.BUSY
        slot.fields.runs += 1


def woken(slots: list[Slot], since: float) -> list[int]:
    """Those that were called for what came then."""
    return [slot.index for slot in slots if slot.fields.called_at >= since]


def test_one_worker_is_woken_and_then_twice_as_many_as_have_found_jobs(clock: Clock) -> None:
    shared = farm(*[0] * 8)
    ear = Ear(shared)
    ear.told({"q"})
    assert ear.go_on() == POLL_SEC
    for busy, called in ((0, 1), (1, 2), (2, 4), (4, 8)):
        for slot in shared.slots[:busy]:
            run(slot)
        ear.go_on()
        assert woken(shared.slots, 1_000.0) == list(range(called))


def test_a_claim_after_the_call_that_finds_no_job_ends_it_and_one_before_does_not(clock: Clock) -> None:
    shared = farm(0, 0, 0)
    ear = Ear(shared)
    ear.told({"q"})
    ear.go_on()
    shared.slots[0].found_no_job(clock.at - 0.001, None)
    clock.at += 0.1
    assert ear.go_on() == POLL_SEC
    shared.slots[0].found_no_job(1_000.0, None)
    assert ear.go_on() == math.inf
    clock.at += 2 * ANSWER_SEC
    ear.go_on()
    assert woken(shared.slots, 1_000.0) == [0]


def test_in_place_of_stopped_workers_others_are_woken_soon(clock: Clock, stopped: set[int]) -> None:
    shared = farm(*[0] * 5)
    ear = Ear(shared)
    stopped |= {0, 1}
    ear.told({"q"})
    for _ in range(4):
        ear.go_on()
        clock.at += 2 * CHECK_SEC
    assert woken(shared.slots, 1_000.0) == [0, 1, 2]


def test_a_stopped_worker_does_not_stand_for_the_others_however_often_it_is_called(
    clock: Clock, stopped: set[int]
) -> None:
    """Each notification calls anew, in less time than a look at the processes takes to come."""
    shared = farm(0, 0, 0)
    ear = Ear(shared)
    stopped.add(0)
    for _ in range(10):
        ear.told({"q"})
        ear.go_on()
        clock.at += CHECK_SEC / 2
    assert woken(shared.slots, 1_000.0) == [0, 1]


def test_while_no_answer_comes_one_more_is_woken_each_second_until_all_are(clock: Clock) -> None:
    shared = farm(0, 0, 0)
    ear = Ear(shared)
    for second in range(4):
        ear.told({"q"})
        ear.go_on()
        assert woken(shared.slots, 1_000.0) == list(range(min(3, second + 1)))
        clock.at += 1.01 * ANSWER_SEC
    ear.go_on()
    assert ear.go_on() == math.inf


def test_a_kin_that_answers_is_not_pressed_however_many_notifications_come(clock: Clock) -> None:
    """Each claim was sent before the latest notification, so that none of them ends the call."""
    shared = farm(0, 0, 0)
    shared.slots[0].state = State.AWAKE
    ear = Ear(shared)
    for _ in range(100):
        sent = clock.at
        clock.at += ANSWER_SEC / 10
        ear.told({"q"})
        ear.go_on()
        shared.slots[0].found_no_job(sent, None)
    assert woken(shared.slots, 1_000.0) == [0]


def test_a_worker_at_a_claim_is_called_too_for_it_may_have_sent_the_claim_before(clock: Clock) -> None:
    shared = farm(0)
    shared.slots[0].state = State.AWAKE
    ear = Ear(shared)
    ear.told({"q"})
    ear.go_on()
    assert woken(shared.slots, 1_000.0) == [0]


def test_only_workers_of_the_queue_are_called_and_none_that_is_busy_or_rests(clock: Clock) -> None:
    shared = farm(0, 0, 0, 1)
    shared.slots[0].state, shared.slots[1].state = State.BUSY, State.RESTING
    ear = Ear(shared)
    ear.told({"q"})
    ear.go_on()
    assert woken(shared.slots, 1_000.0) == [2]
    ear.told(None)
    ear.go_on()
    assert woken(shared.slots, 1_000.0) == [2, 3], "nobody knows what a new session has missed"


def test_d7_a_kin_is_called_once_when_the_next_row_is_due_by_its_latest_look(clock: Clock) -> None:
    shared = farm(0, 0)
    ear = Ear(shared)
    shared.slots[0].found_no_job(990.0, 100.0)
    shared.slots[1].found_no_job(999.0, 2.0)
    assert ear.go_on() == pytest.approx(2.0, abs=0.01)
    clock.at = 1_002.1
    ear.go_on()
    assert woken(shared.slots, 1_002.0) == [0]
    for _ in range(5):
        clock.at += 1
        ear.go_on()
    assert woken(shared.slots, 1_002.2) == [], "the due time is past, and all were called once"
    shared.slots[0].found_no_job(clock.at, 1.0)
    clock.at += 1.1
    ear.go_on()
    assert woken(shared.slots, clock.at) == [0]


@pytest.mark.parametrize("left", [None, 3.0])
def test_a_farm_of_a_fleet_wakes_nobody_once_others_have_claimed_the_job(clock: Clock, left: float | None) -> None:
    shared = farm(0, 0, 1)
    looks: list[list[str]] = []

    def look(queues: list[str], _: int) -> Look:
        looks.append(queues)
        return Look(0, left)

    ear = Ear(shared, look)
    ear.beside({"q": 20})
    ear.told({"q"})
    clock.at += 0.04
    assert ear.go_on() == (pytest.approx(left, abs=0.01) if left else math.inf)
    assert (looks, woken(shared.slots, 1_000.0)) == ([["q"]], [])
    clock.at += 3.01
    ear.go_on()
    clock.at += 0.04
    ear.go_on()
    assert looks == [["q"]] * (2 if left else 1), "no worker knows when the next row is due"
    clock.at += 0.01
    shared.slots[0].found_no_job(clock.at, 1.0)
    assert ear.go_on() == pytest.approx(1.0, abs=0.01), "a later claim knows better than an earlier look"


def test_a_farm_alone_wakes_the_first_worker_at_once_and_looks_before_the_next(clock: Clock) -> None:
    shared = farm(0, 0, 0, 0)
    left = [1, 0]
    ear = Ear(shared, lambda *_: Look(left.pop(0), None))
    ear.told({"q"})
    ear.go_on()
    assert (woken(shared.slots, 1_000.0), len(left)) == ([0], 2)
    run(shared.slots[0])
    ear.go_on()
    assert (woken(shared.slots, 1_000.0), len(left)) == ([0, 1], 1)
    run(shared.slots[1])
    ear.go_on()
    assert ear.go_on() == math.inf
    assert (woken(shared.slots, 1_000.0), len(left)) == ([0, 1], 0)


def test_a_farm_of_a_fleet_has_no_more_workers_at_a_claim_than_its_share_of_the_jobs(clock: Clock) -> None:
    shared = farm(*[0] * 8)
    ear = Ear(shared, lambda *_: Look(8, None))
    ear.beside({"q": 4})
    ear.told({"q"})
    clock.at += 1
    for busy, called in ((0, 1), (1, 2), (2, 4), (4, 6), (6, 8)):
        for slot in shared.slots[:busy]:
            run(slot)
        ear.go_on()
        assert woken(shared.slots, 1_000.0) == list(range(called))


def test_workers_whose_runs_are_over_in_no_time_have_found_jobs_too(clock: Clock) -> None:
    shared = farm(*[0] * 4)
    ear = Ear(shared, lambda *_: Look(8, None))
    ear.told({"q"})
    for called in (1, 2, 4):
        ear.go_on()
        assert woken(shared.slots, 1_000.0) == list(range(called))
        for slot in shared.slots[:called]:
            run(slot)
            slot.state = State.AWAKE


def test_a_worker_at_a_claim_looks_once_more_before_an_idle_one_is_woken(clock: Clock) -> None:
    shared = farm(0, 0)
    shared.slots[1].state = State.AWAKE
    shared.slots[1].sends(clock.at)
    ear = Ear(shared)
    ear.told({"q"})
    ear.go_on()
    assert woken(shared.slots, 1_000.0) == [1]


def test_a_worker_that_has_been_awake_for_long_holds_up_nobody(clock: Clock) -> None:
    """A stranger has the row locked whose end it wants to write, or its session is gone."""
    shared = farm(0, 0, 0)
    shared.slots[2].state = State.AWAKE
    shared.slots[2].sends(clock.at - 1)
    ear = Ear(shared, lambda *_: Look(1, None))
    ear.told({"q"})
    ear.go_on()
    assert woken(shared.slots, 1_000.0) == [0]
    run(shared.slots[0])
    ear.go_on()
    assert woken(shared.slots, 1_000.0) == [0, 1]


def test_the_slower_claims_are_the_farther_apart_the_farms_of_a_fleet_begin(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.random, "uniform", lambda least, most: most)
    shared = farm(0, 0)
    ear = Ear(shared)
    ear.beside({"q": 20})
    found = []
    for took in (0.002, 0.002, 0.1, 0.1, 10.0):
        clock.at += 20
        shared.slots[0].sends(clock.at - took)
        shared.slots[0].answered()
        ear.told({"q"})
        found.append(ear.go_on())
        clock.at += 20
        shared.slots[1].found_no_job(clock.at, None)
        ear.go_on()
    assert found == sorted(found)
    assert 2 * 19 * CLAIM_SEC < found[0] < 2 * 19 * 0.002
    assert found[2] > 10 * found[1]
    assert found[-1] == SPREAD_MOST


def test_a_keeper_is_deaf_until_it_has_read_and_again_some_time_after(clock: Clock) -> None:
    shared = farm(0)
    assert shared.is_deaf
    shared.hears()
    assert not shared.is_deaf
    clock.at += DEAF_SEC + 0.01
    assert shared.is_deaf


def test_workers_beyond_the_bells_are_called_without_one(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "BELLS_MOST", 1)
    shared = farm(0, 0)
    assert [slot.bell is None for slot in shared.slots] == [False, True]
    shared.slots[0].state = State.BUSY
    ear = Ear(shared)
    ear.told({"q"})
    ear.go_on()
    assert woken(shared.slots, clock.at) == [1]


def test_a_run_is_asked_for_a_beat_once_and_the_next_run_is_not(clock: Clock) -> None:
    from uuid import uuid4

    (slot,) = farm(0).slots
    slot.claim([uuid4(), uuid4()], [1, 1])
    slot.begin(0, 1, 60.0, clock.at)
    held = slot.held()
    assert held is not None
    slot.ask_for_cancellation(held)
    assert (slot.takes_question(), slot.takes_question()) == (True, False)
    slot.ask_for_cancellation(held)
    slot.end()
    slot.begin(1, 1, 60.0, clock.at)
    assert not slot.takes_question()


def test_of_many_farms_each_begins_at_its_own_instant_and_a_single_one_at_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.random, "uniform", lambda least, most: most)
    shared = farm(0, 0)
    ear = Ear(shared)
    ear.beside({"q": 21})
    ear.told({"q"})
    assert ear.go_on() == pytest.approx(2 * CLAIM_SEC * 20)
    clock.at += 0.035
    ear.told({"q"})
    assert ear.go_on() == pytest.approx(0.005), "later notifications put nothing off"
    clock.at += 0.006
    ear.go_on()
    assert woken(shared.slots, 1_000.0) == [0]
    shared.slots[0].found_no_job(clock.at, None)
    ear.go_on()
    ear.beside({"q": 1})
    clock.at += 1
    ear.told({"q"})
    ear.go_on()
    assert woken(shared.slots, clock.at) == [0]
