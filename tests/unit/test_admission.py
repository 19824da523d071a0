"""Which runs a host has room for, what a host has, and for how long a job is passed over."""

import math
import os
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from dataloader import config
from dataloader.farm import admission, process
from dataloader.farm.admission import (
    Admission,
    Host,
    Load,
    Memory,
    Needs,
    Processors,
    Room,
    Running,
    fits,
    needs_of,
    processors,
    room_of,
    shares,
)
from dataloader.farm.slots import SharedSlots, State
from dataloader.queue.lifecycle import LeftOut

OTHERS = os.getppid()  # a process that lives as long as this one
BIG, SMALL = "big", "small"


class Place:
    """A host with 1,000 MB and two processors, which are free."""

    bounds_something = True

    def room(self, runs_mb: float) -> Room:
        return Room(1_000, 1_000, 2)

    def load(self, workers: Collection[int]) -> Load:
        return Load({}, 0.0)


@pytest.fixture
def shared() -> SharedSlots:
    """The slots of two workers, the first is this process."""
    made = SharedSlots(3)
    for slot, pid in zip(made.slots[:2], (os.getpid(), OTHERS), strict=True):
        slot.take(0)
        slot.state, slot.pid = State.BUSY, pid
    return made


@pytest.fixture
def admitted(shared: SharedSlots, monkeypatch: pytest.MonkeyPatch) -> Admission:
    """The admission of a worker that has passed over its first job for long enough at once."""
    monkeypatch.setattr(admission, "memory_used", lambda pid: 0)  # pytest's own grows from test to test
    made = admission_of(shared, 1e-9)
    made.know({BIG: Needs(900), SMALL: Needs(300), "cores": Needs(cpus=2)})
    return made


def admission_of(shared: SharedSlots, patience_sec: float) -> Admission:
    return Admission(Place(), shared, shared.slots[0], patience_sec, structlog.get_logger())  # type: ignore[arg-type]


def reserved(shared: SharedSlots) -> Any:
    return shared.room.read().get("task")


def left_out(task: str) -> LeftOut:
    return LeftOut(task, datetime(2026, 1, 1, tzinfo=UTC))


FREE = Room(1_000, 1_000, 2)


@pytest.mark.parametrize(
    ("needs", "own_mb", "room", "runs", "others_cpus", "is_admitted"),
    [
        (Needs(100), 0, Room(1_000, 100), [], 0, True),
        (Needs(101), 0, Room(1_000, 100), [], 0, False),
        (Needs(150), 60, Room(1_000, 100), [], 0, True),  # the worker has 60 of them already
        (Needs(100), 0, Room(1_000, 300), [Running(Needs(250), 50)], 0, True),  # which grows by 200 yet
        (Needs(101), 0, Room(1_000, 300), [Running(Needs(250), 50)], 0, False),
        (Needs(100), 0, Room(1_000, 100), [Running(Needs(250), 400)], 0, True),  # more than it said: not free any more
        (Needs(1_001), 1_001, Room(1_000, 1_000), [], 0, False),  # never
        (Needs(0, 1), 0, Room(1_000, -5, 2), [Running(Needs(0, 1), 0)], 0, True),
        (Needs(0, 1.5), 0, Room(1_000, 1_000, 2), [Running(Needs(0, 1), 0)], 0, False),
        (Needs(0, 64), 0, Room(1_000, 1_000, 2), [], 0, True),  # slow, and it takes them all
        (Needs(0, 64), 0, Room(1_000, 1_000, 2), [Running(Needs(0, 1), 0)], 0, False),
        (Needs(1, 1), 0, Room(is_hot=True), [], 0, False),
        (Needs(10**6, 64), 0, Room(), [Running(Needs(10**6, 64), 0)], 0, True),  # nothing is bounded
        (Needs(0, 1), 0, FREE, [Running(Needs(0, 1), 0)], 0, True),
        (Needs(0, 1), 0, FREE, [Running(Needs(0, 1), 0)], 0.5, True),  # half of what it needs is free
        (Needs(0, 1), 0, FREE, [Running(Needs(0, 1), 0)], 0.6, False),
        (Needs(0, 1), 0, FREE, [Running(Needs(0, 1), 0, 1.6)], 0, False),  # it takes more than it said
        (Needs(0, 1), 0, FREE, [Running(Needs(0, 1), 0, 0.1)], 0.6, False),  # it is still to take what it said
        (Needs(0, 1), 0, FREE, [Running(Needs(0, 1), 0), Running(Needs(100), 100, 0.6)], 0, False),
        (Needs(0, 1), 0, FREE, [Running(Needs(100), 100, 2)], 2, True),  # the first run with such a need
        (Needs(100, 0), 0, FREE, [Running(Needs(0, 2), 0, 2)], 2, True),  # it says nothing of processors
    ],
)
def test_a_run_fits_beside_what_runs_and_what_that_is_still_to_use_and_what_others_keep_busy(
    needs: Needs, own_mb: float, room: Room, runs: list[Running], others_cpus: float, is_admitted: bool
) -> None:
    assert fits(needs, own_mb, room, runs, others_cpus) is is_admitted


@pytest.mark.parametrize(
    ("memories", "share", "size_mb", "room"),
    [
        ([Memory(1_000, 300)], 0.85, 0, (850, 550)),
        ([Memory(1_000, 300), Memory(400, 100)], 0.5, 0, (200, 100)),  # the cgroup has less
        ([Memory(1_000, 480), Memory(900, 100)], 0.5, 0, (450, 20)),  # the host has less left
        ([Memory(1_000, 900)], 0, 600, (600, 500)),  # for the runs alone, which use 100
        ([Memory(1_000, 900), Memory(400, 1)], 0, 600, (400, 300)),
        ([Memory(1_000, 900)], 0, 0, (math.inf, math.inf)),
    ],
)
def test_the_tightest_limit_counts(
    memories: list[Memory], share: float, size_mb: float, room: tuple[float, float]
) -> None:
    assert room_of(memories, share, size_mb, 100) == room


@pytest.mark.parametrize(
    ("text", "found"),
    [("85", (0.85, 0)), ("85%", (0.85, 0)), ("0", (0, 0)), ("600MB", (0, 600)), ("1.5 GB", (0, 1_536))],
)
def test_the_memory_is_a_share_or_a_size(text: str, found: tuple[float, float]) -> None:
    assert shares(config.load(dl_host_memory=text).dl_host_memory) == pytest.approx(found)


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        file = root / name.replace("__", "/").replace("_DOT_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_a_cgroup_bounds_the_memory_and_the_processors(tmp_path: Path) -> None:
    """The limit may stand in a folder above the process's own; a cache that gives way is not used."""
    top = "sys__fs__cgroup__farm__"
    write(tmp_path, proc__self__cgroup="0::/farm/worker\n", sys__fs__cgroup__farm__worker__memory_DOT_max="max\n")
    write(tmp_path, **{f"{top}memory_DOT_max": f"{200 * 2**20}\n", f"{top}memory_DOT_current": f"{90 * 2**20}\n"})
    write(tmp_path, **{f"{top}memory_DOT_stat": f"anon 1\ninactive_file {40 * 2**20}\n"})
    write(tmp_path, **{f"{top}cpu_DOT_max": "50000 100000\n"})
    settings = config.load(dl_host_memory="50", dl_host_cpu=100, dl_host_temperature=0)
    assert Host(settings, tmp_path).room(0) == Room(100, 50, 0.5)
    write(tmp_path, **{f"{top}cpu_DOT_stat": "usage_usec 2500000\nuser_usec 1\n"})
    assert processors(tmp_path) == Processors(0.5, 2.5)


def test_without_a_limit_the_host_itself_counts(tmp_path: Path) -> None:
    write(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__memory_DOT_max="max\n")
    assert processors(tmp_path).number == len(os.sched_getaffinity(0))
    bound = Host(config.load(dl_host_memory="50", dl_host_temperature=0), tmp_path).bound_mb
    assert bound == pytest.approx(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE") / 2**21, rel=0.01)


def test_the_host_counts_what_its_processors_were_busy_with(tmp_path: Path) -> None:
    """But not the idle time, that for input and output, and the guests' time, which the users' holds already."""
    ticks = os.sysconf("SC_CLK_TCK")
    first, *others = sorted(os.sched_getaffinity(0))
    lines = [f"cpu{number} {ticks} {ticks} {ticks} 999 999 {ticks} {ticks} {ticks} 999 999" for number in (first, 999)]
    write(tmp_path, proc__stat="\n".join(["cpu  9 9 9", *lines, *(f"cpu{each}" + " 0" * 10 for each in others)]))
    assert processors(tmp_path).busy_sec == 6


def test_the_load_is_measured_over_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a run which has ended meanwhile; and no load is measured where nothing bounds the processors."""
    at, used = [100.0], {1: 10.0, 2: 5.0}
    monkeypatch.setattr(admission, "now", lambda: at[0])
    monkeypatch.setattr(admission, "cpu_used_by", lambda pid: used.get(pid, 0.0))
    monkeypatch.setattr(admission, "processors", lambda root: Processors(2, at[0] * 1.5))
    host = Host(config.load(dl_host_temperature=0))
    assert host.load([1, 2]) == Load({1: 0, 2: 0}, 0)
    at[0], used[1] = 100.9, 10.5
    assert host.load([1, 2]) == Load({1: 0, 2: 0}, 0)
    at[0], used[1] = 102.0, 12.0
    assert host.load([2]) == Load({1: 1, 2: 0}, 0.5)
    del used[1]
    at[0] = 104.0
    assert host.load([2]) == Load({2: 0}, 1.5)
    assert Host(config.load(dl_host_cpu=0)).load([1]) == Load({}, 0)


def test_a_hot_host_admits_no_run_with_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    heat = SimpleNamespace(current=85.0)
    monkeypatch.setattr("psutil.sensors_temperatures", lambda: {"cpu": [heat, SimpleNamespace(current=20.0)]})
    assert Host(config.load(), tmp_path).room(0).is_hot
    assert not Host(config.load(dl_host_temperature=0), tmp_path).room(0).is_hot
    assert not Host(config.load(dl_host_temperature=86), tmp_path).room(0).is_hot
    monkeypatch.setattr("psutil.sensors_temperatures", dict)
    assert not Host(config.load(), tmp_path).room(0).is_hot


def test_what_is_declared_wins_over_what_was_learned() -> None:
    declared = {"a": (400.0, None), "b": (None, None), "c": (0.0, 0.0), "d": (None, None)}
    learned = {"a": (200.0, 3.0), "b": (300.0, 0.0), "c": (500.0, 4.0), "elsewhere": (700.0, 0.0)}
    assert needs_of(declared, learned) == {
        "a": Needs(400, 3),
        "b": Needs(300, 0),
        "elsewhere": Needs(700, 0),
    }


def test_room_gathers_once_one_job_was_passed_over_for_long_enough(
    shared: SharedSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, next_job = [1_000.0], LeftOut(BIG, datetime(2026, 1, 2, tzinfo=UTC))
    monkeypatch.setattr(admission, "now", lambda: at[0])
    monkeypatch.setattr(admission, "memory_used", lambda pid: 0)
    made, never = admission_of(shared, 60), admission_of(shared, 0)
    for each in (made, never):
        each.know({BIG: Needs(900)})
    for later, left in ((0, left_out(BIG)), (59, left_out(BIG)), (0, next_job), (59, next_job)):
        at[0] += later
        made.passed(left, [BIG])
        assert reserved(shared) is None
    for _ in range(2):
        never.passed(left_out(BIG), [BIG])
        at[0] += 600
    assert reserved(shared) is None
    made.passed(next_job, [BIG])
    assert reserved(shared) == BIG


def test_no_run_enters_while_another_process_does(admitted: Admission, shared: SharedSlots) -> None:
    """It may be stopped in the midst of that: no worker claims such jobs again and again meanwhile."""
    ready, over = os.pipe(), os.pipe()

    def enters() -> int:
        with shared.room.changed():
            os.write(ready[1], b".")
            os.read(over[0], 1)
        return 0

    child = process.fork(enters)
    os.read(ready[0], 1)
    assert not admitted.enter(SMALL)
    assert [*admitted.without()] == [BIG, SMALL, "cores"]
    os.write(over[1], b".")
    os.waitpid(child, 0)
    assert admitted.enter(SMALL)


def test_a_reservation_of_others_stands_until_it_is_over(admitted: Admission, shared: SharedSlots) -> None:
    with shared.room.changed() as note:
        note.update(task="theirs", needs=[990, 0], until=admission.now() + 60)
    assert [*admitted.without()] == [BIG, SMALL]
    admitted.passed(left_out(BIG), [BIG])
    assert reserved(shared) == "theirs"
    with shared.room.changed() as note:
        note["until"] = admission.now() - 1
    admitted.passed(left_out(BIG), [BIG])
    assert reserved(shared) == BIG
