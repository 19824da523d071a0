"""RFC 9457 problem documents, and the problem that each error becomes.

A problem names the fault and the valid form; it holds neither a stack nor the value that was sent.
"""

from __future__ import annotations

import json
import re
from random import randint
from traceback import extract_tb
from urllib.parse import quote
from uuid import uuid4

import structlog
from flask import Response, g, request
from psycopg import errors
from werkzeug.exceptions import HTTPException

from dataloader import log
from dataloader.ops.errors import KINDS, Problem, invalid, refusal
from dataloader.queue import db, hooks, migrations

RETRY_AFTER_SEC = 3  # at least
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log = structlog.get_logger("api")


def answer_to(error: Exception) -> Response:
    """The problem document of an error."""
    if problem := refusal(error):
        return _document(problem)
    if isinstance(error, HTTPException):
        headers = {name: value for name, value in error.get_headers() if name != "Content-Type"}
        status, kind = error.code or 500, (error.name.lower().replace(" ", "-"), error.name)
        detail = error.description or error.name
        return _document(Problem(status, detail, headers=headers, kind=KINDS.get(status, kind)))
    if isinstance(error, migrations.SchemaError):
        _log.error("api.schema_refused", request_id=request_id(), detail=str(error))
        return _unavailable(str(error))
    if isinstance(error, hooks.WrongAnswer):
        facts = {"hook": "around_enqueue", "function": error.function, "error": str(error)}
        _log.error("hook.failed", request_id=request_id(), **facts)
        return _document(Problem(500, str(error)))
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
        reason = f": {words}" if (words := db.reason(error)) else ""
        refusals = errors.DiskFull | errors.ReadOnlySqlTransaction | errors.ProgramLimitExceeded
        fault = "takes no writes" if isinstance(error, refusals) else "does not answer"
        return _unavailable(f"The database {fault}{reason}. Nothing is confirmed: send the request again.")
    if isinstance(error, errors.InsufficientPrivilege | errors.UndefinedTable):
        _log.error("api.unavailable", **facts)
        remedy = "`dataloader check` has the remedy." if isinstance(error, errors.InsufficientPrivilege) else ""
        return _unavailable(f"The database refuses the service: {db.reason(error)}. {remedy}".strip())
    # The check of a field of a job has the field's name.
    check = isinstance(error, errors.CheckViolation) and error.diag.constraint_name
    if check and (match := re.fullmatch(r"dl_jobs_chk_(\w+)", check)):
        return answer_to(invalid(f"/{match[1]}", "check", f"{match[1]} should be what the table's check allows"))
    # Without the text and the stack, which may quote the request.
    frames = extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"
    _log.error("api.error", **facts, where=where)
    return _document(Problem(500, "This is a fault of the service. The request id finds it in the log."))


def _unavailable(detail: str) -> Response:
    return _document(Problem(503, detail, headers={"Retry-After": retry_after()}))


def retry_after() -> str:
    """The seconds until the next try, random, so that refused clients do not return together."""
    return str(randint(RETRY_AFTER_SEC, RETRY_AFTER_SEC + 3))  # noqa: S311  no secret


def _document(problem: Problem) -> Response:
    document = problem.document() | {"instance": quote(request.path), "request_id": request_id()}
    text = json.dumps(log.masked(document))
    return Response(text, problem.status, problem.headers, mimetype="application/problem+json")
