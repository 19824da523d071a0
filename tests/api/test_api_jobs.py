"""One job over HTTP and on its page: its status, cancellation, result, log and predicted end."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from api_app import MINIMAL, TRIGGER, Refused, answered, asked, made
from flask.testing import FlaskClient

from dataloader.api.dashboard.pages import RESULT_SHOWN
from dataloader.model.jobs import JobLogs
from dataloader.queue import db

CONTRACT = {"job_id", "status", "attempt", "started_at", "finished_at", "heartbeat_at", "error", "progress"}
OURS = {"queue", "task", "lock_key", "max_attempts", "available_at", "waiting_for"}


def status(client: FlaskClient, job_id: str) -> dict[str, Any]:
    return dict(asked(client, f"/api/v1/jobs/{job_id}/status"))


def test_the_status_of_a_job_has_the_contracts_fields_and_instants_in_utc(client: FlaskClient) -> None:
    job = status(client, made(client))
    assert set(job) >= CONTRACT | OURS
    assert (job["status"], job["attempt"], job["progress"], job["error"]) == ("queued", 0, {}, None)
    assert job["started_at"] is job["finished_at"] is job["heartbeat_at"] is None
    assert job["waiting_for"] == (nobody := {"reason": "no_worker", "queue": "load.cbr"})
    job = status(client, made(client, available_at="2031-01-31T06:30:00.25+03:00"))
    assert job["available_at"] == "2031-01-31T03:30:00.250000Z"
    assert job["waiting_for"] == {"reason": "time", "until": job["available_at"], "besides": [nobody]}


def test_a_checkpoint_has_a_time_and_a_length_and_is_not_shown(client: FlaskClient, conn: db.Connection) -> None:
    job_id = made(client)
    assert client.get(f"/api/v1/jobs/{job_id}").json["checkpoint"] is None
    conn.execute(
        "INSERT INTO dl_checkpoints (job_id, claim, checkpoint, target_claim, target_number, spares_attempt, saved_at)"
        " VALUES (%s, 1, '{\"at\": 47110815471108154711}', 0, 0, false, '2026-01-31T06:00:00Z')",
        (job_id,),
    )
    answer = client.get(f"/api/v1/jobs/{job_id}")
    assert answer.json["checkpoint"] == {"saved_at": "2026-01-31T06:00:00Z", "bytes": 28}
    page = client.get(f"/jobs/{job_id}").text
    assert "a checkpoint of 28 bytes" in page
    assert "47110815471108154711" not in answer.text + page


@pytest.mark.parametrize("body", [{}, {"data": b""}, {"json": {}}, {"data": b"", "content_type": "text/plain"}])
def test_cancel_needs_no_body_and_changes_no_finished_job(
    client: FlaskClient, conn: db.Connection, body: dict[str, Any]
) -> None:
    job_id = made(client)
    assert answered(client.post(f"/api/v1/jobs/{job_id}/cancel", **body))["status"] == "canceled"
    for end in ("succeeded", "failed", "canceled", "lost"):
        conn.execute("UPDATE dl_jobs SET status = %s, finished_at = now()", (end,))
        before = status(client, job_id)
        assert answered(client.post(f"/api/v1/jobs/{job_id}/cancel", **body)) == before == status(client, job_id)


@pytest.mark.parametrize(
    "body",
    [
        {"json": []},
        {"data": b"null", "content_type": "application/json"},
        {"data": b" "},
        {"data": b"{}", "content_type": "text/plain"},
        {"data": b'{"a":1,"a":1}', "content_type": "application/json"},
    ],
)
def test_cancel_with_a_bad_body_changes_nothing(client: FlaskClient, refused: Refused, body: dict[str, Any]) -> None:
    job_id = made(client)
    refused(client.post(f"/api/v1/jobs/{job_id}/cancel", **body), 400, "invalid-input", "")
    assert status(client, job_id)["status"] == "queued"


KNOWN = "01890a5d-ac96-774b-bcce-b302099a8057"
OTHER_TEXTS = ["", "1", "null", "not-a-uuid", "%FF%FE", "%", "%ZZ", "%E2%80%AE", "%0A", "'%20OR%201=1--", "a/b", "/"]
NEARLY_IDS = [text.format(KNOWN) for text in ["{}0", "{{{}}}", "urn:uuid:{}", "{}%0A", "%20{}", "{}%2Fx", "..%2F{}"]]
NEARLY_IDS += [KNOWN[:-1], KNOWN[:-1] + "g", KNOWN[:-1] + "%D9%A1", KNOWN.replace("-", "")]  # %D9%A1: an Arabic digit


def test_a_malformed_id_is_400(client: FlaskClient, refused: Refused) -> None:
    for job_id in [*OTHER_TEXTS, *NEARLY_IDS, "x" * 3_000]:
        problem = refused(client.get(f"/api/v1/jobs/{job_id}/status"), 400, "invalid-input", "")
        assert problem["errors"][0]["code"] == "uuid"
        refused(client.post(f"/api/v1/jobs/{job_id}/cancel"), 400, "invalid-input", "")


SUCCEED = "UPDATE dl_jobs SET status = 'succeeded', finished_at = now(), claims = 1 WHERE job_id = %s"


def succeeded(client: FlaskClient, conn: db.Connection, value: Any) -> str:
    """A job whose pipeline has returned this value."""
    job_id = made(client)
    conn.execute(SUCCEED, (job_id,))
    conn.execute("INSERT INTO dl_results VALUES (%s, 1, %s)", (job_id, json.dumps(value)))
    return job_id


def result(client: FlaskClient, job_id: str) -> dict[str, Any]:
    return dict(asked(client, f"/api/v1/jobs/{job_id}/result"))


def test_any_json_is_answered_as_it_is(client: FlaskClient, conn: db.Connection) -> None:
    for value in [{"rows": [1, 0.5, "ü"]}, [], "", 0, False]:
        job_id = succeeded(client, conn, value)
        assert result(client, job_id) == {"job_id": job_id, "status": "succeeded", "result": value}
        assert result(client, job_id.upper())["job_id"] == job_id
    conn.execute("UPDATE dl_results SET result = %s::jsonb", ("1" * 5_000,))
    assert result(client, job_id)["result"] == "1" * 5_000, "a number too long for Python is a text"


def test_neither_status_nor_lists_nor_journal_carry_it(client: FlaskClient, conn: db.Connection) -> None:
    job_id = succeeded(client, conn, "canary-4711")
    for path in (f"/{job_id}/status", f"/{job_id}", "", f"/{job_id}/events"):
        answer = client.get(f"/api/v1/jobs{path}")
        assert answer.status_code == 200
        assert "canary-4711" not in answer.text


def test_the_jobs_page_shows_it_as_text_and_leads_from_a_long_one_to_the_whole(
    client: FlaskClient, conn: db.Connection
) -> None:
    page = client.get(f"/jobs/{succeeded(client, conn, {'a': '<img src=x>'})}").text
    assert "&lt;img src=x&gt;" in page
    assert "<img src=x>" not in page
    assert "the whole result" not in page
    assert 'id="result"' not in client.get(f"/jobs/{made(client)}").text
    job_id = succeeded(client, conn, "x" * (RESULT_SHOWN + 1))
    page = client.get(f"/jobs/{job_id}").text
    assert "x" * RESULT_SHOWN in page
    assert "x" * (RESULT_SHOWN + 1) not in page
    assert f'<a href="/api/v1/jobs/{job_id}/result">the whole result, as JSON</a>' in page


@pytest.fixture
def job_id(client: FlaskClient, conn: db.Connection) -> str:
    """A job of two attempts with some lines."""
    made = str(client.post(TRIGGER, json=MINIMAL).get_json()["job_id"])
    rows = [(1, 1, 1, "one"), (1, 1, 2, "<script>alert(1)</script>"), (1, 1, 10, "ten"), (2, 2, 1, "again")]
    for claim, attempt, line, text in rows:
        conn.execute(
            "INSERT INTO dl_job_logs VALUES (%s, %s, %s, %s, now(), 'warning', 'stderr', %s)",
            (made, claim, attempt, line, text),
        )
    return made


def logs_of(client: FlaskClient, job_id: str, query: str = "") -> dict[str, Any]:
    return dict(asked(client, f"/api/v1/jobs/{job_id}/logs{query}", JobLogs))


def test_the_page_leads_to_all_lines_as_text(client: FlaskClient, conn: db.Connection, job_id: str) -> None:
    conn.execute(
        "INSERT INTO dl_job_logs SELECT job_id, claim, attempt, 10 + n, now(), 'info', 'stdout', 'line ' || n"
        " FROM dl_job_logs, generate_series(1, 2500) n WHERE job_id = %s AND line = 10",
        (job_id,),
    )
    (link,) = re.findall(rf'href="(/jobs/{job_id}/log.txt[^"]*)"', client.get(f"/jobs/{job_id}?attempt=1").text)
    answer = client.get(link)
    assert answer.mimetype == "text/plain"
    lines = answer.text.splitlines()
    assert [line.rpartition("info ")[2] for line in lines[-2500:]] == [f"line {n}" for n in range(1, 2501)]
    assert lines[2].startswith("[7 lines were left out")
    assert "again" not in answer.text
    assert client.get(f"/jobs/{job_id}/log.txt?attempt=99999999999").status_code == 200
    assert client.get(f"/jobs/{UUID(int=1)}/log.txt").status_code == 404


def test_an_unknown_job_is_a_404_and_one_without_a_log_is_not(client: FlaskClient, refused: Refused) -> None:
    unknown = "/api/v1/jobs/01890a5d-ac96-474b-8cce-b302099a8057/logs"
    refused(client.get(unknown), 404, "not-found")
    made = client.post(TRIGGER, json=MINIMAL).get_json()["job_id"]
    assert logs_of(client, made) == {"lines": [], "next": None}
    assert 'id="log"' not in client.get(f"/jobs/{made}").text


def test_the_page_shows_the_latest_attempt_or_the_one_asked_for(client: FlaskClient, job_id: str) -> None:
    page = client.get(f"/jobs/{job_id}").text
    assert "again" in page
    assert ">one<" not in page
    page = client.get(f"/jobs/{job_id}?attempt=1").text
    assert ">one<" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script>alert" not in page
    assert "7 lines were left out" in page
    assert client.get(f"/jobs/{job_id}?attempt=x").status_code == 200


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
