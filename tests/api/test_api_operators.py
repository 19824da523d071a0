"""Actions of operators over HTTP on one job, many jobs and queues: their refusals, and the names in the journal."""

import re
from html import unescape
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pytest
from api_app import BATCH, HTMX, MINIMAL, TRIGGER, Refused, bearer, entries, made, running
from flask.testing import FlaskClient

from dataloader.api.dashboard import actions
from dataloader.api.web.endpoint import OF_QUEUE
from dataloader.queue import db, enqueue, operations
from dataloader.queue.reports import stats

LATER = "2031-01-31T06:30:00Z"
BULK = "/api/v1/jobs/bulk"


def end(conn: db.Connection, job_id: str, status: str) -> None:
    conn.execute(
        "UPDATE dl_jobs SET status = %s, attempt = 5, finished_at = now(), error = 'no' WHERE job_id = %s",
        (status, job_id),
    )


def run(conn: db.Connection, job_id: str) -> None:
    conn.execute(
        "UPDATE dl_jobs SET status = 'running', lease_expires_at = now() + '1 min' WHERE job_id = %s", (job_id,)
    )


def test_a_change_of_a_queue_that_nobody_knows_says_so(dsn: str, conn: db.Connection) -> None:
    """It is kept, because it may be meant for a queue to come. Only those who may read learn the names of others."""
    enqueue.enqueue(conn, enqueue.NewJob("load.cbr", "t", "k"))
    stats.aggregate(conn)
    with running(dsn, dl_api_tokens=entries(ops="operate", all="operate read")) as app:
        client = app.test_client()
        for queue, name, is_known, similar in [
            ("load.cbr", "all", True, []),
            ("load.crb", "all", False, ["load.cbr"]),
            ("load.cbx", "ops", False, []),
            ("other", "all", False, []),
        ]:
            answer = client.post(f"/api/v1/queues/{queue}/pause", headers=bearer(name)).get_json()
            assert (answer["is_known"], answer["similar"]) == (is_known, similar), (queue, name)
            assert answer["paused_at"]


def test_many_jobs_at_once_and_what_became_of_each(client: FlaskClient, conn: db.Connection) -> None:
    late, running, failed = made(client, available_at=LATER), made(client), made(client)
    run(conn, running)
    end(conn, failed, "failed")
    unknown = str(uuid4())
    ids = [late, running, failed, unknown, late.upper()]

    def outcomes(verb: str, **more: Any) -> list[str]:
        answer = client.post(f"{BULK}/{verb}", json={"job_ids": ids, **more}).get_json()
        assert [row["job_id"] for row in answer["jobs"]] == [text.lower() for text in ids]
        return [row["outcome"] for row in answer["jobs"]]

    assert outcomes("run-now") == ["done", "running", "failed", "unknown", "done"]
    assert outcomes("requeue") == ["queued", "running", "done", "unknown", "queued"]
    assert outcomes("cancel", force=True) == ["done", "done", "done", "unknown", "done"]
    assert conn.execute("SELECT cancel_forced FROM dl_jobs WHERE job_id = %s", (running,)).fetchone() == (True,)
    assert outcomes("delete") == ["done", "running", "done", "unknown", "done"]
    assert client.post(f"{BULK}/delete", json={"job_ids": []}).get_json() == {"jobs": []}


@pytest.mark.parametrize("queue", ["load.cbr", "a/b", "<img src=x onerror=alert(1)>", "é %"])
def test_a_queue_is_paused_limited_and_resumed(client: FlaskClient, queue: str) -> None:
    path = f"/api/v1/queues/{quote(queue, safe='')}"
    paused = client.post(f"{path}/pause").get_json()
    assert (paused["queue"], paused["paused_by"]) == (queue, "anonymous from 127.0.0.1")
    assert paused["paused_at"]
    assert client.put(f"{path}/limit", json={"max_length": 7}).get_json()["max_length"] == 7
    (shown,) = client.get("/api/v1/queues").get_json()["queues"]
    assert (shown["queue"], shown["paused_at"], shown["max_length"]) == (queue, paused["paused_at"], 7)
    assert client.post(f"{path}/resume").get_json()["paused_at"] is None
    assert client.put(f"{path}/limit", json={"max_length": None}).get_json()["max_length"] is None
    assert client.get("/api/v1/queues").get_json() == {"queues": []}


def test_a_queue_of_any_name_has_its_page_buttons_and_answers(client: FlaskClient) -> None:
    """Clients and proxies take dots out of a path, also percent-encoded ones: the name may stand behind the `?`."""
    for queue in [".", "..", "/", "a/b", "/a", "a/", "a/move", "a\nb/c\nd"]:
        named = f"?name={quote(queue, safe='')}"
        assert client.put(f"/api/v1/queues/-{named}", json={"ordered": True}).get_json()["queue"] == queue
        assert client.post(f"/api/v1/queues/-/pause{named}").get_json()["queue"] == queue
        assert client.get(f"/api/v1/queues/-/keys{named}").get_json()["keys"] == []
    made(client, queue="..", available_at=LATER)
    assert client.post("/do/run_all?queue=..&task=t", headers=HTMX).status_code == 200
    assert 'href="/queues/-?name=.."' in client.get("/").text
    page = client.get("/queues/-?name=..").text
    for text in ('<h1 class="name">..</h1>', "Paused</strong> since", 'hx-post="/do/resume?queue=.."'):
        assert text in page


def test_no_queues_name_is_taken_for_another_address(client: FlaskClient) -> None:
    """Neither the address of a change for the name of a queue. One that ends as an address does stands in the query."""
    rules = [str(rule) for rule in client.application.url_map.iter_rules()]
    behind = {rule.rpartition("/")[2] for rule in rules if rule.startswith("/api/v1/queues/<anything:queue>/")}
    assert behind == set(OF_QUEUE)
    for verb in OF_QUEUE:
        allowed = client.patch(f"/api/v1/queues/a/{verb}").headers["Allow"].split(", ")
        assert len(set(allowed) - {"OPTIONS", "HEAD"}) == 1, verb
        name = f"a/{verb}"
        answer = client.put(f"/api/v1/queues/-?name={quote(name, safe='')}", json={"ordered": True}).get_json()
        assert answer.get("queue") == name, answer
    assert client.put("/api/v1/queues/pause", json={"ordered": True}).get_json()["queue"] == "pause"


@pytest.mark.parametrize("name", ["orders", "...", "", "a\n", "a/" + "x" * 511])
def test_any_other_name_belongs_into_the_path(client: FlaskClient, refused: Refused, name: str) -> None:
    answer = client.post(f"/api/v1/queues/-/pause?name={quote(name, safe='')}")
    refused(answer, 400, "invalid-input", "/name")


def test_a_button_may_have_a_filter_and_goes_on_where_it_stopped(
    client: FlaskClient, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task in ("a&b", "other", "a&b"):
        end(conn, made(client, task=task), "failed")
    page = client.get("/jobs?queue=load.cbr&status=dead&task=a%26b").text
    assert "Select all that match" in page
    assert "hx-post" not in page
    address = "/do/delete_dead?queue=load.cbr&task=a%26b"
    monkeypatch.setattr(operations, "SCAN", 1)
    monkeypatch.setattr(actions, "ALL_SEC", -1.0)  # time for one step
    answer = client.post(address, headers=HTMX).text
    assert "1 job deleted. There may be more behind these." in answer
    (more,) = re.findall('hx-post="([^"]+)"', answer)
    monkeypatch.undo()
    assert "1 job deleted." in client.post(unescape(more), headers=HTMX).text
    assert conn.execute("SELECT array_agg(task) FROM dl_jobs").fetchone() == (["other"],)
    for wrong in ("producer=p", "task=%00", "after=x"):
        assert client.post(f"/do/delete_dead?queue=load.cbr&{wrong}", headers=HTMX).status_code == 400


def test_a_full_queue_takes_no_more_until_there_is_room(client: FlaskClient, refused: Refused) -> None:
    client.put("/api/v1/queues/load.cbr/limit", json={"max_length": 1})
    nightly = {"name": "nightly", "queue": "load.cbr", "task": "t", "cron": "0 3 * * *"}
    assert client.post("/api/v1/schedules", json=nightly).status_code == 200
    job_id = made(client, idempotency_key="k")
    batch = {"jobs": [MINIMAL | {"queue": "other"}, MINIMAL]}
    for path, body in ((TRIGGER, MINIMAL), (BATCH, batch), ("/api/v1/schedules/nightly/run", None)):
        answer = client.post(path, json=body)
        assert "load.cbr" in refused(answer, 429, "queue-full")["detail"]
        assert int(answer.headers["Retry-After"]) > 0
    assert made(client, idempotency_key="k") == job_id  # it is there already
    assert client.post(TRIGGER, json=MINIMAL | {"queue": "other"}).status_code == 200
    client.delete(f"/api/v1/jobs/{job_id}")
    made(client)
