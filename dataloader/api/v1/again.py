"""/api/v1: a job that is run again with changes."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from flask import Blueprint, current_app, g, request

from dataloader.api.v1 import requests
from dataloader.api.web import arguments, auth
from dataloader.api.web.endpoint import existing, operation, session
from dataloader.api.web.json_body import validated
from dataloader.api.web.problems import invalid
from dataloader.model.jobs import Triggered
from dataloader.queue import again, db
from dataloader.queue.enqueue import NewJob
from dataloader.queue.new_job import Trigger

blueprint = Blueprint("again", __name__, url_prefix="/api/v1")


@blueprint.post("/jobs/<anything:job_id>/again")
@auth.require("operate")
@operation(
    "operate",
    Triggered,
    body=requests.Again,
    body_may_be_empty=True,
    query=requests.Query,
    headers=("traceparent",),
    errors=(409, 429),
    leads_to_jobs="/job_id",
)
def run_again(job_id: UUID, body: requests.Again) -> dict[str, Any]:
    """Add a job with the fields of one that has ended, with changes. The journals of the two jobs name each other.

    A masked arg stays what it is. The new job has no time, deadline, score, parents or idempotency key of the old one.
    """
    with session() as conn:
        old = fields_of(conn, job_id)
    try:
        args = again.changed(old["args"], body.args, body.without)
    except ValueError as e:
        raise invalid("/args", "args", str(e)) from None
    changes = body.model_dump(include=body.model_fields_set - {"args", "without"}, exclude_none=True)
    new_id, status = add(job_id, old | changes | {"args": args})
    return {"job_id": new_id, "status": status}


def fields_of(conn: db.Connection, job_id: UUID) -> dict[str, Any]:
    """The fields of a job that has ended; raises a 404 Problem, and NotEnded."""
    return existing(again.fields_of(conn, job_id))


def add(old_id: UUID, fields: dict[str, Any]) -> tuple[UUID, str]:
    """Add the job of these fields, by the rules of a trigger, as one that runs `old_id` again."""
    new = new_job(fields)
    with session() as conn:
        arguments.require(conn, new)
        new_id, status = again.add(conn, old_id, new, auth.who(), auth.asker())
    g.changed = {"job_id": str(new_id), "action": "again", "rerun_of": str(old_id)}
    return new_id, status


def new_job(fields: dict[str, Any]) -> NewJob:
    """The job of these fields of a trigger, by its rules and hooks; raises a 400 Problem."""
    lease_ttl_sec: int = current_app.extensions["settings"].dl_default_lease_ttl_sec
    trigger = validated(Trigger, requests.hooked(fields, None))
    return requests.new_job(trigger, lease_ttl_sec, None, request.headers.get("traceparent"))
