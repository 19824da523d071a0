"""The resources that a worker keeps ready for its pipelines, and the jobs that its claims prefer. No SQL.

A few resources stay warm, by the affinity keys of the jobs. Jobs with a warm key go first, within a bound.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any, NamedTuple

import structlog

from dataloader import log, periods
from dataloader.farm.failures import headline
from dataloader.farm.process import children, now
from dataloader.pipelines.children import own_process
from dataloader.queue.job import Job
from dataloader.queue.lifecycle import Reached

Place = tuple[Callable[..., Any] | None, str]  # a pipeline's `prepare`, and an affinity key
# After a job with an affinity key a worker's claims ask for more of them.
MEMORY_SEC = periods.seconds("MEMORY_SEC", 600.0)
MARKS = 64  # within the longest wait: the bound is as exact as that
PRIORITIES_MOST = 16  # classes whose bounds a worker keeps
_log = structlog.get_logger("worker")


class Resource(NamedTuple):
    """A prepared resource, its name in the log, how to release it, and the processes that have come with it."""

    value: Any
    name: str
    held: AbstractContextManager[Any] | None = None
    pids: frozenset[int] = frozenset()

    def release(self) -> None:
        """Release it. A failure is logged: the job that the worker needs the room for has no part in it."""
        if self.held is None:
            return
        try:
            with own_process():
                self.held.__exit__(None, None, None)
            _log.info("worker.resource.released", resource=self.name)
        except BaseException as e:
            _log.error("worker.resource.failed", resource=self.name, error=log.masked(headline(e)))


def prepared(name: str, open_it: Callable[[], AbstractContextManager[Any]]) -> Resource:
    """Make a resource; raises what its pipeline's `prepare` raises, TypeError where that returns no context manager."""
    began, before = now(), children(os.getpid())
    held = open_it()
    if not isinstance(held, AbstractContextManager):
        raise TypeError("prepare should be a generator function with one yield, or return a context manager")
    value = held.__enter__()
    _log.info("worker.resource.prepared", resource=name, sec=round(now() - began, 3))
    return Resource(value, name, held, frozenset(children(os.getpid())).difference(before))


class WarmResources:
    """The prepared resources of one worker, the least recently used first; without `prepare` one is elsewhere."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.resources: OrderedDict[Place, Resource] = OrderedDict()

    @property
    def keys(self) -> list[str]:
        """The affinity keys whose resources are warm, the least recently used first."""
        return list(dict.fromkeys(key for _, key in self.resources))

    @property
    def pids(self) -> set[int]:
        """The child processes that belong to the resources."""
        return {pid for resource in self.resources.values() for pid in resource.pids}

    def make_room(self) -> None:
        """Release the least recently used resources until there is room for another one."""
        while self.resources and len(self.resources) >= max(1, self._most):
            self.resources.popitem(last=False)[1].release()

    def give_back(self, place: Place, resource: Resource, is_sound: bool) -> None:
        """After a run with this resource: keep it as the one used last, unless it is not sound or none may stay."""
        self.resources.pop(place, None)
        if is_sound and place[1] and self._most:
            self.resources[place] = resource
        else:
            resource.release()

    def close(self) -> None:
        """Release all."""
        while self.resources:
            self.resources.popitem()[1].release()


class Preference:
    """Whether the claims of a worker ask for its affinity keys first, and which jobs go before these.

    Jobs that claims have passed over for `wait_sec` go first. The age of a job is no measure: in a backlog of an hour
    every job is old, and each would load another resource.
    """

    def __init__(self, is_wanted: bool, wait_sec: float) -> None:
        self._is_wanted = is_wanted
        self._wait_sec = wait_sec
        self._until = 0.0
        self._marks: dict[int, deque[tuple[float, datetime]]] = {}  # by priority: when claims reached which creation

    def claimed(self, jobs: Sequence[Job], reached: Reached | None) -> None:
        """A claim has returned these jobs, and passed others over up to `reached`."""
        if self._is_wanted and any([job.affinity_key for job in jobs]):
            self._until = now() + MEMORY_SEC
        if reached:
            marks = self._marks.pop(reached.priority, deque())
            self._marks[reached.priority] = marks  # the last
            if not marks or (reached.since > marks[-1][1] and now() > marks[-1][0] + self._wait_sec / MARKS):
                marks.append((now(), reached.since))
            if len(self._marks) > PRIORITIES_MOST:
                del self._marks[next(iter(self._marks))]

    def overdue(self) -> dict[int, datetime] | None:
        """By priority, the time before which waiting jobs are overdue; None: the next claim asks for no warm keys."""
        if now() >= self._until:
            return None
        since, marked = now() - self._wait_sec, {}
        for priority, marks in self._marks.items():
            while len(marks) > 1 and marks[1][0] <= since:
                marks.popleft()
            if marks[0][0] <= since:
                marked[priority] = marks[0][1]
        return marked
