"""The OpenAPI document is whole and up to date, and the page that shows it needs no other host."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from api_app import NOWHERE, TRIGGER, running
from flask import Flask
from openapi_spec_validator import validate

from tools import openapi

ROOT = Path(__file__).parents[2]
SWAGGER = ROOT / "dataloader/api/v1/swagger"


@pytest.fixture(scope="module")
def app() -> Any:
    with running(NOWHERE) as app:
        yield app


@pytest.fixture(scope="module")
def document(app: Flask) -> dict[str, Any]:
    return openapi.document(app)


def test_the_copy_is_up_to_date(document: dict[str, Any]) -> None:
    assert openapi.FILE.read_text("utf-8") == openapi.text(document), "make it anew with: python -m tools.openapi"
    assert (ROOT / "docs/openapi.json").samefile(openapi.FILE)


def test_it_is_valid_and_holds_no_secret_and_no_address_of_a_server(document: dict[str, Any]) -> None:
    validate(document)
    assert not re.search("https?://|postgresql:", json.dumps(document))


def test_each_operation_says_who_may_and_what_may_come(document: dict[str, Any]) -> None:
    operations = [found for methods in document["paths"].values() for found in methods.values()]
    names = [found["operationId"] for found in operations]
    assert len(set(names)) == len(names)
    for found in operations:
        assert found["summary"]
        assert {"200", "500"} <= set(found["responses"])
        assert ("401" in found["responses"]) == bool(found["security"])
        assert ("411" in found["responses"]) == ("requestBody" in found)
        for name, link in found["responses"]["200"].get("links", {}).items():
            assert name == link["operationId"]
            assert name in names
    trigger = document["paths"][TRIGGER]["post"]
    assert {"status", "cancel", "job", "job_events"} <= set(trigger["responses"]["200"]["links"])
    assert trigger["security"][0] == {"bearer": ["trigger"]}


def test_it_is_served(app: Flask, document: dict[str, Any]) -> None:
    answer = app.test_client().get("/openapi.json")
    assert (answer.mimetype, answer.get_json()) == ("application/json", document)


def test_the_page_holds_to_a_strict_policy(app: Flask) -> None:
    client = app.test_client()
    page = client.get("/docs")
    assert page.headers["Content-Security-Policy"].startswith("default-src 'self'; script-src 'self';")
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=|https?:", page.text)
    wanted = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(wanted) == 4
    for path in wanted:
        answer = client.get(path)
        assert (answer.status_code, answer.headers["X-Content-Type-Options"]) == (200, "nosniff")
        answer.close()
    assert "http" not in (SWAGGER / "start.js").read_text("utf-8")


def test_what_is_vendored_is_what_it_was() -> None:
    noted = dict(re.findall(r"^\| (\S+) \| ([0-9a-f]{64}) \|$", (SWAGGER / "README.md").read_text("utf-8"), re.M))
    files = {path.name for path in SWAGGER.iterdir()} - {"README.md", "start.js"}
    assert noted == {name: hashlib.sha256((SWAGGER / name).read_bytes()).hexdigest() for name in files}
