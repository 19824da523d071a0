"""Bad input: always 400 with a pointer to it, never a row; and the other refusals of HTTP."""

import json
from typing import Any
from uuid import UUID

import pytest
from api_app import BATCH, MINIMAL, TRIGGER, Refused
from flask.testing import FlaskClient
from hypothesis import given, settings
from hypothesis import strategies as st
from werkzeug.test import TestResponse

from dataloader.ops import checks
from dataloader.queue import db, new_job, parents

CANARY = "s3cret-canary"
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


def test_only_json_is_taken(client: FlaskClient, refused: Refused) -> None:
    for content_type in [
        None,
        "",
        "text/plain",
        "text/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/json-patch+json",
        "application/json; charset=utf-16",
        "application/json, text/plain",
        "json",
        ";",
    ]:
        answer = client.post(TRIGGER, data=json.dumps(MINIMAL), content_type=content_type)
        problem = refused(answer, 400, "invalid-input", "")
        assert problem["errors"][0]["code"] == "content_type"


def test_all_wrong_fields_are_named_at_once(client: FlaskClient, refused: Refused) -> None:
    problem = refused(client.post(TRIGGER, json={"queue": 1, "priority": -1, "color": 1}), 400, "invalid-input")
    pointers = {fault["pointer"] for fault in problem["errors"]}
    assert pointers == {"/queue", "/task", "/lock_key", "/priority", "/color"}
    (unknown,) = [fault for fault in problem["errors"] if fault["pointer"] == "/color"]
    assert "lock_key" in unknown["message"]


def test_a_problem_is_small_however_much_is_wrong(client: FlaskClient, refused: Refused) -> None:
    many = {f"unknown{i}": i for i in range(10_000)}
    assert len(refused(client.post(TRIGGER, json=many), 400, "invalid-input")["errors"]) == 20
    long_key = client.post(TRIGGER, json=MINIMAL | {"x" * 200_000: 1})
    refused(long_key, 400, "invalid-input")
    assert len(long_key.data) < 2_000


def test_the_value_sent_is_not_repeated(client: FlaskClient) -> None:
    for field in [*MINIMAL, "available_at", "idempotency_key", "priority", "producer"]:
        answer = client.post(TRIGGER, json=MINIMAL | {field: [CANARY]})
        assert answer.status_code == 400
        assert CANARY not in answer.text


def test_an_unknown_path_is_404(client: FlaskClient, refused: Refused) -> None:
    for path in ["/api", "/api/v1", "/api/v1/jobs/", TRIGGER + "/", "/%00", "/a//b"]:
        refused(client.get(path), 404, "not-found")


JOB = "/api/v1/jobs/01890a5d-ac96-774b-bcce-b302099a8057"


def test_a_wrong_method_is_405_and_names_the_right_ones(client: FlaskClient, refused: Refused) -> None:
    for method, path, allowed in [
        ("GET", TRIGGER, {"POST", "OPTIONS"}),
        ("PUT", TRIGGER, {"POST", "OPTIONS"}),
        ("DELETE", JOB + "/status", {"GET", "HEAD", "OPTIONS"}),
        ("GET", JOB + "/cancel", {"POST", "OPTIONS"}),
        ("POST", "/health", {"GET", "HEAD", "OPTIONS"}),
        ("NONSENSE", "/info", {"GET", "HEAD", "OPTIONS"}),
    ]:
        answer = client.open(path, method=method)
        refused(answer, 405, "method-not-allowed")
        assert set(answer.allow) == allowed


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from(
    [*MINIMAL, "args", "idempotency_key", "priority", "available_at", "max_attempts", "lease_ttl_sec"]
)
texts = st.text(st.characters(exclude_categories=()), min_size=1, max_size=40)
near = st.builds(
    lambda good, args, odd: good | {"args": args} | odd,
    st.fixed_dictionaries({"queue": texts, "task": texts, "lock_key": texts}),
    st.dictionaries(st.text(max_size=4), anything, max_size=4),
    st.dictionaries(names, anything, max_size=1),
)


@settings(max_examples=150)
@given(document=near | anything)
def test_no_document_is_our_fault(client: FlaskClient, document: Any) -> None:
    answer = client.post(TRIGGER, data=json.dumps(document), content_type="application/json")
    assert answer.status_code in (200, 400), answer.json


@settings(max_examples=100)
@given(raw=st.binary(max_size=200), path=st.text(max_size=30))
def test_no_bytes_are_our_fault(client: FlaskClient, raw: bytes, path: str) -> None:
    assert client.post(TRIGGER, data=raw, content_type="application/json").status_code == 400
    answer = client.get(f"/api/v1/jobs/{path}/status")
    assert answer.status_code in (400, 404), answer.json
