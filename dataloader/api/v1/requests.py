"""The request models of /api/v1: the parameters behind the `?` of an address, and the JSON bodies.

The API refuses a field or parameter that is not known, given twice or out of bounds, and names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dataloader.api.web.endpoint import QUEUE_LIMIT
from dataloader.api.web.json_body import BODY_LIMIT, pointer, refusal, validated
from dataloader.api.web.json_body import document as json_document
from dataloader.api.web.problems import Fault, Problem, invalid
from dataloader.ops.types import Text, whole_number
from dataloader.queue.enqueue import Columns, NewJob
from dataloader.queue.hooks import AROUND_ENQUEUE, WrongAnswer, identity
from dataloader.queue.new_job import DEPTH_LIMIT, INT4_MAX, Trigger, columns_of, keyed
from dataloader.queue.new_job import hooked as after_hooks
from dataloader.queue.parents import Parents, fault

BATCH_JOBS = 10_000
BATCH_LIMIT = 16 * 1024 * 1024  # bytes
BATCH_DEPTH = DEPTH_LIMIT + 2  # so each job may be nested as deep as a trigger's body
KEY_LIMIT = 255
WAIT_LIMIT = 30  # seconds that one request may wait for a job to change
_SECONDS = re.compile("[0-9]{1,2}")
_KEY = re.compile(r"[ -~]{1,255}")
# W3C Trace Context: version, trace id, span id, flags; a later version may say more behind them.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?")


class Query(BaseModel):
    """The parameters of an endpoint; this one takes none."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Status(Query):
    """GET /api/v1/jobs/{job_id}/status, which ignores all others; seconds_to_wait reads it."""

    wait: Annotated[int, Field(ge=0, le=WAIT_LIMIT), BeforeValidator(whole_number)] | None = Field(
        default=None,
        description="for how many seconds to wait until the job is another than `If-None-Match` says, or, without that,"
        " until it has changed",
    )


class OfQueue(Query):
    """The body of an order to one queue."""

    name: str | None = Field(
        default=None,
        pattern=r"^(\.|\.\.|[\s\S]*/[\s\S]*)$",
        max_length=QUEUE_LIMIT,
        description="the queue, for the names that a path may not hold: `.` and `..`, which clients and proxies take"
        " out of it, and names with a slash, of which `a/pause` ends as another address does; the path has any other"
        " part in their place, such as `-`",
    )


class NamedTask(Query):
    """GET /api/v1/tasks/{task}/schema."""

    name: Literal[".", ".."] | None = Field(
        default=None, description="the task, for these two names, which clients and proxies take out of a path"
    )


class Body(BaseModel):
    """A body of which every field is known and has its type."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


class Batch(Body):
    """The body of POST /api/v1/jobs/batch, but for the jobs in it."""

    jobs: list[Any] = Field(max_length=BATCH_JOBS)
    on_done: dict[str, Any] | None = Field(
        default=None, description="one job more, the last of the answer: it starts when all of `jobs` have ended"
    )

    @property
    def group(self) -> list[Any]:
        """The jobs, with `on_done` as their child; raises a 400 Problem where that names parents itself."""
        if self.on_done is None:
            return self.jobs
        if "depends_on" in self.on_done:
            message = "on_done waits for all jobs of the list: leave its depends_on out"
            raise invalid("/on_done/depends_on", "depends_on", message)
        last = {"on_parent_failure": "run", **self.on_done, "depends_on": list(range(len(self.jobs)))}
        return [*self.jobs, last]


class Again(Body):
    """The body of POST /api/v1/jobs/{job_id}/again, which may be left out."""

    args: dict[str, Any] = Field(default_factory=dict, description="replace the job's args of these names")
    without: list[Text] = Field(default_factory=list, max_length=1_000, description="names of args to leave out")
    queue: Text | None = Field(default=None, description="null: the job's; so for the next two")
    lock_key: Text | None = None
    priority: int | None = Field(default=None, ge=0, le=INT4_MAX)
    idempotency_key: Text | None = Field(default=None, description="so that the request may be sent again")


def hooked(document: dict[str, Any], key: str | None) -> dict[str, Any]:
    """The body of a trigger after every `around_enqueue`, which sees the header Idempotency-Key (`key`) as a field.

    Raises a 400 Problem for fields that are not valid, before a hook sees them, for a job that a hook refuses, and for
    what no body may hold; a 413 Problem where the hooks have made more of it than a body may hold; WrongAnswer where
    they have made of it what JSON cannot say.
    """
    if not AROUND_ENQUEUE:
        return document
    given = document if key is None else document | {"idempotency_key": _one_key(document.get("idempotency_key"), key)}
    validated(Trigger, keyed(given))
    return json_document(_written(_after_hooks(given, ()), "job", BODY_LIMIT))


def all_hooked(jobs: list[Any]) -> list[Any]:
    """The jobs of a batch after every `around_enqueue`, as `hooked`."""
    if not AROUND_ENQUEUE:
        return jobs
    new_jobs([keyed(job) if isinstance(job, dict) else job for job in jobs], 60)
    made = [_after_hooks(job, ("jobs", number)) for number, job in enumerate(jobs)]
    checked: list[Any] = json_document(_written({"jobs": made}, "jobs", BATCH_LIMIT), BATCH_DEPTH)["jobs"]
    return checked


def _after_hooks(job: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    try:
        return after_hooks(job)
    except ValueError as e:
        raise invalid(pointer(path), "refused", str(e)) from None


def _written(document: dict[str, Any], noun: str, limit: int) -> bytes:
    """The document at its shortest, so that a valid body that no hook has changed is not too large."""
    try:
        # A lone surrogate becomes its escape, which the guards on a body then find and name.
        raw = _JSON.encode(document).encode(errors="backslashreplace")
    except WrongAnswer:
        raise
    except (TypeError, ValueError, RecursionError):  # the text may quote the job
        raise _unsayable() from None
    if len(raw) > limit:
        raise Problem(413, f"the {noun} that the hooks have made should be at most {limit} bytes of JSON")
    return raw


def _encoded(value: object) -> str:
    """The JSON of a value that json cannot encode: a hook may return a datetime."""
    if isinstance(value, datetime):
        return value.isoformat()
    raise _unsayable(f", not {type(value).__name__}")


def _unsayable(but: str = "") -> WrongAnswer:
    return WrongAnswer(" or ".join(map(identity, AROUND_ENQUEUE)), f"what JSON can say{but}")


_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_encoded)


def new_job(trigger: Trigger, lease_ttl_sec: int, key: str | None = None, traceparent: str | None = None) -> NewJob:
    """The job that a trigger's body asks for; `lease_ttl_sec` (seconds) counts where the body names none.

    `key` and `traceparent` are the headers Idempotency-Key and traceparent. Raises a 400 Problem for a key that is not
    valid, or another one than the body's.
    """
    given = {name: getattr(trigger, name) for name in trigger.model_fields_set}
    _require_sound([given.get("depends_on")], 1, "/depends_on")
    if not AROUND_ENQUEUE:  # otherwise `hooked` has seen to the header, and a hook may have replaced the key
        given["idempotency_key"] = _one_key(given.get("idempotency_key"), key)
    return NewJob(**{"lease_ttl_sec": lease_ttl_sec, **given, "trace": trace(traceparent)})


def _one_key(in_body: str | None, in_header: str | None) -> str | None:
    if in_header is None:
        return in_body
    if not _KEY.fullmatch(in_header):
        message = f"Idempotency-Key should be 1 to {KEY_LIMIT} printable ASCII characters"
        raise invalid("/idempotency_key", "idempotency_key", message)
    if in_body not in (None, in_header):
        message = "the header Idempotency-Key and the field idempotency_key should be the same, or one be left out"
        raise invalid("/idempotency_key", "idempotency_key", message)
    return in_header


def trace(traceparent: str | None) -> str | None:
    """The W3C traceparent where it is valid, else None: an invalid one is ignored, not refused."""
    match = _TRACEPARENT.fullmatch(traceparent or "")
    if match is None or (match["more"] and match[0].startswith("00")):
        return None
    return match[0][:55]


def new_jobs(jobs: list[Any], lease_ttl_sec: int) -> Columns:
    """The jobs of a batch; `lease_ttl_sec` (seconds) counts for those that name none.

    Raises a 400 Problem that names every field that is not valid (at most FAULTS_SHOWN), and a 413 Problem for `args`
    that would be too large for a trigger.
    """
    try:
        columns = columns_of(jobs, lease_ttl_sec)
    except ValidationError as e:
        raise refusal(e, Trigger, "field", ("jobs",)) from None
    _require_sound(columns["depends_on"], len(columns["args"]), "/jobs")
    for number, args in enumerate(columns["args"]):
        if len(args) > BODY_LIMIT // 4 and len(args.encode()) > BODY_LIMIT:
            message = f"args should be at most {BODY_LIMIT} bytes of JSON"
            raise Problem(413, message, [Fault(f"/jobs/{number}/args", "too_large", message)])
    return columns


def _require_sound(depends_on: Sequence[Parents | None], count: int, place: str) -> None:
    if wrong := fault(depends_on, count):
        raise invalid(place, "depends_on", wrong)


def seconds_to_wait(text: str | None) -> int:
    """The seconds of `?wait=`, 0 without it; raises a 400 Problem for any other text."""
    if text is None:
        return 0
    if not _SECONDS.fullmatch(text) or int(text) > WAIT_LIMIT:
        raise invalid("/wait", "wait", f"wait should be a whole number of seconds from 0 to {WAIT_LIMIT}")
    return int(text)
