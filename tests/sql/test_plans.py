"""The cost of claims and ends: the same with a thousand rows as with a million, with any statistics.

Measured in buffers that a whole call touches, in a worker's session: with the plans that its functions have made there.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import psycopg
import pytest
from click.testing import CliRunner
from hands import Conn, Worker, buffers, enqueue, many, quietly, value
from psycopg import sql

from dataloader.cli import main
from dataloader.cli.doctor import diagnose_claim
from dataloader.queue import db, lifecycle
from dataloader.queue.reports import keys as of_keys
from dataloader.queue.reports import postgres, stats, tallies

MILLION, THOUSAND = 1_000_000, 1_000
KEYS = 64

# A queue per situation, mixed in the table as they would come. The keys of `half` are busy by half, those of `busy` and
# of `parked` all; the rows of `parked` wait for them.
FILL = f"""
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, blocked_on, available_at, created_at, score)
SELECT {{job_id}}, q, 't',
       CASE WHEN q IN ('half', 'busy', 'parked', 'ordered') THEN q || '-' || i / 10 %% {KEYS} ELSE 'k' || i END,
       CASE q WHEN 'done' THEN 'succeeded' ELSE 'queued' END::dl_status,
       CASE q WHEN 'future' THEN 'time' WHEN 'parked' THEN 'key' END,
       CASE q WHEN 'future' THEN now() + interval '1 day' ELSE now() END, now() + i * interval '1 ms',
       CASE q WHEN 'ordered' THEN i END
  FROM generate_series(1, %s) i,
       LATERAL (SELECT '{{{{ready,ready,ordered,half,parked,busy,future,future,done,done}}}}'::text[] AS names) of,
       LATERAL (SELECT names[1 + i %% 10] AS q) this
"""
IDS = {
    "v4": "gen_random_uuid()",
    "v7": "overlay(gen_random_uuid()::text placing to_char(i, 'FM0000-0000-7') from 5 for 11)::uuid",
}
RUNNING = f"""
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, attempt, lease_expires_at, claimed_by)
SELECT gen_random_uuid(), 'elsewhere', 't', key || i, 'running', 1, now() + interval '1 day', 'w'
  FROM generate_series(0, {KEYS} - 1) i, unnest(ARRAY['half-', 'busy-', 'parked-']) key
 WHERE key <> 'half-' OR i %% 2 = 0
"""
FOREIGN = """
SELECT job_id FROM dl_jobs WHERE queue = p_queue AND status = 'queued' AND available_at <= now()
 ORDER BY priority, created_at LIMIT 1 FOR UPDATE SKIP LOCKED
"""


class Call(NamedTuple):
    """A statement, how many buffers it may touch, and what makes its situation."""

    statement: str
    most: int
    before: str = ""
    held: str = ""  # the keys that another session has


def step(queue: str, most: int = 1) -> str:
    nothing = ", ".join(["NULL"] * 8)
    return f"SELECT * FROM dl_step(ARRAY['{queue}'], false, 'w', now(), 15, {most}, 0, '-infinity', {nothing})"


def short_step(most: int = 1) -> str:
    return f"SELECT * FROM dl_step_plain('ready', 'w', now(), {most}, NULL, NULL, NULL, NULL)"


def ten(column: str, where: str, order: str = "created_at") -> str:
    return f"ARRAY(SELECT {column} FROM dl_jobs WHERE {where} ORDER BY {order} LIMIT 10)"


def keys(name: str, number: int = 10) -> str:
    return f"ARRAY(SELECT hashtext('{name}-' || i) FROM generate_series(0, {number} - 1) i)"


def ordered(settings: str) -> str:
    """Makes the queue ordered: whether it is ordered, whether it merges, how many jobs."""
    return f"INSERT INTO dl_queues (queue, ordered, merge, merge_limit) VALUES ('ordered', {settings});"


# Called in other services' sessions too, which plan as they like.
ANYWHERE = ("dl_unpark", "dl_unpark_stranded")
READY = "queue = 'ready' AND status = 'queued' AND blocked_on IS NULL"
RUNS = "status = 'running' AND lock_key LIKE 'parked-%' AND hashtext(lock_key) <> 0"
# Every statement of the claim and of the ends, by whole calls.
CALLS = {
    "a claim of one": Call(step("ready"), 150),
    "a claim of twenty": Call(step("ready", 20), 600),
    "a short claim of one": Call(short_step(), 150),
    "a short claim of twenty": Call(short_step(20), 600),
    "dl_succeed": Call(
        "SELECT dl_succeed('w', current_setting('t.ids')::uuid[], array_fill(1, ARRAY[10]), NULL, NULL)",
        900,
        f"SELECT set_config('t.ids', {ten('job_id', RUNS, 'hashtext(lock_key)')}::text, true)",
    ),
    "a claim among busy keys": Call(step("half"), 450),  # random ids lie on any page of an index
    "a claim where all is parked": Call(step("parked"), 40),
    "a claim where nothing is due": Call(step("future"), 40),
    "a claim where nothing is queued": Call(step("done"), 40),
    "a claim of an ordered queue": Call(step("ordered", 10), 1_100, ordered("true, NULL, NULL")),
    "a claim of a merged queue": Call(step("ordered", 10), 1_600, ordered("true, true, 2")),
    "a claim of an ordered queue behind heads that wait": Call(
        step("ordered", 10),
        1_600,
        ordered("true, NULL, NULL")
        + "UPDATE dl_jobs SET available_at = now() + interval '1 day', blocked_on = 'time', attempt = 1"
        " WHERE job_id IN (SELECT job_id FROM dl_jobs WHERE status = 'queued' AND score IS NOT NULL"
        "   AND queue = 'ordered'"
        "   ORDER BY priority, created_at LIMIT 10)",
    ),
    "dl_by_lag": Call("SELECT dl_by_lag('{ready,ordered,done,future,half}')", 60),
    "dl_take_keys": Call("SELECT * FROM dl_take_keys('ready', false, 20, 0, '-infinity', 0, '{}', true, 0, NULL)", 250),
    # Some blocks are those of the table's checks.
    "dl_park": Call(f"SELECT dl_park('busy', {keys('busy', KEYS)}, NULL, 0, '-infinity', 50)", 1_550),
    "dl_unpark": Call(f"SELECT dl_unpark({keys('parked')})", 400),
    "dl_unpark_freed": Call(
        "SELECT dl_unpark_freed()",
        450,
        f"INSERT INTO dl_freed SELECT k, now() - interval '1 min' FROM unnest({keys('parked')}) k",
    ),
    "dl_unpark_stranded": Call("SELECT dl_unpark_stranded(-3000000000, 10)", 450),
    "dl_put_off": Call(
        "SELECT dl_put_off('ready', current_setting('t.hashes')::int[], 15)",
        600,
        f"SELECT set_config('t.hashes', {ten('hashtext(lock_key)', READY, 'priority, created_at')}::text, true)",
        ten("hashtext(lock_key)", READY, "priority, created_at"),
    ),
    "dl_set_aside": Call(
        "SELECT dl_set_aside(current_setting('t.ids')::uuid[])",
        300,
        f"SELECT set_config('t.ids', {ten('job_id', READY, 'priority, created_at')}::text, true);"
        "UPDATE dl_jobs SET cancel_requested = true WHERE job_id = ANY (current_setting('t.ids')::uuid[])",
    ),
    "dl_wake": Call(
        "SELECT dl_wake('future', 10)",
        300,
        "UPDATE dl_jobs SET available_at = now() WHERE job_id = ANY ("
        + ten("job_id", "queue = 'future' AND status = 'queued' AND blocked_on = 'time'", "queue, available_at")
        + ")",
    ),
    "dl_finish": Call(
        "SELECT * FROM dl_finish('w', true, current_setting('t.ids')::uuid[], array_fill(1, ARRAY[10]),"
        " array_fill('succeed'::text, ARRAY[10]), NULL, NULL, NULL, NULL)",
        900,
        f"SELECT set_config('t.ids', {ten('job_id', RUNS, 'hashtext(lock_key)')}::text, true)",
    ),
    "dl_reap": Call("SELECT * FROM dl_reap(0, 15)", 450),
    "dl_give_back": Call(
        "SELECT dl_give_back((current_setting('t.ids')::uuid[])[1], 'crash', 'why', '{}')",
        120,
        f"SELECT set_config('t.ids', {ten('job_id', RUNS, 'hashtext(lock_key)')}::text, true)",
    ),
}


def a_million(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of the million rows: the longest, which start first. With `--dist loadfile` they share one table."""
    for mark in (pytest.mark.long, pytest.mark.longest):
        test = mark(test)
    return test


# While a test counts what a call touches.
UNVACUUMED = "ALTER TABLE dl_jobs SET (autovacuum_enabled = off)"


@pytest.fixture
def thousand(own_db: str) -> Iterator[Conn]:
    with db.connect(own_db, name="few", schema="public") as conn:
        conn.execute(UNVACUUMED)
        filled(conn, THOUSAND)
        conn.execute("VACUUM ANALYZE dl_jobs")
        yield conn


@pytest.fixture(scope="module")
def million_rows(module_db: str) -> Iterator[Conn]:
    """A queue with a million rows, in a database that the tests of this file share."""
    with db.connect(module_db, name="many", schema="public", answer_within=300) as conn:
        conn.execute(UNVACUUMED)
        filled(conn, MILLION)
        conn.execute("VACUUM dl_jobs")
        yield conn


@pytest.fixture
def million(million_rows: Conn) -> Conn:
    """The million, with statistics that are true."""
    million_rows.execute("ANALYZE dl_jobs")
    return million_rows


@pytest.fixture
def forgotten(module_db: str, million_rows: Conn, as_superuser: Callable[[str], str]) -> Conn:
    """The million, for a planner that last saw an empty table."""
    with db.connect(as_superuser(module_db), name="admin", schema="public") as admin:
        admin.execute("DELETE FROM pg_statistic WHERE starelid = 'dl_jobs'::regclass")
        admin.execute(
            "UPDATE pg_class SET reltuples = 0, relpages = 0, relallvisible = 0 WHERE oid = 'dl_jobs'::regclass"
            " OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = 'dl_jobs'::regclass)"
        )
    return million_rows


def filled(conn: Conn, rows: int, ids: str = "v4") -> None:
    """Put the situations into an empty queue."""
    indexes = "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'dl_jobs' AND indexname LIKE 'ix%'"
    later = [] if rows < MILLION else conn.execute(indexes).fetchall()
    for name, _ in later:
        conn.execute(sql.SQL("DROP INDEX {}").format(sql.Identifier(name)))
    with quietly(conn):
        conn.execute(FILL.format(job_id=IDS[ids]).encode(), (rows,))
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
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


@a_million
def test_a_foreign_claim_is_index_served(million: Conn) -> None:
    """It sorts what is ready, for the protocol says so; but it never reads the whole table."""
    touched = {}
    for queue in ("ready", "future", "done"):
        plan = plan_of(million, FOREIGN, queue, "force_custom_plan")
        assert [node for node in nodes(plan) if node["Node Type"] == "Seq Scan"] == []
        touched[queue] = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    assert touched["done"] < 60


def cost(conn: Conn, call: Call) -> int:
    """The buffers of a warm call, which is then undone; not of one that plans anew behind an autovacuum or two."""
    found, calls = 0, 0
    with psycopg.connect(conn.info.dsn) as other:
        other.execute(f"SELECT pg_advisory_lock(key_hash) FROM unnest({call.held or 'NULL::int[]'}) key_hash".encode())
        while calls < 3 or (call.most < found and calls < 6):
            calls += 1
            with conn.transaction(force_rollback=True):
                conn.execute(call.before.encode() or b"SELECT 1")
                found = buffers(conn, call.statement)
            conn.execute("SELECT pg_advisory_unlock_all()")
    return found


def costs(conn: Conn, but: str = "") -> dict[str, int]:
    """The cost of each call, in a worker's session."""
    conn.execute(lifecycle.PLANS)
    return {name: cost(conn, call) for name, call in CALLS.items() if name != but}


def anywhere(conn: Conn) -> dict[str, int]:
    """The cost of the calls of ANYWHERE, in a session of another service."""
    return {name: cost(conn, CALLS[name]) for name in ANYWHERE}


def too_dear(found: dict[str, int]) -> dict[str, int]:
    return {name: touched for name, touched in found.items() if touched > CALLS[name].most}


@pytest.mark.parametrize(
    ("ids", "before", "analyze"),
    [*itertools.product(["v4"], [0, 600], [False, True]), ("v7", 600, True)],  # only by statistics do ids matter
)
@pytest.mark.long
def test_c3_a_session_that_planned_on_a_short_table_claims_and_ends_as_cheaply_on_a_long_one(
    own_db: str, ids: str, before: int, analyze: bool
) -> None:
    """Its plans are cached, and nothing tells it that the table has grown. A new database has no statistics."""
    with (
        db.connect(own_db, name="test", schema="public") as conn,
        db.connect(own_db, name="early", schema="public") as early,
        db.connect(own_db, name="stranger", schema="public") as stranger,
    ):
        conn.execute(UNVACUUMED)
        if before:
            filled(conn, before, ids)
        if analyze:
            conn.execute("ANALYZE dl_jobs, dl_freed, dl_queues")
        short = costs(early, but="" if before else "dl_give_back")  # which needs a row
        anywhere(stranger)
        filled(conn, 20 * THOUSAND, ids)
        assert (too_dear(short), too_dear(costs(early)), too_dear(anywhere(stranger))) == ({}, {}, {})
        conn.execute("ANALYZE dl_freed, dl_queues")  # by which the session plans anew, without statistics of dl_jobs
        assert too_dear(costs(early)) == {}


@a_million
def test_calls_cost_the_same_in_a_thousand_rows_and_in_a_million(million: Conn, thousand: Conn) -> None:
    """An index may be two levels higher, and have versions that other calls left dead; nothing grows as the rows do."""
    few, many = costs(thousand), costs(million)
    assert {name: (few[name], many[name]) for name in few if many[name] > 5 * few[name] + 20} == {}
    assert too_dear(many) == {}


@a_million
def test_c3_calls_cost_the_same_with_stale_statistics(forgotten: Conn) -> None:
    """In a session of its own: the others' have their plans already."""
    forgotten.execute("DISCARD PLANS")
    assert too_dear(costs(forgotten)) == {}


def with_keys(conn: Conn, names: int, each: int, long: int) -> None:
    """An ordered queue of so many keys with so many jobs each, beside one key with very many."""
    conn.execute("INSERT INTO dl_queues (queue, ordered) VALUES ('q', true)")
    with quietly(conn):
        key = f"to_char(i % {names}, 'FM000000')"
        many(conn, names * each, lock_key=key, score="i", attempt="(i % 3 = 0)::int")
        many(conn, long, "000001-long", score="i")
    conn.execute("VACUUM ANALYZE dl_jobs")


def touched(conn: Conn, statement: str, **given: Any) -> int:
    """The buffers of a statement for people, planned as it is there."""
    with conn.transaction(force_rollback=True):
        db.by_index(conn, sorts=False)
        explained = "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) " + statement
        for _ in range(2):  # warm
            row = conn.execute(explained.encode(), given, prepare=False).fetchone()
        assert {node["Index Name"] for node in nodes(row[0][0]["Plan"]) if node.get("Relation Name") == "dl_jobs"} == {
            "ix_dl_jobs_order"
        }
    return row[0][0]["Plan"]["Shared Hit Blocks"] + row[0][0]["Plan"]["Shared Read Blocks"]


@pytest.mark.long
@pytest.mark.parametrize("analyzed", [True, False])
def test_a_page_of_keys_costs_the_same_beside_a_key_with_a_hundred_thousand_jobs(
    conn: Conn, dsn: str, as_superuser: Callable[[str], str], analyzed: bool
) -> None:
    """Of that key it reads as many jobs as it counts, of each other those it has, and from one to the next it steps."""
    with_keys(conn, 1_000, 100, 100_000)
    if not analyzed:
        with db.connect(as_superuser(dsn), name="admin", schema="public") as admin:
            admin.execute("DELETE FROM pg_statistic WHERE starelid = 'dl_jobs'::regclass")
    page = {"queue": "q", "limit": 51, "most": of_keys.COUNTED}
    assert touched(conn, of_keys._SQL["keys"], **page, since="") < 6_500
    assert touched(conn, of_keys._SQL["keys"], **page, since="000500") < 6_500
    place = {"score": "-Infinity", "created_at": "-infinity", "job_id": "0" * 32, "long": of_keys.LONG, "limit": 51}
    place |= {"queue": "q", "lock_key": "000001-long", "statuses": ["queued"]}
    assert touched(conn, of_keys._SQL["jobs"], **place) < 120
    assert touched(conn, of_keys._SQL["jobs"], **place | {"score": "50000"}) < 120
    assert touched(conn, of_keys._SQL["length"], queue="q", lock_key="000001-long", most=1_000) < 60
    assert touched(conn, of_keys._SQL["jobs"], **place | {"statuses": ["failed", "lost"]}) < 20
    assert touched(conn, stats._SQL["keys"], most=1_000, most_keys=1_000) < 6_000


def pages_read(conn: Conn, read: Callable[[], object]) -> int:
    """The pages of dl_jobs and its indexes that a function reads."""
    fetched = "SELECT sum(pg_stat_get_xact_blocks_fetched(oid)) FROM (SELECT 'dl_jobs'::regclass AS oid UNION"
    fetched += " SELECT indexrelid FROM pg_index WHERE indrelid = 'dl_jobs'::regclass) of_jobs"
    with conn.transaction():
        before = value(conn, fetched)
        read()
        return int(value(conn, fetched) - before)


@pytest.mark.long
def test_lists_of_dead_jobs_and_of_retries_sort_no_more_than_a_page_with_stale_statistics(conn: Conn) -> None:
    """The planner last saw some such jobs; there are fifty thousand by now, in several queues, and as many others."""
    conn.execute("ALTER TABLE dl_jobs SET (autovacuum_enabled = false)")
    queue, ends = "'q' || i % 5", {"finished_at": "now() - i * interval '1 s'"}
    dead = {"status": "(CASE i % 2 WHEN 0 THEN 'failed' ELSE 'lost' END)::dl_status", **ends}
    with quietly(conn):
        many(conn, 20, queue=queue, **dead)
        many(conn, 20, queue=queue, attempt="1")
        many(conn, 50_000, queue=queue, status="'succeeded'", **ends)
        conn.execute("ANALYZE dl_jobs")
        many(conn, 50_000, queue=queue, **dead)
        many(conn, 50_000, queue=queue, attempt="1")
    lists = [
        stats.Wanted(status=status, **more)
        for status in ("dead", "failed", "lost", "retries")
        for more in ({}, {"task": "t"}, {"queue": "q3"}, {"queue": "q3", "task": "t"})
    ]
    assert all(len(stats.jobs(conn, wanted, 50).rows) == 50 for wanted in lists)
    costs = {wanted: pages_read(conn, partial(stats.jobs, conn, wanted, 50)) for wanted in lists}
    assert {wanted: cost for wanted, cost in costs.items() if cost > 1_500} == {}


@pytest.mark.long
def test_a_tally_reads_no_more_than_it_counts_with_stale_statistics(conn: Conn) -> None:
    """The planner last saw parked jobs; most are ready by now."""
    conn.execute("ALTER TABLE dl_jobs SET (autovacuum_enabled = false)")
    with quietly(conn):
        many(conn, 20_000, queue="'q' || i % 5", blocked_on="'key'")
        conn.execute("ANALYZE dl_jobs")
        many(conn, 50_000, queue="'q' || i % 5")
    for queue in ("q3", None):
        assert pages_read(conn, partial(tallies.tally, conn, stats.Wanted(queue=queue))) < 25_000
        assert pages_read(conn, partial(tallies.tally, conn, stats.Wanted(queue=queue, task="x"))) < 25_000


def test_no_function_that_reads_by_indexes_alone_is_compiled(conn: Conn) -> None:
    """A plan with a sequential scan or a sort all the same seems to cost ten thousand million: it would be compiled."""
    without = "SELECT array_agg(proname) FROM pg_proc WHERE proconfig && %s AND NOT proconfig @> '{jit=off}'"
    assert value(conn, without, ["enable_seqscan=off", "enable_sort=off", "enable_bitmapscan=off"]) is None


def test_doctor_shows_what_a_claim_passes_over_and_claims_nothing(conn: Conn, dsn: str, worker: Worker) -> None:
    worker.start_new(lock_key="busy")
    for key in (*["busy"] * 30, "free"):
        enqueue(conn, lock_key=key)
    rows = "SELECT array_agg(j::text ORDER BY job_id) FROM dl_jobs j"
    before = value(conn, rows)
    done = CliRunner().invoke(main, ["doctor", "q", "--direct"], env={"DL_DB_DSN": dsn})
    assert "passes over 30 of its first 1,000 jobs" in done.output, done.output
    assert "Their keys are busy" in done.output
    assert "Most of these pages" not in done.output
    assert "Index Scan using ix_dl_jobs_turn" in done.output
    assert value(conn, rows) == before
    other = CliRunner().invoke(main, ["doctor", "nowhere", "--direct"], env={"DL_DB_DSN": dsn})
    assert "no schedule and no backfill with this name" in other.output
    assert "there is no such queue either" in other.output, "and --direct is no advice where it was given"


def test_doctor_tells_a_claim_that_reads_dead_rows(conn: Conn, dsn: str) -> None:
    """Entries of canceled jobs before the first one, which an open transaction keeps from being removed."""
    with db.connect(dsn, name="old", schema="public") as other, other.transaction():
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT FROM dl_jobs")
        with quietly(conn):
            many(conn, 5_000)
            conn.execute("UPDATE dl_jobs SET status = 'canceled', finished_at = now() WHERE lock_key <> 'k5000'")
        first, *_, last = diagnose_claim(postgres.claim_plan(conn, "q"))
    assert "passes over 0 of" in first.text
    assert ("dead rows" in last.text, last.command) == (True, ("doctor",))
