"""Lists, searches and orders to many jobs over HTTP; one job, its journal and trace; what is refused or is a secret."""

from typing import Any
from uuid import UUID, uuid4

import pytest
from api_app import BATCH, MINIMAL, TRIGGER, Refused, answered, asked, made, next_page, strict
from flask.testing import FlaskClient

from dataloader import config
from dataloader.cli.direct import Direct
from dataloader.model.jobs import FarmEvents, Job, JobEvents, Jobs
from dataloader.queue import db

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_list_is_read_page_by_page_along_its_links(client: FlaskClient) -> None:
    ids = [made(client, lock_key=str(number)) for number in range(5)]
    found, path, pages = [], "/api/v1/jobs?limit=2&queue=load.cbr", 0
    while path:
        answer = client.get(path)
        strict(Jobs, answer.get_json())
        found += [job["job_id"] for job in answer.get_json()["jobs"]]
        assert ("Link" in answer.headers) == (answer.get_json()["next"] is not None)
        path, pages = next_page(answer), pages + 1
    assert found == ids[::-1]
    assert pages >= 3
    by_key = client.get("/api/v1/jobs?sort=key").get_json()["jobs"]
    assert [job["lock_key"] for job in by_key] == list("01234")


def test_a_list_is_filtered(client: FlaskClient) -> None:
    made(client, task="t&x", partition_key="p", available_at="2030-01-01T00:00:00Z")
    made(client, producer="airflow", consumer_group="g")
    made(client, queue="other")
    for query, count in [
        ("queue=load.cbr", 2),
        ("queue=other", 1),
        ("status=queued", 3),
        ("status=scheduled", 1),
        ("status=dead", 0),
        ("task=t%26x", 1),
        ("lock_key=cbr", 3),
        ("partition_key=p", 1),
        ("producer=airflow&consumer_group=g", 1),
        ("since=2020-01-31T06:30:00%2B03:00", 3),
        ("until=2020-01-31T06:30:00Z", 0),
    ]:
        assert len(asked(client, f"/api/v1/jobs?{query}", Jobs)["jobs"]) == count


@pytest.mark.parametrize(  # beside those of every parameter in test_ops_matrix.py
    ("query", "pointer", "code"),
    [
        ("limit=7.0", "/limit", "int_parsing"),
        ("limit=%D9%A1", "/limit", "int_parsing"),
        ("limit=", "/limit", "int_parsing"),
        ("limit=1&limit=2", "/limit", "duplicate"),
        ("since=yesterday", "/since", "rfc3339"),
        ("until=1999-01-01T00:00:00Z", "/until", "time_range"),
        ("queue=a%00b", "/queue", "unstorable_text"),
        ("after=nonsense", "/after", "cursor"),
        ("after=%00", "/after", "unstorable_text"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(
    client: FlaskClient, refused: Refused, query: str, pointer: str, code: str
) -> None:
    problem = refused(client.get(f"/api/v1/jobs?{query}"), 400, "invalid-input", pointer)
    assert problem["errors"][0]["code"] == code


def test_one_job_with_all_that_is_known_of_it(client: FlaskClient, refused: Refused) -> None:
    secret = {"password": "s3cret-canary", "url": "postgresql://u:s3cret-canary@h/db", "date": "2026-01-31"}
    answer = client.post(
        TRIGGER,
        json=MINIMAL | {"args": secret, "affinity_key": "ollama/qwen"},
        headers={"traceparent": TRACE, "Idempotency-Key": "k-1"},
    )
    path = f"/api/v1/jobs/{answer.get_json()['job_id']}"
    job = asked(client, path, Job)
    assert (job["trace"], job["idempotency_key"], job["args"]["date"]) == (TRACE, "k-1", "2026-01-31")
    assert "s3cret-canary" not in client.get(path).text
    assert set(client.get(path + "/status").get_json()) <= set(job)
    for shown in (job, *client.get("/api/v1/jobs").get_json()["jobs"], client.get(path + "/status").get_json()):
        assert shown["affinity_key"] == "ollama/qwen"
    assert "ollama/qwen" in client.get(path.removeprefix("/api/v1")).text
    refused(client.get(f"/api/v1/jobs/{uuid4()}"), 404, "not-found")
    refused(client.get("/api/v1/jobs/7"), 400, "invalid-input", "")
    refused(client.get(path + "?wait=1"), 400, "invalid-input", "/wait")


def test_the_journal_of_a_job_and_of_the_farm(client: FlaskClient, refused: Refused) -> None:
    job_id = made(client)
    client.post(f"/api/v1/jobs/{job_id}/cancel")
    made(client, queue="other")
    path = f"/api/v1/jobs/{job_id}/events"
    events = asked(client, path, JobEvents)["events"]
    assert [event["kind"] for event in events] == ["queued", "canceled"]
    assert events[1]["payload"]["by"] == "anonymous from 127.0.0.1"
    first = client.get(path + "?limit=1")
    assert [event["kind"] for event in first.get_json()["events"]] == ["queued"]
    assert first.headers["Link"] == f'<{path}?limit=1&after={first.get_json()["next"]}>; rel="next"'
    last = client.get(f"{path}?after={events[1]['event_id']}").get_json()
    assert last == {"events": [], "next": None}
    refused(client.get(f"/api/v1/jobs/{uuid4()}/events"), 404, "not-found")
    refused(client.get(f"{path}?after=-1.5"), 400, "invalid-input", "/after")

    farm = asked(client, "/api/v1/events", FarmEvents)["events"]
    assert [event["queue"] for event in farm] == ["load.cbr", "load.cbr", "other"]
    path = f"/api/v1/events?after={farm[0]['event_id']}&queue=load.cbr"
    assert [event["kind"] for event in asked(client, path, FarmEvents)["events"]] == ["canceled"]


def test_an_answer_in_process_is_masked_as_over_http(conn: db.Connection, dsn: str) -> None:
    """A limit's name is free text, so it may hold a connection string."""
    secret = "postgresql://u:canary-canary@host/d"
    conn.execute("INSERT INTO dl_limits (name, most, changed_by) VALUES (%s, 1, 'me')", (secret,))
    with Direct(dsn, config.load(_env_file=None)) as farm:
        (limit,) = farm.limits()
    assert ("canary" in limit.name, limit.most) == (False, 1)


def test_an_idempotency_key_may_be_in_the_header_or_in_the_body(client: FlaskClient, refused: Refused) -> None:
    key = {"Idempotency-Key": "k-1"}
    ids = {
        client.post(TRIGGER, json=MINIMAL | body, headers=headers).get_json()["job_id"]
        for body, headers in (({}, key), ({"idempotency_key": "k-1"}, {}), ({"idempotency_key": "k-1"}, key), ({}, key))
    }
    assert len(ids) == 1
    for body, header in [({"idempotency_key": "k-2"}, "k-1"), *(({}, bad) for bad in ("", "x" * 256, "a\tb", "Ã¼"))]:
        answer = client.post(TRIGGER, json=MINIMAL | body, environ_overrides={"HTTP_IDEMPOTENCY_KEY": header})
        refused(answer, 400, "invalid-input", "/idempotency_key")


def test_a_trace_is_kept_when_it_is_one_and_of_a_job_that_is_found_the_first(
    client: FlaskClient, conn: db.Connection
) -> None:
    for given, kept in [
        (TRACE, TRACE),
        ("cc" + TRACE[2:] + "-what-the-future-adds", "cc" + TRACE[2:]),
        (TRACE + "-00", None),
        ("ff" + TRACE[2:], None),
        (TRACE.upper(), None),
        (TRACE.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32), None),
        ("", None),
        ("'); DROP TABLE dl_jobs; --", None),
    ]:
        keyed = {"jobs": [MINIMAL | {"idempotency_key": "k"}]}
        for path, body in ((TRIGGER, MINIMAL), (BATCH, {"jobs": [MINIMAL, MINIMAL]}), (BATCH, keyed)):
            answered(client.post(path, json=body, headers={"traceparent": given}))
        answered(client.post(BATCH, json=keyed, headers={"traceparent": TRACE.replace("-01", "-00")}))
        assert conn.execute("DELETE FROM dl_jobs RETURNING trace").fetchall() == [(kept,)] * 4, given


JOBS, BULK = "/api/v1/jobs", "/api/v1/jobs/bulk"
LONG = "x" * 513
SECRET = "canary-7f3b-hunter2"


def add(client: FlaskClient, conn: db.Connection, status: str = "queued", **fields: Any) -> str:
    """A job in this status."""
    job_id = made(client, **fields)
    if status != "queued":
        conn.execute(
            "UPDATE dl_jobs SET status = %s::dl_status, error = 'x',"
            " started_at = now(), lease_expires_at = now() + interval '1 h' WHERE job_id = %s",
            (status, job_id),
        )
    return job_id


def test_a_wrong_search_is_a_400_that_names_it(client: FlaskClient, refused: Refused) -> None:
    for q in ("sttus:dead", "task:", '"open', "status:x", "args.password:x", "args:1", "id:x", LONG):
        for path in (JOBS, "/api/v1/tally"):
            refused(client.get(path, query_string={"q": q}), 400, "invalid-input", "/q")
        body = {"order": "cancel", "matching": {"q": q}}
        refused(client.post(f"{BULK}/preview", json=body), 400, "invalid-input", "/matching/q")


def test_a_filter_beside_a_search_should_say_the_same(client: FlaskClient, refused: Refused) -> None:
    refused(client.get(JOBS, query_string={"q": "task:a", "task": "b"}), 400, "invalid-input")
    assert client.get(JOBS, query_string={"q": "task:a", "task": "a"}).status_code == 200


def test_suggestions_hold_no_secret(client: FlaskClient, conn: db.Connection) -> None:
    add(client, conn, task="load.canary-cage", lock_key=f"postgresql://u:{SECRET}@host/db", queue="canary-queue")
    add(client, conn, task="load.canary-cage", lock_key="plain canary key", args={"password": SECRET})
    conn.execute("INSERT INTO dl_tasks (task) VALUES ('load.canary-cage'), (%s)", (f"password={SECRET}",))
    for part in ("canary", "cana", "status:dea", "key:can", "post", "hunter2", "7f3b"):
        for path in ("/api/v1/suggestions", "/search/suggestions"):
            answer = client.get(path, query_string={"q": part})
            assert SECRET not in answer.text
            assert "hunter" not in answer.text.replace(part, "")
    given = client.get("/api/v1/suggestions", query_string={"q": "status:dead canary"}).get_json()["suggestions"]
    assert 'status:dead key:"plain canary key"' in given
    assert "status:dead task:load.canary-cage" in given
    assert client.get("/api/v1/suggestions?q=").get_json() == {"suggestions": []}


def previewed(client: FlaskClient, order: str, **target: Any) -> dict[str, Any]:
    return dict(answered(client.post(f"{BULK}/preview", json={"order": order, **target})))


def test_a_list_that_has_grown_is_a_409(client: FlaskClient, conn: db.Connection, refused: Refused) -> None:
    add(client, conn, "failed", task="a")
    later = add(client, conn, "failed", task="b")
    body = {"order": "delete", "matching": {"task": "a"}}
    preview = previewed(client, "delete", matching={"task": "a"})
    conn.execute("UPDATE dl_jobs SET task = 'a' WHERE job_id = %s", (later,))
    problem = refused(client.post(BULK, json=body | {"confirmation": preview["confirmation"]}), 409, "conflict")
    assert "2 now" in problem["detail"]
    assert conn.execute("SELECT count(*) FROM dl_jobs").fetchone() == (2,)


def test_a_wrong_order_is_a_400_and_changes_nothing(client: FlaskClient, conn: db.Connection, refused: Refused) -> None:
    add(client, conn, "failed", task="a")
    body: dict[str, Any] = {"order": "requeue", "matching": {"task": "a"}}
    body |= {"confirmation": previewed(client, **body)["confirmation"]}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"confirmation": "x"}, "/confirmation"),
        ({"matching": {"task": "b"}}, "/confirmation"),
        ({"order": "delete"}, "/confirmation"),
        ({"after": "x"}, "/after"),
        ({"matching": {}}, "/matching"),
        ({"job_ids": [str(UUID(int=1))]}, "/matching"),
        ({"order": "x"}, "/order"),
        ({"confirmation": None}, "/confirmation"),
    ]
    for change, pointer in changes:
        problem = refused(client.post(BULK, json=body | change), 400, "invalid-input")
        assert problem["errors"][0]["pointer"] == pointer
    assert conn.execute("SELECT count(*) FROM dl_jobs WHERE status = 'failed'").fetchone() == (1,)
