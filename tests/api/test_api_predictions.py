"""Predicted ends over HTTP and on the pages."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from api_app import TRIGGER, answered
from flask.testing import FlaskClient

from dataloader.queue import db
from dataloader.queue.reports import predictions


@pytest.fixture
def learned(conn: db.Connection) -> None:
    """Runs of the task t take 600 s, and one worker serves the queue q."""
    conn.execute("INSERT INTO dl_durations VALUES ('t', array_fill(600::real, ARRAY[200]), 200, now())")
    conn.execute(
        "INSERT INTO dl_workers (worker, farm, host, pid, queue, state) VALUES ('w', 'f', 'h', 1, 'q', 'idle')"
    )


def added(client: FlaskClient, **more: Any) -> str:
    job = {"queue": "q", "task": "t", "lock_key": str(uuid4())} | more
    return str(answered(client.post(TRIGGER, json=job))["job_id"])


def ago(shown: dict[str, Any], name: str) -> float:
    """In how many seconds from the prediction."""
    return (datetime.fromisoformat(shown[name]) - datetime.fromisoformat(shown["at"])).total_seconds()


@pytest.mark.usefixtures("learned")
def test_a_job_and_its_queue_tell_when_they_end(client: FlaskClient) -> None:
    deadline = datetime.now(UTC) + timedelta(minutes=15)
    first, second = added(client, priority=1), added(client, deadline=deadline.isoformat())
    shown = client.get(f"/api/v1/jobs/{second}/prediction").json
    assert ago(shown, "ends_at") == pytest.approx(1_200, rel=0.1)
    assert ago(shown, "earliest") < ago(shown, "ends_at") < ago(shown, "latest")
    assert (shown["job_id"], shown["queue"], shown["status"], shown["reason"]) == (second, "q", "queued", None)
    assert shown["is_late"], "15 minutes for 20"
    assert shown["accuracy"] == {"predictions": 0, "error": None, "within": None}
    assert not client.get(f"/api/v1/jobs/{first}/prediction").json["is_late"]
    whole = client.get("/api/v1/queues/q/prediction").json
    assert ago(whole, "ends_at") == pytest.approx(1_200, rel=0.1)
    assert "job_id" not in whole


@pytest.mark.usefixtures("learned")
def test_the_pages_say_it_in_a_sentence(client: FlaskClient, conn: db.Connection) -> None:
    job = added(client, deadline=(datetime.now(UTC) + timedelta(minutes=5)).isoformat())
    conn.execute(
        "INSERT INTO dl_predictions (job_id, queue, made_at, ends_at, earliest, latest, ended_at)"
        " VALUES (gen_random_uuid(), 'q', now() - interval '200 s', now() - interval '50 s',"
        "         now() - interval '60 s', now() - interval '40 s', now() - interval '100 s')"
    )
    page = client.get(f"/jobs/{job}").text
    assert "It <strong>ends about <time" in page
    assert "behind its deadline" in page
    assert "Typical error in the last 24 hours: 50 % (predictions: 1)." in page
    assert "The work due now <strong>ends about" in client.get("/queues/q").text


def test_without_a_prediction_there_is_a_reason(client: FlaskClient) -> None:
    job = added(client)
    shown = client.get(f"/api/v1/jobs/{job}/prediction").json
    assert (shown["ends_at"], shown["earliest"], shown["latest"], shown["reason"]) == (None, None, None, "no_worker")
    assert "When it ends is not known. No worker of its queue takes jobs." in client.get(f"/jobs/{job}").text
    assert client.get("/api/v1/queues/unknown/prediction").json["reason"] == "nothing"
    assert 'id="ending"' not in client.get("/queues/unknown").text


@pytest.mark.usefixtures("learned", "ageless")
def test_requests_within_seconds_share_what_is_read_of_a_queue(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask = predictions.outlook
    monkeypatch.setattr(predictions, "outlook", lambda conn, queue: asked.append(queue) or ask(conn, queue))
    jobs = [added(client) for _ in range(3)]
    ends = [ago(client.get(f"/api/v1/jobs/{job}/prediction").json, "ends_at") for job in jobs]
    assert ends == sorted(ends)
    client.get("/api/v1/queues/q/prediction")
    client.get("/api/v1/queues/other/prediction")
    assert asked == ["q", "other"]
