"""The rules of a schedule, whoever makes it: code, the API, the command line, the dashboard.

A schedule's own words are declared here; the fields of its jobs follow the rules of any new job. It needs pydantic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import PydanticCustomError

from dataloader.queue import new_job
from dataloader.queue.fields import OF_PRODUCER
from dataloader.queue.plans import times
from dataloader.queue.plans.templates import filled, filled_text

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.:+@-]*$"
OVERLAP = SKIP, QUEUE, CANCEL_OLD = ("skip", "queue", "cancel_old")
DEFAULT_QUEUE = "etl.default"
# The fields of a schedule's jobs; in args and in TEMPLATES `{{ due }}` and the like are filled in.
TEMPLATES = ("lock_key", "partition_key", "affinity_key")
JOB_FIELDS = ("queue", "task", "args", "priority", "max_attempts", "lease_ttl_sec", "timeout_sec", *TEMPLATES)
# By when its jobs should have ended: one of the two, kept beside the fields of its jobs.
DEADLINES = ("deadline", "deadline_sec")
OWN_FIELDS = ("cron", "interval_sec", "timezone", "catch_up", "overlap", "jitter_sec")
_CatchUp: TypeAlias = Literal[times.CATCH_UP]  # type: ignore[valid-type]
_Overlap: TypeAlias = Literal[OVERLAP]  # type: ignore[valid-type]
_SAMPLE = times.Timing(None, 60, "UTC")


def _printable_name(text: str) -> str:
    return _or_error("schedule_name", check_name, text)


def _cron(text: str) -> str:
    return _or_error("cron", times.check_cron, text)


def _clock(text: str) -> str:
    return _or_error("clock", times.check_clock, text)


def _zone(name: str) -> str:
    return _or_error("time_zone", times.zone_of, name)


def _or_error(kind: Any, check: Any, text: str) -> str:
    try:
        check(text)
    except ValueError as e:
        raise PydanticCustomError(kind, "{what}", {"what": str(e)}) from None
    return text


class _Rules(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)


class _Whole(_Rules):
    """What is to hold of the fields together."""

    @model_validator(mode="after")
    def _fits(self) -> _Whole:
        given = {name: getattr(self, name, None) for name in ("cron", "interval_sec")}
        if sum(value is not None for value in given.values()) != 1:
            raise PydanticCustomError("timing", "should have one of cron and interval_sec")
        if all(getattr(self, name, None) is not None for name in DEADLINES):
            raise PydanticCustomError("deadline", "should have one of deadline and deadline_sec, not both")
        try:
            new_job.checked(job_of("x", definition(self, "UTC"), times.facts("x", _SAMPLE, new_job.EARLIEST, None)))
        except ValueError as e:
            raise PydanticCustomError("job", "{what}", {"what": str(e)}) from None
        return self


_Cron = Annotated[str, Field(max_length=200, description=f"when it is due: {times.CRON}"), AfterValidator(_cron)]
_Interval = Annotated[int, Field(ge=1, le=times.INTERVAL_MOST, description="instead of cron: every so many seconds")]
_TimeZone = Annotated[str, Field(max_length=100, description="of cron; default: TIMEZONE"), AfterValidator(_zone)]
_Jitter = Annotated[float, Field(ge=0, le=86_400, description="a job begins up to so many seconds after its due time")]
_Clock = Annotated[
    str,
    Field(max_length=5, description="its jobs should have ended by this time of the day behind the due time: 07:00"),
    AfterValidator(_clock),
]
_DeadlineSec = Annotated[
    int, Field(ge=1, le=times.INTERVAL_MOST, description="instead of deadline: so many seconds behind the due time")
]
_own: dict[str, Any] = {
    "cron": (_Cron | None, None),
    "interval_sec": (_Interval | None, None),
    "timezone": (_TimeZone | None, None),
    "catch_up": (Annotated[_CatchUp, Field(description="which missed due times still get a job")], times.LAST),
    "overlap": (
        Annotated[_Overlap, Field(description="what a due time does while the job before has not ended")],
        QUEUE,
    ),
    "jitter_sec": (_Jitter, 0.0),
}
_jobs: dict[str, Any] = {field.name: new_job.rule(field) for field in OF_PRODUCER if field.name in JOB_FIELDS}
_jobs["queue"] = (_jobs["queue"][0], DEFAULT_QUEUE)
_jobs["lock_key"] = (_jobs["lock_key"][0] | None, None)
_jobs |= {"deadline": (_Clock | None, None), "deadline_sec": (_DeadlineSec | None, None)}
_name: Any = Annotated[
    str, Field(min_length=1, max_length=150, json_schema_extra={"pattern": NAME}), AfterValidator(_printable_name)
]
NewSchedule = create_model(
    "NewSchedule",
    __base__=_Whole,
    __doc__="A schedule, and the fields of its jobs. The default of the job's field stands for a missing one.",
    __module__=__name__,
    name=(_name, ...),
    **_own,
    **_jobs,
)
_changes: dict[str, Any] = {name: (kind | None, None) for name, (kind, _) in (_own | _jobs).items()}
ScheduleChange = create_model(
    "ScheduleChange",
    __base__=_Rules,
    __doc__="What is to be changed of a schedule; a field that is left out stays, null is its default.",
    __module__=__name__,
    **_changes,
)


def check_name(text: str) -> None:
    """Raise ValueError, which says what would be right, unless `text` may be the name of a schedule."""
    if not re.fullmatch(NAME, text):
        raise ValueError("should be letters of A to Z, digits and . : + @ - _, and begin with a letter or a digit")


def definition(new: BaseModel, zone: str) -> dict[str, Any]:
    """The columns of dl_schedules that a valid schedule fills; `zone` is the time zone of one that names none."""
    given = {name: getattr(new, name) for name in new.model_fields_set}
    own = {name: getattr(new, name) for name in ("name", *OWN_FIELDS)}
    job = {name: given[name] for name in (*JOB_FIELDS, *DEADLINES) if given.get(name) is not None}
    return own | {"timezone": own["timezone"] or zone, "job": {"queue": DEFAULT_QUEUE} | job}


def checked(fields: Mapping[str, Any], zone: str) -> dict[str, Any]:
    """`definition` of a schedule with these fields; raises ValueError, which names every wrong one."""
    try:
        return definition(NewSchedule.model_validate(dict(fields)), zone)
    except ValidationError as e:
        raise ValueError(new_job.in_words(e)) from None


def job_of(name: str, schedule: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the job of a due time, unchecked; raises ValueError for a template that names no fact."""
    job = {"lock_key": name, **schedule["job"]}
    clock, seconds = (job.pop(name, None) for name in DEADLINES)
    ends = times.deadline(datetime.fromisoformat(facts["due"]), schedule["timezone"], clock, seconds)
    job |= {"deadline": ends} if ends else {}
    texts = {field: filled_text(job[field], facts) for field in TEMPLATES if field in job}
    return job | texts | {"args": filled(job.get("args", {}), facts)}


def as_given(schedule: Mapping[str, Any]) -> dict[str, Any]:
    """The fields from which `definition` makes this schedule."""
    own = {name: schedule[name] for name in ("name", *OWN_FIELDS) if schedule[name] is not None}
    return {**own, **schedule["job"]}


def with_changes(schedule: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A schedule's fields with these. Null takes a field back to its default, a new timing or deadline replaces the old
    one.
    """
    found = as_given(schedule)
    if changes.get("cron") is not None or changes.get("interval_sec") is not None:
        found = {name: value for name, value in found.items() if name not in ("cron", "interval_sec")}
    if any(changes.get(name) is not None for name in DEADLINES):
        found = {name: value for name, value in found.items() if name not in DEADLINES}
    return {name: value for name, value in (found | dict(changes)).items() if value is not None}
