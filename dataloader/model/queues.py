"""Queues, their settings, keys and figures; limits of the fleet."""

from __future__ import annotations

from dataclasses import field
from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from dataloader.model.jobs import WaitingFor
from dataloader.model.kinds import Answer, Count, Seconds


class QueueSettings(Answer):
    """The settings of a queue."""

    queue: str
    paused_at: datetime | None
    paused_by: str | None
    max_length: int | None
    ordered: Annotated[bool, "the jobs of a key start in the order of their scores"]
    merge: Annotated[bool, "one delivery takes all queued jobs of a key"]
    merge_limit: Annotated[int, "the most jobs of a key in one delivery"]
    batch: Annotated[int | None, "the most keys in one call of a pipeline; null: as the pipeline says"]
    on_dead: Annotated[Literal["continue", "hold"], "hold: a dead job stops its key"]
    fair_by: Annotated[
        Literal["partition_key", "producer"] | None,
        "the field by whose values the jobs of a priority start in turns; null: they start in their order",
    ]


class QueueState(QueueSettings):
    """The settings of a queue that operators have made."""

    is_known: Annotated[bool, "false: no job, worker or setting named this queue before; it may be mistyped"]
    similar: Annotated[list[str], "the known names most like an unknown one, for those who may read"]


class QueueFigures(Answer):
    """A queue in figures, lower bounds from 1,000 on without `counted_at`. `length` is all that is queued."""

    length: Count
    length_is_exact: bool
    counted_at: Annotated[
        datetime | None,
        "when the reaper counted the figures that are too long to be counted for an answer; null: just now",
    ]
    scheduled: Annotated[Count, "queued, but their time has not come; retries in back-off included"]
    fresh: Annotated[Count, "queued and never run"]
    retries: Annotated[Count, "queued again after a run"]
    busy: Annotated[Count, "running"]
    dead: Annotated[Count, "failed and lost"]
    keys: Annotated[Count | None, "keys that have queued jobs, where a queue is ordered; else null"]
    lag_sec: Annotated[Seconds, "how long the oldest due job has waited"]
    workers: Annotated[Count, "live ones"]
    stopped: Annotated[Count, "those of them whose processes are stopped, by SIGSTOP or a debugger"]
    at_risk: Annotated[Count, "jobs that are going to miss their deadlines, or have, as the reaper predicts"]


class Queue(QueueFigures, QueueSettings):
    """One queue."""


class Total(QueueFigures):
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


class Queues(Answer):
    """Every queue that has jobs, a pause, a limit or a worker."""

    queues: list[Queue]


class Wrong(Answer):
    """A schedule or backfill that makes no jobs, a webhook without its messages, a task without a large enough host."""

    kind: Literal["schedule", "backfill", "webhook", "task"]
    name: str
    error: str
    since: datetime | None
    number: Annotated[Count, "how many of this kind do not work"]


class Overview(Queues):
    """The farm in figures."""

    at: datetime
    total: Total
    wrong: Annotated[list[Wrong], "of each kind the one that has not worked for longest"] = field(default_factory=list)


class Changed(Answer):
    """How many jobs of the queue were changed. Send the request again, with `next` as `after`, until that is null."""

    queue: str
    changed: Count
    next: Annotated[
        str | None, "there may be more behind this place; a request looks at 20,000 jobs, where it has a filter"
    ]


class Moved(Answer):
    """How many jobs are the other queue's now. Send the request again until `is_done`; until then both are paused."""

    queue: str
    to: str
    moved: Count
    is_done: Annotated[bool, "none was left to move, and the other queue goes on"]


class Key(Answer):
    """A key of an ordered queue that has queued jobs; the job is its head, which starts first."""

    lock_key: str
    payloads: Annotated[Count, "its queued jobs; of 1,000 and more at least so many"]
    payloads_is_exact: bool
    job_id: UUID
    score: float | None
    attempt: Count
    available_at: datetime
    waiting_for: Annotated[WaitingFor | None, "why the head does not run yet; null: it has just begun"]


class Keys(Answer):
    """One page of keys, by name."""

    keys: list[Key]
    next: Annotated[str | None, "`after` of the next page; null when this is the last"]


class Limit(Answer):
    """A limit of the fleet: its bounds on all hosts together, and how many of its jobs run and wait."""

    name: str
    most: Annotated[Count | None, "jobs that may run at once; null: any number"]
    per_minute: Annotated[float | None, "jobs that may start in a minute; null: any number"]
    burst: Annotated[Count | None, "of these, how many may start at once after a pause"]
    running: Count
    waiting: Annotated[Count, "jobs that were found without room, counted up to 1,000"]
    tokens: Annotated[float | None, "how many jobs may start now by the rate"]
    room: Annotated[Count, "how many jobs may start now, counted up to 100"]
    changed_by: str | None
    changed_at: datetime


class Limits(Answer):
    """All limits, by name."""

    limits: list[Limit]
