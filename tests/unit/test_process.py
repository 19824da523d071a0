"""process: signals as data, the slots, and the tie between parent and child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any
from uuid import uuid4

import pytest

from dataloader.farm import slots
from dataloader.farm.heartbeat import Lease
from dataloader.farm.process import now
from dataloader.farm.slots import Reason, SharedSlots, Slot, State, kill_reason, stop_reason
from dataloader.queue.job import Delivery, End, Job

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


def test_i4_a_child_is_told_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True) as parent:
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
