"""The actions on a job or a queue: their buttons, and what pressing one does.

A button's choice is pure; pressing it is one call of `operations`, answered by a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any
from uuid import UUID

from flask import Blueprint, Response, current_app, g, request

from dataloader.api.dashboard import formats, zones
from dataloader.api.dashboard.render import done, failed, named_queue, queue_url
from dataloader.api.web import auth
from dataloader.api.web.endpoint import session
from dataloader.api.web.problems import Problem
from dataloader.config import Settings
from dataloader.queue import db, operations
from dataloader.queue.new_job import INT4_MAX
from dataloader.queue.plans import backfills, new_schedule, schedules
from dataloader.queue.reports import errors

blueprint = Blueprint("actions", __name__)
blueprint.register_error_handler(Exception, failed)
ALL_SEC = 1.5  # for a button that changes a whole queue
_JOB_VERBS: dict[str, tuple[Callable[..., dict[UUID, str]], str]] = {
    "cancel": (operations.cancel, "The job is cancelled, or stops at its next safe point."),
    "force-cancel": (partial(operations.cancel, force=True), "The job is being stopped by force."),
    "run-now": (operations.run_now, "The job may run now."),
    "requeue": (operations.requeue, "The job is queued again, with a fresh budget of attempts."),
    "delete": (operations.delete, "The job is deleted, with its journal."),
}
_QUEUE_VERBS: dict[str, tuple[Callable[..., operations.Changed], str]] = {
    "run-all": (operations.run_all, "may run now"),
    "kill-retries": (operations.kill_retries, "dead"),
    "requeue-dead": (operations.requeue_dead, "queued again"),
    "delete-dead": (operations.delete_dead, "deleted"),
}


# The filters of the list of jobs that a change of a whole queue knows too.
FILTERS = ("task", "lock_key", "partition_key", "error_group")


@dataclass(frozen=True, slots=True)
class Button:
    """One action: its name in the address, its label, and the question before it."""

    name: str
    label: str
    question: str = ""
    because: str = ""  # the reason why it is disabled; "": it is not
    is_grave: bool = False  # it destroys work or data


def of_job(job: Mapping[str, Any]) -> list[Button]:
    """The buttons for a job in this state, the most likely one first."""
    if job["status"] == "queued":
        return [_run_now(job), _CANCEL_QUEUED, _delete(job)]
    if job["status"] == "running":
        return [_cancel(job), _force(job), _delete(job)]
    return [_requeue(job), _delete(job)]


_CANCEL_QUEUED = Button("cancel", "Cancel", "Cancel this job? It has not started and never will.", is_grave=True)


def _run_now(job: Mapping[str, Any]) -> Button:
    waits = (job.get("waiting_for") or {}).get("reason")
    is_held = waits in ("time", "session") or job.get("blocked_on") in ("time", "parent")
    because = "" if is_held else "Its time has come already."
    return Button("run-now", "Run now", because=because)


def _cancel(job: Mapping[str, Any]) -> Button:
    because = "It has been asked to stop, and will at its next safe point." if job["cancel_requested"] else ""
    return Button(
        "cancel",
        "Cancel",
        "Cancel this job? It stops at its next safe point; what it has written stays.",
        because,
        is_grave=True,
    )


def _force(job: Mapping[str, Any]) -> Button:
    return Button(
        "force-cancel",
        "Force cancel",
        "Force this job to stop? It is interrupted where it stands, and its process killed where that does not help.",
        "Its end is being forced already." if job.get("cancel_forced") else "",
        is_grave=True,
    )


def _requeue(job: Mapping[str, Any]) -> Button:
    asked = "Run this job again? It has succeeded; it will do its work once more, with a fresh budget of attempts."
    return Button("requeue", "Requeue", asked if job["status"] == "succeeded" else "")


def _delete(job: Mapping[str, Any]) -> Button:
    return Button(
        "delete",
        "Delete",
        "Delete this job, with its journal? Nothing of it remains.",
        "A running job cannot be deleted. Cancel it first." if job["status"] == "running" else "",
        is_grave=True,
    )


def of_queue(queue: Mapping[str, Any]) -> list[Button]:
    """A queue's buttons; one without effect is disabled and says why."""
    dead, scheduled = _jobs(queue["dead"], "dead"), _jobs(queue["scheduled"], "scheduled")
    none_dead = "" if queue["dead"] else "No job of this queue is dead."
    none_scheduled = "" if queue["scheduled"] else "No job of this queue waits for its time."
    none_retried = "" if queue["retries"] else "No job of this queue waits for a retry."
    retries = "the one job that waits" if queue["retries"] == 1 else f"all {queue['retries']:,} jobs that wait"
    return [
        Button("resume", "Resume")
        if queue["paused_at"]
        else Button("pause", "Pause", "Pause this queue? No job of it starts, on any host, until it is resumed."),
        Button("run-all", "Run all now", f"Let {scheduled} run now, retries in their back-off too?", none_scheduled),
        Button("kill-retries", "Kill all retries", f"Let {retries} for a retry be dead?", none_retried, is_grave=True),
        Button("requeue-dead", "Requeue all dead", f"Run {dead} again, with a fresh budget of attempts?", none_dead),
        Button("delete-dead", "Delete all dead", f"Delete {dead}, with their journals?", none_dead, is_grave=True),
    ]


def of_schedule(schedule: Mapping[str, Any]) -> list[Button]:
    """A schedule's buttons."""
    pause = Button("pause", "Pause", "Pause this schedule? It makes no jobs until it is resumed.")
    return [Button("resume", "Resume") if schedule["paused_at"] else pause, Button("run", "Run now")]


def of_errors(group: Mapping[str, Any]) -> list[Button]:
    """The buttons of an error group, for its dead jobs."""
    dead = _jobs(group["dead"], "dead")
    because = "" if group["dead"] else "No job of this group is dead: those that retry have attempts left."
    requeue = f"Run {dead} of this group again, with a fresh budget of attempts?"
    return [
        Button("requeue-dead", "Requeue these", requeue, because),
        Button("delete-dead", "Delete these", f"Delete {dead} of this group, with their journals?", because, True),
    ]


def of_backfill(backfill: Mapping[str, Any]) -> list[Button]:
    """A backfill's buttons; one without effect is disabled and says why."""
    counts = backfill["counts"]
    dead = counts["failed"] + counts["lost"]
    over = {"done": "It is done.", "canceled": "It is canceled."}.get(backfill["state"], "")
    asked = "Pause this backfill? It makes and starts no jobs until it is resumed."
    pause = Button("resume", "Resume") if backfill["paused_at"] and not over else Button("pause", "Pause", asked, over)
    retry = f"Run {_jobs(dead, 'dead')} again, with a fresh budget of attempts?"
    cancel = "Cancel this backfill? The jobs that have not ended are canceled."
    return [
        pause,
        Button("retry", "Retry failed", retry, "" if dead else "No job of it is dead."),
        Button("cancel", "Cancel", cancel, over, is_grave=True),
    ]


def of_list(given: Mapping[str, str]) -> list[Button]:
    """The buttons of a list of dead, retried or scheduled jobs, for all jobs that its filters let through."""
    because = ""
    if not given["queue"]:
        because = "Name one queue in the filter, to change all its jobs that fit."
    elif any(given[name] for name in given if name not in (*FILTERS, "queue", "status", "sort")):
        because = "A change of all that fit goes by queue, task, key and partition: clear the other filters."
    of = f"job of {given['queue']} that fits this filter"
    requeue = Button(
        "requeue-dead", "Requeue all that fit", f"Run every dead {of} again, with a fresh budget of attempts?", because
    )
    delete = Button("delete-dead", "Delete all that fit", f"Delete every dead {of}?", because, is_grave=True)
    run_all = Button("run-all", "Run all that fit now", f"Let every scheduled {of} run now?", because)
    kill = Button("kill-retries", "Kill all that fit", f"Let every retried {of} be dead?", because, is_grave=True)
    return {"dead": [requeue, delete], "retries": [kill], "scheduled": [run_all]}.get(given["status"], [])


def _jobs(number: int, kind: str) -> str:
    return f"the one {kind} job" if number == 1 else f"all {number:,} {kind} jobs"


@blueprint.post("/jobs/<uuid:job_id>/<any('cancel', 'force-cancel', 'run-now', 'requeue', 'delete'):verb>")
@auth.require("operate")
def change_job(job_id: UUID, verb: str) -> Response:
    """Press a button of a job; 409 where the job's present status forbids it."""
    change, text = _JOB_VERBS[verb]
    with session() as conn:
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
    with session() as conn:
        is_known = operations.known(conn, queue)["is_known"]
        (operations.pause if verb == "pause" else operations.resume)(conn, queue, auth.who())
    g.changed = {"queue": queue, "action": verb}
    unknown = "" if is_known else " No queue of this name is known now."
    return done(("The queue is paused on all hosts." if verb == "pause" else "The queue goes on.") + unknown)


@blueprint.post("/queues/<anything:queue>/limit")
@auth.require("operate")
def limit_queue(queue: str) -> Response:
    """Let the API refuse jobs of a queue from so many queued ones on; an empty field ends that."""
    queue, text = named_queue(queue), request.form.get("max_length", "").strip()
    if text and not (text.isascii() and text.isdigit() and int(text[:11]) <= INT4_MAX and len(text) < 11):
        raise Problem(400, f"The limit should be a number from 0 to {INT4_MAX:,}, or empty for any number of jobs.")
    limit = int(text) if text else None
    with session() as conn:
        is_known = operations.known(conn, queue)["is_known"]
        operations.limit_length(conn, queue, limit, auth.who())
    g.changed = {"queue": queue, "action": "limit", "max_length": limit}
    unknown = "" if is_known else " No queue of this name is known now."
    words = "Any number of jobs may be queued." if limit is None else f"The API refuses jobs from {limit:,} queued on."
    return done(words + unknown)


@blueprint.post("/queues/<anything:queue>/order")
@auth.require("operate")
def order_queue(queue: str) -> Response:
    """Change the order of a queue's jobs, on all hosts; 409 for settings that do not go together."""
    queue = named_queue(queue)
    wanted = order_of(request.form)
    with session() as conn:
        is_known = operations.known(conn, queue)["is_known"]
        present = operations.settings(conn, queue)
        changes = {name: value for name, value in wanted.items() if value != present[name]}
        try:
            operations.set_order(conn, queue, auth.who(), **changes)
        except operations.Contradiction as e:
            raise Problem(409, f"That was not done: {e}.") from None
    g.changed = {"queue": queue, "action": "order", **changes}
    unknown = "" if is_known else " No queue of this name is known now."
    return done(("The queue is changed on all hosts." if changes else "The queue is so already.") + unknown)


def order_of(form: Mapping[str, str]) -> dict[str, Any]:
    """PURE: the settings in a form, for operations.set_order; raises a 400 Problem that says what a field should be."""
    on_dead = form.get("on_dead", "")
    if on_dead not in ("continue", "hold"):
        raise Problem(400, "What a dead job does should be: continue, or hold.")
    fair_by = form.get("fair_by", "")
    if fair_by not in ("", "partition_key", "producer"):
        raise Problem(400, "The field of the turns should be: partition_key, producer, or none.")
    return {
        "ordered": "ordered" in form,
        "merge": "merge" in form,
        "merge_limit": _number(form, "merge_limit", "The most jobs of a key in one delivery"),
        "batch": _number(form, "batch", "The most keys in one call") if form.get("batch", "").strip() else None,
        "on_dead": on_dead,
        "fair_by": fair_by or None,
    }


def _number(form: Mapping[str, str], name: str, words: str) -> int:
    text = form.get(name, "").strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= 1_000):
        raise Problem(400, f"{words} should be a number from 1 to 1,000.")
    return int(text)


@blueprint.post("/queues/<anything:queue>/<any('run-all', 'kill-retries', 'requeue-dead', 'delete-dead'):verb>")
@auth.require("operate")
def change_queue(queue: str, verb: str) -> Response:
    """Press a button for many jobs of a queue; one press changes as many as it finds within ALL_SEC."""
    queue, only, after = named_queue(queue), _only(), request.args.get("after")
    change, words = _QUEUE_VERBS[verb]
    until, changed = monotonic() + ALL_SEC, 0
    with session() as conn:
        while monotonic() < until:
            some, after = _change_some(change, conn, queue, only, after)
            changed += some
            if after is None:
                break
    g.changed = {"queue": queue, "action": verb, "jobs": changed, **only}
    jobs = "1 job" if changed == 1 else f"{formats.count(changed)} jobs"
    more = queue_url(queue, verb, **only, after=after) if after else ""
    return done(f"{jobs} {words}." + (" There may be more behind these." if more else ""), more=more)


@blueprint.post("/errors/note")
@auth.require("operate")
def note_error() -> Response:
    """Keep the note of the form about an error group."""
    task, group, note = (request.form.get(name, "") for name in ("task", "error_group", "note"))
    if "\0" in task + group + note or not (task and group):
        raise Problem(400, "A note should name its task and group, and have no NUL character in it.")
    with session() as conn:
        try:
            errors.write_note(conn, task, group, note, auth.who())
        except ValueError as e:
            raise Problem(400, f"That was not done: {e}.") from None
    g.changed = {"task": task, "error_group": group, "action": "note"}
    return done("The note is kept." if note.strip() else "The note is removed.")


@blueprint.post("/schedules/<name>/<any('pause', 'resume', 'run'):verb>")
@auth.require("operate")
def change_schedule(name: str, verb: str) -> Response:
    """Press a button of a schedule; 409 where its job is not valid any more."""
    with session() as conn:
        try:
            found = _SCHEDULE_VERBS[verb](conn, name)
        except ValueError as e:
            raise Problem(409, f"That was not done: {e}.") from None
    if found is None:
        raise Problem(404, "There is no such schedule any more.")
    g.changed = {"schedule": name, "action": verb}
    return done(_SCHEDULE_WORDS[verb])


_SCHEDULE_VERBS: dict[str, Callable[[db.Connection, str], Any]] = {
    "pause": lambda conn, name: schedules.pause(conn, name, auth.who()),
    "resume": lambda conn, name: schedules.resume(conn, name),
    "run": lambda conn, name: schedules.run(conn, name, auth.who(), _settings().dl_default_lease_ttl_sec),
}
_SCHEDULE_WORDS = {
    "pause": "The schedule is paused.",
    "resume": "The schedule goes on, from now.",
    "run": "A job of the schedule is added.",
}


@blueprint.post("/backfills/<name>/<any('pause', 'resume', 'cancel', 'retry'):verb>")
@auth.require("operate")
def change_backfill(name: str, verb: str) -> Response:
    """Press a button of a backfill; 409 where what it is now forbids the change."""
    with session() as conn:
        if "\0" in name or backfills.known(conn, name) is None:
            raise Problem(404, "There is no such backfill any more.")
        try:
            text = _retry_backfill(conn, name) if verb == "retry" else _order_backfill(conn, name, verb)
        except backfills.NotNow as e:
            raise Problem(409, f"That was not done: {e}.") from None
    g.changed = {"backfill": name, "action": verb}
    return done(text)


def _order_backfill(conn: db.Connection, name: str, verb: str) -> str:
    change, text = _BACKFILL_VERBS[verb]
    change(conn, name, auth.who())
    return text


def _retry_backfill(conn: db.Connection, name: str) -> str:
    """As many as come within ALL_SEC."""
    until, total = monotonic() + ALL_SEC, 0
    after: str | None = "0"
    while after is not None and monotonic() < until:
        changed, after = backfills.retry(conn, name, auth.who(), int(after))
        total += changed
    jobs = "1 job is" if total == 1 else f"{formats.count(total)} jobs are"
    return f"{jobs} queued again." + ("" if after is None else " There are more: press again.")


_BACKFILL_VERBS: dict[str, tuple[Callable[[db.Connection, str, str], Any], str]] = {
    "pause": (backfills.pause, "The backfill is paused."),
    "resume": (backfills.resume, "The backfill goes on."),
    "cancel": (backfills.cancel, "The backfill is canceled; its jobs end within some seconds."),
}


@blueprint.post("/schedules")
@auth.require("operate")
def add_schedule() -> Response:
    """Add the schedule of the form."""
    try:
        new = new_schedule.checked(schedule_of(request.form), zones.chosen().key)
    except ValueError as e:
        raise Problem(400, f"That was not done: {e}.") from None
    with session() as conn:
        try:
            schedules.add(conn, new, auth.who())
        except schedules.Taken as e:
            raise Problem(409, f"That was not done: {e}.") from None
    g.changed = {"schedule": new["name"], "action": "add"}
    return done(f"The schedule {new['name']} is added.")


def schedule_of(form: Mapping[str, str]) -> dict[str, Any]:
    """PURE: the words of a schedule in a form, without the empty ones; raises ValueError."""
    found: dict[str, Any] = {name: text.strip() for name, text in form.items() if text.strip()}
    if "args" in found:
        found["args"] = _json_object(found["args"])
    if text := found.get("interval_sec"):
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise ValueError("interval_sec: should be a whole number of seconds")
        found["interval_sec"] = int(text)
    return found


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError('args: should be a JSON object, such as {"day": "{{ date }}"}')
    return found


def _settings() -> Settings:
    settings: Settings = current_app.extensions["settings"]
    return settings


def _only() -> dict[str, str]:
    """The filter in the address of a button. Raises a 400 Problem for any other: it would be for too many jobs."""
    given = request.args.to_dict()
    if unknown := given.keys() - {*FILTERS, "name", "after"}:
        raise Problem(400, f"A change of a queue has no filter {sorted(unknown)[0]}.")
    if "\0" in "".join(given.values()):
        raise Problem(400, "A filter should have no NUL character in it.")
    return {name: given[name] for name in FILTERS if given.get(name)}


def _change_some(
    change: Callable[..., operations.Changed], conn: db.Connection, queue: str, only: dict[str, str], after: str | None
) -> operations.Changed:
    try:
        return change(conn, queue, auth.who(), only=operations.Filter(**only), after=after)
    except ValueError as error:
        raise Problem(400, str(error)) from None
