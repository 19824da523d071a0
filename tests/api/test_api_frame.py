"""What surrounds the jobs: headers, request ids, the probes, start-up, and faults of our own."""

from __future__ import annotations

import re
from typing import Any

import pytest
from api_app import MINIMAL, TRIGGER, Refused, running
from flask import Flask
from flask.testing import FlaskClient
from structlog.testing import capture_logs

from dataloader import config
from dataloader.api import create_app
from dataloader.queue import enqueue

NOWHERE = "postgresql://nobody@127.0.0.1:1/none"  # no server listens on port 1


@pytest.mark.parametrize("path", ["/health", "/info", "/nowhere", TRIGGER, "/api/v1/jobs/x/status"])
def test_every_answer_carries_the_headers(client: FlaskClient, path: str) -> None:
    headers = client.get(path).headers
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Request-ID"]


@pytest.mark.parametrize("given", ["a", "A-b_c.9", "x" * 64])
def test_a_fit_request_id_is_kept(client: FlaskClient, refused: Refused, given: str) -> None:
    answer = client.get("/nowhere", headers={"X-Request-ID": given})
    assert refused(answer, 404, "not-found")["request_id"] == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "<script>", "ж", "a\tb", "a;b", "'"])
def test_an_unfit_request_id_is_replaced(client: FlaskClient, given: str) -> None:
    answer = client.get("/health", environ_overrides={"HTTP_X_REQUEST_ID": given})
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["X-Request-ID"])


def test_each_request_gets_its_own_id(client: FlaskClient) -> None:
    assert len({client.get("/health").headers["X-Request-ID"] for _ in range(5)}) == 5


def test_the_probes_need_no_database() -> None:
    with running(NOWHERE, environment="staging") as app:
        client = app.test_client()
        assert client.get("/health").json == {"status": "healthy"}
        info, status = client.get("/info").json, client.get("/status").json
    assert set(info) == {"service", "version", "environment"}
    assert (info["service"], info["environment"]) == ("dataloader", "staging")
    assert status["version"] == info["version"]
    assert status["uptime"] >= 0


def test_without_a_database_there_is_no_application(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DL_DB_DSN", "PG_HOST", "PG_DATABASE"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(config.ConfigError, match="no database is configured: set DL_DB_DSN or PG_HOST"):
        create_app(config.load(_env_file=None))


def test_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DL_DB_DSN", NOWHERE)
    monkeypatch.setenv("ENVIRONMENT", "from the environment")
    app = create_app()
    assert app.test_client().get("/info").json["environment"] == "from the environment"


def test_a_fault_of_ours_is_500_and_tells_nothing(
    app: Flask, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(conn: Any, new: enqueue.NewJob, limited: bool, asker: None) -> Any:
        raise RuntimeError(f"s3cret {new.task}")

    monkeypatch.setattr(enqueue, "enqueue", broken)
    with capture_logs() as logs:
        answer = app.test_client().post(TRIGGER, json=MINIMAL | {"task": "canary"})
    problem = refused(answer, 500, "internal-error")
    assert not re.search("s3cret|canary|RuntimeError|Traceback", answer.text)
    (line,) = logs
    assert line["event"] == "api.error"
    assert (line["path"], line["error"], line["request_id"]) == (TRIGGER, "RuntimeError", problem["request_id"])
    assert not re.search("s3cret|canary", repr(line))
    assert "test_api_frame.py" in line["where"]
