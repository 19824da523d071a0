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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
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
from dataloader.client.farm import BATCH, LINES, PAGE, Farm, new_key
from dataloader.client.operations import given
from dataloader.client.results import (
    Event,
    Job,
    LogLine,
    Preview,
    Result,
    Started,
    Tally,
    read,
    read_all,
)
from dataloader.client.transport import Transport
from dataloader.client.watch import Watch
from dataloader.client.wire import Answer, Request, Service, repetition
from dataloader.model.farm import Database, Name, Names, Webhook, Webhooks, Worker
from dataloader.model.jobs import JobPrediction, QueuePrediction
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
    "Fault",
    "Forbidden",
    "Job",
    "JobFailed",
    "JobPrediction",
    "Key",
    "Limit",
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

    def status(self, job_id: UUID | str) -> Job:
        return self._ask(_one(Job), "GET", f"{_of(job_id)}/status")

    def job(self, job_id: UUID | str) -> Job:
        return self._ask(_one(Job), "GET", _of(job_id))

    def result(self, job_id: UUID | str) -> Any:
        return self._ask(_result, "GET", f"{_of(job_id)}/result")

    def watch(self, job_id: UUID | str) -> Watch:
        def ask(seconds: int, headers: Mapping[str, str], patience: float) -> Answer:
            query = {"wait": seconds or None}
            path = f"{_of(job_id)}/status"
            return self._ask(_whole_answer, "GET", path, query=query, headers=headers, extra=seconds, patience=patience)

        return Watch(ask, self._carry_out)

    def cancel(self, job_id: UUID | str, *, force: bool = False) -> Job:
        body = {"force": True} if force else {}
        return self._ask(_one(Job), "POST", f"{_of(job_id)}/cancel", body)

    def _page(self, filters: dict[str, Any], limit: int, after: str | None) -> tuple[list[Job], str | None]:
        return self._ask(
            _page_of(Job, "jobs"), "GET", "/jobs", query={**_json(filters), "limit": limit, "after": after}
        )

    def tally(self, /, **filters: Any) -> Tally:
        return self._ask(_one(Tally), "GET", "/tally", query=_json(filters))

    def suggest(self, q: str) -> list[str]:
        return self._ask(_suggestions, "GET", "/suggestions", query={"q": q})

    def preview(self, /, order: str, *, job_ids: Sequence[UUID | str] | None = None, **filters: Any) -> Preview:
        target = {"matching": _json(filters)} if job_ids is None else {"job_ids": list(map(str, job_ids))}

        def found(answer: Answer) -> Preview:
            return replace(read(Preview, answer.document), target=target)

        return self._ask(found, "POST", "/jobs/bulk/preview", {"order": order, **target})

    def _order_some(self, preview: Preview, after: str | None) -> tuple[int, str | None]:
        body = {"order": preview.order, "confirmation": preview.confirmation, **preview.target, **given(after=after)}
        return self._ask(_ordered, "POST", "/jobs/bulk", body)

    def events(
        self, job_id: UUID | str | None = None, *, after: int | None = None, queue: str | None = None, limit: int = PAGE
    ) -> list[Event]:
        path = "/events" if job_id is None else f"{_of(job_id)}/events"
        query = {"after": after, "limit": limit, "queue": queue if job_id is None else None}
        return self._ask(_many(Event, "events"), "GET", path, query=query)

    def logs(
        self, job_id: UUID | str, *, after: str | None = None, attempt: int | None = None, limit: int = LINES
    ) -> list[LogLine]:
        query = {"after": after, "attempt": attempt, "limit": limit}
        return self._ask(_many(LogLine, "lines"), "GET", f"{_of(job_id)}/logs", query=query)

    def requeue(self, job_id: UUID | str) -> Job:
        """Queue a job that has ended again, with a fresh budget of attempts; Conflict for one that has not."""
        return self._once(_one(Job), "POST", f"{_of(job_id)}/requeue")

    def run_now(self, job_id: UUID | str) -> Job:
        """Make a queued job due that waits for its time; Conflict for one that is not queued."""
        return self._once(_one(Job), "POST", f"{_of(job_id)}/run-now")

    def delete(self, job_id: UUID | str) -> None:
        """Delete a job and its journal; Conflict for one that runs."""
        return self._once(_nothing, "DELETE", _of(job_id))

    def _change(self, verb: str, job_ids: Sequence[UUID | str], force: bool) -> dict[UUID, str]:
        body = given(job_ids=[str(job_id) for job_id in job_ids], force=force or None)
        return self._once(_outcomes, "POST", f"/jobs/bulk/{verb}", body)

    def _change_some(self, verb: str, queue: str, only: Mapping[str, str], after: str | None) -> tuple[int, str | None]:
        return self._once(_changed, "POST", _queue(queue, verb), given(**only, after=after or None))

    def _call(
        self, route: str, answer: type[Any], given: dict[str, Any], field: str = "", *, once: bool = False
    ) -> Any:
        def found(raw: Answer) -> Any:
            made = wire.understood(answer, raw.document)
            return getattr(made, field) if field else made

        method, path, query, body = wire.address(route, given)
        return self._send(Request(found, method, path, body, query, is_once=once))

    def _once(self, read: Callable[[Answer], R], method: str, path: str, body: Any = None) -> R:
        """A request that must not be sent twice."""
        return self._send(Request(read, method, path, body, is_once=True))

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


def _page_of(kind: type[T], name: str) -> Callable[[Answer], tuple[list[T], Any]]:
    """The rows of a page, and where the next one begins."""
    return lambda answer: (read_all(kind, answer.document, name), answer.document.get("next"))


def _whole_answer(answer: Answer) -> Answer:
    return answer


def _nothing(answer: Answer) -> None:
    """The answer says no more than its status."""


def _result(answer: Answer) -> Any:
    return read(Result, answer.document).result


def _outcomes(answer: Answer) -> dict[UUID, str]:
    return {UUID(each["job_id"]): str(each["outcome"]) for each in answer.document["jobs"]}


def _changed(answer: Answer) -> tuple[int, str | None]:
    changed = int(answer.document["changed"])
    return changed, answer.document.get("next", "" if changed else None)  # an older service names no place to go on at


def _ordered(answer: Answer) -> tuple[int, str | None]:
    return int(answer.document["changed"]), answer.document["next"]


def _suggestions(answer: Answer) -> list[str]:
    return list(map(str, answer.document["suggestions"]))


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


def _queue(queue: str, verb: str = "") -> str:
    rest = f"/{verb}" if verb else ""
    is_ambiguous = "/" in queue and not verb  # such as `a/move`
    if queue in (".", "..") or is_ambiguous:  # proxies remove these names from a path
        return f"/queues/-{rest}?name={quote(queue, safe='')}"
    return f"/queues/{quote(queue, safe='')}{rest}"


def _traced(trace: str | None) -> dict[str, str] | None:
    return {"traceparent": trace} if trace else None


def __getattr__(name: str) -> Any:
    if name != "AsyncClient":  # imported on first use: it needs the extra `async`
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = import_module("dataloader.client.asynchronous").AsyncClient
    return found
