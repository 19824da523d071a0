"""POST /api/v1/jobs/batch: many jobs, all or none, in order, each held to the rules of a single one."""

import json
from typing import Any
from uuid import UUID

from api_app import BATCH, MINIMAL, TRIGGER, Refused, answered, rows
from flask.testing import FlaskClient
from test_api_audit import Lines, lines  # noqa: F401
from test_api_refusals import CANARY, FIELDS, UNSTORABLE, WITHOUT
from test_api_trigger import EVERYTHING

from dataloader.queue import db

MIB = 1024 * 1024


def batch(client: FlaskClient, *jobs: Any) -> Any:
    return client.post(BATCH, json={"jobs": jobs})


def numbered(count: int, **more: Any) -> list[dict[str, Any]]:
    return [MINIMAL | {"args": {"n": n}} | more for n in range(count)]


def test_each_job_is_stored_as_a_trigger_stores_it(client: FlaskClient, conn: db.Connection) -> None:
    client.post(TRIGGER, json=MINIMAL)
    client.post(TRIGGER, json=EVERYTHING)
    batch(client, MINIMAL, EVERYTHING | {"idempotency_key": "other"})
    one, all_fields, *many = (
        {name: row[name] for name in row if name not in ("job_id", "created_at", "available_at", "idempotency_key")}
        for row in rows(conn)
    )
    assert many == [one, all_fields]
    at = conn.execute("SELECT DISTINCT available_at FROM dl_jobs WHERE idempotency_key IS NOT NULL").fetchall()
    assert len(at) == 1


def test_a_field_that_a_trigger_refuses_is_pointed_at(
    client: FlaskClient, conn: db.Connection, refused: Refused
) -> None:
    for field, value in FIELDS:
        bad = {name: item for name, item in (MINIMAL | {field: value}).items() if item is not WITHOUT}
        alone = refused(client.post(TRIGGER, json=bad), 400, "invalid-input")["errors"]
        together = refused(batch(client, MINIMAL, MINIMAL, MINIMAL, bad), 400, "invalid-input", f"/jobs/3/{field}")
        assert together["errors"] == [fault | {"pointer": "/jobs/3" + fault["pointer"]} for fault in alone]
        assert all(fault["code"] and fault["message"] for fault in alone)
        assert rows(conn) == [], (field, value)


def test_a_text_that_no_database_stores_is_pointed_at(client: FlaskClient, refused: Refused) -> None:
    for raw, pointer in UNSTORABLE:
        body = b'{"jobs": [%s, %s]}' % (json.dumps(MINIMAL).encode(), raw)
        answer = client.post(BATCH, data=body, content_type="application/json")
        refused(answer, 400, "invalid-input", "/jobs/1" + pointer)


def test_a_bad_frame_is_pointed_at(client: FlaskClient, refused: Refused) -> None:
    for body, pointer in [
        ({}, "/jobs"),
        ({"jobs": None}, "/jobs"),
        ({"jobs": {}}, "/jobs"),
        ({"jobs": [], "queue": "q"}, "/queue"),
        ({"jobs": [MINIMAL, []]}, "/jobs/1"),
        ({"jobs": [MINIMAL, "job"]}, "/jobs/1"),
        ({"jobs": [None]}, "/jobs/0"),
        ({"jobs": [1] * 10_001}, "/jobs"),
        (MINIMAL, "/jobs"),
    ]:
        refused(client.post(BATCH, json=body), 400, "invalid-input", pointer)


def test_all_wrong_fields_are_named_but_the_answer_stays_small(client: FlaskClient, refused: Refused) -> None:
    bad = [MINIMAL, MINIMAL | {"priority": [CANARY]}, {"queue": "q", "task": "t"}, MINIMAL | {"color": CANARY}]
    answer = batch(client, *bad)
    pointers = [fault["pointer"] for fault in refused(answer, 400, "invalid-input")["errors"]]
    assert pointers == ["/jobs/1/priority", "/jobs/2/lock_key", "/jobs/3/color"]
    assert CANARY not in answer.text
    many = batch(client, *[{"x" * 1_000: 1}] * 1_000)
    assert len(refused(many, 400, "invalid-input")["errors"]) == 20
    assert len(many.data) < 20_000


def test_ten_thousand_jobs_are_taken_and_one_more_is_not(
    client: FlaskClient, conn: db.Connection, refused: Refused
) -> None:
    jobs = answered(batch(client, *numbered(10_000)))["jobs"]
    assert len({UUID(job["job_id"]) for job in jobs}) == 10_000
    assert [row["args"]["n"] for row in rows(conn)] == list(range(10_000))
    refused(batch(client, *[MINIMAL] * 10_001), 400, "invalid-input", "/jobs")


def test_j6_the_body_may_have_16_mib_and_each_args_what_a_trigger_has(
    client: FlaskClient, conn: db.Connection, refused: Refused
) -> None:
    large = MINIMAL | {"args": {"text": "ж" * (128 * 1024 - 20)}}
    assert batch(client, *[large] * 20).status_code == 200
    small = large | {"args": {"text": "x"}}
    too_large = MINIMAL | {"args": {"text": "ж" * 128 * 1024}}
    refused(batch(client, small, too_large), 413, "too-large", "/jobs/1/args")
    body = json.dumps({"jobs": numbered(1, args={"text": "x" * 16 * MIB})})
    refused(client.post(BATCH, data=body, content_type="application/json"), 413, "too-large")
    refused(client.post(BATCH, headers={"Transfer-Encoding": "chunked"}), 411, "length-required")
    assert len(rows(conn)) == 20


def test_the_audit_says_how_many_and_which(client: FlaskClient, lines: Lines) -> None:  # noqa: F811
    jobs = batch(client, *numbered(3)).json["jobs"]
    batch(client, {})
    _, done, _, refused = lines("audit")
    expected = {"jobs": 3, "first_job_id": jobs[0]["job_id"], "last_job_id": jobs[2]["job_id"], "status": 200}
    assert expected.items() <= done.items()
    assert "jobs" not in refused
