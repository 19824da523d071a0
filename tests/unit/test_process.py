"""The farm's processes: slots, signals, names, the database's uptime, what several of them would log."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
import structlog
from claimed import delivery
from structlog.testing import capture_logs

from dataloader.farm import common_log, slots
from dataloader.farm import process as identity
from dataloader.farm.common_log import FarmOutage, Note
from dataloader.farm.heartbeat import Lease
from dataloader.farm.process import boot, hostname, is_gone, own_name, started
from dataloader.farm.reaper import GAP_SEC, JUMP_SEC, SILENCE_SEC, Uptime
from dataloader.farm.slots import Reason, SharedSlots, Slot, State, kill_reason, stop_reason
from dataloader.queue.job import End


def test_a_process_whose_facts_cannot_be_read_counts_as_alive() -> None:
    """A keeper without a free descriptor does not take living workers for dead ones, and renews their leases."""
    me, name, limits = os.getpid(), own_name(), resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        facts = identity.is_running(me), identity.is_stopped(me), started(me) is None, identity.started_at(me)
        gone = is_gone(name)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (facts, gone) == ((True, False, False, None), False)


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of slots stands still, so that a busy machine reaches no deadline of a test."""
    at = slots.now()
    monkeypatch.setattr(slots, "now", lambda: at)


def busy_slot(fields: dict[str, Any]) -> Slot:
    """A slot whose run began just now, with these fields; instants are relative to now."""
    slot = SharedSlots(1).slots[0]
    slot.take(0)
    slot.grace_sec, slot.silence_sec = 5, 100
    slot.occupy("host:1:a")
    slot.claim([uuid4()], [1])
    slot.begin(0, 1, 60.0, slots.now())
    for name, value in fields.items():
        is_time = name not in ("pid", "state", "canceled", "stall_sec", "ends_stuck")
        setattr(slot, name, slots.now() + value if is_time else value)
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
    ("decide", "fields", "reason"),
    [
        (kill_reason, {}, None),
        (kill_reason, {"drain_by": -1}, Reason.DRAIN),
        (kill_reason, {"drain_by": 9}, None),
        (kill_reason, {"renewed": -50}, None),
        (kill_reason, {"renewed": -60}, Reason.FENCED),
        (kill_reason, {"renewed": -60, "kept": -1}, None),
        (kill_reason, {"renewed": -101, "kept": -1}, Reason.STALLED),
        (kill_reason, {"renewed": -101, "kept": -1, "stall_sec": 110}, None),
        (kill_reason, {"renewed": -111, "kept": -1, "stall_sec": 110}, Reason.STALLED),
        (kill_reason, {"reported_at": -12, "stall_sec": 10}, None),
        (kill_reason, {"reported_at": -12, "stall_sec": 10, "ends_stuck": True}, Reason.STUCK),
        (kill_reason, {"reported_at": -10.5, "stall_sec": 10, "ends_stuck": True}, None),
        (kill_reason, {"reported_at": -12, "stall_sec": 0, "ends_stuck": True}, None),
        (kill_reason, {"reported_at": -12, "stall_sec": 10, "ends_stuck": True, "state": State.IDLE}, None),
        (kill_reason, {"fence_by": -1}, Reason.FENCED),
        (kill_reason, {"fence_by": 1}, None),
        (kill_reason, {"renewed": -60, "pid": 0}, None),
        (kill_reason, {"renewed": -200, "state": State.IDLE}, None),
        (kill_reason, {"timeout_at": -4}, None),
        (kill_reason, {"timeout_at": -6}, Reason.TIMEOUT),
        (kill_reason, {"cancel_at": -6}, None),
        (kill_reason, {"cancel_at": -6, "canceled": 4}, Reason.CANCELED),
        (kill_reason, {"cancel_at": -6, "canceled": 6}, None),
        (kill_reason, {"cancel_at": -6, "canceled": 4, "timeout_at": -7}, Reason.TIMEOUT),
        (stop_reason, {}, None),
        (stop_reason, {"drain_by": 6}, None),
        (stop_reason, {"drain_by": 4}, Reason.DRAIN),
        (stop_reason, {"renewed": -54}, None),
        (stop_reason, {"renewed": -56}, Reason.FENCED),
        (stop_reason, {"renewed": -56, "kept": -1}, None),
        (stop_reason, {"renewed": -101, "kept": -1}, None),
        (stop_reason, {"timeout_at": 1}, None),
        (stop_reason, {"timeout_at": -1}, Reason.TIMEOUT),
        (stop_reason, {"cancel_at": -1}, None),
        (stop_reason, {"cancel_at": -1, "canceled": 4}, Reason.CANCELED),
        (stop_reason, {"cancel_at": -1, "canceled": 4, "timeout_at": -2}, Reason.TIMEOUT),
        (stop_reason, {"cancel_at": -1, "canceled": 4, "timeout_at": -2, "drain_by": 2}, Reason.DRAIN),
    ],
)
@pytest.mark.usefixtures("still")
def test_why_a_process_is_killed_and_why_a_run_stops_by_itself(
    decide: Callable[[Slot], Reason | None], fields: dict[str, Any], reason: Reason | None
) -> None:
    assert decide(busy_slot(fields)) is reason


def test_e1_the_memory_of_a_run_that_was_ended_for_it_is_told_although_it_has_freed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = iter([500 << 20, 0])
    monkeypatch.setattr(slots, "memory_used", lambda pid: next(used))
    slot = SharedSlots(1).slots[0]
    slot.take(os.getpid())
    slot.claim([uuid4()], [1])
    slot.begin(0, 1, 60.0, slots.now())
    slot.memory_limit = 400 << 20
    assert kill_reason(slot) is Reason.MEMORY
    assert kill_reason(slot) is None
    assert slot.memory_used == 500 << 20


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
    lease = Lease(delivery(), busy_slot({"renewed": renewed}))
    lease.stop = stop
    assert lease.stop_for_others is reason


NAME = "from dataloader.farm.process import own_name; print(own_name(), flush=True)"


@pytest.fixture(scope="module")
def dead() -> str:
    """The name of a process that has ended, and so has its parent."""
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {NAME!r}])"
    done = subprocess.run([sys.executable, "-c", nested], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_process_that_has_ended_is_gone_unless_its_supervisor_lives(dead: str) -> None:
    """A worker whose supervisor lives is left to its keeper; a stopped process lives, and a zombie does not."""
    child = subprocess.run([sys.executable, "-c", NAME], capture_output=True, text=True, check=True).stdout.strip()
    assert [is_gone(name) for name in (dead, own_name(), child)] == [True, False, False]
    stopped = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = f"{hostname()}:{stopped.pid}:{boot()}-{started(stopped.pid)}-{stopped.pid}-{started(stopped.pid)}"
    stopped.send_signal(signal.SIGSTOP)
    assert not is_gone(name)
    stopped.kill()
    os.waitid(os.P_PID, stopped.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(name)
    stopped.communicate()


def test_a_dead_child_counts_until_it_is_buried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's cost misses a child's CPU otherwise, where the child dies between the two looks at it."""
    others = identity.children(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.kill()
    with monkeypatch.context() as at_the_first_look:
        at_the_first_look.setattr(os, "waitpid", lambda pid, options: (0, 0))
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert identity.strays((), others) == [child.pid]
    assert identity.strays((), others) == []
    child.communicate()


@pytest.mark.parametrize(
    "changed",
    [
        lambda name: name.replace(hostname(), "other"),
        lambda name: name.replace(boot(), "0" * 12),
        lambda name: name.replace(f"{boot()}-", "-"),
        lambda name: f"{hostname()}:4194300:0123456789ab",  # of a plain worker, or of an older one
        lambda name: f"{name}-1",
        lambda name: "",
        lambda name: "x" * 200,
    ],
)
def test_what_is_not_proved_is_not_gone(dead: str, changed: Callable[[str], str]) -> None:
    assert not is_gone(changed(dead))


def test_a_host_that_hides_its_boot_proves_nothing(dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "boot", lambda: "")
    assert not is_gone(dead.replace(boot(), ""))


CLOCK = 1_900_000_000.0  # the database's clock, when ours shows 0


def asked(uptime: Uptime, at: float, ahead: float = CLOCK, age: float = 1e6, took: float = 0.0) -> float:
    """The result when the database answers at the instant `at` of our clock, with a clock `ahead` of ours."""
    return uptime.answered(at - took, at, at + ahead, age)


def test_a_server_has_been_there_since_its_start_or_its_return() -> None:
    uptime = Uptime()
    assert (asked(uptime, 100, age=5_000), asked(uptime, 110, age=3)) == (5_000, 3)
    uptime.lost(120)
    uptime.lost(129)
    assert [asked(uptime, 130), asked(uptime, 137)] == [0, 7]
    uptime.lost(140)
    uptime.is_there(144)
    assert asked(uptime, 150) == 6, "the absence ends with the first answer"


def test_a_session_that_was_ended_and_replaced_at_once_is_no_outage() -> None:
    uptime = Uptime()
    asked(uptime, 100)
    for at in range(110, 200):
        uptime.lost(at)
        uptime.is_there(at + GAP_SEC / 2)
        uptime.lost(at + GAP_SEC)
        assert asked(uptime, at + 1.5 * GAP_SEC, took=0.1) > 1_000


def test_a_silence_and_a_clock_that_jumps_forwards_are_outages_and_a_slow_answer_is_none() -> None:
    uptime = Uptime()
    asked(uptime, 100)
    assert asked(uptime, 120, took=SILENCE_SEC - 1) > 1_000
    assert asked(uptime, 140, took=SILENCE_SEC + 1) == 0
    jumps = Uptime()
    asked(jumps, 100)
    assert asked(jumps, 110, ahead=CLOCK + JUMP_SEC - 0.1) > 1_000
    assert asked(jumps, 120, ahead=CLOCK + 3_600, age=3_700) == 0
    assert asked(jumps, 130, ahead=CLOCK + 3_600, age=3_710) == 10


def test_neither_a_clock_that_is_set_back_nor_an_answer_that_was_late_looks_like_a_jump() -> None:
    uptime = Uptime()
    asked(uptime, 100)
    assert asked(uptime, 110, ahead=CLOCK - 3_600, age=-5) > 1_000, "it was not started in the future"
    uptime.answered(130, 134, 134 + CLOCK - 3_600, 1e6)  # the database had waited before it read its clock
    assert asked(uptime, 140, ahead=CLOCK - 3_600) > 1_000
    uptime.answered(150, 154, 150 + CLOCK - 3_600, 1e6)  # or its answer was late
    assert asked(uptime, 160, ahead=CLOCK - 3_600) > 1_000


LOST, BACK = "farm.database.lost", "farm.database.back"
ERROR = ConnectionError("no database")


def as_process(action: Callable[[], object]) -> list[str]:
    """Carry out the action in a process of its own; the events that it has logged, but for debug lines."""
    read, write = os.pipe()

    def child() -> int:
        with capture_logs() as logs:
            action()
        os.write(write, " ".join(line["event"] for line in logs if line["log_level"] != "debug").encode())
        return 0

    pid = identity.fork(child)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as pipe:
        return pipe.read().split()


def outage(note: Note) -> FarmOutage:
    return FarmOutage(note, structlog.get_logger("test"))


def test_a_loss_that_lasts_is_told_again_and_a_relapse_of_a_moment_is_the_same_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1_000.0]
    monkeypatch.setattr(common_log, "now", lambda: clock[0])
    mine = outage(Note())
    with capture_logs() as logs:
        for clock[0] in (1_000.0, 1_010.0, 1_029.0, 1_031.0, 1_040.0, 1_062.0):
            mine.failed("worker.session.lost", ERROR)
        mine.ended()
        for clock[0] in (1_063.0, 1_090.0):
            mine.failed("worker.session.lost", ERROR)
            mine.ended()
    told = [line for line in logs if line["log_level"] != "debug"]
    assert [line["event"] for line in told] == [LOST, LOST, LOST, BACK, LOST, BACK]
    lost = [(line.get("failures"), line.get("lasting_sec")) for line in told if line["event"] == LOST]
    assert lost == [(None, None), (4, 31), (6, 62), (None, None)]


def test_a_note_whose_writer_was_killed_in_the_middle_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(file: int, length: int) -> None:
        raise InterruptedError

    note = Note()
    with note.changed() as content:
        content.update(text="long " * 20)
    with monkeypatch.context() as broken:
        broken.setattr(os, "ftruncate", killed)
        with pytest.raises(InterruptedError), note.changed() as content:
            content.update(text="short")
    assert as_process(lambda: outage(note).failed("worker.claim.failed", ERROR)) == [LOST]


LATE = """
import os, signal
from dataloader.farm.process import Signals

class Late:  # Python calls this when it has given the signals back, at the end of a program
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

late, signals = Late(), Signals((signal.SIGTERM,))
{}
"""


@pytest.mark.parametrize(("end", "code"), [("signals.ignore()", 0), ("", -signal.SIGTERM)])
def test_an_order_at_the_end_of_a_program_does_not_kill_it(end: str, code: int) -> None:
    assert subprocess.run([sys.executable, "-c", LATE.format(end)], check=False).returncode == code
