"""The place of a bench: a database, schemas of its own, a folder, and real programs as the command line starts them."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bench.pipelines import MARKS, RECORD, Mark
from dataloader import embedded
from dataloader.config import Settings
from dataloader.queue import db, migrations
from dataloader.queue.enqueue import NewJob, enqueue_many
from tools.programs import Program, answers, free_port

SQL = db.statements(str(Path(__file__).parent / "bench.sql"))
PATIENCE = 30.0  # seconds without an event after which a measurement fails
WARM_JOBS = 100  # for each worker, before the measurement


class BenchError(Exception):
    """A measurement is not possible; the message names the reason and the remedy."""


@dataclass
class Place:
    """A database, where the bench makes and drops schemas with the prefix, and the size of the measurements."""

    dsn: str
    folder: Path
    rounds: int = 5
    scale: float = 1.0
    pg_bin: Path | None = None
    admin_dsn: str = ""  # of a superuser, where we know one
    prefix: str = field(default_factory=lambda: f"dl_bench_{os.getpid()}_{uuid4().hex[:6]}")
    _schemas: list[str] = field(default_factory=list)

    def scaled(self, count: int, least: int = 1) -> int:
        """`count` times the scale, but at least `least`."""
        return max(least, round(count * self.scale))

    def connect(self, schema: str) -> db.Connection:
        """A session on one of our schemas, opened as the package opens them."""
        conn = db.connect(self.dsn, name="dl-bench", schema=schema, answer_within=3_600, idle_in_transaction_timeout=0)
        conn.is_direct  # noqa: B018  read as workers and the API do: the session may then prepare statements
        return conn

    def dsn_of(self, schema: str) -> str:
        """The database's DSN with the schema in its search_path, for programs without a setting for it."""
        options = conninfo_to_dict(self.dsn).get("options") or ""
        return make_conninfo(self.dsn, options=f"{options} -c search_path={schema}".strip())

    def queue(self, name: str = "queue") -> str:
        """A schema with the queue of `migrate`; later calls with the same name return the same schema."""
        schema = f"{self.prefix}_{name}"
        if schema not in self._schemas:
            self._schemas.append(schema)
            migrations.migrate(self.dsn, schema)
        return schema

    def bare(self, triggers: bool = False) -> str:
        """A schema with the contract's tables, by its DDL, and the index for its claim; made once.

        `triggers`: with the contract's notify triggers.
        """
        schema = f"{self.prefix}_bare{'_triggers' * triggers}"
        if schema not in self._schemas:
            self._schemas.append(schema)
            with self.connect(schema) as conn, conn.transaction():
                conn.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
                conn.execute(SQL["bare_tables"])
                conn.execute(SQL["bare_index"])
                if triggers:
                    conn.execute(SQL["bare_triggers"])
        return schema

    def drop(self) -> None:
        """Drop every schema that this bench made."""
        with self.connect("public") as conn:
            while self._schemas:
                conn.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(self._schemas[-1])))
                self._schemas.pop()

    def in_turns(self, *sides: Callable[[], Any]) -> list[list[Any]]:
        """The values that each side measures, one for each round; every other round begins with the last side."""
        samples: list[list[Any]] = [[] for _ in sides]
        pairs = list(zip(sides, samples, strict=True))
        for number in range(self.rounds):
            for side, sample in pairs[:: -1 if number % 2 else 1]:
                sample.append(side())
        return samples

    def about(self) -> str:
        """The machine, the server and the rounds, on which the figures depend, in one line."""
        with self.connect("public") as conn:
            server = ", ".join(f"{name} {value}" for name, value in conn.execute(SQL["machine"]).fetchall())
        info = Path("/proc/cpuinfo")
        models = re.findall(r"model name\s*: (.*)", info.read_text("utf-8") if info.exists() else "")
        processor = f"{len(os.sched_getaffinity(0))} cores of {models[0] if models else platform.processor()}"
        today, python = datetime.now(UTC).date(), platform.python_version()
        return f"{processor}, Python {python}, PostgreSQL with {server}; medians of {self.rounds} rounds, {today}."


@contextmanager
def placed(settings: Settings, **size: Any) -> Iterator[Place]:
    """The settings' database, or an embedded PostgreSQL, and a folder; the block's end removes all that was made."""
    with ExitStack() as cleanup:
        folder = settings.dl_home / f"bench-{time.time_ns()}"
        folder.mkdir(parents=True)
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        dsn = admin_dsn = settings.queue_dsn
        if dsn is None:
            server = embedded.Server.start(folder / "postgres", pg_bin=settings.dl_pg_bin)
            dsn = cleanup.enter_context(server).dsn
            admin_dsn = make_conninfo(dsn, user="postgres")
        place = Place(dsn, folder, pg_bin=settings.dl_pg_bin, admin_dsn=admin_dsn or "", **size)
        cleanup.callback(place.drop)
        yield place


# --- jobs ---


def new_jobs(jobs: int, *, task: str = "bench.noop", keys: int = 0, share: str = "", **args: Any) -> list[NewJob]:
    """So many jobs, with a key each or with `keys` keys; `share` is their partition_key."""
    keyed = ((number, number % keys if keys else number) for number in range(1, jobs + 1))
    return [NewJob("bench", task, f"{share}key-{k}", {**args, "n": n}, partition_key=share) for n, k in keyed]


def add(conn: db.Connection, jobs: int, **more: Any) -> None:
    """Enqueue `new_jobs` as users do, in one transaction; no table is analysed."""
    enqueue_many(conn, new_jobs(jobs, **more))


def seed(conn: db.Connection, jobs: int, *, keys: int = 0, **more: Any) -> None:
    """Insert rows, for tables that are not the farm's and for rows by the million, and ANALYZE the table.

    `keys`: as for `new_jobs`. `more`: key, the beginning of their names; status; delay_sec until the jobs are due;
    age_sec, by which the jobs are older.
    """
    given = {"key": "key", "status": "queued", "delay_sec": 0, "age_sec": 0} | more
    with conn.transaction():
        conn.execute(SQL["seed"], given | {"jobs": jobs, "keys": keys or 1_000_000_000})
        conn.execute("ANALYZE dl_jobs")


def clear(conn: db.Connection) -> None:
    """Empty the tables, and ask for a checkpoint, if the role may, so that none falls into a measurement."""
    conn.execute(SQL["clear"])
    try:
        conn.execute("CHECKPOINT")
    except psycopg.errors.InsufficientPrivilege:
        return


def await_drained(conn: db.Connection, check: Callable[[], None]) -> None:
    """Return once no job of the queue `bench` is left; `check` raises when a wait is useless.

    The wait reads the newest row by its key until this row has ended, and only then counts rows, which costs more.
    """
    newest = {"job_id": answer(conn, "newest")}
    last_left, deadline = float("inf"), time.monotonic() + PATIENCE
    while answer(conn, "has_ended", newest) is False or answer(conn, "unfinished"):
        check()
        if time.monotonic() > deadline:
            left, deadline = answer(conn, "unfinished"), time.monotonic() + PATIENCE
            if left >= last_left:
                raise BenchError(f"{left} jobs are left, and none was finished within {PATIENCE:g} s")
            last_left = left
        time.sleep(0.02)


def rate(conn: db.Connection, jobs: int) -> float:
    """The jobs/s of the `jobs` jobs from the first start to the last end, by the rows; the tables are empty then."""
    row = conn.execute(SQL["drained"]).fetchone()
    if row is None or row[0] != jobs:
        raise BenchError(f"{row and row[0]} of {jobs} jobs succeeded")
    clear(conn)
    return jobs / float(row[1])


def answer(conn: db.Connection, statement: str, parameters: dict[str, Any] | None = None) -> Any:
    """The first value of one of our statements; None without a row."""
    row = conn.execute(SQL[statement], parameters).fetchone()
    return row[0] if row else None


# --- programs ---


class Farm(Program):
    """`dataloader workers` on the queue `bench`; ready once all its workers listen."""

    def __init__(self, place: Place, workers: int, prefetch: int = 1, schema: str = "", marks: str = "marks") -> None:
        self.place, self.workers, self.schema = place, workers, schema or place.queue()
        self.marks = place.folder / marks
        self.marks.touch()
        entry = {"queue": "bench", "concurrency": workers, "prefetch": prefetch}
        settings = {"WORKERS_JSON": json.dumps([entry]), "DL_PIPELINES": "bench.pipelines", MARKS: str(self.marks)}
        settings |= {"DL_DB_DSN": place.dsn, "PG_SCHEMA_QUEUE": self.schema}
        super().__init__("workers", place.folder, self._all_listen, settings)

    def _all_listen(self) -> bool:
        return self.log.read_bytes().count(b'"worker.started"') >= self.workers

    def warm(self, conn: db.Connection, task: str = "bench.noop") -> None:
        """Let every worker do some jobs, so that its statements are prepared; then empty the tables."""
        self.run(conn, self.place.scaled(WARM_JOBS, least=10) * self.workers, task=task)
        clear(conn)

    def run(self, conn: db.Connection, jobs: int, **more: Any) -> None:
        """Add jobs as `add` does, and wait for their ends."""
        add(conn, jobs, **more)
        await_drained(conn, self.check)

    def noted(self) -> list[Mark]:
        """The marks that jobs have left since the last call."""
        marks = [Mark(*fields) for fields in RECORD.iter_unpack(self.marks.read_bytes())]
        self.marks.write_bytes(b"")
        return marks


@contextmanager
def api(place: Place) -> Iterator[int]:
    """`dataloader api` on the queue of the bench; yields its port."""
    port = free_port()
    settings = {"DL_DB_DSN": place.dsn, "PG_SCHEMA_QUEUE": place.queue()}
    settings |= {"APP_HOST": "127.0.0.1", "APP_PORT": str(port)}
    with Program("api", place.folder, lambda: answers(port), settings):
        yield port
