"""`AsyncClient`: the methods of `Client`, awaited, over httpx; for asyncio and trio. The extra `async`."""

from __future__ import annotations

import ssl
from typing import Self

from dataloader.client import OverHTTP
from dataloader.client.errors import ClientError
from dataloader.client.farm import Calls
from dataloader.client.methods import Awaited
from dataloader.client.wire import KEPT, Answer, Request, Service, answer, checked_size

try:
    import anyio
    import httpx
    from anyio.lowlevel import current_token
except ImportError as e:
    raise ImportError(f"{e}: AsyncClient needs it; install 'dataloader-farm[async]'") from e


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


class AsyncClient(OverHTTP, Calls, Awaited):
    """A farm over its HTTP API, for asyncio and trio: the methods, arguments and promises of `Client`.

    A method that returns an iterator there returns an asynchronous one here; all others are awaited. An `on_progress`
    may be a coroutine function. Tasks of one event loop may share a client.
    """

    _transport: AsyncTransport
    _transport_kind = AsyncTransport
    _sleep = staticmethod(anyio.sleep)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the client may be used again."""
        await self._transport.close()
