"""/api/v1: trigger a job or many, ask for its status, cancel it.

Each view is validate, borrow a session, one call of `queue`. May import `queue`, `job` and `config`.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from flask import Blueprint, Response, current_app, g, request
from werkzeug.routing import BaseConverter

from dataloader import queue
from dataloader.api import access, schemas
from dataloader.api.problems import Problem, invalid, retry_after
from dataloader.api.sessions import Sessions
from dataloader.api.waits import Outcome, Waits
from dataloader.job import FINAL

blueprint = Blueprint("v1", __name__, url_prefix="/api/v1")


class Anything(BaseConverter):
    """A part of the path that may hold whatever was percent-encoded in it, to be refused with a reason."""

    regex = r"[\s\S]*?"
    part_isolating = False
    weight = 200


@blueprint.post("/jobs/trigger")
@access.require("trigger")
def trigger() -> dict[str, Any]:
    """Insert a job, or find the one with this idempotency key. 200 means that its row is committed."""
    default_lease = current_app.extensions["settings"].dl_default_lease_ttl_sec
    new = schemas.new_job(_body(), default_lease)
    with _sessions().borrow() as conn:
        job_id, status = queue.enqueue(conn, new)
    return {"job_id": job_id, "status": status}


@blueprint.post("/jobs/batch")
@access.require("trigger")
def batch() -> Response:
    """Insert jobs, all or none, or find those with their idempotency keys; in the order of the body."""
    request.max_content_length = schemas.BATCH_LIMIT
    default_lease = current_app.extensions["settings"].dl_default_lease_ttl_sec
    columns = schemas.new_jobs(_body(depth=schemas.BATCH_DEPTH), default_lease)
    with _sessions().borrow() as conn:
        added = queue.enqueue_columns(conn, columns)
    g.changed = {"jobs": len(added)}
    if added:
        g.changed |= {"first_job_id": added[0][0], "last_job_id": added[-1][0]}
    # By hand, and not by way of the masking, for both take long: ids and states hold no quotes and no secrets.
    answer = ",".join([f'{{"job_id":"{job_id}","status":"{status}"}}' for job_id, status in added])
    return Response(f'{{"jobs":[{answer}]}}', mimetype="application/json")


@blueprint.get("/jobs/<anything:job_id>/status")
@access.require("read", "trigger")
def status(job_id: str) -> Response:
    """The job as it is now, or with `?wait=SECONDS` once it has changed; 404 when there is none."""
    wanted, seconds = schemas.job_id(job_id), schemas.seconds_to_wait(request.args.get("wait"))
    job, version = _versioned(wanted)
    outcome = None
    if seconds and (_is_known(version) if request.if_none_match else job["status"] not in FINAL):
        outcome = _waits().wait(wanted, version, seconds)
        if outcome is Outcome.CHANGED:
            job, version = _versioned(wanted)
    answer = Response(status=304) if _is_known(version) else _as_json(job)
    answer.set_etag(version, weak=True)
    if outcome is Outcome.FULL:
        answer.headers["Retry-After"] = retry_after()
    return answer


@blueprint.post("/jobs/<anything:job_id>/cancel")
@access.require("trigger", "operate")
def cancel(job_id: str) -> dict[str, Any]:
    """Cancel a queued job, ask a running one to stop, leave a finished one; the answer is its status.

    With `{"force": true}` a running one is interrupted, and killed where that does not stop it.
    """
    wanted = schemas.job_id(job_id)
    force = schemas.is_forced(_body(may_be_empty=True))
    with _sessions().borrow() as conn:
        return _found(queue.request_cancel(conn, wanted, force))


def _versioned(job_id: UUID) -> tuple[dict[str, Any], str]:
    """The job and its version, which is read first: at worst it is older, and the next to ask is answered at once."""
    with _sessions().borrow() as conn:
        versions = queue.versions(conn, [job_id])
        job = _found(queue.status(conn, job_id))
    return job, versions.get(job_id, "")


def _is_known(version: str) -> bool:
    """The client has this version already, by its If-None-Match."""
    return request.if_none_match.contains_weak(version)


def _as_json(document: dict[str, Any]) -> Response:
    return current_app.make_response(document)


def _waits() -> Waits:
    waits: Waits = current_app.extensions["waits"]
    return waits


def _sessions() -> Sessions:
    sessions: Sessions = current_app.extensions["sessions"]
    return sessions


def _found(job: dict[str, Any] | None) -> dict[str, Any]:
    if job is None:
        raise Problem(404, "there is no job with this job_id")
    return job


def _body(*, may_be_empty: bool = False, depth: int = schemas.TRIGGER_DEPTH) -> dict[str, Any]:
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
    return schemas.document(raw, depth)


def _charset() -> str:
    return request.mimetype_params.get("charset", "utf-8").lower()
