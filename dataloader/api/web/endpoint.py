"""The declaration of an endpoint at its view, the reading of its request, and what views share.

`openapi` describes the application from these declarations.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar
from urllib.parse import quote, urlencode
from uuid import UUID

from flask import Response, current_app, jsonify, request, url_for
from flask.typing import ResponseReturnValue
from pydantic import BaseModel
from werkzeug.routing import BaseConverter

from dataloader import ops
from dataloader.api.web import json_body
from dataloader.api.web.problems import Fault, Problem, invalid
from dataloader.api.web.sessions import Sessions
from dataloader.queue import db
from dataloader.queue.new_job import DEPTH_LIMIT, FAULTS_SHOWN

View = Callable[..., ResponseReturnValue]
T = TypeVar("T")
JSON = "application/json"
# The last parts of the addresses below a queue.
OF_QUEUE = tuple(op.path.rpartition("/")[2] for op in ops.load().values() if op.path.startswith("/queues/{queue}/"))
TASK_LIMIT = 2_400  # characters in the name of a task; a trigger may name shorter ones only, other services any
QUEUE_LIMIT = 512  # characters in the name of a queue; a trigger may name shorter ones only, other services any
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII)


class Anything(BaseConverter):
    """A part of the path with any percent-encoded text; the view refuses a wrong one with a reason."""

    regex = r"[\s\S]*?"
    part_isolating = False
    weight = 200

    def to_url(self, value: Any) -> str:
        """One part of an address. Unquoted, a browser would make `b` of the queue `a/../b`."""
        return quote(str(value), safe="")


class JobId(BaseConverter):
    """The last part of a job's path: any text that is no other address below /jobs."""

    regex = "(?!(?:trigger|batch|bulk)$)[^/]+"


class Queue(Anything):
    """The end of a queue's path: any text that is no other address below /queues."""

    regex = rf"(?![\s\S]*/(?:{'|'.join(OF_QUEUE)})$)[\s\S]*?"


CONVERTERS = {"anything": Anything, "job": JobId, "queue": Queue}


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint: `query`, `body` and `answer` are models; `errors` do not follow from the rest."""

    tag: str
    answer: type | str
    path: type[BaseModel] | None = None  # checks the parts of the path that are no queue, task or job_id
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    body_may_be_empty: bool = False
    prepared: Callable[[dict[str, Any]], dict[str, Any]] = dict  # what becomes of the body before it is validated
    body_limit: int = json_body.BODY_LIMIT  # bytes
    body_depth: int = DEPTH_LIMIT  # objects and arrays within each other, the body itself being the first
    headers: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    uses_database: bool = True
    leads_to_jobs: str | None = None  # where in the answer there is the id of a job
    is_documented_only: bool = False  # the view reads the query itself


def operation(tag: str, answer: type | str, **more: Any) -> Callable[[View], View]:
    """Declare a view. It is called with valid arguments alone: its path, its `query` and its `body`.

    A model without fields is checked and not passed on. Raises a 400, 411 or 413 Problem before the view is called.
    """
    declared = Operation(tag, answer, **more)

    def declare(view: View) -> View:
        @wraps(view)
        def called(**path: Any) -> ResponseReturnValue:
            return view(**_arguments(declared, path))

        called.operation = declared  # type: ignore[attr-defined]
        return called

    return declare


def _arguments(declared: Operation, path: dict[str, Any]) -> dict[str, Any]:
    arguments = dict(path)
    if declared.path:
        arguments |= json_body.validated(
            declared.path, {name: path[name] for name in declared.path.model_fields}
        ).model_dump()
    if declared.query and not declared.is_documented_only:
        arguments["query"] = _query(declared.query)
    if "job_id" in path:
        arguments["job_id"] = job_id(path["job_id"])
    for noun in {"queue", "task"} & path.keys():
        in_path, in_query = named(noun, path[noun]), arguments["query"].name
        arguments[noun] = named(noun, in_query) if in_query else in_path
    if declared.body:
        request.max_content_length = declared.body_limit
        arguments["body"] = json_body.validated(declared.body, declared.prepared(_document(declared)))
    return {name: value for name, value in arguments.items() if getattr(type(value), "model_fields", True)}


def _query(model: type[BaseModel]) -> BaseModel:
    """The parameters of the query string, each given once."""
    given = request.args.to_dict()
    twice = [name for name, values in request.args.lists() if len(values) > 1]
    if twice:
        message = "a parameter should be given once"
        faults = [Fault(json_body.pointer([name]), "duplicate", message) for name in twice[:FAULTS_SHOWN]]
        raise Problem(400, message, faults)
    return json_body.validated(model, given, "parameter")


def job_id(text: str) -> UUID:
    """The UUID of the canonical form, which `text` should be; raises a 400 Problem."""
    if not _UUID.fullmatch(text):
        raise invalid("", "uuid", "job_id should be a UUID such as 01890a5d-ac96-774b-bcce-b302099a8057")
    return UUID(text)


def named(noun: str, text: str) -> str:
    """The name of a queue or a task in a path, which may be any that PostgreSQL can store; raises a 400 Problem."""
    limit = {"queue": QUEUE_LIMIT, "task": TASK_LIMIT}[noun]
    if not 1 <= len(text) <= limit or json_body.UNSTORABLE.search(text):
        raise invalid("", noun, f"{noun} should be 1 to {limit:,} characters, none of them U+0000")
    return text


def session() -> AbstractContextManager[db.Connection]:
    """A session of the queue's database for this request (see Sessions.borrow)."""
    sessions: Sessions = current_app.extensions["sessions"]
    return sessions.borrow()


def paged(document: dict[str, Any], following: object) -> Response:
    """A page that names the next one, also as a link (RFC 8288)."""
    answer = jsonify(document)
    if following is not None:
        asked = request.args.to_dict() | {"after": str(following)}
        address = url_for(str(request.endpoint), **request.view_args or {})
        answer.headers["Link"] = f'<{address}?{urlencode(asked)}>; rel="next"'
    return answer


def existing(job: T | None) -> T:
    """Return `job`; raise a 404 Problem if it is None."""
    if job is None:
        raise Problem(404, "there is no job with this job_id")
    return job


def _document(declared: Operation) -> dict[str, Any]:
    """The request's JSON object; {} for a body that is empty and may be."""
    raw = request.get_data(cache=False)
    if len(raw) < (request.content_length or 0):
        raise invalid("", "truncated", "the body should be as long as its Content-Length")
    if declared.body_may_be_empty and not raw:
        return {}
    if request.mimetype != JSON or request.mimetype_params.get("charset", "utf-8").lower() != "utf-8":
        raise invalid("", "content_type", "Content-Type should be application/json")
    return json_body.document(raw, declared.body_depth)
