"""What this host has for runs, and how much is free: memory, processors, heat. It reads /proc and /sys; no SQL."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from dataloader import periods
from dataloader.config import Settings
from dataloader.farm.process import cpu_used_by, now

MB = 2**20
HEAT_SEC = periods.seconds("HEAT_SEC", 5.0)  # between two looks at the sensors, which take milliseconds
LOAD_SEC = 1.0  # over which processors are measured, at least: the kernel counts in steps of 10 ms
_UNITS = {"MB": 1.0, "GB": 1_024.0}
_NO_LIMIT = 2**60  # bytes; version 1 of cgroups writes its lack of a limit as a number above
_BUSY = (1, 2, 3, 6, 7, 8)  # in a line of /proc/stat: user, nice, system, irq, softirq, and what other guests took
_TICKS = os.sysconf("SC_CLK_TCK")


class Memory(NamedTuple):
    """What a host or a cgroup has, and what is used of it, in MB."""

    total_mb: float
    used_mb: float


class Processors(NamedTuple):
    """How many processors a host or a cgroup may use, and for how many seconds these were busy until now, in all."""

    number: float
    busy_sec: float


class Room(NamedTuple):
    """What the runs of a host may use together, and what of the memory is free; infinity: it is not asked for."""

    bound_mb: float = math.inf
    free_mb: float = math.inf
    cpus: float = math.inf
    is_hot: bool = False


class Load(NamedTuple):
    """How many processors were busy lately: with each worker's process and its children, and with all others."""

    of_workers: Mapping[int, float]
    others: float


class Sample(NamedTuple):
    """The seconds of processors that were used until an instant, in all and by each worker."""

    at: float
    busy_sec: float
    of_workers: Mapping[int, float]


class Host:
    """This host, or the cgroup that this process is in, as the settings let farms use it."""

    def __init__(self, settings: Settings, root: Path = Path("/")) -> None:
        """`root` is the folder with `proc` and `sys`."""
        self._share, self._size_mb = shares(settings.dl_host_memory)
        self._cpu_share = settings.dl_host_cpu / 100
        self._hottest = settings.dl_host_temperature
        self._root = root
        self._heat_at = -math.inf
        self._is_hot = False
        self._sample = Sample(-math.inf, 0.0, {})
        self._load = Load({}, 0.0)

    @property
    def bounds_something(self) -> bool:
        """False where no setting bounds the memory or the processors."""
        return bool(self._share or self._size_mb or self._cpu_share)

    @property
    def bound_mb(self) -> float:
        """What all runs together may use; infinity where DL_HOST_MEMORY is 0."""
        return room_of(self._memories(), self._share, self._size_mb, 0.0)[0]

    def room(self, runs_mb: float) -> Room:
        """The room now, of which runs use `runs_mb`. A DL_HOST_MEMORY in MB or GB is for the runs alone."""
        bound_mb, free_mb = room_of(self._memories(), self._share, self._size_mb, runs_mb)
        cpus = self._cpu_share * processors(self._root).number if self._cpu_share else math.inf
        return Room(bound_mb, free_mb, cpus, self._looks_hot())

    def load(self, workers: Collection[int]) -> Load:
        """The load between two looks that are LOAD_SEC apart or more; none at the first look, and without a bound.

        `workers` are the processes whose runs have room now. What those of the look before have used is theirs too, so
        a run that has ended meanwhile does not count as others.
        """
        if self._cpu_share and now() >= self._sample.at + LOAD_SEC:
            pids = {*workers, *self._sample.of_workers}
            of_workers = {pid: used for pid in pids if (used := cpu_used_by(pid))}
            before, self._sample = self._sample, Sample(now(), processors(self._root).busy_sec, of_workers)
            self._load = load_between(before, self._sample)
        return self._load

    def _memories(self) -> list[Memory]:
        host = psutil.virtual_memory()
        return [Memory(host.total / MB, (host.total - host.available) / MB), *_cgroups(self._root)]

    def _looks_hot(self) -> bool:
        if self._hottest and now() >= self._heat_at + HEAT_SEC:
            self._heat_at = now()
            self._is_hot = _temperature() >= self._hottest
        return self._is_hot


def shares(text: str) -> tuple[float, float]:
    """PURE: the share of the host's memory that DL_HOST_MEMORY names, and the size in MB; one of them is 0."""
    match = re.fullmatch(r"([\d.]+) ?([MG]B)?%?", text)
    assert match  # noqa: S101  the settings are checked
    number, unit = float(match[1]), match[2]
    return (0.0, number * _UNITS[unit]) if unit else (number / 100, 0.0)


def room_of(memories: list[Memory], share: float, size_mb: float, runs_mb: float) -> tuple[float, float]:
    """PURE: the bound and what is free of it, in MB, where the host and its cgroups each have a limit."""
    if size_mb:
        bound_mb = min(size_mb, *(each.total_mb for each in memories), math.inf)
        return bound_mb, bound_mb - runs_mb
    if not share:
        return math.inf, math.inf
    bounds = [share * each.total_mb for each in memories]
    return min(bounds), min(bound - each.used_mb for bound, each in zip(bounds, memories, strict=True))


def load_between(before: Sample, after: Sample) -> Load:
    """PURE: the load between two samples; none after a first one."""
    sec = after.at - before.at
    used = {pid: max(0.0, until - before.of_workers.get(pid, until)) for pid, until in after.of_workers.items()}
    return Load(
        {pid: used_sec / sec for pid, used_sec in used.items()},
        max(0.0, after.busy_sec - before.busy_sec - sum(used.values())) / sec,
    )


def processors(root: Path = Path("/")) -> Processors:
    """The processors that this process may use: those of its affinity, or the quota of its cgroup."""
    return min(_processors(root))


def _processors(root: Path) -> Iterator[Processors]:
    yield Processors(float(len(os.sched_getaffinity(0))), _busy_sec(root / "proc/stat"))
    for folder in _folders(root, ""):
        with suppress(OSError, ValueError, IndexError):
            quota, period = (folder / "cpu.max").read_text().split()
            yield Processors(float(quota) / float(period), _value(folder / "cpu.stat", "usage_usec") / 1e6)
    for folder in _folders(root, "cpu"):
        if (limit := _number(folder / "cpu.cfs_quota_us")) and limit > 0:  # -1: none
            number = limit / (_number(folder / "cpu.cfs_period_us") or 100_000)
            yield Processors(number, (_number(folder / "cpuacct.usage") or 0.0) / 1e9)


def _busy_sec(file: Path) -> float:
    """The seconds for which the processors of this process's affinity were busy since the boot, by /proc/stat."""
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    with suppress(OSError):
        lines = [line.split() for line in file.read_text().splitlines()]
        return sum(int(line[at]) for line in lines if line[0] in names for at in _BUSY) / _TICKS
    return 0.0


def _cgroups(root: Path) -> Iterator[Memory]:
    """The memory of each cgroup that holds this process and has a limit; caches that give way are not used."""
    for folder in _folders(root, ""):
        if limit := _number(folder / "memory.max"):
            yield _memory(folder, limit, "memory.current", "inactive_file")
    for folder in _folders(root, "memory"):
        if limit := _number(folder / "memory.limit_in_bytes"):
            yield _memory(folder, limit, "memory.usage_in_bytes", "total_inactive_file")


def _memory(folder: Path, limit: float, used: str, cached: str) -> Memory:
    is_used = _number(folder / used) or 0.0
    return Memory(limit / MB, max(0.0, is_used - _value(folder / "memory.stat", cached)) / MB)


def _folders(root: Path, controller: str) -> list[Path]:
    """The folders of this process's cgroup and those above; "": of version 2, else of a controller of version 1."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(","):
                top = root / "sys/fs/cgroup" / controller
                own = top / path.strip("/")
                return [own, *(each for each in own.parents if each.is_relative_to(top))] if own != top else [top]
    return []


def _value(file: Path, name: str) -> float:
    """The number behind a name in a file of lines of both; 0 where there is none."""
    with suppress(OSError, ValueError):
        lines = file.read_text().splitlines()
        return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0.0)
    return 0.0


def _number(file: Path) -> float | None:
    """The number of bytes or the like in a file; None where there is none, or where it says that there is no limit."""
    try:
        number = float(file.read_text())
    except (OSError, ValueError):  # "max"
        return None
    return number if number < _NO_LIMIT else None


def _temperature() -> float:
    """The hottest sensor, in degrees Celsius; minus infinity without sensors."""
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError, RuntimeError):
        return -math.inf
    return max((each.current for found in sensors.values() for each in found if each.current), default=-math.inf)
