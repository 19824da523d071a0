"""PURE: which of a worker's queues comes first at a claim. Where that has no job, the claim goes on to the next."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence


class Turns:
    """The order of the queues of one worker, from claim to claim."""

    def __init__(self, queues: Sequence[str], scheduler: str | Mapping[str, int] | None, chance: random.Random) -> None:
        """`scheduler` as in WORKERS_JSON, None: "lag"; `chance` decides by weight which queue is first."""
        self._queues = list(queues)
        self._scheduler = scheduler or "lag"
        self._chance = chance
        self._next = 0  # whose turn it is
        self.by_lag = len(self._queues) > 1 and self._scheduler == "lag"  # the database finds the order

    def order(self) -> list[str]:
        """All queues, the first one first.

        "strict" keeps the order of WORKERS_JSON. By the others every queue is first at times, so no queue starves:
        "sequential" goes round, weights draw lots, and "lag" lets the database look whose job has waited longest.
        """
        if isinstance(self._scheduler, str):
            return self._queues[self._next :] + self._queues[: self._next]
        # Efraimidis and Spirakis 2006: in this order a queue is first as often as its weight says, then the next one.
        lots = [self._chance.random() ** (1 / self._scheduler[queue]) for queue in self._queues]
        return [queue for _, queue in sorted(zip(lots, self._queues, strict=True), reverse=True)]

    def took(self, queue: str) -> None:
        """The last claim has found jobs in this queue."""
        if self._scheduler == "sequential":
            self._next = (self._queues.index(queue) + 1) % len(self._queues)
        elif self.by_lag:
            self._next = self._queues.index(queue)  # where the bookmark is that a claim takes along
