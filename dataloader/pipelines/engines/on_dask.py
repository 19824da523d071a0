"""Dask by the client of its scheduler; a task's key there is our own id.

A task lives as long as somebody wants it. Its publication under the id does, when the run and its client are gone. The
task begins its function only when it is told that it is published: else a task whose client dies in between could go
on beside the one that the next run orders.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from distributed import Client, Event, Future, Variable
from distributed.security import Security

from dataloader.config import DaskCluster, DaskFunction
from dataloader.pipelines.engines import Engine, Order, Report, State, driver
from dataloader.pipelines.http import Unreachable

ANSWER_SEC = 3.0  # with CANCEL_SEC it ends before DL_KILL_GRACE_SEC does
CLOSE_SEC = 1.0
ABSENT_SEC = 0.05  # until a variable counts as not set
T = TypeVar("T")


class _Task(NamedTuple):
    future: Future[Any]
    nonce: str


class OnDask(Engine):
    """One task on one Dask cluster."""

    forgets = True  # the scheduler holds results and outputs in memory

    def __init__(self, cluster: DaskCluster, function: DaskFunction, args: str) -> None:
        self._cluster, self._function, self._args = cluster, function, args
        # The client's loop runs only while a question is asked: what comes meanwhile is read with the next answer.
        self._runner: asyncio.Runner | None = None
        self._client: Any = None
        self._task: _Task | None = None

    def submit(self, order: Order) -> str:
        self._task = self._ask(lambda: self._submitted(order))
        return order.id

    def poll(self, order: Order) -> Report:
        task = self._task = self._task or self._ask(lambda: self._published(order))
        if task is None:
            return Report(State.ABSENT)
        status = task.future.status
        if status in ("cancelled", "lost"):  # the client reports this when its connection is lost
            self.close()
            raise Unreachable("the connection to the scheduler is lost")
        written = self._ask(lambda: self._written(order)) or {"total": order.read, "tail": b""}
        output, read = newer(written["total"], written["tail"], order.read), written["total"]
        if status == "error":
            error: Any = self._ask(task.future.exception)
            return Report(State.FAILED, output, read, f"{type(error).__name__}: {error}"[:500])
        if status != "finished":
            return Report(State.RUNNING, output, read)
        end = self._ask(task.future.result)
        if end["is_stopped"]:
            return Report(State.STOPPED, output, read)
        if end["code"] == 0:
            return Report(State.SUCCEEDED, output, read, result=json.loads(end["result"] or "null"))
        return Report(State.FAILED, output, read, f"its process ended with {end['code']}")

    def cancel(self, order: Order, until: float) -> None:
        """A function that has begun ends by SIGTERM, and by SIGKILL 1 s later."""
        self._ask(lambda: self._canceled(order), max(0.1, until - time.monotonic()))

    def forget(self, order: Order) -> None:
        self._ask(lambda: self._forgotten(order))

    def close(self) -> None:
        runner, client = self._runner, self._client
        self._runner = self._client = self._task = None
        if runner is not None:
            if client is not None:
                with suppress(OSError, TimeoutError):
                    runner.run(asyncio.wait_for(client.close(), CLOSE_SEC))
            runner.close()

    async def _submitted(self, order: Order) -> _Task:
        if (task := await self._published(order)) is None:
            nonce = secrets.token_hex(8)
            given = {"id": order.id, "nonce": nonce, "function": self._function.function, "args": self._args}
            # As one text, for Dask takes a text that equals a key for its task.
            text = json.dumps(given | {"is_driver": self._function.is_driver})
            future = self._client.submit(_call(), _SOURCE, text, key=order.id, pure=False)
            with suppress(KeyError):  # another run of the job has been faster
                await _answer(self._client.publish_dataset([future, nonce], name=order.id))
            if (task := await self._published(order)) is None:
                raise Unreachable("the order has gone again")
        return task

    async def _published(self, order: Order) -> _Task | None:
        """The task of this id, with the word that it may begin: who has published it may have died before that."""
        dataset = await _answer(self._client.get_dataset(order.id, default=None))
        if dataset is None:
            return None
        task = _Task(*dataset)
        await _answer(Event(f"{order.id}-go-{task.nonce}", client=self._client).set())
        return task

    async def _written(self, order: Order) -> dict[str, Any] | None:
        """The output that the driver has kept; None if the function has not begun."""
        try:
            kept: dict[str, Any] = await _answer(self._variable(order).get(timeout=ABSENT_SEC))
        except TimeoutError:
            return None
        return kept

    async def _canceled(self, order: Order) -> None:
        task = self._task or await self._published(order)
        if task is None:
            return
        await _answer(Event(f"{order.id}-stop", client=self._client).set())
        if await self._written(order) is None:  # it has not begun: it never will
            await _answer(self._client.cancel([task.future], force=True))
        else:
            while not task.future.done():
                await asyncio.sleep(0.02)
        await self._forgotten(order)

    async def _forgotten(self, order: Order) -> None:
        task = self._task or await self._published(order)
        await _answer(self._client.unpublish_dataset(order.id))
        self._variable(order).delete()
        for name in [f"{order.id}-stop"] + ([f"{order.id}-go-{task.nonce}"] if task else []):
            await _answer(Event(name, client=self._client).clear())

    def _variable(self, order: Order) -> Variable:
        return Variable(f"{order.id}-output", client=self._client)

    def _ask(self, question: Callable[[], Awaitable[T]], within: float = ANSWER_SEC) -> T:
        """The scheduler's answer; raises Unreachable where it takes longer than so many seconds."""

        async def asked(question: Callable[[], Awaitable[Any]]) -> Any:
            return await asyncio.wait_for(question(), within)

        try:
            if self._runner is None or self._client is None or self._client.status != "running":
                self.close()
                self._runner = asyncio.Runner()
                self._client = self._runner.run(asked(lambda: self._connected(within)))
            return cast(T, self._runner.run(asked(question)))
        except (OSError, TimeoutError, CancelledError) as e:
            self.close()
            raise Unreachable(f"the scheduler has not answered ({type(e).__name__})") from None

    async def _connected(self, within: float) -> Client:
        """A client in our loop: one that makes its own waits for ever for a scheduler that is silent."""
        cluster, security = self._cluster, None
        if cluster.ca_file:
            files = {"ca_file": cluster.ca_file, "client_cert": cluster.cert_file, "client_key": cluster.key_file}
            security = Security(
                require_encryption=True, **{f"tls_{name}": str(path) for name, path in files.items() if path}
            )
        address = cluster.address.get_secret_value()
        client = Client(
            address, timeout=within, asynchronous=True, set_as_default=False, security=security, name="dataloader"
        )
        try:
            await client
        except BaseException:
            await client.close(timeout=CLOSE_SEC)
            raise
        return client


def newer(total: int, tail: bytes, read: int) -> bytes:
    """PURE: what is behind the first `read` of `total` bytes of output, as far as `tail`, the last of them, has it."""
    new = max(0, total - read)
    left_out = new - len(tail)
    head = f"[{left_out} bytes are left out]\n".encode() if left_out > 0 else b""
    return head + tail[max(0, len(tail) - new) :]


async def _answer(asked: Any) -> Any:
    """The answer of one of Dask's verbs, which are coroutines within the client's own thread."""
    return await asked if hasattr(asked, "__await__") else asked


_SOURCE = Path(driver.__file__).read_text("utf-8")


def _call() -> Callable[[str, str], dict[str, Any]]:
    """The function of driver.py as one that no module has: it travels whole, for the cluster lacks our package."""
    names: dict[str, Any] = {"__name__": "dataloader_driver"}
    exec(compile(_SOURCE, os.path.basename(driver.__file__), "exec"), names)  # noqa: S102  our own text
    call: Callable[[str, str], dict[str, Any]] = names["call"]
    return call
