"""/api/v1/queues: queues in figures, and what operators do to them. What they say holds on all hosts at once.

May import `stats`, `operate` and `db`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask import Blueprint, g

from dataloader import db, operate, stats
from dataloader.api import access, answers, queries, schemas
from dataloader.api.operation import body, operation, session

AT_ONCE = 1_000  # jobs that one request changes
blueprint = Blueprint("queues", __name__, url_prefix="/api/v1/queues")


@blueprint.get("")
@access.require("read")
@operation("queues", answers.Queues, query=queries.Query)
def list_queues(query: queries.Query) -> dict[str, Any]:
    """Every queue that has jobs, a pause, a limit or a worker."""
    with session() as conn:
        return {"queues": stats.overview(conn)["queues"]}


@blueprint.post("/<anything:queue>/pause")
@access.require("operate")
@operation("queues", answers.QueueState, body=schemas.Nothing, body_may_be_empty=True, query=queries.OfQueue)
def pause_queue(queue: str, query: queries.OfQueue) -> dict[str, Any]:
    """Start no job of this queue any more, on any host. Running ones go on."""
    return _told(query.name or queue, operate.pause)


@blueprint.post("/<anything:queue>/resume")
@access.require("operate")
@operation("queues", answers.QueueState, body=schemas.Nothing, body_may_be_empty=True, query=queries.OfQueue)
def resume_queue(queue: str, query: queries.OfQueue) -> dict[str, Any]:
    """Start jobs of this queue again."""
    return _told(query.name or queue, operate.resume)


@blueprint.put("/<anything:queue>/limit")
@access.require("operate")
@operation("queues", answers.QueueState, body=schemas.QueueLimit, query=queries.OfQueue)
def limit_queue(queue: str, query: queries.OfQueue) -> dict[str, Any]:
    """Refuse new jobs (429) while so many are queued; null: no limit."""
    wanted, most = schemas.queue(query.name or queue), schemas.queue_limit(body())
    with session() as conn:
        known = _known(conn, wanted)
        answer = operate.limit_length(conn, wanted, most, access.who()) | known
    g.changed = {"queue": wanted, "max_length": most}
    return answer


@blueprint.post("/<anything:queue>/requeue-dead")
@access.require("operate")
@operation("queues", answers.Changed, body=schemas.Nothing, body_may_be_empty=True, query=queries.OfQueue)
def requeue_dead(queue: str, query: queries.OfQueue) -> dict[str, Any]:
    """Requeue up to 1,000 of the queue's failed and lost jobs."""
    return _changed(query.name or queue, operate.requeue_dead)


@blueprint.post("/<anything:queue>/delete-dead")
@access.require("operate")
@operation("queues", answers.Changed, body=schemas.Nothing, body_may_be_empty=True, query=queries.OfQueue)
def delete_dead(queue: str, query: queries.OfQueue) -> dict[str, Any]:
    """Delete up to 1,000 of the queue's failed and lost jobs."""
    return _changed(query.name or queue, operate.delete_dead)


@blueprint.post("/<anything:queue>/run-all")
@access.require("operate")
@operation("queues", answers.Changed, body=schemas.Nothing, body_may_be_empty=True, query=queries.OfQueue)
def run_all(queue: str, query: queries.OfQueue) -> dict[str, Any]:
    """Make up to 1,000 of the queue's jobs due whose time has not come."""
    return _changed(query.name or queue, operate.run_all)


def _told(queue: str, tell: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    wanted = schemas.queue(queue)
    schemas.nothing(body(may_be_empty=True))
    with session() as conn:
        known = _known(conn, wanted)
        answer = tell(conn, wanted, access.who()) | known
    g.changed = {"queue": wanted}
    return answer


def _known(conn: db.Connection, queue: str) -> dict[str, Any]:
    """Whether the queue is known; names of others only for those who may read them."""
    found = operate.known(conn, queue)
    return found if access.may("read") else found | {"similar": []}


def _changed(queue: str, change: Callable[..., int]) -> dict[str, Any]:
    wanted = schemas.queue(queue)
    schemas.nothing(body(may_be_empty=True))
    with session() as conn:
        count = change(conn, wanted, access.who(), AT_ONCE)
    g.changed = {"queue": wanted, "jobs": count}
    return {"queue": wanted, "changed": count}
