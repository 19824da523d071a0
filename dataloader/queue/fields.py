"""PURE: a job's fields, declared once: what a producer gives (NewJob), and the columns of dl_jobs (FIELDS).

Statements and functions in SQL (field_sql.py), checks, options and the client's fields follow. A new field also needs
its column in sql/schema.sql, a parameter of new_job.enqueue, a line in model/jobs.py where it is shown, and one each in
`stats.Wanted` and ops/jobs.py where lists are filtered by it. tests/unit/test_fields.py names places that differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import datetime
from typing import Annotated, Any, get_type_hints
from uuid import UUID

REQUIRED = ...  # no default: a producer has to name the field
INT4_MAX = 2_147_483_647
MONTH_SEC = 30 * 86_400
ATTEMPTS = 5  # of a job whose producer and pipeline set none; the same in SQL
# The documents that show a field. `status` is also in the job's page, which shows all but the queue's own business.
EVERYWHERE = frozenset({"status", "list"})
FILTERED = EVERYWHERE | {"filter"}  # lists can be filtered by it, too
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


def _given(type: str, shown_in: frozenset[str], text: str, least: int | None = None, most: int | None = None) -> Field:
    return Field("", type, text, shown_in, "producer", None, least, most)


_PRODUCER = "the program that asks for the job; stored and shown"
_IDEMPOTENCY = "the same key, the same job, however often it is triggered"
_SCORE = "place among the jobs of its key in an ordered queue; default: now"
_DEADLINE = "when the job should have ended: of its priority it goes before"
_AFFINITY = "names the heavy resource that the job needs; default: as the pipeline says, or none"
_LIMITS = "the limits of the fleet that its runs count for; default: as the pipeline says, or none"
_ATTEMPTS = "how many runs it may have; default: as the pipeline says, or 5"
_TIMEOUT = "how long one run may take; default: what the pipeline says"


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job as its producer asks for it.

    None leaves a field to its default or to the pipeline; `limits` [] is none. A `lock_key` "" leaves it to a hook
    (`around_enqueue`). The job starts when the jobs `depends_on` have ended; `on_parent_failure` is of job.ON_FAILURE.
    """

    queue: Annotated[str, _given("text", FILTERED, "the queue, whose workers run the job", 1, 128)]
    task: Annotated[str, _given("text", FILTERED, "the pipeline's name", 1, 200)]
    lock_key: Annotated[str, _given("text", FILTERED, "jobs of one key never run at the same time", 1, 512)]
    args: Annotated[Mapping[str, Any], _given("jsonb", PAGE, "the pipeline's arguments, a JSON object")] = field(
        default_factory=dict
    )
    idempotency_key: Annotated[str | None, _given("text", PAGE, _IDEMPOTENCY, 1, 255)] = None
    partition_key: Annotated[str, _given("text", FILTERED, "stored, shown and filtered by", None, 255)] = ""
    priority: Annotated[int, _given("int", EVERYWHERE, "the lower runs first; default: 100", 0, INT4_MAX)] = 100
    available_at: Annotated[datetime | None, _given("timestamptz", EVERYWHERE, "not before then; default: now")] = None
    max_attempts: Annotated[int | None, _given("int", EVERYWHERE, _ATTEMPTS, 1, INT4_MAX)] = None
    lease_ttl_sec: Annotated[int, _given("int", PAGE, "for how long a silent worker keeps the job", 1, 86_400)] = 60
    timeout_sec: Annotated[int | None, _given("int", STATUS, _TIMEOUT, 1, MONTH_SEC)] = None
    score: Annotated[float | None, _given("float8", EVERYWHERE, _SCORE)] = None
    producer: Annotated[str | None, _given("text", FILTERED, _PRODUCER, None, 255)] = None
    consumer_group: Annotated[str | None, _given("text", FILTERED, "stored, shown and filtered by", None, 255)] = None
    affinity_key: Annotated[str | None, _given("text", EVERYWHERE, _AFFINITY, 1, 200)] = None
    limits: Annotated[Sequence[str] | None, _given("text[]", EVERYWHERE, _LIMITS, None, LIMITS_MOST)] = None
    deadline: Annotated[datetime | None, _given("timestamptz", EVERYWHERE, _DEADLINE)] = None
    trace: Annotated[str | None, Field("", "text", "the W3C traceparent of the job's trigger", PAGE, "api")] = None
    depends_on: Sequence[UUID | int] | None = None
    on_parent_failure: str = "cancel"


def _of_new_job() -> tuple[Field, ...]:
    """The fields that NewJob declares, with their names and defaults."""
    hints = get_type_hints(NewJob, include_extras=True)
    found = []
    for each in fields(NewJob):
        for declared in getattr(hints[each.name], "__metadata__", ()):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            found.append(replace(declared, name=each.name, default=REQUIRED if default is MISSING else default))
    return tuple(found)


OF_NEW_JOB = _of_new_job()
OF_PRODUCER = tuple(each for each in OF_NEW_JOB if each.by == "producer")
FIELDS = (
    *OF_NEW_JOB,
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
FILTERS = tuple(each.name for each in FIELDS if "filter" in each.seen)
# The fields of a job that are stored in other tables (queue/parents.py).
LINKS = ("depends_on", "on_parent_failure")
