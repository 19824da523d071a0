"""Searches, suggestions and bulk orders over HTTP: what is refused, and what holds no secret."""

from typing import Any
from uuid import UUID

import pytest
from api_app import Refused, answered, made
from flask.testing import FlaskClient

from dataloader.queue import db

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


@pytest.mark.parametrize("path", [JOBS, "/api/v1/tally"])
def test_a_wrong_search_is_a_400_that_names_it(client: FlaskClient, refused: Refused, path: str) -> None:
    for q in ("sttus:dead", "task:", '"open', "status:x", "args.password:x", "args:1", "id:x", LONG):
        problem = refused(client.get(path, query_string={"q": q}), 400, "invalid-input")
        assert problem["errors"][0]["pointer"] == "/q"


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


def test_a_preview_of_a_wrong_search_is_a_400(client: FlaskClient, refused: Refused) -> None:
    body = {"order": "cancel", "matching": {"q": "args:b"}}
    refused(client.post(f"{BULK}/preview", json=body), 400, "invalid-input", "/matching/q")


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
