"""The facts of a chaos run after its end: plain values, from the rows, the API's answers and the nemesis.

Instants are seconds since 1970 by the machine's clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

FINAL = {"succeeded": "done", "failed": "failed", "canceled": "canceled", "lost": "lost"}  # and their journal kinds


@dataclass(frozen=True)
class Trigger:
    """One idempotency key of a client: the possible ends of its job, and the answer; job_id is None without one."""

    key: str
    kind: str
    may_end: frozenset[str]
    writes: int = 0  # the number of rows of a success in `written`
    not_before: float = 0.0
    job_id: str | None = None


@dataclass(frozen=True)
class Answer:
    """An answer of the API about a job, and its time; `asked` is `status` or `cancel`."""

    job_id: str
    asked: str
    at: float
    status: str | None  # None: the API knows no such job
    cancel_requested: bool = False


@dataclass(frozen=True)
class Row:
    """A row of dl_jobs after the run."""

    job_id: str
    key: str
    lock_key: str
    task: str
    status: str
    attempt: int
    max_attempts: int
    claims: int
    lease_ttl_sec: int


@dataclass(frozen=True)
class Event:
    """A line of the journal."""

    job_id: str
    kind: str
    at: float
    attempt: int | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Sign:
    """A run was at work at this instant."""

    job_id: str
    claim: int
    lock_key: str
    pid: int
    farm: str
    what: str
    at: float


@dataclass(frozen=True)
class Written:
    """A committed row in the target: its claim, and the number of rows of older claims at that time."""

    job_id: str
    claim: int
    older: int = 0


@dataclass(frozen=True)
class Stop:
    """The nemesis stopped a process (SIGSTOP) from `since` to `until`."""

    farm: str
    role: str
    pid: int
    since: float
    until: float


@dataclass
class History:
    """All facts; journals and rows in the order of their creation."""

    triggers: list[Trigger] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    signs: list[Sign] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # remaining processes and locks, in words
    surprises: list[str] = field(default_factory=list)  # answers of the API that no client should get

    def story(self, job_id: str) -> list[str]:
        """All facts about one job in the order of time, for people."""
        lines = [(answer.at, f"API    {answer}") for answer in self.answers if answer.job_id == job_id]
        lines += [(event.at, f"event  {event}") for event in self.events if event.job_id == job_id]
        lines += [(sign.at, f"sign   {sign}") for sign in _ends(s for s in self.signs if s.job_id == job_id)]
        lines.sort(key=lambda line: line[0])
        whole = [f"       {thing}" for thing in (*self.triggers, *self.rows, *self.written) if thing.job_id == job_id]
        pids = {sign.pid for sign in self.signs if sign.job_id == job_id}
        whole += [f"       {stop}" for stop in self.stops if stop.pid in pids]
        return whole + [f"{at:.3f} {text}" for at, text in lines]


def by_job(things: Iterable[T]) -> dict[str, list[T]]:
    """The items of each job, in their order."""
    found: dict[str, list[T]] = defaultdict(list)
    for thing in things:
        found[thing.job_id].append(thing)  # type: ignore[attr-defined]
    return found


def _ends(signs: Iterable[Sign]) -> list[Sign]:
    """The first, the last and the special signs of each run; the others add no information."""
    runs: dict[tuple[int, int], list[Sign]] = defaultdict(list)
    for sign in signs:
        runs[sign.claim, sign.pid].append(sign)
    return [s for run in runs.values() for s in run if s in (run[0], run[-1]) or s.what != "alive"]
