"""The API's lines about requests: two audit lines and a metric line each, and answers without secrets."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import structlog
from api_app import BATCH, HTMX, MINIMAL, TRIGGER, running
from flask.testing import FlaskClient

from dataloader import config, log
from dataloader.queue import enqueue

Lines = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Lines]:
    """The lines of a stream that the application has written."""
    out = os.open(tmp_path / "stdout", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    log.configure(config.load(_env_file=None), output=out)

    def written(stream: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in os.pread(out, 1_000_000, 0).splitlines()]
        return [line for line in found if line["stream"] == stream]

    yield written
    log.close()
    os.close(out)


def test_a_change_is_in_the_audit_with_its_job_or_how_many_it_has_changed(dsn: str, lines: Lines) -> None:
    headers = {"X-Request-ID": "r-1", "X-Forwarded-For": "10.0.0.1"}
    who = {"who": "anonymous", "remote": "127.0.0.1", "forwarded_for": "10.0.0.1", "method": "POST", "path": TRIGGER}
    with running(dsn, dl_allow_anonymous=True) as app:
        client = app.test_client()
        job_id = client.post(TRIGGER, json=MINIMAL, headers=headers).get_json()["job_id"]
        added = client.post(BATCH, json={"jobs": [MINIMAL] * 3}).get_json()["jobs"]
        client.post(BATCH, json={"jobs": [{}]})
        client.post("/api/v1/jobs/bulk/cancel", json={"job_ids": [job_id]})
        client.post("/api/v1/queues/load.cbr/delete-dead")
    begin, end, *others = lines("audit")
    assert (begin["event"], end["event"]) == ("request.begin", "request.end")
    assert (who | {"request_id": "r-1"}).items() <= begin.items()
    assert (who | {"request_id": "r-1", "job_id": job_id, "status": 200}).items() <= end.items()
    assert 0 < end["duration_ms"] < 10_000
    assert [{name: line.get(name) for name in ("jobs", "first_job_id", "last_job_id")} for line in others[1::2]] == [
        {"jobs": 3, "first_job_id": added[0]["job_id"], "last_job_id": added[2]["job_id"]},
        {"jobs": None, "first_job_id": None, "last_job_id": None},
        {"jobs": 1, "first_job_id": job_id, "last_job_id": job_id},
        {"jobs": 0, "first_job_id": None, "last_job_id": None},
    ]


def test_every_request_has_an_end_and_names_no_job_it_did_not_change(client: FlaskClient, lines: Lines) -> None:
    written = 0
    for method, path, status in [
        ("GET", "/health", 200),
        ("GET", "/nothing/here", 404),
        ("GET", TRIGGER, 405),
        ("POST", TRIGGER, 400),
        ("GET", "/api/v1/jobs/a%0Ab%1B%E2%80%A8/status", 400),
    ]:
        answer = client.open(path, method=method)
        begin, end = lines("audit")[written:]
        written += 2
        assert end["status"] == answer.status_code == status
        assert begin["request_id"] == end["request_id"] == answer.headers["X-Request-ID"]
        assert "job_id" not in end


def test_requests_are_measured_by_route_and_not_by_path(client: FlaskClient, lines: Lines) -> None:
    for _ in range(3):
        client.get(f"/api/v1/jobs/{uuid4()}/status")
    client.get("/a")
    client.get("/b")
    *statuses, first, second = lines("metric")
    totals = [(line["requests_total"], line["responses_total"]) for line in statuses]
    assert {(line["event"], line["method"], line["status"]) for line in statuses} == {("http.request", "GET", 404)}
    assert {line["route"] for line in statuses} == {"/api/v1/jobs/<anything:job_id>/status"}
    assert [later[1] - totals[0][1] for later in totals] == [0, 1, 2]
    assert (first["route"], second["route"], first["method"]) == ("unmatched", "unmatched", "any")


def test_what_is_logged_for_a_request_carries_its_id(
    client: FlaskClient, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        logging.getLogger("library").warning("seen")
        raise RuntimeError("no")

    monkeypatch.setattr(enqueue, "enqueue", broken)
    answer = client.post(TRIGGER, json=MINIMAL)
    structlog.get_logger("x").info("afterwards")
    library, error, afterwards = lines("application")
    assert (library["event"], error["event"]) == ("seen", "api.error")
    assert {library["request_id"], error["request_id"]} == {answer.headers["X-Request-ID"]}
    assert "request_id" not in afterwards
    assert lines("audit")[-1]["status"] == 500


def test_gunicorns_own_lines_are_json(dsn: str, tmp_path: Path) -> None:
    """Arbiter, worker, and the failure of both to start."""
    command = [sys.executable, "-m", "gunicorn", "--no-control-socket", "-b", "127.0.0.1:0"]
    command += ["--logger-class=dataloader.api.server.audit.GunicornLogger", "dataloader.api:no_such_factory()"]
    ended = subprocess.run(command, env=os.environ | {"DL_DB_DSN": dsn}, cwd=tmp_path, capture_output=True, text=True)
    events = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode != 0
    assert {line["logger"] for line in events} == {"gunicorn.error"}
    assert [line for line in events if "Starting gunicorn" in line["event"]]
    assert [line for line in events if "Booting worker" in line["event"]]
    assert "Traceback" not in ended.stderr


def test_a_page_left_open_does_not_fill_the_logs(dsn: str, lines: Lines) -> None:
    """A repeated question writes no line while there is no news; an answer with news writes one, as a button does."""
    htmx = HTMX
    with running(dsn) as app:
        client = app.test_client()
        etag = client.get("/workers", headers=htmx).headers["ETag"]
        assert [line["event"] for line in lines("audit")] == ["request.end"]
        for path, headers in (("/workers", htmx | {"If-None-Match": etag}), ("/static/app.js", {})):
            client.get(path, headers=headers)
        assert [line["event"] for line in lines("audit") + lines("metric")] == ["request.end", "http.request"]
        client.get("/health", headers=htmx)
        client.post("/do/pause?queue=q", headers=htmx)
        begin, end = lines("audit")[-2:]
    assert (begin["event"], begin["path"]) == ("request.begin", "/do/pause")
    assert (end["event"], end["queue"], end["action"]) == ("request.end", "q", "pause")
