"""Schedules and backfills."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from dataloader import periods
from dataloader.model.jobs import Template
from dataloader.model.kinds import Answer, Count, JobStatus, PartitionState, Seconds

OVERDUE_SEC = periods.seconds("SCHEDULE_OVERDUE_SEC", 120.0)  # from then on nobody seems to make the jobs
ENDED = ("succeeded", "failed", "canceled", "lost", "skipped")  # the states of partitions that need no more work


class Schedule(Template):
    """A schedule, the fields of its jobs, its due times and its last job; secrets in `args` are masked."""

    origin: Annotated[Literal["code", "people"], "code: a pipeline names it"]
    cron: str | None
    interval_sec: int | None
    timezone: str
    words: Annotated[str, "when it is due, for people"]
    catch_up: Literal["none", "last", "all"]
    overlap: Literal["skip", "queue", "cancel_old"]
    jitter_sec: float
    priority: int
    deadline: Annotated[str | None, "the time of the day by which its jobs should have ended, such as 07:00"]
    deadline_sec: Annotated[int | None, "how long after the due time, in seconds"]
    created_at: datetime
    created_by: str
    changed_at: Annotated[datetime | None, "by people: from then on code changes it no more"]
    changed_by: str | None
    paused_at: datetime | None
    paused_by: str | None
    retired_at: Annotated[datetime | None, "since when its pipeline names it no more, so it makes no jobs"]
    next_due: datetime | None
    next: Annotated[list[datetime], "its next due times; none while it makes no jobs"]
    overdue_sec: Annotated[Seconds, "for how long a due time has waited for a reaper"]
    last_due: datetime | None
    last_job_id: UUID | None
    last_job_status: Annotated[JobStatus | None, "null: there is no such job any more"]
    skipped: Annotated[Count, "due times without a job, by its overlap"]
    last_skipped: datetime | None
    error: Annotated[str | None, "why its jobs cannot be made; the reaper tries again every minute"]
    error_at: datetime | None

    @property
    def remark(self) -> str:
        """Why a schedule makes no jobs; "" where it does."""
        if self.paused_at:
            return f"paused by {self.paused_by}"
        if self.retired_at:
            return "retired: its pipeline names it no more"
        if self.error:
            return f"its jobs cannot be made: {self.error}"
        if self.overdue_sec > OVERDUE_SEC:
            return f"overdue for {self.overdue_sec:.0f} s: no reaper makes its jobs"
        return ""


class Schedules(Answer):
    """All schedules."""

    schedules: list[Schedule]


class Backfill(Template):
    """A backfill, the fields of its jobs, and what became of its partitions; secrets in `args` are masked."""

    state: Literal["making", "running", "paused", "canceled", "done"]
    since: Annotated[str | None, "of a range; null: its partitions were listed"]
    until: str | None
    step: str | None
    total: Annotated[Count, "partitions"]
    made: Annotated[Count, "of these, how many the reaper has come to: they have a job, or are skipped"]
    counts: Annotated[
        dict[PartitionState, Count],
        "partitions by the status of their jobs; missing: there is no job, skipped: another backfill did it",
    ]
    eta_sec: Annotated[float | None, "until all have ended, by the pace of the last ten minutes"]
    max_running: Annotated[Count | None, "so many of its jobs run at once; null: any number"]
    skip_done: bool
    code_version: str
    priority: int | str
    limits: list[str] | None
    canceled: Annotated[Count, "the partitions to which a cancellation has come"]
    created_at: datetime
    created_by: str
    started_at: Annotated[datetime | None, "of its first job"]
    paused_at: datetime | None
    paused_by: str | None
    canceled_at: datetime | None
    canceled_by: str | None
    error: Annotated[str | None, "why its next jobs cannot be made; the reaper tries again"]
    error_at: datetime | None
    overdue_sec: Annotated[Seconds, "for how long its next jobs have waited for a reaper"]

    @property
    def ended(self) -> int:
        """How many partitions need no more work: their jobs have ended, or they are skipped."""
        return sum(self.counts.get(state, 0) for state in ENDED)

    @property
    def dead(self) -> int:
        """How many partitions have jobs that are failed or lost."""
        return self.counts.get("failed", 0) + self.counts.get("lost", 0)


class Backfills(Answer):
    """The newest backfills."""

    backfills: list[Backfill]


class BackfillSample(Answer):
    """A job that a backfill would make."""

    partition: str
    args: dict[str, Any]
    lock_key: str
    partition_key: str
    priority: int


class BackfillPreview(Answer):
    """How a backfill would go; the call changes no job."""

    name: str
    task: str
    queue: str
    total: Annotated[Count, "partitions"]
    skipped: Annotated[Count, "of these, how many are done already"]
    samples: Annotated[list[BackfillSample], "the jobs of the first partitions and of the last one"]


class BackfillRetried(Answer):
    """How many dead jobs are queued again; `next` is `after` of the request that goes on."""

    changed: Count
    next: int | None


class Partition(Answer):
    """A partition of a backfill."""

    place: Count
    partition: str
    status: PartitionState
    job_id: UUID | None
    finished_at: datetime | None


class Partitions(Answer):
    """Some partitions of a backfill, in their order; `next` is `after` of the next page."""

    partitions: list[Partition]
    next: int | None
