"""/api/v1: the status of a job, the view that is written by hand: it has an ETag, and may wait for a change."""

from __future__ import annotations

import re
from typing import Annotated, Any
from uuid import UUID

from flask import Blueprint, Response, current_app, jsonify, request
from pydantic import BeforeValidator, Field

from dataloader.api.web import auth
from dataloader.api.web.endpoint import job_id as parsed_job_id
from dataloader.api.web.endpoint import operation, session
from dataloader.api.web.long_poll import LongPolls, Outcome
from dataloader.api.web.problems import retry_after
from dataloader.model.jobs import Status
from dataloader.ops.errors import Unknown, invalid
from dataloader.ops.op import Texts
from dataloader.ops.types import whole_number
from dataloader.queue import lifecycle
from dataloader.queue.job import FINAL

WAIT_LIMIT = 30  # seconds that one request may wait for a job to change
_SECONDS = re.compile("[0-9]{1,2}")
blueprint = Blueprint("v1", __name__, url_prefix="/api/v1")


class StatusQuery(Texts):
    """GET /api/v1/jobs/{job_id}/status, which ignores all others."""

    wait: Annotated[int, Field(ge=0, le=WAIT_LIMIT), BeforeValidator(whole_number)] | None = Field(
        default=None,
        description="for how many seconds to wait until the job is another than `If-None-Match` says, or, without that,"
        " until it has changed",
    )


@blueprint.get("/jobs/<anything:job_id>/status")
@auth.require("read", "trigger")
@operation("jobs", Status, query=StatusQuery, headers=("If-None-Match",), errors=(304,))
def status(job_id: str) -> Response:
    """The job as it is now, or with `wait` once it has changed; 404 when there is none.

    With `If-None-Match` the wait ends when the job has another `ETag`, at once if it has one already; without it when
    the job changes, at once if it has ended. `Retry-After` says that too many wait already, and this request did not.
    """
    wanted, text = parsed_job_id(job_id), request.args.get("wait", "0")
    if not _SECONDS.fullmatch(text) or int(text) > WAIT_LIMIT:
        raise invalid("/wait", "wait", f"wait should be a whole number of seconds from 0 to {WAIT_LIMIT}")
    job, version = _versioned(wanted)
    outcome = None
    if int(text) and (_is_known(version) if request.if_none_match else job["status"] not in FINAL):
        polls: LongPolls = current_app.extensions["long_polls"]
        outcome = polls.wait(wanted, version, int(text))
        if outcome is Outcome.CHANGED:
            job, version = _versioned(wanted)
    answer = Response(status=304) if _is_known(version) else jsonify(job)
    answer.set_etag(version, weak=True)
    if outcome is Outcome.FULL:
        answer.headers["Retry-After"] = retry_after()
    return answer


def _versioned(job_id: UUID) -> tuple[dict[str, Any], str]:
    with session() as conn:
        if (found := lifecycle.versioned_status(conn, job_id)) is None:
            raise Unknown("job")
        return found


def _is_known(version: str) -> bool:
    """True when the client has this version, by its If-None-Match."""
    return request.if_none_match.contains_weak(version)
