"""`Client`: a farm from Python, over HTTP. Start with docs/client.md.

Standard library and tenacity only: a program that triggers jobs needs neither flask nor a driver in its process.
`AsyncClient` needs httpx besides, and is imported on its first use. Answers are values of `dataloader.model`.

    farm           `Farm`: the methods that both clients and the command line have, but for
    operations     the methods that are made from the operations
    methods        a method that blocks, or is awaited
    asynchronous   `AsyncClient`: the methods of `Client`, awaited
    errors         the exceptions of a call
    wire           PURE: requests and answers as they are sent
    transport      HTTP with a limit to every wait
"""

from __future__ import annotations

import os
import ssl
from importlib import import_module
from typing import TYPE_CHECKING, Any
from uuid import UUID

from tenacity import AsyncRetrying

from dataloader import obs
from dataloader.client import wire
from dataloader.client.errors import (
    ClientError,
    Conflict,
    Forbidden,
    JobFailed,
    NotFound,
    QueueFull,
    Refused,
    Unauthorized,
    Unavailable,
    Unexpected,
    WaitTimeout,
)
from dataloader.client.farm import Farm, Look
from dataloader.client.methods import R, answered
from dataloader.client.transport import Transport
from dataloader.client.wire import Answer, Request, Service, repetition
from dataloader.model.jobs import Status

if TYPE_CHECKING:
    from dataloader.client.asynchronous import AsyncClient

__all__ = ["AsyncClient", "Client", "ClientError", "Conflict", "Forbidden", "JobFailed", "NotFound", "QueueFull"]
__all__ += ["Refused", "Unauthorized", "Unavailable", "Unexpected", "WaitTimeout"]


class OverHTTP:
    """How both clients reach a farm: over its HTTP API."""

    _transport_kind: Any
    _sleep: Any

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout: float = 10,
        patience: float = 30,
        context: ssl.SSLContext | None = None,
    ) -> None:
        if url is None:  # DL_TOKEN belongs to DL_URL: no other address receives it
            url = os.environ.get("DL_URL") or "http://127.0.0.1:8081"
            token = token or os.environ.get("DL_TOKEN")
        self._service = Service(url, token)
        self._transport = self._transport_kind(self._service, timeout, context)
        self._patience = patience
        self.url = self._service.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    async def _call(
        self, route: str, answer: type[R], given: dict[str, Any], *, once: bool = False, trace: str | None = None
    ) -> R:
        trace = trace or obs.current()
        request = wire.request(route, given, {"traceparent": trace} if trace else {}, is_once=once)
        return wire.understood(answer, (await self._sent(request, self._patience)).document)

    async def _look(self, job_id: UUID | str, etag: str | None, seconds: int, patience: float) -> Look:
        named = {"job_id": str(job_id)} | ({"wait": seconds} if seconds else {})
        headers = {"If-None-Match": etag} if etag else {}
        answer = await self._sent(wire.request("GET /jobs/{job_id}/status", named, headers, extra=seconds), patience)
        job = None if answer.document is None else wire.understood(Status, answer.document)
        return Look(job, answer.etag, answer.retry_after)

    async def _sent(self, request: Request, patience: float) -> Answer:
        """The answer to a request, which is repeated for so many seconds while the service is away."""

        async def call() -> Answer:
            answer: Answer = await answered(self._transport.call(request))
            return answer

        async def sleep(seconds: float) -> None:
            await answered(self._sleep(seconds))

        return await (call() if request.is_once else AsyncRetrying(**repetition(patience), sleep=sleep)(call))


class Client(OverHTTP, Farm):
    """A farm over its HTTP API; threads may share a client.

    An exchange ends within `timeout` seconds. A request that may be sent twice is repeated for up to `patience` seconds
    while the service is away or sends Retry-After. Every method may raise ClientError. Without `url` the client reads
    DL_URL and DL_TOKEN. `context` is for a certificate authority of your own.
    """

    _transport_kind = Transport

    def close(self) -> None:
        self._transport.close()


def __getattr__(name: str) -> Any:
    if name != "AsyncClient":  # imported on first use: it needs the extra `async`
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = import_module("dataloader.client.asynchronous").AsyncClient
    return value
