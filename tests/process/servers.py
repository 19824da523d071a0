"""PostgreSQL servers of a test's own, to be ended, killed, promoted and started again."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
from farming import on_all, titled, until
from psycopg.conninfo import make_conninfo

from dataloader import embedded
from dataloader.queue import migrations

# Commits must outlive the server's process (synchronous_commit), not the machine (fsync).
SETTINGS = {
    "fsync": "off",
    "logging_collector": "off",
    "shared_buffers": "32MB",
    "wal_receiver_status_interval": "1s",  # a standby speaks at least so often
}
FAST, IMMEDIATE = signal.SIGINT, signal.SIGQUIT  # to the postmaster: sessions are ended in order, or just die


class Database:
    """A server of the test's own, to be ended and started at will."""

    def __init__(self, root: Path, **settings: str) -> None:
        self.server = embedded.Server.start(root, SETTINGS | settings, given_programs(), initdb=["--no-sync"])
        self.socket = root / "run"

    @property
    def dsn(self) -> str:
        return self.server.dsn

    @property
    def superusers_dsn(self) -> str:
        return make_conninfo(self.dsn, user="postgres")

    def end(self, how: signal.Signals) -> None:
        self.server.process.send_signal(how)
        self.server.process.wait(60)

    def kill(self) -> None:
        """End the server as a power cut does: every process at once, none can say a word more."""
        on_all(psutil.Process.kill, self.processes())
        self.server.process.wait(60)

    def suspend(self) -> None:
        """Stop every process: the kernel still accepts connections, and nothing is answered."""
        on_all(psutil.Process.suspend, self.processes())

    def resume(self) -> None:
        on_all(psutil.Process.resume, self.processes())

    def processes(self, title: str = "") -> list[psutil.Process]:
        """The postmaster and its children, or those whose title has this text."""
        postmaster = psutil.Process(self.server.process.pid)
        return titled((postmaster, *postmaster.children(recursive=True)), title)

    def restart(self, how: signal.Signals) -> None:
        """End it and start it again in the same place, whose lock stays ours."""
        self.end(how)
        self.start_again()

    def start_again(self) -> None:
        """After its end."""
        self.server.process = embedded.serve(self.server.root, SETTINGS, given_programs(), (), "dataloader")

    def admin(self, *statements: str) -> list[Any]:
        """Run statements as a superuser, whatever the defaults for transactions; the rows of the last."""
        with psycopg.connect(
            self.superusers_dsn, options="-c default_transaction_read_only=off", autocommit=True
        ) as conn:
            for statement in statements:
                cursor = conn.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def backend(self, name: str) -> int:
        """The process of the one session of this name."""
        ((pid,),) = self.admin(f"SELECT pid FROM pg_stat_activity WHERE application_name LIKE '{name}%'")
        return pid


def given_programs() -> Path | None:
    given = os.environ.get("DL_PG_BIN")
    return Path(given) if given else None


@contextmanager
def root() -> Iterator[Path]:
    """A folder for a server; what a killed run leaves, the next one removes."""
    folder = Path(tempfile.mkdtemp(prefix="dl-test-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def serving(folder: Path, **settings: str) -> Iterator[Database]:
    database = Database(folder, **settings)
    try:
        yield database
    finally:
        database.server.stop()


@contextmanager
def with_queue(**settings: str) -> Iterator[Database]:
    """A server with the project's schema."""
    with root() as folder, serving(folder, **settings) as database:
        migrations.migrate(database.dsn, schema="public")
        yield database


@contextmanager
def following(primary: Database, folder: Path, name: str = "standby") -> Iterator[Database]:
    """A second server in this folder, which streams from `primary` under this name."""
    programs = embedded.find_programs(folder / "data", given_programs())
    source = f"{primary.superusers_dsn} application_name={name}"
    quickly = ["--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
    subprocess.run([programs / "pg_basebackup", "-d", source, "-D", folder / "data", *quickly], check=True)
    with serving(folder) as standby:
        yield standby


def confirms(standby: str, primary: Database) -> None:
    """From now on `primary` acknowledges only what the standby of this name has."""
    primary.admin(f"ALTER SYSTEM SET synchronous_standby_names = '{standby}'", "SELECT pg_reload_conf()")
    state = f"SELECT 1 FROM pg_stat_replication WHERE application_name = '{standby}' AND sync_state = 'sync'"
    until(lambda: primary.admin(state), "the standby to be synchronous")
