"""GET …/result, and the result on the job's page: of a job that has succeeded, and of no other."""

import json
from typing import Any

from api_app import asked, made
from flask.testing import FlaskClient

from dataloader.api.dashboard.pages import RESULT_SHOWN
from dataloader.queue import db

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
