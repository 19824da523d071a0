"""/api/v1/limits: how many jobs of a limit may run at once and start in a minute, on all hosts together."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, g

from dataloader.api.v1 import requests, responses
from dataloader.api.web import auth
from dataloader.api.web.endpoint import operation, session
from dataloader.api.web.problems import Problem, invalid
from dataloader.queue import db, operations
from dataloader.queue.reports import stats

blueprint = Blueprint("limits", __name__, url_prefix="/api/v1/limits")


@blueprint.get("")
@auth.require("read")
@operation("limits", responses.Limits, query=requests.Query)
def list_limits() -> dict[str, Any]:
    """Every limit: what it allows, how many of its jobs run, and how many wait for it."""
    with session() as conn:
        return {"limits": stats.limits(conn)}


@blueprint.get("/<anything:limit>")
@auth.require("read")
@operation("limits", responses.Limit, query=requests.Query, errors=(404,))
def get_limit(limit: str) -> dict[str, Any]:
    """One limit."""
    with session() as conn:
        return _found(conn, limit)


@blueprint.put("/<anything:limit>")
@auth.require("operate")
@operation("limits", responses.Limit, body=requests.LimitSet, query=requests.Query)
def set_limit(limit: str, body: requests.LimitSet) -> dict[str, Any]:
    """Make a limit, or replace what it allows; holds for each claim from the answer on. Jobs that run go on."""
    with session() as conn:
        try:
            operations.set_limit(conn, limit, auth.who(), body.most, body.per_minute, body.burst)
        except operations.WrongLimit as e:
            raise invalid("", "limit", str(e)) from None
        answer = _found(conn, limit)
    g.changed = {"limit": limit, **body.model_dump()}
    return answer


@blueprint.delete("/<anything:limit>")
@auth.require("operate")
@operation("limits", responses.LimitRemoved, query=requests.Query, errors=(404,))
def remove_limit(limit: str) -> dict[str, Any]:
    """Let any number of the limit's jobs run and start. The jobs keep its name."""
    with session() as conn:
        if not operations.remove_limit(conn, _storable(limit), auth.who()):
            raise _unknown(limit)
    g.changed = {"limit": limit}
    return {"name": limit}


def _found(conn: db.Connection, name: str) -> dict[str, Any]:
    for row in stats.limits(conn, _storable(name)):
        return row
    raise _unknown(name)


def _storable(name: str) -> str:
    if not operations.is_limit_name(name):
        raise _unknown(name)
    return name


def _unknown(name: str) -> Problem:
    return Problem(404, "there is no limit of this name; GET /api/v1/limits lists them")
