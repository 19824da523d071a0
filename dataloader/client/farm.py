"""`Farm`: what programs and people ask of a job farm, declared once.

`Client` implements it over HTTP, the command line's `Direct` on the queue's database.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Self
from uuid import UUID, uuid4

from dataloader import obs
from dataloader.client import plans
from dataloader.client.operations import Filters, Operations, given
from dataloader.client.results import (
    Started,
)
from dataloader.client.watch import OUTAGE_SEC, Watched, waiting
from dataloader.model.jobs import BulkChanged, Finished, Preview, Status
from dataloader.model.kinds import OrderName
from dataloader.model.queues import Changed
from dataloader.queue.typed_args import Model, plain

PAGE = plans.PAGE  # jobs or events of one answer
BATCH = 1_000  # jobs of one change


class Farm(Operations, ABC):
    """A job farm. Every method may raise ClientError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # How a plan is carried out and a pause is made; AsyncClient waits for both.
    _carry_out = staticmethod(plans.carry_out)
    _each = staticmethod(plans.each)
    _sleep = staticmethod(time.sleep)

    def _pages(
        self, route: str, answer: type[Any], given: dict[str, Any], field: str, limit: int | None, most: int
    ) -> Any:
        def page(size: int, after: Any) -> Any:
            return self._call(route, answer, given | {"limit": size} | ({"after": after} if after else {}))

        return self._each(plans.pages(page, field, limit, most))

    def _steps(self, route: str, answer: type[Any], given: dict[str, Any], *, once: bool = True) -> Any:
        """The number of each step of a change."""

        def step(after: str | None) -> Any:
            return self._call(route, answer, given | ({"after": after} if after else {}), once=once)

        return self._each(plans.steps(step))

    def _total(self, route: str, answer: type[Any], given: dict[str, Any], field: str) -> Any:
        def step(after: str | None) -> Any:
            return self._call(route, answer, given | ({"after": after} if after else {}), once=True)

        return self._carry_out(plans.summed(step, field))

    @property
    @abstractmethod
    def url(self) -> str:
        """The address of the service or database, without secrets."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""

    def trigger(
        self,
        task: str,
        *,
        queue: str = "etl.default",
        lock_key: str | None = None,
        args: Mapping[str, Any] | Model | None = None,
        idempotency_key: str | None = None,
        partition_key: str = "",
        priority: int | None = None,
        available_at: datetime | str | None = None,
        max_attempts: int | None = None,
        lease_ttl_sec: int | None = None,
        timeout_sec: int | None = None,
        score: float | None = None,
        producer: str | None = None,
        consumer_group: str | None = None,
        affinity_key: str | None = None,
        limits: list[str] | None = None,
        deadline: datetime | str | None = None,
        depends_on: Sequence[UUID | str] | None = None,
        on_parent_failure: str | None = None,
        trace: str | None = None,
    ) -> Started:
        """Add a job once, however often the request is repeated: an `idempotency_key` is made where none is given.

        Jobs of one `lock_key` never run at the same time; the default is the task's name. `trace` is a W3C traceparent;
        the default is the current OpenTelemetry span's. `args` may be an instance of the pipeline's model. The fields
        and their bounds are the API's (docs/api.md). Raises Refused, which names the arguments, for args that the
        task's schema refuses.
        """
        fields = given(
            task=task,
            queue=queue,
            lock_key=lock_key or task,
            args=None if args is None else plain(args),
            idempotency_key=idempotency_key or new_key(),
            partition_key=partition_key or None,
            priority=priority,
            available_at=available_at,
            max_attempts=max_attempts,
            lease_ttl_sec=lease_ttl_sec,
            timeout_sec=timeout_sec,
            score=score,
            producer=producer,
            consumer_group=consumer_group,
            affinity_key=affinity_key,
            limits=limits,
            deadline=deadline,
            depends_on=None if depends_on is None else list(map(str, depends_on)),
            on_parent_failure=on_parent_failure,
        )
        return self._add(fields, trace or obs.current())

    def again(
        self,
        job_id: UUID | str,
        *,
        args: Mapping[str, Any] | Model | None = None,
        without: Sequence[str] = (),
        queue: str | None = None,
        lock_key: str | None = None,
        priority: int | None = None,
        idempotency_key: str | None = None,
    ) -> Started:
        """Add a job with the fields of one that has ended, with changes; the journals of the two name each other.

        `args` replace those of the same names, `without` names those to leave out. An arg that is masked where it is
        shown stays what it is. Raises Conflict for a job that has not ended.
        """
        fields = given(
            args=None if args is None else plain(args),
            without=list(without) or None,
            queue=queue,
            lock_key=lock_key,
            priority=priority,
            idempotency_key=idempotency_key or new_key(),
        )
        return self._run_again(job_id, fields)

    @abstractmethod
    def _run_again(self, job_id: UUID | str, fields: dict[str, Any]) -> Started: ...

    @abstractmethod
    def _add(self, fields: dict[str, Any], trace: str | None) -> Started: ...

    def run(self, /, task: str, *, timeout: float | None = None, **fields: Any) -> Finished:
        """Trigger a job, wait until it ends, and return it, with its `result`.

        Raises JobFailed where the end is not `succeeded`.
        """
        return self._carry_out(plans.run(self, partial(self.trigger, task, **fields), timeout))

    def wait(
        self,
        job_id: UUID | str,
        timeout: float | None = None,
        on_progress: Callable[[Status], object] | None = None,
        *,
        patience: float = OUTAGE_SEC,
    ) -> Status:
        """Wait until the job has ended, and return it, whatever its end.

        `on_progress` is called with the job at first and after each change. Raises WaitTimeout after `timeout` seconds;
        the job goes on. A service that is away meanwhile is waited for, up to `patience` seconds.
        """
        return self._carry_out(waiting(self.watch(job_id), timeout, on_progress, patience=patience, sleep=self._sleep))

    @abstractmethod
    def watch(self, job_id: UUID | str) -> Watched:
        """The job, to be looked at again and again."""

    def change_previewed(
        self, preview: Preview, *, matching: Filters | None = None, job_ids: Sequence[UUID | str] | None = None
    ) -> Iterator[int]:
        """Give the order of a preview to the same jobs, step by step; yields how many jobs each step has changed.

        Jobs that have changed since the preview stay as they are. Raises Conflict where the list has more jobs for the
        order than the preview had; then nothing is changed.
        """
        named = given(matching=matching, job_ids=job_ids)
        words = {"order": preview.order, "confirmation": preview.confirmation} | named
        steps: Iterator[int] = self._steps("POST /jobs/bulk", BulkChanged, words, once=False)
        return steps

    def change(self, verb: OrderName, job_ids: Sequence[UUID | str], *, force: bool = False) -> dict[UUID, str]:
        """`cancel`, `requeue`, `start-over`, `run-now` or `delete` jobs; `force` is for `cancel`.

        `start-over` requeues jobs, which begin at the start and not at their checkpoints. The outcome of each is
        `done`, `unknown` or the status that forbids the change.
        """
        change = partial(self.cancel_jobs, force=force) if verb == "cancel" else partial(self.change_jobs, verb)
        starts = range(0, len(job_ids), BATCH)
        return self._carry_out(plans.merged([partial(change, job_ids[start : start + BATCH]) for start in starts]))

    def change_all(self, /, verb: str, queue: str, **only: str) -> Iterator[int]:
        """`requeue-dead`, `delete-dead`, `run-all` or `kill-retries`, step by step; yields how many each step changed.

        `only` filters by `task`, `lock_key`, `partition_key` and, but for `run-all`, `error`, a text that the error
        contains, and `error_group`. A job that comes back meanwhile may be changed again.
        """
        steps: Iterator[int] = self._steps(f"POST /queues/{{queue}}/{verb}", Changed, {"queue": queue, **only})
        return steps


def new_key() -> str:
    """An idempotency key for a request that has none."""
    return f"client-{uuid4()}"
