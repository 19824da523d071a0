"""Every operation of the OpenAPI document, called as the document says and otherwise: no 5xx, no undocumented answer.

All checks of schemathesis, also over chains of calls along the document's links.
"""

import json
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
import schemathesis
from api_app import NOWHERE, running
from flask import Flask
from hypothesis import settings
from hypothesis import strategies as st
from schemathesis.config import SchemathesisConfig

from dataloader import config
from dataloader.api import create_app
from tools import openapi

pytestmark = [
    pytest.mark.long,
    # A thread of the connection pool draws the lifetime of a new connection from the same `random` as hypothesis.
    pytest.mark.filterwarnings("ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"),
]

# The document gives this bound in words: an instant from 2000 to ten years from now.
first, last = datetime.fromisoformat("2000-01-01"), datetime.fromisoformat("2030-01-01")
instants = st.datetimes(first, last, timezones=st.just(UTC)).map(datetime.isoformat)
schemathesis.openapi.format("date-time", instants)
# Only a page says what its `next` is.
cursors = st.tuples(instants, st.uuids().map(str)).map(lambda at: urlsafe_b64encode(json.dumps(at).encode()).decode())
schemathesis.openapi.format("cursor", cursors)
# docs/search.md has the language of a search.
searches = st.from_regex(r"([^\W_]{1,9}|args\.[a-z]{1,9}:[0-9]{1,9})", fullmatch=True)
schemathesis.openapi.format("search", searches)
# Made without a database; the tests call the application that has one.
unconnected = create_app(config.load(_env_file=None, dl_db_dsn=NOWHERE))
schema = schemathesis.openapi.from_dict(
    openapi.document(unconnected),
    config=SchemathesisConfig.from_dict({
        # JSON Schema has no way to say that the texts inside of `args` may hold no U+0000.
        "generation": {"allow-x00": False, "deterministic": True},
        # A name may hold a slash, so /backfills/a/resume is the address of a backfill of that name as well, and OPTIONS
        # names the methods of both.
        "checks": {"allow_header_conformance": {"enabled": False}},
        # JSON Schema cannot say what a backfill's templates become, or that lists of keys have cursors of their own.
        "operations": [
            {
                "include-path-regex": r"/api/v1/queues/\{queue\}/keys",
                "checks": {"positive_data_acceptance": {"enabled": False}},
            },
            {
                "include-path": "/api/v1/backfills/dry-run",
                "checks": {"positive_data_acceptance": {"enabled": False}},
            },
        ],
    }),
)  # fmt: skip
schema.app = unconnected
QUICK = settings(max_examples=8, derandomize=True)


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    """Correct what is valid for JSON Schema alone: 7.0 for 7, and fields that do not agree. No request waits."""
    is_valid = bool(case.meta and case.meta.generation.mode.is_positive)
    if is_valid and case.query and "wait" in case.query:
        case.query["wait"] = "0"
    if is_valid and isinstance(case.body, dict) and "url" in case.body:
        case.body["url"] = "${DL_WEBHOOK_OPS}"
    if is_valid and isinstance(case.body, dict):
        case.body = with_integers(case.body)
        if case.body.get("idempotency_key") and case.headers:
            case.headers.pop("Idempotency-Key", None)


def with_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: with_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.fixture(scope="module")
def app(worker_db: str) -> Iterator[Flask]:
    with running(worker_db) as app:
        yield app


@schema.parametrize()
@QUICK
def test_an_operation_is_as_documented(case: schemathesis.Case, app: Flask) -> None:
    case.call_and_validate(app=app)


def test_chains_of_calls_are_as_documented(app: Flask, worker_db: str) -> None:
    class Chains(schema.as_state_machine()):  # type: ignore[misc]
        def setup(self) -> None:
            """Begin with empty tables: a chain's answers must not depend on the chains before."""
            conn.execute("DELETE FROM dl_jobs; DELETE FROM dl_queues")

        def get_call_kwargs(self, case: schemathesis.Case) -> dict[str, Any]:
            return {"app": app}

    with psycopg.connect(worker_db, autocommit=True) as conn:
        Chains.run(settings=settings(QUICK, max_examples=20, stateful_step_count=6))
