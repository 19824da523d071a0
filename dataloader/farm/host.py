"""What this host has for runs, and how much is free: memory, processors, heat. It reads /proc and /sys; no SQL."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from dataloader.config import Settings
from dataloader.farm.process import now

MB = 2**20
HEAT_SEC = 5.0  # between two looks at the sensors, which take milliseconds
_UNITS = {"MB": 1.0, "GB": 1_024.0}
_NO_LIMIT = 2**60  # bytes; version 1 of cgroups writes its lack of a limit as a number above


class Memory(NamedTuple):
    """What a host or a cgroup has, and what is used of it, in MB."""

    total_mb: float
    used_mb: float


class Room(NamedTuple):
    """What the runs of a host may use together, and what of the memory is free; infinity: it is not asked for."""

    bound_mb: float = math.inf
    free_mb: float = math.inf
    cpus: float = math.inf
    is_hot: bool = False


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
        cpus = self._cpu_share * processors(self._root) if self._cpu_share else math.inf
        return Room(bound_mb, free_mb, cpus, self._looks_hot())

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
    found = re.fullmatch(r"([\d.]+) ?([MG]B)?%?", text)
    assert found  # noqa: S101  the settings are checked
    number, unit = float(found[1]), found[2]
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


def processors(root: Path = Path("/")) -> float:
    """How many processors this process may use: those of its affinity, or the quota of its cgroup."""
    quotas = [float(len(os.sched_getaffinity(0)))]
    for folder in _folders(root, ""):
        with suppress(OSError, ValueError, IndexError):
            quota, period = (folder / "cpu.max").read_text().split()
            quotas.append(float(quota) / float(period))
    for folder in _folders(root, "cpu"):
        if (limit := _number(folder / "cpu.cfs_quota_us")) and limit > 0:  # -1: none
            quotas.append(limit / (_number(folder / "cpu.cfs_period_us") or 100_000))
    return min(quotas)


def _cgroups(root: Path) -> Iterator[Memory]:
    """The memory of each cgroup that holds this process and has a limit; caches that give way are not used."""
    for folder in _folders(root, ""):
        if limit := _number(folder / "memory.max"):
            yield _memory(folder, limit, "memory.current", "inactive_file")
    for folder in _folders(root, "memory"):
        if limit := _number(folder / "memory.limit_in_bytes"):
            yield _memory(folder, limit, "memory.usage_in_bytes", "total_inactive_file")


def _memory(folder: Path, limit: float, used: str, cached: str) -> Memory:
    is_used, gives_way = _number(folder / used) or 0.0, 0.0
    with suppress(OSError, ValueError):
        lines = (folder / "memory.stat").read_text().splitlines()
        gives_way = next((float(line.split()[1]) for line in lines if line.startswith(f"{cached} ")), 0.0)
    return Memory(limit / MB, max(0.0, is_used - gives_way) / MB)


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
