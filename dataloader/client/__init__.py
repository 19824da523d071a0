"""`Client`: a farm from Python, over HTTP. Start with docs/client.md.

Standard library and tenacity only: a program that triggers jobs needs neither flask nor a driver in its process.
Of the package it may import `traces`, and its own modules:

    watch        a job until its end
    results      the answers as frozen values
    errors       what a call may raise
    transport    HTTP with a limit to every wait
"""

from __future__ import annotations

import os
import random
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from math import inf
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote
from uuid import UUID, uuid4

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_before_delay

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
from dataloader.client.results import Database, Event, Job, Overview, Queue, Started, Worker, read, read_all
from dataloader.client.transport import Answer, Transport
from dataloader.client.watch import OUTAGE_SEC, Watch, wait_for
from dataloader.farm import traces

__all__ = [
    "Client",
    "ClientError",
    "Conflict",
    "Database",
    "Event",
    "Fault",
    "Forbidden",
    "Job",
    "JobFailed",
    "NotFound",
    "Overview",
    "Queue",
    "QueueFull",
    "Refused",
    "Started",
    "Unauthorized",
    "Unavailable",
    "Unexpected",
    "WaitTimeout",
    "Worker",
]

DEFAULT_URL = "http://127.0.0.1:8081"
PAGE = 200  # jobs or events of one answer
BATCH = 1_000  # jobs of one request


class Client:
    """A farm's HTTP API as methods; threads may share one.

    Every call ends: an exchange within `timeout` seconds; what may be sent twice is, for up to `patience` seconds,
    where the service is away or asks to be left alone. Every call may raise ClientError. Without `url` the variables
    DL_URL and DL_TOKEN count. `context` is for a certificate authority of your own.
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
        if url is None:  # a token is for the address that it came with
            url, token = os.environ.get("DL_URL") or DEFAULT_URL, token or os.environ.get("DL_TOKEN")
        self._transport = Transport(url, token, timeout, context)
        self._patience = patience

    def __repr__(self) -> str:
        return f"Client({self._transport.url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The service's address."""
        return self._transport.url

    def close(self) -> None:
        """Close the kept connections."""
        self._transport.close()

    def trigger(
        self,
        task: str,
        *,
        queue: str = "etl.default",
        lock_key: str | None = None,
        args: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
        partition_key: str = "",
        priority: int | None = None,
        available_at: datetime | str | None = None,
        max_attempts: int | None = None,
        lease_ttl_sec: int | None = None,
        timeout_sec: int | None = None,
        producer: str | None = None,
        consumer_group: str | None = None,
        trace: str | None = None,
    ) -> Started:
        """Add a job, once, however often it had to be asked for: without an `idempotency_key` one is made.

        Jobs of one `lock_key` never run at the same time; by default that is the task's name. `trace` is a W3C
        traceparent, by default that of the OpenTelemetry span under way here. The fields and their bounds are the
        API's (docs/api.md).
        """
        body = _document(
            task=task,
            queue=queue,
            lock_key=lock_key or task,
            args=None if args is None else dict(args),
            idempotency_key=idempotency_key or _new_key(),
            partition_key=partition_key or None,
            priority=priority,
            available_at=available_at,
            max_attempts=max_attempts,
            lease_ttl_sec=lease_ttl_sec,
            timeout_sec=timeout_sec,
            producer=producer,
            consumer_group=consumer_group,
        )
        return read(Started, self._call("POST", "/jobs/trigger", body, headers=_traced(trace)).document)

    def trigger_many(self, jobs: Iterable[Mapping[str, Any]]) -> list[Started]:
        """Add jobs, documents with the fields of `trigger`; for each what became of it, in their order.

        They are sent by the thousand, and of each thousand all are added or none.
        """
        whole = [
            _document(
                **{"queue": "etl.default", **job, "lock_key": job.get("lock_key") or job.get("task")}
                | {"idempotency_key": job.get("idempotency_key") or _new_key()}
            )
            for job in jobs
        ]
        found: list[Started] = []
        for start in range(0, len(whole), BATCH):
            answer = self._call("POST", "/jobs/batch", {"jobs": whole[start : start + BATCH]}, headers=_traced())
            found += read_all(Started, answer.document, "jobs")
        return found

    def run(self, task: str, *, timeout: float | None = None, **fields: Any) -> Job:
        """Trigger a job, wait for it, and return its end; raises JobFailed when that is not `succeeded`."""
        job = self.wait(self.trigger(task, **fields).job_id, timeout)
        if job.status != "succeeded":
            raise JobFailed(job)
        return job

    def status(self, job_id: UUID | str) -> Job:
        """The job as it is now."""
        return read(Job, self._call("GET", f"{_of(job_id)}/status").document)

    def job(self, job_id: UUID | str) -> Job:
        """Everything of the job, its args with their secrets masked included."""
        return read(Job, self._call("GET", _of(job_id)).document)

    def wait(
        self,
        job_id: UUID | str,
        timeout: float | None = None,
        on_progress: Callable[[Job], object] | None = None,
        *,
        patience: float = OUTAGE_SEC,
    ) -> Job:
        """Wait until the job has ended, and return its end, whatever that is.

        `on_progress` is called with the job as it is seen first and whenever it has changed. Raises WaitTimeout after
        `timeout` seconds; the job goes on. A service that is away meanwhile is waited for, up to `patience` seconds.
        """
        return wait_for(self.watch(job_id), timeout, on_progress, patience=patience)

    def watch(self, job_id: UUID | str) -> Watch:
        """The job, to be looked at again and again."""

        def ask(seconds: int, headers: Mapping[str, str], patience: float) -> Answer:
            query = {"wait": seconds or None}
            path = f"{_of(job_id)}/status"
            return self._call("GET", path, query=query, headers=headers, extra=seconds, patience=patience)

        return Watch(ask)

    def cancel(self, job_id: UUID | str, *, force: bool = False) -> Job:
        """Cancel a queued job at once; ask a running one to stop, with `force` whether it comes to a safe point or not.

        A job that has ended stays as it is.
        """
        body = {"force": True} if force else {}
        return read(Job, self._call("POST", f"{_of(job_id)}/cancel", body).document)

    def jobs(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        status: str | None = None,
        lock_key: str | None = None,
        partition_key: str | None = None,
        producer: str | None = None,
        consumer_group: str | None = None,
        since: datetime | str | None = None,
        until: datetime | str | None = None,
        sort: str | None = None,
        limit: int | None = None,
    ) -> Iterator[Job]:
        """The jobs that meet all that is given, the newest change first, page by page as they are taken.

        `status` is one of a job's, or `scheduled`, `fresh`, `retries` or `dead`; `since` and `until` are of the last
        change; `sort` is `changed` or `key`; without `limit` there is no end but the last job.
        """
        query = _document(
            queue=queue,
            task=task,
            status=status,
            lock_key=lock_key,
            partition_key=partition_key,
            producer=producer,
            consumer_group=consumer_group,
            since=since,
            until=until,
            sort=sort,
        )
        left, after = inf if limit is None else limit, None
        while left > 0:
            page = {**query, "limit": int(min(PAGE, left)), "after": after}
            document = self._call("GET", "/jobs", query=page).document
            found = read_all(Job, document, "jobs")
            yield from found
            left, after = left - len(found), document.get("next")
            if after is None:
                return

    def events(
        self, job_id: UUID | str | None = None, *, after: int | None = None, queue: str | None = None, limit: int = PAGE
    ) -> list[Event]:
        """The journal, the oldest first: of one job, or of the farm or a queue.

        At most `limit` events, those that follow `after`; for a farm without `after` they are the newest.
        """
        path = "/events" if job_id is None else f"{_of(job_id)}/events"
        query = _document(after=after, limit=limit, queue=queue if job_id is None else None)
        return read_all(Event, self._call("GET", path, query=query).document, "events")

    def overview(self) -> Overview:
        """How the farm stands: in total and each queue."""
        return read(Overview, self._call("GET", "/stats").document)

    stats = overview

    def queues(self) -> list[Queue]:
        """Every queue that has jobs, a pause, a limit or a worker."""
        return read_all(Queue, self._call("GET", "/queues").document, "queues")

    def workers(self) -> list[Worker]:
        """The workers of all hosts that their keepers have shown in the last ten minutes."""
        return read_all(Worker, self._call("GET", "/workers").document, "workers")

    def database(self) -> Database:
        """The queue's database, and who holds back its vacuum."""
        return read(Database, self._call("GET", "/database").document)

    def pause(self, queue: str) -> Queue:
        """From now on nothing of the queue is started, on any host; what runs goes on."""
        return read(Queue, self._call("POST", _queue(queue, "pause")).document)

    def resume(self, queue: str) -> Queue:
        """End the queue's pause."""
        return read(Queue, self._call("POST", _queue(queue, "resume")).document)

    def limit(self, queue: str, max_length: int | None) -> Queue:
        """From now on refuse to trigger more jobs than that; None: no limit."""
        return read(Queue, self._call("PUT", _queue(queue, "limit"), {"max_length": max_length}).document)

    def requeue(self, job_id: UUID | str) -> Job:
        """Queue a job that has ended again, with a fresh budget of attempts; Conflict for one that has not."""
        return read(Job, self._once("POST", f"{_of(job_id)}/requeue").document)

    def run_now(self, job_id: UUID | str) -> Job:
        """Make a queued job due that waits for its time; Conflict for one that is not queued."""
        return read(Job, self._once("POST", f"{_of(job_id)}/run-now").document)

    def delete(self, job_id: UUID | str) -> None:
        """Delete a job and its journal; Conflict for one that runs."""
        self._once("DELETE", _of(job_id))

    def change(self, verb: str, job_ids: Sequence[UUID | str], *, force: bool = False) -> dict[UUID, str]:
        """`cancel`, `requeue`, `run-now` or `delete` many; of each `done`, `unknown` or the status that forbids it."""
        found: dict[UUID, str] = {}
        for start in range(0, len(job_ids), BATCH):
            body: dict[str, Any] = {"job_ids": [str(job_id) for job_id in job_ids[start : start + BATCH]]}
            answer = self._once("POST", f"/jobs/bulk/{verb}", body | ({"force": True} if force else {}))
            found |= {UUID(each["job_id"]): str(each["outcome"]) for each in answer.document["jobs"]}
        return found

    def requeue_dead(self, queue: str) -> int:
        """Queue failed and lost jobs of the queue again, some at once; their number, 0 when there are no more."""
        return self._changed(queue, "requeue-dead")

    def delete_dead(self, queue: str) -> int:
        """Delete failed and lost jobs of the queue, some at once; their number, 0 when there are no more."""
        return self._changed(queue, "delete-dead")

    def run_all(self, queue: str) -> int:
        """Make jobs of the queue due that wait for their time, some at once; their number, 0 when there are no more."""
        return self._changed(queue, "run-all")

    def _changed(self, queue: str, verb: str) -> int:
        return int(self._once("POST", _queue(queue, verb)).document["changed"])

    def _once(self, method: str, path: str, body: Any = None) -> Answer:
        """A request that means something else the second time."""
        given = {} if body is None and method == "POST" else body
        return self._transport.call(method, "/api/v1" + path, given, kept=False)

    def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        extra: float = 0,
        patience: float | None = None,
    ) -> Answer:
        """A request that may be sent again."""
        given = {} if body is None and method == "POST" else body
        retrying = Retrying(
            retry=retry_if_exception(_may_pass),
            wait=_pause,
            stop=stop_before_delay(self._patience if patience is None else patience),
            reraise=True,
        )
        return retrying(self._transport.call, method, "/api/v1" + path, given, query, headers, extra=extra)


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, QueueFull | Unavailable) and not getattr(error, "is_lasting", False)


def _pause(state: RetryCallState) -> float:
    """Growing and jittered, but no less than the service asks for."""
    error = state.outcome.exception() if state.outcome else None
    asked = getattr(error, "retry_after", None) or 0.0
    longest: float = min(5.0, 0.2 * 2 ** min(state.attempt_number, 10))
    return asked + random.uniform(0.05, longest)  # noqa: S311  jitter


def _document(**fields: Any) -> dict[str, Any]:
    """The fields that are given, as JSON has them."""
    return {name: _plain(name, value) for name, value in fields.items() if value is not None}


def _plain(name: str, value: Any) -> Any:
    if not isinstance(value, datetime):
        return value
    if value.utcoffset() is None:
        raise ValueError(f"{name} should be a datetime with a time zone")
    return value.isoformat()


def _of(job_id: UUID | str) -> str:
    return f"/jobs/{quote(str(job_id), safe='')}"


def _queue(queue: str, verb: str) -> str:
    if queue in (".", ".."):  # proxies take these out of a path
        return f"/queues/-/{verb}?name={queue}"
    return f"/queues/{quote(queue, safe='')}/{verb}"


def _new_key() -> str:
    return f"client-{uuid4()}"


def _traced(trace: str | None = None) -> dict[str, str] | None:
    traceparent = trace or traces.current()
    return {"traceparent": traceparent} if traceparent else None
