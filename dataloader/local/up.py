"""PROCESS: `dataloader up` runs a farm on this machine: it starts the parts, watches them, and stops them.

The parts are the three programs that supervisord runs elsewhere, and the embedded PostgreSQL when no database is
configured.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import click

from dataloader import check, config, embedded, periods
from dataloader.exits import EXIT_CANNOT_START, EXIT_FAILED, EXIT_OK, outcome
from dataloader.farm.process import READY, Signals, kill_group, now
from dataloader.local import ports
from dataloader.queue import db, migrations

CHECKED_WITHIN = periods.seconds("CHECKED_WITHIN", 60.0)  # seconds for the imports of the users' modules
API_STOP_SEC = periods.seconds("API_STOP_SEC", 35.0)  # gunicorn answers the requests in flight within 30 s
REAPER_STOP_SEC = periods.seconds("REAPER_STOP_SEC", 15.0)
HEALTHY_WITHIN = periods.seconds("HEALTHY_WITHIN", 30.0)  # seconds until the API is ready
QUIET_SEC = 0.1  # from the parts' reports until the lines that they logged before have been written
POLL_SEC = 0.5  # between two checks of the users' files
NAMED_MOST = 3  # changed files that the message names
NOOP = {"sleep1": 1, "sleep2": 1, "sleep3": 1}
Document = dict[str, Any]  # the report of `dataloader check --json`
_CREDENTIALS = struct.Struct("3i")  # of the sender: process, user, group; unix(7)
# The first pause before a restart, and the longest; a run longer than this resets it.
BACKOFF_SEC = (0.5, periods.seconds("PART_BACKOFF_SEC", 30.0))
STOP = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


class Unfit(Exception):
    """`dataloader check` found an error; `up` has printed the findings."""


def run(settings: config.Settings, reloads: bool = False) -> int:
    """Run the farm of `settings` on this machine until SIGINT, SIGTERM or SIGHUP, and return the exit code.

    With `reloads` a change of the users' modules brings workers with the new code, as SIGHUP to `workers` does.
    The code is 0 after a clean stop, 78 when the schema or a program refuses to start with these settings, and 1
    after any other failure; a message on stderr names the reason. The call leaves no process running.
    """
    # nohup ignores HUP, and so does `up` then.
    stop = {number for number in STOP if signal.getsignal(number) is not signal.SIG_IGN}
    signals = Signals({*stop, signal.SIGCHLD})
    with ExitStack() as cleanup:
        try:
            return _watch(*_start(settings, cleanup, signals, reloads), signals)
        except (ports.NotFree, embedded.EmbeddedError, db.Error, OSError) as error:
            warn(str(error))
            return EXIT_FAILED
        except (Unfit, migrations.SchemaError) as error:
            warn(str(error))
            return EXIT_CANNOT_START


# --- the parts ---


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
        """Notice the end of the process, and start it again when that is due, unless it refuses its settings."""
        if self.due is None and self.process and self.process.poll() is not None:
            self.exit_code = self.process.returncode
            if self.exit_code != EXIT_CANNOT_START:
                self._postpone(outcome(self.exit_code))
        elif self.due is not None and now() >= self.due:
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

    def __init__(self, name: str, environment: dict[str, str], stop_within: float) -> None:
        """`stop_within` is in seconds."""
        super().__init__()
        self.name = name
        self._stop_within = stop_within
        self._has_reported = False
        self._reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._reports.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._reports.bind("")  # Linux chooses a name that is no file: every user may send there
        self._environment = environment | {"NOTIFY_SOCKET": self._reports.getsockname().decode().replace("\0", "@")}

    @property
    def is_ready(self) -> bool:
        """Whether the program has called `process.notify_ready`. Reads all reports: a full socket would hold it up."""
        with suppress(BlockingIOError):
            while True:
                report, credentials, _, _ = self._reports.recvmsg(100, socket.CMSG_SPACE(_CREDENTIALS.size))
                is_own = any(_CREDENTIALS.unpack(data)[1] == os.getuid() for *_, data in credentials)
                self._has_reported |= is_own and report == READY  # gunicorn's own comes before its application
        return self._has_reported

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
    name = "PostgreSQL"

    def __init__(self, root: Path, pg_bin: Path | None) -> None:
        super().__init__()
        self._root = root
        self._pg_bin = pg_bin
        self._server: embedded.Server | None = None
        self.dsn = ""  # once it is started

    def start(self) -> None:
        self.stop()  # a server that died still holds its lock
        self._server = embedded.Server.start(self._root, pg_bin=self._pg_bin)
        self.process, self.dsn = self._server.process, self._server.dsn

    def stop(self) -> None:
        if self._server:
            self._server.stop()


# --- the start ---


def _start(
    settings: config.Settings, cleanup: ExitStack, signals: Signals, reloads: bool
) -> tuple[list[Part], str, Reload | None]:
    """Become the only `up` of DL_HOME, start PostgreSQL if none is configured, migrate, check, start the programs.

    Returns the parts and the banner; raises EmbeddedError, NotFree or Unfit.
    `cleanup` stops the parts in the reverse order: first no new jobs, then the running ones, PostgreSQL last.
    """
    parts: list[Part] = []
    try:
        lock = embedded.take_lock(settings.dl_home / "up.lock", within=ports.HANDOVER_WITHIN)
    except embedded.EmbeddedError as error:
        raise embedded.EmbeddedError(f"{error}: stop it first, or choose another folder with DL_HOME") from None
    cleanup.callback(embedded.release, lock)
    ports.wait_for(settings.app_host, settings.app_port)
    settings.data_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
    cleanup.callback(say, "dataloader up: stopped")
    dsn = settings.queue_dsn
    if dsn is None:
        postgres = Postgres(settings.dl_home / "postgres", settings.dl_pg_bin)
        _add(postgres, parts, cleanup)
        dsn = postgres.dsn
    migrations.migrate(dsn, schema=settings.pg_schema_queue)
    environment = environment_of_programs(settings, dsn, sys.stdout.isatty())
    if reloads:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a .pyc names its source by second and size: it may hide a change
    report = _check(environment, signals)
    tasks = _print_findings(report)
    for name, within in (("reaper", REAPER_STOP_SEC), ("workers", settings.ends_within + 15), ("api", API_STOP_SEC)):
        _add(Program(name, environment, within), parts, cleanup)
    cleanup.callback(say, "dataloader up: stopping, running jobs have time to finish")
    reload = None
    if reloads:
        names = {"workers", "api"} if settings.dl_hooks else {"workers"}  # the API imports DL_HOOKS alone
        reloaded = [part for part in parts if part.name in names]
        reload = Reload(report["files"] if report else (), lambda: _check(environment, signals), reloaded)
    return parts, banner(settings, db.shown(dsn), tasks), reload


def _add(part: Part, parts: list[Part], cleanup: ExitStack) -> None:
    cleanup.callback(part.stop)
    part.start()
    parts.append(part)


def environment_of_programs(settings: config.Settings, dsn: str, is_terminal: bool) -> dict[str, str]:
    """The programs' environment: ours, and the settings that `up` adds where the user has set none.

    Times are in this machine's zone. With a terminal, logs are lines for people, and metrics and audit go to files.
    """
    # In the environment, since every user of the machine can read a command line.
    ours = {"dl_db_dsn": dsn, "timezone": settings.people_zone}
    if is_terminal:
        ours |= {"local": "1"} | dict.fromkeys(("metric_path", "audit_log_path"), str(settings.dl_home / "log"))
    given = settings.model_fields_set - {"dl_db_dsn"}
    return {**os.environ, **{name.upper(): value for name, value in ours.items() if name not in given}}


def _check(environment: dict[str, str], signals: Signals) -> Document | None:
    """The report of `dataloader check`; None, after a warning, where there is none.

    The check runs in a process of its own, since it imports the users' modules.
    """
    process = subprocess.Popen(
        command("check", "--json"),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=embedded.dies_with_us(signal.SIGKILL),
    )
    until, output = now() + CHECKED_WITHIN, None
    while output is None and now() < until and not signals.received & STOP:
        with suppress(subprocess.TimeoutExpired):
            output = process.communicate(timeout=0.1)[0]
    if output is None:
        kill_group(process.pid)
        process.communicate()
    try:
        report: Document = json.loads(output or b"")
    except ValueError:
        if not signals.received & STOP:
            warn(f"`dataloader check` {outcome(process.returncode)}: run it to see why")
        return None
    return report


def _print_findings(report: Document | None) -> str:
    """Print what the check warns of, and return the known tasks; Unfit when it found an error."""
    findings = report["findings"] if report else []
    for finding in findings:
        if finding["level"] != "ok":
            advice = f"; {finding['advice']}" if finding["advice"] else ""
            warn(f"{finding['level']}: {finding['about']}: {finding['what']}{advice}")
    if any(finding["level"] == "error" for finding in findings):
        raise Unfit("nothing was started; `dataloader check` shows all findings")
    known = [tasks for finding in findings if (tasks := finding["what"].removeprefix(check.TASKS)) != finding["what"]]
    return "".join(known)


# --- the watch ---


def _watch(parts: list[Part], text: str, reload: Reload | None, signals: Signals) -> int:
    """Keep the parts running until a signal to stop, print the banner, check for changes; returns the exit code.

    The banner is printed once, when all parts are ready; after HEALTHY_WITHIN it no longer waits for workers, and
    TimeoutError tells that the API is not ready.
    """
    patience_ends, is_announced = now() + HEALTHY_WITHIN, False
    while not signals.received & STOP:
        for part in parts:
            part.tick()
        ours = {part.process.pid for part in parts if part.process}
        with suppress(ChildProcessError):  # process 1 of a container inherits orphans; Popen waits for our own children
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in ours:
                os.waitpid(ended.si_pid, 0)
        if refused := [part.name for part in parts if part.exit_code == EXIT_CANNOT_START]:
            warn(f"{refused[0]} cannot start with these settings; its message above names the reason")
            return EXIT_CANNOT_START
        ready = [part.name for part in parts if part.is_ready]
        if not is_announced and (len(ready) == len(parts) or now() > patience_ends):
            if "api" not in ready:
                raise TimeoutError(f"the API has not answered within {HEALTHY_WITHIN:g} s")
            time.sleep(QUIET_SEC)
            say(text)
            is_announced = True
        if reload and is_announced:
            reload.check()
        idle_sec = POLL_SEC if reload else 5
        signals.wait(idle_sec if is_announced and not any(part.due for part in parts) else 0.1)
    return EXIT_OK


# --- the banner ---


def banner(settings: config.Settings, database: str, tasks: str) -> str:
    """The addresses and folders of the farm, and commands to paste into another shell."""
    url = settings.own_url
    zone = "as TIMEZONE says" if "timezone" in settings.model_fields_set else "this machine's zone (or set TIMEZONE)"
    queue = settings.workers[0].served[0]
    # Another shell lacks our environment, so the command names each value that is not the default.
    command = [*_program(), "trigger", "noop"]
    command += ["--queue", queue] if queue != "etl.default" else []
    command += ["--url", url] if url != "http://127.0.0.1:8081" else []
    command += ["--args", json.dumps(NOOP)]
    body = {"queue": queue, "task": "noop", "lock_key": "noop", "args": NOOP}
    return f"""
dataloader is up
  API        {url}
  database   {database}
  files      {settings.data_dir}   (where loaders read from)
  tasks      {tasks or "see the log"}
  times      in {settings.people_zone}, {zone}
  try it     {shlex.join(command)}
  or         curl -X POST {url}/api/v1/jobs/trigger -H 'Content-Type: application/json' \\
               -d {shlex.quote(json.dumps(body))}
  stop       Ctrl-C, or: kill {os.getpid()}
"""


def _program() -> list[str]:
    """The command for this program in another shell."""
    program = Path(sys.executable).with_name("dataloader")
    if not program.exists():
        return [sys.executable, "-m", "dataloader"]
    return ["dataloader" if shutil.which("dataloader") == str(program) else str(program)]


# --- --reload ---


class Reload:
    """`up --reload`: a changed module beside those of the users brings new workers, when the check finds no error."""

    def __init__(self, files: Iterable[str], check: Callable[[], Document | None], parts: Sequence[Part]) -> None:
        """`check` imports the modules anew and returns the report of `dataloader check`, None where there is none.

        `parts` are the programs that get SIGHUP after a change without an error.
        """
        self._check, self._parts = check, parts
        self._folders = {Path(name).parent for name in files}
        self._versions = versions(self._folders)
        self._check_at = 0.0

    def check(self) -> None:
        """Check every POLL_SEC whether modules changed; after a change check the code, and reload the programs."""
        if now() < self._check_at:
            return
        self._check_at = now() + POLL_SEC
        current = versions(self._folders)  # before the check: a change during it is found by the next call
        changed = sorted({path.name for path, _ in current.items() ^ self._versions.items()})
        self._versions = current
        if not changed or (report := self._check()) is None:
            return
        new = {Path(name).parent for name in report["files"]} - self._folders
        self._folders, self._versions = self._folders | new, current | versions(new)
        more = f" and {len(changed) - NAMED_MOST} more files" if len(changed) > NAMED_MOST else ""
        files = ", ".join(changed[:NAMED_MOST]) + more
        errors = [finding for finding in report["findings"] if finding["level"] == "error"]
        for finding in errors:
            warn(f"{files} changed, and the workers go on with the code of before: {finding['what']}")
        if not errors:
            say(f"dataloader up: {files} changed: new workers start with the new code")
            for part in self._parts:
                if part.process and part.process.poll() is None:
                    part.process.send_signal(signal.SIGHUP)


def versions(folders: Iterable[Path]) -> dict[Path, tuple[int, int, int]]:
    """The Python files in these folders, each with the attributes that change with a new version of it."""
    stamps = {}
    for folder in folders:
        for path in folder.glob("*.py"):
            with suppress(OSError):
                status = path.stat()
                stamps[path] = status.st_mtime_ns, status.st_size, status.st_ino
    return stamps


def command(*words: str) -> list[str]:
    """The command line of `dataloader` with these words, by this interpreter."""
    # -P: import the installed package, and no file of the working folder.
    return [sys.executable, "-P", "-m", "dataloader", *words]


def say(text: str, err: bool = False) -> None:
    """Print a line to stdout or, with `err`, to stderr; the work goes on when the reader has gone."""
    with suppress(OSError):
        click.echo(text, err=err)


def warn(text: str) -> None:
    say(f"dataloader up: {text}", err=True)
