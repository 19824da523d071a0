"""What an endpoint takes and answers, declared once at its view; and what views share.

`openapi` describes the application from these declarations. May import `db`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar
from urllib.parse import quote

from flask import current_app, request
from flask.typing import ResponseReturnValue
from pydantic import BaseModel
from werkzeug.routing import BaseConverter

from dataloader.api.v1 import requests
from dataloader.api.web import json_body
from dataloader.api.web.problems import Problem, invalid
from dataloader.api.web.sessions import Sessions
from dataloader.queue import db

View = Callable[..., ResponseReturnValue]
T = TypeVar("T")
JSON = "application/json"


class Anything(BaseConverter):
    """A part of the path that may hold whatever was percent-encoded in it, to be refused with a reason."""

    regex = r"[\s\S]*?"
    part_isolating = False
    weight = 200

    def to_url(self, value: Any) -> str:
        """One part of an address: of a queue `a/../b` a browser would make `b`, and a button would hit that."""
        return quote(str(value), safe="")


class JobId(BaseConverter):
    """The last part of the path of one job: whatever is no other address below /jobs."""

    regex = "(?!(?:trigger|batch)$)[^/]+"


CONVERTERS = {"anything": Anything, "job": JobId}


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint: `body` and `answer` are models; `errors` are those that do not follow from the rest."""

    tag: str
    answer: type[BaseModel] | str
    query: type[requests.Query] | None = None
    body: type[BaseModel] | None = None
    body_may_be_empty: bool = False
    headers: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    uses_database: bool = True
    leads_to_jobs: str | None = None  # where in the answer there is the id of a job
    is_documented_only: bool = False  # its parameters are read elsewhere


def operation(tag: str, answer: type[BaseModel] | str, **more: Any) -> Callable[[View], View]:
    """Declare a view. One that has a `query` is called with it, read and found right."""
    declared = Operation(tag, answer, **more)

    def declare(view: View) -> View:
        @wraps(view)
        def called(**path: Any) -> ResponseReturnValue:
            if declared.query is None or declared.is_documented_only:
                return view(**path)
            return view(**path, query=requests.read(declared.query, request.args))

        called.operation = declared  # type: ignore[attr-defined]
        return called

    return declare


@contextmanager
def session() -> Iterator[db.Connection]:
    """A session of the queue's database for this request (see Sessions.borrow)."""
    sessions: Sessions = current_app.extensions["sessions"]
    with sessions.borrow() as conn:
        yield conn


def found(job: T | None) -> T:
    """The job that there is; raises a 404 Problem."""
    if job is None:
        raise Problem(404, "there is no job with this job_id")
    return job


def body(*, may_be_empty: bool = False, depth: int = json_body.TRIGGER_DEPTH) -> dict[str, Any]:
    """The request's JSON object; {} for a body that is empty and may be."""
    # A chunked body would be cut at MAX_CONTENT_LENGTH without a word; so only a declared length is taken.
    if "Transfer-Encoding" in request.headers:
        raise Problem(411, "the request should have a Content-Length and no Transfer-Encoding")
    raw = request.get_data(cache=False)
    if len(raw) < (request.content_length or 0):
        raise invalid("", "truncated", "the body should be as long as its Content-Length")
    if may_be_empty and not raw:
        return {}
    if request.mimetype != "application/json" or _charset() != "utf-8":
        raise invalid("", "content_type", "Content-Type should be application/json")
    return json_body.document(raw, depth)


def _charset() -> str:
    return request.mimetype_params.get("charset", "utf-8").lower()
