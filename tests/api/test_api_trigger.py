"""POST /api/v1/jobs/trigger and /batch: what is stored; bad input is a 400 with a pointer to it, and never a row."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier
from typing import Any
from uuid import UUID

import pytest
from api_app import BATCH, MINIMAL, TRIGGER, Refused, answered, made, rows, running
from flask.testing import FlaskClient
from hypothesis import given, settings
from hypothesis import strategies as st
from werkzeug.test import TestResponse

from dataloader.ops import checks
from dataloader.queue import db, new_job, parents

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


def test_null_means_not_given_where_null_is_the_default(client: FlaskClient) -> None:
    body = MINIMAL | dict.fromkeys(("available_at", "producer", "consumer_group", "affinity_key"))
    for key, jobs in ((None, 2), ("k", 1)):
        answers = [answered(client.post(TRIGGER, json=body | {"idempotency_key": key})) for _ in range(2)]
        assert len({answer["job_id"] for answer in answers}) == jobs


def test_values_at_their_bounds_are_taken(client: FlaskClient) -> None:
    for extremes in [
        {"priority": 2**31 - 1, "max_attempts": 2**31 - 1, "lease_ttl_sec": 1},
        {"available_at": "2000-01-01T00:00:00Z"},
        {"available_at": (datetime.now(UTC) + timedelta(days=3_652)).isoformat()},  # nearly ten years ahead
        {"available_at": "2030-02-28t23:59:59.123456789z"},
        {"task": "a\nb", "lock_key": " ", "consumer_group": ""},
    ]:
        answered(client.post(TRIGGER, json=MINIMAL | extremes))
    frame = json.dumps(MINIMAL | {"args": {"text": ""}})
    body = json.dumps(MINIMAL | {"args": {"text": "x" * (256 * 1024 - len(frame))}})
    answered(client.post(TRIGGER, data=body, content_type="application/json; charset=UTF-8"))


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-03-01T00:00:00Z", datetime(2026, 3, 1, tzinfo=UTC)),
        ("2026-03-01T00:00:00-00:00", datetime(2026, 3, 1, tzinfo=UTC)),
        ("2026-03-01T00:00:00.5+14:00", datetime(2026, 2, 28, 10, 0, 0, 500_000, UTC)),
        ("2026-03-01T00:00:00-23:59", datetime(2026, 3, 1, 23, 59, tzinfo=UTC)),
    ],
)
def test_an_instant_is_the_same_in_every_offset(
    client: FlaskClient, conn: db.Connection, text: str, at: datetime
) -> None:
    made(client, available_at=text)
    assert [row["available_at"] for row in rows(conn)] == [at]


def test_arguments_survive_unchanged(client: FlaskClient, conn: db.Connection) -> None:
    args = {"large": 10**4_299, "n": -(2**63) - 1, "reals": [0.1, -1e22, 5e-324], "": {"": []}}
    args |= {"text": '"\\/\b\f\n\r\t\x7f\u2028', "deep": json.loads('{"a":' * 61 + "{}" + "}" * 61)}
    made(client, args=args)
    ((stored,),) = conn.execute("SELECT args::text FROM dl_jobs").fetchall()
    assert json.loads(stored) == args


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


def test_a_bad_frame_or_text_is_pointed_at(client: FlaskClient, refused: Refused) -> None:
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
    for raw, pointer in UNSTORABLE:
        body = b'{"jobs": [%s, %s]}' % (json.dumps(MINIMAL).encode(), raw)
        answer = client.post(BATCH, data=body, content_type="application/json")
        refused(answer, 400, "invalid-input", "/jobs/1" + pointer)


def test_the_answer_to_many_faults_stays_small(client: FlaskClient, refused: Refused) -> None:
    many = batch(client, *[{"x" * 1_000: CANARY}] * 1_000)
    assert len(refused(many, 400, "invalid-input")["errors"]) == 20
    assert len(many.data) < 20_000
    assert CANARY not in many.text


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


CANARY = "s3cret-canary"
JOB = "/api/v1/jobs/01890a5d-ac96-774b-bcce-b302099a8057"
WITHOUT = object()

FIELDS: list[tuple[str, Any]] = [
    *((name, WITHOUT) for name in MINIMAL),
    *((name, bad) for name in MINIMAL for bad in ("", None, 1, True, ["x"], {"a": 1}, "a\0b", "\ud800")),
    *(("queue", bad) for bad in ("q" * 129, "a\nb", "\x7f", "\x9f", "tab\t")),
    ("task", "t" * 201),
    ("lock_key", "k" * 513),
    *(("idempotency_key", bad) for bad in ("", "k" * 256, 7, False, [], "a\0", "\udfff")),
    *(("partition_key", bad) for bad in (None, 7, "p" * 256, "\0")),
    *((name, bad) for name in ("producer", "consumer_group") for bad in (7, {}, "p" * 256, "\0")),
    *(("affinity_key", bad) for bad in ("", "m" * 201, 7, ["m"], "a\0", "\udfff")),
    *(("priority", bad) for bad in (-1, 2**31, 2**63, 10**4_000, "7", 7.0, 7.5, True, None, [])),
    *(("max_attempts", bad) for bad in (0, -1, 2**31, "5", 5.0, True)),
    *(("timeout_sec", bad) for bad in (0, -1, 30 * 86_400 + 1, "60", 60.0, False)),
    *(("lease_ttl_sec", bad) for bad in (0, -1, 86_401, 2**40, "60", 60.0, False, None)),
    *(("args", bad) for bad in (None, [], "{}", 1, True)),
    *(("limits", bad) for bad in ("a", 7, ["a", "a"])),
    *(("available_at", bad) for bad in (0, 1_769_841_000, True, [], {}, "", "now", "tomorrow", "infinity")),
    *(("available_at", bad) for bad in ("2026-01-31", "2026-01-31T06:30:00", "2026-01-31T06:30Z", "06:30:00Z")),
    *(("available_at", bad) for bad in ("2026-02-30T00:00:00Z", "2026-01-31T25:00:00Z", "1769841000")),
    *(("available_at", bad) for bad in ("2026-01-31T06:30:00+3", "2026-01-31T06:30:00+24:00", "+2026-01-31T06:30:00Z")),
    *(("available_at", bad) for bad in ("1999-12-31T23:59:59Z", "0001-01-01T00:00:00+23:59", "0000-01-01T00:00:00Z")),
    *(("available_at", bad) for bad in ("9999-12-31T23:59:59-23:59", "2100-01-01T00:00:00Z", "20260131T063000Z")),
    *(("available_at", bad) for bad in ("٢٠٢٦-01-31T06:30:00Z", "2026-01-31T06:30:00Z\n", "2026-W05-6T06:30:00Z")),
    *((unknown, 1) for unknown in ("Queue", "job_id", "status", "attempt", "", "a b", "__proto__")),
]


def test_a_batch_is_read_up_to_its_first_faults(
    client: FlaskClient, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pydantic collects all faults, a million unknown names for example: no call of it may find more than a few."""
    counts: list[int] = []
    errors = new_job._errors
    monkeypatch.setattr(new_job, "_errors", lambda e: counts.append(e.error_count()) or errors(e))
    for jobs, code, detail in [
        ([{f"k{number}": 1 for number in range(700_000)}], "too_many_keys", "at most 600,000 keys"),
        ([{f"k{number}": 1 for number in range(100_000)}], "missing", "more than 20 fields are not valid"),
        ([{f"k{number}": 1 for number in range(50)}] * 2_000, "missing", "more than 20 fields are not valid"),
        ([MINIMAL | {"priority": "x"}] * 10_000, "int_type", "more than 20 fields are not valid"),
        ([MINIMAL | {"limits": [7] * 10_000}] * 10, "string_type", "10 fields are not valid"),
        ([MINIMAL | {"depends_on": ["x"] * 10_000}] * 100, "parent", "more than 20 fields are not valid"),
        ([MINIMAL] + [MINIMAL | {"depends_on": [0] * 10_000}] * 11, "depends_on", "at most 100,000 others"),
        ([MINIMAL | {"args": {"a": [0] * 6_000, "b": "\ud800"}}], "unstorable_text", "no lone surrogate"),
    ]:
        counts.clear()
        problem = refused(post_batch(client, jobs), 400, "invalid-input")
        assert detail in problem["detail"]
        assert code in {fault["code"] for fault in problem["errors"]}
        assert len(problem["errors"]) <= new_job.FAULTS_SHOWN
        assert sum(counts) <= 3 * new_job.FAULTS_SHOWN, detail


def test_a_job_that_names_a_parent_many_times_waits_for_it_once(client: FlaskClient) -> None:
    """One link each, and not 100,000 for the database, which took seconds."""
    parent, child = (UUID(int=number) for number in (1, 2))
    assert [*parents.links([None, [0] * 10_000], ["hold"], [parent, child])] == [(child, parent, "hold")]
    jobs = [MINIMAL] + [MINIMAL | {"depends_on": [0] * 10_000}] * 10
    assert post_batch(client, jobs).status_code == 200


def test_a_large_batch_of_emoji_in_escapes_is_read_at_once(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "KEYS_LIMIT", 60_000)
    text = json.dumps(dict.fromkeys(map(str, range(61)), 0))  # its keys are none of the body
    jobs = [MINIMAL | {"args": {"text": ["\U0001f600"] * 45, "json": text}}] * 1_000
    assert post_batch(client, jobs).status_code == 200


def post_batch(client: FlaskClient, jobs: list[Any]) -> TestResponse:
    """The client's own `json` would mask the body."""
    return client.post(BATCH, data=json.dumps({"jobs": jobs}), content_type="application/json")


def with_args(args: str) -> bytes:
    return json.dumps(MINIMAL)[:-1].encode() + b', "args": ' + args.encode() + b"}"


DOCUMENTS: list[tuple[bytes, str]] = [
    (b"", "empty"),
    *((raw, "json") for raw in (b" ", b"nonsense", b"{", b"{}}", b"{'queue': 1}", b'{"a":1,}', b"\0", b"//")),
    *((raw, "object_type") for raw in (b"[]", b"null", b"true", b"1", b'"text"')),
    *((raw, "json") for raw in (b"queue=a&task=b", b'{"args": {"n": 01}}', b'{"args": "\n"}')),
    (b'\xef\xbb\xbf{"queue": "a"}', "json"),
    *((raw, "utf8") for raw in (b'{"queue": "\xff"}', b'{"queue": "\xed\xa0\x80"}', b"\xff\xfe{\0")),
    (b"[" * 100_000, "too_deep"),
    (b'{"a":' * 40_000, "too_deep"),
    (with_args('{"a":' * 63 + "{}" + "}" * 63), "too_deep"),
    (with_args('{"a":' + "[" * 63 + "]" * 63 + "}"), "too_deep"),
    (b'{"queue": "a", "queue": "a"}', "duplicate_key"),
    (with_args('{"a": {"b": [{"c": 1, "c": 1}]}}'), "duplicate_key"),
    (with_args('{"a/b": {"~": 1, "\\u007e": 2}}'), "duplicate_key"),
    *((with_args(f'{{"n": {n}}}'), "number") for n in ("NaN", "[0, -Infinity]", "1e400", "-1e400")),
    *((with_args(f'{{"n": {"9" * digits}}}'), "number") for digits in (4_301, 200_000)),
]
UNSTORABLE: list[tuple[bytes, str]] = [
    (with_args('{"s": "a\\u0000"}'), "/args/s"),
    (with_args('{"a/b": {"k\\u0000~": 1}}'), "/args/a~1b/k\ufffd~0"),
    (with_args('{"s": ["\\\\u0000", "\\ud83d"]}'), "/args/s/1"),
    (with_args('{"\\udc00": 1}'), "/args/\ufffd"),
]


def test_a_bad_document_is_refused(client: FlaskClient, conn: db.Connection, refused: Refused) -> None:
    for raw, code in DOCUMENTS:
        answer = client.post(TRIGGER, data=raw, content_type="application/json")
        (fault,) = refused(answer, 400, "invalid-input", "")["errors"]
        assert fault["code"] == code, raw[:200]
        assert conn.execute("SELECT count(*) FROM dl_jobs").fetchone() == (0,)
    for raw, pointer in UNSTORABLE:
        answer = client.post(TRIGGER, data=raw, content_type="application/json")
        refused(answer, 400, "invalid-input", pointer)
    twice = client.post(TRIGGER, data=b'{"a/b": 1, "a/b": 1}', content_type="application/json")
    assert "the key a~1b should occur once" in refused(twice, 400, "invalid-input")["detail"]


@pytest.mark.parametrize(
    "content_type",
    [None, "", "text/plain", "text/json", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
     "application/json-patch+json", "application/json; charset=utf-16", "application/json, text/plain", "json", ";"],
)  # fmt: skip
def test_only_json_is_taken(client: FlaskClient, refused: Refused, content_type: str | None) -> None:
    answer = client.post(TRIGGER, data=json.dumps(MINIMAL), content_type=content_type)
    assert refused(answer, 400, "invalid-input", "")["errors"][0]["code"] == "content_type"


def test_all_wrong_fields_are_named_and_no_value_is_repeated(client: FlaskClient, refused: Refused) -> None:
    wrong = {"queue": [CANARY], "priority": CANARY, "available_at": CANARY, "producer": [CANARY], "color": CANARY}
    answer = client.post(TRIGGER, json=wrong)
    faults = {fault["pointer"]: fault["message"] for fault in refused(answer, 400, "invalid-input")["errors"]}
    assert faults.keys() == {f"/{name}" for name in wrong | MINIMAL}
    assert "lock_key" in faults["/color"], "the known ones are named"
    assert CANARY not in answer.text
    many = {f"unknown{i}": i for i in range(10_000)}
    assert len(refused(client.post(TRIGGER, json=many), 400, "invalid-input")["errors"]) == 20
    long_key = client.post(TRIGGER, json=MINIMAL | {"x" * 200_000: 1})
    refused(long_key, 400, "invalid-input")
    assert len(long_key.data) < 2_000


@pytest.mark.parametrize("path", ["/api", "/api/v1", "/api/v1/jobs/", TRIGGER + "/", "/%00", "/a//b"])
def test_an_unknown_path_is_404(client: FlaskClient, refused: Refused, path: str) -> None:
    refused(client.get(path), 404, "not-found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", TRIGGER, {"POST", "OPTIONS"}),
        ("PUT", TRIGGER, {"POST", "OPTIONS"}),
        ("DELETE", JOB + "/status", {"GET", "HEAD", "OPTIONS"}),
        ("GET", JOB + "/cancel", {"POST", "OPTIONS"}),
        ("POST", "/health", {"GET", "HEAD", "OPTIONS"}),
        ("NONSENSE", "/info", {"GET", "HEAD", "OPTIONS"}),
    ],
)
def test_a_wrong_method_is_405_and_names_the_right_ones(
    client: FlaskClient, refused: Refused, method: str, path: str, allowed: set[str]
) -> None:
    answer = client.open(path, method=method)
    refused(answer, 405, "method-not-allowed")
    assert set(answer.allow) == allowed


@settings(max_examples=100)
@given(raw=st.binary(max_size=200), path=st.text(max_size=30))
def test_no_bytes_are_our_fault(client: FlaskClient, raw: bytes, path: str) -> None:
    assert client.post(TRIGGER, data=raw, content_type="application/json").status_code == 400
    answer = client.get(f"/api/v1/jobs/{path}/status")
    assert answer.status_code in (400, 404), answer.json
