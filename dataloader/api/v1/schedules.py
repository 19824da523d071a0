"""/api/v1/schedules: the schedules of which the reaper makes jobs, and what people do to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from flask import Blueprint, current_app, g
from pydantic import BaseModel

from dataloader.api.v1 import requests
from dataloader.api.web import auth
from dataloader.api.web.endpoint import operation, session
from dataloader.api.web.problems import Problem, invalid
from dataloader.config import Settings
from dataloader.model.jobs import Triggered
from dataloader.model.plans import Removed, Schedule, Schedules
from dataloader.queue.plans import schedules
from dataloader.queue.plans.new_schedule import NewSchedule, ScheduleChange, definition

T = TypeVar("T")
blueprint = Blueprint("schedules", __name__, url_prefix="/api/v1/schedules")
_order = partial(operation, "schedules", body=requests.Nothing, body_may_be_empty=True, query=requests.Query)


@blueprint.get("")
@auth.require("read")
@operation("schedules", Schedules, query=requests.Schedules)
def list_schedules(query: requests.Schedules) -> dict[str, Any]:
    """All schedules by name, each with its next due times."""
    with session() as conn:
        return {"schedules": schedules.listed(conn, query.next)}


@blueprint.post("")
@auth.require("operate")
@operation("schedules", Schedule, body=NewSchedule, query=requests.Query, errors=(409,))
def add_schedule(body: BaseModel) -> dict[str, Any]:
    """Add a schedule; its first due time is the next one from now on."""
    new = definition(body, _settings().timezone)
    with session() as conn:
        try:
            answer = schedules.add(conn, new, auth.who())
        except schedules.Taken as e:
            raise Problem(409, str(e)) from None
    g.changed = {"schedule": new["name"]}
    return answer


@blueprint.get("/<name>")
@auth.require("read")
@operation("schedules", Schedule, query=requests.Schedules)
def get_schedule(name: str, query: requests.Schedules) -> dict[str, Any]:
    """One schedule, with its next due times."""
    with session() as conn:
        return _found(schedules.schedule(conn, name, query.next))


@blueprint.put("/<name>")
@auth.require("operate")
@operation("schedules", Schedule, body=ScheduleChange, query=requests.Query)
def change_schedule(name: str, body: BaseModel) -> dict[str, Any]:
    """Change a schedule; what the body leaves out stays, null is the default. A new timing counts from now on."""
    changes = body.model_dump(include=body.model_fields_set)
    try:
        return _changed(name, lambda conn: schedules.change(conn, name, changes, _settings().timezone, auth.who()))
    except ValueError as e:
        raise invalid("", "schedule", str(e)) from None


@blueprint.delete("/<name>")
@auth.require("operate")
@operation("schedules", Removed, query=requests.Query)
def remove_schedule(name: str) -> dict[str, Any]:
    """Remove a schedule; its jobs stay. One that a pipeline names comes back when a worker starts: pause it instead."""
    _changed(name, lambda conn: schedules.remove(conn, name))
    return {"name": name, "removed": True}


@blueprint.post("/<name>/pause")
@auth.require("operate")
@_order(Schedule)
def pause_schedule(name: str) -> dict[str, Any]:
    """Make no jobs of a schedule; those that are made stay."""
    return _changed(name, lambda conn: schedules.pause(conn, name, auth.who()))


@blueprint.post("/<name>/resume")
@auth.require("operate")
@_order(Schedule)
def resume_schedule(name: str) -> dict[str, Any]:
    """End a schedule's pause; the due times of the pause get no job."""
    return _changed(name, lambda conn: schedules.resume(conn, name))


@blueprint.post("/<name>/run")
@auth.require("operate")
@_order(Triggered, errors=(409, 429), leads_to_jobs="/job_id")
def run_schedule(name: str) -> dict[str, Any]:
    """Add a job of the schedule now, paused or not; now is its due time."""
    lease_ttl_sec = _settings().dl_default_lease_ttl_sec
    try:
        job_id, status = _changed(name, lambda conn: schedules.run(conn, name, auth.who(), lease_ttl_sec))
    except ValueError as e:
        raise Problem(409, str(e)) from None
    g.changed |= {"job_id": str(job_id)}
    return {"job_id": job_id, "status": status}


def _changed(name: str, change: Callable[[Any], T | None]) -> T:
    """What `change` returns of a session; raises a 404 Problem for None, which is an unknown schedule."""
    with session() as conn:
        answer = change(conn)
    found = _found(answer)
    g.changed = {"schedule": name}
    return found


def _found(found: T | None) -> T:
    if found is None:
        raise Problem(404, "there is no schedule with this name")
    return found


def _settings() -> Settings:
    settings: Settings = current_app.extensions["settings"]
    return settings
