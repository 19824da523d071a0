"""The form that triggers a job of a task, and the one that runs a job again with changes."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

from flask import Blueprint, Response, g, request, url_for

from dataloader import log
from dataloader.api.dashboard.forms import Form
from dataloader.api.dashboard.render import chosen_zone, show
from dataloader.api.dispatch import calling
from dataloader.api.web import auth
from dataloader.api.web.endpoint import session
from dataloader.ops import jobs
from dataloader.ops.checks import document
from dataloader.ops.errors import known
from dataloader.queue import again, args_schema, db, operations
from dataloader.queue.fields import INTERNAL_TASK
from dataloader.queue.reports import stats

blueprint = Blueprint("trigger", __name__)
OF_JOB = ("queue", "lock_key", "partition_key", "priority")
QUEUE = "etl.default"


@blueprint.get("/trigger")
@blueprint.get("/jobs/<uuid:job_id>/again", endpoint="again_form")
@auth.require("operate")
def task_form(job_id: UUID | None = None) -> Response:
    """The form of a task's jobs, or the choice of a task; or the form of a job that has ended, filled with its args."""
    task = request.args.get("task", "").strip()
    with session() as conn:
        if job_id is None and not task:
            tasks = [row["task"] for row in stats.tasks(conn) if row["task"] != INTERNAL_TASK]
            return show("trigger.html", task="", tasks=tasks)
        old: dict[str, Any] = {"task": task, "queue": QUEUE, "lock_key": task, "partition_key": "", "priority": 100}
        args = None
        if job_id:
            old, args = _old(conn, job_id)
        is_known, schema = _schema(conn, old["task"])
    return show(
        "trigger.html",
        task=old["task"],
        is_known=is_known,
        fields=Form(schema, args, chosen_zone()).inputs,
        of_job={name: old[name] for name in OF_JOB},
        job_id=job_id,
        address=url_for(".run_again", job_id=job_id) if job_id else url_for(".trigger_job"),
    )


@blueprint.post("/trigger")
@blueprint.post("/jobs/<uuid:job_id>/again", endpoint="run_again")
@auth.require("operate")
def trigger_job(job_id: UUID | None = None) -> Response:
    """Add the job of the form, and lead to its page. Secrets of a job that is run again stay what they are."""
    with calling() as call:
        old, old_args = _old(call.conn, job_id) if job_id else ({"task": request.form.get("task", "")}, None)
        _, schema = _schema(call.conn, old["task"])
        args = Form(schema, old_args, chosen_zone()).args(request.form)
        shown = {name: value.strip() if isinstance(value, str) else value for name, value in log.masked(old).items()}
        changes = {name: value for name, value in _job_fields().items() if name not in shown or value != shown[name]}
        fields = document(json.dumps(old | changes | {"args": args}).encode())  # with the guards on a body
        added = jobs.add_again(call, job_id, fields) if job_id else jobs.trigger(call, **fields)
    g.changed = {"job_id": str(added.job_id), "action": "again" if job_id else "trigger"}
    address = url_for("dashboard.job", job_id=added.job_id)
    return Response("", headers={"HX-Redirect": address}, mimetype="text/html")


def _old(conn: db.Connection, job_id: UUID) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a job that is run again, and its args."""
    fields = known(again.fields_of(conn, job_id), "job")
    return fields, fields["args"] if isinstance(fields["args"], dict) else {}


def _schema(conn: db.Connection, task: str) -> tuple[bool, dict[str, Any] | None]:
    """Whether a worker has shown a pipeline of the task, and the schema of its args."""
    known = {} if "\0" in task else operations.args_schemas(conn, [task])
    return task in known, args_schema.readable(known.get(task))


def _job_fields() -> dict[str, Any]:
    given = {name: request.form[name].strip() for name in OF_JOB if name in request.form}
    fields: dict[str, Any] = {name: text for name, text in given.items() if text or name == "partition_key"}
    if (priority := fields.get("priority", "")).isascii() and priority.isdigit() and len(priority) < 20:
        fields["priority"] = int(priority)
    return fields
