"""Runs in figures, tasks and their needs, and the errors of dead jobs in groups."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from dataloader.model.kinds import Answer, Count


class Spread(Answer):
    """The values of the runs of a period; a percentile is off by less than 10 percent."""

    count: Count
    p50: float
    p95: float
    p99: float
    mean: float
    largest: float


class Figures(Answer):
    """The runs that ended in a period. Each retry is a run; one that was handed back at a drain is none."""

    runs: Count
    succeeded: Count
    failed: Annotated[Count, "with an error, a crash or a lost lease, whether or not the job is tried again"]
    canceled: Count
    per_hour: float
    failure_rate: Annotated[float | None, "null: no run"]
    run_sec: Annotated[Spread | None, "of the runs that have succeeded; null: none"]
    failed_sec: Annotated[Spread | None, "of the failed runs"]
    waiting_sec: Annotated[Spread | None, "from the instant a job was due to its start"]
    memory_mb: Annotated[Spread | None, "of the runs whose worker tells it"]
    cpu_sec: Spread | None


class RunBar(Answer):
    """How many runs took longer than `above` seconds, and at most `up_to`."""

    above: float
    up_to: float
    succeeded: Count
    others: Annotated[Count, "failed or canceled"]


class RunTime(Answer):
    """The runs of a part of the period that begins `at`."""

    at: datetime
    runs: Count
    failed: Count


class RunsOfPeriod(Answer):
    range: str
    since: datetime
    until: datetime
    figures: Figures
    before: Annotated[Figures, "of the period before `since`, as long as `range`"]
    histogram: list[RunBar]
    by_time: list[RunTime]


class RunsOfPart(Answer):
    runs: Count
    failed: Count
    seconds: Annotated[float, "of all these runs together"]


class RunsOfQueue(RunsOfPart):
    """The runs in one queue."""

    queue: str


class RunsOfTask(RunsOfPart):
    """The runs of one task."""

    task: str


class TaskRuns(RunsOfPeriod):
    """What the runs of a task took in a period, and in the one before."""

    task: str
    is_known: Annotated[bool, "a worker has a pipeline for it, or it has run"]
    queues: Annotated[list[RunsOfQueue], "those with the most time first, up to 50"]


class QueueRuns(RunsOfPeriod):
    """What the runs of a queue took in a period, and in the one before."""

    queue: str
    tasks: Annotated[list[RunsOfTask], "those with the most time first, up to 50"]


class Replaces(Answer):
    """How often the latest runs of a task have changed their process, so that their worker was replaced."""

    runs: Count
    replaced: Annotated[Count, "of these runs"]
    changed: Annotated[list[str], "what they have changed: `environment`, `threads` ..."]


class Task(Answer):
    """The memory and the processors that a run of a task needs, as its pipeline declares or as its runs have shown."""

    task: str
    max_attempts: Annotated[int | None, "of a job whose trigger names none; null: 5"]
    memory_mb: Annotated[float | None, "what counts: as declared, else as learned from 128 MB on"]
    cpus: Annotated[float | None, "the same for processors: as declared, else as learned from 1.5 on"]
    declared_memory_mb: float | None
    declared_cpus: float | None
    learned_memory_mb: Annotated[float | None, "95 of 100 of its latest runs used no more"]
    learned_cpus: float | None
    runs: Annotated[Count, "that it was learned from"]
    learned_at: datetime | None
    replaces: Annotated[Replaces | None, "null: its runs leave their process as it was, but for one in ten"]
    figures: Annotated[
        Figures | None, "with `range`: of this period, without memory and processors; null: no run in it"
    ] = None
    before: Annotated[Figures | None, "of the period before"] = None


class Tasks(Answer):
    """The tasks that workers have pipelines for, or that have run."""

    tasks: list[Task]


class ArgsSchema(Answer):
    """What a task takes as args."""

    task: str
    schema: Annotated[
        dict[str, Any] | None, "JSON Schema 2020-12; null: any object will do, or the schema cannot be read"
    ]


class Bucket(Answer):
    """The runs that ended within ten seconds from `at`."""

    at: datetime
    processed: Count
    failed: Count


class Pace(Answer):
    """The runs that ended lately, in buckets of ten seconds, the oldest first."""

    pace: list[Bucket]


class ErrorGroup(Answer):
    """The dead and retrying jobs of a queue and a task with errors of one kind; the latest failure of a job counts."""

    queue: str
    task: str
    error_group: Annotated[str, "the error without what differs from job to job; a filter of lists and orders"]
    dead: Count
    retrying: Annotated[Count, "jobs that wait for their next attempt"]
    first_at: datetime
    last_at: datetime
    by_hour: Annotated[list[Count], "failures in each of the last 24 hours, the oldest first"]
    hosts: Annotated[list[str], "where the latest five jobs ran"]
    job_id: Annotated[UUID, "the latest job"]
    error: Annotated[str | None, "the begin of its error"]
    note: str | None
    noted_by: str | None
    noted_at: datetime | None


class ErrorGroups(Answer):
    """The largest groups, up to 50."""

    groups: list[ErrorGroup]
    is_cut: Annotated[bool, "there are more jobs than were counted: the latest of each queue, 5,000 dead ones in all"]


class ErrorNote(Answer):
    """The note about a group, as it is now."""

    task: str
    error_group: str
    note: Annotated[str | None, "null: there is none any more"]
