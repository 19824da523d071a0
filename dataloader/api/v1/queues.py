"""/api/v1/queues: the figures of queues, and the changes of operators, which hold on all hosts at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flask import Blueprint, Response, g

from dataloader.api.v1 import requests, responses
from dataloader.api.web import auth
from dataloader.api.web.cache import outlook
from dataloader.api.web.endpoint import operation, paged, session
from dataloader.api.web.problems import Problem, invalid
from dataloader.queue import db, operations
from dataloader.queue.cursor import WrongCursor
from dataloader.queue.reports import keys, predictions, runs, stats

AT_ONCE = 1_000  # jobs that one request changes
blueprint = Blueprint("queues", __name__, url_prefix="/api/v1/queues")
_order = partial(operation, "queues", body_may_be_empty=True, query=requests.OfQueue)


@blueprint.get("")
@auth.require("read")
@operation("queues", responses.Queues, query=requests.Query)
def list_queues() -> dict[str, Any]:
    """Every queue that has jobs, a pause, a limit or a worker."""
    with session() as conn:
        return {"queues": stats.overview(conn)["queues"]}


@blueprint.get("/<anything:queue>/keys")
@auth.require("read")
@operation(
    "queues", responses.Keys, query=requests.Keys, keeps_query=True, errors=(409,), leads_to_jobs="/keys/0/job_id"
)
def list_keys(queue: str, query: requests.Keys) -> Response:
    """The keys of an ordered queue that have queued jobs, by name, page by page.

    A queue that is not ordered is a 409.
    """
    with session() as conn:
        try:
            page = keys.page(conn, queue, query.limit, query.after)
        except WrongCursor as e:
            raise invalid("/after", "cursor", str(e)) from None
    return paged({"keys": page.rows, "next": page.next}, page.next)


@blueprint.get("/<anything:queue>/prediction")
@auth.require("read")
@operation("queues", responses.QueuePrediction, query=requests.OfQueue)
def predict_queue(queue: str) -> dict[str, Any]:
    """When all that is queued and runs now will have ended, the range of that, and how right such predictions were."""
    with session() as conn:
        return predictions.of_queue(outlook(conn, queue))


@blueprint.get("/<anything:queue>/runs")
@auth.require("read")
@operation("queues", responses.QueueRuns, query=requests.Runs, keeps_query=True)
def queue_runs(queue: str, query: requests.Runs) -> dict[str, Any]:
    """What the runs of a queue took: counts, failures, percentiles, a histogram, and the period before to compare."""
    with session() as conn:
        return runs.of_queue(conn, queue, query.range)


@blueprint.post("/<anything:queue>/pause")
@auth.require("operate")
@_order(responses.QueueState, body=requests.Nothing)
def pause_queue(queue: str) -> dict[str, Any]:
    """Start no job of this queue any more, on any host. Running ones go on."""
    return _set(queue, operations.pause)


@blueprint.post("/<anything:queue>/resume")
@auth.require("operate")
@_order(responses.QueueState, body=requests.Nothing)
def resume_queue(queue: str) -> dict[str, Any]:
    """Start jobs of this queue again."""
    return _set(queue, operations.resume)


@blueprint.put("/<anything:queue>/limit")
@auth.require("operate")
@operation("queues", responses.QueueState, body=requests.QueueLimit, query=requests.OfQueue)
def limit_queue(queue: str, body: requests.QueueLimit) -> dict[str, Any]:
    """Refuse new jobs (429) while so many are queued; null: no limit."""
    with session() as conn:
        known = _known(conn, queue)
        answer = operations.limit_length(conn, queue, body.max_length, auth.who()) | known
    g.changed = {"queue": queue, "max_length": body.max_length}
    return answer


@blueprint.put("/<queue:queue>")
@auth.require("operate")
@operation("queues", responses.QueueState, body=requests.QueueOrder, query=requests.OfQueue)
def set_queue(queue: str, body: requests.QueueOrder) -> dict[str, Any]:
    """Change the order of the queue's jobs, on all hosts; what the body leaves out stays. Jobs may run meanwhile."""
    changes = body.model_dump(include=body.model_fields_set)
    with session() as conn:
        known = _known(conn, queue)
        try:
            answer = operations.set_order(conn, queue, auth.who(), **changes) | known
        except operations.Contradiction as e:
            raise invalid("/merge", "contradiction", str(e)) from None
    g.changed = {"queue": queue, **changes}
    return answer


@blueprint.post("/<anything:queue>/requeue-dead")
@auth.require("operate")
@_order(responses.Changed, body=requests.OfTried)
def requeue_dead(queue: str, body: requests.OfTried) -> dict[str, Any]:
    """Requeue up to 1,000 of the queue's failed and lost jobs."""
    return _changed(queue, operations.requeue_dead, body)


@blueprint.post("/<anything:queue>/delete-dead")
@auth.require("operate")
@_order(responses.Changed, body=requests.OfTried)
def delete_dead(queue: str, body: requests.OfTried) -> dict[str, Any]:
    """Delete up to 1,000 of the queue's failed and lost jobs."""
    return _changed(queue, operations.delete_dead, body)


@blueprint.post("/<anything:queue>/run-all")
@auth.require("operate")
@_order(responses.Changed, body=requests.OfQueued)
def run_all(queue: str, body: requests.OfQueued) -> dict[str, Any]:
    """Make up to 1,000 of the queue's jobs due whose time has not come."""
    return _changed(queue, operations.run_all, body)


@blueprint.post("/<anything:queue>/kill-retries")
@auth.require("operate")
@_order(responses.Changed, body=requests.OfTried)
def kill_retries(queue: str, body: requests.OfTried) -> dict[str, Any]:
    """Let up to 1,000 of the queue's jobs be failed that were tried and wait for their next attempt."""
    return _changed(queue, operations.kill_retries, body)


@blueprint.post("/<anything:queue>/move")
@auth.require("operate")
@operation("queues", responses.Moved, body=requests.Move, query=requests.OfQueue, errors=(409,))
def move_queue(queue: str, body: requests.Move) -> dict[str, Any]:
    """Make up to 1,000 of the queue's jobs those of another queue, their order kept; both are paused until all are."""
    with session() as conn:
        try:
            moved, is_done = operations.move(conn, queue, body.to, auth.who(), AT_ONCE)
        except operations.WrongName as e:
            raise invalid("/to", "queue_name", str(e)) from None
        except (operations.Contradiction, operations.Busy) as e:
            raise Problem(409, str(e)) from None
    g.changed = {"queue": queue, "to": body.to, "jobs": moved}
    return {"queue": queue, "to": body.to, "moved": moved, "is_done": is_done}


def _set(queue: str, change: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    with session() as conn:
        known = _known(conn, queue)
        answer = change(conn, queue, auth.who()) | known
    g.changed = {"queue": queue}
    return answer


def _known(conn: db.Connection, queue: str) -> dict[str, Any]:
    """Whether the queue is known; similar names only where the token may read them."""
    found = operations.known(conn, queue)
    return found if auth.may("read") else found | {"similar": []}


def _changed(queue: str, change: Callable[..., operations.Changed], body: requests.OfQueued) -> dict[str, Any]:
    only = body.model_dump(exclude={"after"}, exclude_none=True)
    with session() as conn:
        try:
            changed, following = change(conn, queue, auth.who(), AT_ONCE, operations.Filter(**only), body.after)
        except ValueError as e:
            raise invalid("/after", "cursor", str(e)) from None
    g.changed = {"queue": queue, "jobs": changed, **only}
    return {"queue": queue, "changed": changed, "next": following}
