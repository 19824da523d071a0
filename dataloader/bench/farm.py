"""Real programs as the command line starts them, on one of the bench's schemas.

The programs get the default settings, and none of this process's environment. Their logs go to a file.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import psutil

from dataloader import embedded
from dataloader.bench.marks import WHERE
from dataloader.bench.place import BenchError, Place, add, await_drained, clear
from dataloader.config import Settings

READY_WITHIN = 60.0  # seconds
STOP_WITHIN = 30.0
WARM_JOBS = 100  # for each worker, before the measurement


class Program:
    """A `dataloader` command in a process of its own, stopped at the end of the block."""

    def __init__(self, place: Place, schema: str, command: str, **settings: str) -> None:
        self.place = place
        self.schema = schema
        self.log = place.folder / f"{command}-{time.monotonic_ns()}.log"
        self._command = command
        self._settings = settings

    def __enter__(self) -> Self:
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dataloader", *self._command.split()],
                env=self._environment(),
                cwd=self.place.folder,  # a folder without .env
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C reaches only the bench, which stops the program
                preexec_fn=embedded.dies_with_us(signal.SIGTERM),
            )
        try:
            self.await_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def is_ready(self) -> bool:
        """True once the program works."""
        raise NotImplementedError

    def await_ready(self) -> None:
        """Return once the program is ready; BenchError with its last log lines when it fails to."""
        deadline = time.monotonic() + READY_WITHIN
        while not self.is_ready():
            self.check()
            if time.monotonic() > deadline:
                raise BenchError(
                    f"`dataloader {self._command}` was not ready within {READY_WITHIN:g} s: {self._words()}"
                )
            time.sleep(0.01)

    def check(self) -> None:
        """Raise BenchError when the program has ended."""
        if self._process.poll() is not None:
            raise BenchError(f"`dataloader {self._command}` ended with {self._process.returncode}: {self._words()}")

    def processes(self) -> list[psutil.Process]:
        """The program's process and all its descendants."""
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def stop(self) -> None:
        """Send SIGTERM, and after STOP_WITHIN SIGKILL to all processes left."""
        family = self.processes() if self._process.poll() is None else []
        self._process.terminate()
        _, alive = psutil.wait_procs(family, timeout=STOP_WITHIN)
        for process in alive:
            process.kill()
        self._process.wait()

    def _environment(self) -> dict[str, str]:
        ours = {name.upper() for name in Settings.model_fields}
        inherited = {name: value for name, value in os.environ.items() if name.upper() not in ours}
        given = {"DL_DB_DSN": self.place.dsn, "PG_SCHEMA_QUEUE": self.schema, "DL_HOME": str(self.place.folder)}
        return inherited | given | self._settings

    def _words(self) -> str:
        return "\n  ".join(["", *self.log.read_text("utf-8", "replace").strip().splitlines()[-5:]])


class Farm(Program):
    """`dataloader workers` on the queue `bench`; ready once all its workers listen."""

    def __init__(
        self,
        place: Place,
        workers: int,
        prefetch: int = 1,
        marks: Path | None = None,
        schema: str | None = None,
        settings: Mapping[str, str] = {},
    ) -> None:
        entry = {"queue": "bench", "concurrency": workers, "prefetch": prefetch}
        ours = {"WORKERS_JSON": json.dumps([entry]), "DL_PIPELINES": "dataloader.bench.pipelines"}
        ours |= {WHERE: str(marks)} if marks else {}
        super().__init__(place, schema or place.queue(), "workers", **ours, **settings)
        self.workers = workers

    def is_ready(self) -> bool:
        return self.log.read_bytes().count(b'"worker.started"') >= self.workers

    def warm(self, task: str = "bench.noop") -> None:
        """Let every worker do some jobs, so that its statements are prepared, and empty the tables."""
        with self.place.connect(self.schema) as conn:
            add(conn, self.place.wish.scaled(WARM_JOBS, least=10) * self.workers, task=task)
            await_drained(conn, self.check)
            clear(conn)


class Api(Program):
    """`dataloader api` on a free port; ready once it is healthy."""

    def __init__(self, place: Place) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        super().__init__(place, place.queue(), "api", APP_HOST="127.0.0.1", APP_PORT=str(self.port))

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
