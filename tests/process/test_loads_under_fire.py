"""Loads under fire: whatever ends a run at any message, the table and the watermark are those of before or of after.

A seed chooses the mode, the state of the table, the disturbance, and the message of the load at which it comes.
DL_TEST_LOADS is the number of seeds.
"""

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

import psycopg
import pyarrow
import pytest
from farming import Farm, farm_on, until
from link import AFTER, BEFORE, Link, linked
from psycopg.conninfo import make_conninfo
from pyarrow import parquet
from servers import FAST, IMMEDIATE, Database, root, serving

from dataloader.pipelines import state
from dataloader.queue import operations

pytestmark = [pytest.mark.long]
SEEDS = int(os.environ.get("DL_TEST_LOADS", "20"))
ROWS = [(n, "2026-03-02", n % 7) for n in range(60)]
KEYED = {"mode": "merge", "key": ["id"]}
MODES: list[dict[str, Any]] = [
    {"mode": "append"},
    {"mode": "replace"},
    {"mode": "replace", "key": ["id"]},
    {"mode": "replace", "partition": {"day": "2026-03-02"}},
    KEYED,
    KEYED | {"delete_missing": True},
    KEYED | {"delete_missing": "soft"},
    KEYED | {"max_errors": 5, "path": "wrong.csv"},
    {"mode": "scd2", "key": ["id"]},
    KEYED | {"path": "f.parquet"},
    KEYED | {"cursor": {"column": "id"}},
    {"mode": "append", "cursor": {"column": "id"}},
]
BEFORE_SCD2 = "CREATE TABLE t (id int, day date, n int, valid_from timestamptz, valid_to timestamptz, is_current bool)"
BEFORE_MERGE = "CREATE TABLE t (id int PRIMARY KEY, day date, n int, deleted_at timestamptz)"
EMPTY = """
DROP TABLE IF EXISTS t, t_rejects;
DELETE FROM dl_state;
"""
# One statement, so one snapshot; the times of versions and deletions differ from run to run.
LOOK = """
SELECT (SELECT value::text FROM dl_state),
       (SELECT array_agg(r ORDER BY r) FROM (
          SELECT (to_jsonb(t) - '{valid_from,valid_to,deleted_at}'::text[])::text
                 || (to_jsonb(t) ->> 'deleted_at' IS NULL) FROM t) AS rows (r))
"""


class Case(NamedTuple):
    """A kind of load, of which all runs send the same messages."""

    mode: int
    part_bytes: int
    is_new: bool  # the table

    @property
    def args(self) -> dict[str, Any]:
        """The args of `fire.load`."""
        given = {"table": "t", "batch_rows": 10} | MODES[self.mode]
        if "cursor" in given:
            task, more = "load.postgres", {"source": "crm", "query": "SELECT * FROM orders ORDER BY id"}
        else:
            task, more = "load.parquet" if "parquet" in str(given) else "load.csv", {"path": "f.csv"}
        return {"task": task, "part_bytes": self.part_bytes, "args": more | given}


class Fire:
    """A farm with one worker, and a link to its target, a server of its own."""

    def __init__(self, database: Database, link: Link, farm: Farm) -> None:
        self.database, self.link, self.farm = database, link, farm
        self.calm: dict[Case, tuple[int, Any, Any]] = {}

    def prepare(self, case: Case) -> None:
        """Give the table its state of before."""
        mode = MODES[case.mode]["mode"]
        table = BEFORE_SCD2 if mode == "scd2" else BEFORE_MERGE
        self.database.admin("SET ROLE dataloader", EMPTY)
        if not case.is_new:
            table = table if "key" in MODES[case.mode] else table.replace(" PRIMARY KEY", "")
            more = ", now(), NULL, true" * (mode == "scd2")
            some = f"INSERT INTO t SELECT n, '2026-03-02', 0 {more} FROM generate_series(1, 100, 3) n"
            self.database.admin("SET ROLE dataloader", table, some)

    def look(self, conn: psycopg.Connection[Any] | None = None) -> Any:
        """The watermark and the rows; None without a table."""
        with suppress(psycopg.errors.UndefinedTable):
            return conn.execute(LOOK).fetchall() if conn else self.database.admin(LOOK)
        return None

    def undisturbed(self, case: Case) -> tuple[int, Any, Any]:
        """The number of messages of such a load, the state behind it, and its rejected rows."""
        if case not in self.calm:
            self.prepare(case)
            begin = self.link.passed
            self.farm.wait(self.farm.enqueue("fire.load", args=case.args), "succeeded")
            self.calm[case] = self.link.passed - begin, self.look(), self.rejected(case)
        return self.calm[case]

    def disturb(self, how: str, pid: int) -> None:
        """Do this to the run whose process this is, or to its link or its target."""
        if how == "kill":
            os.kill(pid, signal.SIGKILL)
        elif how == "cut":
            self.link.leave()
            self.link.back()
        elif how == "cancel":
            running = "SELECT job_id FROM dl_jobs WHERE status = 'running'"
            operations.change(self.farm.conn, "cancel", [job_id for (job_id,) in self.farm.rows(running)], "test")
            with suppress(AssertionError):  # most runs notice it when the message that waits has passed
                until(lambda: not self.farm.rows(running), patience=0.3)
        else:
            self.database.restart(FAST if how == "restart" else IMMEDIATE)

    @contextmanager
    def watched(self) -> Iterator[list[Any]]:
        """Collects the states that a reader sees meanwhile, each once."""
        seen: list[Any] = []
        is_over = threading.Event()

        def read() -> None:
            while not is_over.is_set():
                with suppress(psycopg.OperationalError), psycopg.connect(self.database.dsn, autocommit=True) as conn:
                    while not is_over.wait(0.003):
                        state = self.look(conn)
                        if state not in seen:
                            seen.append(state)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield seen
        finally:
            is_over.set()
            reader.join()

    def rejected(self, case: Case) -> list[Any]:
        rejects = "SELECT line, reason FROM t_rejects ORDER BY line"
        return self.database.admin(rejects) if "max_errors" in MODES[case.mode] else []


@pytest.fixture(scope="module")
def fire(module_db: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fire]:
    folder = tmp_path_factory.mktemp("fire")
    text = "".join("{},{},{}\n".format(*row) for row in ROWS)
    (folder / "f.csv").write_text(f"id,day,n\n{text}")
    (folder / "wrong.csv").write_text(f"id,day,n\n1,x,\n{text}2,2026-02-31,\n3\n")
    columns = dict(zip(("id", "day", "n"), map(list, zip(*ROWS, strict=True)), strict=True))
    parquet.write_table(pyarrow.table(columns), folder / "f.parquet")
    with root() as place, serving(place) as database, farm_on(module_db, folder) as farm:
        orders = "SELECT n AS id, date '2026-03-02' AS day, n % 7 AS n FROM generate_series(1, 60) n"
        database.admin("SET ROLE dataloader", "CREATE SCHEMA crm", f"CREATE TABLE crm.orders AS {orders}")
        with psycopg.connect(database.dsn) as conn:
            state.create(conn, state.TABLE)
        with linked(database.dsn) as link, closing(farm):
            crm = make_conninfo(link.dsn, options="-c search_path=crm")
            targets = {"dl_data_dir": folder, "dl_target_dsn": link.dsn, "dl_source_crm": crm}
            farm.ready(workers=1, dl_pipelines="fire_pipelines", **targets)
            fire = Fire(database, link, farm)
            fire.undisturbed(Case(0, 1, is_new=True))  # the first run of all makes the table of the fence
            fire.calm.clear()
            yield fire


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_load_that_is_disturbed_at_any_message_leaves_before_or_after(fire: Fire, seed: int) -> None:
    chance = random.Random(seed)
    case = Case(seed % len(MODES), chance.choice([1, 2**23]), chance.random() < 0.3)
    how = chance.choice(["kill", "cancel", "cut", "restart", "crash"])
    messages, after, rejected = fire.undisturbed(case)
    fire.prepare(case)
    before, is_over = fire.look(), threading.Event()

    def act(pid: int) -> None:
        fire.disturb(how, pid)
        is_over.set()

    with fire.watched() as seen:
        last = messages - chance.randint(0, 2)  # beside the commit
        fire.link.act_at(chance.choice([last, chance.randint(1, messages)]), chance.choice([BEFORE, AFTER]), act)
        job_id = fire.farm.enqueue("fire.load", args=case.args)

        def has_acted() -> bool:
            """Or the message does not come: a COPY that the server refuses has a piece more or less."""
            is_done = fire.farm.job(job_id)["status"] == "succeeded"
            return is_over.is_set() or (is_done and fire.link.disarmed())

        until(has_acted, f"{how} of {case}")

        def has_ended() -> bool:
            operations.change_queue(fire.farm.conn, "run-all", "q", "test")  # the delay after an error is long
            return fire.farm.job(job_id)["status"] not in ("queued", "running")

        until(has_ended, f"the end after {how} of {case}")
    job, left = fire.farm.job(job_id), fire.look()
    assert job["status"] == "succeeded" or (how, job["status"]) == ("cancel", "canceled"), job["error"]
    assert left == after or (job["status"] == "canceled" and left == before)
    assert left != after or fire.rejected(case) == rejected
    assert [state for state in seen if state not in (before, after)] == []
