"""The status of a job, and long polls: requests that wait for it to change.

A waiting request costs a thread of the server and no session: one waiting request asks the database
for all, every PERIOD_SEC.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from threading import Event, Lock
from time import monotonic
from typing import Annotated, Any
from uuid import UUID

from flask import Response, current_app, g, jsonify, request
from pydantic import BeforeValidator, ConfigDict, Field

from dataloader.api.web import auth
from dataloader.api.web.endpoint import job_id as parsed_job_id
from dataloader.api.web.endpoint import session
from dataloader.api.web.problems import retry_after
from dataloader.api.web.sessions import Sessions
from dataloader.ops.checks import validated
from dataloader.ops.errors import known
from dataloader.ops.op import Texts
from dataloader.ops.types import whole_number
from dataloader.queue import lifecycle
from dataloader.queue.job import FINAL

WAIT_LIMIT = 30  # seconds that one request may wait for a job to change
PERIOD_SEC = 0.3  # between two questions
DEFAULT_ROOM = 8  # where the number of the server's threads is not known


class Outcome(Enum):
    CHANGED = 1
    SAME = 2  # the time is over, or the service stops
    FULL = 3  # too many requests wait; this one did not


class LongPolls:
    """The waiting requests of this process."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._room = DEFAULT_ROOM
        self._waiting: dict[object, tuple[UUID, str | None]] = {}  # the job, and the token that waits for it
        self._is_over = Event()
        self._asking = Lock()
        self._asked_at = 0.0  # monotonic; when the last question began
        self._answer: Mapping[UUID, str] | Exception = {}

    def allow(self, waiting: int) -> None:
        """Let at most `waiting` requests wait at once."""
        self._room = max(1, waiting)

    def stop(self) -> None:
        """End all waits now; later waits end at once."""
        self._is_over.set()

    def wait(self, job_id: UUID, version: str, seconds: float, token: str | None = None) -> Outcome:
        """Wait up to `seconds` until the job has another version or is deleted. Raises what the database raises.

        A `token` beside others has at most three quarters of the places.
        """
        until, me = monotonic() + seconds, object()
        self._waiting[me] = job_id, token
        try:
            tokens = [each for _, each in list(self._waiting.values())]
            if len(tokens) > self._room or (token and tokens.count(token) > self._room - self._room // 4):
                return Outcome.FULL
            while (left := until - (now := monotonic())) > 0 and not self._is_over.wait(min(PERIOD_SEC, left)):
                if self._latest(since=now).get(job_id) != version:
                    return Outcome.CHANGED
            return Outcome.SAME
        finally:
            del self._waiting[me]

    def _latest(self, since: float) -> Mapping[UUID, str]:
        """The versions of all jobs that are waited for, by a question that began after `since`."""
        with self._asking:
            if self._asked_at <= since:
                self._asked_at = monotonic()
                try:
                    waiting = list(self._waiting.values())  # a copy: it changes
                    with self._sessions.borrow() as conn:
                        self._answer = lifecycle.versions(conn, {job_id for job_id, _ in waiting})
                except Exception as e:
                    self._answer = e
            if isinstance(self._answer, Exception):
                raise self._answer
            return self._answer


class StatusQuery(Texts):
    """The query of GET /api/v1/jobs/{job_id}/status, which ignores other parameters."""

    model_config = ConfigDict(extra="ignore")
    wait: Annotated[int, Field(ge=0, le=WAIT_LIMIT), BeforeValidator(whole_number)] | None = Field(
        default=None,
        description="for how many seconds to wait until the job is another than `If-None-Match` says, or, without that,"
        " until it has changed",
    )


@auth.require("read", "trigger")
def status(job_id: str) -> Response:
    """The job as it is now, or with `wait` once it has changed; 404 when there is none.

    With `If-None-Match` the wait ends when the job has another `ETag`, at once if it has one already; without it when
    the job changes, at once if it has ended. `Retry-After` says that too many wait already, and this request did not.
    """
    wanted, query = parsed_job_id(job_id), validated(StatusQuery, request.args.to_dict(), "parameter")
    job, version = _versioned(wanted)
    is_known = request.if_none_match.contains_weak
    outcome = None
    if query.wait and (is_known(version) if request.if_none_match else job["status"] not in FINAL):
        polls: LongPolls = current_app.extensions["long_polls"]
        has_others = len({token.name for token in auth.settings().dl_api_tokens}) > 1
        outcome = polls.wait(wanted, version, query.wait, g.get("token_name") if has_others else None)
        if outcome is Outcome.CHANGED:
            job, version = _versioned(wanted)
    answer = Response(status=304) if is_known(version) else jsonify(job)
    answer.set_etag(version, weak=True)
    if outcome is Outcome.FULL:
        answer.headers["Retry-After"] = retry_after()
    return answer


def _versioned(job_id: UUID) -> tuple[dict[str, Any], str]:
    with session() as conn:
        job, version = known(lifecycle.versioned_status(conn, job_id), "job")
    return job if auth.may("read") else lifecycle.without_holders(job), version
