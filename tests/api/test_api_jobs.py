"""GET …/status and POST …/cancel: one shape, what it says, and what a cancellation may change."""

from typing import Any

import pytest
from api_app import Refused, answered, asked, made
from flask.testing import FlaskClient

from dataloader.queue import db

CONTRACT = {"job_id", "status", "attempt", "started_at", "finished_at", "heartbeat_at", "error", "progress"}
OURS = {"queue", "task", "lock_key", "max_attempts", "available_at", "waiting_for"}


def status(client: FlaskClient, job_id: str) -> dict[str, Any]:
    return dict(asked(client, f"/api/v1/jobs/{job_id}/status"))


def cancel(client: FlaskClient, job_id: str, **body: Any) -> dict[str, Any]:
    return dict(answered(client.post(f"/api/v1/jobs/{job_id}/cancel", **body)))


def test_a_queued_job(client: FlaskClient) -> None:
    job = status(client, made(client))
    assert set(job) >= CONTRACT | OURS
    assert (job["status"], job["attempt"], job["progress"], job["error"]) == ("queued", 0, {}, None)
    assert job["started_at"] is job["finished_at"] is job["heartbeat_at"] is None
    assert job["waiting_for"] == {"reason": "no_worker", "queue": "load.cbr"}


def test_instants_are_rfc_3339_in_utc(client: FlaskClient) -> None:
    job = status(client, made(client, available_at="2031-01-31T06:30:00.25+03:00"))
    assert job["available_at"] == "2031-01-31T03:30:00.250000Z"
    assert job["waiting_for"] == {
        "reason": "time",
        "until": "2031-01-31T03:30:00.250000Z",
        "besides": [{"reason": "no_worker", "queue": "load.cbr"}],
    }


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


@pytest.mark.parametrize("end", ["succeeded", "failed", "canceled", "lost"])
def test_cancelling_a_finished_job_changes_nothing(client: FlaskClient, conn: db.Connection, end: str) -> None:
    job_id = made(client)
    conn.execute("UPDATE dl_jobs SET status = %s, finished_at = now()", (end,))
    before = status(client, job_id)
    assert cancel(client, job_id) == before
    assert status(client, job_id) == before


@pytest.mark.parametrize("body", [{}, {"data": b""}, {"json": {}}, {"data": b"", "content_type": "text/plain"}])
def test_cancel_needs_no_body(client: FlaskClient, body: dict[str, Any]) -> None:
    assert cancel(client, made(client), **body)["status"] == "canceled"


def test_cancel_with_a_bad_body_changes_nothing(client: FlaskClient, refused: Refused) -> None:
    for body, pointer in [
        ({"json": []}, ""),
        ({"data": b"null", "content_type": "application/json"}, ""),
        ({"data": b" "}, ""),
        ({"data": b"{}", "content_type": "text/plain"}, ""),
        ({"data": b'{"a":1,"a":1}', "content_type": "application/json"}, ""),
    ]:
        job_id = made(client)
        refused(client.post(f"/api/v1/jobs/{job_id}/cancel", **body), 400, "invalid-input", pointer)
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
