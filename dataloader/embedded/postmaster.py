"""The process that serves a cluster: its state, its socket, and its end.

The state is read from the server's own file, postmaster.pid. A process id in it counts only while the process of this
id serves the cluster, for another program may have the id by now.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from dataloader.embedded.owner import EmbeddedError

STOP_WITHIN = 60.0  # seconds


def listens_in(data: Path) -> Path | None:
    """The folder of the socket of the server for `data`; None when no server is ready."""
    lines = _pidfile(data)
    return Path(lines[4]) if _ready(lines) and _serving(data) else None


def is_ready(data: Path, pid: int) -> bool:
    """True when the server `pid` accepts connections, by a postmaster.pid of its own."""
    lines = _pidfile(data)
    return _ready(lines) and lines[0] == str(pid)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End our server, which ends its sessions and keeps every commit; the call does nothing after the server's end."""
    # INT is the fast stop; TERM would wait for the last client to leave.
    for sig, within in ((signal.SIGINT, STOP_WITHIN), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0)):
        process.send_signal(sig)
        with suppress(subprocess.TimeoutExpired):
            process.wait(within)
            return


def end_leftover(data: Path) -> None:
    """End the server that a killed owner left for `data`; EmbeddedError when it does not end."""
    deadline = time.monotonic() + STOP_WITHIN
    while pid := _serving(data):
        if time.monotonic() > deadline:
            raise EmbeddedError(f"process {pid} still serves {data}; end it with: kill -INT {pid}")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        time.sleep(0.1)
    lines = _pidfile(data)
    if lines and psutil.pid_exists(int(lines[0])):
        # Another program has the id now, as happens in containers; PostgreSQL would refuse to start.
        (data / "postmaster.pid").unlink(missing_ok=True)


def _serving(data: Path) -> int | None:
    """The id of the process that serves `data`; None when the id in its file belongs to another program."""
    lines = _pidfile(data)
    if not lines:
        return None
    try:
        served = str(data) in psutil.Process(int(lines[0])).cmdline()
    except psutil.Error:
        return None
    return int(lines[0]) if served else None


def _ready(lines: list[str]) -> bool:
    return len(lines) > 7 and lines[7].startswith("ready")


def _pidfile(data: Path) -> list[str]:
    """The lines of postmaster.pid: pid, data, start, port, socket folder, address, shared memory, state."""
    try:
        lines = (data / "postmaster.pid").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return lines if lines and lines[0].isdigit() else []
