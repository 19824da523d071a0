"""PURE: a job's fields, declared once: the columns of dl_jobs. tests/unit/test_fields.py names places that differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

REQUIRED = ...  # no default: a producer has to name the field
INT4_MAX = 2_147_483_647
MONTH_SEC = 30 * 86_400
ATTEMPTS = 5  # of a job whose producer and pipeline set none; the same in SQL
# The documents that show a field. `status` is also in the job's page, which shows all but the queue's own business.
EVERYWHERE = frozenset({"status", "list"})
STATUS = frozenset({"status"})
LIST = frozenset({"list", "page"})
PAGE = frozenset({"page"})
NOWHERE: frozenset[str] = frozenset()
INTERNAL_TASK = "alert.webhook"  # the farm alone adds jobs of it; the trigger dl_jobs_internal_ins refuses all others
LIMITS_MOST = 8  # of one job
LIMIT_NAME = 100  # characters of a limit's name


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a job, and the column of dl_jobs of the same name; `type` is the column's.

    `least` and `most` bound a text's characters, a number, or a list's names. `by` sets it: producer, API or queue.
    """

    name: str
    type: str
    text: str
    seen: frozenset[str]
    by: str = "queue"
    default: Any = None
    least: int | None = None
    most: int | None = None


def _given(name: str, type: str, shown_in: frozenset[str], text: str, default: Any, *bounds: int | None) -> Field:
    return Field(name, type, text, shown_in, "producer", default, *bounds)


_AFFINITY = "names the heavy resource that the job needs; default: as the pipeline says, or none"
_LIMITS = "the limits of the fleet that its runs count for; default: as the pipeline says, or none"
_ATTEMPTS = "how many runs it may have; default: as the pipeline says, or 5"
_TIMEOUT = "how long one run may take; default: what the pipeline says"
FIELDS = (
    _given("queue", "text", EVERYWHERE, "the queue, whose workers run the job", REQUIRED, 1, 128),
    _given("task", "text", EVERYWHERE, "the pipeline's name", REQUIRED, 1, 200),
    _given("lock_key", "text", EVERYWHERE, "jobs of one key never run at the same time", REQUIRED, 1, 512),
    _given("args", "jsonb", PAGE, "the pipeline's arguments, a JSON object", {}),
    _given("idempotency_key", "text", PAGE, "the same key, the same job, however often it is triggered", None, 1, 255),
    _given("partition_key", "text", EVERYWHERE, "stored, shown and filtered by", "", None, 255),
    _given("priority", "int", EVERYWHERE, "the lower runs first; default: 100", 100, 0, INT4_MAX),
    _given("available_at", "timestamptz", EVERYWHERE, "not before then; default: now", None),
    _given("max_attempts", "int", EVERYWHERE, _ATTEMPTS, None, 1, INT4_MAX),
    _given("lease_ttl_sec", "int", PAGE, "for how long a silent worker keeps the job", 60, 1, 86_400),
    _given("timeout_sec", "int", STATUS, _TIMEOUT, None, 1, MONTH_SEC),
    _given("score", "float8", EVERYWHERE, "place among the jobs of its key in an ordered queue; default: now", None),
    _given("producer", "text", EVERYWHERE, "the program that asks for the job; stored and shown", None, None, 255),
    _given("consumer_group", "text", EVERYWHERE, "stored, shown and filtered by", None, None, 255),
    _given("affinity_key", "text", EVERYWHERE, _AFFINITY, None, 1, 200),
    _given("limits", "text[]", EVERYWHERE, _LIMITS, None, None, LIMITS_MOST),
    _given(
        "deadline", "timestamptz", EVERYWHERE, "when the job should have ended: of its priority it goes before", None
    ),
    Field("trace", "text", "the W3C traceparent of the job's trigger", PAGE, "api"),
    Field("job_id", "uuid", "the job's id", EVERYWHERE),
    Field("status", "dl_status", "one of job.Status", EVERYWHERE),
    Field("attempt", "int", "the runs that count", EVERYWHERE),
    Field("cancel_requested", "boolean", "a cancellation was asked for", EVERYWHERE),
    Field("cancel_forced", "boolean", "the cancellation does not wait for a safe point", PAGE),
    Field("progress", "jsonb", "what the pipeline last reported", EVERYWHERE),
    Field("error", "text", "the last error", EVERYWHERE),
    Field("error_group", "text", "the last error without what differs from job to job", NOWHERE),
    Field("created_at", "timestamptz", "when the job was added", EVERYWHERE),
    Field("started_at", "timestamptz", "the first start, over all attempts", EVERYWHERE),
    Field("heartbeat_at", "timestamptz", "the last sign of life of the run", EVERYWHERE),
    Field("finished_at", "timestamptz", "when the job ended", EVERYWHERE),
    Field("lease_expires_at", "timestamptz", "the end of the lease", PAGE),
    Field("claimed_by", "text", "host:pid:boot of the worker that runs the job", LIST),
    Field("claims", "int", "starts, also those that were given back", PAGE),
    Field("blocked_on", "text", "why a queued row may not be claimed", LIST),
    Field("backoffs", "int", "refusals in a row of a key that no visible job holds", PAGE),
    Field("claimed_pid", "int", "the backend of that worker's session", NOWHERE),
    Field("claimed_backend_start", "timestamptz", "the start of that backend", NOWHERE),
    Field("turn_at", "timestamptz", "place among the ready jobs of the queue and priority; null: created_at", NOWHERE),
    Field("share", "text", "whose job it is, in a fair queue", NOWHERE),
    Field("journaled", "int", "steps that their writer put into the journal", NOWHERE),
)
OF_PRODUCER = tuple(field for field in FIELDS if field.by == "producer")
OF_NEW_JOB = tuple(field for field in FIELDS if field.by in ("producer", "api"))
# The fields of a job that are stored in other tables (queue/parents.py).
LINKS = ("depends_on", "on_parent_failure")
