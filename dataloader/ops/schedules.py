"""Schedules: jobs by the clock (docs/schedules.md). The reaper makes their jobs."""

from __future__ import annotations

from typing import Annotated, Unpack

from pydantic import Field

from dataloader.model.jobs import Triggered
from dataloader.model.kinds import Removed
from dataloader.model.plans import Schedule, Schedules
from dataloader.ops.op import Call, Op, made, operations_on
from dataloader.ops.types import Text
from dataloader.queue.plans import new_schedule
from dataloader.queue.plans import schedules as of_schedules
from dataloader.queue.plans.new_schedule import ScheduleChange, ScheduleName, ScheduleWords
from dataloader.queue.plans.words import Task

Name = Annotated[Text, Field(description="of the schedule")]
Next = Annotated[int, Field(ge=0, le=of_schedules.NEXT_MOST, description="how many due times of each")]


_schedule = operations_on("schedule", "name", "nightly")


@_schedule("list", columns="name task words next_due last_job_id last_job_status skipped remark")
def schedules(call: Call, next: Next = of_schedules.NEXT) -> Schedules:
    """List the schedules: when they are due, their last jobs, what is wrong with them."""
    return made(Schedules, {"schedules": of_schedules.listed(call.conn, next)})


@_schedule("show", examples=("dataloader schedule show nightly --next 20",))
def schedule(call: Call, name: Name, next: Next = of_schedules.NEXT) -> Schedule:
    """Show a schedule with its next due times."""
    return made(Schedule, of_schedules.schedule(call.conn, name, next))


@Op(
    "POST /schedules",
    command="schedule add NAME TASK",
    examples=(
        "dataloader schedule add nightly load.csv --cron '0 3 * * MON-FRI' --args @day.json",
        "dataloader schedule add poll noop --interval-sec 15min",
    ),
    errors=(409,),
    repeatable=False,
)
def add_schedule(call: Call, name: ScheduleName, task: Task, **words: Unpack[ScheduleWords]) -> Schedule:
    """Add a schedule of a task; its first due time is the next one from now on."""
    new = new_schedule.checked({"name": name, "task": task, **words}, call.settings.timezone)
    return made(Schedule, of_schedules.add(call.conn, new, call.by))


@_schedule("set", examples=("dataloader schedule set nightly --cron '30 2 * * *'",))
def change_schedule(call: Call, name: Name, **words: Unpack[ScheduleChange]) -> Schedule:
    """Change a schedule; what is not named stays, null is the default. From then on code changes it no more.

    A new timing counts from now on.
    """
    zone = call.settings.timezone
    return made(Schedule, of_schedules.change(call.conn, name, words, zone, call.by))


@_schedule(
    "remove",
    done="{name} is removed; its jobs stay",
    repeatable=False,
    question="Remove this schedule? It makes no more jobs; those that it has made stay.",
)
def remove_schedule(call: Call, name: Name) -> Removed:
    """Remove a schedule; its jobs stay. One that a pipeline names comes back when a worker starts."""
    of_schedules.remove(call.conn, name)
    return Removed(name=name)


@_schedule(
    "pause",
    done="{name} is paused. To go on: dataloader schedule resume {name!q}{flags}",
    question="Pause this schedule? It makes no jobs until it is resumed.",
)
def pause_schedule(call: Call, name: Name) -> Schedule:
    """Make no jobs of a schedule until it is resumed; those that are made stay."""
    return made(Schedule, of_schedules.pause(call.conn, name, call.by))


@_schedule("resume", done="{name} goes on; it is due at {next_due}")
def resume_schedule(call: Call, name: Name) -> Schedule:
    """End a schedule's pause; the due times of the pause get no job."""
    return made(Schedule, of_schedules.resume(call.conn, name))


@_schedule("run", errors=(409, 429), repeatable=False, links="/job_id", done="job {job_id} is {status}")
def run_schedule(call: Call, name: Name) -> Triggered:
    """Add a job of a schedule now, paused or not; now is its due time."""
    lease_ttl_sec = call.settings.dl_default_lease_ttl_sec
    job_id, status = of_schedules.run(call.conn, name, call.by, lease_ttl_sec)
    return made(Triggered, {"job_id": job_id, "status": status})
