"""A primary and its hosts, each in a network and with a hostname of its own, on one bridge.

PostgreSQL's socket is a file, by which this process reaches it from outside. Hosts log in by a password over TCP.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, Self
from urllib.request import urlopen

import psutil
import psycopg
from farming import Program, until
from namespaces import inside, ip, obstacle, remove, space, sweep
from psycopg.conninfo import make_conninfo

from dataloader import embedded
from dataloader.queue import db, migrations
from tools.programs import CHECKOUT

from .pipelines import TABLES
from .usage import tree

NET = "198.18"  # for measurements (RFC 2544)
PRIMARY = f"{NET}.0.1"
HUB = "hub"
QUEUE = "fleet"
ROLE = "fleet"
SPARE = 60  # sessions beside those of workers: keepers, reapers, the API, this process, old sessions of lost hosts
NAMED = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')  # then the hostname and a command
SETTINGS = {"listen_addresses": PRIMARY, "logging_collector": "off", "fsync": "off"}  # the disk is not measured
HBA = f"local all all trust\nhost all all {NET}.0.0/16 scram-sha-256\n"


@dataclass
class Host:
    """The programs of one host."""

    name: str
    env: Mapping[str, str]
    folder: Path
    programs: dict[str, Program] = field(default_factory=dict)

    def start(self, command: str, code: Code, **settings: Any) -> Program:
        """Start a program of this code."""
        given = {name.upper(): str(value) for name, value in settings.items()}
        log = self.folder / f"{command}.log"
        with inside(self.name):
            env = os.environ | dict(self.env) | code.env | given
            self.programs[command] = Program(command, env, log, self.folder, [*NAMED, self.name])
        return self.programs[command]

    def processes(self) -> list[int]:
        """All its processes, parents before children."""
        return [pid for program in self.programs.values() for pid in tree(program.process.pid)]

    def get(self, path: str) -> bytes:
        """The answer of its API."""
        with inside(self.name), urlopen(f"http://127.0.0.1:8081{path}", timeout=30) as answer:
            return bytes(answer.read())

    def kill(self) -> None:
        """End every process at once: none can say a word more."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for program in self.programs.values():
            program.process.wait(30)
        self.programs.clear()

    def troubles(self) -> list[str]:
        """The names of the events in its logs that are warnings or errors."""
        lines = [line for log in self.folder.glob("*.log") for line in log.read_text("utf-8", "replace").splitlines()]
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [str(line["event"]) for line in found if line.get("level") in ("warning", "error", "critical")]


@dataclass(frozen=True, slots=True)
class Code:
    """A version of the product: this checkout, or the files of another commit in `folder`."""

    name: str
    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """The settings by which programs use it."""
        return {"PYTHONPATH": f"{self.folder}:{CHECKOUT}:{CHECKOUT / 'tests'}", "FLEET_CODE": self.name}

    def migrate(self, dsn: str) -> None:
        """Bring the queue's schema up to this code, and give the hosts' role its rights."""
        env = os.environ | self.env | {"DL_DB_DSN": dsn}
        command = [sys.executable, "-m", "dataloader", "migrate", "--roles", f"farm={ROLE}"]
        with tempfile.TemporaryDirectory() as folder:  # without .env
            subprocess.run(command, env=env, cwd=folder, check=True, capture_output=True)


def this_code() -> Code:
    """The checkout."""
    return Code("new", CHECKOUT)


def code_of(commit: str, folder: Path) -> Code:
    """The code of a commit, in this folder; raises CalledProcessError for an unknown one."""
    folder.mkdir()
    packed = subprocess.run(
        ["git", "-C", str(CHECKOUT), "archive", commit, "dataloader", "sql"], check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    (folder / "dataloader" / "sql").symlink_to("../sql")  # as in an installed package
    return Code("old", folder)


def before_newest_migration() -> str:
    """The commit of the main line before the one that brought the newest migration; SystemExit while there is none."""
    if not (files := sorted((CHECKOUT / "sql" / "migrations").glob("*.sql"))):
        raise SystemExit("there is no migration yet: name the old code by --old COMMIT")
    command = [
        "git",
        "-C",
        str(CHECKOUT),
        "log",
        "--first-parent",
        "--diff-filter=A",
        "--format=%H",
        "--",
        str(files[-1]),
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1] + "^1"


class Site:
    """The primary, its hosts and a session on the queue; the end of the block ends and removes all."""

    def __init__(self, sessions: int) -> None:
        if why := obstacle():
            raise SystemExit(why)
        sweep()
        self._stack = ExitStack()
        self._sessions = sessions
        self.hosts: list[Host] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="dl-test-"))  # what a killed run leaves, the next one removes
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.folder.chmod(0o711)  # for root the server runs as another user, which has to enter this folder
            self._net(stack)
            self.server = self._serve()
            stack.callback(self.server.stop)
            self.dsn = self.server.dsn
            self._password = token_hex(16)
            with psycopg.connect(make_conninfo(self.dsn, user="postgres"), autocommit=True) as conn:
                conn.execute(f"CREATE ROLE {ROLE} LOGIN PASSWORD '{self._password}'")
            stack.callback(self.end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _net(self, stack: ExitStack) -> None:
        stack.callback(remove, space("db"))
        ip("netns", "add", space("db"))
        ip("-n", space("db"), "link", "add", HUB, "type", "bridge")
        ip("-n", space("db"), "addr", "add", f"{PRIMARY}/16", "dev", HUB)
        ip("-n", space("db"), "link", "set", HUB, "up")

    def _serve(self) -> embedded.Server:
        # In the folder itself: its lock tells the sweeps of other runs that it is in use.
        hba = self.folder / "hba.conf"
        hba.write_text(HBA)
        hba.chmod(0o644)
        more = {"hba_file": str(hba), "max_connections": str(self._sessions + SPARE)}
        given = os.environ.get("DL_PG_BIN")
        with inside("db"):
            return embedded.Server.start(self.folder, SETTINGS | more, Path(given) if given else None)

    def open(self, code: Code) -> None:
        """Migrate by this code, and open the session on the queue."""
        code.migrate(self.dsn)
        self.conn = db.connect(self.dsn, name="test", schema="public")
        self.conn.is_direct  # noqa: B018  read as the API does: the session may then prepare statements
        self.conn.execute(TABLES)
        self.conn.execute(f"GRANT INSERT, SELECT ON ledger TO {ROLE}; GRANT USAGE ON SEQUENCE ledger_n_seq TO {ROLE}")
        with psycopg.connect(make_conninfo(self.dsn, user="postgres"), autocommit=True) as conn:
            conn.execute(f"GRANT CREATE ON SCHEMA public TO {ROLE}")  # the fence makes its table where pipelines write

    def add_host(self, workers: int, **settings: Any) -> Host:
        """A host that is linked to the primary; nothing runs on it."""
        number = len(self.hosts) + 1
        name = f"h{number}"
        self._stack.callback(remove, space(name))
        ip("netns", "add", space(name))
        ip("-n", space(name), "link", "add", "eth0", "type", "veth", "peer", f"to-{name}", "netns", space("db"))
        ip("-n", space("db"), "link", "set", f"to-{name}", "master", HUB, "up")
        ip("-n", space(name), "addr", "add", f"{NET}.1.{number}/16", "dev", "eth0")
        for device in ("eth0", "lo"):
            ip("-n", space(name), "link", "set", device, "up")
        folder = self.folder / name
        folder.mkdir()
        env = {
            "DL_DB_DSN": f"host={PRIMARY} user={ROLE} password={self._password} dbname=postgres",
            "DL_HOME": str(folder),
            "DL_PIPELINES": "tools.fleet.pipelines",
            "WORKERS_JSON": json.dumps([{"queue": QUEUE, "concurrency": workers}]),
        }
        more = {key.upper(): str(value) for key, value in settings.items()}
        self.hosts.append(Host(name, env | more, folder))
        return self.hosts[-1]

    def cut(self, host: Host) -> None:
        """Take the host's link down: neither side hears of it."""
        ip("-n", space("db"), "link", "set", f"to-{host.name}", "down")

    def heal(self, host: Host) -> None:
        """Take it up again."""
        ip("-n", space("db"), "link", "set", f"to-{host.name}", "up")

    def rows(self, statement: str, *parameters: Any) -> list[Any]:
        """The rows of any statement."""
        return self.conn.execute(statement, parameters).fetchall()

    def sessions(self, name: str) -> int:
        """How many sessions there are whose names begin so; asked as a superuser, for others do not see all names."""
        question = "SELECT count(*) FROM pg_stat_activity WHERE starts_with(application_name, %s)"
        with psycopg.connect(make_conninfo(self.dsn, user="postgres")) as conn:
            return int(conn.execute(question, (name,)).fetchall()[0][0])

    def errors(self) -> list[str]:
        """The errors of failed runs, once each: for people who look why a wait had no end."""
        return [error for (error,) in self.rows("SELECT DISTINCT error FROM dl_jobs WHERE error IS NOT NULL LIMIT 5")]

    def await_workers(self, number: int, patience: float = 300) -> None:
        """Return once so many workers are idle in the list that the keepers show."""
        question = "SELECT count(*) FROM dl_workers WHERE state = 'idle' AND seen_at > now() - interval '30 s'"
        until(lambda: self.rows(question) == [(number,)], f"{number} idle workers", patience)

    def end(self) -> None:
        """End every program of every host at once."""
        for host in self.hosts:
            pids = [pid for pid in host.processes() if psutil.pid_exists(pid)]
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for program in host.programs.values():
                program.process.wait(30)


def migrated(dsn: str) -> list[str]:
    """What `migrate` of this code would still apply."""
    with db.connect(dsn, name="test", schema="public") as conn:
        return migrations.missing(conn)
