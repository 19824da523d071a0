"""`Farm`: the questions and orders to a job farm. `Client` is one over HTTP, `Direct` of the shell in process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from inspect import getattr_static
from math import inf
from typing import Any, NamedTuple, Self, Unpack
from uuid import UUID

from dataloader.client.errors import JobFailed, NotFound, Unavailable, WaitTimeout
from dataloader.client.methods import Method, answered, carried
from dataloader.client.operations import Operations, TriggerFields
from dataloader.client.wire import new_key
from dataloader.model.jobs import Finished, Status, Triggered, TriggeredMany

BATCH = 1_000  # jobs of one request
POLL_SEC = 25  # the longest wait of one request for a change
OUTAGE_SEC = 600.0  # the longest absence of the service that a wait tolerates
_QUICK = 0.3  # seconds; the service did not wait for a change before a faster answer without news


class Look(NamedTuple):
    """A job as it is now (None: as it was), its version, and the seconds to wait before the next look."""

    job: Status | None
    etag: str | None = None
    pause: float | None = None


class Calls(Operations):
    """All methods of a farm. Every method may raise ClientError."""

    _call: Any  # carries out the operation of a route, and returns its answer
    _look: Any  # a Look at a job: as soon as it has another version, or after some seconds
    _sleep: Any
    url: str  # the address of the service or database, without secrets

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in dir(cls):  # unittest.mock knows functions of a class only
            if isinstance(method := getattr_static(cls, name), Method):
                setattr(cls, name, method.__get__(None, cls))

    @carried
    async def trigger(self, task: str, *, trace: str | None = None, **fields: Unpack[TriggerFields]) -> Triggered:
        """Add a job once, however often the request is repeated: an `idempotency_key` is made where none is given.

        Jobs of one `lock_key` never run at the same time; the default is the task's name. The default queue is
        `etl.default`. `args` may be an instance of the pipeline's model. `trace` is a W3C traceparent; the default is
        the current OpenTelemetry span's. Raises Refused, which names the arguments, for args that the task's schema
        refuses.
        """
        job, route = document({"task": task, **fields}), "POST /jobs/trigger"
        added: Triggered = await self._call(route, Triggered, job, trace=trace)
        return added

    @carried
    async def trigger_many(
        self, jobs: Iterable[Mapping[str, Any]], *, on_done: Mapping[str, Any] | None = None
    ) -> list[Triggered]:
        """Add jobs, documents with the fields of `trigger`. The result has their ids and states in their order.

        A request holds up to 1,000 jobs; the service adds all jobs of a request or none. `on_done` is one job more, the
        last of the result: it starts when all others have ended. Raises ValueError for it beside more than 1,000 jobs.
        """
        documents = [*map(document, jobs)]
        if on_done is not None and len(documents) > BATCH:
            raise ValueError(f"on_done is for up to {BATCH} jobs: name their ids in the depends_on of another job")
        last = {} if on_done is None else {"on_done": document(on_done)}
        added: list[Triggered] = []
        for start in range(0, max(len(documents), len(last)), BATCH):
            body = {"jobs": documents[start : start + BATCH], **last}
            added += (await self._call("POST /jobs/batch", TriggeredMany, body)).jobs
        return added

    @carried
    async def run(self, /, task: str, *, timeout: float | None = None, **fields: Any) -> Finished:
        """Trigger a job, wait until it ends, and return it, with its `result`.

        Raises JobFailed where the end is not `succeeded`.
        """
        started = await answered(self.trigger(task, **fields))
        job = await answered(self.wait(started.job_id, timeout))
        if job.status != "succeeded":
            raise JobFailed(job)
        try:
            return Finished(**vars(job), result=await answered(self.result(job.job_id)))
        except NotFound:  # deleted by now
            return Finished(**vars(job))

    @carried
    async def wait(
        self,
        job_id: UUID | str,
        timeout: float | None = None,
        on_progress: Callable[[Status], object] | None = None,
        *,
        patience: float = OUTAGE_SEC,
    ) -> Status:
        """Wait until the job has ended, and return it in any final state.

        `on_progress` is called with the job at first and after each change. Raises WaitTimeout after `timeout` seconds;
        the job goes on. A service that is away meanwhile is waited for, up to `patience` seconds.
        """
        until = inf if timeout is None else time.monotonic() + timeout
        job: Status | None = None
        etag, pause = None, 0.0
        while True:
            begun = time.monotonic()
            left = max(0.0, until - begun)
            seconds = int(min(POLL_SEC, left)) if job else 0  # the first answer is always news
            try:
                look: Look = await self._look(job_id, etag, seconds, min(patience, left))
            except Unavailable as e:
                if e.is_lasting or patience < left:
                    raise
                raise WaitTimeout(job, timeout or 0) from None
            is_news = look.job is not None and look.job != job
            job, etag = look.job or job, look.etag or etag
            assert job is not None  # noqa: S101  only a version that is known is left out
            if is_news and on_progress:
                await answered(on_progress(job))
            if job.is_final:
                return job
            if time.monotonic() >= until:
                raise WaitTimeout(job, timeout or 0)
            # A service that is busy does not wait for a change.
            has_waited = is_news or time.monotonic() - begun > _QUICK
            pause = look.pause or (0.05 if has_waited else min(2.0, max(0.1, 1.5 * pause)))
            await answered(self._sleep(min(pause, max(0.0, until - time.monotonic()))))


class Farm(Calls):
    """A farm whose methods block."""

    _sleep = staticmethod(time.sleep)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""


def document(job: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a new job, with those that the client fills in; null ones are left out."""
    filled = {
        "queue": job.get("queue") or "etl.default",
        "lock_key": job.get("lock_key") or job.get("task"),
        "idempotency_key": job.get("idempotency_key") or new_key(),
    }
    return {name: value for name, value in {**job, **filled}.items() if value is not None}
