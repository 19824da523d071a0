"""`Client`: a farm from Python, over HTTP. Start with docs/client.md.

Standard library and tenacity only: a program that triggers jobs needs neither flask nor a driver in its process.
`AsyncClient` needs httpx besides, and is imported on its first use. The modules:

    farm           `Farm`, the methods that a client and the command line share
    plans          PURE: methods of several calls
    asynchronous   `AsyncClient`: the methods of `Client`, awaited
    watch          a job watched until its end
    results        the answers as frozen values
    errors         the exceptions of a call
    wire           PURE: requests and answers as they are sent
    transport      HTTP with a limit to every wait
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote
from uuid import UUID

from tenacity import Retrying

from dataloader import obs
from dataloader.client import plans, wire
from dataloader.client.errors import (
    ClientError,
    Conflict,
    Fault,
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
from dataloader.client.farm import BATCH, Farm, new_key
from dataloader.client.results import (
    Started,
    read,
    read_all,
)
from dataloader.client.transport import Transport
from dataloader.client.watch import Watch
from dataloader.client.wire import Answer, Request, Service, repetition
from dataloader.model.farm import Database, Name, Names, Webhook, Webhooks, Worker
from dataloader.model.jobs import (
    Event,
    FarmEvent,
    Finished,
    Job,
    JobPrediction,
    ListedJob,
    LogLine,
    Preview,
    QueuePrediction,
    Status,
    Tally,
)
from dataloader.model.plans import Backfill, Partition, Schedule
from dataloader.model.queues import Key, Limit, Overview, Queue, QueueState
from dataloader.model.runs import ArgsSchema, ErrorGroup, ErrorGroups, QueueRuns, Task, TaskRuns
from dataloader.queue.typed_args import plain

if TYPE_CHECKING:
    from dataloader.client.asynchronous import AsyncClient

__all__ = [
    "ArgsSchema",
    "AsyncClient",
    "Backfill",
    "Client",
    "ClientError",
    "Conflict",
    "Database",
    "ErrorGroup",
    "ErrorGroups",
    "Event",
    "FarmEvent",
    "Fault",
    "Finished",
    "Forbidden",
    "Job",
    "JobFailed",
    "JobPrediction",
    "Key",
    "Limit",
    "ListedJob",
    "LogLine",
    "Name",
    "Names",
    "NotFound",
    "Overview",
    "Partition",
    "Preview",
    "Queue",
    "QueueFull",
    "QueuePrediction",
    "QueueRuns",
    "QueueState",
    "Refused",
    "Schedule",
    "Started",
    "Status",
    "Tally",
    "Task",
    "TaskRuns",
    "Unauthorized",
    "Unavailable",
    "Unexpected",
    "WaitTimeout",
    "Webhook",
    "Webhooks",
    "Worker",
]

DEFAULT_URL = "http://127.0.0.1:8081"
R = TypeVar("R")
T = TypeVar("T")


class Client(Farm):
    """A farm over its HTTP API; threads may share a client.

    An exchange ends within `timeout` seconds. A request that may be sent twice is repeated for up to `patience` seconds
    while the service is away or sends Retry-After. Every method may raise ClientError. Without `url` the client reads
    DL_URL and DL_TOKEN. `context` is for a certificate authority of your own.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout: float = 10,
        patience: float = 30,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._service = named_service(url, token)
        self._transport = Transport(self._service, timeout, context)
        self._patience = patience

    def __repr__(self) -> str:
        return f"Client({self._service.url!r})"

    @property
    def url(self) -> str:
        return self._service.url

    def close(self) -> None:
        self._transport.close()

    def _add(self, fields: dict[str, Any], trace: str | None) -> Started:
        return self._ask(_one(Started), "POST", "/jobs/trigger", _json(fields), headers=_traced(trace))

    def trigger_many(
        self, jobs: Iterable[Mapping[str, Any]], *, on_done: Mapping[str, Any] | None = None
    ) -> list[Started]:
        """Add jobs, documents with the fields of `trigger`. The result has their ids and states in their order.

        A request holds up to 1,000 jobs; the service adds all jobs of a request or none. `on_done` is one job more, the
        last of the result: it starts when all others have ended. Raises ValueError for it beside more than 1,000 jobs.
        """
        whole = list(map(_whole, jobs))
        if on_done is not None and len(whole) > BATCH:
            raise ValueError(f"on_done is for up to {BATCH} jobs: name their ids in the depends_on of another job")
        last = {} if on_done is None else {"on_done": _whole(on_done)}
        starts = range(0, max(len(whole), len(last)), BATCH)
        bodies = [{"jobs": whole[start : start + BATCH], **last} for start in starts]
        return self._carry_out(plans.all_of([partial(self._add_some, body, obs.current()) for body in bodies]))

    def _add_some(self, body: dict[str, Any], trace: str | None) -> list[Started]:
        return self._ask(_many(Started, "jobs"), "POST", "/jobs/batch", body, headers=_traced(trace))

    def _run_again(self, job_id: UUID | str, fields: dict[str, Any]) -> Started:
        return self._ask(_one(Started), "POST", f"{_of(job_id)}/again", _json(fields), headers=_traced(obs.current()))

    def watch(self, job_id: UUID | str) -> Watch:
        def ask(seconds: int, headers: Mapping[str, str], patience: float) -> Answer:
            query = {"wait": seconds or None}
            path = f"{_of(job_id)}/status"
            return self._ask(_whole_answer, "GET", path, query=query, headers=headers, extra=seconds, patience=patience)

        return Watch(ask, self._carry_out)

    def _call(
        self, route: str, answer: type[Any], given: dict[str, Any], field: str = "", *, once: bool = False
    ) -> Any:
        def found(raw: Answer) -> Any:
            made = wire.understood(answer, raw.document)
            return getattr(made, field) if field else made

        method, path, query, body = wire.address(route, given)
        return self._send(Request(found, method, path, body, query, is_once=once))

    def _ask(
        self,
        read: Callable[[Answer], R],
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        extra: float = 0,
        patience: float | None = None,
    ) -> R:
        """A request that is repeated while the service is away."""
        return self._send(Request(read, method, path, body, query, headers, extra, patience))

    def _send(self, request: Request[R]) -> R:
        if request.is_once:
            return request.read(self._transport.call(request))
        patience = self._patience if request.patience is None else request.patience
        return request.read(Retrying(**repetition(patience))(self._transport.call, request))


def named_service(url: str | None, token: str | None) -> Service:
    """The service of this address, without one that of DL_URL; raises ValueError for an address that is none."""
    if url is None:  # DL_TOKEN belongs to DL_URL: no other address receives it
        url, token = os.environ.get("DL_URL") or DEFAULT_URL, token or os.environ.get("DL_TOKEN")
    return Service(url, token)


def _one(kind: type[T]) -> Callable[[Answer], T]:
    return lambda answer: read(kind, answer.document)


def _many(kind: type[T], name: str) -> Callable[[Answer], list[T]]:
    return lambda answer: read_all(kind, answer.document, name)


def _whole_answer(answer: Answer) -> Answer:
    return answer


def _whole(job: Mapping[str, Any]) -> dict[str, Any]:
    """A job's document with the fields that `trigger` fills in."""
    args = {"args": plain(job["args"])} if job.get("args") is not None else {}
    return _json(
        {"queue": "etl.default", **job, **args, "lock_key": job.get("lock_key") or job.get("task")}
        | {"idempotency_key": job.get("idempotency_key") or new_key()}
    )


def _json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not None, as JSON has them."""
    return {name: _plain(name, value) for name, value in fields.items() if value is not None}


def _plain(name: str, value: Any) -> Any:
    if not isinstance(value, datetime):
        return value
    if value.utcoffset() is None:
        raise ValueError(f"{name} should be a datetime with a time zone")
    return value.isoformat()


def _of(job_id: UUID | str) -> str:
    return f"/jobs/{quote(str(job_id), safe='')}"


def _traced(trace: str | None) -> dict[str, str] | None:
    return {"traceparent": trace} if trace else None


def __getattr__(name: str) -> Any:
    if name != "AsyncClient":  # imported on first use: it needs the extra `async`
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = import_module("dataloader.client.asynchronous").AsyncClient
    return found
