"""The CPU time of processes, in nanoseconds: those of a farm, and those of the server where it is on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from dataloader.queue import db

Clock = Callable[[], float]  # CPU seconds so far


def of_server(conn: db.Connection) -> Clock | None:
    """The clock of all processes of the session's server; None where they are not on this machine.

    A container shows the numbers of its own processes, so the process must look like the session's.
    """
    try:
        backend = psutil.Process(conn.info.backend_pid)
        postmaster = backend.parent()
        if postmaster is None or not any("postgres" in part for part in backend.cmdline()):
            return None
    except psutil.Error:
        return None
    return lambda: of_processes([postmaster, *postmaster.children()]) + _of_the_dead(postmaster)


def of_processes(processes: Iterable[psutil.Process]) -> float:
    """The CPU seconds of these processes, of those that still live."""
    return sum(_seconds(process) for process in processes)


def _seconds(process: psutil.Process) -> float:
    """By the scheduler's count of each thread: /proc/PID/stat counts in 1/100 s, too roughly for many sessions."""
    with suppress(OSError, ValueError):
        threads = Path(f"/proc/{process.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text("ascii").split()[0]) for thread in threads) / 1e9
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _of_the_dead(postmaster: psutil.Process) -> float:
    times = postmaster.cpu_times()
    return float(times.children_user + times.children_system)
