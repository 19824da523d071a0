"""The form that triggers a job of a task, and the one that runs a job again with changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from flask import Blueprint, Response, g, request, url_for
from werkzeug.exceptions import HTTPException

from dataloader import log
from dataloader.api.dashboard import forms, zones
from dataloader.api.dashboard.render import as_problem, failed, show
from dataloader.api.dispatch import calling
from dataloader.api.web import auth
from dataloader.api.web.endpoint import session
from dataloader.ops import jobs
from dataloader.ops.checks import document, pointer
from dataloader.ops.errors import Problem, Unknown, invalid
from dataloader.queue import again, args_schema, db, operations
from dataloader.queue.reports import stats

blueprint = Blueprint("trigger", __name__)
OF_JOB = ("queue", "lock_key", "partition_key", "priority")
QUEUE = "etl.default"


@blueprint.errorhandler(Exception)
def _faulted(error: Exception) -> Response | HTTPException:
    """A problem with faults goes to the form, which shows each at its field; any other as everywhere."""
    if isinstance(error, Problem) and error.faults and "HX-Request" in request.headers:
        return as_problem(error)
    return failed(error)


@blueprint.get("/trigger")
@auth.require("operate")
def task_form() -> Response:
    """The form of a task's jobs, or the choice of a task."""
    task = request.args.get("task", "").strip()
    with session() as conn:
        if not task:
            return show("trigger.html", task="", tasks=[row["task"] for row in stats.tasks(conn)])
        schema = _schema(conn, task)
    given = {"queue": QUEUE, "lock_key": task, "partition_key": "", "priority": 100}
    return _page(task, schema, forms.inputs(schema.readable, None, zones.chosen()), given, None)


@blueprint.post("/trigger")
@auth.require("operate")
def trigger_job() -> Response:
    """Add the job of the form, and lead to its page."""
    task = request.form.get("task", "")
    with calling() as call:
        args = _args(_schema(call.conn, task), None)
        added = jobs.trigger(call, **_document({"task": task, **_job_fields(), "args": args}))
    g.changed = {"job_id": str(added.job_id), "action": "trigger"}
    return _led_to(added.job_id)


@blueprint.get("/jobs/<uuid:job_id>/again")
@auth.require("operate")
def again_form(job_id: UUID) -> Response:
    """The form of a job that has ended, filled with its args. Secrets stay where they are."""
    with session() as conn:
        old = _fields_of(conn, job_id)
        schema = _schema(conn, old["task"])
    return _page(old["task"], schema, forms.inputs(schema.readable, _object(old["args"]), zones.chosen()), old, job_id)


@blueprint.post("/jobs/<uuid:job_id>/again")
@auth.require("operate")
def run_again(job_id: UUID) -> Response:
    """Add the job of the form, and lead to its page."""
    with calling() as call:
        old = _fields_of(call.conn, job_id)
        args = _args(_schema(call.conn, old["task"]), _object(old["args"]))
        changes = {name: value for name, value in _job_fields().items() if value != _as_sent(log.masked(old[name]))}
        added = jobs.add_again(call, job_id, _document(old | changes | {"args": args}))
    g.changed = {"job_id": str(added.job_id), "action": "again", "rerun_of": str(job_id)}
    return _led_to(added.job_id)


def _as_sent(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _fields_of(conn: db.Connection, job_id: UUID) -> dict[str, Any]:
    if (fields := again.fields_of(conn, job_id)) is None:
        raise Unknown("job")
    return fields


@dataclass(frozen=True, slots=True)
class _Schema:
    is_known: bool  # the task: a worker has shown a pipeline of it
    readable: dict[str, Any] | None


def _schema(conn: db.Connection, task: str) -> _Schema:
    known = {} if "\0" in task else operations.args_schemas(conn, [task])
    return _Schema(task in known, args_schema.readable(known.get(task)))


def _page(
    task: str, schema: _Schema, fields: list[forms.Input], of_job: Mapping[str, Any], job_id: UUID | None
) -> Response:
    address = url_for(".run_again", job_id=job_id) if job_id else url_for(".trigger_job")
    return show(
        "trigger.html",
        task=task,
        is_known=schema.is_known,
        fields=fields,
        of_job={name: of_job[name] for name in OF_JOB},
        job_id=job_id,
        address=address,
    )


def _args(schema: _Schema, old: dict[str, Any] | None) -> dict[str, Any]:
    try:
        fields = forms.inputs(schema.readable, old, zones.chosen())
        return forms.args_of(fields, request.form, schema.readable, old or {}, zones.chosen())
    except forms.FormFault as e:
        raise invalid(pointer(e.path), "form", f"{e.path[-1]} {e}") from None


def _job_fields() -> dict[str, Any]:
    """The fields of the job beside its args; raises a 400 Problem for a priority that is no number."""
    given = {name: request.form[name].strip() for name in OF_JOB if name in request.form}
    fields: dict[str, Any] = {name: text for name, text in given.items() if text or name == "partition_key"}
    if "priority" in fields:
        if not (fields["priority"].isascii() and fields["priority"].isdigit() and len(fields["priority"]) < 11):
            raise invalid("/priority", "priority", "priority should be a whole number of 0 or more")
        fields["priority"] = int(fields["priority"])
    return fields


def _document(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as the body of a trigger, with the guards on one."""
    return document(json.dumps(fields).encode())


def _led_to(job_id: UUID) -> Response:
    return Response("", headers={"HX-Redirect": url_for("dashboard.job", job_id=job_id)}, mimetype="text/html")


def _object(args: Any) -> dict[str, Any]:
    return args if isinstance(args, dict) else {}
