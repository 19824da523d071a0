"""process: signals as data, the slots, and the tie between parent and child."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from typing import Any
from uuid import uuid4

import pytest

from dataloader.farm import slots
from dataloader.farm.heartbeat import Lease
from dataloader.farm.process import drain_pipe, now
from dataloader.farm.slots import JOBS_MOST, Reason, SharedSlots, Slot, State, kill_reason, stop_reason
from dataloader.queue.job import Checkpoint, Delivery, End, Job

FAMILY = """
import os, signal, sys, time
from dataloader.farm.process import Signals, fork, unblock_signals
def child():
    signals = Signals((signal.SIGTERM,)); unblock_signals()
    print("child", os.getpid(), flush=True)
    while not signals.received: signals.wait(60)
    print("told", flush=True)
    return 0
fork(child); time.sleep(60)
"""


JOB = Job(uuid4(), "q", "t", "{}", None, "key", "", 1, 5, 60, None, 1, "host:1:a", None)


def busy_slot(fields: dict[str, Any]) -> Slot:
    """A slot whose run began just now, with these fields; instants are relative to now."""
    slot = SharedSlots(1).slots[0]
    slot.take(0)
    slot.grace_sec, slot.silence_sec = 5, 100
    slot.occupy("host:1:a")
    slot.claim([uuid4()], [1])
    slot.begin(0, 1, 60.0, now())
    for name, value in fields.items():
        is_time = name not in ("pid", "state", "canceled", "stall_sec", "ends_stuck")
        setattr(slot, name, now() + value if is_time else value)
    return slot


def test_a_slot_shows_its_claim_only_while_it_is_whole() -> None:
    slot, job = SharedSlots(2).slots[1], uuid4()
    assert slot.held() is None
    slot.take(0)
    slot.claim([job], [3])
    slot.begin(0, 1, 60.0, 5.0)
    held = slot.held()
    assert held is not None
    assert (held.job_ids, held.attempts, held.lease_ttl, held.renewed) == ([job], [3], 60.0, 5.0)
    slot.kept = 7.0
    assert slot.held().renewed == 7.0  # type: ignore[union-attr]
    slot.generation += 1
    assert slot.held() is None
    slot.generation += 1
    slot.state = State.AWAKE
    assert slot.held() is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"drain_by": -1}, Reason.DRAIN),
        ({"drain_by": 9}, None),
        ({"renewed": -50}, None),
        ({"renewed": -60}, Reason.FENCED),
        ({"renewed": -60, "kept": -1}, None),
        ({"renewed": -101, "kept": -1}, Reason.STALLED),
        ({"renewed": -101, "kept": -1, "stall_sec": 110}, None),
        ({"renewed": -111, "kept": -1, "stall_sec": 110}, Reason.STALLED),
        ({"reported_at": -12, "stall_sec": 10}, None),
        ({"reported_at": -12, "stall_sec": 10, "ends_stuck": True}, Reason.STUCK),
        ({"reported_at": -10.5, "stall_sec": 10, "ends_stuck": True}, None),
        ({"reported_at": -12, "stall_sec": 0, "ends_stuck": True}, None),
        ({"reported_at": -12, "stall_sec": 10, "ends_stuck": True, "state": State.IDLE}, None),
        ({"fence_by": -1}, Reason.FENCED),
        ({"fence_by": 1}, None),
        ({"renewed": -60, "pid": 0}, None),
        ({"renewed": -200, "state": State.IDLE}, None),
        ({"timeout_at": -4}, None),
        ({"timeout_at": -6}, Reason.TIMEOUT),
        ({"cancel_at": -6}, None),
        ({"cancel_at": -6, "canceled": 4}, Reason.CANCELED),
        ({"cancel_at": -6, "canceled": 6}, None),
        ({"cancel_at": -6, "canceled": 4, "timeout_at": -7}, Reason.TIMEOUT),
    ],
)
def test_why_a_process_is_killed(fields: dict[str, Any], reason: Reason | None) -> None:
    assert kill_reason(busy_slot(fields)) is reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"drain_by": 6}, None),
        ({"drain_by": 4}, Reason.DRAIN),
        ({"renewed": -54}, None),
        ({"renewed": -56}, Reason.FENCED),
        ({"renewed": -56, "kept": -1}, None),
        ({"renewed": -101, "kept": -1}, None),
        ({"timeout_at": 1}, None),
        ({"timeout_at": -1}, Reason.TIMEOUT),
        ({"cancel_at": -1}, None),
        ({"cancel_at": -1, "canceled": 4}, Reason.CANCELED),
        ({"cancel_at": -1, "canceled": 4, "timeout_at": -2}, Reason.TIMEOUT),
        ({"cancel_at": -1, "canceled": 4, "timeout_at": -2, "drain_by": 2}, Reason.DRAIN),
    ],
)
def test_why_a_run_stops_by_itself(fields: dict[str, Any], reason: Reason | None) -> None:
    assert stop_reason(busy_slot(fields)) is reason


def test_the_earliest_end_of_a_drain_counts() -> None:
    slot = SharedSlots(1).slots[0]
    slot.drain_until(10.0)
    slot.drain_until(5.0)
    slot.drain_until(7.0)
    assert slot.drain_by == 5.0


def test_a_slot_that_is_taken_remembers_nothing() -> None:
    slot = SharedSlots(1).slots[0]
    slot.occupy("host:1:a")
    slot.drain_until(10.0)
    slot.note_empty_claim(5.0, None)
    slot.take(2)
    assert (slot.worker, slot.drain_by, slot.state, slot.kind) == ("", 0, State.STARTING, 2)
    assert slot.empty_claim_at == 0


def test_d6_only_the_first_idle_worker_of_a_queue_answers_at_once() -> None:
    shared = SharedSlots(4)
    for index, slot in enumerate(shared.slots):
        slot.take(index % 2)
        slot.state = State.IDLE
    assert [shared.idle_before(slot) for slot in shared.slots] == [0, 0, 1, 1]
    shared.slots[0].state = State.BUSY
    assert [shared.idle_before(slot) for slot in shared.slots] == [0, 0, 0, 1]


def test_a_recalled_worker_knows_it_after_this_run_and_not_after_the_next() -> None:
    slot = SharedSlots(1).slots[0]
    slot.claim([uuid4() for _ in range(4)], [1] * 4)
    slot.begin(0, 1, 60.0, 5.0, ahead=3)
    held = slot.held()
    assert held is not None
    assert (slot.ahead, slot.is_recalled) == (3, False)
    assert [slot.recall(held), slot.recall(held)] == [False, True]
    slot.state = State.AWAKE
    assert (slot.is_recalled, slot.held()) == (True, None)
    slot.begin(1, 1, 60.0, 6.0)
    assert (slot.is_recalled, slot.ahead) == (False, 0)


def test_a_worker_knows_which_siblings_work_and_which_wait() -> None:
    shared = SharedSlots(300)
    for index, state in enumerate([State.BUSY, State.IDLE, State.AWAKE, State.RESTING, State.DEAD, State.IDLE]):
        shared.slots[index].take(index // 5)
        shared.slots[index].state = state
    assert [shared.siblings(shared.slots[index]) for index in (0, 1, 5)] == [(2, 1), (2, 0), (0, 0)]


def test_an_idle_sibling_wants_jobs_once_it_has_looked_for_them() -> None:
    shared = SharedSlots(4)
    mine, busy, idle, newer = shared.slots
    for slot, reload in ((mine, 0), (busy, 0), (idle, 0), (newer, 1)):
        slot.take(0, reload)
        slot.note_empty_claim(5.0, None)
    newer.state = State.IDLE
    assert not shared.has_empty_claim(mine, 5.0)
    idle.state = State.IDLE
    assert shared.has_empty_claim(mine, 5.0)
    assert not shared.has_empty_claim(mine, 5.1)


@pytest.mark.parametrize(
    ("kin", "sent", "due_in", "answer"),
    [
        ((1, 2), 5.0, None, math.inf),
        ((1, 2), 4.9, None, None),
        ((0, 2), 5.0, None, None),
        ((1, 1), 5.0, None, None),
    ],
)
def test_d6_a_siblings_empty_look_counts_when_it_began_after_the_call(
    kin: tuple[int, int], sent: float, due_in: float | None, answer: float | None
) -> None:
    shared = SharedSlots(2)
    shared.slots[0].take(*kin)
    shared.slots[1].take(1, 2)
    shared.slots[0].note_empty_claim(sent, due_in)
    assert shared.due_by_sibling(shared.slots[1], 5.0) == answer


def test_d7_a_siblings_empty_look_tells_when_the_next_row_is_due() -> None:
    shared = SharedSlots(2)
    before = now()
    shared.slots[0].note_empty_claim(before, 3.0)
    due = shared.due_by_sibling(shared.slots[1], before)
    assert due is not None
    assert before + 3 <= due <= now() + 3


def test_i4_a_child_is_told_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith("child")
        parent.kill()
        assert parent.stdout.readline() == "told\n"


def test_e1_the_memory_of_a_run_that_was_ended_for_it_is_told_although_it_has_freed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = iter([500 << 20, 0])
    monkeypatch.setattr(slots, "memory_used", lambda pid: next(used))
    slot = SharedSlots(1).slots[0]
    slot.take(os.getpid())
    slot.claim([uuid4()], [1])
    slot.begin(0, 1, 60.0, now())
    slot.memory_limit = 400 << 20
    assert kill_reason(slot) is Reason.MEMORY
    assert kill_reason(slot) is None
    assert slot.memory_used == 500 << 20


@pytest.mark.parametrize("closed", [False, True])
def test_a_drained_pipe_tells_whether_a_writer_is_left(closed: bool) -> None:
    read, write = os.pipe2(os.O_NONBLOCK)
    os.write(write, b"...")
    if closed:
        os.close(write)
    assert drain_pipe(read) is not closed
    os.close(read)
    if not closed:
        os.close(write)


def test_i6_i7_a_supervisor_with_a_thread_refuses_to_start() -> None:
    import threading

    from dataloader import config
    from dataloader.farm import supervisor

    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="single-threaded"):
            supervisor.Supervisor(config.load, config.load(), lambda *_: 0, lambda *_: 0).run()
    finally:
        done.set()
        thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_slot_shows_the_jobs_of_a_run_and_those_behind_it() -> None:
    slot, jobs = SharedSlots(1).slots[0], [uuid4() for _ in range(JOBS_MOST)]
    slot.take(0)
    assert slot.begun_last is None
    slot.claim(jobs, range(JOBS_MOST))
    assert (slot.held(), slot.begun_last) == (None, None)
    slot.begin(2, 3, 60.0, 5.0)
    held = slot.held()
    assert held is not None
    assert (held.job_ids, held.attempts, held.job_id) == (jobs[2:5], [2, 3, 4], jobs[2])
    assert (slot.begun_last, slot.waiting, slot.runs) == (jobs[2:5], jobs[5:], 1)
    slot.state = State.AWAKE
    slot.claim(jobs[:1], [7])
    assert (slot.begun_last, slot.waiting) == ([], jobs[:1])


WAKE_UPS = """
import signal, sys
from dataloader.farm.process import Signals
signals = Signals((signal.SIGTERM,))
signal.set_wakeup_fd(-1)         # other code takes the wake-ups
signal.raise_signal(signal.SIGTERM)
if sys.argv[1] == "early":
    signals.take_wake_ups()
signals.wait(600)                # does not wait: the signal has left no byte
assert signals.received == {signal.SIGTERM}
signals.wait(0.01)
signal.raise_signal(signal.SIGTERM)
signals.wait(600)                # the wake-ups are its own again
print("heard")
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_wait_takes_the_wake_ups_back_and_misses_no_signal(when: str) -> None:
    said = subprocess.run([sys.executable, "-c", WAKE_UPS, when], capture_output=True, text=True)
    assert (said.stdout, said.returncode) == ("heard\n", 0), said.stderr


@pytest.mark.parametrize(
    ("stop", "renewed", "reason"),
    [
        (None, -60, None),
        (End.CANCELED, 0, End.CANCELED),
        (End.TIMEOUT, 0, End.TIMEOUT),
        (End.HANDED_BACK, 0, End.HANDED_BACK),
        (End.CANCELED, -60, End.GONE),
        (End.TIMEOUT, -60, End.GONE),
    ],
)
def test_work_elsewhere_is_the_next_runs_once_the_lease_is_over(
    stop: End | None, renewed: float, reason: End | None
) -> None:
    """Also where a cancellation or a time limit has ended the run before, as after the machine's sleep."""
    lease = Lease(Delivery((JOB,)), busy_slot({"renewed": renewed}))
    lease.stop = stop
    assert lease.stop_for_others is reason


def test_a_checkpoint_counts_as_saved_once_the_claim_has_held_behind_its_write() -> None:
    lease = Lease(Delivery((JOB,)), busy_slot({}))
    assert lease.is_saved
    lease.save(checkpoint := Checkpoint('{"at": 1}'))
    lease.written = checkpoint
    assert not lease.is_saved
    lease.confirmed = checkpoint
    assert lease.is_saved
