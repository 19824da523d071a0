"""/api/v1/jobs beside the contract: lists, one job with its journal, and what operators do to jobs.

Each view borrows a session and makes one call of `stats`, `operations` or `lifecycle`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import UUID

from flask import Blueprint, Response, g, jsonify

from dataloader.api.v1 import requests
from dataloader.api.web import auth
from dataloader.api.web.endpoint import found, operation, paged, session
from dataloader.api.web.problems import Problem, invalid
from dataloader.model.jobs import (
    BulkOutcomes,
    Deleted,
    Family,
    Job,
    JobEvents,
    JobLogs,
    Jobs,
    Result,
    Status,
)
from dataloader.queue import lifecycle, logs, operations, parents
from dataloader.queue.reports import stats
from dataloader.queue.reports.search import WrongSearch

blueprint = Blueprint("jobs", __name__, url_prefix="/api/v1")
_operate = operation(
    "operate", Status, body=requests.Nothing, body_may_be_empty=True, query=requests.Query, errors=(409,)
)


@blueprint.get("/jobs")
@auth.require("read")
@operation(
    "jobs",
    Jobs,
    query=requests.Jobs,
    leads_to_jobs="/jobs/0/job_id",
    is_paged=True,
)
def list_jobs(query: requests.Jobs) -> dict[str, Any]:
    """List jobs, the newest change first (or by key), page by page, filtered."""
    wanted = stats.Wanted(**query.model_dump(exclude={"limit", "after"}))
    with session() as conn:
        try:
            page = stats.jobs(conn, wanted, query.limit, query.after)
        except stats.TooMany as e:
            raise invalid("/sort", "too_many", str(e)) from None
        except WrongSearch as e:
            raise invalid("/q", "search", str(e)) from None
        except ValueError as e:
            raise invalid("/after", "cursor", str(e)) from None
    return {"jobs": page.jobs, "next": page.next, "advice": page.advice}


@blueprint.get("/jobs/<job:job_id>")
@auth.require("read")
@operation("jobs", Job, query=requests.Query)
def get_job(job_id: UUID) -> dict[str, Any]:
    """One job with all that is known of it."""
    with session() as conn:
        return found(stats.job(conn, job_id))


@blueprint.get("/jobs/<anything:job_id>/result")
@auth.require("read", "trigger")
@operation("jobs", Result, query=requests.Query)
def job_result(job_id: UUID) -> dict[str, Any]:
    """The value that the job's pipeline has returned; null before the job has succeeded, or where the value is None."""
    with session() as conn:
        return found(stats.result(conn, job_id))


@blueprint.get("/jobs/<anything:job_id>/family")
@auth.require("read")
@operation("jobs", Family, query=requests.Query)
def job_family(job_id: UUID) -> dict[str, Any]:
    """The jobs that this one waits for, or has waited for, and those that wait for this one: the first 50 of each."""
    with session() as conn:
        found(lifecycle.status(conn, job_id))
        return dict(parents.family(conn, job_id))


@blueprint.get("/jobs/<anything:job_id>/events")
@auth.require("read")
@operation("jobs", JobEvents, query=requests.JobEvents)
def job_events(job_id: UUID, query: requests.JobEvents) -> Response:
    """The journal of one job, the oldest first."""
    with session() as conn:
        rows = stats.events(conn, job_id, query.after or 0, query.limit)
        if not rows:
            found(lifecycle.status(conn, job_id))
    following = rows[-1]["event_id"] if len(rows) == query.limit else None
    return paged({"events": rows, "next": following}, following)


@blueprint.get("/jobs/<anything:job_id>/logs")
@auth.require("read")
@operation("jobs", JobLogs, query=requests.JobLogs)
def job_logs(job_id: UUID, query: requests.JobLogs) -> Response:
    """What the runs of one job have written, line by line, the oldest first."""
    with session() as conn:
        try:
            page = logs.page(conn, job_id, query.after, query.attempt, query.limit)
        except ValueError as e:
            raise invalid("/after", "cursor", str(e)) from None
        if not page.lines:
            found(lifecycle.status(conn, job_id))
    return paged({"lines": page.lines, "next": page.next}, page.next)


@blueprint.post("/jobs/<anything:job_id>/requeue")
@auth.require("operate")
@_operate
def requeue_job(job_id: UUID) -> dict[str, Any]:
    """Queue a job that has ended again, with a fresh budget of attempts."""
    return _operated(job_id, operations.requeue, "only a job that has ended can be requeued")


@blueprint.post("/jobs/<anything:job_id>/run-now")
@auth.require("operate")
@_operate
def run_job_now(job_id: UUID) -> dict[str, Any]:
    """Make a queued job due whose time has not come."""
    return _operated(job_id, operations.run_now, "only a queued job can be made due")


@blueprint.delete("/jobs/<job:job_id>")
@auth.require("operate")
@operation("operate", Deleted, query=requests.Query, errors=(409,))
def delete_job(job_id: UUID) -> dict[str, Any]:
    """Delete a job that is not running, and its journal."""
    with session() as conn:
        outcome = operations.delete(conn, [job_id], auth.who())[job_id]
    _check(outcome, "a running job cannot be deleted: cancel it first")
    g.changed = {"job_id": str(job_id)}
    return {"job_id": job_id, "deleted": True}


@blueprint.post("/jobs/bulk/cancel")
@auth.require("trigger", "operate")
@operation("operate", BulkOutcomes, body=requests.BulkCancel, query=requests.Query)
def cancel_jobs(body: requests.BulkCancel) -> Response:
    """Cancel up to 1,000 jobs."""
    return _bulk(body.ids, partial(operations.cancel, force=body.force))


@blueprint.post("/jobs/bulk/requeue")
@auth.require("operate")
@operation("operate", BulkOutcomes, body=requests.Bulk, query=requests.Query)
def requeue_jobs(body: requests.Bulk) -> Response:
    """Requeue up to 1,000 jobs that have ended."""
    return _bulk(body.ids, operations.requeue)


@blueprint.post("/jobs/bulk/start-over")
@auth.require("operate")
@operation("operate", BulkOutcomes, body=requests.Bulk, query=requests.Query)
def start_jobs_over(body: requests.Bulk) -> Response:
    """Requeue up to 1,000 jobs that have ended, which begin at the start and not at their checkpoints."""
    return _bulk(body.ids, operations.start_over)


@blueprint.post("/jobs/bulk/run-now")
@auth.require("operate")
@operation("operate", BulkOutcomes, body=requests.Bulk, query=requests.Query)
def run_jobs_now(body: requests.Bulk) -> Response:
    """Make up to 1,000 queued jobs due."""
    return _bulk(body.ids, operations.run_now)


@blueprint.post("/jobs/bulk/delete")
@auth.require("operate")
@operation("operate", BulkOutcomes, body=requests.Bulk, query=requests.Query)
def delete_jobs(body: requests.Bulk) -> Response:
    """Delete up to 1,000 jobs that are not running."""
    return _bulk(body.ids, operations.delete)


Operate = Callable[[Any, list[UUID], str], dict[UUID, str]]


def _operated(job_id: UUID, change: Operate, rule: str) -> dict[str, Any]:
    """Change one job and answer its status."""
    with session() as conn:
        _check(change(conn, [job_id], auth.who())[job_id], rule)
        return found(lifecycle.status(conn, job_id))


def _bulk(ids: list[UUID], change: Operate) -> Response:
    """Change the jobs; the answer has each outcome, in the order of the request."""
    with session() as conn:
        outcomes = change(conn, ids, auth.who())
    changed = [job_id for job_id, outcome in outcomes.items() if outcome == "done"]
    g.changed = {"jobs": len(changed)}
    if changed:
        g.changed |= {"first_job_id": str(changed[0]), "last_job_id": str(changed[-1])}
    return jsonify(jobs=[{"job_id": job_id, "outcome": outcomes[job_id]} for job_id in ids])


def _check(outcome: str, rule: str) -> None:
    if outcome == "unknown":
        found(None)
    if outcome != "done":
        raise Problem(409, f"the job is {outcome}; {rule}")
