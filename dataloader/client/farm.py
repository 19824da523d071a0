"""`Farm`: the questions and orders to a job farm. `Client` is one over HTTP, `Direct` of the command line in process.

A method of several calls is a coroutine here. A farm that blocks carries it out at once (`finished`, `each`);
`AsyncClient` returns it to its caller.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from inspect import isawaitable
from math import inf
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, Unpack
from uuid import UUID, uuid4

from dataloader import obs
from dataloader.client.errors import JobFailed, NotFound, Unavailable, WaitTimeout
from dataloader.client.operations import Operations, given
from dataloader.model.jobs import Finished, Status, Triggered
from dataloader.queue.fields import JobFields
from dataloader.queue.typed_args import Model, plain

R = TypeVar("R")
BATCH = 1_000  # jobs of one request
POLL_SEC = 25  # the longest wait of one request for a change
OUTAGE_SEC = 600.0  # the longest absence of the service that a wait tolerates
_QUICK = 0.3  # seconds; the service did not wait for a change before a faster answer without news


class TriggerFields(JobFields, total=False):
    """The fields of a new job; their bounds are the API's (docs/api.md)."""

    queue: str
    lock_key: str | None


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


def each(rows: AsyncIterator[R]) -> Iterator[R]:
    """The rows of an asynchronous iterator whose calls all block."""

    async def following() -> R:
        return await anext(rows)

    while True:
        try:
            row = finished(following())
        except StopAsyncIteration:
            return
        yield row


async def made(found: Any) -> Any:
    """The answer of a call, which is awaited where it does not block."""
    return await found if isawaitable(found) else found


class Farm(Operations):
    """A job farm. Every method may raise ClientError."""

    _finished = staticmethod(finished)
    _each = staticmethod(each)
    _sleep = staticmethod(time.sleep)
    url: str  # the address of the service or database, without secrets

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        return self._add("POST /jobs/trigger", document({"task": task, **fields}), trace or obs.current())

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
    ) -> Triggered:
        """Add a job with the fields of one that has ended, with changes; the journals of the two name each other.

        `args` replace those of the same names, `without` names those to leave out. An arg that is masked where it is
        shown stays what it is. Raises Conflict for a job that has not ended.
        """
        changes = given(
            args=None if args is None else plain(args),
            without=list(without) or None,
            queue=queue,
            lock_key=lock_key,
            priority=priority,
            idempotency_key=idempotency_key or new_key(),
        )
        return self._add("POST /jobs/{job_id}/again", {"job_id": str(job_id), **changes}, obs.current())

    def _add(self, route: str, fields: dict[str, Any], trace: str | None) -> Triggered:
        raise NotImplementedError

    def run(self, /, task: str, *, timeout: float | None = None, **fields: Any) -> Finished:
        """Trigger a job, wait until it ends, and return it, with its `result`.

        Raises JobFailed where the end is not `succeeded`.
        """
        return self._finished(self._run(task, timeout, fields))

    async def _run(self, task: str, timeout: float | None, fields: dict[str, Any]) -> Finished:
        started = await made(self.trigger(task, **fields))
        job = await made(self.wait(started.job_id, timeout))
        if job.status != "succeeded":
            raise JobFailed(job)
        try:
            return Finished(**vars(job), result=await made(self.result(job.job_id)))
        except NotFound:  # deleted by now
            return Finished(**vars(job))

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
        return self._finished(self._wait(job_id, timeout, on_progress, patience))

    async def _wait(
        self, job_id: UUID | str, timeout: float | None, on_progress: Callable[[Status], object] | None, patience: float
    ) -> Status:
        until = inf if timeout is None else time.monotonic() + timeout
        job: Status | None = None
        etag, pause = None, 0.0
        while True:
            begun = time.monotonic()
            left = max(0.0, until - begun)
            seconds = int(min(POLL_SEC, left)) if job else 0  # the first answer is always news
            try:
                look: Look = await made(self._look(job_id, etag, seconds, min(patience, left)))
            except Unavailable as e:
                if e.is_lasting or patience < left:
                    raise
                raise WaitTimeout(job, timeout or 0) from None
            is_news = look.job is not None and look.job != job
            job, etag = look.job or job, look.etag or etag
            assert job is not None  # noqa: S101  only a version that is known is left out
            if is_news and on_progress:
                await made(on_progress(job))
            if job.is_final:
                return job
            if time.monotonic() >= until:
                raise WaitTimeout(job, timeout or 0)
            # A service that is busy does not wait for a change.
            has_waited = is_news or time.monotonic() - begun > _QUICK
            pause = look.pause or (0.05 if has_waited else min(2.0, max(0.1, 1.5 * pause)))
            await made(self._sleep(min(pause, max(0.0, until - time.monotonic()))))

    def _look(self, job_id: UUID | str, etag: str | None, seconds: int, patience: float) -> Any:
        """A Look at the job: as soon as it has another version than `etag`, or after some seconds."""
        raise NotImplementedError

    def _pages(
        self, route: str, answer: type[Any], given: dict[str, Any], field: str, limit: int | None, most: int
    ) -> Any:
        """The rows of all pages, at most `limit`; a page of up to `most` is fetched as its rows are taken."""

        async def rows() -> AsyncIterator[Any]:
            left = inf if limit is None else limit
            after: dict[str, Any] = {}
            while left > 0:
                page = await made(self._call(route, answer, given | {"limit": int(min(most, left))} | after))
                found = getattr(page, field)
                for row in found:
                    yield row
                left, after = left - len(found), {"after": page.next}
                if page.next is None:
                    return

        return self._each(rows())

    def _total(self, route: str, answer: type[Any], given: dict[str, Any], field: str) -> Any:
        """Repeat an operation until it has come to the end; returns the sum of this field of its answers."""

        async def total() -> int:
            found: int = 0
            after: dict[str, Any] = {}
            while True:
                step = await made(self._call(route, answer, given | after, once=True))
                found += getattr(step, field)
                following = getattr(step, "next", None)
                if following is None and getattr(step, "is_done", True):
                    return found
                after = {"after": following} if following else {}

        return self._finished(total())


def document(job: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a new job, with those that the client fills in; null ones are left out."""
    filled = {
        "queue": job.get("queue") or "etl.default",
        "lock_key": job.get("lock_key") or job.get("task"),
        "args": None if job.get("args") is None else plain(job["args"]),
        "idempotency_key": job.get("idempotency_key") or new_key(),
    }
    return {name: value for name, value in {**job, **filled}.items() if value is not None}


def new_key() -> str:
    """An idempotency key for a request that has none."""
    return f"client-{uuid4()}"
