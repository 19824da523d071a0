"""The methods of the clients, made from dataloader/ops by `python -m tools.client`: change them there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypedDict, Unpack
from uuid import UUID

from dataloader.model.jobs import JobPrediction, QueuePrediction
from dataloader.model.queues import (
    Changed,
    Key,
    Keys,
    Limit,
    LimitRemoved,
    Limits,
    Moved,
    Overview,
    Queue,
    Queues,
    QueueState,
)
from dataloader.model.runs import QueueRuns


def given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


class Order(TypedDict, total=False):
    """The order of a queue's jobs (docs/ordered.md)."""

    ordered: bool
    merge: bool
    merge_limit: int
    batch: int | None
    on_dead: Literal["continue", "hold"]
    fair_by: Literal["partition_key", "producer"] | None


class Tried(TypedDict, total=False):
    """The same for jobs that have run: dead ones, and retries."""

    task: str | None
    lock_key: str | None
    partition_key: str | None
    error: str | None
    error_group: str | None


class Queued(TypedDict, total=False):
    """Which jobs of a queue a change is for. Filters that are given must all hold."""

    task: str | None
    lock_key: str | None
    partition_key: str | None


class Operations:
    """The operations of a farm, a method each. Every method may raise ClientError."""

    def _call(
        self, route: str, answer: type[Any], given: dict[str, Any], field: str = "", *, once: bool = False
    ) -> Any:
        """Carry out the operation of this route; returns its answer, or one field of that."""
        raise NotImplementedError

    def _pages(self, route: str, answer: type[Any], given: dict[str, Any], field: str, limit: int | None) -> Any:
        """The rows of all pages, at most `limit`; pages are fetched as the rows are taken."""
        raise NotImplementedError

    def _total(self, route: str, answer: type[Any], given: dict[str, Any], field: str) -> Any:
        """Repeat an operation until it has come to the end; returns the sum of this field of its answers."""
        raise NotImplementedError

    def predict(self, job_id: UUID | str) -> JobPrediction:
        """When a job will end, the range of that, and how right such predictions were in its queue."""
        return self._call("GET /jobs/{job_id}/prediction", JobPrediction, {"job_id": str(job_id)})

    def queues(self) -> list[Queue]:
        """Every queue that has jobs, a pause, a limit or a worker."""
        return self._call("GET /queues", Queues, {}, "queues")

    def overview(self) -> Overview:
        """Length, dead, lag and more, for each queue and in total."""
        return self._call("GET /stats", Overview, {})

    def keys(self, queue: str, *, limit: int | None = None) -> Iterator[Key]:
        """List the keys of an ordered queue that have queued jobs: how many, and what the first job of each waits for.

        A queue that is not ordered is a conflict.
        """
        return self._pages("GET /queues/{queue}/keys", Keys, {"queue": queue}, "keys", limit)

    def predict_queue(self, queue: str) -> QueuePrediction:
        """When all that is queued and runs now will have ended, its range, and how right such predictions were."""
        return self._call("GET /queues/{queue}/prediction", QueuePrediction, {"queue": queue})

    def queue_runs(self, queue: str, *, range: Literal["1h", "24h", "7d"] | None = None) -> QueueRuns:
        """How long the runs of a queue were: counts, failures, percentiles, a histogram, and the period before."""
        return self._call("GET /queues/{queue}/runs", QueueRuns, {"queue": queue} | given(range=range))

    def pause(self, queue: str) -> QueueState:
        """Start no job of a queue any more, on any host; what runs goes on."""
        return self._call("POST /queues/{queue}/pause", QueueState, {"queue": queue})

    def resume(self, queue: str) -> QueueState:
        """Start jobs of a paused queue again."""
        return self._call("POST /queues/{queue}/resume", QueueState, {"queue": queue})

    def limit(self, queue: str, max_length: int | None) -> QueueState:
        """Refuse to trigger jobs (429) while so many of a queue wait; none takes the limit away."""
        return self._call("PUT /queues/{queue}/limit", QueueState, {"queue": queue, "max_length": max_length})

    def set_queue(self, queue: str, **words: Unpack[Order]) -> QueueState:
        """Change the order of a queue's jobs, while jobs run; what is not named stays."""
        return self._call("PUT /queues/{queue}", QueueState, {"queue": queue} | words)

    def requeue_dead(self, queue: str, **words: Unpack[Tried]) -> int:
        """Queue the failed and lost jobs of a queue again, each with a fresh budget of attempts."""
        return self._total("POST /queues/{queue}/requeue-dead", Changed, {"queue": queue} | words, "changed")

    def delete_dead(self, queue: str, **words: Unpack[Tried]) -> int:
        """Delete the failed and lost jobs of a queue, with their journal."""
        return self._total("POST /queues/{queue}/delete-dead", Changed, {"queue": queue} | words, "changed")

    def run_all(self, queue: str, **words: Unpack[Queued]) -> int:
        """Make the jobs of a queue due whose time has not come."""
        return self._total("POST /queues/{queue}/run-all", Changed, {"queue": queue} | words, "changed")

    def kill_retries(self, queue: str, **words: Unpack[Tried]) -> int:
        """Let the jobs of a queue be failed that were tried and wait for their next attempt."""
        return self._total("POST /queues/{queue}/kill-retries", Changed, {"queue": queue} | words, "changed")

    def move(self, queue: str, to: str) -> int:
        """Make the queued, running and dead jobs of a queue those of another, in their order; what runs goes on.

        Both queues are paused until the last job has moved; the first one stays paused.
        """
        return self._total("POST /queues/{queue}/move", Moved, {"queue": queue, "to": to}, "moved")

    def limits(self) -> list[Limit]:
        """List the limits: what each allows, how many of its jobs run, and how many wait for it."""
        return self._call("GET /limits", Limits, {}, "limits")

    def get_limit(self, limit: str) -> Limit:
        """One limit."""
        return self._call("GET /limits/{limit}", Limit, {"limit": limit})

    def set_limit(
        self, limit: str, *, most: int | None = None, per_minute: float | None = None, burst: int | None = None
    ) -> Limit:
        """Make a limit, or replace what it allows, on all hosts at once; jobs that run go on."""
        return self._call(
            "PUT /limits/{limit}", Limit, {"limit": limit} | given(most=most, per_minute=per_minute, burst=burst)
        )

    def remove_limit(self, limit: str) -> LimitRemoved:
        """Let any number of a limit's jobs run; the jobs keep its name."""
        return self._call("DELETE /limits/{limit}", LimitRemoved, {"limit": limit})
