"""The suggestions of the search box, and orders to many jobs of a list: a preview in a dialog, then the progress."""

from __future__ import annotations

import json
from collections.abc import Mapping
from time import monotonic
from typing import Any

from flask import Blueprint, Response, g, render_template, request

from dataloader import ops
from dataloader.api.dashboard.actions import ALL_SEC
from dataloader.api.dashboard.render import failed
from dataloader.api.v1.requests import Body
from dataloader.api.web import auth, json_body
from dataloader.api.web.endpoint import session
from dataloader.api.web.problems import Problem
from dataloader.ops.jobs import Filters
from dataloader.queue.reports import bulk, stats, tallies
from dataloader.queue.reports.search import LENGTH

blueprint = Blueprint("bulk_orders", __name__)
blueprint.register_error_handler(Exception, failed)
# The button of each order, what becomes of the jobs, and whether it destroys work or data.
ORDERS = {
    "requeue": ("Requeue", "queued again", False),
    "run-now": ("Run now", "due now", False),
    "cancel": ("Cancel", "cancelled, or asked to stop", True),
    "delete": ("Delete", "deleted, with their journals", True),
}


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
        texts = tallies.suggest(conn, text) if len(text) <= LENGTH and "\0" not in text else []
    return _part("suggestions.html", suggestions=texts)


@blueprint.post("/jobs/bulk/preview")
@auth.require("operate")
def preview_order() -> Response:
    """The preview says what an order would do, and has the button that gives the order."""
    body = _read("preview", request.form)
    try:
        with session() as conn:
            preview = bulk.preview(conn, body.order, bulk.target(body.matching, body.job_ids))
    except ValueError as e:
        raise Problem(400, f"That was not done: {e}.") from None
    return _part("preview.html", preview=preview, target=request.form["target"], **_words(body.order))


@blueprint.post("/jobs/bulk")
@auth.require("operate")
def order_jobs() -> Response:
    """Change jobs of a preview for up to ALL_SEC; the answer goes on by itself until all are."""
    form = request.form
    body = _read("order_jobs", form)
    so_far, count = _number(form, "changed"), _number(form, "count")
    until, after, changed = monotonic() + ALL_SEC, body.after, 0
    try:
        target = bulk.target(body.matching, body.job_ids)
        with session() as conn:
            while True:
                step = bulk.change(conn, body.order, target, body.confirmation, auth.who(), after)
                changed, after = changed + step.changed, step.next
                if after is None or monotonic() > until:
                    break
    except bulk.Grown as e:
        raise Problem(409, f"That was not done: {e}.") from None
    except ValueError as e:
        raise Problem(400, f"That was not done: {e}.") from None
    g.changed = {"action": body.order, "jobs": changed}
    context = {"changed": so_far + changed, "count": count, "after": after, "form": form, "order": body.order}
    response = _part("progress.html", **context, **_words(body.order))
    if after is None:
        response.headers["HX-Trigger"] = "refresh"
    return response


def _words(order: str) -> dict[str, Any]:
    label, done, is_grave = ORDERS.get(order, (order.capitalize(), "changed", False))
    return {"label": label, "done": done, "is_grave": is_grave}


def _read(name: str, form: Mapping[str, str]) -> Any:
    """The form as the body of the operation of this name; raises a 400 Problem."""
    try:
        target = json.loads(form.get("target", ""))
    except (ValueError, RecursionError):
        target = None
    if not isinstance(target, dict):
        raise Problem(400, "An order should name its jobs: tick some, or select all that match.")
    fields = {name: form[name] for name in ("order", "confirmation", "after") if form.get(name)}
    op = ops.load()[name]
    return json_body.validated(op.model(op.parameters, Body, "Body"), {**target, **fields})


def _number(form: Mapping[str, str], name: str) -> int:
    text = form.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise Problem(400, f"{name} should be a number.")
    return int(text)


def _part(template: str, **data: Any) -> Response:
    return Response(render_template(template, **data), mimetype="text/html")
