"""The place of a bench: a database, schemas of its own, a folder; and the sizes and rounds of the measurements."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from rich.progress import Progress

from dataloader.queue import db, migrations
from dataloader.queue.enqueue import NewJob, enqueue_many

SQL = db.statements("bench.sql")
PATIENCE = 30.0  # seconds without an event after which a measurement fails
_LOOK_SEC = 0.02


Side = Callable[[], float]


class BenchError(Exception):
    """A measurement is not possible; the message names the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The size of a bench: `rounds` of each figure, sizes times `scale`, `prefetch` jobs at a time."""

    rounds: int = 5
    scale: float = 1.0
    prefetch: int = 200
    bare: str = "plain"  # the bare tables: plain, contract (with its notify triggers), lean (without its indexes)

    def scaled(self, count: int, least: int = 1) -> int:
        """`count` times the scale, but at least `least`."""
        return max(least, round(count * self.scale))


@dataclass
class Place:
    """A database, where the bench makes and drops schemas with the prefix."""

    dsn: str
    folder: Path
    wish: Wish
    pgbench: Path | None
    progress: Progress
    prefix: str = field(default_factory=lambda: f"dl_bench_{os.getpid()}_{uuid4().hex[:6]}")
    _schemas: list[str] = field(default_factory=list)

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

    def bare(self, kind: str | None = None) -> str:
        """A schema with the contract's tables, by the contract's DDL, and the index for its claim; made once."""
        kind = kind or self.wish.bare
        schema = f"{self.prefix}_bare_{kind}"
        if schema not in self._schemas:
            self._schemas.append(schema)
            with self.connect(schema) as conn, conn.transaction():
                conn.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
                conn.execute(SQL["bare_tables"])
                conn.execute(SQL["bare_index"])
                for extra in {"contract": ["bare_triggers"], "lean": ["bare_lean"]}.get(kind, []):
                    conn.execute(SQL[extra])
        return schema

    def drop(self) -> None:
        """Drop every schema that this bench made."""
        with self.connect("public") as conn:
            while self._schemas:
                conn.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(self._schemas[-1])))
                self._schemas.pop()

    @contextmanager
    def steps(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """A progress bar of `total` steps; the caller calls the yielded function after each."""
        task = self.progress.add_task(what, total=total)
        yield lambda: self.progress.advance(task)
        self.progress.remove_task(task)

    def in_turns(self, what: str, ours: Side | None, bare: Side | None) -> tuple[list[float], list[float]]:
        """The values that both sides measure, one for each round; the sides take turns at being first.

        A side that is None has an empty sample.
        """
        samples: tuple[list[float], list[float]] = [], []
        sides = [(side, sample) for side, sample in zip((ours, bare), samples, strict=True) if side]
        with self.steps(what, self.wish.rounds * len(sides)) as step:
            for number in range(self.wish.rounds):
                for side, sample in sides[:: -1 if number % 2 else 1]:
                    sample.append(side())
                    step()
        return samples


def add(
    conn: db.Connection, jobs: int, *, task: str = "bench.noop", keys: int = 0, share: str = "", **args: Any
) -> None:
    """Enqueue jobs as users do, in one transaction, with a key each or with `keys` keys; nothing is analysed.

    `share` is their partition_key.
    """
    keyed = ((number, number % keys if keys else number) for number in range(1, jobs + 1))
    new = [NewJob("bench", task, f"{share}key-{k}", {**args, "n": n}, partition_key=share) for n, k in keyed]
    enqueue_many(conn, new)


def seed(conn: db.Connection, jobs: int, *, keys: int = 0, **more: Any) -> None:
    """Insert rows, for tables that are not the farm's and for rows by the million, and ANALYZE the table.

    `keys`: as for `add`. `more`: key, the beginning of their names; status; delay_sec until the jobs are due;
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
    newest = {"job_id": _answer(conn, "newest")}
    last_left, deadline = float("inf"), time.monotonic() + PATIENCE
    while _answer(conn, "has_ended", newest) is False or _answer(conn, "unfinished"):
        check()
        if time.monotonic() > deadline:
            left, deadline = _answer(conn, "unfinished"), time.monotonic() + PATIENCE
            if left >= last_left:
                raise BenchError(f"{left} jobs are left, and none was finished within {PATIENCE:g} s")
            last_left = left
        time.sleep(_LOOK_SEC)


def drained(conn: db.Connection, jobs: int) -> float:
    """The seconds from the first start to the last end of the `jobs` jobs; BenchError when not all have succeeded."""
    row = conn.execute(SQL["drained"]).fetchone()
    assert row is not None  # noqa: S101  an aggregate always has a row
    if row[0] != jobs:
        raise BenchError(f"{row[0]} of {jobs} jobs succeeded")
    return float(row[1])


def machine(conn: db.Connection) -> dict[str, Any]:
    """The facts of machine and server that the figures depend on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "psycopg": psycopg.__version__,
        "postgresql": dict(conn.execute(SQL["machine"]).fetchall()),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _answer(conn: db.Connection, statement: str, parameters: dict[str, Any] | None = None) -> Any:
    row = conn.execute(SQL[statement], parameters).fetchone()
    return row[0] if row else None
