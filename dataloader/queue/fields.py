"""PURE: a job's fields, declared once: what a producer gives (NewJob), and the columns of dl_jobs (FIELDS).

Statements and functions in SQL, checks, options and the client's fields follow: a text of sql/ names a list of fields
as {fields.NAME}, which `filled` puts in. Filters of lists follow, too, and with a line in model.jobs.Template the words
of schedules and backfills. A new field also needs its column in sql/schema.sql and a migration, a parameter of
new_job.enqueue, and a line in model/jobs.py where it is shown. tests/unit/test_fields.py names places that differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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

    `least` and `most` bound a text's characters, a number, or a list's names; `octets` bounds a text in the table, for
    the indexes: by default four times `most`. `by` sets it: producer, API or queue.
    """

    name: str
    type: str
    text: str
    seen: frozenset[str]
    by: str = "queue"
    default: Any = None
    least: int | None = None
    most: int | None = None
    octets: int | None = None


def _given(type: str, shown_in: frozenset[str], text: str, least: int | None = None, most: int | None = None) -> Field:
    octets = 4 * most if type == "text" and most else None
    return Field("", type, text, shown_in, "producer", None, least, most, octets)


_PRODUCER = "the program that asks for the job; stored and shown"
_IDEMPOTENCY = "the same key, the same job, however often it is triggered"
_SCORE = "place among the jobs of its key in an ordered queue; default: now"
_DEADLINE = "when the job should have ended: of its priority it goes before"
_AFFINITY = "names the heavy resource that the job needs; default: as the pipeline says, or none"
_LIMITS = "the limits of the fleet that its runs count for; default: as the pipeline says, or none"
_ATTEMPTS = "how many runs it may have; default: as the pipeline says, or 5"
_TRACE = "the W3C traceparent of the job's trigger"
_TIMEOUT = "how long one run may take; default: what the pipeline says"


@dataclass(slots=True)  # not frozen: such a job takes five times as long to make, a tenth of a row of enqueue_many
class NewJob:
    """A job as its producer asks for it.

    None leaves a field to its default or to the pipeline; `limits` [] is none. A `lock_key` "" leaves it to a hook
    (`around_enqueue`). The job starts when the jobs `depends_on` have ended; `on_parent_failure` is of job.ON_FAILURE.
    """

    queue: Annotated[str, _given("text", FILTERED, "the queue, whose workers run the job", 1, 128)]
    task: Annotated[str, replace(_given("text", FILTERED, "the pipeline's name", 1, 200), octets=2_000)]
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
    trace: Annotated[str | None, Field("", "text", _TRACE, PAGE, "api", octets=255)] = None
    depends_on: Sequence[UUID | int] | None = None
    on_parent_failure: str = "cancel"


def _of_new_job() -> tuple[Field, ...]:
    hints = get_type_hints(NewJob, include_extras=True)
    declarations = []
    for each in fields(NewJob):
        for declared in getattr(hints[each.name], "__metadata__", ()):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            declarations.append(replace(declared, name=each.name, default=REQUIRED if default is MISSING else default))
    return tuple(declarations)


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

# The SQL for the fields that the producer leaves out: the place, null unless the queue is ordered; the time of the
# transaction; what the task's pipeline says. All other fields are `plain`.
_INSTEAD = {
    "score": "(SELECT extract(epoch FROM clock_timestamp()) FROM dl_queues WHERE queue = %(queue)s AND ordered)",
    "available_at": "now()",
    "max_attempts": "declared.max_attempts, 5",
    "affinity_key": "dl_affinity(declared.affinity, %(args)s::jsonb)",
    "limits": "declared.limits",
}
_FIRST = {name: nth for nth, name in enumerate(("queue", "task", "args", "idempotency_key", "lock_key"))}
# A job that runs again takes all fields of the first one but these.
_ONCE = ("idempotency_key", "available_at", "score", "affinity_key", "deadline")


def filled(text: str) -> str:
    """`text` with the lists of fields in their places."""
    return re.sub(r"\{fields\.(\w+)\}", lambda match: _LISTS[match[1]], text)


def _each(text: str, fields: Iterable[Field] = OF_PRODUCER) -> str:
    """The text with each of these fields; `array` has a list of them: of values, of JSON and of lists as text."""
    texts = {"jsonb": "text", "text[]": "text"}
    return ", ".join(text.format(each, array=f"{texts.get(each.type, each.type)}[]") for each in fields)


def _value(field: Field) -> str:
    """The field's parameter in `enqueue`, and what stands for one that is not given."""
    value = f"%({field.name})s::{field.type}"
    value = f"coalesce({value}, {_INSTEAD[field.name]})" if field.name in _INSTEAD else value
    return f"nullif({value}, '{{}}')" if field.type == "text[]" else value


def _passed(field: Field) -> str:
    """The field's parameter in dl_enqueue, where null counts as left out, as one of dl_enqueue_one."""
    default = "NULL" if field.default in (REQUIRED, None) else f"'{field.default}'"
    return f"p_{field.name} => coalesce(dl_enqueue.{field.name}, {default})"


def _refusal(field: Field) -> str:
    """The bounds of a text, a number or a time in dl_enqueue."""
    value, least, most = f"dl_enqueue.{field.name}", field.least, field.most
    wrong, rule = f"{value} NOT BETWEEN {least} AND {most}", f"from {least} to {most}"
    if field.type == "timestamptz":
        wrong = f"{value} NOT BETWEEN '2000-01-01 00:00+00' AND now() + interval '3653 days'"
        rule = "from the year 2000 to ten years from now"
    elif field.type == "text":
        size = f"coalesce(length({value}), 0)" if field.default is REQUIRED else f"length({value})"
        wrong, rule = f"{size} NOT BETWEEN {least} AND {most}", f"a text of {least} to {most} characters"
        if least is None:
            wrong, rule = f"{size} > {most}", f"a text of at most {most} characters"
    elif most == INT4_MAX:
        wrong, rule = f"{value} < {least}", f"{least} or more"
    return f"WHEN {wrong} THEN '{field.name} should be {rule}'"


def _shown(row: str, fields: Iterable[Field]) -> str:
    """The fields of a row; JSON does not know all numbers."""
    number = "CASE WHEN abs({0}.{1}) < 'Infinity' THEN {0}.{1} END AS {1}"
    return ", ".join((number if each.type == "float8" else "{0}.{1}").format(row, each.name) for each in fields)


def _cut(field: Field) -> str:
    """The assignment that cuts an adopted text that is too long. A hash at the end keeps different keys different."""
    name, short = field.name, f"left({field.name}, {(field.most or 0) - 38}) || '…' || md5({field.name})"
    return f"{name} = CASE WHEN octet_length({name}) > {field.octets} THEN {short} ELSE {name} END"


def _filter(name: str) -> str:
    # Indexes of lists have the hash. The planner takes both conditions for independent, but the share of a coalesce for
    # a half: so its estimate is the hash's.
    same = f"hashtext((j).{name}) = hashtext(%({name})s) AND coalesce((j).{name} = %({name})s, false)"
    return f"(%({name})s::text IS NULL OR {same})"


_PLAIN = [each for each in OF_PRODUCER if each.name not in _INSTEAD]
_TEXTS = [each for each in OF_NEW_JOB if each.octets]
_CUT = [each for each in _TEXTS if each.most]
_REQUIRED = [each for each in OF_PRODUCER if each.default is REQUIRED]
_BOUND = [each for each in OF_PRODUCER if each.type in ("text", "int", "timestamptz") and each.name != "queue"]
_LISTS = {
    # The statements `enqueue`, `enqueue_one` and `enqueue_many`.
    "columns": _each("{0.name}", OF_NEW_JOB),
    "values": ", ".join(map(_value, OF_NEW_JOB)),
    "one": _each("p_{0.name} => %({0.name})s"),
    "many": _each("p_{0.name} => %({0.name})b::{array}"),
    # The functions dl_enqueue_one, dl_enqueue_many and dl_enqueue, which calls the first of them.
    "plain": _each("{0.name}", _PLAIN),
    "p_plain": _each("p_{0.name}", _PLAIN),
    "parameters": _each("p_{0.name} {0.type}"),
    # CREATE OR REPLACE renames no parameter, so the first ones keep the order of earlier versions.
    "p_arrays": _each("p_{0.name} {array}", sorted(OF_PRODUCER, key=lambda each: _FIRST.get(each.name, len(_FIRST)))),
    "unnested": _each(
        "unnest({{schema}}.dl_spread(p_{0.name}, size)) AS {0.name}",
        [each for each in OF_PRODUCER if each.name != "args"],
    ),
    "required": _each("{0.name} {0.type}", _REQUIRED),
    "optional": _each("{0.name} {0.type} DEFAULT NULL", [each for each in OF_PRODUCER if each not in _REQUIRED]),
    "refusals": "\n    ".join(map(_refusal, _BOUND)),
    # The bounds of texts in the table: the trigger dl_jobs_check, its function, and adopt.sql.
    "texts": _each("{0.name}", _TEXTS),
    "octets": _each("pg_catalog.octet_length(NEW.{0.name})", _TEXTS),
    "too_long": "\n    ".join(
        f"WHEN octet_length(NEW.{each.name}) > {each.octets} THEN '{each.name}'" for each in _TEXTS
    ),
    "unfit": " OR ".join(f"octet_length({each.name}) > {each.octets}" for each in _CUT),
    "cut": ", ".join(map(_cut, _CUT)),
    "given": ", ".join(map(_passed, OF_PRODUCER)),
    # The fields that answers show, and those by which lists are filtered.
    "status": _shown("j", [each for each in FIELDS if "status" in each.seen]),
    "page": _shown("j", [each for each in FIELDS if "page" in each.seen]),
    "list": _shown("(j)", [each for each in FIELDS if "list" in each.seen and each.name not in ("job_id", "error")]),
    "again": _shown("j", [each for each in OF_PRODUCER if each.name not in _ONCE]),
    "filters": " AND ".join(map(_filter, FILTERS)),
}
