"""POST /api/v1/jobs/trigger: what is stored, and that one idempotency key makes one job."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier
from uuid import UUID

import pytest
from api_app import BATCH, MINIMAL, TRIGGER, answered, made, rows, running
from flask.testing import FlaskClient

from dataloader.queue import db

EVERYTHING = {
    **MINIMAL,
    "args": {"date": "2026-01-31", "city": "Хабаровск", "n": [1, 2.5, None, True, {"deep": "🚀"}]},
    "idempotency_key": "cbr-2026-01-31",
    "partition_key": "2026-01",
    "priority": 0,
    "available_at": "2026-01-31T06:30:00.123456+03:00",
    "max_attempts": 1,
    "lease_ttl_sec": 86_400,
    "timeout_sec": 3_600,
    "producer": "billing",
    "consumer_group": "etl",
    "affinity_key": "ollama/qwen2.5-coder:32b",
}


def test_a_job_is_committed_with_the_defaults_when_the_answer_comes(client: FlaskClient, conn: db.Connection) -> None:
    answer = client.post(TRIGGER, json=MINIMAL)
    assert answer.status_code == 200
    assert answer.mimetype == "application/json"
    (row,) = rows(conn)
    assert answer.json == {"job_id": str(row["job_id"]), "status": "queued"}
    assert conn.execute("SELECT kind FROM dl_job_events").fetchall() == [("queued",)]
    defaults = {"args": {}, "idempotency_key": None, "partition_key": "", "priority": 100, "max_attempts": 5}
    defaults |= {"lease_ttl_sec": 60, "producer": None, "consumer_group": None, "affinity_key": None, "attempt": 0}
    assert {name: row[name] for name in defaults} == defaults
    assert row["created_at"] - timedelta(seconds=9) < row["available_at"] <= row["created_at"]


def test_the_default_lease_is_a_setting(dsn: str, conn: db.Connection) -> None:
    with running(dsn, dl_default_lease_ttl_sec=7) as app:
        app.test_client().post(TRIGGER, json=MINIMAL)
        app.test_client().post(BATCH, json={"jobs": [MINIMAL, MINIMAL | {"lease_ttl_sec": 8}]})
    assert sorted(row["lease_ttl_sec"] for row in rows(conn)) == [7, 7, 8]


def test_every_field_is_stored(client: FlaskClient, conn: db.Connection) -> None:
    assert client.post(TRIGGER, json=EVERYTHING).status_code == 200
    (row,) = rows(conn)
    at = datetime(2026, 1, 31, 3, 30, 0, 123456, UTC)
    assert {name: row[name] for name in EVERYTHING} == EVERYTHING | {"available_at": at}


@pytest.mark.parametrize("key_twice", [False, True])
def test_null_means_not_given_where_null_is_the_default(client: FlaskClient, key_twice: bool) -> None:
    names = ("idempotency_key", "available_at", "producer", "consumer_group", "affinity_key")
    body = MINIMAL | dict.fromkeys(names) | ({"idempotency_key": "k"} if key_twice else {})
    answers = [client.post(TRIGGER, json=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert (answers[0].json == answers[1].json) is key_twice


def test_values_at_their_bounds_are_taken(client: FlaskClient) -> None:
    for extremes in [
        {"priority": 2**31 - 1, "max_attempts": 2**31 - 1, "lease_ttl_sec": 1},
        {"available_at": "2000-01-01T00:00:00Z"},
        {"available_at": (datetime.now(UTC) + timedelta(days=3_652)).isoformat()},  # nearly ten years ahead
        {"available_at": "2030-02-28t23:59:59.123456789z"},
        {"task": "a\nb", "lock_key": " ", "consumer_group": ""},
    ]:
        answered(client.post(TRIGGER, json=MINIMAL | extremes))


def test_an_instant_is_the_same_in_every_offset(client: FlaskClient, conn: db.Connection) -> None:
    for text, at in [
        ("2026-03-01T00:00:00Z", datetime(2026, 3, 1, tzinfo=UTC)),
        ("2026-03-01T00:00:00-00:00", datetime(2026, 3, 1, tzinfo=UTC)),
        ("2026-03-01T00:00:00.5+14:00", datetime(2026, 2, 28, 10, 0, 0, 500_000, UTC)),
        ("2026-03-01T00:00:00-23:59", datetime(2026, 3, 1, 23, 59, tzinfo=UTC)),
    ]:
        job_id = made(client, available_at=text)
        assert {str(row["job_id"]): row["available_at"] for row in rows(conn)}[job_id] == at


def test_arguments_survive_unchanged(client: FlaskClient, conn: db.Connection) -> None:
    for args in [
        {"n": 10**4_299},
        {"n": -(2**63) - 1},
        {"n": 0.1, "m": -1e22, "k": 5e-324},
        {"": {"": []}},
        {"text": '"\\/\b\f\n\r\t\x7f\u2028'},
        json.loads('{"a":' * 62 + "{}" + "}" * 62),
    ]:
        job_id = made(client, args=args)
        ((stored,),) = conn.execute("SELECT args::text FROM dl_jobs WHERE job_id = %s", (job_id,)).fetchall()
        assert json.loads(stored) == args


def test_a_body_of_exactly_the_limit_is_taken(client: FlaskClient) -> None:
    frame = json.dumps(MINIMAL | {"args": {"text": ""}})
    body = json.dumps(MINIMAL | {"args": {"text": "x" * (256 * 1024 - len(frame))}})
    assert len(body) == 256 * 1024
    answered(client.post(TRIGGER, data=body, content_type="application/json; charset=UTF-8"))


def test_a_known_key_answers_with_its_job_whatever_else_is_said(client: FlaskClient, conn: db.Connection) -> None:
    job_id = made(client, idempotency_key="k")
    other = {"queue": "other", "task": "other", "lock_key": "other", "idempotency_key": "k", "priority": 1}
    for end in ("queued", "running", "succeeded", "failed", "canceled", "lost"):
        conn.execute("UPDATE dl_jobs SET status = %s, lease_expires_at = now() + '1 min'", (end,))
        assert answered(client.post(TRIGGER, json=other)) == {"job_id": job_id, "status": end}
        assert client.post(TRIGGER, json=other | {"priority": -1}).status_code == 400, "bad input is not excused"
    assert [row["queue"] for row in rows(conn)] == ["load.cbr"]


def test_one_key_at_the_same_moment_is_one_job(dsn: str, conn: db.Connection) -> None:
    callers, rounds = 16, 8
    together = Barrier(callers, timeout=30)
    with running(dsn, pg_pool_size=callers) as app, ThreadPoolExecutor(callers) as threads:

        def call(key: str) -> tuple[int, str]:
            client = app.test_client()
            together.wait()
            answer = client.post(TRIGGER, json=MINIMAL | {"idempotency_key": key})
            return answer.status_code, answer.json["job_id"]

        for key in map(str, range(rounds)):
            ((status, job_id),) = set(threads.map(call, [key] * callers))
            assert status == 200
            assert UUID(job_id)
    assert sorted(row["idempotency_key"] for row in rows(conn)) == sorted(map(str, range(rounds)))
    assert conn.execute("SELECT count(*) FROM dl_job_events").fetchone() == (rounds,)
