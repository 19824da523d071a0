"""`Farm`: the questions and orders to a job farm. `Client` is one over HTTP, `Direct` of the command line in process.

A method of several calls is a coroutine here. A farm that blocks carries it out at once (`carried`, `each`);
`AsyncClient` returns it to its caller.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping
from functools import wraps
from inspect import isawaitable
from math import inf
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar, Unpack
from uuid import UUID

from dataloader.client.errors import JobFailed, NotFound, Unavailable, WaitTimeout
from dataloader.client.operations import Operations, TriggerFields
from dataloader.client.wire import new_key
from dataloader.model.jobs import Finished, Status, Triggered, TriggeredMany

P = ParamSpec("P")
R = TypeVar("R")
BATCH = 1_000  # jobs of one request
POLL_SEC = 25  # the longest wait of one request for a change
OUTAGE_SEC = 600.0  # the longest absence of the service that a wait tolerates
_QUICK = 0.3  # seconds; the service did not wait for a change before a faster answer without news


class Look(NamedTuple):
    """A job as it is now (None: as it was), its version, and the seconds to wait before the next look."""

    job: Status | None
    etag: str | None = None
    pause: float | None = None


def finished(work: Coroutine[Any, Any, R]) -> R:
    """Carry out a coroutine whose calls all block; returns what it returns."""
    try:
        work.send(None)
    except StopIteration as e:
        result: R = e.value
        return result
    raise AssertionError("a call has not blocked")


def each(rows: AsyncGenerator[R, None]) -> Iterator[R]:
    """The rows of an asynchronous generator whose calls all block."""
    while True:
        try:
            row = finished(rows.__anext__())
        except StopAsyncIteration:
            return
        yield row


def carried(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Any, P], R]:
    """The coroutine function as a method of a farm, which carries it out, or (`AsyncClient`) returns the coroutine."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._finished(method(self, *args, **kwargs))
        return result

    return call


async def answered(value: Any) -> Any:
    """The answer of a call, which is awaited where it does not block."""
    return await value if isawaitable(value) else value


class Farm(Operations):
    """A job farm. Every method may raise ClientError."""

    _finished = staticmethod(finished)
    _each = staticmethod(each)
    _sleep = staticmethod(time.sleep)
    _look: Any  # a Look at a job: as soon as it has another version, or after some seconds
    url: str  # the address of the service or database, without secrets

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""

    def trigger(self, task: str, *, trace: str | None = None, **fields: Unpack[TriggerFields]) -> Triggered:
        """Add a job once, however often the request is repeated: an `idempotency_key` is made where none is given.

        Jobs of one `lock_key` never run at the same time; the default is the task's name. The default queue is
        `etl.default`. `args` may be an instance of the pipeline's model. `trace` is a W3C traceparent; the default is
        the current OpenTelemetry span's. Raises Refused, which names the arguments, for args that the task's schema
        refuses.
        """
        added: Triggered = self._call("POST /jobs/trigger", Triggered, document({"task": task, **fields}), trace=trace)
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
            added += await answered(self._call("POST /jobs/batch", TriggeredMany, body, "jobs"))
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
                look: Look = await answered(self._look(job_id, etag, seconds, min(patience, left)))
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

    def _pages(
        self, route: str, answer: type[Any], given: dict[str, Any], field: str, limit: int | None, most: int
    ) -> Any:
        """The rows of all pages, at most `limit`; a page of up to `most` is fetched as its rows are taken."""

        async def rows() -> AsyncGenerator[Any, None]:
            left = inf if limit is None else limit
            after: dict[str, Any] = {}
            while left > 0:
                page = await answered(self._call(route, answer, given | {"limit": int(min(most, left))} | after))
                items = getattr(page, field)
                for row in items:
                    yield row
                left, after = left - len(items), {"after": page.next}
                if page.next is None:
                    return

        return self._each(rows())

    @carried
    async def _total(self, route: str, answer: type[Any], given: dict[str, Any], field: str) -> int:
        """Repeat an operation until it has come to the end; returns the sum of this field of its answers."""
        count: int = 0
        after: dict[str, Any] = {}
        while True:
            step = await answered(self._call(route, answer, given | after, once=True))
            count += getattr(step, field)
            following = getattr(step, "next", None)
            if following is None and getattr(step, "is_done", True):
                return count
            after = {"after": following} if following else {}


def document(job: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a new job, with those that the client fills in; null ones are left out."""
    filled = {
        "queue": job.get("queue") or "etl.default",
        "lock_key": job.get("lock_key") or job.get("task"),
        "idempotency_key": job.get("idempotency_key") or new_key(),
    }
    return {name: value for name, value in {**job, **filled}.items() if value is not None}
