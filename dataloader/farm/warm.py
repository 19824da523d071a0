"""What a worker has prepared for its pipelines: a few resources stay warm, by the affinity keys of the jobs. No SQL."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import structlog

from dataloader import log
from dataloader.farm.failures import headline
from dataloader.farm.process import children, now
from dataloader.pipelines.children import own_process

Place = tuple[Callable[..., Any] | None, str]  # a pipeline's `prepare`, and an affinity key
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
    """The prepared resources of one worker, the least recently used first: at most `most` that have an affinity key.

    A pipeline without `prepare` counts too: its resource, such as a model on a server, is warm elsewhere.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._resources: OrderedDict[Place, Resource] = OrderedDict()

    @property
    def keys(self) -> list[str]:
        """The affinity keys whose resources are warm, the least recently used first."""
        return list(dict.fromkeys(key for _, key in self._resources))

    @property
    def pids(self) -> set[int]:
        """The child processes that belong to the resources."""
        return {pid for resource in self._resources.values() for pid in resource.pids}

    def get(self, place: Place) -> Resource | None:
        """The resource of this place; None when it is not warm."""
        return self._resources.get(place)

    def make_room(self) -> None:
        """Release the least recently used resources until there is room for another one."""
        while self._resources and len(self._resources) >= max(1, self._most):
            self._resources.popitem(last=False)[1].release()

    def give_back(self, place: Place, resource: Resource, is_sound: bool) -> None:
        """After a run with this resource: keep it as the one used last, unless it is not sound or none may stay."""
        self._resources.pop(place, None)
        if is_sound and place[1] and self._most:
            self._resources[place] = resource
        else:
            resource.release()

    def close(self) -> None:
        """Release all."""
        while self._resources:
            self._resources.popitem()[1].release()
