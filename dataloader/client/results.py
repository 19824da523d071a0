"""The answers of the service as frozen values. A field that a newer service adds stands in `document`."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from dataloader.client.errors import Unexpected

R = TypeVar("R")
Document = Mapping[str, Any]
FINAL = frozenset({"succeeded", "failed", "canceled", "lost"})


@dataclass(frozen=True, slots=True)
class Started:
    """A triggered job and its status, which is not always `queued`: the idempotency key may have been known."""

    job_id: UUID
    status: str
    document: Document = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Job:
    """A job at the time of the answer; a field that the answer lacks is None or empty.

    `started_at` is the first start of all attempts; `run_sec` the duration of the last run, None while the job runs.
    `waiting_for` is the reason why a queued job does not run yet. Only `Client.job` returns `args`. `progress` is the
    pipeline's last report, usually an object. Only `Client.run` fills in `result`, what the pipeline has returned.
    `schedule` has the `name` and the `due` time of the schedule that has made it, `checkpoint` the `saved_at` and the
    `bytes` of what its runs have saved; only `Client.job` returns these.
    """

    job_id: UUID
    status: str
    queue: str = ""
    task: str = ""
    lock_key: str = ""
    partition_key: str = ""
    priority: int | None = None
    attempt: int = 0
    max_attempts: int | None = None
    timeout_sec: int | None = None
    score: float | None = None
    lease_ttl_sec: int | None = None
    created_at: datetime | None = None
    available_at: datetime | None = None
    started_at: datetime | None = None
    heartbeat_at: datetime | None = None
    finished_at: datetime | None = None
    run_sec: float | None = None
    changed_at: datetime | None = None
    lease_expires_at: datetime | None = None
    error: str | None = None
    progress: Any = field(default_factory=dict)
    args: Any = None
    result: Any = None
    waiting_for: Document | None = None
    cancel_requested: bool = False
    cancel_forced: bool = False
    claimed_by: str | None = None
    producer: str | None = None
    consumer_group: str | None = None
    affinity_key: str | None = None
    limits: list[str] | None = None
    deadline: datetime | None = None
    idempotency_key: str | None = None
    trace: str | None = None
    schedule: Document | None = None
    checkpoint: Document | None = None
    document: Document = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_final(self) -> bool:
        """True for a job that has ended: succeeded, failed, canceled or lost."""
        return self.status in FINAL

    @property
    def fraction(self) -> float | None:
        """The finished share, 0 to 1, where the progress has `processed` and `total`; else None."""
        return fraction(self.progress)


@dataclass(frozen=True, slots=True)
class Result:
    """The value that the pipeline of a job has returned, and the job's status."""

    job_id: UUID
    status: str
    result: Any
    document: Document = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the journal."""

    event_id: int
    ts: datetime
    kind: str
    payload: Any = None
    job_id: UUID | None = None
    queue: str = ""
    document: Document = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of what a run of a job has written. `source`: log, stdout or stderr.

    `left_out` lines were before it, of a log that was too large. `place` is the `after` of what comes behind the line.
    """

    claim: int
    attempt: int
    line: int
    at: datetime
    level: str
    source: str
    text: str
    left_out: int
    place: str
    document: Document = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Tally:
    """The counts beside a list of jobs: each job counts as one of `counts`.

    Its kinds are ready, scheduled, blocked, running, succeeded, failed, lost and canceled. `at_least` names the kinds
    of which there are more jobs than the service has looked at.
    """

    counts: Document = field(default_factory=dict)
    total: int = 0
    at_least: tuple[str, ...] = ()
    document: Document = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Left:
    """Jobs of a list that an order leaves alone, by kind, and why: the job ... `reason`."""

    kind: str
    count: int = 0
    reason: str = ""
    document: Document = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Preview:
    """What an order to many jobs would do: it would change `count` jobs, at least so many unless `is_exact`.

    `changes` has the count by kind, `leaves` the jobs that stay as they are. `as_of`: jobs that change after that stay
    too. `target` is what the preview was asked for; with it and `confirmation` the order is given (`change_previewed`).
    """

    order: str
    count: int = 0
    is_exact: bool = True
    changes: Document = field(default_factory=dict)
    leaves: tuple[Left, ...] = ()
    as_of: datetime | None = None
    confirmation: str = ""
    target: Document = field(default_factory=dict, repr=False, compare=False)
    document: Document = field(default_factory=dict, repr=False, compare=False)


def fraction(progress: Any) -> float | None:
    """`processed` of `total`, 0 to 1, where both are numbers and `total` is positive; else None."""
    if not isinstance(progress, dict):
        return None
    done, total = progress.get("processed"), progress.get("total")
    if isinstance(done, int | float) and isinstance(total, int | float) and total > 0:
        return min(1.0, max(0.0, done / total))
    return None


def read(kind: type[R], document: Any) -> R:
    """`document` as a value of `kind`; raises Unexpected where it does not fit."""
    if not isinstance(document, dict):
        raise _not_understood(kind.__name__, "it should be an object")
    given: dict[str, Any] = {"document": document}
    for name, wanted, is_required in _wanted(kind):  # type: ignore[arg-type]
        if name in document:
            given[name] = _value(wanted, document[name], name)
        elif is_required:
            raise _not_understood(kind.__name__, f"{name} is missing")
    return kind(**given)


def read_all(kind: type[R], document: Any, name: str) -> list[R]:
    """The list `name` of `document`, as values of `kind`; raises Unexpected where it does not fit."""
    listed = document.get(name) if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise _not_understood(name, "it should be a list")
    return [read(kind, each) for each in listed]


@cache
def _wanted(kind: Any) -> list[tuple[str, Any, bool]]:
    hints = get_type_hints(kind)
    return [
        (each.name, hints[each.name], each.default is MISSING and each.default_factory is MISSING)
        for each in fields(kind)
        if each.name != "document"
    ]


def _value(wanted: Any, value: Any, name: str) -> Any:
    """`value` as the type in the annotation `wanted`."""
    if wanted is Any:
        return value
    kinds = get_args(wanted) if get_origin(wanted) in (Union, types.UnionType) else (wanted,)
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0]
    try:
        if get_origin(kind) is tuple:
            each_kind = get_args(kind)[0]
            if each_kind is datetime:
                return tuple(map(datetime.fromisoformat, value))
            if each_kind in (str, int):
                return tuple(map(each_kind, value))
            return tuple(read(each_kind, each) for each in value)
        if kind in (UUID, datetime):
            return UUID(value) if kind is UUID else datetime.fromisoformat(value)
        if kind is float:
            return float(value)
    except (TypeError, ValueError, AttributeError):
        raise _not_understood(name, "it is of another kind") from None
    if not isinstance(value, get_origin(kind) or kind):
        raise _not_understood(name, "it is of another kind")
    return value


def _not_understood(what: str, why: str) -> Unexpected:
    return Unexpected("The answer is not understood", f"{what}: {why}")
