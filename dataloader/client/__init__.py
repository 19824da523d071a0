"""`Client`: a farm from Python, over HTTP. Start with docs/client.md.

Standard library and tenacity only: a program that triggers jobs needs neither flask nor a driver in its process.
Its modules:

    farm         `Farm`, the methods that a client and the command line share
    watch        a job watched until its end
    results      the answers as frozen values
    errors       the exceptions of a call
    transport    HTTP with a limit to every wait
"""

from __future__ import annotations

import os
import random
import ssl
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote
from uuid import UUID

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
from dataloader.client.farm import BATCH, PAGE, Farm, given, new_key
from dataloader.client.results import (
    Backfill,
    Database,
    Document,
    ErrorGroup,
    ErrorGroups,
    Event,
    Job,
    Key,
    Limit,
    Overview,
    Partition,
    Prediction,
    Queue,
    Result,
    Schedule,
    Started,
    Task,
    Webhook,
    Webhooks,
    Worker,
    read,
    read_all,
)
from dataloader.client.transport import Answer, Transport
from dataloader.client.watch import Watch
from dataloader.farm import traces

__all__ = [
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
    "Key",
    "Limit",
    "NotFound",
    "Overview",
    "Partition",
    "Prediction",
    "Queue",
    "QueueFull",
    "Refused",
    "Schedule",
    "Started",
    "Task",
    "Unauthorized",
    "Unavailable",
    "Unexpected",
    "WaitTimeout",
    "Webhook",
    "Webhooks",
    "Worker",
]

DEFAULT_URL = "http://127.0.0.1:8081"


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
        if url is None:  # DL_TOKEN belongs to DL_URL: no other address receives it
            url, token = os.environ.get("DL_URL") or DEFAULT_URL, token or os.environ.get("DL_TOKEN")
        self._transport = Transport(url, token, timeout, context)
        self._patience = patience

    def __repr__(self) -> str:
        return f"Client({self._transport.url!r})"

    @property
    def url(self) -> str:
        return self._transport.url

    def close(self) -> None:
        self._transport.close()

    def _add(self, fields: dict[str, Any], trace: str | None) -> Started:
        return read(Started, self._call("POST", "/jobs/trigger", _json(fields), headers=_traced(trace)).document)

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
        headers, found = _traced(traces.current()), list[Started]()
        last = {} if on_done is None else {"on_done": _whole(on_done)}
        for start in range(0, max(len(whole), len(last)), BATCH):
            answer = self._call("POST", "/jobs/batch", {"jobs": whole[start : start + BATCH], **last}, headers=headers)
            found += read_all(Started, answer.document, "jobs")
        return found

    def status(self, job_id: UUID | str) -> Job:
        return read(Job, self._call("GET", f"{_of(job_id)}/status").document)

    def job(self, job_id: UUID | str) -> Job:
        return read(Job, self._call("GET", _of(job_id)).document)

    def result(self, job_id: UUID | str) -> Any:
        return read(Result, self._call("GET", f"{_of(job_id)}/result").document).result

    def watch(self, job_id: UUID | str) -> Watch:
        def ask(seconds: int, headers: Mapping[str, str], patience: float) -> Answer:
            query = {"wait": seconds or None}
            path = f"{_of(job_id)}/status"
            return self._call("GET", path, query=query, headers=headers, extra=seconds, patience=patience)

        return Watch(ask)

    def cancel(self, job_id: UUID | str, *, force: bool = False) -> Job:
        body = {"force": True} if force else {}
        return read(Job, self._call("POST", f"{_of(job_id)}/cancel", body).document)

    def _page(self, filters: dict[str, Any], limit: int, after: str | None) -> tuple[list[Job], str | None]:
        document = self._call("GET", "/jobs", query={**_json(filters), "limit": limit, "after": after}).document
        return read_all(Job, document, "jobs"), document.get("next")

    def _keys(self, queue: str, limit: int, after: str | None) -> tuple[list[Key], str | None]:
        path, _, name = _queue(queue, "keys").partition("?name=")
        query = {"name": name or None, "limit": limit, "after": after}
        document = self._call("GET", path, query=query).document
        return read_all(Key, document, "keys"), document.get("next")

    def events(
        self, job_id: UUID | str | None = None, *, after: int | None = None, queue: str | None = None, limit: int = PAGE
    ) -> list[Event]:
        path = "/events" if job_id is None else f"{_of(job_id)}/events"
        query = {"after": after, "limit": limit, "queue": queue if job_id is None else None}
        return read_all(Event, self._call("GET", path, query=query).document, "events")

    def overview(self) -> Overview:
        return read(Overview, self._call("GET", "/stats").document)

    stats = overview

    def queues(self) -> list[Queue]:
        """Every queue that has jobs, a pause, a limit or a worker."""
        return read_all(Queue, self._call("GET", "/queues").document, "queues")

    def workers(self) -> list[Worker]:
        return read_all(Worker, self._call("GET", "/workers").document, "workers")

    def predict(self, job_id: UUID | str) -> Prediction:
        return read(Prediction, self._call("GET", f"{_of(job_id)}/prediction").document)

    def predict_queue(self, queue: str) -> Prediction:
        return read(Prediction, self._call("GET", _queue(queue, "prediction")).document)

    def tasks(self) -> list[Task]:
        return read_all(Task, self._call("GET", "/tasks").document, "tasks")

    def database(self) -> Database:
        return read(Database, self._call("GET", "/database").document)

    def pause(self, queue: str) -> Queue:
        return read(Queue, self._call("POST", _queue(queue, "pause")).document)

    def resume(self, queue: str) -> Queue:
        return read(Queue, self._call("POST", _queue(queue, "resume")).document)

    def limit(self, queue: str, max_length: int | None) -> Queue:
        return read(Queue, self._call("PUT", _queue(queue, "limit"), {"max_length": max_length}).document)

    def set_queue(self, queue: str, **changes: Any) -> Queue:
        return read(Queue, self._call("PUT", _queue(queue), changes).document)

    def schedules(self, *, count: int = 5) -> list[Schedule]:
        return read_all(Schedule, self._call("GET", "/schedules", query={"next": count}).document, "schedules")

    def schedule(self, name: str, *, count: int = 5) -> Schedule:
        return read(Schedule, self._call("GET", _schedule(name), query={"next": count}).document)

    def add_schedule(self, name: str, task: str, **words: Any) -> Schedule:
        return read(Schedule, self._once("POST", "/schedules", {"name": name, "task": task, **words}).document)

    def change_schedule(self, name: str, **words: Any) -> Schedule:
        return read(Schedule, self._call("PUT", _schedule(name), words).document)

    def remove_schedule(self, name: str) -> None:
        self._once("DELETE", _schedule(name))

    def pause_schedule(self, name: str) -> Schedule:
        return read(Schedule, self._call("POST", f"{_schedule(name)}/pause").document)

    def resume_schedule(self, name: str) -> Schedule:
        return read(Schedule, self._call("POST", f"{_schedule(name)}/resume").document)

    def run_schedule(self, name: str) -> Started:
        return read(Started, self._once("POST", f"{_schedule(name)}/run").document)

    def backfills(self) -> list[Backfill]:
        return read_all(Backfill, self._call("GET", "/backfills").document, "backfills")

    def backfill(self, name: str) -> Backfill:
        return read(Backfill, self._call("GET", _backfill(name)).document)

    def add_backfill(self, name: str, task: str, **words: Any) -> Backfill:
        return read(Backfill, self._once("POST", "/backfills", {"name": name, "task": task, **words}).document)

    def try_backfill(self, name: str, task: str, **words: Any) -> Document:
        found: Document = self._call("POST", "/backfills/dry-run", {"name": name, "task": task, **words}).document
        return found

    def set_backfill(self, name: str, max_running: int | None) -> Backfill:
        return read(Backfill, self._call("PUT", _backfill(name), {"max_running": max_running}).document)

    def pause_backfill(self, name: str) -> Backfill:
        return read(Backfill, self._call("POST", f"{_backfill(name)}/pause").document)

    def resume_backfill(self, name: str) -> Backfill:
        return read(Backfill, self._call("POST", f"{_backfill(name)}/resume").document)

    def cancel_backfill(self, name: str) -> Backfill:
        return read(Backfill, self._call("POST", f"{_backfill(name)}/cancel").document)

    def _retry_some(self, name: str, after: int) -> tuple[int, int | None]:
        document = self._once("POST", f"{_backfill(name)}/retry", {"after": after}).document
        return int(document["changed"]), document["next"]

    def remove_backfill(self, name: str) -> None:
        self._once("DELETE", _backfill(name))

    def _partitions(self, name: str, after: int, status: str | None) -> tuple[list[Partition], int | None]:
        query = {"after": after, "status": status}
        document = self._call("GET", f"{_backfill(name)}/partitions", query=query).document
        return read_all(Partition, document, "partitions"), document["next"]

    def errors(
        self, *, queue: str | None = None, task: str | None = None, since: datetime | str | None = None
    ) -> ErrorGroups:
        query = _json(given(queue=queue, task=task, since=since))
        return read(ErrorGroups, self._call("GET", "/errors", query=query).document)

    def write_error_note(self, task: str, error_group: str, note: str) -> None:
        self._call("PUT", "/errors/note", {"task": task, "error_group": error_group, "note": note})

    def limits(self) -> list[Limit]:
        return read_all(Limit, self._call("GET", "/limits").document, "limits")

    def set_limit(
        self, name: str, *, most: int | None = None, per_minute: float | None = None, burst: int | None = None
    ) -> Limit:
        body = {"most": most, "per_minute": per_minute, "burst": burst}
        return read(Limit, self._call("PUT", _limit(name), body).document)

    def remove_limit(self, name: str) -> None:
        self._call("DELETE", _limit(name))

    def requeue(self, job_id: UUID | str) -> Job:
        """Queue a job that has ended again, with a fresh budget of attempts; Conflict for one that has not."""
        return read(Job, self._once("POST", f"{_of(job_id)}/requeue").document)

    def run_now(self, job_id: UUID | str) -> Job:
        """Make a queued job due that waits for its time; Conflict for one that is not queued."""
        return read(Job, self._once("POST", f"{_of(job_id)}/run-now").document)

    def delete(self, job_id: UUID | str) -> None:
        """Delete a job and its journal; Conflict for one that runs."""
        self._once("DELETE", _of(job_id))

    def _change(self, verb: str, job_ids: Sequence[UUID | str], force: bool) -> dict[UUID, str]:
        body = given(job_ids=[str(job_id) for job_id in job_ids], force=force or None)
        answer = self._once("POST", f"/jobs/bulk/{verb}", body)
        return {UUID(each["job_id"]): str(each["outcome"]) for each in answer.document["jobs"]}

    def _change_some(self, verb: str, queue: str, only: Mapping[str, str], after: str | None) -> tuple[int, str | None]:
        document = self._once("POST", _queue(queue, verb), given(**only, after=after or None)).document
        changed = int(document["changed"])
        return changed, document.get("next", "" if changed else None)  # an older service names no place to go on at

    def _move_some(self, queue: str, to: str) -> tuple[int, bool]:
        document = self._call("POST", _queue(queue, "move"), {"to": to}).document
        return int(document["moved"]), bool(document["is_done"])

    def webhooks(self) -> Webhooks:
        return read(Webhooks, self._call("GET", "/webhooks").document)

    def put_webhook(self, name: str, url: str, **fields: Any) -> Webhook:
        return read(Webhook, self._call("PUT", _webhook(name), {"url": url, **_json(fields)}).document)

    def remove_webhook(self, name: str) -> None:
        self._once("DELETE", _webhook(name))

    def pause_webhook(self, name: str) -> Webhook:
        return read(Webhook, self._call("POST", _webhook(name, "/pause")).document)

    def resume_webhook(self, name: str) -> Webhook:
        return read(Webhook, self._call("POST", _webhook(name, "/resume")).document)

    def test_webhook(self, name: str) -> UUID:
        return UUID(self._once("POST", _webhook(name, "/test")).document["job_id"])

    def _once(self, method: str, path: str, body: Any = None) -> Answer:
        """A request that must not be sent twice."""
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
        """Send a request, and repeat it while the service is away."""
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
    """The seconds until the next try: growing, jittered, at least Retry-After."""
    error = state.outcome.exception() if state.outcome else None
    asked = getattr(error, "retry_after", None) or 0.0
    longest: float = min(5.0, 0.2 * 2 ** min(state.attempt_number, 10))
    return asked + random.uniform(0.05, longest)  # noqa: S311  jitter


def _whole(job: Mapping[str, Any]) -> dict[str, Any]:
    """A job's document with the fields that `trigger` fills in."""
    return _json(
        {"queue": "etl.default", **job, "lock_key": job.get("lock_key") or job.get("task")}
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


def _schedule(name: str) -> str:
    return f"/schedules/{quote(name, safe='')}"


def _backfill(name: str) -> str:
    return f"/backfills/{quote(name, safe='')}"


def _limit(name: str) -> str:
    return f"/limits/{quote(name, safe='')}"


def _queue(queue: str, verb: str = "") -> str:
    rest = f"/{verb}" if verb else ""
    is_ambiguous = "/" in queue and not verb  # such as `a/move`
    if queue in (".", "..") or is_ambiguous:  # proxies remove these names from a path
        return f"/queues/-{rest}?name={quote(queue, safe='')}"
    return f"/queues/{quote(queue, safe='')}{rest}"


def _webhook(name: str, verb: str = "") -> str:
    return f"/webhooks/{quote(name, safe='')}{verb}"


def _traced(trace: str | None) -> dict[str, str] | None:
    return {"traceparent": trace} if trace else None
