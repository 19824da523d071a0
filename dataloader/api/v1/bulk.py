"""/api/v1/jobs/bulk: an order to all jobs of a list, or to up to 1,000 named ones, behind a preview.

The orders to named jobs without a preview, /api/v1/jobs/bulk/requeue and the like, are in jobs.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flask import Blueprint, g

from dataloader.api.v1 import requests
from dataloader.api.web import auth
from dataloader.api.web.endpoint import operation, session
from dataloader.api.web.problems import Problem, invalid
from dataloader.model.jobs import BulkChanged, Preview
from dataloader.queue import db
from dataloader.queue.reports import bulk
from dataloader.queue.reports.search import WrongSearch

blueprint = Blueprint("bulk", __name__, url_prefix="/api/v1/jobs/bulk")


@blueprint.post("/preview")
@auth.require("operate")
@operation("operate", Preview, body=requests.BulkPreview, query=requests.Query)
def preview_order(body: requests.BulkPreview) -> dict[str, Any]:
    """Count what an order would change, and what it would leave alone and why; changes nothing."""
    with _session() as conn:
        found = bulk.preview(conn, body.order, body.target).document()
    g.changed = {"action": f"preview {body.order}", "jobs": 0}
    return found


@blueprint.post("")
@auth.require("operate")
@operation("operate", BulkChanged, body=requests.BulkOrder, query=requests.Query, errors=(409,))
def order_jobs(body: requests.BulkOrder) -> dict[str, Any]:
    """Change up to 1,000 of the jobs that a preview has counted; a job that has changed since stays as it is.

    A list that has more jobs for the order than its preview had is a 409.
    """
    with _session() as conn:
        step = bulk.change(conn, body.order, body.target, body.confirmation, auth.who(), body.after)
    g.changed = {"action": body.order, "jobs": step.changed} | _named(body)
    return {"order": body.order, "changed": step.changed, "next": step.next}


def _named(body: requests.BulkPreview) -> dict[str, Any]:
    """What the audit says of the jobs."""
    if body.matching is None:
        return {"named": len(body.job_ids or ())}
    return {"matching": body.matching.model_dump(mode="json", exclude_none=True)}


@contextmanager
def _session() -> Iterator[db.Connection]:
    """A session, in which what is wrong with an order becomes a Problem."""
    try:
        with session() as conn:
            yield conn
    except WrongSearch as e:
        raise invalid("/matching/q", "search", str(e)) from None
    except bulk.WrongConfirmation as e:
        raise invalid("/confirmation", "confirmation", str(e)) from None
    except bulk.Grown as e:
        raise Problem(409, str(e)) from None
    except ValueError as e:
        raise invalid("/after", "cursor", str(e)) from None
