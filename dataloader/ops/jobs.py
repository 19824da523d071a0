"""Jobs: lists of them, what is known of one, and what operators do to one, to named ones, and to those of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, Unpack
from uuid import UUID

from pydantic import Field, WithJsonSchema
from typing_extensions import TypedDict  # that of `typing` is no type for pydantic before Python 3.12

from dataloader.model import jobs as model
from dataloader.model.kinds import OrderName
from dataloader.ops import adding
from dataloader.ops.errors import NotAllowed, Unknown, invalid, known
from dataloader.ops.op import Call, Op, made
from dataloader.ops.types import BIGINT_MAX, Attempt, Cursor, Instant, JobId, PageSize, SearchText, Storable, Text
from dataloader.queue import again as of_again
from dataloader.queue import enqueue, lifecycle, operations, parents
from dataloader.queue import logs as logs_of
from dataloader.queue.fields import FILTERS, INT4_MAX
from dataloader.queue.job import GROUPS, STATUSES
from dataloader.queue.new_job import Trigger
from dataloader.queue.reports import bulk, predictions, stats, tallies
from dataloader.queue.reports.search import LENGTH, WrongSearch

NAMED_MOST = 1_000  # jobs that one request names
# Each order with the words for the jobs that it has changed.
ORDERED = {
    "requeue": "queued again",
    "start-over": "queued again, from the start",
    "run-now": "due now",
    "delete": "deleted, with their journals",
    "cancel": "cancelled, or asked to stop",
}
ListedStatus: TypeAlias = Literal[STATUSES]  # type: ignore[valid-type]
JobIds = Annotated[list[JobId], Field(max_length=NAMED_MOST, description="the jobs")]
NamedJobs = Annotated[list[JobId], Field(min_length=1, max_length=NAMED_MOST, description="these jobs")]

_Named = TypedDict("_Named", dict.fromkeys(FILTERS, Text | None), total=False)  # type: ignore[misc]


class Filters(_Named, total=False):
    """Which jobs a list has. Filters that are given must all hold."""

    q: (
        Annotated[
            SearchText,
            Field(
                description="a search: words (parts of task, queue or key, or an id) and fields, such as `status:dead`,"
                " `task:load.csv`, `args.date:2024-05-01`, `id:0190a5d`; quotes keep spaces and colons"
            ),
        ]
        | None
    )
    status: (
        Annotated[
            ListedStatus,
            Field(description=f"a status, or {', '.join(f'{name} ({words})' for name, words in GROUPS.items())}"),
        ]
        | None
    )
    error_group: Annotated[Text, Field(description="the group of the error, as /api/v1/errors has it")] | None
    since: Annotated[Instant, Field(description="changed then or later")] | None
    until: Annotated[Instant, Field(description="changed then or before")] | None


Matching = Annotated[Filters, Field(description="the jobs of a list; at least one filter")]


_AS_TRIGGER = WithJsonSchema({"$ref": "#/components/schemas/Trigger"})


@Op(
    "POST /jobs/trigger",
    scope=("trigger",),
    errors=(409, 429),
    links="/job_id",
    headers=("Idempotency-Key", "traceparent"),
    body=Trigger,
)
def trigger(call: Call, /, **fields: Any) -> model.Triggered:
    """Insert a job, or find the one with this idempotency key. 200 means that its row is committed."""
    new = adding.one(call, fields)
    job_id, status = enqueue.enqueue(call.conn, new, limited=True, asker=call.asker)
    warning = adding.warnings(call, [new.task]).get(new.task)
    return model.Triggered(job_id=job_id, status=status, warning=warning)


@Op("POST /jobs/batch", scope=("trigger",), errors=(409, 429), links="/jobs/0/job_id", headers=("traceparent",))
def trigger_many(
    call: Call,
    jobs: Annotated[list[Annotated[Any, _AS_TRIGGER]], Field(max_length=adding.BATCH_JOBS)],
    on_done: Annotated[
        Annotated[dict[str, Any], _AS_TRIGGER] | None,
        Field(description="one job more, the last of the answer: it starts when all of `jobs` have ended"),
    ] = None,
) -> model.TriggeredMany:
    """Insert jobs, all or none, or find those with their idempotency keys; in the order of the body, `on_done` last."""
    if on_done is not None:
        if "depends_on" in on_done:
            message = "on_done waits for all jobs of the list: leave its depends_on out"
            raise invalid("/on_done/depends_on", "depends_on", message)
        jobs = [*jobs, {"on_parent_failure": "run", **on_done, "depends_on": list(range(len(jobs)))}]
    columns = adding.many(call, jobs)
    enqueue.require_room_for(call.conn, columns)
    added = enqueue.enqueue_columns(call.conn, columns, asker=call.asker)
    tasks = columns["task"]
    warned = {tasks.index(task): text for task, text in adding.warnings(call, tasks).items()}
    jobs_added = [
        model.Triggered(job_id=job_id, status=status, warning=warned.get(place))
        for place, (job_id, status) in enumerate(added)
    ]
    return model.TriggeredMany(jobs=jobs_added)


@Op(
    "POST /jobs/{job_id}/again",
    done="job {job_id} is {status}",
    errors=(409, 429),
    links="/job_id",
    headers=("traceparent",),
)
def again(
    call: Call,
    job_id: JobId,
    args: Annotated[dict[str, Any], Field(description="replace the job's args of these names")] | None = None,
    without: Annotated[list[Text], Field(max_length=1_000, description="names of args to leave out")] | None = None,
    queue: Annotated[Text, Field(description="null: the job's; so for the next two")] | None = None,
    lock_key: Text | None = None,
    priority: Annotated[int, Field(ge=0, le=INT4_MAX)] | None = None,
    idempotency_key: Annotated[Text, Field(description="so that the request may be sent again")] | None = None,
) -> model.Triggered:
    """Add a job with the fields of one that has ended, with changes. The journals of the two jobs name each other.

    A masked arg keeps its value. The new job takes over no time, deadline, score, parents or idempotency key.
    """
    old = known(of_again.fields_of(call.conn, job_id), "job")
    try:
        new_args = of_again.changed(old["args"], args or {}, without or [])
    except ValueError as e:
        raise invalid("/args", "args", str(e)) from None
    changes = {"queue": queue, "lock_key": lock_key, "priority": priority, "idempotency_key": idempotency_key}
    changes = {name: value for name, value in changes.items() if value is not None}
    return add_again(call, job_id, old | changes | {"args": new_args})


def add_again(call: Call, job_id: UUID, fields: dict[str, Any]) -> model.Triggered:
    """Add the job of these fields of a trigger, as one that runs `job_id` again."""
    new = adding.one(call, fields)
    new_id, status = of_again.add(call.conn, job_id, new, call.by, call.asker)
    return made(model.Triggered, {"job_id": new_id, "status": status})


@Op(
    "GET /jobs",
    command="jobs",
    columns="job=job_id status queue task key=lock_key attempt changed=changed_at error progress",
    examples=("dataloader jobs -q etl.default --status dead --since 1d",),
    links="/jobs/0/job_id",
)
def jobs(
    call: Call,
    sort: Literal["changed", "key"] = "changed",
    limit: PageSize = 50,
    after: Cursor | None = None,
    **filters: Unpack[Filters],
) -> model.Jobs:
    """List the jobs that pass all filters, the newest change first (or by key)."""
    page = stats.jobs(call.conn, stats.Wanted(sort=sort, **filters), limit, after)
    return made(model.Jobs, {"jobs": page.rows, "next": page.next, "advice": page.advice})


@Op("GET /tally", command="tally", examples=("dataloader tally -s 'load status:dead'",))
def tally(call: Call, **filters: Unpack[Filters]) -> model.Tally:
    """Count the jobs of a list: each job counts as one kind."""
    return made(model.Tally, tallies.tally(call.conn, stats.Wanted(**filters)))


@Op("GET /suggestions")
def suggest(
    call: Call,
    q: Annotated[
        str, Field(max_length=LENGTH, description="the text in the search box; its last word is completed"), Storable
    ],
) -> model.Suggestions:
    """How the text of a search box may go on: up to 8 each of fields, statuses, tasks, queues and keys."""
    return model.Suggestions(suggestions=tallies.suggest(call.conn, q))


@Op("GET /jobs/{job_id}")
def job(call: Call, job_id: JobId) -> model.Job:
    """One job with all that is known of it; secrets in its args are masked."""
    return made(model.Job, known(stats.job(call.conn, job_id), "job"))


@Op("GET /jobs/{job_id}/status", scope=("read", "trigger"))
def status(call: Call, job_id: JobId) -> model.Status:
    """One job as it is now, without its args and keys."""
    return _status(call, lifecycle.status(call.conn, job_id))


def _status(call: Call, row: dict[str, Any] | None) -> model.Status:
    job = known(row, "job")
    return made(model.Status, job if call.may_read else lifecycle.without_holders(job))


@Op("GET /jobs/{job_id}/result", scope=("read", "trigger"))
def result(call: Call, job_id: JobId) -> model.Result:
    """The value that a job's pipeline has returned; null before the job has succeeded, or where that is None."""
    return made(model.Result, known(stats.result(call.conn, job_id), "job"))


@Op("GET /jobs/{job_id}/family")
def family(call: Call, job_id: JobId) -> model.Family:
    """The first 50 jobs that this one waits for, or has waited for, and the first 50 that wait for this one."""
    known(lifecycle.status(call.conn, job_id), "job")
    return made(model.Family, parents.family(call.conn, job_id))


@Op("GET /jobs/{job_id}/prediction")
def predict(call: Call, job_id: JobId) -> model.JobPrediction:
    """When a job will end, the range of that, and how right such predictions were in its queue."""
    row = known(predictions.job(call.conn, job_id), "job")
    return made(model.JobPrediction, predictions.job_prediction(call.outlook(call.conn, row["queue"]), row))


@Op("GET /jobs/{job_id}/events")
def job_events(
    call: Call,
    job_id: JobId,
    after: Annotated[int, Field(ge=-BIGINT_MAX, le=BIGINT_MAX, description="rows with a greater `event_id`")]
    | None = None,
    limit: PageSize = 200,
) -> model.JobEvents:
    """The journal of one job, the oldest event first."""
    rows = stats.events(call.conn, job_id, after or 0, limit)
    if not rows:
        known(lifecycle.status(call.conn, job_id), "job")
    return made(model.JobEvents, {"events": rows, "next": rows[-1]["event_id"] if len(rows) == limit else None})


@Op("GET /jobs/{job_id}/logs")
def logs(
    call: Call,
    job_id: JobId,
    after: Annotated[
        str,
        Field(
            max_length=40,
            description="`next` of the page before, or the `place` of the last line, to go on later",
            json_schema_extra={"pattern": r"^[0-9]{1,9}\.[0-9]{1,9}$"},
        ),
        Storable,
    ]
    | None = None,
    attempt: Attempt | None = None,
    limit: Annotated[int, Field(ge=1, le=logs_of.PAGE, description="at most so many")] = logs_of.PAGE,
) -> model.JobLogs:
    """Show the lines that the runs of one job have written, the oldest first."""
    page = logs_of.page(call.conn, job_id, after, attempt, limit)
    if not page.rows:
        known(lifecycle.status(call.conn, job_id), "job")
    return made(model.JobLogs, {"lines": page.rows, "next": page.next})


def _canceled(answer: model.Status) -> str:
    if answer.is_final:
        return "the job is canceled" if answer.status == "canceled" else f"the job is {answer.status} already"
    return "the job is asked to stop"


@Op("POST /jobs/{job_id}/cancel", scope=("trigger", "operate"), done=_canceled)
def cancel(
    call: Call,
    job_id: JobId,
    force: Annotated[
        bool, Field(description="interrupt a running job, and kill it where that does not stop it")
    ] = False,
) -> model.Status:
    """Cancel a queued job, ask a running one to stop, leave a finished one; the answer is its status.

    A running job stops at its next safe point, with `force` wherever it is.
    """
    return _status(call, lifecycle.request_cancel(call.conn, job_id, force, call.by))


@Op(
    "POST /jobs/{job_id}/requeue",
    done="the job is queued again, with a fresh budget of attempts",
    errors=(409,),
    repeatable=False,
)
def requeue(call: Call, job_id: JobId) -> model.Status:
    """Queue an ended job again, with a fresh budget of attempts; any other job is a conflict."""
    _change(call, "requeue", job_id, "only a job that has ended can be requeued")
    return status(call, job_id)


@Op("POST /jobs/{job_id}/run-now", done="the job may run now", errors=(409,), repeatable=False)
def run_now(call: Call, job_id: JobId) -> model.Status:
    """Make a queued job due now, before its time; a job that is not queued is a conflict."""
    _change(call, "run-now", job_id, "only a queued job can be made due")
    return status(call, job_id)


@Op(
    "DELETE /jobs/{job_id}",
    done="the job is deleted, with its journal",
    question="Delete this job, with its journal? Nothing of it remains.",
    errors=(409,),
    repeatable=False,
)
def delete(call: Call, job_id: JobId) -> model.Deleted:
    """Delete a job that is not running, and its journal; one that runs is a conflict."""
    _change(call, "delete", job_id, "a running job cannot be deleted: cancel it first")
    return model.Deleted(job_id=job_id, deleted=True)


@Op("POST /jobs/bulk/cancel", scope=("trigger", "operate"), repeatable=False)
def cancel_jobs(call: Call, job_ids: JobIds, force: bool = False) -> model.BulkOutcomes:
    """Cancel up to 1,000 jobs."""
    return _outcomes(job_ids, operations.change(call.conn, "cancel", job_ids, call.by, force=force))


@Op("POST /jobs/bulk/{verb}", repeatable=False, errors=(404,))
def change_jobs(
    call: Call, verb: Literal["requeue", "start-over", "run-now", "delete"], job_ids: JobIds
) -> model.BulkOutcomes:
    """Change up to 1,000 jobs, each as the order to a single job does.

    `start-over` requeues jobs, which begin at the start and not at their checkpoints.
    """
    return _outcomes(job_ids, operations.change(call.conn, verb, job_ids, call.by))


@Op("POST /jobs/bulk/preview")
def preview(
    call: Call, order: OrderName, matching: Matching | None = None, job_ids: NamedJobs | None = None
) -> model.Preview:
    """Count what an order would change, and what it would leave alone and why; changes nothing.

    The order is for the jobs of a list (`matching`), or for up to 1,000 named ones.
    """
    return made(model.Preview, bulk.preview(call.conn, order, _target(matching, job_ids)))


@Op("POST /jobs/bulk", errors=(409,))
def order_jobs(
    call: Call,
    order: OrderName,
    confirmation: Annotated[
        str, Field(min_length=1, max_length=1_000, description="`confirmation` of the preview"), Storable
    ],
    matching: Matching | None = None,
    job_ids: NamedJobs | None = None,
    after: Cursor | None = None,
) -> model.BulkChanged:
    """Change up to 1,000 of the jobs that a preview has counted; a job that has changed since stays as it is.

    A list that has more jobs for the order than its preview had is a conflict.
    """
    step = bulk.change(call.conn, order, _target(matching, job_ids), confirmation, call.by, after)
    return model.BulkChanged(order=order, changed=step.changed, next=step.next)


def _target(matching: Filters | None, job_ids: Sequence[UUID] | None) -> bulk.Target:
    """The jobs of an order, whose search is known to be valid."""
    target = bulk.target(matching, job_ids)
    try:
        _ = target.wanted.whole
    except WrongSearch as e:
        raise invalid("/matching/q", "search", str(e)) from None
    return target


def _change(call: Call, verb: str, job_id: UUID, rule: str) -> None:
    outcome = operations.change(call.conn, verb, [job_id], call.by)[job_id]
    if outcome == operations.UNKNOWN:
        raise Unknown("job")
    if outcome != operations.DONE:
        raise NotAllowed(f"the job is {outcome}; {rule}")


def _outcomes(job_ids: Sequence[UUID], outcomes: Mapping[UUID, str]) -> model.BulkOutcomes:
    """Each outcome, in the order of the request."""
    return made(model.BulkOutcomes, {"jobs": [{"job_id": job_id, "outcome": outcomes[job_id]} for job_id in job_ids]})
