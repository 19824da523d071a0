"""Programs of a farm in processes of their own, as the command line starts them, and the database below them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import psutil

from dataloader import embedded
from dataloader.config import Settings
from dataloader.queue import migrations

CHECKOUT = Path(__file__).parents[1]
READY_WITHIN = 60.0  # seconds
STOP_WITHIN = 30.0


def started(command: str, environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a `dataloader` command that ends with us; it writes into `log`, in whose folder it runs."""
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "dataloader", *command.split()],
            env=environment,
            cwd=log.parent,  # a folder without .env
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,  # Ctrl-C reaches only us, and we stop the program
            preexec_fn=embedded.dies_with_us(signal.SIGTERM),
        )


class NotReady(Exception):
    """A program has ended, or does not become ready; the message has its last log lines."""


class Program:
    """A `dataloader` command with default settings, except for the given ones; stopped at the end of the block.

    The block begins once `is_ready` is true. This process's settings do not reach the program.
    """

    def __init__(self, command: str, folder: Path, is_ready: Callable[[], bool], settings: Mapping[str, str]) -> None:
        self.log = folder / f"{command}-{time.monotonic_ns()}.log"
        self._command, self._is_ready = command, is_ready
        ours = {name.upper() for name in Settings.model_fields}
        inherited = {name: value for name, value in os.environ.items() if name.upper() not in ours}
        self._environment = inherited | {"DL_HOME": str(folder), "PYTHONPATH": str(CHECKOUT), **settings}

    def __enter__(self) -> Self:
        self.process = started(self._command, self._environment, self.log)
        try:
            deadline = time.monotonic() + READY_WITHIN
            while not self._is_ready():
                self.check()
                if time.monotonic() > deadline:
                    raise NotReady(self._in_words(f"was not ready within {READY_WITHIN:g} s"))
                time.sleep(0.01)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Send SIGTERM, and after STOP_WITHIN SIGKILL to all processes left."""
        family = self.processes() if self.process.poll() is None else []
        self.process.terminate()
        _, alive = psutil.wait_procs(family, timeout=STOP_WITHIN)
        for process in alive:
            process.kill()
        self.process.wait()

    def check(self) -> None:
        """Raise NotReady when the program has ended."""
        if self.process.poll() is not None:
            raise NotReady(self._in_words(f"ended with {self.process.returncode}"))

    def processes(self) -> list[psutil.Process]:
        """The program's process and all its descendants."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def _in_words(self, what: str) -> str:
        last = self.log.read_text("utf-8", "replace").strip().splitlines()[-5:]
        return "\n  ".join([f"`dataloader {self._command}` {what}:", *last])


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def answers(port: int, path: str = "/health") -> bool:
    """True when the API on this port answers with 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@contextmanager
def database(settings: Mapping[str, str] | None = None) -> Iterator[tuple[embedded.Server, Path]]:
    """A PostgreSQL of its own with an empty queue, and a folder for the programs' files; removed at the end."""
    with tempfile.TemporaryDirectory(prefix="dl-tool-") as place:
        folder = Path(place)
        folder.chmod(0o755)  # for root the server runs as another user, which has to enter this folder
        with embedded.Server.start(folder / "postgres", settings) as server:
            migrations.migrate(server.dsn, "public")
            yield server, folder


def stopped(server: embedded.Server, number: signal.Signals) -> None:
    """Stop the server by SIGINT (fast) or SIGQUIT (immediate), as an operator does; returns after its end."""
    server.process.send_signal(number)
    server.process.wait()


def started_again(server: embedded.Server) -> None:
    """Start the server that `stopped` has stopped; returns once it accepts connections."""
    server.process = embedded.serve(server.root, {}, None, [], "dataloader")
