"""Jobs as they are shown: one, a list, its runs, journal and log."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from dataloader.model.kinds import Answer, Count, JobKind, JobStatus, Progress, Seconds, fraction
from dataloader.queue.job import FINAL


class Triggered(Answer):
    """A job that is committed, or the one that has the idempotency key."""

    job_id: UUID
    status: JobStatus
    warning: Annotated[str | None, "the task may be mistyped; in a batch at the first job of such a task"] = None


class TriggeredMany(Answer):
    """One entry for each job of the batch, in its order."""

    jobs: list[Triggered]


class Reason(Answer):
    """One reason why a queued job does not run yet. Which fields there are depends on `reason`."""

    reason: Annotated[str, "such as paused, time, parent, lock, session, order, dead, worker, memory or limit"]
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
    need_mb: Annotated[float | None, "the memory that a run of its task needs"] = None
    room_mb: Annotated[float | None, "what all runs may use together on the largest host of its queue"] = None
    parents: Annotated[int | None, "how many jobs have to end before"] = None
    on_failure: Annotated[str | None, "what comes of the job when one of them does not succeed"] = None
    limit: Annotated[str | None, "the name of the limit that has no room"] = None
    running: Annotated[Count | None, "jobs of that limit that run"] = None
    most: Annotated[Count | None, "jobs of that limit that may run at once"] = None


class WaitingFor(Reason):
    """Why a queued job does not run yet."""

    besides: Annotated[list[Reason] | None, "what it waits for as well: its own reason, and that of the workers"] = None


class Shown(Answer):
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
    run_sec: Annotated[Seconds | None, "how long its last run took; `started_at` is the first start, over all attempts"]
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

    @property
    def is_final(self) -> bool:
        """True for a job that has ended: succeeded, failed, canceled or lost."""
        return self.status in FINAL

    @property
    def fraction(self) -> float | None:
        """The finished share, 0 to 1, where the progress has `processed` and `total`, or `percent`; else None."""
        return fraction(self.progress)


class Template(Answer):
    """The fields of the jobs that a schedule or a backfill makes; secrets in `args` are masked."""

    name: str
    task: str
    queue: str
    args: dict[str, Any]
    lock_key: str
    partition_key: str
    affinity_key: str | None
    max_attempts: int | None
    lease_ttl_sec: int
    timeout_sec: int | None


class Status(Shown):
    """A job as its clients see it."""

    timeout_sec: int | None
    waiting_for: WaitingFor | None


class Finished(Status):
    """A job that has ended, with what its pipeline has returned: two answers in one."""

    result: Any = None


class DueTime(Answer):
    """A due time of a schedule."""

    name: str
    due: datetime


class Checkpoint(Answer):
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
    trace: Annotated[str | None, "the W3C traceparent of its trigger"]
    schedule: Annotated[DueTime | None, "the schedule that has made it, as its idempotency key says"]
    checkpoint: Annotated[Checkpoint | None, "null: the next run begins at the start"]


class Relative(Answer):
    """A job that another one waits for, or that waits for another one; nulls: it was deleted."""

    job_id: UUID
    task: str | None
    status: JobStatus | None
    is_over: Annotated[bool, "it does not hold the other one up any more, or is not held up"]


class Family(Answer):
    """The first 50 parents and children of a job."""

    parents: list[Relative]
    children: list[Relative]


class Accuracy(Answer):
    """How right the predictions of a queue were whose jobs ended within the last day."""

    predictions: Annotated[Count, "how many; the newest 1,000 count"]
    error: Annotated[float | None, "the median error, as a share of the time that was left"]
    within: Annotated[float | None, "the share of the jobs that ended within their ranges"]


class PredictedEnd(Answer):
    at: Annotated[datetime, "when it was predicted, up to some seconds ago"]
    ends_at: Annotated[datetime | None, "the predicted end: as likely earlier as later"]
    earliest: Annotated[datetime | None, "one in ten ends before"]
    latest: Annotated[datetime | None, "one in ten ends after"]
    reason: Annotated[str | None, "why nothing is predicted, such as paused, no_worker, no_runs, parents; else null"]
    accuracy: Accuracy


class QueuePrediction(PredictedEnd):
    """When all jobs of a queue that run or are due now will have ended."""

    queue: str


class JobPrediction(PredictedEnd):
    """When a job will end."""

    job_id: UUID
    queue: str
    status: JobStatus
    deadline: datetime | None
    is_late: Annotated[bool, "the predicted end is behind the deadline"]


class Result(Answer):
    """The value that a job's pipeline has returned; secrets in the value are masked."""

    job_id: UUID
    status: JobStatus
    result: Annotated[Any, "any JSON; null before the job has succeeded, and where nothing was returned"]


class ListedJob(Shown):
    """A job in a list; `error` is cut to 300 characters."""

    changed_at: datetime
    claimed_by: str | None
    blocked_on: str | None


class Jobs(Answer):
    """One page. It may be short and there may be more all the same: `next` says."""

    jobs: list[ListedJob]
    next: Annotated[str | None, "`after` of the next page; null when this is the last"]
    advice: Annotated[str | None, "what would make this search faster; null: nothing would"]


class Kinds(Answer):
    """How many jobs count as what; each job counts once."""

    ready: Annotated[Count, "queued, and nothing holds it back"]
    scheduled: Annotated[Count, "queued, and its time has not come"]
    blocked: Annotated[Count, "queued, and waits for its key, for other jobs or for a limit"]
    running: Count
    succeeded: Count
    failed: Count
    lost: Count
    canceled: Count


class Tally(Answer):
    """The counts beside a list. One request looks at up to 10,000 jobs of each kind."""

    counts: Kinds
    total: Count
    at_least: Annotated[list[JobKind], "of these there are more than the request has looked at"]


class Suggestions(Answer):
    """How a search may go on."""

    suggestions: Annotated[list[str], "whole searches; fields, statuses, tasks, queues, keys"]


class Left(Answer):
    """Jobs of the list that an order leaves alone."""

    kind: JobKind
    count: Count
    reason: Annotated[str, "behind `the job`"]


class Preview(Answer):
    """What an order would do."""

    order: str
    count: Annotated[Count, "how many jobs it would change"]
    is_exact: Annotated[bool, "false: at least so many"]
    changes: Annotated[dict[str, Count], "the same by kind"]
    leaves: list[Left]
    as_of: Annotated[datetime, "the order changes no job that changes after that"]
    confirmation: Annotated[str, "for the order"]


class BulkChanged(Answer):
    """How many jobs one request has changed. Send it again, with `next` as `after`, until that is null."""

    order: str
    changed: Count
    next: str | None


class Event(Answer):
    """One row of the journal."""

    event_id: int
    ts: datetime
    kind: str
    payload: Any


class FarmEvent(Event):
    """One row of the farm's journal."""

    job_id: UUID
    queue: str


class JobEvents(Answer):
    """The journal of one job, the oldest first."""

    events: list[Event]
    next: Annotated[int | None, "`after` of the next page; null when this is the last"]


class LogLine(Answer):
    """One line of what a run has written, masked."""

    claim: Annotated[Count, "the run: grows with each start of the job, also over those that do not count"]
    attempt: Count
    line: Annotated[Count, "its number in the run, from 1"]
    at: datetime
    level: Annotated[str, "debug, info, warning, error or critical"]
    source: Annotated[str, "log (`context.logger` and all other logging), stdout or stderr"]
    text: str
    left_out: Annotated[Count, "lines of the run before it that were left out, for the log was too large"]
    place: Annotated[str, "`after` of what comes behind it"]


class JobLogs(Answer):
    """The lines of the runs of one job, the oldest first."""

    lines: list[LogLine]
    next: Annotated[str | None, "`after` of the next page; null when this is the last"]


class FarmEvents(Answer):
    """The farm's journal, the oldest first. To follow it, ask again with `after` = the last `event_id`."""

    events: list[FarmEvent]


class Deleted(Answer):
    """The job and its journal are gone."""

    job_id: UUID
    deleted: Literal[True]


class BulkOutcome(Answer):
    """The result for one job of a bulk request."""

    job_id: UUID
    outcome: Annotated[str, "`done`, `unknown` (there is no such job) or the status that forbids it"]


class BulkOutcomes(Answer):
    """One entry for each of `job_ids`, in their order."""

    jobs: list[BulkOutcome]
