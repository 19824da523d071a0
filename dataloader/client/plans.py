"""PURE: methods of several calls, as generators that any kind of client carries out.

A plan yields a call without arguments, and receives what the call has returned or raised: `Farm` makes the call,
`AsyncClient` also awaits it. A series is a plan that yields rows for the caller as well, as `Rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any, Generic, TypeVar
from uuid import UUID

from dataloader.client.errors import JobFailed, NotFound
from dataloader.model.jobs import BulkOutcome, Finished, Status

A = TypeVar("A")
R = TypeVar("R")
Call = Callable[[], Any]
Plan = Generator[Call, Any, R]
PAGE = 200  # jobs or events of one answer


class Rows(Generic[R]):
    """The rows that a series has found for its caller."""

    def __init__(self, rows: Sequence[R]) -> None:
        self.rows = rows


Series = Generator[Call | Rows[R], Any, None]


def carry_out(plan: Plan[R]) -> R:
    """Make the calls of a plan, one after the other; returns what the plan returns."""
    try:
        call = next(plan)
        while True:
            try:
                found = call()
            except Exception as e:
                call = plan.throw(e)
            else:
                call = plan.send(found)
    except StopIteration as e:
        result: R = e.value
        return result


def each(series: Series[R]) -> Iterator[R]:
    """The rows of a series; its calls are made as the rows are taken."""
    found = None
    try:
        while True:
            step = series.send(found)
            if isinstance(step, Rows):
                yield from step.rows
                found = None
            else:
                found = step()
    except StopIteration:
        return


def run(farm: Any, trigger: Call, timeout: float | None) -> Plan[Finished]:
    """Trigger a job and wait for it; raises JobFailed where the end is not `succeeded`."""
    started = yield trigger
    job: Status = yield lambda: farm.wait(started.job_id, timeout)
    if job.status != "succeeded":
        raise JobFailed(job)
    try:
        result = yield lambda: farm.result(job.job_id)
    except NotFound:  # deleted by now, or an older service
        result = None
    return Finished(**vars(job), result=result)


def all_of(calls: Sequence[Callable[[], list[R]]]) -> Plan[list[R]]:
    """The rows that these calls return, in one list."""
    found: list[R] = []
    for call in calls:
        found += yield call
    return found


def merged(calls: Sequence[Callable[[], Sequence[BulkOutcome]]]) -> Plan[dict[UUID, str]]:
    """The outcomes that these calls return, by job."""
    found: dict[UUID, str] = {}
    for call in calls:
        outcomes = yield call
        found |= {each.job_id: each.outcome for each in outcomes}
    return found


def steps(step: Callable[[str | None], Any]) -> Series[int]:
    """How many jobs each step has changed; each begins at the `next` of the one before."""
    after: str | None = None
    while True:
        answer = yield partial(step, after)
        yield Rows([answer.changed])
        after = answer.next
        if after is None:
            return


def summed(step: Callable[[str | None], Any], field: str) -> Plan[int]:
    """The sum of a field over the answers of all steps, each from the `next` of the one before, or until `is_done`."""
    total: int = 0
    after = None
    while True:
        answer = yield partial(step, after)
        total += getattr(answer, field)
        after = getattr(answer, "next", None)
        if after is None and getattr(answer, "is_done", True):
            return total


def pages(page: Callable[[int, Any], Any], field: str, limit: int | None, most: int = PAGE) -> Series[Any]:
    """The rows of all pages, at most `limit`; a page has up to `most`."""
    left, after = inf if limit is None else limit, None
    while left > 0:
        answer = yield partial(page, int(min(most, left)), after)
        rows = getattr(answer, field)
        yield Rows(rows)
        left, after = left - len(rows), answer.next
        if after is None:
            return
