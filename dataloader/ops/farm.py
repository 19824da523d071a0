"""The farm as a whole: its workers, tasks, names, pace, journal and database."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dataloader.model.farm import Database, Names, Workers
from dataloader.model.jobs import FarmEvents
from dataloader.model.runs import ArgsSchema, Pace, TaskRuns, Tasks
from dataloader.ops.errors import Unknown
from dataloader.ops.op import Call, Op, made
from dataloader.ops.types import BIGINT_MAX, PageSize, RangeName, TaskName, Text
from dataloader.queue import args_schema as schemas
from dataloader.queue import operations
from dataloader.queue.reports import runs, stats

MINUTES = 360


@Op(
    "GET /workers",
    command="ps",
    columns="worker queues state live=is_live memory=memory_bytes CPU=cpu_percent jobs task key=lock_key"
    " started=job_started_at progress",
    examples=("dataloader ps",),
)
def workers(call: Call) -> Workers:
    """The workers of all hosts that were seen in the last ten minutes, and what they run."""
    return made(Workers, {"workers": stats.workers(call.conn)})


@Op(
    "GET /tasks",
    command="tasks",
    columns="task memory=memory_mb CPUs=cpus learned_memory=learned_memory_mb learned_CPUs=learned_cpus runs"
    " learned=learned_at runs_since=figures.runs failed=figures.failure_rate p50=figures.run_sec.p50"
    " p95=figures.run_sec.p95 p99=figures.run_sec.p99 p95_before=before.run_sec.p95"
    " waiting_p95=figures.waiting_sec.p95",
    examples=("dataloader tasks", "dataloader tasks --range 7d"),
)
def tasks(
    call: Call,
    range: Annotated[RangeName, Field(description="adds what the runs of this time have used")] | None = None,
) -> Tasks:
    """The memory and the processors that the runs of each task need; with `range` also what its runs have used.

    A task is listed that workers have pipelines for, or that has run.
    """
    return made(Tasks, {"tasks": runs.tasks_with_runs(call.conn, range) if range else stats.tasks(call.conn)})


@Op("GET /tasks/{task}", command="task TASK", examples=("dataloader task load.csv --range 7d",))
def task_runs(call: Call, task: TaskName, range: RangeName = runs.USUAL) -> TaskRuns:
    """How long the runs of a task were: counts, failures, percentiles, a histogram, and the period before."""
    return made(TaskRuns, runs.task_runs(call.conn, task, range))


@Op("GET /tasks/{task}/schema", scope=("read", "trigger"), errors=(404,))
def args_schema(call: Call, task: TaskName) -> ArgsSchema:
    """The JSON Schema of a task's args, as the worker that started last has shown it; null: any object will do."""
    known = operations.args_schemas(call.conn, [task])
    if task not in known:
        raise Unknown("task")
    return ArgsSchema(task=task, schema=schemas.readable(known[task]))


@Op("GET /names", scope=("read", "trigger", "operate"))
def names(call: Call, queue: Text | None = None, task: Text | None = None) -> Names:
    """Whether the farm knows a queue and a task, before a mistyped name makes a new one; with similar names."""
    hidden: dict[str, list[str]] = {} if call.may_read else {"similar": []}
    given = {"queue": queue, "task": task}
    known = {kind: name and operations.known(call.conn, kind, name) | hidden for kind, name in given.items()}
    return made(Names, known)


@Op("GET /pace")
def pace(call: Call, minutes: Annotated[int, Field(ge=1, le=MINUTES, description="how far back")] = 60) -> Pace:
    """How many jobs ended in each ten seconds of the last minutes."""
    return made(Pace, {"pace": stats.pace(call.conn, minutes)})


@Op("GET /events")
def events(
    call: Call,
    after: Annotated[int, Field(ge=0, le=BIGINT_MAX, description="rows with a greater `event_id`")] | None = None,
    queue: Text | None = None,
    limit: PageSize = 200,
) -> FarmEvents:
    """The journal of all jobs, the oldest first; without `after` the newest rows."""
    return made(FarmEvents, {"events": stats.latest_events(call.conn, after, limit, queue)})


@Op("GET /database")
def database(call: Call) -> Database:
    """The queue's database: size, sessions, dead rows, the oldest transaction, and what holds back its vacuum."""
    return made(Database, stats.postgres(call.conn, call.settings.dl_reaper_period_sec))
