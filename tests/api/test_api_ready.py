"""GET /ready: whether requests should be sent here, and if not, why; however the database is, it answers soon."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import pytest
from api_app import Refused, running
from api_link import linked
from flask import Flask
from flask.testing import FlaskClient

from dataloader.api.server import health
from dataloader.queue import db


def refusal(client: FlaskClient, refused: Refused, check: str) -> dict[str, Any]:
    answer = client.get("/ready")
    problem = refused(answer, 503, "unavailable", f"/checks/{check}")
    assert check in problem["detail"]
    assert int(answer.headers["Retry-After"]) > 0
    return problem


def test_it_is_ready(client: FlaskClient) -> None:
    answer = client.get("/ready")
    assert (answer.status_code, answer.get_json()) == (
        200,
        {"status": "ready", "checks": {"database": "ok", "schema": "ok", "draining": False}},
    )


def test_a_process_that_ends_is_not(client: FlaskClient, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_drains", False)
    health.drain()
    refusal(client, refused, "draining")
    assert client.get("/health").status_code == 200


def test_a_schema_that_does_not_fit(empty_db: str, refused: Refused) -> None:
    with running(empty_db) as app:
        assert "dataloader migrate" in refusal(app.test_client(), refused, "schema")["detail"]


def test_a_schema_that_became_too_new(own_db: str, refused: Refused) -> None:
    with running(own_db) as app, db.connect(own_db, name="test", schema="public") as conn:
        assert app.test_client().get("/ready").status_code == 200
        conn.execute("UPDATE dl_migrations SET oldest_code = 9999 WHERE number = 1")
        refusal(app.test_client(), refused, "schema")


def test_no_database(refused: Refused) -> None:
    with running("postgresql://nobody@127.0.0.1:1/none") as app:
        began = monotonic()
        refusal(app.test_client(), refused, "database")
        assert monotonic() - began < 5


def test_a_database_that_hangs_holds_nobody_up_and_heals(
    own_db: str, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look is shared: ten who ask wait for one together, and whoever comes later is answered by it."""
    looks = []
    ask = health.Probe._run
    monkeypatch.setattr(health.Probe, "_run", lambda probe: looks.append(monotonic()) or ask(probe))
    with linked(own_db) as link, running(link.dsn) as app:
        assert app.test_client().get("/ready").status_code == 200
        link.freeze()
        began = monotonic()
        with ThreadPoolExecutor(10) as pool:
            assert set(pool.map(lambda _: _status(app), range(10))) == {503}
        refusal(app.test_client(), refused, "database")
        assert 0.9 < monotonic() - began < 10  # one after the other they would wait for eleven seconds
        assert len(looks) == 2
        link.thaw()
        while _status(app) == 503:
            assert monotonic() - began < 60


def _status(app: Flask) -> int:
    return app.test_client().get("/ready").status_code
