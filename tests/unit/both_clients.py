"""`Client` and `AsyncClient` for the same tests: `Blocking` calls an AsyncClient as if it were a Client."""

from collections.abc import Iterator
from inspect import isasyncgen, isawaitable
from typing import Any, Self

from anyio.from_thread import BlockingPortal

from dataloader.client import AsyncClient


class Blocking:
    """An AsyncClient whose methods block: an event loop of another thread carries them out."""

    def __init__(self, client: AsyncClient, portal: BlockingPortal) -> None:
        self._client, self._portal = client, portal

    def __repr__(self) -> str:
        return repr(self._client)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return self._blocking(found) if callable(found) else found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _blocking(self, method: Any) -> Any:
        async def called(*args: Any, **kwargs: Any) -> Any:
            found = method(*args, **kwargs)
            return await found if isawaitable(found) else found

        def call(*args: Any, **kwargs: Any) -> Any:
            found = self._portal.call(lambda: called(*args, **kwargs))
            return self._rows(found) if isasyncgen(found) else found

        return call

    def _rows(self, found: Any) -> Iterator[Any]:
        try:
            while True:
                yield self._portal.call(found.__anext__)
        except StopAsyncIteration:
            return
