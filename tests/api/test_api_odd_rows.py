"""Answers and pages of jobs that only a plain INSERT can make, what the table refuses, and rows of random values."""

import json
import os
import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from api_app import TRIGGER, Refused
from flask import Flask
from flask.testing import FlaskClient
from hostile import QUEUE, Rows

from dataloader.config import Settings
from dataloader.queue import cleanups, db, lifecycle, logs, new_job
from dataloader.queue.plans import backfills, schedules
from dataloader.queue.reports import predictions, runs, stats, webhooks

OF_A_JOB = ("", "/status", "/prediction", "/events")
PAGES = ("/jobs/{}", *(f"/api/v1/jobs/{{}}{each}" for each in OF_A_JOB), "/api/v1/jobs?queue=q", "/jobs?queue=q")


def insert(conn: db.Connection, **columns: Any) -> UUID:
    """As a producer does that knows only the table."""
    job_id = uuid4()
    row = {"job_id": job_id, "queue": "q", "task": "t", "lock_key": "k"} | columns
    text = f"INSERT INTO dl_jobs ({', '.join(row)}) VALUES ({', '.join(['%s'] * len(row))})"
    conn.execute(text.encode(), list(row.values()))
    return job_id


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def statuses(client: FlaskClient, job_id: UUID, *more: str) -> dict[str, int]:
    """The statuses of the answers and pages of this job, none of which is that of a job before."""
    client.application.extensions.pop("shared", None)
    return {page: client.get(page.format(job_id)).status_code for page in (*PAGES, *more)}


@pytest.mark.long
def test_what_is_nested_as_deep_as_the_table_allows_is_shown(conn: db.Connection, client: FlaskClient) -> None:
    for column, text, status in product(("args", "progress"), (deep(480), "[" * 490 + "]" * 490), ("queued", "failed")):
        found = statuses(client, insert(conn, **{column: text, "status": status}), "/jobs/{}/again")
        assert max(found.values()) < 500, found


@pytest.mark.parametrize("status", ["queued", "failed"])
@pytest.mark.long
def test_args_of_before_the_check_are_shown_cut(conn: db.Connection, client: FlaskClient, status: str) -> None:
    job_id = insert(conn, status=status, progress=deep(3_000))
    conn.execute("ALTER TABLE dl_jobs DISABLE TRIGGER dl_jobs_check")
    try:
        conn.execute("UPDATE dl_jobs SET args = progress")
    finally:
        conn.execute("ALTER TABLE dl_jobs ENABLE TRIGGER dl_jobs_check")
    conn.execute("UPDATE dl_jobs SET partition_key = 'another'")  # of a queue that was adopted with such a job
    found = statuses(client, job_id, "/jobs/{}/again")
    assert max(found.values()) < 500, found
    assert "nested too deep to be shown" in client.get(f"/api/v1/jobs/{job_id}").text
    assert client.post(f"/api/v1/jobs/{job_id}/again", json={}).status_code < 500
    assert client.post(f"/api/v1/jobs/{job_id}/cancel").status_code == 200


@pytest.mark.parametrize("at", ["infinity", "-infinity", "290000-01-01 00:00+00", "4000-01-01 00:00+00 BC"])
@pytest.mark.long
def test_a_time_of_the_contract_that_python_does_not_know_is_shown(
    conn: db.Connection, client: FlaskClient, at: str
) -> None:
    times = dict.fromkeys(("available_at", "created_at", "started_at", "finished_at", "heartbeat_at"), at)
    for status in ("queued", "running", "succeeded"):
        found = statuses(client, insert(conn, status=status, **times))
        assert {*found.values()} == {200}, (status, found)


def test_the_table_refuses_what_claims_and_pages_rely_on_and_names_the_field(conn: db.Connection) -> None:
    insert(conn, limits=[])  # means none
    for field, value in [
        ("limits", ["a", None]),
        ("limits", ["a"] * 9),
        ("limits", [["a", "b"], ["c", "d"]]),
        ("limits", ["x" * 401]),
        ("limits", [""]),
        ("deadline", "infinity"),
        ("deadline", "1999-01-01"),
        ("timeout_sec", 0),
        ("timeout_sec", 2_592_001),
        ("lock_key", "\u4e00" * 700),
        ("queue", "q" * 513),
        ("task", "t" * 2_001),
        ("idempotency_key", "i" * 1_021),
        ("partition_key", "p" * 1_021),
        ("producer", "p" * 1_021),
        ("consumer_group", "p" * 1_021),
        ("affinity_key", "a" * 801),
        ("trace", "t" * 256),
        ("args", deep(3_000)),
    ]:
        with pytest.raises(psycopg.errors.CheckViolation) as refused:
            insert(conn, **{field: value})
        assert refused.value.diag.constraint_name == f"dl_jobs_chk_{field}"
    for counter in ("claims", "backoffs"):
        with pytest.raises(psycopg.errors.CheckViolation, match="dl_jobs_chk_counters"):
            insert(conn, **{counter: 1_000_000_001})


def test_the_table_refuses_deep_args_that_another_table_has_compressed(conn: db.Connection) -> None:
    conn.execute("CREATE TEMP TABLE staging AS SELECT %s::jsonb AS args, repeat('x', 3000) AS more", (deep(600),))
    assert conn.execute("SELECT pg_column_size(args) < 4000 FROM staging").fetchone() == (True,)
    insert(conn, priority=1)
    for text in (
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, args) SELECT gen_random_uuid(), 'q', 't', 'k', args"
        " FROM staging",
        "UPDATE dl_jobs SET partition_key = 'p', args = staging.args FROM staging",
    ):
        with pytest.raises(psycopg.errors.CheckViolation, match="args should be nested less than 500 deep"):
            conn.execute(text.encode())


def test_the_longest_texts_of_the_api_of_four_octets_a_character_fit(conn: db.Connection, client: FlaskClient) -> None:
    wide = "\U0001f4a3"
    job = {"queue": wide * 128, "task": wide * 200, "lock_key": wide * 512, "idempotency_key": wide * 255,
           "partition_key": wide * 255, "producer": wide * 255, "consumer_group": wide * 255,
           "affinity_key": wide * 200,
           "limits": [f"{n}{wide * 99}" for n in range(8)]}  # fmt: skip
    assert client.post(TRIGGER, json=job).status_code == 200


@pytest.mark.parametrize("limits", ["{a,NULL}", "{{a},{b}}", "[5:6]={a,b}"])
def test_dl_enqueue_refuses_odd_lists_and_deadlines_in_words(conn: db.Connection, limits: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="dl_enqueue: limits should be"):
        conn.execute("SELECT dl_enqueue('q', 't', 'k', limits => %s)", (limits,))
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="dl_enqueue: deadline should be"):
        conn.execute("SELECT dl_enqueue('q', 't', 'k', deadline => 'infinity')")


def test_dl_enqueue_takes_args_as_deep_as_python_does(conn: db.Connection) -> None:
    def args(levels: int) -> str:
        return '{"a":' + "[" * levels + "]" * levels + "}"

    new_job.enqueue(conn, queue="q", task="t", lock_key="k", args=json.loads(args(62)), schema="public")
    conn.execute("SELECT dl_enqueue('q', 't', 'k', %s::jsonb)", (args(62),))
    for levels in (63, 2_000):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="dl_enqueue: args should be"):
            conn.execute("SELECT dl_enqueue('q', 't', 'k', %s::jsonb)", (args(levels),))


def test_what_a_check_refuses_behind_the_api_is_no_fault_of_the_service(
    conn: db.Connection, client: FlaskClient, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    conn.execute("ALTER TABLE dl_jobs ADD CONSTRAINT dl_jobs_chk_priority CHECK (priority < 500)")
    try:
        job = {"queue": "q", "task": "t", "lock_key": "k", "priority": 500}
        refused(client.post(TRIGGER, json=job), 400, "invalid-input", "/priority")
    finally:
        conn.execute("ALTER TABLE dl_jobs DROP CONSTRAINT dl_jobs_chk_priority")


def test_a_queue_whose_prediction_fails_does_not_stop_those_behind_it(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next round began at the first queue again, so it never came past the one that failed."""
    for queue in ("a", "b", "c"):
        insert(conn, queue=queue)
        conn.execute(
            "INSERT INTO dl_lengths (queue, length, scheduled, retries, dead, lag_sec) VALUES (%s, 1, 0, 0, 0, 0)",
            (queue,),
        )
    outlook = predictions.outlook

    def fails(conn: db.Connection, queue: str) -> predictions.Outlook:
        if queue == "b":
            conn.execute("SELECT 1 / 0")
        return outlook(conn, queue)

    monkeypatch.setattr(predictions, "outlook", fails)
    after, found = "", []
    while noted := predictions.note(conn, after):
        after = noted.queue
        found.append((noted.queue, noted.error is None))
    assert found == [("a", True), ("b", False), ("c", True)]


RULES = Settings.model_construct(dl_alerts_bundle_sec=1.0, dl_alerts_paused_sec=1.0, environment="test")
ROUNDS = 10
ROWS = 1_000  # of a round
SEEN = 8  # jobs of a round whose own pages are looked at
ALL_OF_A_JOB = ("status", "prediction", "events", "result", "family", "logs")
PAGES_OF_A_JOB = (
    "/jobs/{}",
    "/jobs/{}/again",
    "/api/v1/jobs/{}",
    *(f"/api/v1/jobs/{{}}/{each}" for each in ALL_OF_A_JOB),
)
LISTS = (
    f"/jobs?queue={QUEUE}",
    "/jobs?status=dead",
    "/jobs?q=task:t",
    "/keys?queue=hostile&key=k",
    "/api/v1/jobs?q=args.a:1",
    "/api/v1/jobs?status=queued&limit=500",
    "/timeline?queue=hostile",
    "/api/v1/tally?by=task",
)


def rule_addresses(app: Flask) -> list[str]:
    """Every page and answer that names no object, and those of the queue, the task and the limit."""
    named = {"queue": QUEUE, "task": "t", "limit": "a"}
    rules = [rule for rule in app.url_map.iter_rules() if "GET" in (rule.methods or ())]
    able = [rule for rule in rules if rule.arguments <= named.keys()]
    found = [built[1] for rule in able if (built := rule.build(named, append_unknown=False))]
    return [*sorted({*found} - {"/key"}), *LISTS]


def duties(conn: db.Connection) -> Iterator[tuple[str, Callable[[], object]]]:
    """The duties of a round of the reaper, with their names."""

    def all_of(step: Callable[[], Any]) -> Callable[[], object]:
        return lambda: sum(1 for _ in iter(step, None))

    yield "reap", all_of(lambda: lifecycle.reap(conn))
    yield "wake", lambda: lifecycle.wake(conn, 1_000)
    yield "unpark", lambda: lifecycle.unpark_stranded(conn, None, 200)
    yield "resolve", lambda: lifecycle.resolve_stranded(conn, None, 200)
    yield "let in", lambda: lifecycle.let_in(conn)
    yield "schedules", lambda: list(schedules.tick(conn))
    yield "due schedules", lambda: schedules.due_in(conn)
    yield "backfills", lambda: [backfills.tick(conn) for _ in range(40)]
    yield "due backfills", lambda: backfills.due_in(conn)
    yield "cleanups", lambda: [cleanups.add(conn, job_id) for job_id in cleanups.due(conn)]
    yield "forget", lambda: cleanups.forget(conn)
    yield "aggregate", all_of(lambda: stats.aggregate(conn) or None)
    yield "fold", lambda: runs.fold(conn)
    yield "lengths", lambda: stats.note_lengths(conn, 0.0)
    yield "vacuum", lambda: stats.vacuum(conn)
    yield "predict", lambda: _predict(conn)
    yield "alerts", lambda: webhooks.publish(conn, RULES)
    yield "log days", lambda: logs.keep_days(conn, 30)
    yield "prune", lambda: lifecycle.prune(conn, 86_400, "-infinity", 500)
    yield "learned", lambda: stats.learned(conn)


def _predict(conn: db.Connection) -> None:
    after = ""
    while noted := predictions.note(conn, after):
        after = noted.queue
        assert noted.error is None, noted


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_row_hurts_a_duty_or_a_page(
    conn: db.Connection, client: FlaskClient, app: Flask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/process/test_results_of_farms.py has the workers of a farm with such rows, and its other jobs."""
    monkeypatch.setattr(db, "give_up_after", lambda *_, **__: None)  # a busy machine may take longer than a duty has
    seed = int(os.environ.get("DL_HOSTILE_SEED", random.randrange(10**9)))
    print("DL_HOSTILE_SEED", seed)
    rows = Rows(conn, random.Random(seed))
    addresses = rule_addresses(app)
    hurt: list[str] = []
    for number in range(ROUNDS):
        rows.add(ROWS)
        for name, duty in duties(conn):
            try:
                duty()
            except Exception as e:
                hurt.append(f"{number} {name}: {type(e).__name__}: {e}"[:600])
        for address in [*addresses, *(page.format(job) for job in rows.jobs[:SEEN] for page in PAGES_OF_A_JOB)]:
            if (status := client.get(address).status_code) >= 500:
                hurt.append(f"{number} {address}: {status}")
        for job_id in rows.jobs[:SEEN]:
            reply = client.post(f"/api/v1/jobs/{job_id}/cancel")
            is_pruned = not conn.execute("SELECT job_id FROM dl_jobs WHERE job_id = %s", (job_id,)).fetchone()
            if reply.status_code != (404 if is_pruned else 200):
                hurt.append(f"{number} cancel {job_id}: {reply.status_code} {reply.text[:300]}")
        conn.execute("DELETE FROM dl_jobs")
        _empty(conn)
    print(rows.counts)
    assert not hurt, "\n".join([f"DL_HOSTILE_SEED={seed}", *hurt])
    assert rows.counts["tried"] >= 10_000


def _empty(conn: db.Connection) -> None:
    for (table,) in conn.execute(
        "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename LIKE 'dl\\_%'"
        " AND tablename NOT IN ('dl_migrations', 'dl_rolled', 'dl_alerted') AND tablename NOT LIKE 'dl_job_logs_%'"
    ).fetchall():
        conn.execute(f"DELETE FROM {table}".encode())
