"""/api/v1 about the farm as a whole: its figures, workers, pace, journal and database. May import `stats`."""

from __future__ import annotations

from typing import Any

from flask import Blueprint

from dataloader import stats
from dataloader.api import access, answers, queries
from dataloader.api.operation import operation, session

blueprint = Blueprint("farm", __name__, url_prefix="/api/v1")


@blueprint.get("/stats")
@access.require("read")
@operation("farm", answers.Overview, query=queries.Query)
def farm_stats(query: queries.Query) -> dict[str, Any]:
    """Length, dead, lag and more, for each queue and in total."""
    with session() as conn:
        return stats.overview(conn)


@blueprint.get("/workers")
@access.require("read")
@operation("farm", answers.Workers, query=queries.Query)
def list_workers(query: queries.Query) -> dict[str, Any]:
    """The workers of all hosts and what they run."""
    with session() as conn:
        return {"workers": stats.workers(conn)}


@blueprint.get("/pace")
@access.require("read")
@operation("farm", answers.Pace, query=queries.Pace)
def farm_pace(query: queries.Pace) -> dict[str, Any]:
    """How many jobs ended in each ten seconds of the last minutes."""
    with session() as conn:
        return {"pace": stats.pace(conn, query.minutes)}


@blueprint.get("/events")
@access.require("read")
@operation("farm", answers.FarmEvents, query=queries.FarmEvents)
def farm_events(query: queries.FarmEvents) -> dict[str, Any]:
    """The journal of all jobs, the oldest first; without `after` the newest rows."""
    with session() as conn:
        return {"events": stats.latest_events(conn, query.after, query.limit, query.queue)}


@blueprint.get("/database")
@access.require("read")
@operation("farm", answers.Database, query=queries.Query)
def farm_database(query: queries.Query) -> dict[str, Any]:
    """The queue's database: size, sessions, dead rows, the oldest transaction."""
    with session() as conn:
        return stats.postgres(conn)
