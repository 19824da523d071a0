"""`AsyncClient`: the methods of `Client`, awaited, over httpx; for asyncio and trio. The extra `async`.

A method of `Client` makes a coroutine and carries it out. Here the same method returns the coroutine: so each of them
is declared once, and `AsyncClient.status` is `Client.status`, awaited.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from dataloader.client import Client
from dataloader.client.errors import ClientError
from dataloader.client.wire import KEPT, Answer, Request, Service, answer, checked_size

try:
    import anyio
    import httpx
    from anyio.lowlevel import current_token
except ImportError as e:
    raise ImportError(f"{e}: AsyncClient needs it; install 'dataloader-farm[async]'") from e

P = ParamSpec("P")
R = TypeVar("R")


def _awaited(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]:
    """A method of `Client`, which returns a coroutine here."""

    @wraps(method)
    async def call(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await cast("Coroutine[Any, Any, R]", method(self, *args, **kwargs))

    return cast("Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]", call)


def _iterated(
    method: Callable[Concatenate[Any, P], Iterator[R]],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[R]]:
    """A method of `Client` that returns an iterator; here it is for `async for`."""
    return cast("Callable[Concatenate[AsyncClient, P], AsyncIterator[R]]", method)


class AsyncTransport:
    """The connections of one event loop to one service; no redirect is followed, no proxy of the environment used."""

    def __init__(self, service: Service, timeout: float, context: ssl.SSLContext | None = None) -> None:
        self._service, self._timeout, self._context = service, timeout, context
        self._kept: httpx.AsyncClient | None = None
        self._loop: object = None  # the event loop of these connections

    async def call(self, request: Request) -> Answer:
        try:
            with anyio.fail_after(self._timeout + request.extra):
                if not request.is_once:
                    if (loop := current_token()) != self._loop:  # another asyncio.run
                        self._kept, self._loop = None, loop
                    self._kept = self._kept or self._new()
                    return await self._exchange(self._kept, request)
                async with self._new() as client:
                    return await self._exchange(client, request)
        except ClientError as e:
            raise self._service.hidden(e) from None
        except (OSError, httpx.HTTPError, httpx.InvalidURL, UnicodeError) as e:
            raise self._service.no_answer(_cause(e)) from None

    async def close(self) -> None:
        """Close the connections; the transport may be used again."""
        kept, self._kept = self._kept, None
        if kept and current_token() == self._loop:
            await kept.aclose()

    def _new(self) -> httpx.AsyncClient:
        if self._service.scheme == "https":
            self._context = self._context or ssl.create_default_context()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT)
        # `call` limits the whole exchange; httpx would limit each of its waits.
        return httpx.AsyncClient(verify=self._context or False, trust_env=False, timeout=None, limits=limits)  # noqa: S113

    async def _exchange(self, client: httpx.AsyncClient, request: Request) -> Answer:
        url = self._service.url + request.target
        headers = {"Accept-Encoding": "identity", **self._service.headers(request)}
        async with client.stream(request.method, url, content=request.content, headers=headers) as response:
            parts, size = [], 0
            async for part in response.aiter_raw():
                parts.append(part)
                size += len(part)
                checked_size(size)
        return answer(response.status_code, response.reason_phrase, response.headers, b"".join(parts))


def _cause(error: Exception) -> Exception:
    """The error of the system that httpx wraps, which is the innermost one; else httpx's own."""
    root, cause = error, error.__cause__ or error.__context__
    while isinstance(cause, Exception):
        root = cause if isinstance(cause, OSError | UnicodeError) else root
        cause = cause.__cause__ or cause.__context__
    return root


class AsyncClient:
    """A farm over its HTTP API, for asyncio and trio: the methods, arguments and promises of `Client`.

    A method that returns an iterator there returns an asynchronous one here; all others are awaited. An `on_progress`
    may be a coroutine function. Tasks of one event loop may share a client.
    """

    url: str
    _transport: AsyncTransport
    _transport_kind = AsyncTransport
    __init__, __repr__ = Client.__init__, Client.__repr__

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the client may be used again."""
        await self._transport.close()

    trigger = _awaited(Client.trigger)
    trigger_many = _awaited(Client.trigger_many)
    run = _awaited(Client.run)
    wait = _awaited(Client.wait)
    again = _awaited(Client.again)
    args_schema = _awaited(Client.args_schema)
    status = _awaited(Client.status)
    job = _awaited(Client.job)
    result = _awaited(Client.result)
    cancel = _awaited(Client.cancel)
    jobs = _iterated(Client.jobs)
    tally = _awaited(Client.tally)
    suggest = _awaited(Client.suggest)
    preview = _awaited(Client.preview)
    order_jobs = _awaited(Client.order_jobs)
    keys = _iterated(Client.keys)
    events = _awaited(Client.events)
    pace = _awaited(Client.pace)
    job_events = _iterated(Client.job_events)
    logs = _iterated(Client.logs)
    family = _awaited(Client.family)
    overview = _awaited(Client.overview)
    queues = _awaited(Client.queues)
    workers = _awaited(Client.workers)
    predict = _awaited(Client.predict)
    predict_queue = _awaited(Client.predict_queue)
    tasks = _awaited(Client.tasks)
    names = _awaited(Client.names)
    task_runs = _awaited(Client.task_runs)
    queue_runs = _awaited(Client.queue_runs)
    database = _awaited(Client.database)
    pause = _awaited(Client.pause)
    resume = _awaited(Client.resume)
    limit = _awaited(Client.limit)
    set_queue = _awaited(Client.set_queue)
    schedules = _awaited(Client.schedules)
    schedule = _awaited(Client.schedule)
    add_schedule = _awaited(Client.add_schedule)
    change_schedule = _awaited(Client.change_schedule)
    remove_schedule = _awaited(Client.remove_schedule)
    pause_schedule = _awaited(Client.pause_schedule)
    resume_schedule = _awaited(Client.resume_schedule)
    run_schedule = _awaited(Client.run_schedule)
    backfills = _awaited(Client.backfills)
    backfill = _awaited(Client.backfill)
    add_backfill = _awaited(Client.add_backfill)
    try_backfill = _awaited(Client.try_backfill)
    set_backfill = _awaited(Client.set_backfill)
    pause_backfill = _awaited(Client.pause_backfill)
    resume_backfill = _awaited(Client.resume_backfill)
    cancel_backfill = _awaited(Client.cancel_backfill)
    retry_backfill = _awaited(Client.retry_backfill)
    remove_backfill = _awaited(Client.remove_backfill)
    partitions = _iterated(Client.partitions)
    errors = _awaited(Client.errors)
    write_error_note = _awaited(Client.write_error_note)
    limits = _awaited(Client.limits)
    set_limit = _awaited(Client.set_limit)
    remove_limit = _awaited(Client.remove_limit)
    get_limit = _awaited(Client.get_limit)
    requeue = _awaited(Client.requeue)
    run_now = _awaited(Client.run_now)
    delete = _awaited(Client.delete)
    cancel_jobs = _awaited(Client.cancel_jobs)
    change_jobs = _awaited(Client.change_jobs)
    requeue_dead = _awaited(Client.requeue_dead)
    delete_dead = _awaited(Client.delete_dead)
    run_all = _awaited(Client.run_all)
    kill_retries = _awaited(Client.kill_retries)
    move = _awaited(Client.move)
    webhooks = _awaited(Client.webhooks)
    put_webhook = _awaited(Client.put_webhook)
    remove_webhook = _awaited(Client.remove_webhook)
    pause_webhook = _awaited(Client.pause_webhook)
    resume_webhook = _awaited(Client.resume_webhook)
    test_webhook = _awaited(Client.test_webhook)

    # How the methods above make their requests, and do not block.
    _call, _look, _pages, _total, _sent = Client._call, Client._look, Client._pages, Client._total, Client._sent
    _finished = _each = staticmethod(lambda work: work)
    _sleep = staticmethod(anyio.sleep)
