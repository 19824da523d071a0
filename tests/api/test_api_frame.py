"""The API around the jobs: headers, request ids, the probes, start-up, U+0000 in addresses, and its own faults."""

import re
from typing import Any

import pytest
from api_app import MINIMAL, NOWHERE, TRIGGER, Refused, running
from flask import Flask
from flask.testing import FlaskClient
from structlog.testing import capture_logs

from dataloader import config
from dataloader.api import create_app
from dataloader.queue import enqueue


@pytest.mark.parametrize("path", ["/health", "/info", "/nowhere", TRIGGER, "/api/v1/jobs/x/status"])
def test_every_answer_carries_the_headers(client: FlaskClient, path: str) -> None:
    headers = client.get(path).headers
    wanted = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    assert wanted.items() <= dict(headers).items()
    assert headers["X-Request-ID"]


def test_a_fit_request_id_is_kept_and_any_other_replaced_by_one_of_its_own(
    client: FlaskClient, refused: Refused
) -> None:
    for given in ["a", "A-b_c.9", "x" * 64]:
        answer = client.get("/nowhere", headers={"X-Request-ID": given})
        assert refused(answer, 404, "not-found")["request_id"] == given
    unfit = ["", "a b", "x" * 65, "<script>", "ж", "a\tb", "a;b", "'"]
    answers = [client.get("/health", environ_overrides={"HTTP_X_REQUEST_ID": given}) for given in unfit]
    ids = {answer.headers["X-Request-ID"] for answer in (*answers, client.get("/health"), client.get("/health"))}
    assert len(ids) == len(unfit) + 2
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)


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


def addresses(app: Flask) -> list[tuple[str, str]]:
    """Each method and address of a rule that takes a text, with U+0000 in the place of each of its texts."""
    found = []
    for rule in app.url_map.iter_rules():
        verbs = re.search(r"any\('([^']*)'", rule.rule)
        path = re.sub(r"<any\([^>]*>", verbs[1] if verbs else "", rule.rule)
        path = re.sub(r"<uuid:[^>]*>", "01890a5d-ac96-774b-bcce-b302099a8057", path)
        if "<" in path:
            wrong = re.sub(r"<[^>]*>", "%00x", path)
            found += [(method, wrong) for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}]
    return sorted(found)


def test_no_address_with_a_zero_character_is_a_fault_of_the_service(app: Flask, client: FlaskClient) -> None:
    tried = addresses(app)
    assert len(tried) > 40
    for method, path in tried:
        same_site = {"Origin": "http://localhost"}
        answer = client.open(path, method=method, headers=same_site, data={} if path[:4] != "/api" else None)
        assert answer.status_code in (400, 404), (method, path, answer.status_code)
