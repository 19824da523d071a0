"""The log on the job's page, and jobs without one."""

import re
from typing import Any
from uuid import UUID

import pytest
from api_app import MINIMAL, TRIGGER, Refused, asked
from flask.testing import FlaskClient

from dataloader.model.jobs import JobLogs
from dataloader.queue import db


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
