"""A program as a process group of its own, which ends with its run, however that ends.

The run's end closes it: SIGTERM to the group, and SIGKILL after GRACE_SEC. When the worker dies, the kernel kills the
program (launch), and the farm kills what the program has started.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dataloader.pipelines.command import launch
from dataloader.pipelines.command.output import Output

GRACE_SEC = 2.0  # less than DL_KILL_GRACE_SEC, after which the farm kills the worker
_PIECE = 2**16
_PIECES_LEFT = 16  # a pipe holds less; a process that has left the group could write for ever


class Program:
    """One program that runs; its output goes to `output`."""

    def __init__(
        self, argv: Sequence[str], env: dict[str, str], folder: Path, memory_mb: int | None, output: Output
    ) -> None:
        """Start it without a shell. Each of its processes may have `memory_mb` of address space; None: any."""
        self._output = output
        limits = [str(os.getpid()), str((memory_mb or 0) * 2**20)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", launch.__file__, *limits, *argv],
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None  # noqa: S101  it is a pipe
        self._pipe = self._process.stdout.fileno()
        os.set_blocking(self._pipe, False)
        self._is_at_end = False

    def look(self, within: float) -> int | None:
        """Take what the program writes within so many seconds, or until it ends.

        Returns its exit code, or the negative number of its signal; None: it goes on.
        """
        self._read(within)
        if not self._has_ended():
            return None
        self._bury()
        return self._process.returncode

    def close(self) -> None:
        """End the program with its process group, if it has not ended, and take its last output."""
        if self._process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        until = time.monotonic() + GRACE_SEC
        while not self._has_ended() and time.monotonic() < until:
            self._read(0.05)
        self._bury()

    def _read(self, within: float) -> None:
        """Take one piece of the output, if one comes in time."""
        if self._is_at_end:  # the program has closed it, and goes on
            self._wait(within)
            return
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        if poll.poll(within * 1000):
            piece = os.read(self._pipe, _PIECE)
            self._is_at_end = not piece
            self._output.take(piece)

    def _wait(self, within: float) -> None:
        until = time.monotonic() + within
        while not self._has_ended() and time.monotonic() < until:
            time.sleep(0.01)

    def _has_ended(self) -> bool:
        """Whether the program has ended. It is not buried, so no other process group can have its number."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _bury(self) -> None:
        """Kill what is left of the group, and take the rest of the output."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for _ in range(_PIECES_LEFT):
            if not self._is_at_end:
                self._read(0)
        self._output.end()
        assert self._process.stdout is not None  # noqa: S101  it is a pipe
        self._process.stdout.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def ended_how(status: int) -> str:
    """PURE: how a program has ended, in words."""
    if status >= 0:
        return f"exited with {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
