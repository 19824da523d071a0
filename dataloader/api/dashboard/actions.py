"""The buttons and forms that change something, orders to many jobs, and the suggestions of the search box.

A button names an operation of `ops`, and its parameters. The choice of buttons is pure. The question before an
operation, its checks, the sentence of success and its errors are those of the operation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from time import monotonic
from typing import Any, NamedTuple

from flask import Blueprint, Response, g, render_template, request

from dataloader import ops
from dataloader.api.dashboard.render import action_url, chosen_zone, done
from dataloader.api.dispatch import calling
from dataloader.api.web import auth
from dataloader.api.web.endpoint import session
from dataloader.ops.errors import Problem
from dataloader.ops.jobs import ORDERED, Filters
from dataloader.ops.op import Op, Parameter, may_be_none, plain_type
from dataloader.queue.reports import stats, tallies
from dataloader.queue.reports.search import LENGTH
from dataloader.queue.reports.words import count, figure

blueprint = Blueprint("actions", __name__)
ALL_SEC = 1.5  # for a button that changes a whole queue

# The button of each order, and whether it destroys work or data.
ORDERS = {"requeue": ("Requeue", False), "run-now": ("Run now", False), "cancel": ("Cancel", True)}
ORDERS["delete"] = ("Delete", True)


class Button(NamedTuple):
    """One action: its operation, its label, the question before it, and parameters that it has by itself."""

    name: str
    label: str
    question: str = ""
    because: str = ""  # the reason why it is disabled; "": it is not
    is_grave: bool = False  # it destroys work or data
    given: Mapping[str, str] = {}


def _button(name: str, label: str, because: str = "", jobs: str = "", *, is_grave: bool = False) -> Button:
    """The button of an operation, whose question may speak of `{jobs}`."""
    return Button(name, label, ops.load()[name].question.format(jobs=jobs), because, is_grave)


def job_buttons(job: Mapping[str, Any], is_stuck: bool = False) -> list[Button]:
    """The buttons for a job in this state, the most likely one first; one without effect is disabled and says why."""
    if job["status"] not in ("queued", "running"):
        asked = "Run this job again? It has succeeded; it will do its work once more, with a fresh budget of attempts."
        requeue = Button("requeue", "Requeue", asked if job["status"] == "succeeded" else "")
        return [requeue, _button("delete", "Delete", is_grave=True)]
    because = "It has been asked to stop, and will at its next safe point." if job["cancel_requested"] else ""
    if job["status"] == "queued":
        waits = (job.get("waiting_for") or {}).get("reason")
        is_held = waits in ("time", "session") or job.get("blocked_on") in ("time", "parent")
        question = "Cancel this job? It has not started and never will."
        return [
            Button("run_now", "Run now", because="" if is_held else "It is already due."),
            Button("cancel", "Cancel", question, because, is_grave=True),
            _button("delete", "Delete", is_grave=True),
        ]
    question = "Cancel this job? It stops at its next safe point; what it has written stays."
    by_force = (
        "Force this job to stop? It is interrupted where it stands, and its process killed where that does not help."
    )
    forced = "Its end is being forced already." if job.get("cancel_forced") else ""
    if is_stuck and because:
        because = "It has been asked to stop, and reaches no safe point: cancel it by force."
    cancels = [
        Button("cancel", "Cancel", question, because, is_grave=True),
        Button("cancel", "Force cancel", by_force, forced, is_grave=True, given={"force": "yes"}),
    ]
    return [
        *(reversed(cancels) if is_stuck else cancels),
        _button("delete", "Delete", "A running job cannot be deleted. Cancel it first.", is_grave=True),
    ]


def queue_buttons(queue: Mapping[str, Any]) -> list[Button]:
    dead, scheduled, retried = (figure(queue[name], queue["counted_at"]) for name in ("dead", "scheduled", "retries"))
    none_dead = "" if queue["dead"] else "No job of this queue is dead."
    none_scheduled = "" if queue["scheduled"] else "No job of this queue waits for its time."
    none_retried = "" if queue["retries"] else "No job of this queue waits for a retry."
    retries = "the one job that waits" if retried == "1" else f"all {retried} jobs that wait"
    return [
        _button("resume", "Resume") if queue["paused_at"] else _button("pause", "Pause"),
        _button("run_all", "Run all now", none_scheduled, _jobs(scheduled, "scheduled")),
        _button("kill_retries", "Kill all retries", none_retried, f"{retries} for a retry", is_grave=True),
        _button("requeue_dead", "Requeue all dead", none_dead, _jobs(dead, "dead")),
        _button("delete_dead", "Delete all dead", none_dead, _jobs(dead, "dead"), is_grave=True),
    ]


def schedule_buttons(schedule: Mapping[str, Any]) -> list[Button]:
    pause = _button("resume_schedule", "Resume") if schedule["paused_at"] else _button("pause_schedule", "Pause")
    return [pause, _button("run_schedule", "Run now"), _button("remove_schedule", "Remove", is_grave=True)]


def error_buttons(group: Mapping[str, Any], is_cut: bool) -> list[Button]:
    """The buttons of an error group, for its dead jobs, of which there may be more than were counted."""
    dead = f"{_jobs(count(group['dead'], not is_cut), 'dead')} of this group"
    because = "" if group["dead"] else "No job of this group is dead: those that retry have attempts left."
    return [
        _button("requeue_dead", "Requeue these", because, dead),
        _button("delete_dead", "Delete these", because, dead, is_grave=True),
    ]


def backfill_buttons(backfill: Mapping[str, Any]) -> list[Button]:
    dead = backfill["counts"]["failed"] + backfill["counts"]["lost"]
    over = {"done": "It is done.", "canceled": "It is canceled."}.get(backfill["state"], "")
    is_paused = backfill["paused_at"] and not over
    return [
        _button("resume_backfill", "Resume") if is_paused else _button("pause_backfill", "Pause", over),
        _button("retry_backfill", "Retry failed", "" if dead else "No job of it is dead.", _jobs(count(dead), "dead")),
        _button("cancel_backfill", "Cancel", over, is_grave=True),
    ]


def _jobs(number: str, kind: str) -> str:
    return f"the one {kind} job" if number == "1" else f"all {number} {kind} jobs"


@blueprint.post("/do/<name>")
@auth.require("operate")
def carry_out(name: str) -> Response:
    """Carry out the operation of a button or a form; one that has more steps goes on for ALL_SEC."""
    texts = _changed_texts()
    op = ops.load().get(name)
    if op is None or not op.is_change or "operate" not in op.scope:
        raise Problem(404, "There is no such action.")
    given = _checked(op, texts)
    answer, facts = repeated(op, given)
    after = facts.get("next") if "after" in op.parameters else None  # a schedule's `next` are its due times
    g.changed = texts | {"action": name} | ({"jobs": facts["changed"]} if "changed" in facts else {})
    sentence = op.sentence(answer, given | facts | {"flags": ""}, _shown) or f"{facts['name']}: done"
    sentence += "" if facts.get("is_known", True) else ". No queue of this name is known now"
    more = action_url(name, **texts | {"after": after}) if after else ""
    sentence += ". There may be more behind these." if more else "."
    return done(sentence, is_gone=name == "delete", more=more)


def repeated(op: Op, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Carry out an operation, for ALL_SEC where it has more steps; the last answer, and its fields with the sum."""
    until, changed = monotonic() + ALL_SEC, 0
    # The zone of the page is that of a schedule that names none.
    settings = auth.settings().model_copy(update={"timezone": chosen_zone().key})
    with calling(settings) as call:
        while True:
            answer = op.run(call, given)
            facts = vars(answer)
            changed += facts.get("changed", 0)
            after = facts.get("next")
            if after is None or "after" not in op.parameters or monotonic() > until:
                return answer, facts | ({"changed": changed} if "changed" in facts else {})
            given = {**given, "after": after}


def _shown(value: Any) -> str:
    if isinstance(value, datetime):
        return f"{value.astimezone(chosen_zone()):%Y-%m-%d %H:%M:%S}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _changed_texts() -> dict[str, str]:
    """The parameters of a button, and the fields of its form.

    The last of several fields of one name counts: a hidden one stands for a box that is not ticked. A field that equals
    its `was.` is left out, because the user has not changed it.
    """
    texts = {name: given[-1] for source in (request.args, request.form) for name, given in source.lists()}
    return {
        name: text for name, text in texts.items() if not name.startswith("was.") and texts.get(f"was.{name}") != text
    }


def _checked(op: Op, texts: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of an operation in these texts; raises a 400 Problem, whose sentence says what is wrong."""
    given = {name: _value(op.parameters.get(name), text) for name, text in texts.items()}
    given = {name: value for name, value in given.items() if value is not ...}
    try:
        return op.checked(given, is_text=True)
    except Problem as e:
        wrong = "; ".join(f"{fault.pointer[1:]}: {fault.message}" for fault in e.faults)
        raise Problem(e.status, f"That was not done: {wrong}.", e.faults) from None


def _value(parameter: Parameter | None, text: str) -> Any:
    """The value in a text of a form: an empty one is null, or leaves the parameter out (...), where it may."""
    if parameter is None:
        return text
    if not text.strip() and may_be_none(parameter.annotation):
        return None
    if not text.strip() and not parameter.is_required:
        return ...
    if getattr(plain_type(parameter.annotation), "__origin__", None) is dict:
        with suppress(ValueError, RecursionError):
            text = json.loads(text)
        if not isinstance(text, dict):
            raise Problem(400, f"That was not done: {parameter.name} should be a JSON object.")
    return text


def matching(wanted: stats.Wanted) -> str:
    """The filters of a list as its page holds them for an order; "" where there is none."""
    given = {name: getattr(wanted, name) for name in Filters.__annotations__}
    target = {name: value if isinstance(value, str) else value.isoformat() for name, value in given.items() if value}
    return json.dumps(target) if target else ""


@blueprint.get("/search/suggestions")
@auth.require("read")
def suggestions() -> Response:
    """The options of the search box, for what is typed so far."""
    text = request.args.get("q", "")
    with session() as conn:
        texts = tallies.suggest(conn, text) if len(text) <= LENGTH else []
    return Response(render_template("suggestions.html", suggestions=texts), mimetype="text/html")


@blueprint.post("/jobs/bulk/preview")
@auth.require("operate")
def preview_order() -> Response:
    """The preview says what an order would do, and has the button that gives the order."""
    preview, _ = _carried_out("preview")
    return _part("preview.html", preview.order, preview=preview, target=request.form["target"])


@blueprint.post("/jobs/bulk")
@auth.require("operate")
def order_jobs() -> Response:
    """Change jobs of a preview for some time; the answer goes on by itself until all are."""
    form = request.form
    so_far, count = (form.get(name, type=int, default=0) for name in ("changed", "count"))
    answer, facts = _carried_out("order_jobs")
    g.changed = {"action": answer.order, "jobs": facts["changed"]}
    changed = so_far + facts["changed"]
    response = _part("progress.html", answer.order, changed=changed, count=count, after=answer.next, form=form)
    if answer.next is None:
        response.headers["HX-Trigger"] = "refresh"
    return response


def _carried_out(name: str) -> tuple[Any, dict[str, Any]]:
    """The answer of an operation to the jobs that the form names, and its fields; raises a Problem."""
    try:
        target = json.loads(request.form.get("target", ""))
    except (ValueError, RecursionError):
        target = None
    if not isinstance(target, dict):
        raise Problem(400, "An order should name its jobs: tick some, or select all that match.")
    fields = {each: text for each in ("order", "confirmation", "after") if (text := request.form.get(each))}
    op = ops.load()[name]
    return repeated(op, op.checked({**target, **fields}))


def _part(template: str, order: str, **data: Any) -> Response:
    label, is_grave = ORDERS.get(order, (order.capitalize(), False))
    page = render_template(template, label=label, done=ORDERED[order], is_grave=is_grave, **data)
    return Response(page, mimetype="text/html")
