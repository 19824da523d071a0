"""/api/v1, the contract that is written by hand: trigger a job or many, ask for its status.

Each view borrows a session and makes one call of `lifecycle` or `enqueue`.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from flask import Blueprint, Response, current_app, g, request

from dataloader.api.v1 import requests
from dataloader.api.web import arguments, auth
from dataloader.api.web.endpoint import existing, operation, session
from dataloader.api.web.long_poll import LongPolls, Outcome
from dataloader.api.web.problems import retry_after
from dataloader.model.jobs import Status, Triggered, TriggeredMany
from dataloader.queue import enqueue, lifecycle
from dataloader.queue.enqueue import enqueue_columns, require_room_for
from dataloader.queue.job import FINAL
from dataloader.queue.new_job import Trigger

blueprint = Blueprint("v1", __name__, url_prefix="/api/v1")


@blueprint.post("/jobs/trigger")
@auth.require("trigger")
@operation(
    "jobs",
    Triggered,
    body=Trigger,
    prepared=lambda document: requests.hooked(document, request.headers.get("Idempotency-Key")),
    headers=("Idempotency-Key", "traceparent"),
    errors=(409, 429),
    leads_to_jobs="/job_id",
)
def trigger(body: Trigger) -> dict[str, Any]:
    """Insert a job, or find the one with this idempotency key. 200 means that its row is committed."""
    key, traceparent = request.headers.get("Idempotency-Key"), request.headers.get("traceparent")
    new = requests.new_job(body, _default_lease(), key, traceparent)
    with session() as conn:
        arguments.require(conn, new)
        job_id, status = enqueue.enqueue(conn, new, limited=True, asker=auth.asker())
    return {"job_id": job_id, "status": status}


@blueprint.post("/jobs/batch")
@auth.require("trigger")
@operation(
    "jobs",
    TriggeredMany,
    body=requests.Batch,
    body_limit=requests.BATCH_LIMIT,
    body_depth=requests.BATCH_DEPTH,
    headers=("traceparent",),
    errors=(409, 429),
    leads_to_jobs="/jobs/0/job_id",
)
def batch(body: requests.Batch) -> Response:
    """Insert jobs, all or none, or find those with their idempotency keys; in the order of the body, `on_done` last."""
    columns = requests.new_jobs(requests.all_hooked(body.group), _default_lease())
    if trace := requests.trace(request.headers.get("traceparent")):
        columns["trace"] = [trace]
    with session() as conn:
        arguments.require_all(conn, columns)
        require_room_for(conn, columns)
        added = enqueue_columns(conn, columns, asker=auth.asker())
    g.changed = {"jobs": len(added)}
    if added:
        g.changed |= {"first_job_id": added[0][0], "last_job_id": added[-1][0]}
    # Not by the masking JSON provider, which takes long: ids and states hold no quotes and no secrets.
    answer = ",".join([f'{{"job_id":"{job_id}","status":"{status}"}}' for job_id, status in added])
    return Response(f'{{"jobs":[{answer}]}}', mimetype="application/json")


@blueprint.get("/jobs/<anything:job_id>/status")
@auth.require("read", "trigger")
@operation("jobs", Status, query=requests.Status, is_documented_only=True, headers=("If-None-Match",), errors=(304,))
def status(job_id: UUID) -> Response:
    """The job as it is now, or with `wait` once it has changed; 404 when there is none.

    With `If-None-Match` the wait ends when the job has another `ETag`, at once if it has one already; without it when
    the job changes, at once if it has ended. `Retry-After` says that too many wait already, and this request did not.
    """
    seconds = requests.seconds_to_wait(request.args.get("wait"))
    job, version = _versioned(job_id)
    outcome = None
    if seconds and (_is_known(version) if request.if_none_match else job["status"] not in FINAL):
        polls: LongPolls = current_app.extensions["long_polls"]
        outcome = polls.wait(job_id, version, seconds)
        if outcome is Outcome.CHANGED:
            job, version = _versioned(job_id)
    answer = Response(status=304) if _is_known(version) else _as_json(job)
    answer.set_etag(version, weak=True)
    if outcome is Outcome.FULL:
        answer.headers["Retry-After"] = retry_after()
    return answer


def _versioned(job_id: UUID) -> tuple[dict[str, Any], str]:
    with session() as conn:
        return existing(lifecycle.versioned_status(conn, job_id))


def _default_lease() -> int:
    seconds: int = current_app.extensions["settings"].dl_default_lease_ttl_sec
    return seconds


def _is_known(version: str) -> bool:
    """True when the client has this version, by its If-None-Match."""
    return request.if_none_match.contains_weak(version)


def _as_json(document: dict[str, Any]) -> Response:
    return current_app.make_response(document)
