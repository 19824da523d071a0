"""/api/v1/backfills: jobs of one task for many partitions, and what people do to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from flask import Blueprint, g
from pydantic import BaseModel

from dataloader.api.v1 import requests
from dataloader.api.web import auth
from dataloader.api.web.cache import counts
from dataloader.api.web.endpoint import operation, session
from dataloader.api.web.problems import Problem
from dataloader.model.plans import Backfill, BackfillPreview, BackfillRemoved, BackfillRetried, Backfills, Partitions
from dataloader.queue.plans import backfills
from dataloader.queue.plans.new_backfill import NewBackfill, definition

T = TypeVar("T")
blueprint = Blueprint("backfills", __name__, url_prefix="/api/v1/backfills")
_order = partial(operation, "backfills", body=requests.Nothing, body_may_be_empty=True, query=requests.Query)
_given = partial(operation, "backfills", body=NewBackfill, query=requests.Query, body_limit=requests.BATCH_LIMIT)


@blueprint.get("")
@auth.require("read")
@operation("backfills", Backfills, query=requests.Query)
def list_backfills() -> dict[str, Any]:
    """The newest backfills, up to 100, each with the counts of its partitions."""
    with session() as conn:
        return {"backfills": backfills.listed(conn, counts)}


@blueprint.post("")
@auth.require("operate")
@_given(Backfill, errors=(409,))
def add_backfill(body: BaseModel) -> dict[str, Any]:
    """Add a backfill. The reaper makes its jobs, some hundred at once; the answer does not wait for them."""
    new = definition(body)
    with session() as conn:
        try:
            answer = backfills.add(conn, new, auth.who())
        except backfills.Taken as e:
            raise Problem(409, str(e)) from None
    g.changed = {"backfill": new["name"]}
    return answer


@blueprint.post("/dry-run")
@auth.require("read")
@_given(BackfillPreview)
def try_backfill(body: BaseModel) -> dict[str, Any]:
    """What a backfill would do: how many partitions, how many are done already, some of the jobs. Changes nothing."""
    new = definition(body)
    with session() as conn:
        return backfills.preview(conn, new)


@blueprint.get("/<backfill>")
@auth.require("read")
@operation("backfills", Backfill, query=requests.Query)
def get_backfill(backfill: str) -> dict[str, Any]:
    """One backfill, with the counts of its partitions."""
    with session() as conn:
        return _found(backfills.backfill(conn, backfill, counts))


@blueprint.get("/<backfill>/partitions")
@auth.require("read")
@operation("backfills", Partitions, query=requests.Partitions)
def list_partitions(backfill: str, query: requests.Partitions) -> dict[str, Any]:
    """The partitions of a backfill in their order, each with its job; those of one status where `status` names it."""
    with session() as conn:
        _found(backfills.known(conn, backfill))
        rows = backfills.of_ledger(conn, backfill, query.after, query.limit, query.status)
    return {"partitions": rows, "next": rows[-1]["place"] if len(rows) == query.limit else None}


@blueprint.put("/<backfill>")
@auth.require("operate")
@operation("backfills", Backfill, body=requests.BackfillChange, query=requests.Query)
def change_backfill(backfill: str, body: requests.BackfillChange) -> dict[str, Any]:
    """Let so many jobs of a backfill run at once, from now on; null: any number."""
    return _changed(backfill, lambda conn: backfills.set_most(conn, backfill, body.max_running, auth.who()))


@blueprint.delete("/<backfill>")
@auth.require("operate")
@operation("backfills", BackfillRemoved, query=requests.Query, errors=(409,))
def remove_backfill(backfill: str) -> dict[str, Any]:
    """Remove a backfill of which no job is to come, with its ledger; its jobs stay."""
    _changed(backfill, lambda conn: backfills.remove(conn, backfill, auth.who()))
    return {"name": backfill, "removed": True}


@blueprint.post("/<backfill>/pause")
@auth.require("operate")
@_order(Backfill, errors=(409,))
def pause_backfill(backfill: str) -> dict[str, Any]:
    """Make and start no jobs of a backfill; those that run go on."""
    return _changed(backfill, lambda conn: backfills.pause(conn, backfill, auth.who()))


@blueprint.post("/<backfill>/resume")
@auth.require("operate")
@_order(Backfill, errors=(409,))
def resume_backfill(backfill: str) -> dict[str, Any]:
    """End a backfill's pause."""
    return _changed(backfill, lambda conn: backfills.resume(conn, backfill, auth.who()))


@blueprint.post("/<backfill>/cancel")
@auth.require("operate")
@_order(Backfill)
def cancel_backfill(backfill: str) -> dict[str, Any]:
    """Start no more jobs of a backfill; behind the answer the reaper cancels those that have not ended."""
    return _changed(backfill, lambda conn: backfills.cancel(conn, backfill, auth.who()))


@blueprint.post("/<backfill>/retry")
@auth.require("operate")
@operation("backfills", BackfillRetried, body=requests.BackfillRetry, body_may_be_empty=True, query=requests.Query)
def retry_backfill(backfill: str, body: requests.BackfillRetry) -> dict[str, Any]:
    """Queue the dead jobs of a backfill again, up to 500; with `next` as `after` the next request goes on."""
    with session() as conn:
        _found(backfills.known(conn, backfill))
        changed, following = backfills.retry(conn, backfill, auth.who(), body.after)
    g.changed = {"backfill": backfill, "jobs": changed}
    return {"changed": changed, "next": following and int(following)}


def _changed(name: str, change: Callable[[Any], T | None]) -> T:
    """What `change` returns of a session; raises a Problem: 404 for None, 409 for what is not possible now."""
    with session() as conn:
        try:
            answer = change(conn)
        except backfills.NotNow as e:
            raise Problem(409, str(e)) from None
    found = _found(answer)
    g.changed = {"backfill": name}
    return found


def _found(found: T | None) -> T:
    if found is None:
        raise Problem(404, "there is no backfill with this name")
    return found
