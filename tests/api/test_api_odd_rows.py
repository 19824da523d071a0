"""Answers and pages of jobs that only a plain INSERT can make, and what the table refuses."""

from itertools import product
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from api_app import TRIGGER, Refused
from flask.testing import FlaskClient

from dataloader.queue import db, new_job
from dataloader.queue.reports import predictions

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


def test_dl_enqueue_refuses_it_in_words(conn: db.Connection) -> None:
    for call, field in [
        ("limits => '{a,NULL}'", "limits"),
        ("limits => '{{a},{b}}'", "limits"),
        ("limits => '[5:6]={a,b}'", "limits"),
        ("deadline => 'infinity'", "deadline"),
        ("args => ('{\"a\":' || repeat('[', 63) || repeat(']', 63) || '}')::jsonb", "args"),
        ("args => ('{\"a\":' || repeat('[', 2000) || repeat(']', 2000) || '}')::jsonb", "args"),
    ]:
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=f"dl_enqueue: {field} should be"):
            conn.execute(f"SELECT dl_enqueue('q', 't', 'k', {call})".encode())


def test_dl_enqueue_takes_args_as_deep_as_python_does(conn: db.Connection) -> None:
    text = '{"a":' + "[" * 62 + "]" * 62 + "}"
    new_job.enqueue(conn, queue="q", task="t", lock_key="k", args={"a": eval("[" * 62 + "]" * 62)}, schema="public")
    conn.execute("SELECT dl_enqueue('q', 't', 'k', %s::jsonb)", (text,))


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
