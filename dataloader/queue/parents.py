"""Jobs that wait for other jobs, their parents. Every function may raise psycopg.Error."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import cycle
from typing import Any, NamedTuple
from uuid import UUID

from dataloader.queue import db
from dataloader.queue.db import Conn
from dataloader.queue.job import FINAL, Job

LINKS = 100_000  # of the jobs that are added at once
SHOWN = 50  # parents, and children, that a page names
_SQL = db.statements("parents.sql")

Parents = Sequence[UUID | int]  # a number is a place in the same list of new jobs, from 0


class UnknownParents(ValueError):
    """Jobs that new jobs should wait for are not there, or the asker may not see them."""

    def __init__(self, job_ids: Iterable[UUID]) -> None:
        self.job_ids = sorted(job_ids)
        names = ", ".join(map(str, self.job_ids[:5])) + (", ..." if len(self.job_ids) > 5 else "")
        super().__init__(f"depends_on should name jobs that are there, or places in the list; not known: {names}")


class Result(NamedTuple):
    """The status and the result of a job; `task` and `status` are None if it is deleted."""

    job_id: UUID
    task: str | None
    status: str | None
    error: str | None
    result: Any

    @property
    def has_ended(self) -> bool:
        """True if the job is final or deleted."""
        return self.status is None or self.status in FINAL


def fault(depends_on: Sequence[Parents | None], count: int) -> str | None:
    """PURE: what is wrong with the places that jobs of a list name as parents (for each or for all); None: nothing."""
    if not any(depends_on):
        return None
    if sum(map(len, filter(None, depends_on))) * count > LINKS * len(depends_on):
        return f"depends_on: the jobs of a list should wait for at most {LINKS:,} others in all"
    graph = {
        number: [parent for parent in parents or () if isinstance(parent, int)]
        for number, parents in zip(range(count), cycle(depends_on))
    }
    if count == 1 and graph[0]:
        return "depends_on: a job alone names the jobs that it waits for by their job_id, and not by a place in a list"
    for number, places in graph.items():
        if outside := [place for place in places if place >= count]:
            return f"jobs[{number}].depends_on: there is no job {outside[0]} in the list, which has {count}"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        return f"depends_on: jobs wait for each other in a circle: {' -> '.join(map(str, e.args[1]))}"
    return None


def links(
    depends_on: Sequence[Parents | None], on_failure: Sequence[str], job_ids: Sequence[UUID]
) -> Iterator[tuple[UUID, UUID, str]]:
    """PURE: each job with each of its parents once; the first two lists have a value for each job or one for all."""
    for job_id, parents, word in zip(job_ids, cycle(depends_on), cycle(on_failure), strict=False):
        for parent in dict.fromkeys(parents or ()):
            yield job_id, job_ids[parent] if isinstance(parent, int) else parent, word


def results(conn: Conn, job_ids: Sequence[UUID]) -> list[Result]:
    """The results of these jobs, in the given order."""
    rows = conn.execute(_SQL["results"], {"job_ids": list(job_ids)})
    return [Result(*row)._replace(result=row[-1] and json.loads(row[-1])) for row in rows]


def parents_of(conn: Conn, job_id: UUID) -> list[UUID]:
    """The jobs that this one waits for, or has waited for, in the order in which it has named them."""
    return [row[0] for row in conn.execute(_SQL["parents"], {"job_id": job_id})]


def gather(conn: Conn, job: Job, parent_ids: Sequence[UUID]) -> bool:
    """Let a running job wait for these at its end; False: its claim is over. InvalidParameterValue for a circle."""
    ((holds,),) = db.call(conn, "dl_gather", job.job_id, job.attempt, job.claimed_by, list(parent_ids))
    return bool(holds)


def family(conn: Conn, job_id: UUID) -> Mapping[str, list[dict[str, Any]]]:
    """The first SHOWN `parents` and `children` of a job."""
    relatives: dict[str, list[dict[str, Any]]] = {"parents": [], "children": []}
    for row in _SQL.rows(conn, "family", job_id=job_id, most=SHOWN):
        relatives["parents" if row.pop("is_parent") else "children"].append(row)
    return relatives
