"""The response models of the API, from which the OpenAPI document has its schemas.

The API writes answers from rows, not by these models, which would cost time in every request; a test compares each
answer with its model. A later version may add fields.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias
from uuid import UUID

from pydantic import BaseModel, Field

from dataloader.queue.job import TALLIED
from dataloader.queue.job import Status as JobState
from dataloader.queue.plans.partitions import STATUSES as OF_PARTITIONS
from dataloader.queue.reports import predictions
from dataloader.queue.reports.messages import KINDS
from dataloader.queue.reports.waiting import REASONS
from dataloader.queue.reports.webhooks import SHAPES

JobStatus: TypeAlias = Literal[tuple(map(str, JobState))]  # type: ignore[valid-type]
Count = Annotated[int, Field(ge=0)]
Kind: TypeAlias = Literal[TALLIED]  # type: ignore[valid-type]
Progress = Annotated[
    Any, Field(description="what the pipeline last reported: an object, unless another service wrote it")
]
RunSec = Annotated[
    float | None,
    Field(ge=0, description="how long its last run took; `started_at` is the first start, over all attempts"),
]
Outcome = Annotated[str, Field(description="`done`, `unknown` (there is no such job) or the status that forbids it")]


class Fault(BaseModel):
    """One thing wrong in a request."""

    pointer: str = Field(description="JSON pointer (RFC 6901) into the body, `/name` of a parameter, or empty")
    code: str
    message: str


class Problem(BaseModel):
    """Every answer that is not a success (RFC 9457)."""

    type: str = Field(description="/problems/ and the kind, which never changes")
    title: str
    status: int
    detail: str
    instance: str
    request_id: str
    errors: list[Fault]


class Triggered(BaseModel):
    """A job that is committed, or the one that has the idempotency key."""

    job_id: UUID
    status: JobStatus


class TriggeredMany(BaseModel):
    """One entry for each job of the batch, in its order."""

    jobs: list[Triggered]


class WaitingFor(BaseModel):
    """Why a queued job does not run yet. Which fields there are depends on `reason`."""

    reason: str = Field(description=f"{', '.join(REASONS)}; there may be more")
    queue: str | None = None
    since: datetime | None = None
    by: str | None = None
    until: datetime | None = None
    lock_key: str | None = None
    job_id: UUID | None = None
    pid: int | None = None
    application: str | None = None
    workers: int | None = None
    ahead: int | None = None
    task: str | None = None
    need_mb: float | None = Field(None, description="the memory that a run of its task needs")
    room_mb: float | None = Field(None, description="what all runs may use together on the largest host of its queue")
    parents: int | None = Field(None, description="how many jobs have to end before")
    on_failure: str | None = Field(None, description="what comes of the job when one of them does not succeed")
    limit: str | None = Field(None, description="the name of the limit that has no room")
    running: Count | None = Field(None, description="jobs of that limit that run")
    most: Count | None = Field(None, description="jobs of that limit that may run at once")


class Shown(BaseModel):
    """The fields of a job that each of its documents has."""

    job_id: UUID
    status: JobStatus
    attempt: Count
    max_attempts: Count
    created_at: datetime
    available_at: datetime
    started_at: datetime | None
    heartbeat_at: datetime | None
    finished_at: datetime | None
    run_sec: RunSec
    error: str | None
    progress: Progress
    cancel_requested: bool
    queue: str
    task: str
    lock_key: str
    partition_key: str
    priority: int
    score: float | None
    producer: str | None
    consumer_group: str | None
    affinity_key: str | None
    limits: list[str] | None
    deadline: datetime | None


class Status(Shown):
    """A job as its clients see it."""

    timeout_sec: int | None
    waiting_for: WaitingFor | None


class DueTime(BaseModel):
    """A due time of a schedule."""

    name: str
    due: datetime


class Checkpoint(BaseModel):
    """Where the next run of a job goes on, which only the pipeline knows; it goes when the job succeeds."""

    saved_at: datetime
    bytes: Count


class Job(Status):
    """A job with all that is known of it; secrets in `args` are masked."""

    args: Any
    idempotency_key: str | None
    lease_ttl_sec: int
    lease_expires_at: datetime | None
    claimed_by: str | None
    claims: int
    blocked_on: str | None
    backoffs: int
    cancel_forced: bool
    trace: str | None = Field(description="the W3C traceparent of its trigger")
    schedule: DueTime | None = Field(description="the schedule that has made it, as its idempotency key says")
    checkpoint: Checkpoint | None = Field(description="null: the next run begins at the start")


class Relative(BaseModel):
    """A job that another one waits for, or that waits for another one; nulls: it was deleted."""

    job_id: UUID
    task: str | None
    status: JobStatus | None
    is_over: bool = Field(description="it does not hold the other one up any more, or is not held up")


class Family(BaseModel):
    """The first 50 parents and children of a job."""

    parents: list[Relative]
    children: list[Relative]


class Accuracy(BaseModel):
    """How right the predictions of a queue were whose jobs ended within the last day."""

    predictions: Count = Field(description="how many; the newest 1,000 count")
    error: float | None = Field(description="the median error, as a share of the time that was left")
    within: float | None = Field(description="the share of the jobs that ended within their ranges")


class _Prediction(BaseModel):
    at: datetime = Field(description="when it was predicted, up to some seconds ago")
    ends_at: datetime | None = Field(description="the predicted end: as likely earlier as later")
    earliest: datetime | None = Field(description="one in ten ends before")
    latest: datetime | None = Field(description="one in ten ends after")
    reason: str | None = Field(description=f"why nothing is predicted: {', '.join(predictions.REASONS)}; else null")
    accuracy: Accuracy


class QueuePrediction(_Prediction):
    """When all that is queued in a queue now, and runs, will have ended."""

    queue: str


class JobPrediction(_Prediction):
    """When a job will end."""

    job_id: UUID
    queue: str
    status: JobStatus
    deadline: datetime | None
    is_late: bool = Field(description="the predicted end is behind the deadline")


class Result(BaseModel):
    """The value that a job's pipeline has returned; secrets in the value are masked."""

    job_id: UUID
    status: JobStatus
    result: Any = Field(description="any JSON; null before the job has succeeded, and where nothing was returned")


class ListedJob(Shown):
    """A job in a list; `error` is cut to 300 characters."""

    changed_at: datetime
    claimed_by: str | None
    blocked_on: str | None


class Jobs(BaseModel):
    """One page. It may be short and there may be more all the same: `next` says."""

    jobs: list[ListedJob]
    next: str | None = Field(description="`after` of the next page; null when this is the last")
    advice: str | None = Field(description="what would make this search faster; null: nothing would")


class Kinds(BaseModel):
    """How many jobs count as what; each job counts once."""

    ready: Count = Field(description="queued, and nothing holds it back")
    scheduled: Count = Field(description="queued, and its time has not come")
    blocked: Count = Field(description="queued, and waits for its key, for other jobs or for a limit")
    running: Count
    succeeded: Count
    failed: Count
    lost: Count
    canceled: Count


class Tally(BaseModel):
    """The counts beside a list. One request looks at up to 10,000 jobs of each kind."""

    counts: Kinds
    total: Count
    at_least: list[Kind] = Field(description="of these there are more than the request has looked at")


class Suggestions(BaseModel):
    """How a search may go on."""

    suggestions: list[str] = Field(description="whole searches; fields, statuses, tasks, queues, keys")


class Left(BaseModel):
    """Jobs of the list that an order leaves alone."""

    kind: Kind
    count: Count
    reason: str = Field(description="behind `the job`")


class Preview(BaseModel):
    """What an order would do."""

    order: str
    count: Count = Field(description="how many jobs it would change")
    is_exact: bool = Field(description="false: at least so many")
    changes: dict[str, Count] = Field(description="the same by kind")
    leaves: list[Left]
    as_of: datetime = Field(description="the order changes no job that changes after that")
    confirmation: str = Field(description="for the order")


class BulkChanged(BaseModel):
    """How many jobs one request has changed. Send it again, with `next` as `after`, until that is null."""

    order: str
    changed: Count
    next: str | None


class Event(BaseModel):
    """One row of the journal."""

    event_id: int
    ts: datetime
    kind: str
    payload: Any


class FarmEvent(Event):
    """One row of the farm's journal."""

    job_id: UUID
    queue: str


class JobEvents(BaseModel):
    """The journal of one job, the oldest first."""

    events: list[Event]
    next: int | None = Field(description="`after` of the next page; null when this is the last")


class LogLine(BaseModel):
    """One line of what a run has written, masked."""

    claim: Count = Field(description="the run: grows with each start of the job, also over those that do not count")
    attempt: Count
    line: Count = Field(description="its number in the run, from 1")
    at: datetime
    level: str = Field(description="debug, info, warning, error or critical")
    source: str = Field(description="log (`context.logger` and all other logging), stdout or stderr")
    text: str
    left_out: Count = Field(description="lines of the run before it that were left out, for the log was too large")
    place: str = Field(description="`after` of what comes behind it")


class JobLogs(BaseModel):
    """The lines of the runs of one job, the oldest first."""

    lines: list[LogLine]
    next: str | None = Field(description="`after` of the next page; null when this is the last")


class FarmEvents(BaseModel):
    """The farm's journal, the oldest first. To follow it, ask again with `after` = the last `event_id`."""

    events: list[FarmEvent]


class Deleted(BaseModel):
    """The job and its journal are gone."""

    job_id: UUID
    deleted: Literal[True]


class BulkOutcome(BaseModel):
    """The result for one job of a bulk request."""

    job_id: UUID
    outcome: Outcome


class BulkOutcomes(BaseModel):
    """One entry for each of `job_ids`, in their order."""

    jobs: list[BulkOutcome]


class QueueSettings(BaseModel):
    """The settings of a queue."""

    queue: str
    paused_at: datetime | None
    paused_by: str | None
    max_length: int | None
    ordered: bool = Field(description="the jobs of a key start in the order of their scores")
    merge: bool = Field(description="one delivery takes all queued jobs of a key")
    merge_limit: int = Field(description="the most jobs of a key in one delivery")
    batch: int | None = Field(description="the most keys in one call of a pipeline; null: as the pipeline says")
    on_dead: Literal["continue", "hold"] = Field(description="hold: a dead job stops its key")
    fair_by: Literal["partition_key", "producer"] | None = Field(
        description="the field by whose values the jobs of a priority start in turns; null: they start in their order"
    )


class QueueState(QueueSettings):
    """The settings of a queue that operators have made."""

    is_known: bool = Field(description="false: no job, worker or setting named this queue before; it may be mistyped")
    similar: list[str] = Field(description="the known names most like an unknown one, for those who may read")


class QueueFigures(BaseModel):
    """A queue in figures. `length` is all that is queued: what is due and what is scheduled."""

    length: Count
    length_is_exact: bool
    counted_at: datetime | None = Field(
        description="when the reaper counted the figures that are too long to be counted for an answer; null: just now"
    )
    scheduled: Count = Field(description="queued, but their time has not come; retries in back-off included")
    fresh: Count = Field(description="queued and never run")
    retries: Count = Field(description="queued again after a run")
    busy: Count = Field(description="running")
    dead: Count = Field(description="failed and lost")
    keys: Count | None = Field(description="keys that have queued jobs, where a queue is ordered; else null")
    lag_sec: float = Field(ge=0, description="how long the oldest due job has waited")
    workers: Count = Field(description="live ones")
    stopped: Count = Field(description="those of them whose processes are stopped, by SIGSTOP or a debugger")
    at_risk: Count = Field(description="jobs that are going to miss their deadlines, or have, as the reaper predicts")


class QueueRow(QueueFigures, QueueSettings):
    """One queue."""


class TotalRow(QueueFigures):
    """All queues together; what only one queue can have is null."""

    queue: str | None
    paused_at: datetime | None
    paused_by: str | None
    max_length: int | None
    ordered: bool | None
    merge: bool | None
    merge_limit: int | None
    batch: int | None
    on_dead: str | None
    fair_by: str | None


class Queues(BaseModel):
    """Every queue that has jobs, a pause, a limit or a worker."""

    queues: list[QueueRow]


class Overview(Queues):
    """The farm in figures."""

    at: datetime
    total: TotalRow


class Changed(BaseModel):
    """How many jobs of the queue were changed. Send the request again, with `next` as `after`, until that is null."""

    queue: str
    changed: Count
    next: str | None = Field(
        description="there may be more behind this place; a request looks at 20,000 jobs, where it has a filter"
    )


class Moved(BaseModel):
    """How many jobs are the other queue's now. Send the request again until `is_done`; until then both are paused."""

    queue: str
    to: str
    moved: Count
    is_done: bool = Field(description="none was left to move, and the other queue goes on")


class Worker(BaseModel):
    """A worker as its farm's keeper has last shown it, and the job it runs."""

    worker: str
    farm: str
    host: str
    pid: int
    queue: str = Field(description="the first of its queues")
    queues: list[str]
    state: str = Field(description="starting, idle, awake, busy, stuck, stopped, leaving, dead")
    is_live: bool
    memory_bytes: int | None
    cpu_percent: float | None
    jobs: Count
    started_at: datetime | None
    seen_at: datetime
    reported_at: datetime | None = Field(description="the latest yield, progress or check of its run; null without one")
    job_id: UUID | None
    task: str | None
    lock_key: str | None
    attempt: int | None
    progress: Progress
    job_started_at: datetime | None


class Workers(BaseModel):
    """The workers of all hosts that were seen in the last ten minutes."""

    workers: list[Worker]


class Spread(BaseModel):
    """The values of the runs of a period; a percentile is off by less than 10 percent."""

    count: Count
    p50: float
    p95: float
    p99: float
    mean: float
    largest: float


class Figures(BaseModel):
    """The runs that ended in a period. Each retry is a run; one that was handed back at a drain is none."""

    runs: Count
    succeeded: Count
    failed: Count = Field(description="with an error, a crash or a lost lease, whether or not the job is tried again")
    canceled: Count
    per_hour: float
    failure_rate: float | None = Field(description="null: no run")
    run_sec: Spread | None = Field(description="of the runs that have succeeded; null: none")
    failed_sec: Spread | None = Field(description="of the failed runs")
    waiting_sec: Spread | None = Field(description="from the instant a job was due to its start")
    memory_mb: Spread | None = Field(description="of the runs whose worker tells it")
    cpu_sec: Spread | None


class RunBar(BaseModel):
    """How many runs took longer than `above` seconds, and at most `up_to`."""

    above: float
    up_to: float
    succeeded: Count
    others: Count = Field(description="failed or canceled")


class RunTime(BaseModel):
    """The runs of a part of the period that begins `at`."""

    at: datetime
    runs: Count
    failed: Count


class _Period(BaseModel):
    range: str
    since: datetime
    until: datetime
    figures: Figures
    before: Figures = Field(description="of the period before `since`, as long as `range`")
    histogram: list[RunBar]
    by_time: list[RunTime]


class _RunPart(BaseModel):
    runs: Count
    failed: Count
    seconds: float = Field(description="of all these runs together")


class RunsOfQueue(_RunPart):
    """The runs in one queue."""

    queue: str


class RunsOfTask(_RunPart):
    """The runs of one task."""

    task: str


class TaskRuns(_Period):
    """What the runs of a task took in a period, and in the one before."""

    task: str
    is_known: bool = Field(description="a worker has a pipeline for it, or it has run")
    queues: list[RunsOfQueue] = Field(description="those with the most time first, up to 50")


class QueueRuns(_Period):
    """What the runs of a queue took in a period, and in the one before."""

    queue: str
    tasks: list[RunsOfTask] = Field(description="those with the most time first, up to 50")


class Replaces(BaseModel):
    """How often the latest runs of a task have changed their process, so that their worker was replaced."""

    runs: Count
    replaced: Count = Field(description="of these runs")
    changed: list[str] = Field(description="what they have changed: `environment`, `threads` ...")


class Task(BaseModel):
    """The memory and the processors that a run of a task needs, as its pipeline declares or as its runs have shown."""

    task: str
    max_attempts: int | None = Field(description="of a job whose trigger names none; null: 5")
    memory_mb: float | None = Field(description="what counts: as declared, else as learned from 128 MB on")
    cpus: float | None = Field(description="the same for processors: as declared, else as learned from 1.5 on")
    declared_memory_mb: float | None
    declared_cpus: float | None
    learned_memory_mb: float | None = Field(description="95 of 100 of its latest runs used no more")
    learned_cpus: float | None
    runs: Count = Field(description="that it was learned from")
    learned_at: datetime | None
    replaces: Replaces | None = Field(description="null: its runs leave their process as it was, but for one in ten")
    figures: Figures | None = Field(
        default=None, description="with `range`: of this period, without memory and processors; null: no run in it"
    )
    before: Figures | None = Field(default=None, description="of the period before")


class Tasks(BaseModel):
    """The tasks that workers have pipelines for, or that have run."""

    tasks: list[Task]


class Name(BaseModel):
    """Whether the farm knows a name."""

    name: str
    is_known: bool
    similar: list[str] = Field(description="the known names most like an unknown one, for those who may read")
    count: Count = Field(description="how many names the farm knows; 0: it has not begun")


class Names(BaseModel):
    """A queue is known that has jobs, settings or workers, a task that workers have shown or jobs name."""

    queue: Name | None
    task: Name | None


class ArgsSchema(BaseModel):
    """What a task takes as args."""

    task: str
    schema_: dict[str, Any] | None = Field(
        alias="schema", description="JSON Schema 2020-12; null: any object will do, or the schema cannot be read"
    )


class Schedule(BaseModel):
    """A schedule, the fields of its jobs, its due times and its last job; secrets in `args` are masked."""

    name: str
    origin: Literal["code", "people"] = Field(description="code: a pipeline names it")
    cron: str | None
    interval_sec: int | None
    timezone: str
    words: str = Field(description="when it is due, for people")
    catch_up: Literal["none", "last", "all"]
    overlap: Literal["skip", "queue", "cancel_old"]
    jitter_sec: float
    task: str
    queue: str
    lock_key: str
    args: dict[str, Any]
    priority: int
    max_attempts: int | None
    lease_ttl_sec: int
    timeout_sec: int | None
    partition_key: str
    affinity_key: str | None
    deadline: str | None = Field(description="the time of the day by which its jobs should have ended, such as 07:00")
    deadline_sec: int | None = Field(description="how long after the due time, in seconds")
    created_at: datetime
    created_by: str
    changed_at: datetime | None = Field(description="by people: from then on code changes it no more")
    changed_by: str | None
    paused_at: datetime | None
    paused_by: str | None
    retired_at: datetime | None = Field(description="since when its pipeline names it no more, so it makes no jobs")
    next_due: datetime | None
    next: list[datetime] = Field(description="its next due times; none while it makes no jobs")
    overdue_sec: float = Field(ge=0, description="for how long a due time has waited for a reaper")
    last_due: datetime | None
    last_job_id: UUID | None
    last_job_status: JobStatus | None = Field(description="null: there is no such job any more")
    skipped: Count = Field(description="due times without a job, by its overlap")
    last_skipped: datetime | None
    error: str | None = Field(description="why its jobs cannot be made; the reaper tries again every minute")
    error_at: datetime | None


class Schedules(BaseModel):
    """All schedules."""

    schedules: list[Schedule]


class Removed(BaseModel):
    """The schedule is gone; its jobs are not."""

    name: str
    removed: Literal[True]


class Backfill(BaseModel):
    """A backfill, the fields of its jobs, and what became of its partitions; secrets in `args` are masked."""

    name: str
    task: str
    queue: str
    state: Literal["making", "running", "paused", "canceled", "done"]
    since: str | None = Field(description="of a range; null: its partitions were listed")
    until: str | None
    step: str | None
    total: Count = Field(description="partitions")
    made: Count = Field(description="of these, how many the reaper has come to: they have a job, or are skipped")
    counts: dict[Literal[OF_PARTITIONS], Count] = Field(  # type: ignore[valid-type]
        description="partitions by the status of their jobs; missing: there is no job, skipped: another backfill did it"
    )
    eta_sec: float | None = Field(description="until all have ended, by the pace of the last ten minutes")
    max_running: Count | None = Field(description="so many of its jobs run at once; null: any number")
    skip_done: bool
    code_version: str
    args: dict[str, Any]
    lock_key: str
    partition_key: str
    priority: int | str
    max_attempts: int | None
    lease_ttl_sec: int
    timeout_sec: int | None
    affinity_key: str | None
    limits: list[str] | None
    canceled: Count = Field(description="the partitions to which a cancellation has come")
    created_at: datetime
    created_by: str
    started_at: datetime | None = Field(description="of its first job")
    paused_at: datetime | None
    paused_by: str | None
    canceled_at: datetime | None
    canceled_by: str | None
    error: str | None = Field(description="why its next jobs cannot be made; the reaper tries again")
    error_at: datetime | None
    overdue_sec: float = Field(ge=0, description="for how long its next jobs have waited for a reaper")


class Backfills(BaseModel):
    """The newest backfills."""

    backfills: list[Backfill]


class BackfillSample(BaseModel):
    """A job that a backfill would make."""

    partition: str
    args: dict[str, Any]
    lock_key: str
    partition_key: str
    priority: int


class BackfillPreview(BaseModel):
    """What a backfill would do; nothing is changed."""

    name: str
    task: str
    queue: str
    total: Count = Field(description="partitions")
    skipped: Count = Field(description="of these, how many are done already")
    samples: list[BackfillSample] = Field(description="the jobs of the first partitions and of the last one")


class BackfillRetried(BaseModel):
    """How many dead jobs are queued again; `next` is `after` of the request that goes on."""

    changed: Count
    next: int | None


class Partition(BaseModel):
    """A partition of a backfill."""

    place: Count
    partition: str
    status: Literal[OF_PARTITIONS]  # type: ignore[valid-type]
    job_id: UUID | None
    finished_at: datetime | None


class Partitions(BaseModel):
    """Some partitions of a backfill, in their order; `next` is `after` of the next page."""

    partitions: list[Partition]
    next: int | None


class BackfillRemoved(BaseModel):
    """The backfill and its ledger are gone; its jobs are not."""

    name: str
    removed: Literal[True]


class Limit(BaseModel):
    """A limit of the fleet: its bounds on all hosts together, and how many of its jobs run and wait."""

    name: str
    most: Count | None = Field(description="jobs that may run at once; null: any number")
    per_minute: float | None = Field(description="jobs that may start in a minute; null: any number")
    burst: Count | None = Field(description="of these, how many may start at once after a pause")
    running: Count
    waiting: Count = Field(description="jobs that were found without room, counted up to 1,000")
    tokens: float | None = Field(description="how many jobs may start now by the rate")
    room: Count = Field(description="how many jobs may start now, counted up to 100")
    changed_by: str | None
    changed_at: datetime


class Limits(BaseModel):
    """All limits, by name."""

    limits: list[Limit]


class LimitRemoved(BaseModel):
    """The limit that is no more."""

    name: str


class ErrorGroup(BaseModel):
    """The dead and retrying jobs of a queue and a task with errors of one kind; the latest failure of a job counts."""

    queue: str
    task: str
    error_group: str = Field(description="the error without what differs from job to job; a filter of lists and orders")
    dead: Count
    retrying: Count = Field(description="jobs that wait for their next attempt")
    first_at: datetime
    last_at: datetime
    by_hour: list[Count] = Field(description="failures in each of the last 24 hours, the oldest first")
    hosts: list[str] = Field(description="where the latest five jobs ran")
    job_id: UUID = Field(description="the latest job")
    error: str | None = Field(description="the begin of its error")
    note: str | None
    noted_by: str | None
    noted_at: datetime | None


class ErrorGroups(BaseModel):
    """The largest groups, up to 100."""

    groups: list[ErrorGroup]
    is_cut: bool = Field(description="there are more jobs than were counted: the latest of each queue, 10,000 in all")


class ErrorNote(BaseModel):
    """The note about a group, as it is now."""

    task: str
    error_group: str
    note: str | None = Field(description="null: there is none any more")


class Webhook(BaseModel):
    """A receiver of alerts. Its secrets are the workers'; here are the names of their variables."""

    name: str
    url: str = Field(description="`${DL_WEBHOOK_...}`: the variable of the workers that holds a secret URL")
    shape: str = Field(description=", ".join(SHAPES))
    signed_by: str | None = Field(description="the variable with the key; null: its messages are not signed")
    kinds: list[str] | None = Field(description=f"some of {', '.join(KINDS)}; null: all")
    queues: list[str] | None = Field(description="whose alerts; null: all")
    lag_sec: float = Field(description="from which queue latency on a queue is late")
    added_at: datetime
    added_by: str | None
    paused_at: datetime | None = Field(description="since when it is told nothing; null: it is not paused")
    paused_by: str | None


class Webhooks(BaseModel):
    """The receivers of alerts."""

    queue: str = Field(description="of the jobs that send messages (DL_ALERTS_QUEUE)")
    is_served: bool = Field(description="whether a live worker of some host serves that queue")
    webhooks: list[Webhook]


class RemovedWebhook(BaseModel):
    """The receiver that is gone."""

    name: str


class Tested(BaseModel):
    """The job that sends the test message."""

    name: str
    job_id: UUID


class Transaction(BaseModel):
    """The oldest transaction of the database server."""

    pid: int
    user: str | None
    application: str | None
    state: str | None
    age_sec: float
    query: str | None = Field(description="its first 200 characters")
    holds_back_vacuum: bool


class VacuumHolder(BaseModel):
    """The session or slot that holds back vacuum of the queue's tables; null: the service's role may not see it."""

    kind: str = Field(description="session, standby, prepared transaction, replication slot")
    pid: int | None
    user: str | None
    application: str | None = Field(description="application_name, or the name of the transaction or slot")
    state: str | None
    age_sec: float | None
    xids: int = Field(description="transactions since")
    query: str | None = Field(description="its first 200 characters")


class Database(BaseModel):
    """The queue's database."""

    version: str
    database: str
    size_bytes: int
    connections: int
    max_connections: int
    queue_tables_bytes: int
    dead_tuples: int
    live_tuples: int
    last_autovacuum: datetime | None
    notify_usage: float = Field(description="of the notification queue, 0 to 1")
    in_recovery: bool
    oldest_transaction: Transaction | None
    jobs_dead_tuples: int
    jobs_live_tuples: int
    held_by: VacuumHolder | None


class Bucket(BaseModel):
    """The runs that ended within ten seconds from `at`."""

    at: datetime
    processed: Count
    failed: Count


class Pace(BaseModel):
    """The runs that ended lately, in buckets of ten seconds, the oldest first."""

    pace: list[Bucket]


class Key(BaseModel):
    """A key of an ordered queue that has queued jobs; the job is its head, which starts first."""

    lock_key: str
    payloads: Count = Field(description="its queued jobs; of 1,000 and more at least so many")
    payloads_is_exact: bool
    job_id: UUID
    score: float | None
    attempt: Count
    available_at: datetime
    waiting_for: WaitingFor | None = Field(description="why the head does not run yet; null: it has just begun")


class Keys(BaseModel):
    """One page of keys, by name."""

    keys: list[Key]
    next: str | None = Field(description="`after` of the next page; null when this is the last")


class Health(BaseModel):
    """The process answers."""

    status: Literal["healthy"]


class Info(BaseModel):
    """The service and its version."""

    service: str
    version: str
    environment: str


class Running(BaseModel):
    """How long this process has run, in seconds."""

    status: Literal["running"]
    service: str
    version: str
    uptime: float


class Checks(BaseModel):
    """The checks of the service; all have passed, else the answer is a 503."""

    database: Literal["ok"]
    schema_: Literal["ok"] = Field(alias="schema")
    draining: Literal[False]


class Ready(BaseModel):
    """Requests may be sent here."""

    status: Literal["ready"]
    checks: Checks
