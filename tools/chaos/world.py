"""The server and the programs of a chaos run, as real processes; a process that dies is started again.

All processes of the run are our descendants, also orphans, for we are their subreaper; so none can be left behind. Only
the main thread may start them, since a child ends with the thread that started it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dataloader import embedded
from dataloader.farm.process import adopt_orphans, children, descendants
from dataloader.queue import db, migrations
from tools.programs import CHECKOUT, free_port, started

from .link import Link
from .pipelines import TABLES

FARMS = ("farm-0", "farm-1")
QUEUES = ("chaos.a", "chaos.b")
WORKERS = 3  # of each farm in each queue
SETTINGS = {
    "DL_PIPELINES": "tools.chaos.pipelines",
    "PYTHONPATH": str(CHECKOUT),
    "WORKERS_JSON": json.dumps(
        [
            {"queue": queue, "concurrency": WORKERS, "prefetch": prefetch}
            for queue, prefetch in zip(QUEUES, (1, 20), strict=True)
        ]
    ),
    "DL_HEARTBEAT_SEC": "1",
    "DL_REAPER_PERIOD_SEC": "1",
    "DL_KILL_GRACE_SEC": "1",
    "DL_DRAIN_SEC": "3",
    "DL_CLAIM_BACKOFF_SEC": "2",
}
RESTART_SEC = 1.0  # between two starts of a program
STOP_SEC = 25.0  # a drain, the grace, the keeper's recovery, and a slow machine


class Program:
    """One `dataloader` program, and its restarts."""

    def __init__(self, farm: str, name: str, env: dict[str, str], log: Path) -> None:
        self.farm, self.name, self.log = farm, name, log
        self._env = env
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._started = time.monotonic()
        return started(self.name, self._env, self.log)

    def tend(self) -> None:
        """Start the program again if it has ended, as supervisord does."""
        if self.process.poll() is not None and time.monotonic() > self._started + RESTART_SEC:
            self.process = self._start()

    def children(self, title: str) -> list[psutil.Process]:
        """The program's children whose process title contains `title`."""
        with suppress(psutil.Error):
            return [child for child in psutil.Process(self.process.pid).children() if title in title_of(child)]
        return []


class World:
    """A server, two farms, one API; a context manager, whose end removes all of them."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="dl-chaos-"))
        self.root.chmod(0o711)  # for root the server runs as another user, which has to enter this folder
        self.mark = (
            f"{100_000 + os.getpid()}"  # pipelines' children sleep for this number of seconds, which identifies them
        )
        self.programs: list[Program] = []
        self.links: dict[str, Link] = {}  # by farm
        self.tenders: list[Callable[[], None]] = []  # called while time passes
        self.keep = False  # the files, after the end
        self._logs = self.root / "logs"
        self._logs.mkdir()
        self.server: embedded.Server | None = None
        adopt_orphans()

    def __enter__(self) -> World:
        try:
            self.server = self._serve()
            self.dsn = self.server.dsn
            self._socket = Path(str(conninfo_to_dict(self.dsn)["host"]))
            migrations.migrate(self.dsn, schema="public")
            self.query(TABLES)
            self.port = free_port()
            self._start_programs()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> embedded.Server:
        given = os.environ.get("DL_PG_BIN")
        return embedded.Server.start(self.root / "pg", {"max_connections": "200"}, Path(given) if given else None)

    def _start_programs(self) -> None:
        for farm in FARMS:
            self.links[farm] = Link(self.root / farm, self._socket)
            linked = make_conninfo(self.dsn, host=str(self.root / farm))
            for name in ("workers", "reaper"):
                self._add(farm, name, {"CHAOS_FARM": farm, "DL_DB_DSN": linked, "DL_TARGET_DSN": self.dsn})
        self._add("api", "api", {"APP_HOST": "127.0.0.1", "APP_PORT": str(self.port)})

    def _add(self, farm: str, name: str, more: dict[str, str]) -> None:
        ours = {
            "DL_DB_DSN": self.dsn,
            "CHAOS_DSN": self.dsn,
            "DL_HOME": str(self.root / "home"),
            "CHAOS_MARK": self.mark,
        }
        env = os.environ | SETTINGS | ours | more
        self.programs.append(Program(farm, name, env, self._logs / f"{farm}-{name}.log"))

    def tend(self) -> None:
        """Call the tenders, start programs that have ended, and reap orphans."""
        for tend in self.tenders:
            tend()
        for program in self.programs:
            program.tend()
        ours = {program.process.pid for program in self.programs} | self._servers()
        for pid in set(children(os.getpid())) - ours:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def query(self, statement: str, *parameters: Any) -> list[Any]:
        """The rows of a statement, over a connection of its own; psycopg.Error while the server is away or silent."""
        # The statement may wait for a backend that we stopped, so the wait has a limit.
        with db.connect(self.dsn, name="chaos", schema="public", connect_timeout=3, answer_within=3) as conn:
            cursor = conn.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def restart_server(self, number: signal.Signals, away_sec: float) -> None:
        """Stop the server by SIGINT (fast) or SIGQUIT (immediate), and start it again after `away_sec` seconds."""
        self.server.process.send_signal(number)
        self.wait(20, lambda: self.server.process.poll() is not None)
        self.server.stop()
        self.wait(away_sec)
        self.server = self._serve()

    def wait(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> bool:
        """Keep all programs running until `enough` is true or the time is over; the last value of `enough`."""
        until = time.monotonic() + seconds
        while not enough():
            if (left := until - time.monotonic()) <= 0:
                return False
            time.sleep(min(left, 0.1))
            self.tend()
        return True

    def marked(self) -> list[int]:
        """The living children of pipelines."""
        found = psutil.process_iter(["cmdline", "status"])
        return [p.pid for p in found if (p.info["cmdline"] or [""])[-1] == self.mark and p.info["status"] != "zombie"]

    def stop_programs(self) -> list[str]:
        """End all programs by SIGTERM; a text for each that exits wrongly or not at all."""
        for program in self.programs:
            program.process.send_signal(signal.SIGTERM)
        wrong = [text for program in self.programs for text in _ended(program)]
        return wrong + [f"process {pid} outlived its program: {title}" for pid, title in self._left()]

    def _left(self) -> list[tuple[int, str]]:
        until = time.monotonic() + 5
        while left := self._others():
            if time.monotonic() > until:
                return left
            time.sleep(0.1)
        return []

    def _others(self) -> list[tuple[int, str]]:
        """Our living descendants, without the server's."""
        servers = self._servers()
        return [(p.pid, title_of(p)) for p in psutil.Process().children(True) if p.pid not in servers and not _reap(p)]

    def _servers(self) -> set[int]:
        pid = self.server.process.pid if self.server else None
        return {pid, *descendants(pid)} if pid else set()

    def mentions(self, text: str) -> list[str]:
        """The programs' log lines that contain `text`."""
        found = []
        for log in sorted(self._logs.glob("*.log")):
            lines = log.read_text("utf-8", errors="replace").splitlines()
            found += [f"{log.stem} {line}" for line in lines if text in line]
        return found

    def close(self) -> None:
        """Kill all remaining processes, and remove the files."""
        for pid, _ in self._others():
            _send(pid, signal.SIGKILL)
        for program in self.programs:
            program.process.wait()
        for pid in self._servers():
            _send(pid, signal.SIGCONT)
        for link in self.links.values():
            link.close()
        if self.server:
            self.server.stop()
        if not self.keep:
            shutil.rmtree(self.root, ignore_errors=True)


def title_of(process: psutil.Process) -> str:
    """The title of a process; "" after its end."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _ended(program: Program) -> list[str]:
    try:
        status = program.process.wait(STOP_SEC)
    except subprocess.TimeoutExpired:
        return [f"{program.farm} {program.name} did not end within {STOP_SEC:g} s of SIGTERM"]
    return [f"{program.farm} {program.name} exited with {status} after SIGTERM"] if status else []


def _reap(process: psutil.Process) -> bool:
    """Reap a process that has ended; False when it lives."""
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return False
        os.waitpid(process.pid, os.WNOHANG)
    except (psutil.Error, ChildProcessError):
        pass
    return True
