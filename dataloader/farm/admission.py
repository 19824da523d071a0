"""Admission: a run begins only while the host has room for it, beside what runs there. No SQL.

The worker asks before each claim which tasks have no room now, and enters a run's needs into its slot before it begins.
Two workers enter one after the other, so they do not both take the last room. Tasks without needs are always admitted,
and a farm that has no others pays nothing. Another farm of the host counts by what it uses, as any other program.
"""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from dataloader import periods
from dataloader.config import Settings
from dataloader.farm.common_log import Busy
from dataloader.farm.process import cpu_used_by, memory_used, now
from dataloader.farm.slots import NONE, Needs, SharedSlots, Slot
from dataloader.queue.lifecycle import LeftOut

MB = 2**20
MEASURED_SEC = 0.25  # how old a measurement may be
POLL_SEC = (0.03, 0.08)  # between the checks of an idle worker; random, so that few workers check at once
LEAST_SHARE = 0.5  # of the processors that a run needs, which the measured load leaves free
CLOSED_SEC = 1.0  # until the next try, where a stopped process is about to enter a run
# After its last refresh a reservation is over: workers with a job that waits claim once a second.
RESERVED_SEC = periods.seconds("RESERVED_SEC", 5.0)
HEAT_SEC = periods.seconds("HEAT_SEC", 5.0)  # between two readings of the sensors, which take milliseconds
LOAD_SEC = 1.0  # over which processors are measured, at least: the kernel counts in steps of 10 ms
_BUSY = (1, 2, 3, 6, 7, 8)  # in a line of /proc/stat: user, nice, system, irq, softirq, and what other guests took
_TICKS = os.sysconf("SC_CLK_TCK")


class Running(NamedTuple):
    """A run under way: what it needs, the memory that its processes use now, and the processors they kept busy."""

    needs: Needs
    used_mb: float
    used_cpus: float = 0.0


class Memory(NamedTuple):
    """The memory of a host or a cgroup, and how much of it is used, in MB."""

    total_mb: float
    used_mb: float


class Processors(NamedTuple):
    """How many processors a host or a cgroup may use, and for how many seconds these were busy until now, in all."""

    number: float
    busy_sec: float


class Room(NamedTuple):
    """The bounds of all runs of a host together, and its free memory; infinity: no bound is set."""

    bound_mb: float = math.inf
    free_mb: float = math.inf
    cpus: float = math.inf
    is_hot: bool = False


class Load(NamedTuple):
    """How many processors were busy lately: with each worker's process and its children, and with all others."""

    of_workers: Mapping[int, float]
    others: float


def fits(needs: Needs, own_mb: float, room: Room, runs: Sequence[Running], others_cpus: float = 0.0) -> bool:
    """PURE: whether the host has room for a run of these needs, in a worker that uses `own_mb` already.

    What the runs under way are still to use counts besides what is in use. `others_cpus` processors are busy elsewhere.
    The load has to leave half of what this run needs: a host is never quite idle. Nothing kills a run with too few
    processors, so the first one begins in any case.
    """
    if room.is_hot or needs.memory_mb > room.bound_mb:
        return False
    growth_mb = max(0.0, needs.memory_mb - own_mb)
    growing_mb = sum(max(0.0, run.needs.memory_mb - run.used_mb) for run in runs)
    has_memory = not needs.memory_mb or growth_mb + growing_mb <= room.free_mb
    if not (has_memory and needs.cpus):
        return has_memory
    needed = sum(run.needs.cpus for run in runs)
    busy = others_cpus + sum(max(run.needs.cpus, run.used_cpus) for run in runs)
    return not needed or (needs.cpus + needed <= room.cpus and needs.cpus * LEAST_SHARE + busy <= room.cpus)


class Admission:
    """Decides which runs one worker may begin, beside the other runs and the other load of the host."""

    def __init__(self, host: Host, shared: SharedSlots, slot: Slot, reserve_sec: float, logger: Any) -> None:
        """`reserve_sec` is the wait of a job until room is reserved for it; 0: never."""
        self._host = host
        self._shared = shared
        self._slot = slot
        self._log = logger
        self._reserve_sec = reserve_sec
        self._first: LeftOut | None = None  # the first job of its queue that lately had no room
        self._since = 0.0  # when a claim passed over it for the first time
        self._needs: Mapping[str, Needs] = {}
        self._room = Room()
        self._used_mb: dict[int, float] = {}  # by process, at the latest measurement
        self._load = Load({}, 0.0)
        self._measured_at = -MEASURED_SEC
        self._measured_state: tuple[object, ...] = ()  # the runs and the reservation at the latest check
        self._closed_until = 0.0  # a process is stopped that was about to enter a run
        self._left_out: frozenset[str] = frozenset()  # the tasks without room at the latest claim that passed jobs over

    def know(self, needs: Mapping[str, Needs]) -> None:
        self._needs = needs if self._host.bounds_something else {}

    def without(self) -> Collection[str]:
        """The tasks that the next claim should pass over, for the host has no room for them now."""
        if not self._needs:
            return ()
        if now() < self._closed_until:
            return list(self._needs)
        # The room of a run that has ended counts at once.
        self._measure(0.0 if self._state() != self._measured_state else MEASURED_SEC)
        self._measured_state, reserved = self._state(), _standing(self._shared.room.read())
        return [task for task, needs in self._needs.items() if not self._has_room(task, needs, reserved)]

    def passed(self, left_out: LeftOut | None, without: Collection[str]) -> None:
        """Note that a claim skipped this job, because these tasks had no room; after `reserve_sec` room is reserved."""
        self._left_out = frozenset(without if left_out else ())
        if left_out != self._first:
            self._first, self._since = left_out, now()
        if left_out is None or not self._reserve_sec or now() < self._since + self._reserve_sec:
            return
        task = left_out.task  # as of now: at the next claim another worker may have begun that job
        needs = self._needs.get(task)
        if needs is None or needs.memory_mb > self._room.bound_mb:
            return
        with suppress(Busy), self._shared.room.changed(must=True) as note:
            reserved = _standing(note)
            if reserved is None:
                self._log.info("worker.room.reserved", task=task, **needs._asdict())
            if reserved is None or reserved[0] == task:  # else another job's stands
                note.update(task=task, needs=needs, until=now() + RESERVED_SEC)

    @property
    def next_check_in(self) -> float:
        """Seconds until an idle worker should check for room, which has no notification; infinity: it does not wait."""
        return random.uniform(*POLL_SEC) if self._left_out else math.inf  # noqa: S311  jitter

    def has_gained_room(self) -> bool:
        """Whether a task that the latest claim skipped has room now, because a run has ended."""
        has_changed = self._state() != self._measured_state
        return bool(self._left_out) and has_changed and not self._left_out <= {*self.without()}

    def enter(self, task: str) -> bool:
        """Claim the room that a run of this task needs; False when there is none any more."""
        if (needs := self._needs.get(task)) is None:
            return True
        try:
            with self._shared.room.changed(must=True) as note:
                self._measure(0.0)
                reserved = _standing(note)
                if not self._has_room(task, needs, reserved):
                    return False
                self._slot.needs = needs
                if reserved and reserved[0] == task:
                    note.clear()
        except Busy:
            self._closed_until = now() + CLOSED_SEC
            return False
        return True

    def leave(self) -> None:
        self._slot.needs = NONE

    def _others(self) -> list[Slot]:
        """The slots of the other workers whose runs have room."""
        return [slot for slot in self._shared.working() if slot.needs != NONE and slot is not self._slot]

    def _state(self) -> tuple[object, ...]:
        """The runs with room, and whose reservation stands."""
        reserved = _standing(self._shared.room.read())
        return *((slot.index, slot.needs) for slot in self._others()), reserved and reserved[0]

    def _measure(self, oldest_sec: float) -> None:
        """Measure the use of the runs, then the free rest: in this order no memory is counted as free twice."""
        if now() < self._measured_at + oldest_sec:
            return
        workers = (os.getpid(), *(slot.pid for slot in self._others()))
        self._used_mb = {pid: memory_used(pid) / MB for pid in workers}
        self._room = self._host.room(sum(self._used_mb.values()))
        self._load = self._host.load(workers)
        self._measured_at = now()

    def _has_room(self, task: str, needs: Needs, reserved: tuple[str, Needs] | None) -> bool:
        used_mb, load = self._used_mb, self._load
        pids = [(slot.needs, slot.pid) for slot in self._others()]
        runs = [Running(of_run, used_mb.get(pid, 0.0), load.of_workers.get(pid, 0.0)) for of_run, pid in pids]
        if reserved and reserved[0] != task:
            runs.append(Running(reserved[1], 0.0))
        return fits(needs, used_mb[os.getpid()], self._room, runs, load.others)


def _standing(note: Mapping[str, Any]) -> tuple[str, Needs] | None:
    """The reservation in the note, unless it is over: the task and the needs of the job."""
    return (note["task"], Needs(*note["needs"])) if now() <= note.get("until", 0.0) else None


def needs_of(
    declared: Mapping[str, tuple[float | None, float | None]], learned: Mapping[str, tuple[float, float]]
) -> dict[str, Needs]:
    """PURE: the needs of all tasks that have some. What a pipeline declares wins over what its runs have shown."""
    by_task = {}
    for task in {*declared, *learned}:
        pairs = zip(declared.get(task, (None, None)), learned.get(task, (0.0, 0.0)), strict=True)
        needs = Needs(*(shown if own is None else own for own, shown in pairs))
        if any(needs):
            by_task[task] = needs
    return by_task


# --- the host ---


class Host:
    """This host, or the cgroup (version 2) that this process is in, as the settings let farms use it."""

    def __init__(self, settings: Settings, root: Path = Path("/")) -> None:
        self._share, self._size_mb = shares(settings.dl_host_memory)
        self._cpu_share = settings.dl_host_cpu / 100
        self.bounds_something = bool(self._share or self._size_mb or self._cpu_share)
        self._hottest = settings.dl_host_temperature
        self._root = root
        self._heat_at = -math.inf
        self._is_hot = False
        # The latest measurement: its time, and the CPU seconds used until then, by each worker and in all.
        self._sample: tuple[float, Mapping[int, float], float] = (-math.inf, {}, 0.0)
        self._load = Load({}, 0.0)

    @property
    def bound_mb(self) -> float:
        """The memory that all runs together may use; infinity if DL_HOST_MEMORY is 0."""
        return room_of(self._memories(), self._share, self._size_mb, 0.0)[0]

    def room(self, runs_mb: float) -> Room:
        """The room now, of which runs use `runs_mb`. A DL_HOST_MEMORY in MB or GB is for the runs alone."""
        if self._hottest and now() >= self._heat_at + HEAT_SEC:
            self._heat_at = now()
            self._is_hot = _temperature() >= self._hottest
        cpus = self._cpu_share * processors(self._root).number if self._cpu_share else math.inf
        return Room(*room_of(self._memories(), self._share, self._size_mb, runs_mb), cpus, self._is_hot)

    def load(self, workers: Collection[int]) -> Load:
        """The load over LOAD_SEC or more; none at the first measurement, and without a bound.

        `workers` are the processes whose runs have room now; those of the previous measurement count too.
        """
        at, before, busy_before = self._sample
        if self._cpu_share and now() >= at + LOAD_SEC:
            used = {pid: used for pid in {*workers, *before} if (used := cpu_used_by(pid))}
            busy_sec = processors(self._root).busy_sec
            self._sample = now(), used, busy_sec
            sec = now() - at
            of_workers = {pid: max(0.0, until - before.get(pid, until)) for pid, until in used.items()}
            others_sec = max(0.0, busy_sec - busy_before - sum(of_workers.values()))
            self._load = Load({pid: used_sec / sec for pid, used_sec in of_workers.items()}, others_sec / sec)
        return self._load

    def _memories(self) -> list[Memory]:
        host = psutil.virtual_memory()
        memories = [Memory(host.total / MB, (host.total - host.available) / MB)]
        for folder in _cgroup(self._root):
            with suppress(OSError, ValueError):  # "max"
                limit = float((folder / "memory.max").read_text())
                used = float((folder / "memory.current").read_text())
                cached = _value(folder / "memory.stat", "inactive_file")  # which gives way
                memories.append(Memory(limit / MB, max(0.0, used - cached) / MB))
        return memories


def shares(text: str) -> tuple[float, float]:
    """PURE: the share of the host's memory that DL_HOST_MEMORY names, and the size in MB; one of them is 0."""
    match = re.fullmatch(r"([\d.]+) ?([MG]B)?%?", text)
    assert match  # noqa: S101  the settings are checked
    number, unit = float(match[1]), match[2]
    return (0.0, number * (1_024 if unit == "GB" else 1)) if unit else (number / 100, 0.0)


def room_of(memories: list[Memory], share: float, size_mb: float, runs_mb: float) -> tuple[float, float]:
    """PURE: the bound and what is free of it, in MB, where the host and its cgroups each have a limit."""
    if size_mb:
        bound_mb = min(size_mb, *(each.total_mb for each in memories))
        return bound_mb, bound_mb - runs_mb
    if not share:
        return math.inf, math.inf
    return min(share * each.total_mb for each in memories), min(
        share * each.total_mb - each.used_mb for each in memories
    )


def processors(root: Path = Path("/")) -> Processors:
    """The processors that this process may use: those of its affinity, or the quota of its cgroup."""
    own = os.sched_getaffinity(0)
    names, busy_sec = {f"cpu{number}" for number in own}, 0.0
    with suppress(OSError):
        lines = [line.split() for line in (root / "proc/stat").read_text().splitlines()]
        busy_sec = sum(int(line[at]) for line in lines if line[0] in names for at in _BUSY) / _TICKS
    least = Processors(float(len(own)), busy_sec)
    for folder in _cgroup(root):
        with suppress(OSError, ValueError):  # "max"
            quota, period = (folder / "cpu.max").read_text().split()
            used_sec = _value(folder / "cpu.stat", "usage_usec") / 1e6
            least = min(least, Processors(float(quota) / float(period), used_sec))
    return least


def _cgroup(root: Path) -> Iterator[Path]:
    """The folders of this process's cgroup and those above, each of which may have a limit."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                top = root / "sys/fs/cgroup"
                own = top / line[3:].strip("/")
                yield from (each for each in (own, *own.parents) if each.is_relative_to(top))


def _value(file: Path, name: str) -> float:
    """The number behind a name in a file of lines of both; 0 where there is none."""
    with suppress(OSError, ValueError):
        lines = file.read_text().splitlines()
        return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0.0)
    return 0.0


def _temperature() -> float:
    """The hottest sensor, in degrees Celsius; minus infinity without sensors."""
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError, RuntimeError):
        return -math.inf
    return max((each.current for readings in sensors.values() for each in readings if each.current), default=-math.inf)
