"""CPU and memory of trees of processes, from /proc."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dataloader.farm.process import descendants


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    return [pid, *descendants(pid)]


def cpu_sec(pids: Iterable[int]) -> float:
    """CPU seconds of living processes, to the nanosecond: stat counts in ticks, too coarse for a thousand backends."""
    return sum(_scheduled(pid) for pid in pids)


def pss_mb(pids: Iterable[int]) -> float:
    """Memory of the processes in MB; a page that several of them share counts once among all who share it."""
    return sum(_pss_kb(pid) for pid in pids) / 1024


def _scheduled(pid: int) -> float:
    with suppress(OSError):
        # Of each thread: /proc/PID/schedstat is the first one's only.
        return sum(
            int((task / "schedstat").read_text().split()[0]) / 1e9 for task in Path(f"/proc/{pid}/task").iterdir()
        )
    return 0.0


def _pss_kb(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0
