"""/api/v1/webhooks: the receivers of alerts. Their secrets are no part of any request or answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask import Blueprint, current_app, g

from dataloader.api.v1 import requests
from dataloader.api.web import auth
from dataloader.api.web.endpoint import operation, session
from dataloader.api.web.problems import Problem, invalid
from dataloader.model.farm import RemovedWebhook, Tested, Webhook, Webhooks
from dataloader.queue.reports import webhooks
from dataloader.queue.reports.messages import Rules

blueprint = Blueprint("webhooks", __name__, url_prefix="/api/v1/webhooks")
_change = operation(
    "alerts", Webhook, body=requests.Nothing, body_may_be_empty=True, query=requests.Query, errors=(404,)
)


@blueprint.get("")
@auth.require("operate")
@operation("alerts", Webhooks, query=requests.Query)
def list_webhooks() -> dict[str, Any]:
    """The receivers of alerts, and whether a worker serves the queue of their messages."""
    queue = _rules().queue
    with session() as conn:
        return {"queue": queue, "is_served": webhooks.is_served(conn, queue), "webhooks": webhooks.listed(conn)}


@blueprint.put("/<webhook>")
@auth.require("operate")
@operation("alerts", Webhook, body=requests.NewWebhook, query=requests.Query)
def put_webhook(webhook: str, body: requests.NewWebhook) -> dict[str, Any]:
    """Add a receiver, or change the one of this name; what the body leaves out has its default."""
    with session() as conn:
        try:
            answer = webhooks.put(conn, webhooks.Wanted(webhook, **body.model_dump()), auth.who())
        except webhooks.WrongWebhook as e:
            raise invalid("" if e.field == "name" else f"/{e.field}", "webhook", str(e)) from None
    g.changed = {"webhook": webhook}
    return answer


@blueprint.delete("/<webhook>")
@auth.require("operate")
@operation("alerts", RemovedWebhook, query=requests.Query, errors=(404,))
def remove_webhook(webhook: str) -> dict[str, Any]:
    """Remove a receiver; messages that wait for it are not sent any more."""
    with session() as conn:
        if not webhooks.remove(conn, webhook):
            raise _unknown()
    g.changed = {"webhook": webhook}
    return {"name": webhook}


@blueprint.post("/<webhook>/pause")
@auth.require("operate")
@_change
def pause_webhook(webhook: str) -> dict[str, Any]:
    """Send a receiver nothing more; what happens meanwhile is not told later."""
    return _changed(webhook, lambda conn: webhooks.pause(conn, webhook, auth.who()))


@blueprint.post("/<webhook>/resume")
@auth.require("operate")
@_change
def resume_webhook(webhook: str) -> dict[str, Any]:
    """Send a receiver messages again."""
    return _changed(webhook, lambda conn: webhooks.resume(conn, webhook))


@blueprint.post("/<webhook>/test")
@auth.require("operate")
@operation(
    "alerts",
    Tested,
    body=requests.Nothing,
    body_may_be_empty=True,
    query=requests.Query,
    errors=(404,),
    leads_to_jobs="/job_id",
)
def test_webhook(webhook: str) -> dict[str, Any]:
    """Send a receiver a test message, also while it is paused; the answer has the job that sends it."""
    with session() as conn:
        if (job_id := webhooks.send_test(conn, webhook, _rules())) is None:
            raise _unknown()
    g.changed = {"webhook": webhook, "job_id": str(job_id)}
    return {"name": webhook, "job_id": job_id}


def _changed(name: str, change: Callable[[Any], dict[str, Any] | None]) -> dict[str, Any]:
    with session() as conn:
        if (answer := change(conn)) is None:
            raise _unknown()
    g.changed = {"webhook": name}
    return answer


def _unknown() -> Problem:
    return Problem(404, "there is no webhook of this name")


def _rules() -> Rules:
    return Rules.of(current_app.extensions["settings"])
