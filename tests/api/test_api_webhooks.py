"""The receivers of alerts over HTTP and on the dashboard: tried, paused, removed; without secrets."""

import json
import re
from collections.abc import Iterator

import pytest
from api_app import BATCH, TRIGGER, Refused, running, show_worker
from flask.testing import FlaskClient

from dataloader.queue import db
from dataloader.queue.reports import stats, webhooks
from dataloader.queue.reports.messages import TASK

WEBHOOKS = "/api/v1/webhooks"
OPS = f"{WEBHOOKS}/ops"
URL = "${DL_WEBHOOK_OPS}"
CANARY = "canary-5f2c"


@pytest.fixture
def client(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlaskClient]:
    """Of a service whose environment has the secrets too, as on a machine with all programs."""
    monkeypatch.setenv("DL_WEBHOOK_OPS", f"https://user:{CANARY}@ops.example.com/?token={CANARY}")
    with running(dsn, dl_public_url="https://farm.example.com/", environment="prod") as app:
        yield app.test_client()


def test_a_receiver_is_tried_by_a_job(client: FlaskClient, conn: db.Connection) -> None:
    client.put(OPS, json={"url": URL})
    answer = client.post(f"{OPS}/test").get_json()
    again = client.post(f"{OPS}/test").get_json()
    assert answer["job_id"] != again["job_id"]
    job = client.get(f"/api/v1/jobs/{answer['job_id']}").get_json()
    assert (job["queue"], job["task"], job["lock_key"]) == ("alerts", "alert.webhook", "webhook ops")
    (message,) = conn.execute("SELECT message FROM dl_messages WHERE job_id = %s", (answer["job_id"],)).fetchone() or ()
    assert (message["kind"], message["environment"], message["url"]) == ("test", "prod", "https://farm.example.com")
    show_worker(conn, queue="alerts", queues=["alerts"])
    assert client.get(WEBHOOKS).get_json()["is_served"]


def test_a_receiver_that_gets_nothing_is_not_shown_as_told(client: FlaskClient, conn: db.Connection) -> None:
    client.put(OPS, json={"url": URL})
    client.post(f"{OPS}/test")
    assert "undelivered" not in client.get("/webhooks").text
    conn.execute("UPDATE dl_jobs SET attempt = 1, error = 'Connection refused'")  # it waits for its next attempt
    (shown,) = client.get(WEBHOOKS).get_json()["webhooks"]
    assert (shown["undelivered"], shown["last_error"]) == (1, "Connection refused")
    assert "<strong>1 undelivered</strong>: Connection refused" in client.get("/webhooks").text
    conn.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now()")
    assert wrong(client) == [("webhook", "ops", "no worker serves the queue alerts")]
    show_worker(conn, queue="alerts")
    assert wrong(client) == [("webhook", "ops", "1 undelivered")]
    for paused in ("pause", "resume"):
        client.post(f"{OPS}/{paused}")
        assert len(wrong(client)) == (paused == "resume")
    arrived = client.post(f"{OPS}/test").get_json()["job_id"]
    conn.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now() WHERE job_id = %s", (arrived,))
    assert wrong(client) == []
    conn.execute("UPDATE dl_jobs SET status = 'failed', error = 'no'")
    client.delete(OPS)
    assert wrong(client) == []
    client.put(OPS, json={"url": URL})  # another webhook of the same name
    assert wrong(client) == []


def wrong(client: FlaskClient) -> list[tuple[str, str, str]]:
    return [(each["kind"], each["name"], each["error"]) for each in client.get("/api/v1/stats").get_json()["wrong"]]


def test_the_latest_messages_of_each_webhook_decide_what_has_not_arrived(
    client: FlaskClient, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, messages in (("quiet", 1), ("noisy", 3)):
        client.put(f"{WEBHOOKS}/{name}", json={"url": URL})
        for _ in range(messages):
            client.post(f"{WEBHOOKS}/{name}/test")
    conn.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now(), error = 'Connection refused'")

    def undelivered() -> dict[str, int]:
        return {each["name"]: each["undelivered"] for each in client.get(WEBHOOKS).get_json()["webhooks"]}

    assert undelivered() == {"noisy": 3, "quiet": 1}
    monkeypatch.setitem(stats.MESSAGES, "of_each", 2)
    assert undelivered() == {"noisy": 2, "quiet": 1}
    monkeypatch.setitem(stats.MESSAGES, "most", 2)
    assert undelivered() == {"noisy": 2, "quiet": 0}


def test_the_page_lists_the_receivers_and_says_that_nobody_sends(client: FlaskClient, refused: Refused) -> None:
    problem = refused(client.put(OPS, json={"url": f"https://u:{CANARY}@a/"}), 400, "invalid-input", "/url")
    assert CANARY not in json.dumps(problem)
    refused(client.put(f"{WEBHOOKS}/a%20b", json={"url": URL}), 400, "invalid-input", "")
    assert "dataloader webhook add NAME URL" in client.get("/webhooks").text, "there is none"
    client.put(OPS, json={"url": URL, "queues": ["<b>q</b>"]})
    client.put(f"{WEBHOOKS}/chat", json={"url": URL, "shape": "slack"})
    client.post(f"{WEBHOOKS}/chat/pause")
    page = client.get("/webhooks").text
    assert "<b>q</b>" not in page
    for text in (
        "No worker serves the queue alerts.",
        "&lt;b&gt;q",
        "by anonymous from 127.0.0.1",
        f">{URL}</span></td>",
    ):
        assert text in page
    assert CANARY not in page + client.get(WEBHOOKS).text


FORGED = {"queue": "q", "task": TASK, "lock_key": "k", "args": {"webhook": "ops", "message": {"text": "FORGED"}}}


def test_nobody_adds_jobs_that_send_messages(client: FlaskClient, conn: db.Connection, refused: Refused) -> None:
    for path, body, pointer in [
        (TRIGGER, FORGED, "/task"),
        (BATCH, {"jobs": [FORGED | {"task": "noop"}, FORGED]}, "/jobs/1/task"),
        (BATCH, {"jobs": [FORGED | {"task": "noop"}], "on_done": FORGED}, "/jobs/1/task"),
        ("/api/v1/schedules", {"name": "s", "queue": "q", "task": TASK, "cron": "0 3 * * *"}, "/task"),
        ("/api/v1/backfills", {"name": "b", "queue": "q", "task": TASK, "partitions": ["1"]}, "/task"),
    ]:
        refused(client.post(path, json=body), 400, "invalid-input", pointer)
        assert conn.execute("SELECT FROM dl_jobs").fetchall() == []


def test_a_message_is_not_run_again_with_another_text(
    client: FlaskClient, conn: db.Connection, refused: Refused
) -> None:
    client.put(OPS, json={"url": URL})
    job_id = client.post(f"{OPS}/test").get_json()["job_id"]
    conn.execute("UPDATE dl_jobs SET status = 'failed' WHERE job_id = %s", (job_id,))
    answer = client.post(f"/api/v1/jobs/{job_id}/again", json={"args": {"message": {"text": "FORGED"}}})
    assert TASK in refused(answer, 400, "invalid-input", "/task")["errors"][0]["message"]
    assert len(conn.execute("SELECT FROM dl_jobs").fetchall()) == 1


def test_the_cost_of_what_has_not_arrived_does_not_grow_with_the_messages(conn: db.Connection) -> None:
    for name in ("ops", "quiet"):
        webhooks.put(conn, name, "https://ops.example/alerts", "anna")
    conn.execute("INSERT INTO dl_messages SELECT gen_random_uuid(), 'ops', '{}' FROM generate_series(1, 20000)")
    conn.execute("ALTER TABLE dl_jobs DISABLE TRIGGER USER")
    conn.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, finished_at, error)"
        " SELECT job_id, 'alerts', 't', 'k', 'failed', now(), 'refused' FROM dl_messages"
    )
    conn.execute("ALTER TABLE dl_jobs ENABLE TRIGGER USER")
    conn.execute("ANALYZE dl_messages, dl_jobs")
    explained = ("EXPLAIN (ANALYZE) " + stats._SQL["deliveries"]).encode()
    plan = conn.execute(explained, {"of_each": 100, "most": 1_000}, prepare=False).fetchall()
    assert not [line for (line,) in plan if "Seq Scan on dl_messages" in line or "Seq Scan on dl_jobs" in line]
    assert sum(int(n) for (line,) in plan for n in re.findall(r"Rows Removed by Filter: (\d+)", line)) <= 2 * 1_000
