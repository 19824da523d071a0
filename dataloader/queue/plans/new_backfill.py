"""The rules of a backfill, whoever makes it: the API, the command line. It needs pydantic.

A backfill's own words are declared here; the fields of its jobs follow the rules of any new job.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import PydanticCustomError

from dataloader.queue import new_job
from dataloader.queue.fields import INT4_MAX, LIMITS_MOST, OF_PRODUCER
from dataloader.queue.plans import partitions
from dataloader.queue.plans.new_schedule import DEFAULT_QUEUE, NAME, check_name
from dataloader.queue.plans.templates import filled, filled_text

NAME_MOST = 80  # characters: the limit of a backfill holds the name, and so do the keys of its jobs
SPAN = ("since", "until", "step")
# The fields of a backfill's jobs; in args, in priority and in these `{{ partition }}` and the like are filled in.
TEMPLATES = ("lock_key", "partition_key", "affinity_key")
JOB_FIELDS = ("args", "priority", "max_attempts", "lease_ttl_sec", "timeout_sec", *TEMPLATES, "limits")
_SHOWN = 3  # jobs of a dry run, and the last one


def limit_of(name: str) -> str:
    """The limit that every job of this backfill names."""
    return f"backfill:{name}"


def key_of(name: str, partition: str) -> str:
    """The idempotency key of a partition's job."""
    return f"backfill:{name}:{partition}"


def _printable_name(text: str) -> str:
    try:
        check_name(text)
    except ValueError as e:
        raise PydanticCustomError("backfill_name", "{what}", {"what": str(e)}) from None
    return text


class _Rules(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)


class _Whole(_Rules):
    """What is to hold of the fields together."""

    @model_validator(mode="after")
    def _fits(self) -> _Whole:
        try:
            new = definition(self)
            for place in {1, len(new["partitions"])}:
                new_job.checked(job_of(new, new["partitions"][place - 1], place))
        except ValueError as e:
            raise PydanticCustomError("backfill", "{what}", {"what": str(e)}) from None
        return self


_Partition = Annotated[str, Field(min_length=1, max_length=partitions.LONGEST), AfterValidator(new_job.printable)]
_Bound = Annotated[str, Field(max_length=30)]
_of_producer = {field.name: new_job.rule(field) for field in OF_PRODUCER}
_jobs: dict[str, Any] = {name: _of_producer[name] for name in JOB_FIELDS}
_jobs["lock_key"] = (_jobs["lock_key"][0] | None, None)
_jobs["partition_key"] = (_jobs["partition_key"][0] | None, None)
_jobs["priority"] = (_jobs["priority"][0] | Annotated[str, Field(max_length=100)], partitions.OF_JOBS["priority"])
_name: Any = Annotated[
    str, Field(min_length=1, max_length=NAME_MOST, json_schema_extra={"pattern": NAME}), AfterValidator(_printable_name)
]
MaxRunning = Annotated[
    int, Field(ge=1, le=INT4_MAX, description="so many of its jobs run at once; default: any number")
]
_own: dict[str, Any] = {
    "task": _of_producer["task"],
    "queue": (_of_producer["queue"][0], DEFAULT_QUEUE),
    "since": (Annotated[_Bound, Field(description="the first partition: a date, a time, a whole number")] | None, None),
    "until": (Annotated[_Bound, Field(description="the last partition begins here, or before")] | None, None),
    "step": (Annotated[_Bound, Field(description=f"from one partition to the next: {partitions.STEPS}")] | None, None),
    "partitions": (
        Annotated[
            list[_Partition],
            Field(min_length=1, max_length=partitions.MOST, description="instead of a range: each by its name"),
        ]
        | None,
        None,
    ),
    "max_running": (MaxRunning | None, None),
    "skip_done": (
        Annotated[bool, Field(description="leave out what another backfill has done with the same args")],
        False,
    ),
    "code_version": (
        Annotated[
            str, Field(max_length=100, description="for skip_done: what was done by another version is not done")
        ],
        "",
    ),
}
NewBackfill = create_model(
    "NewBackfill",
    __base__=_Whole,
    __doc__="A backfill: a range (since, until, step) or a list of partitions, and the fields of the job of each.",
    __module__=__name__,
    name=(_name, ...),
    **_own,
    **_jobs,
)


def definition(new: BaseModel) -> dict[str, Any]:
    """The columns of dl_backfills that a backfill fills, and its `partitions`; raises ValueError for wrong ones."""
    given = {name: getattr(new, name) for name in new.model_fields_set}
    own = {name: getattr(new, name) for name in ("name", "task", "queue", "max_running", "skip_done", "code_version")}
    job = {name: given[name] for name in JOB_FIELDS if given.get(name) is not None}
    span = {name: given[name] for name in SPAN if given.get(name) is not None}
    return own | {"job": job, "span": span or None, "partitions": _chosen(span, given.get("partitions"))}


def _chosen(span: Mapping[str, str], listed: Sequence[str] | None) -> list[str]:
    if bool(span) is bool(listed):
        raise ValueError("a backfill should have one of a range (since, until and step) and partitions")
    if listed:
        twice, times = Counter(listed).most_common(1)[0]
        if times > 1:
            raise ValueError(f"partitions should hold each partition once: {twice!r} comes {times} times")
        return list(listed)
    if missing := [name for name in SPAN if name not in span]:
        raise ValueError(f"a range should have since, until and step: {' and '.join(missing)} is missing")
    return partitions.of_range(**span)


def checked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`definition` of a backfill with these fields; raises ValueError, which names every wrong one."""
    try:
        return definition(NewBackfill.model_validate(dict(fields)))
    except ValidationError as e:
        raise ValueError(new_job.in_words(e)) from None


def job_of(
    backfill: Mapping[str, Any], partition: str, place: int, of_task: Sequence[str] = (), lease_ttl_sec: int = 60
) -> dict[str, Any]:
    """The fields of the job of a partition, unchecked; raises ValueError for a template that names no fact.

    `of_task` are the limits that the pipeline names, for a job that names none.
    """
    name, said = backfill["name"], backfill["job"]
    facts = partitions.facts(partition, place, name, backfill["task"], backfill["span"])
    job = partitions.OF_JOBS | said
    texts = {field: filled_text(job[field], facts) for field in TEMPLATES if field in job}
    limits = [*said.get("limits", of_task), limit_of(name)]
    if len(limits) > LIMITS_MOST:
        raise ValueError(f"limits should be at most {LIMITS_MOST - 1}, for one is the backfill's own")
    own = {"task": backfill["task"], "queue": backfill["queue"], "limits": limits, "producer": f"backfill {name}"}
    filled_in = {"args": filled(job.get("args", {}), facts), "priority": _priority(job["priority"], facts)}
    return {
        "lease_ttl_sec": lease_ttl_sec,
        **job,
        **texts,
        **own,
        **filled_in,
        "idempotency_key": key_of(name, partition),
    }


def _priority(said: int | str, facts: Mapping[str, Any]) -> int:
    if isinstance(said, int):
        return said
    try:
        return int(filled_text(said, facts))
    except ValueError as e:
        raise ValueError(f"priority should become a whole number: {e}") from None


def fingerprint(backfill: Mapping[str, Any], args: Mapping[str, Any]) -> UUID:
    """The hash by which the ledger knows the same work again: of task, code version and args."""
    work = json.dumps([backfill["task"], backfill["code_version"], args], ensure_ascii=False, sort_keys=True)
    return UUID(bytes=hashlib.md5(work.encode(), usedforsecurity=False).digest())


def samples(backfill: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The jobs of the first partitions and of the last one, for people."""
    listed = backfill["partitions"]
    places = sorted({*range(1, min(_SHOWN, len(listed)) + 1), len(listed)})
    fields = ("args", "lock_key", "partition_key", "priority")
    return [
        {"partition": listed[place - 1], **{name: job[name] for name in fields}}
        for place in places
        for job in [job_of(backfill, listed[place - 1], place)]
    ]
