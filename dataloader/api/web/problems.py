"""RFC 9457 problem documents, and the problem that each error becomes.

A problem names the fault and the valid form; it holds neither a stack nor the value that was sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from random import randint
from traceback import extract_tb
from urllib.parse import quote
from uuid import uuid4

import structlog
from flask import Response, g, request
from psycopg import errors
from werkzeug.exceptions import HTTPException

from dataloader import log
from dataloader.model.farm import Fault
from dataloader.ops.errors import KEY_TAKEN, KINDS, Problem, invalid, meaning
from dataloader.queue import db, enqueue, hooks, migrations

RETRY_AFTER_SEC = 3  # at least
FULL_RETRY_AFTER_SEC = 15
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log = structlog.get_logger("api")


def answer_to(error: Exception) -> Response:
    """The problem document of an error."""
    if isinstance(error, Problem):
        return _document(error.status, error.detail, error.faults, error.headers)
    if isinstance(error, HTTPException):
        headers = {name: value for name, value in error.get_headers() if name != "Content-Type"}
        return _document(error.code or 500, error.description or error.name, headers=headers, name=error.name)
    if isinstance(error, enqueue.QueueFull):
        return _document(429, f"{error}; send it again later", headers={"Retry-After": str(FULL_RETRY_AFTER_SEC)})
    if isinstance(error, enqueue.KeyTaken):  # the answer does not name the job: a guessed key must not reveal it
        pointer = f"/jobs/{error.place}/idempotency_key" if request.path.endswith("/batch") else "/idempotency_key"
        text = "the idempotency key should be one that no other producer has used"
        fault = Fault(pointer=pointer, code="key_taken", message=text)
        return _document(409, f"{error}: send another", [fault], kind=KEY_TAKEN)
    if means := meaning(error):
        if means.status == 400:
            return answer_to(invalid(f"/{means.parameter}" if means.parameter else "", means.code, str(error)))
        return _document(means.status, str(error), kind=means.kind)
    if isinstance(error, migrations.SchemaError):
        _log.error("api.schema_refused", request_id=request_id(), detail=str(error))
        return _unavailable(str(error))
    if isinstance(error, hooks.WrongAnswer):
        facts = {"hook": "around_enqueue", "function": error.function, "error": str(error)}
        _log.error("hook.failed", request_id=request_id(), **facts)
        return _document(500, str(error))
    return _answer_unknown(error)


def request_id() -> str:
    """The request's id: X-Request-ID where it is fit for a log, else a new one."""
    if "request_id" not in g:
        given = request.headers.get("X-Request-ID", "")
        is_fit = _REQUEST_ID.fullmatch(given) and log.masked(given) == given
        g.request_id = given if is_fit else uuid4().hex
    return str(g.request_id)


def _answer_unknown(error: Exception) -> Response:
    facts = {"request_id": request_id(), "path": request.path, "error": type(error).__name__}
    if db.is_passing(error):
        _log.warning("api.unavailable", **facts)
        reason = f": {said}" if (said := db.reason(error)) else ""
        takes_no_writes = isinstance(error, errors.DiskFull | errors.ReadOnlySqlTransaction)
        fault = "takes no writes" if takes_no_writes else "does not answer"
        return _unavailable(f"The database {fault}{reason}. Nothing is confirmed: send the request again.")
    # The check of a field of a job has the field's name.
    check = isinstance(error, errors.CheckViolation) and error.diag.constraint_name
    if check and (match := re.fullmatch(r"dl_jobs_chk_(\w+)", check)):
        return answer_to(invalid(f"/{match[1]}", "check", f"{match[1]} should be what the table's check allows"))
    # Without the text and the stack, which may quote the request.
    frames = extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"
    _log.error("api.error", **facts, where=where)
    return _document(500, "This is a fault of the service. The request id finds it in the log.")


def _unavailable(detail: str) -> Response:
    return _document(503, detail, headers={"Retry-After": retry_after()})


def retry_after() -> str:
    """The seconds until the next try, random, so that refused clients do not return together."""
    return str(randint(RETRY_AFTER_SEC, RETRY_AFTER_SEC + 3))  # noqa: S311  no secret


def _document(
    status: int,
    detail: str,
    faults: Iterable[Fault] = (),
    headers: Mapping[str, str] | None = None,
    name: str = "Error",
    kind: tuple[str, str] | None = None,
) -> Response:
    last, title = kind or KINDS.get(status, (name.lower().replace(" ", "-"), name))
    document = {
        "type": f"/problems/{last}",
        "title": title,
        "status": status,
        "detail": detail,
        "instance": quote(request.path),
        "request_id": request_id(),
        "errors": [asdict(fault) for fault in faults],
    }
    return Response(json.dumps(log.masked(document)), status, headers, mimetype="application/problem+json")
