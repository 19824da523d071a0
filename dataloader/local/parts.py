"""The parts of a local farm: child processes that `up` starts again after an end of their own."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

import click

from dataloader import embedded, periods
from dataloader.farm.process import EXIT_CANNOT_START, kill_group, now, outcome

_CREDENTIALS = struct.Struct("3i")  # of the sender: process, user, group; unix(7)
# The first pause before a restart, and the longest; a run longer than this resets it.
BACKOFF_SEC = (0.5, periods.seconds("PART_BACKOFF_SEC", 30.0))


class Part(ABC):
    """A child process that `up` keeps running: after its end, `tick` starts it again after a growing pause."""

    name: str
    process: subprocess.Popen[bytes] | None = None

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.due: float | None = None  # the time of the next start, while the part is down
        self._pause = 0.0
        self._started = now()

    @property
    def is_ready(self) -> bool:
        """False while the part is known not to be ready."""
        return True

    @abstractmethod
    def start(self) -> None:
        """Start the process; raises OSError or EmbeddedError."""

    @abstractmethod
    def stop(self) -> None:
        """End the process and wait for its end; without a process the call does nothing."""

    def tick(self) -> None:
        """Notice the end of the process, and start it again when that is due.

        A part that refuses its settings (EXIT_CANNOT_START) is not started again.
        """
        if self.due is None and self.process and self.process.poll() is not None:
            self.exit_code = self.process.returncode
            if self.exit_code != EXIT_CANNOT_START:
                self._postpone(outcome(self.exit_code))
        elif self.due is not None and now() >= self.due:
            self._start_again()

    def _start_again(self) -> None:
        self.due = None
        try:
            self.start()
            self._started = now()
        except (OSError, embedded.EmbeddedError) as error:
            self._postpone(f"did not start: {error}")

    def _postpone(self, why: str) -> None:
        first, longest = BACKOFF_SEC
        lived = now() - self._started
        self._pause = first if lived > longest or not self._pause else min(longest, 2 * self._pause)
        self.due = now() + self._pause
        warn(f"{self.name} {why}; starting it again in {self._pause:g} s")


class Program(Part):
    """`dataloader <name>` as a child in a session of its own, so that Ctrl-C reaches only `up`."""

    def __init__(self, name: str, environment: dict[str, str], stop_within: float, reports_ready: bool = False) -> None:
        """`stop_within` is in seconds; `reports_ready`: the program calls `process.notify_ready`."""
        super().__init__()
        self.name = name
        self._environment = environment
        self._stop_within = stop_within
        self._is_awaited = reports_ready
        self._reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        if reports_ready:
            self._reports.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._reports.bind("")  # Linux chooses a name that is no file: every user may send there
            self._environment = environment | {"NOTIFY_SOCKET": self._reports.getsockname().decode().replace("\0", "@")}

    @property
    def is_ready(self) -> bool:
        with suppress(BlockingIOError):
            if self._is_awaited:
                _, credentials, _, _ = self._reports.recvmsg(100, socket.CMSG_SPACE(_CREDENTIALS.size))
                self._is_awaited = not any(_CREDENTIALS.unpack(data)[1] == os.getuid() for *_, data in credentials)
        return not self._is_awaited

    def start(self) -> None:
        self.process = subprocess.Popen(
            command(self.name),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=embedded.dies_with_us(signal.SIGTERM),
        )

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(self._stop_within)
        except subprocess.TimeoutExpired:
            warn(f"{self.name} did not end in {self._stop_within:g} s and is killed")
            kill_group(self.process.pid)
            self.process.wait()


class Postgres(Part):
    """The embedded server."""

    name = "PostgreSQL"

    def __init__(self, root: Path, pg_bin: Path | None) -> None:
        super().__init__()
        self._root = root
        self._pg_bin = pg_bin
        self._server: embedded.Server | None = None

    @property
    def dsn(self) -> str:
        """The server's DSN; RuntimeError before the first start."""
        if self._server is None:
            raise RuntimeError("the server has not been started")
        return self._server.dsn

    def start(self) -> None:
        self.stop()  # a server that died still holds its lock
        self._server = embedded.Server.start(self._root, pg_bin=self._pg_bin)
        self.process = self._server.process

    def stop(self) -> None:
        if self._server:
            self._server.stop()


def command(*words: str) -> list[str]:
    """The command line of `dataloader` with these words, by this interpreter."""
    # -P: import the installed package, and no file of the working folder.
    return [sys.executable, "-P", "-m", "dataloader", *words]


def say(text: str, err: bool = False) -> None:
    """Print a line to stdout or, with `err`, to stderr; the work goes on when the reader has gone."""
    with suppress(OSError):
        click.echo(text, err=err)


def warn(text: str) -> None:
    """Print a message of `up` to stderr."""
    say(f"dataloader up: {text}", err=True)
