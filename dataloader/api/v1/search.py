"""/api/v1/tally and /api/v1/suggestions: the counts beside a list of jobs, and how a search may go on."""

from __future__ import annotations

from typing import Any

from flask import Blueprint

from dataloader.api.v1 import requests
from dataloader.api.web import auth
from dataloader.api.web.endpoint import operation, session
from dataloader.api.web.problems import invalid
from dataloader.model.jobs import Suggestions, Tally
from dataloader.queue.reports import stats, tallies
from dataloader.queue.reports.search import WrongSearch

blueprint = Blueprint("search", __name__, url_prefix="/api/v1")


@blueprint.get("/tally")
@auth.require("read")
@operation("jobs", Tally, query=requests.Filters)
def tally_jobs(query: requests.Filters) -> dict[str, Any]:
    """Count the jobs of a list: each job counts as one kind."""
    with session() as conn:
        try:
            found = tallies.tally(conn, stats.Wanted(**query.model_dump()))
        except WrongSearch as e:
            raise invalid("/q", "search", str(e)) from None
    return found.document()


@blueprint.get("/suggestions")
@auth.require("read")
@operation("jobs", Suggestions, query=requests.Suggestions)
def suggest_searches(query: requests.Suggestions) -> dict[str, Any]:
    """How the text of a search box may go on: up to 8 each of fields, statuses, tasks, queues and keys."""
    with session() as conn:
        return {"suggestions": tallies.suggest(conn, query.q)}
