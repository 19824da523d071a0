"""The rules of a backfill, for the API and the command line. It needs pydantic."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from uuid import UUID

from pydantic import AfterValidator, Field

from dataloader.queue import new_job
from dataloader.queue.fields import INT4_MAX, LIMITS_MOST
from dataloader.queue.plans import partitions, words
from dataloader.queue.plans.partitions import SPAN, limit_of
from dataloader.queue.plans.plan import Wrong

NAME_MOST = 80  # characters: the limit of a backfill holds the name, and so do the keys of its jobs
# The defaults of a backfill, beside its name and task; all other parameters are those of its jobs.
OWN: dict[str, Any] = {"queue": words.DEFAULT_QUEUE, "max_running": None, "skip_done": False, "code_version": ""}
_SHOWN = 3  # jobs of a dry run, and the last one
_Partition = Annotated[str, Field(min_length=1, max_length=partitions.LONGEST), AfterValidator(new_job.printable)]
BackfillName = words.name_of("backfill", NAME_MOST)
MaxRunning = Annotated[int, Field(ge=1, le=INT4_MAX, description="so many of its jobs run at once; null: any number")]


def _bound(text: str) -> Any:
    return Field(max_length=30, description=text)


class BackfillWords(words.JobWords, total=False):
    """A range (since, until, step) or a list of partitions, and the fields of the job of each (docs/backfills.md)."""

    since: Annotated[str | None, _bound("the first partition: a date, a time, a whole number")]
    until: Annotated[str | None, _bound("the last partition begins here, or before")]
    step: Annotated[str | None, _bound(f"from one partition to the next: {partitions.STEPS}")]
    partitions: Annotated[
        list[_Partition] | None,
        Field(min_length=1, max_length=partitions.MOST, description="instead of a range: each by its name"),
    ]
    max_running: MaxRunning | None
    skip_done: Annotated[bool | None, Field(description="leave out what another backfill has done with the same args")]
    code_version: Annotated[
        str | None, Field(max_length=100, description="for skip_done: what was done by another version is not done")
    ]
    priority: Annotated[
        Annotated[int, words.job_field("priority")] | Annotated[str, Field(max_length=100)] | None,
        Field(description="a number, or a template that becomes one; default: 200, behind other jobs"),
    ]
    limits: Annotated[words.Names | None, Field(description="other limits that its jobs count for")]


_NewBackfill = words.model_of("NewBackfill", BackfillWords, name=BackfillName, task=words.Task)


def key_of(name: str, partition: str) -> str:
    """The idempotency key of a partition's job."""
    return f"backfill:{name}:{partition}"


def checked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of dl_backfills and the `partitions` of name, task and BackfillWords; raises plan.Wrong."""
    given = words.given(_NewBackfill, fields)
    span = {name: given.pop(name) for name in SPAN if name in given}
    own = {name: given.pop(name) for name in ("name", "task")}
    own |= {name: given.pop(name, value) for name, value in OWN.items()} | {"span": span or None}
    try:
        new = own | {"partitions": _chosen(span, given.pop("partitions", None)), "job": given}
        for place in {1, len(new["partitions"])}:
            new_job.checked(job_of(new, new["partitions"][place - 1], place))
    except ValueError as e:
        raise Wrong(str(e)) from None
    return new


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
    return partitions.partitions_between(**span)


def job_of(
    backfill: Mapping[str, Any], partition: str, place: int, of_task: Sequence[str] = (), lease_ttl_sec: int = 60
) -> dict[str, Any]:
    """The fields of a partition's job, unchecked; `of_task`: limits of a job that names none. Raises ValueError."""
    name = backfill["name"]
    facts = partitions.facts(partition, place, name, backfill["task"], backfill["span"])
    job = {"lease_ttl_sec": lease_ttl_sec, **partitions.OF_JOBS, **backfill["job"]}
    limits = [*job.get("limits", of_task), limit_of(name)]
    if len(limits) > LIMITS_MOST:
        raise ValueError(f"limits should be at most {LIMITS_MOST - 1}, for one is the backfill's own")
    priority = job["priority"]
    if isinstance(priority, str):
        try:
            priority = int(words.filled_text(priority, facts))
        except ValueError as e:
            raise ValueError(f"priority should become a whole number: {e}") from None
    return words.filled_in(job, facts) | {
        "task": backfill["task"],
        "queue": backfill["queue"],
        "limits": limits,
        "priority": priority,
        "producer": f"backfill {name}",
        "idempotency_key": key_of(name, partition),
    }


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
