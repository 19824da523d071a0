"""`dataloader up`: all of it on this machine, as children of one process that starts, watches, stops them.

The children are the three programs that supervisord runs elsewhere, and, when no database is configured, a
PostgreSQL of our own. May import anything below the command line.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from pathlib import Path

import click

from dataloader import check, config, embedded
from dataloader.farm.process import EXIT_CANNOT_START, EXIT_FAILED, EXIT_OK, Signals, kill_group, now
from dataloader.queue import db, migrations

HANDOVER_WITHIN = 3.0  # seconds; the last `up` may be ending, or its API, when it was killed
HEALTHY_WITHIN = 30.0
CHECKED_WITHIN = 60.0  # for the imports of the users' modules
QUIET_SEC = 0.1  # from the programs' word that they are ready until the lines of before have been written
BACKOFF_SEC = (0.5, 30.0)  # the first pause before a restart and the longest, which also forgives
API_STOP_SEC = 35.0  # gunicorn answers what is in flight within 30 s
REAPER_STOP_SEC = 15.0
STOP = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
NOOP = {"sleep1": 1, "sleep2": 1, "sleep3": 1}


class Refused(Exception):
    """`up` cannot run; the message says why and what to do."""

    status = EXIT_FAILED


class Unfit(Refused):
    """The same because of what `dataloader check` has found, and `up` has said line by line."""

    status = EXIT_CANNOT_START


def run(settings: config.Settings) -> int:
    """Run the farm of `settings` on this machine until SIGINT, SIGTERM or SIGHUP, and return the exit code.

    0 after a clean stop, 1 when something is in the way (a message says what), 78 when the schema or a
    program refuses to start with these settings. Nothing that was started is left running.
    """
    # nohup ignores HUP, and means it.
    stop = {number for number in STOP if signal.getsignal(number) is not signal.SIG_IGN}
    signals = Signals({*stop, signal.SIGCHLD})
    cleanup = ExitStack()
    try:
        _prepare(settings, cleanup)
        parts, tasks = _start(settings, cleanup, signals)
        return _watch(parts, Announcement(settings, parts, tasks), signals)
    except (Refused, embedded.EmbeddedError, db.Error, OSError) as error:
        _say(f"dataloader up: {error}", err=True)
        return error.status if isinstance(error, Refused) else EXIT_FAILED
    except migrations.SchemaError as error:
        _say(f"dataloader up: {error}", err=True)
        return EXIT_CANNOT_START
    finally:
        cleanup.close()


# Before anything is started --------------------------------------------------------------------------------


def _prepare(settings: config.Settings, cleanup: ExitStack) -> None:
    """Become the only `up` of DL_HOME, see that the port is free, make the folders; Refused if not."""
    try:
        lock = embedded.take_lock(settings.dl_home / "up.lock", within=HANDOVER_WITHIN)
    except embedded.EmbeddedError as error:
        raise Refused(f"{error}: stop it first, or choose another folder with DL_HOME") from None
    cleanup.callback(embedded.release, lock)
    _await_port(settings.app_host, settings.app_port)
    settings.data_dir.mkdir(parents=True, exist_ok=True)


def _await_port(host: str, port: int) -> None:
    deadline = now() + HANDOVER_WITHIN
    while trouble := _port_trouble(host, port):
        if trouble.errno != errno.EADDRINUSE:
            raise Refused(f"cannot listen on {host} port {port}: {trouble.strerror} (APP_HOST, APP_PORT)")
        if now() > deadline:
            raise Refused(f"port {port} is taken by another program: end it, or choose another with APP_PORT")
        time.sleep(0.1)


def _port_trouble(host: str, port: int) -> OSError | None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None


# What is started and kept running --------------------------------------------------------------------------


class Part(ABC):
    """Something that `up` keeps running: what ends by itself is started again, after a growing pause."""

    name: str
    process: subprocess.Popen[bytes] | None = None

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.due: float | None = None  # when it is started again, while it is down
        self._pause = 0.0
        self._started = now()

    @property
    def is_ready(self) -> bool:
        """False while it is known not to be."""
        return True

    @abstractmethod
    def start(self) -> None:
        """Start it; raises OSError or EmbeddedError."""

    @abstractmethod
    def stop(self) -> None:
        """End it and wait until it has; harmless when it does not run."""

    def tick(self) -> None:
        """Notice its end, and start it again when that is due."""
        if self.due is None and self.process and self.process.poll() is not None:
            self.exit_code = self.process.returncode
            if self.exit_code != EXIT_CANNOT_START:
                self._postpone(_how(self.exit_code))
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
        _say(f"dataloader up: {self.name} {why}; starting it again in {self._pause:g} s", err=True)


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


class Program(Part):
    """`dataloader <name>` as a child with a session of its own, so that Ctrl-C reaches only us."""

    def __init__(self, name: str, environment: dict[str, str], stop_within: float, tells: bool = False) -> None:
        """`tells`: it sends word when it is ready (`process.tell_ready`)."""
        super().__init__()
        self.name = name
        self._environment = environment
        self._stop_within = stop_within
        self._waits = tells
        self._told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        if tells:
            self._told.bind("")  # Linux chooses a name that is no file
            self._environment = environment | {"NOTIFY_SOCKET": self._told.getsockname().decode().replace("\0", "@")}

    @property
    def is_ready(self) -> bool:
        with suppress(BlockingIOError):
            self._waits = self._waits and not self._told.recv(100)
        return not self._waits

    def start(self) -> None:
        self.process = subprocess.Popen(
            _command(self.name),
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
            _say(f"dataloader up: {self.name} did not end in {self._stop_within:g} s and is killed", err=True)
            kill_group(self.process.pid)
            self.process.wait()


def _command(*words: str) -> list[str]:
    # -P: the installed package, not a checkout that happens to be the current folder, nor any other file there.
    return [sys.executable, "-P", "-m", "dataloader", *words]


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
        """Where it listens, once started."""
        if self._server is None:
            raise RuntimeError("the server has not been started")
        return self._server.dsn

    def start(self) -> None:
        self.stop()  # one that died still holds its lock
        self._server = embedded.Server.start(self._root, pg_bin=self._pg_bin)
        self.process = self._server.process

    def stop(self) -> None:
        if self._server:
            self._server.stop()


def _start(settings: config.Settings, cleanup: ExitStack, signals: Signals) -> tuple[list[Part], str]:
    """Start the database if it is ours, bring the schema up to date, see that all is well, start the programs.

    Returns what is started, and the tasks that the workers will know.

    `cleanup` ends them in the order in which work must: no new jobs, then the running ones, PostgreSQL last.
    """
    parts: list[Part] = []
    cleanup.callback(_say, "dataloader up: stopped")
    dsn = settings.queue_dsn
    if dsn is None:
        postgres = Postgres(settings.dl_home / "postgres", settings.dl_pg_bin)
        _started(postgres, parts, cleanup)
        dsn = postgres.dsn
    migrations.migrate(dsn, schema=settings.pg_schema_queue)
    environment = environment_of_programs(settings, dsn, sys.stdout.isatty())
    tasks = _check(environment, signals)
    workers_stop = settings.dl_drain_sec + settings.dl_kill_grace_sec + 15
    for name, within in (("reaper", REAPER_STOP_SEC), ("workers", workers_stop), ("api", API_STOP_SEC)):
        _started(Program(name, environment, within, tells=name != "api"), parts, cleanup)
    cleanup.callback(_say, "dataloader up: stopping, running jobs have time to finish")
    return parts, tasks


def environment_of_programs(settings: config.Settings, dsn: str, is_terminal: bool) -> dict[str, str]:
    """What the programs are started with, beside our own environment; what somebody has set stays as it is.

    Times are those of this machine. A person at a terminal is to read lines, and not what only programs count, so
    metrics and audit go to files.
    """
    # In the environment, since anybody on the machine can read a command line.
    ours = {"dl_db_dsn": dsn, "timezone": settings.people_zone}
    if is_terminal:
        ours |= {"local": "1"} | dict.fromkeys(("metric_path", "audit_log_path"), str(settings.dl_home / "log"))
    given = settings.model_fields_set - {"dl_db_dsn"}
    return {**os.environ, **{name.upper(): value for name, value in ours.items() if name not in given}}


def _check(environment: dict[str, str], signals: Signals) -> str:
    """Say what `dataloader check` warns of, and return the known tasks; Unfit when the farm could not work.

    In a process of its own: it imports the users' modules, which may do anything.
    """
    process = subprocess.Popen(
        _command("check", "--json"),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=embedded.dies_with_us(signal.SIGKILL),
    )
    until, said = now() + CHECKED_WITHIN, None
    while said is None and now() < until and not signals.received & STOP:
        with suppress(subprocess.TimeoutExpired):
            said = process.communicate(timeout=0.1)[0]
    if said is None:
        kill_group(process.pid)
        process.communicate()
    return _say_findings(said, process.returncode)


def _say_findings(said: bytes | None, status: int) -> str:
    try:
        findings = json.loads(said or b"")["findings"]
    except (ValueError, KeyError):
        _say(f"dataloader up: `dataloader check` {_how(status)}: run it to see why", err=True)
        return ""
    for finding in findings:
        if finding["level"] != "ok":
            words = f"{finding['level']}: {finding['about']}: {finding['what']}"
            _say(f"dataloader up: {words}" + (f"; {finding['advice']}" if finding["advice"] else ""), err=True)
    if any(finding["level"] == "error" for finding in findings):
        raise Unfit("nothing was started; `dataloader check` shows all that it has found")
    told = [what for finding in findings if (what := finding["what"].removeprefix(check.TASKS)) != finding["what"]]
    return "".join(told)


def _started(part: Part, parts: list[Part], cleanup: ExitStack) -> None:
    cleanup.callback(part.stop)
    part.start()
    parts.append(part)


# While it runs ---------------------------------------------------------------------------------------------


def _watch(parts: list[Part], announcement: Announcement, signals: Signals) -> int:
    """Keep the parts running until a signal asks to stop; tell people once they are ready."""
    while not signals.received & STOP:
        for part in parts:
            part.tick()
        _bury_strangers({part.process.pid for part in parts if part.process})
        if refused := [part.name for part in parts if part.exit_code == EXIT_CANNOT_START]:
            _say(f"dataloader up: {refused[0]} cannot start with these settings, as it says above", err=True)
            return EXIT_CANNOT_START
        announcement.look()
        signals.wait(5 if announcement.is_made and not any(part.due for part in parts) else 0.1)
    return EXIT_OK


def _bury_strangers(ours: set[int]) -> None:
    """Take the exit status of orphans that became our children, as in a container, where we are process 1."""
    with suppress(ChildProcessError):
        any_ended = os.WEXITED | os.WNOHANG | os.WNOWAIT  # only looked at: ours are Popen's to take
        while (found := os.waitid(os.P_ALL, 0, any_ended)) and found.si_pid not in ours:
            os.waitpid(found.si_pid, 0)


class Announcement:
    """The banner: the last that is said at the start, once all programs are ready and have written their lines."""

    def __init__(self, settings: config.Settings, parts: list[Part], tasks: str) -> None:
        self.is_made = False
        self._settings = settings
        self._parts = parts
        self._tasks = tasks
        self._patience_ends = now() + HEALTHY_WITHIN
        self._ready_at: float | None = None

    def look(self) -> None:
        """Make it where that is due; Refused when the API does not answer in time. Workers may take longer."""
        is_late = now() > self._patience_ends
        if self.is_made or not (is_late or all(part.is_ready for part in self._parts)):
            return
        if self._ready_at is not None and now() >= self._ready_at + QUIET_SEC:
            self.is_made = True
            _say(_welcome(self._settings, _database(self._settings, self._parts), self._tasks))
        elif self._ready_at is None and _is_healthy(self._settings):
            self._ready_at = now()
        elif self._ready_at is None and is_late:
            raise Refused(f"the API has not answered within {HEALTHY_WITHIN:g} s")


def _is_healthy(settings: config.Settings) -> bool:
    connection = http.client.HTTPConnection(_reachable(settings.app_host), settings.app_port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _reachable(host: str) -> str:
    """The address to ask at, where `host` may stand for all of the machine's."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104


def _database(settings: config.Settings, parts: list[Part]) -> str:
    ours = next((part.dsn for part in parts if isinstance(part, Postgres)), "")
    return db.shown(settings.queue_dsn or ours)


def _welcome(settings: config.Settings, database: str, tasks: str) -> str:
    host = _reachable(settings.app_host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings.app_port}"
    queue = settings.workers[0].queue
    # Another shell has not our environment, so what differs from the defaults is said.
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
  times      {_times(settings)}
  try it     {shlex.join(command)}
  or         curl -X POST {url}/api/v1/jobs/trigger -H 'Content-Type: application/json' \\
               -d {shlex.quote(json.dumps(body))}
  stop       Ctrl-C, or: kill {os.getpid()}
"""


def _times(settings: config.Settings) -> str:
    is_set = "timezone" in settings.model_fields_set
    return f"in {settings.people_zone}, " + ("as TIMEZONE says" if is_set else "this machine's zone (or set TIMEZONE)")


def _program() -> list[str]:
    """How this program is called from another shell."""
    program = Path(sys.argv[0])
    if program.name != "dataloader":
        return [sys.executable, "-m", "dataloader"]
    on_path = shutil.which("dataloader")
    known = on_path is not None and Path(on_path).resolve() == program.resolve()
    return ["dataloader" if known else str(program.absolute())]


def _say(text: str, err: bool = False) -> None:
    with suppress(OSError):  # whoever listened may have gone, and the work goes on
        click.echo(text, err=err)
