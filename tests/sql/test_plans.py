"""What a claim costs: the same with a thousand rows as with a million, whatever the statistics say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import psycopg
import pytest
from hands import CLAIMS, claim_buffers, quietly, value
from psycopg import sql

from dataloader.queue import db

CLAIM, RECOVER = (
    (files("dataloader.sql.functions") / f"{verb}.sql").read_text("utf-8") for verb in ("claim", "recover")
)
LOOK_HOT, LOOK_SHORT, STEP_HOT, STEP_SHORT = (
    re.sub(r"\b(p_)?past\b", "0", query) for query in re.findall(r"OPEN candidates FOR\n(.*?);", CLAIM, re.DOTALL)
)
MILLION, THOUSAND = 1_000_000, 1_000
SLOTS = 64

# A queue per situation, mixed in the table as they would come; the keys of `hot` are busy by half, of `busy` all.
FILL = f"""
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, blocked_on, hot, available_at, created_at)
SELECT gen_random_uuid(), q, 't',
       CASE WHEN q IN ('hot', 'busy') THEN q || '-' || i / 10 %% {SLOTS} ELSE 'k' || i END,
       CASE q WHEN 'done' THEN 'succeeded' ELSE 'queued' END::dl_status,
       CASE q WHEN 'future' THEN 'time' END, q IN ('hot', 'busy'),
       CASE q WHEN 'future' THEN now() + interval '1 day' ELSE now() END, now() + i * interval '1 ms'
  FROM generate_series(1, %s) i,
       LATERAL (SELECT '{{ready,ready,ready,hot,hot,busy,future,future,done,done}}'::text[] AS names) of,
       LATERAL (SELECT names[1 + i %% 10] AS q) this
"""
RUNNING = f"""
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, attempt, lease_expires_at)
SELECT gen_random_uuid(), 'elsewhere', 't', key || i, 'running', 1, now() + interval '1 day'
  FROM generate_series(0, {SLOTS} - 1) i, unnest(ARRAY['hot-', 'busy-']) key WHERE key = 'busy-' OR i %% 2 = 0
"""
FOREIGN = """
SELECT job_id FROM dl_jobs WHERE queue = p_queue AND status = 'queued' AND available_at <= now()
 ORDER BY priority, created_at LIMIT 1 FOR UPDATE SKIP LOCKED
"""
# The buffers a claim may touch, by the situation of its queue.
BOUNDS = {"ready": 150, "hot": 1_200, "busy": 2_000, "future": 60, "done": 60}


def a_million(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of the million rows: the longest, which start first. With `--dist loadfile` they share one table."""
    for mark in (pytest.mark.long, pytest.mark.longest, pytest.mark.timeout(400)):
        test = mark(test)
    return test


@pytest.fixture
def thousand(dsn: str) -> Iterator[db.Connection]:
    """A queue with a thousand rows."""
    with db.connect(dsn, name="few", schema="public") as conn:
        filled(conn, THOUSAND)
        conn.execute("VACUUM ANALYZE dl_jobs")
        yield conn


@pytest.fixture(scope="module")
def million_rows(module_db: str) -> Iterator[db.Connection]:
    """A queue with a million rows, in a database that the tests of this file share."""
    with db.connect(module_db, name="many", schema="public", answer_within=300) as conn:
        conn.execute("ALTER TABLE dl_jobs SET (autovacuum_enabled = off)")
        filled(conn, MILLION)
        conn.execute("VACUUM dl_jobs")
        yield conn


@pytest.fixture
def million(million_rows: db.Connection) -> db.Connection:
    """The million, with statistics that are true."""
    million_rows.execute("ANALYZE dl_jobs")
    return million_rows


@pytest.fixture
def forgotten(module_db: str, million_rows: db.Connection, as_superuser: Callable[[str], str]) -> db.Connection:
    """The million, for a planner that last saw an empty table."""
    with db.connect(as_superuser(module_db), name="admin", schema="public") as admin:
        admin.execute("DELETE FROM pg_statistic WHERE starelid = 'dl_jobs'::regclass")
        admin.execute(
            "UPDATE pg_class SET reltuples = 0, relpages = 0, relallvisible = 0 WHERE oid = 'dl_jobs'::regclass"
            " OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = 'dl_jobs'::regclass)"
        )
    return million_rows


def filled(conn: db.Connection, rows: int) -> None:
    """Put the situations into an empty queue."""
    later = (
        []
        if rows < MILLION
        else conn.execute(
            "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'dl_jobs' AND indexname LIKE 'ix%'"
        ).fetchall()
    )
    for name, _ in later:
        conn.execute(sql.SQL("DROP INDEX {}").format(sql.Identifier(name)))
    with quietly(conn):
        conn.execute(FILL, (rows,))
        conn.execute(RUNNING.replace("%%", "%"))
    for _, definition in later:
        conn.execute(definition)


def plan_of(conn: psycopg.Connection[Any], query: str, queue: str, mode: str) -> dict[str, Any]:
    """The plan of a statement with p_queue in it, as a function's cached plan has it, and what it did."""
    with conn.transaction(force_rollback=True):
        conn.execute("SET LOCAL plan_cache_mode = " + mode)
        conn.execute("PREPARE candidates (text) AS " + query.replace("p_queue", "$1"))
        for _ in range(2):  # warm
            (plan,) = value(conn, f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE candidates ('{queue}')")
        conn.execute("DEALLOCATE candidates")
    return plan["Plan"]


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every node of a plan."""
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def faults(plan: dict[str, Any], bound: int) -> list[str]:
    """What a plan must not do."""
    found = [
        f"{node['Node Type']} on {node['Relation Name']}"
        for node in nodes(plan)
        if node.get("Relation Name") == "dl_jobs"
        and "Index" not in node["Node Type"]
        and node["Node Type"] != "LockRows"
    ]
    found += [
        f"{node['Node Type']} over {node['Plans'][0]['Actual Rows']} rows"
        for node in nodes(plan)
        if node["Node Type"].endswith("Sort") and node["Plans"][0]["Actual Rows"] > 100
    ]
    found += [
        f"{node['Rows Removed by Filter']} rows thrown away by a scan of {node['Index Name']}"
        for node in nodes(plan)
        if "Index Name" in node and node.get("Rows Removed by Filter", 0) > 100
    ]
    touched = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    return [*found, f"{touched} buffers"] if touched > bound or found else []


def candidate_faults(conn: db.Connection) -> dict[tuple[str, str], list[str]]:
    """What is wrong with the plans of a claim's candidate queries, those of the first look and of the second."""
    slots = value(conn, "SELECT dl_hot_slots('hot')")  # how they are found is part of a whole claim's cost, below
    short, hot = STEP_SHORT.replace("p_most", "1"), STEP_HOT.replace("p_most", "1")
    hot = hot.replace("dl_hot_slots(p_queue)", f"ARRAY{slots}")
    look_short = f"SELECT * FROM ({LOOK_SHORT}) candidates LIMIT 10"  # a cursor: as many as are asked for
    look_hot = LOOK_HOT.replace("unnest(waiting)", f"unnest(ARRAY{slots})")
    cases = {
        **{("ready", query): 60 for query in (short, look_short)},
        **{("future", query): 60 for query in (short, look_short)},
        **{(name, query): 600 for name in ("ready", "hot") for query in (hot, look_hot)},
    }
    found = {
        (queue, mode): faults(plan_of(conn, query, queue, mode), bound)
        for (queue, query), bound in cases.items()
        for mode in ("force_custom_plan", "force_generic_plan")
    }
    return {case: what for case, what in found.items() if what}


@a_million
def test_c2_a_claims_candidates_come_from_the_indexes(million: db.Connection) -> None:
    assert candidate_faults(million) == {}


@a_million
def test_c3_stale_statistics_change_nothing_about_the_candidates(forgotten: db.Connection) -> None:
    assert candidate_faults(forgotten) == {}


@a_million
def test_a_foreign_claim_is_index_served(million: db.Connection) -> None:
    """It sorts what is ready, for the protocol says so; but it never reads the whole table."""
    touched = {}
    for queue in ("ready", "future", "done"):
        plan = plan_of(million, FOREIGN, queue, "force_custom_plan")
        assert [node for node in nodes(plan) if node["Node Type"] == "Seq Scan"] == []
        touched[queue] = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    assert touched["done"] < 60


def cost(conn: db.Connection) -> dict[tuple[str, str], int]:
    """The buffers of a claim, by the situation of its queue and by its kind."""
    return {(queue, kind): claim_buffers(conn, queue, kind) for queue in BOUNDS for kind in CLAIMS}


def too_dear(costs: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    return {(queue, kind): touched for (queue, kind), touched in costs.items() if touched > BOUNDS[queue]}


@a_million
def test_a_claim_costs_the_same_in_a_thousand_rows_and_in_a_million(
    million: db.Connection, thousand: db.Connection
) -> None:
    """An index may be two levels higher; nothing else grows."""
    few, many = cost(thousand), cost(million)
    assert {case: (few[case], many[case]) for case in few if many[case] > max(2.5 * few[case], few[case] + 20)} == {}
    assert too_dear(many) == {}


@a_million
def test_c3_a_claim_costs_the_same_with_stale_statistics(forgotten: db.Connection) -> None:
    assert too_dear(cost(forgotten)) == {}


def test_c3_a_session_that_planned_on_an_empty_table_claims_as_cheaply(conn: db.Connection, dsn: str) -> None:
    """Its plans are cached, and nothing tells it that the table has grown."""
    with db.connect(dsn, name="early", schema="public") as early:
        early.execute("ANALYZE dl_jobs")
        for _ in range(10):
            cost(early)
        filled(conn, 20 * THOUSAND)
        assert too_dear(cost(early)) == {}


@a_million
def test_the_reaper_reads_what_runs_and_not_what_ended(million: db.Connection) -> None:
    (expired,) = re.findall(
        r"SELECT \* INTO held (FROM dl_jobs\s+WHERE status = 'running'.*?)LIMIT 1", RECOVER, re.DOTALL
    )
    for variable, given in {"p_up_sec": "0", "p_patience_sec": "15", "back": "now()"}.items():
        expired = re.sub(rf"\b{variable}\b", given, expired)
    query = f"SELECT * {expired} AND p_queue = '' LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED"
    plan = plan_of(million, query, "", "force_custom_plan")
    assert [node["Node Type"] for node in nodes(plan) if node["Node Type"] == "Seq Scan"] == []
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 250
