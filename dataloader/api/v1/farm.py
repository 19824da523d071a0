"""/api/v1 about the farm as a whole: its figures, workers, tasks, pace, journal and database."""

from __future__ import annotations

from typing import Any

from flask import Blueprint

from dataloader.api.v1 import requests
from dataloader.api.web import auth
from dataloader.api.web.endpoint import operation, session
from dataloader.model.farm import Database, Names, Workers
from dataloader.model.jobs import FarmEvents
from dataloader.model.runs import Pace, TaskRuns, Tasks
from dataloader.queue import operations
from dataloader.queue.reports import runs, stats

blueprint = Blueprint("farm", __name__, url_prefix="/api/v1")


@blueprint.get("/workers")
@auth.require("read")
@operation("farm", Workers, query=requests.Query)
def list_workers() -> dict[str, Any]:
    """The workers of all hosts and what they run."""
    with session() as conn:
        return {"workers": stats.workers(conn)}


@blueprint.get("/tasks")
@auth.require("read")
@operation("farm", Tasks, query=requests.Tasks)
def list_tasks(query: requests.Tasks) -> dict[str, Any]:
    """The memory and the processors that the runs of each task need; with `range` also what its runs have used."""
    with session() as conn:
        return {"tasks": runs.of_tasks(conn, query.range) if query.range else stats.tasks(conn)}


@blueprint.get("/tasks/<anything:task>")
@auth.require("read")
@operation("farm", TaskRuns, query=requests.OfTask)
def task_runs(task: str, query: requests.OfTask) -> dict[str, Any]:
    """What the runs of a task took: counts, failures, percentiles, a histogram, and the period before to compare."""
    with session() as conn:
        return runs.of_task(conn, task, query.range)


@blueprint.get("/names")
@auth.require("read", "trigger", "operate")
@operation("farm", Names, query=requests.Names)
def look_up_names(query: requests.Names) -> dict[str, Any]:
    """Whether the farm knows a queue and a task, before a mistyped name makes a new one; similar names for `read`."""
    with session() as conn:
        found = operations.names(conn, query.queue, query.task)
    may_read = auth.may("read")
    return {kind: name if may_read or name is None else name | {"similar": []} for kind, name in found.items()}


@blueprint.get("/pace")
@auth.require("read")
@operation("farm", Pace, query=requests.Pace)
def farm_pace(query: requests.Pace) -> dict[str, Any]:
    """How many jobs ended in each ten seconds of the last minutes."""
    with session() as conn:
        return {"pace": stats.pace(conn, query.minutes)}


@blueprint.get("/events")
@auth.require("read")
@operation("farm", FarmEvents, query=requests.FarmEvents)
def farm_events(query: requests.FarmEvents) -> dict[str, Any]:
    """The journal of all jobs, the oldest first; without `after` the newest rows."""
    with session() as conn:
        return {"events": stats.latest_events(conn, query.after, query.limit, query.queue)}


@blueprint.get("/database")
@auth.require("read")
@operation("farm", Database, query=requests.Query)
def farm_database() -> dict[str, Any]:
    """The queue's database: size, sessions, dead rows, the oldest transaction."""
    with session() as conn:
        return stats.postgres(conn)
