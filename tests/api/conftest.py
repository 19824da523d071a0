"""Fixtures of the API's tests: the application, a client, and what every problem document must look like."""

from collections.abc import Iterator
from typing import Any

import pytest
from api_app import Refused, running
from flask import Flask
from flask.testing import FlaskClient

from dataloader.api.web import cache


@pytest.fixture
def app(dsn: str) -> Iterator[Flask]:
    with running(dsn) as app:
        yield app


@pytest.fixture
def ageless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers that requests share stay fresh, however long the machine stalls between two requests."""
    monkeypatch.setattr(cache, "monotonic", lambda: 1e9)


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()


@pytest.fixture
def refused() -> Refused:
    """Check that an answer is a whole problem document, and return it."""

    def check(response: Any, status: int, kind: str, pointer: str | None = None) -> dict[str, Any]:
        problem: dict[str, Any] = response.get_json(force=True)
        assert response.status_code == status, problem
        assert response.mimetype == "application/problem+json"
        assert set(problem) == {"type", "title", "status", "detail", "instance", "request_id", "errors"}
        assert (problem["type"], problem["status"]) == (f"/problems/{kind}", status)
        assert problem["request_id"] == response.headers["X-Request-ID"]
        for fault in problem["errors"]:
            assert set(fault) == {"pointer", "code", "message"}
            assert all(isinstance(text, str) for text in fault.values())
        if pointer is not None:
            assert pointer in [fault["pointer"] for fault in problem["errors"]]
        return problem

    return check
