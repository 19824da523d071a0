"""What the dashboard's buttons do when they are pressed; `buttons` says which there are.

Each is one call of `operate` with who asks, and a sentence for an answer. May import `operate`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from uuid import UUID

from flask import Blueprint, Response, current_app, g

from dataloader.api.dashboard import formats
from dataloader.api.dashboard.render import done, failed, named_queue
from dataloader.api.web import auth
from dataloader.api.web.problems import Problem
from dataloader.api.web.sessions import Sessions
from dataloader.queue import operations

blueprint = Blueprint("pressed", __name__)
blueprint.register_error_handler(Exception, failed)
ALL_SEC = 1.5  # how long a button for a whole queue goes on
_JOB_VERBS: dict[str, tuple[Callable[..., dict[UUID, str]], str]] = {
    "cancel": (operations.cancel, "The job is cancelled, or stops at its next safe point."),
    "force-cancel": (partial(operations.cancel, force=True), "The job is being stopped by force."),
    "run-now": (operations.run_now, "The job may run now."),
    "requeue": (operations.requeue, "The job is queued again, with a fresh budget of attempts."),
    "delete": (operations.delete, "The job is deleted, with its journal."),
}
_QUEUE_VERBS: dict[str, tuple[Callable[..., int], str]] = {
    "run-all": (operations.run_all, "may run now"),
    "requeue-dead": (operations.requeue_dead, "queued again"),
    "delete-dead": (operations.delete_dead, "deleted"),
}


@blueprint.post("/jobs/<uuid:job_id>/<any('cancel', 'force-cancel', 'run-now', 'requeue', 'delete'):verb>")
@auth.require("operate")
def change_job(job_id: UUID, verb: str) -> Response:
    """Press a button of a job. 409 where its status forbids it by now."""
    change, text = _JOB_VERBS[verb]
    with _sessions().borrow() as conn:
        outcome = change(conn, [job_id], auth.who())[job_id]
    if outcome == operations.UNKNOWN:
        raise Problem(404, "There is no such job any more.")
    if outcome != operations.DONE:
        raise Problem(409, f"That was not done: the job is {outcome} by now.")
    g.changed = {"job_id": str(job_id), "action": verb}
    return done(text, is_gone=verb == "delete")


@blueprint.post("/queues/<anything:queue>/<any('pause', 'resume'):verb>")
@auth.require("operate")
def pause_queue(queue: str, verb: str) -> Response:
    """Pause or resume a queue, on all hosts at once."""
    queue = named_queue(queue)
    with _sessions().borrow() as conn:
        is_known = operations.known(conn, queue)["is_known"]
        (operations.pause if verb == "pause" else operations.resume)(conn, queue, auth.who())
    g.changed = {"queue": queue, "action": verb}
    unknown = "" if is_known else " No queue of this name is known now."
    return done(("The queue is paused on all hosts." if verb == "pause" else "The queue goes on.") + unknown)


@blueprint.post("/queues/<anything:queue>/<any('run-all', 'requeue-dead', 'delete-dead'):verb>")
@auth.require("operate")
def change_queue(queue: str, verb: str) -> Response:
    """Press a button for many jobs of a queue; as many as can be done in a request."""
    queue = named_queue(queue)
    change, words = _QUEUE_VERBS[verb]
    until, changed, more = monotonic() + ALL_SEC, 0, 1
    with _sessions().borrow() as conn:
        while more and monotonic() < until:
            more = change(conn, queue, auth.who())
            changed += more
    g.changed = {"queue": queue, "action": verb, "jobs": changed}
    jobs = "1 job" if changed == 1 else f"{formats.count(changed)} jobs"
    return done(f"{jobs} {words}." + (" There may be more: press again." if more else ""))


def _sessions() -> Sessions:
    sessions: Sessions = current_app.extensions["sessions"]
    return sessions
