"""The rules of a schedule, for code, the API, the command line and the dashboard. It needs pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from dataloader.queue import new_job
from dataloader.queue.plans import times, words
from dataloader.queue.plans.plan import Wrong
from dataloader.queue.plans.words import NAME as NAME

# By when its jobs should have ended: one of the two, kept beside the fields of its jobs.
DEADLINES = ("deadline", "deadline_sec")
TIMINGS = ("cron", "interval_sec")
# The defaults of a schedule; all other parameters are those of its jobs.
OWN: dict[str, Any] = {
    "cron": None,
    "interval_sec": None,
    "timezone": None,
    "catch_up": times.LAST,
    "overlap": "queue",
    "jitter_sec": 0.0,
}
_SAMPLE = times.facts("x", times.Timing(None, 60, "UTC"), new_job.EARLIEST, None)
ScheduleName = words.name_of("schedule", 150)


def _span(text: str) -> Any:
    return Field(ge=1, le=times.INTERVAL_MOST, description=text)


class ScheduleWords(words.JobWords, total=False):
    """When a schedule is due, and the fields of its jobs; null is the default (docs/schedules.md)."""

    cron: Annotated[
        str | None,
        Field(max_length=200, description=f"when it is due: {times.CRON}"),
        words.checks("cron", times.check_cron),
    ]
    interval_sec: Annotated[int | None, _span("instead of cron: every so many seconds")]
    timezone: Annotated[
        str | None,
        Field(max_length=100, description="of cron; default: TIMEZONE"),
        words.checks("time_zone", times.zone_of),
    ]
    catch_up: Annotated[
        Literal["none", "last", "all"] | None,
        Field(description="which missed due times still get a job; default: last, one of them"),
    ]
    overlap: Annotated[
        Literal["skip", "queue", "cancel_old"] | None,
        Field(description="what a due time does while the job before has not ended; default: queue"),
    ]
    jitter_sec: Annotated[
        float | None, Field(ge=0, le=86_400, description="a job begins up to so many seconds after its due time")
    ]
    priority: Annotated[int | None, words.job_field("priority")]
    deadline: Annotated[
        str | None,
        Field(
            max_length=5, description="by when its jobs should have ended, a time of the day behind the due time: 07:00"
        ),
        words.checks("clock", times.check_clock),
    ]
    deadline_sec: Annotated[int | None, _span("instead of deadline: so many seconds behind the due time")]


class ScheduleChange(ScheduleWords, total=False):
    """The changes of a schedule: a field that is left out stays, null is its default."""

    task: Annotated[words.Task, Field(description="another task")]


_NewSchedule = words.model_of("NewSchedule", ScheduleWords, name=ScheduleName, task=words.Task)


def checked(fields: Mapping[str, Any], zone: str) -> dict[str, Any]:
    """The columns of dl_schedules of name, task and ScheduleWords; `zone` is the default. Raises plan.Wrong."""
    given = words.given(_NewSchedule, fields)
    for names in (TIMINGS, DEADLINES):
        if all(name in given for name in names) or (names is TIMINGS and not any(name in given for name in names)):
            raise Wrong(f"should have one of {' and '.join(names)}" + (", not both" if names is DEADLINES else ""))
    own = {name: given.pop(name, value) for name, value in OWN.items()} | {"name": given.pop("name")}
    new = own | {"timezone": own["timezone"] or zone, "job": {"queue": words.DEFAULT_QUEUE} | given}
    try:
        new_job.checked(job_of("x", new | {"timezone": own["timezone"] or "UTC"}, _SAMPLE))
    except ValueError as e:
        raise Wrong(str(e)) from None
    return new


def job_of(name: str, schedule: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the job of a due time, unchecked; raises ValueError for a template that names no fact."""
    job = {"lock_key": name, **schedule["job"]}
    clock, seconds = (job.pop(name, None) for name in DEADLINES)
    ends = times.deadline(datetime.fromisoformat(facts["due"]), schedule["timezone"], clock, seconds)
    return words.filled_in(job | ({"deadline": ends} if ends else {}), facts)


def with_changes(schedule: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields from which `checked` makes this schedule, with changes; null is the default, a new timing replaces."""
    fields = {name: schedule[name] for name in ("name", *OWN)} | schedule["job"]
    for names in (TIMINGS, DEADLINES):
        if any(changes.get(name) is not None for name in names):
            fields |= dict.fromkeys(names)
    return {name: value for name, value in (fields | dict(changes)).items() if value is not None}
