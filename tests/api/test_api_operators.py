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
from dataloader.api.server import audit
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


def test_the_order_of_a_queue_is_set_field_by_field(client: FlaskClient) -> None:
    path = "/api/v1/queues/orders"
    found = client.put(path, json={"ordered": True, "merge": True, "batch": 10}).get_json()
    assert (found["ordered"], found["merge"], found["merge_limit"], found["batch"]) == (True, True, 1000, 10)
    found = client.put(path, json={"on_dead": "hold", "batch": None}).get_json()
    assert (found["merge"], found["batch"], found["on_dead"]) == (True, None, "hold")
    (listed,) = [each for each in client.get("/api/v1/queues").get_json()["queues"] if each["queue"] == "orders"]
    assert (listed["ordered"], listed["merge"], listed["on_dead"]) == (True, True, "hold")


def test_a_status_that_forbids_it_is_409_and_named(client: FlaskClient, conn: db.Connection, refused: Refused) -> None:
    queued, running, failed = (made(client, lock_key=status) for status in ("queued", "running", "failed"))
    run(conn, running)
    end(conn, failed, "failed")
    for method, job_id, step, status in [
        ("POST", queued, "/requeue", "queued"),
        ("POST", running, "/requeue", "running"),
        ("POST", running, "/run-now", "running"),
        ("POST", failed, "/run-now", "failed"),
        ("DELETE", running, "", "running"),
    ]:
        problem = refused(client.open(f"/api/v1/jobs/{job_id}{step}", method=method), 409, "conflict")
        assert problem["detail"].startswith(f"the job is {status}; ")
        assert client.get(f"/api/v1/jobs/{job_id}/status").get_json()["status"] == status


def test_a_change_of_a_queue_that_nobody_knows_says_so(client: FlaskClient, conn: db.Connection) -> None:
    """It is kept, because it may be meant for a queue to come; a mistyped name is seen."""
    made(client, queue="load.cbr")
    for step in ("pause", "resume"):
        known = client.post(f"/api/v1/queues/load.cbr/{step}").get_json()
        assert (known["is_known"], known["similar"]) == (True, [])
    stats.aggregate(conn)
    answer = client.post("/api/v1/queues/load.crb/pause").get_json()
    assert answer["paused_at"]
    assert (answer["is_known"], answer["similar"]) == (False, ["load.cbr"])
    limit = client.put("/api/v1/queues/other/limit", json={"max_length": 5}).get_json()
    assert (limit["is_known"], limit["similar"]) == (False, [])
    assert "No queue of this name is known now" in client.post("/do/pause?queue=load.cbx", headers=HTMX).text


def test_the_names_of_other_queues_are_for_those_who_may_read(dsn: str, conn: db.Connection) -> None:
    enqueue.enqueue(conn, enqueue.NewJob("load.cbr", "t", "k"))
    stats.aggregate(conn)
    with running(dsn, dl_api_tokens=entries(ops="operate")) as app:
        answer = app.test_client().post("/api/v1/queues/load.crb/pause", headers=bearer("ops")).get_json()
    assert (answer["is_known"], answer["similar"]) == (False, [])


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


def test_a_queue_whose_name_no_path_can_hold_has_its_page_and_buttons(client: FlaskClient) -> None:
    """Clients and proxies take the dots out of a path, also percent-encoded ones: the name stands behind the `?`."""
    made(client, queue="..", available_at=LATER)
    assert client.post("/do/run_all?queue=..&task=t", headers=HTMX).status_code == 200
    assert client.post("/do/pause?queue=..", headers=HTMX).status_code == 200
    assert 'href="/queues/-?name=.."' in client.get("/").text
    page = client.get("/queues/-?name=..").text
    assert '<h1 class="name">..</h1>' in page
    assert "Paused</strong> since" in page
    assert 'hx-post="/do/resume?queue=.."' in page


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


def test_a_name_with_a_slash_may_stand_in_the_query(client: FlaskClient) -> None:
    for queue in [".", "..", "/", "a/b", "/a", "a/", "a/move", "a\nb/c\nd"]:
        named = f"?name={quote(queue, safe='')}"
        assert client.put(f"/api/v1/queues/-{named}", json={"ordered": True}).get_json()["queue"] == queue
        assert client.post(f"/api/v1/queues/-/pause{named}").get_json()["queue"] == queue
        assert client.get(f"/api/v1/queues/-/keys{named}").get_json()["keys"] == []


@pytest.mark.parametrize("name", ["orders", "...", "", "a\n", "a/" + "x" * 511])
def test_any_other_name_belongs_into_the_path(client: FlaskClient, refused: Refused, name: str) -> None:
    answer = client.post(f"/api/v1/queues/-/pause?name={quote(name, safe='')}")
    refused(answer, 400, "invalid-input", "/name")


def test_jobs_that_may_not_have_run_are_not_filtered_by_their_error(client: FlaskClient, refused: Refused) -> None:
    refused(client.post("/api/v1/queues/load.cbr/run-all", json={"error": "no"}), 400, "invalid-input", "/error")


def test_a_move_that_cannot_be_changes_nothing(client: FlaskClient, refused: Refused) -> None:
    for queue, ordered in (("orders", True), ("plain", False)):
        client.put(f"/api/v1/queues/{queue}", json={"ordered": ordered})
    before = client.get("/api/v1/queues").get_json()
    refused(client.post("/api/v1/queues/orders/move", json={"to": "orders"}), 400, "invalid-input", "/to")
    for queue, to, words in [
        ("nobody", "new", "no queue nobody is known now"),
        ("orders", "plain", "orders has ordered true and plain has false"),
    ]:
        problem = refused(client.post(f"/api/v1/queues/{queue}/move", json={"to": to}), 409, "conflict")
        assert words in problem["detail"]
    assert client.get("/api/v1/queues").get_json() == before


def test_a_button_may_have_a_filter_and_a_list_has_one_set_of_orders(
    client: FlaskClient, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task in ("a&b", "a&b", "other"):
        end(conn, made(client, task=task), "failed")
    page = client.get("/jobs?queue=load.cbr&status=dead&task=a%26b").text
    address = "/do/delete_dead?queue=load.cbr&task=a%26b"
    assert "Select all that match" in page
    assert "hx-post" not in page
    monkeypatch.setattr(operations, "SCAN", 1)
    assert "2 jobs deleted." in client.post(address, headers=HTMX).text
    assert conn.execute("SELECT array_agg(task) FROM dl_jobs").fetchone() == (["other"],)
    assert client.post("/do/delete_dead?queue=load.cbr&producer=p", headers=HTMX).status_code == 400
    assert client.post("/do/delete_dead?queue=load.cbr&task=%00", headers=HTMX).status_code == 400
    assert client.post("/do/delete_dead?queue=load.cbr&after=x", headers=HTMX).status_code == 400


def test_a_button_that_has_no_time_left_goes_on_where_it_stopped(
    client: FlaskClient, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task in ("a", "b", "a"):
        end(conn, made(client, task=task), "failed")
    monkeypatch.setattr(operations, "SCAN", 1)
    monkeypatch.setattr(actions, "ALL_SEC", -1.0)  # time for one step
    answer = client.post("/do/requeue_dead?queue=load.cbr&task=a", headers=HTMX).text
    assert "1 job queued again. There may be more behind these." in answer
    more = re.search('hx-post="([^"]+)"', answer)
    assert more is not None
    monkeypatch.undo()
    assert "1 job queued again." in client.post(unescape(more[1]), headers=HTMX).text


def test_a_full_queue_takes_no_more_until_there_is_room(client: FlaskClient, refused: Refused) -> None:
    client.put("/api/v1/queues/load.cbr/limit", json={"max_length": 1})
    job_id = made(client, idempotency_key="k")
    for path, body in ((TRIGGER, MINIMAL), (BATCH, {"jobs": [MINIMAL | {"queue": "other"}, MINIMAL]})):
        answer = client.post(path, json=body)
        problem = refused(answer, 429, "queue-full")
        assert "load.cbr" in problem["detail"]
        assert int(answer.headers["Retry-After"]) > 0
    assert made(client, idempotency_key="k") == job_id  # it is there already
    assert client.post(TRIGGER, json=MINIMAL | {"queue": "other"}).status_code == 200
    client.delete(f"/api/v1/jobs/{job_id}")
    made(client)


def test_the_audit_says_how_many_jobs_an_order_has_changed(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = made(client)
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(audit.log, "audit", lambda event, **facts: lines.append({"event": event, **facts}))
    client.post(f"{BULK}/cancel", json={"job_ids": [job_id]})
    client.post("/api/v1/queues/load.cbr/delete-dead")
    ends = [line for line in lines if line["event"] == "request.end"]
    assert {(line["who"], line["remote"], line["status"]) for line in ends} == {("anonymous", "127.0.0.1", 200)}
    known = {"event", "who", "remote", "method", "path", "status", "duration_ms"}
    changed = [{name: value for name, value in line.items() if name not in known} for line in ends]
    assert changed == [
        {"jobs": 1, "first_job_id": job_id, "last_job_id": job_id},
        {"queue": "load.cbr", "jobs": 0},
    ]
