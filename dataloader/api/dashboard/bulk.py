"""The suggestions of the search box, and orders to many jobs of a list: a preview in a dialog, then the progress."""

from __future__ import annotations

import json
from typing import Any

from flask import Blueprint, Response, g, render_template, request

from dataloader import ops
from dataloader.api.dashboard.actions import repeated
from dataloader.api.dashboard.render import failed
from dataloader.api.web import auth
from dataloader.api.web.endpoint import session
from dataloader.ops.errors import Problem, meaning
from dataloader.ops.jobs import Filters
from dataloader.queue.reports import stats, tallies
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
    found, facts = _carried_out("order_jobs")
    g.changed = {"action": found.order, "jobs": facts["changed"]}
    changed = so_far + facts["changed"]
    response = _part("progress.html", found.order, changed=changed, count=count, after=found.next, form=form)
    if found.next is None:
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
    try:
        return repeated(op, op.checked({**target, **fields}))
    except Exception as e:
        if means := meaning(e):
            raise Problem(means.status, f"That was not done: {e}.") from None
        raise


def _part(template: str, order: str, **data: Any) -> Response:
    label, done, is_grave = ORDERS.get(order, (order.capitalize(), "changed", False))
    page = render_template(template, order=order, label=label, done=done, is_grave=is_grave, **data)
    return Response(page, mimetype="text/html")
