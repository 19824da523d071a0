"""`Direct`: a `Farm` on the queue's database, with the client's results and errors."""

from __future__ import annotations

import json
import os
import pwd
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import UUID

import psycopg
from pydantic import ValidationError

from dataloader import log, obs, ops
from dataloader.cli.screen import as_json
from dataloader.client import (
    Backfill,
    Conflict,
    Database,
    ErrorGroups,
    Event,
    Fault,
    Forbidden,
    Job,
    LogLine,
    Names,
    NotFound,
    Partition,
    Preview,
    Refused,
    Runs,
    Schedule,
    Started,
    Tally,
    Task,
    Unavailable,
    Unexpected,
    Webhook,
    Webhooks,
    Worker,
)
from dataloader.client.errors import ClientError, of_answer
from dataloader.client.farm import LINES, PAGE, Farm
from dataloader.client.operations import given
from dataloader.client.results import Document, Result, read
from dataloader.client.watch import Watched
from dataloader.config import ConfigError, Settings
from dataloader.farm.process import hostname
from dataloader.model import reading
from dataloader.ops.errors import MEANINGS, meaning
from dataloader.ops.op import Call, document
from dataloader.queue import again, args_schema, db, enqueue, hooks, lifecycle, logs, migrations, operations
from dataloader.queue.plans import backfills, schedules
from dataloader.queue.reports import bulk, errors, runs, stats, tallies, webhooks
from dataloader.queue.reports.messages import Rules

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

STATEMENT_SEC = 30.0  # a person may wait longer than a program
POLL_SEC = 0.3
NO_JOB = "there is no job with this job_id"
NO_TASK = "no worker has shown a pipeline of this task"
NO_SCHEDULE = "there is no schedule with this name"
NO_BACKFILL = "there is no backfill with this name"
NO_WEBHOOK = "there is no webhook of this name"
LEDGER_PAGE = 1_000
TIMES = ("since", "until")
VERBS: dict[str, Callable[..., dict[UUID, str]]] = {
    "cancel": operations.cancel,
    "requeue": operations.requeue,
    "start-over": operations.start_over,
    "run-now": operations.run_now,
    "delete": operations.delete,
}

GROUP_VERBS: dict[str, Callable[..., operations.Changed]] = {
    "requeue-dead": operations.requeue_dead,
    "delete-dead": operations.delete_dead,
    "run-all": operations.run_all,
    "kill-retries": operations.kill_retries,
}


class Direct(Farm):
    """A farm on its database. The session opens at the first call, and again after it was lost."""

    def __init__(self, dsn: str, settings: Settings) -> None:
        self._dsn, self._settings = dsn, settings
        self._conn: db.Connection | None = None
        self._by = f"{_user()}@{hostname()} (command line)"

    @property
    def url(self) -> str:
        return db.shown(self._dsn)

    def close(self) -> None:
        if self._conn:
            self._conn.close()

    def _call(
        self, route: str, answer: type[Any], given: dict[str, Any], field: str = "", *, once: bool = False
    ) -> Any:
        op = next(op for op in ops.load().values() if op.route == route)
        try:
            checked = op.input.model_validate(given)
        except ValidationError as e:
            raise _refused(e) from None
        named = {name: getattr(checked, name) for name in checked.model_fields_set}
        row = document(self._ask(lambda conn: op.run(Call(conn, self._by, self._settings), named)))
        found = reading.read(answer, as_document(row))  # masked, as over HTTP
        return getattr(found, field) if field else found

    def _add(self, fields: dict[str, Any], trace: str | None) -> Started:
        new = self._new(fields, trace)
        self._require_args(new)
        job_id, status = self._ask(enqueue.enqueue, new, limited=True)
        return Started(job_id, status, {"job_id": str(job_id), "status": status})

    def _new(self, fields: dict[str, Any], trace: str | None) -> enqueue.NewJob:
        try:
            hooks.load(self._settings.hook_modules)
        except ConfigError as e:
            raise Refused("The job was not added", str(e)) from None
        return _checked(fields, self._settings.dl_default_lease_ttl_sec, trace)

    def _run_again(self, job_id: UUID | str, fields: dict[str, Any]) -> Started:
        old_id, changes, without = UUID(str(job_id)), fields.pop("args", {}), fields.pop("without", [])
        try:
            old = _known(self._ask(again.fields_of, old_id), NO_JOB)
        except again.NotEnded as e:
            raise Conflict("The job was not run again", str(e), status=409) from None
        try:
            args = again.changed(old["args"], changes, without)
        except ValueError as e:
            raise Refused("The request is not valid", str(e)) from None
        new = self._new(old | fields | {"args": args}, obs.current())
        self._require_args(new)
        new_id, status = self._ask(again.add, old_id, new, self._by)
        return Started(new_id, status, {"job_id": str(new_id), "status": status})

    def args_schema(self, task: str) -> Document | None:
        known = self._ask(operations.args_schemas, [task])
        if task not in known:
            raise NotFound(NO_TASK, status=404)
        text = known[task]
        with suppress(args_schema.UnusableSchema):  # as the API answers then
            return None if text is None else args_schema.read(text)
        return None

    def _require_args(self, new: enqueue.NewJob) -> None:
        """Raise Refused for args that the task's schema refuses."""
        text = self._ask(operations.args_schemas, [new.task]).get(new.task)
        if text is None or not (wrong := args_schema.faults(text, new.args)):
            return
        if self._ask(enqueue.are_known, {new.idempotency_key}):
            return  # the job is there already
        faults = [Fault(_pointer("args", *each.path), each.code, str(each)) for each in wrong]
        raise Refused("The request is not valid", "see below", faults=tuple(faults))

    def status(self, job_id: UUID | str) -> Job:
        return _one(Job, self._ask(lifecycle.status, UUID(str(job_id))))

    def job(self, job_id: UUID | str) -> Job:
        return _one(Job, self._ask(stats.job, UUID(str(job_id))))

    def result(self, job_id: UUID | str) -> Any:
        return _one(Result, self._ask(stats.result, UUID(str(job_id)))).result

    def watch(self, job_id: UUID | str) -> Watched:
        return _Watch(self, job_id)

    def cancel(self, job_id: UUID | str, *, force: bool = False) -> Job:
        return _one(Job, self._ask(lifecycle.request_cancel, UUID(str(job_id)), force, by=self._by))

    def _page(self, filters: dict[str, Any], limit: int, after: str | None) -> tuple[list[Job], str | None]:
        page = self._ask(stats.jobs, stats.Wanted(**filters), limit, after)
        return [_one(Job, row) for row in page.jobs], page.next

    def tally(self, /, **filters: Any) -> Tally:
        return _one(Tally, self._ask(tallies.tally, _wanted(filters)).document())

    def suggest(self, q: str) -> list[str]:
        return self._ask(tallies.suggest, q)

    def preview(self, /, order: str, *, job_ids: Sequence[UUID | str] | None = None, **filters: Any) -> Preview:
        target = _target({"job_ids": job_ids} if job_ids is not None else {"matching": filters})
        found = _one(Preview, self._ask(bulk.preview, order, target).document())
        named = {"matching": filters} if job_ids is None else {"job_ids": list(job_ids)}
        return replace(found, target=named)

    def _order_some(self, preview: Preview, after: str | None) -> tuple[int, str | None]:
        try:
            step = self._ask(bulk.change, preview.order, _target(preview.target), preview.confirmation, self._by, after)
        except bulk.Grown as e:
            raise Conflict("The jobs were not changed", str(e)) from None
        return step.changed, step.next

    def events(
        self, job_id: UUID | str | None = None, *, after: int | None = None, queue: str | None = None, limit: int = PAGE
    ) -> list[Event]:
        if job_id is None:
            rows = self._ask(stats.latest_events, after, limit, queue)
        else:
            rows = self._ask(stats.events, UUID(str(job_id)), after or 0, limit)
            if not rows:
                self.status(job_id)  # raises NotFound for an unknown job
        return [_one(Event, row) for row in rows]

    def logs(
        self, job_id: UUID | str, *, after: str | None = None, attempt: int | None = None, limit: int = LINES
    ) -> list[LogLine]:
        page = self._ask(logs.page, UUID(str(job_id)), after, attempt, limit)
        if not page.lines:
            self.status(job_id)  # raises NotFound for an unknown job
        return [_one(LogLine, row) for row in page.lines]

    def workers(self) -> list[Worker]:
        return [_one(Worker, row) for row in self._ask(stats.workers)]

    def tasks(self, *, range: str | None = None) -> list[Task]:
        return [_one(Task, row) for row in (self._ask(runs.of_tasks, range) if range else self._ask(stats.tasks))]

    def task_runs(self, task: str, *, range: str = runs.USUAL) -> Runs:
        return _one(Runs, self._ask(runs.of_task, task, range))

    def names(self, *, queue: str | None = None, task: str | None = None) -> Names:
        return _one(Names, self._ask(operations.names, queue, task))

    def database(self) -> Database:
        return _one(Database, self._ask(stats.postgres))

    def schedules(self, *, count: int = 5) -> list[Schedule]:
        return [_one(Schedule, row) for row in self._ask(schedules.listed, count)]

    def schedule(self, name: str, *, count: int = 5) -> Schedule:
        return _scheduled(self._ask(schedules.schedule, name, count))

    def add_schedule(self, name: str, task: str, **words: Any) -> Schedule:
        from dataloader.queue.plans import new_schedule  # pydantic takes its time

        try:
            new = new_schedule.checked({"name": name, "task": task, **words}, self._settings.people_zone)
            return _scheduled(self._ask(schedules.add, new, self._by))
        except schedules.Taken as e:
            raise Conflict("The schedule was not added", str(e)) from None
        except ValueError as e:
            raise Refused("The request is not valid", str(e)) from None

    def change_schedule(self, name: str, **words: Any) -> Schedule:
        return _scheduled(self._ask(schedules.change, name, words, self._settings.people_zone, self._by))

    def remove_schedule(self, name: str) -> None:
        _known(self._ask(schedules.remove, name), NO_SCHEDULE)

    def pause_schedule(self, name: str) -> Schedule:
        return _scheduled(self._ask(schedules.pause, name, self._by))

    def resume_schedule(self, name: str) -> Schedule:
        return _scheduled(self._ask(schedules.resume, name))

    def run_schedule(self, name: str) -> Started:
        lease_ttl_sec = self._settings.dl_default_lease_ttl_sec
        job_id, status = _known(self._ask(schedules.run, name, self._by, lease_ttl_sec), NO_SCHEDULE)
        return Started(job_id, status, {"job_id": str(job_id), "status": status})

    def backfills(self) -> list[Backfill]:
        return [_one(Backfill, row) for row in self._ask(backfills.listed)]

    def backfill(self, name: str) -> Backfill:
        return _backfilled(self._ask(backfills.backfill, name))

    def add_backfill(self, name: str, task: str, **words: Any) -> Backfill:
        new = _new_backfill({"name": name, "task": task, **words})
        try:
            return _backfilled(self._ask(backfills.add, new, self._by))
        except backfills.Taken as e:
            raise Conflict("The backfill was not added", str(e)) from None

    def try_backfill(self, name: str, task: str, **words: Any) -> Document:
        new = _new_backfill({"name": name, "task": task, **words})
        found: Document = as_document(self._ask(backfills.preview, new))
        return found

    def set_backfill(self, name: str, max_running: int | None) -> Backfill:
        return _backfilled(self._ask(backfills.set_most, name, max_running, self._by))

    def pause_backfill(self, name: str) -> Backfill:
        return _backfilled(self._now(backfills.pause, name))

    def resume_backfill(self, name: str) -> Backfill:
        return _backfilled(self._now(backfills.resume, name))

    def cancel_backfill(self, name: str) -> Backfill:
        return _backfilled(self._now(backfills.cancel, name))

    def _retry_some(self, name: str, after: int) -> tuple[int, int | None]:
        _known(self._ask(backfills.known, name), NO_BACKFILL)
        changed, following = self._ask(backfills.retry, name, self._by, after)
        return changed, None if following is None else int(following)

    def remove_backfill(self, name: str) -> None:
        _known(self._now(backfills.remove, name), NO_BACKFILL)

    def _partitions(self, name: str, after: int, status: str | None) -> tuple[list[Partition], int | None]:
        _known(self._ask(backfills.known, name), NO_BACKFILL)
        rows = self._ask(backfills.of_ledger, name, after, LEDGER_PAGE, status)
        return [_one(Partition, row) for row in rows], rows[-1]["place"] if len(rows) == LEDGER_PAGE else None

    def _now(self, change: Callable[[db.Connection, str, str], T], name: str) -> T:
        try:
            return self._ask(change, name, self._by)
        except backfills.NotNow as e:
            raise Conflict("The backfill was not changed", str(e)) from None

    def errors(
        self, *, queue: str | None = None, task: str | None = None, since: datetime | str | None = None
    ) -> ErrorGroups:
        at = datetime.fromisoformat(since).astimezone() if isinstance(since, str) else since
        found = self._ask(errors.groups, queue, task, at)
        return _one(ErrorGroups, {"groups": found.groups, "is_cut": found.is_cut})

    def write_error_note(self, task: str, error_group: str, note: str) -> None:
        self._ask(errors.write_note, task, error_group, note, self._by)

    def _change(self, verb: str, job_ids: Sequence[UUID | str], force: bool) -> dict[UUID, str]:
        ids = [UUID(str(job_id)) for job_id in job_ids]
        return self._ask(VERBS[verb], ids, self._by, **({"force": True} if force else {}))

    def _change_some(self, verb: str, queue: str, only: Mapping[str, str], after: str | None) -> tuple[int, str | None]:
        return self._ask(GROUP_VERBS[verb], queue, self._by, only=operations.Filter(**only), after=after)

    def webhooks(self) -> Webhooks:
        queue = self._settings.dl_alerts_queue
        found = {"queue": queue, "is_served": self._ask(webhooks.is_served, queue)}
        return _one(Webhooks, found | {"webhooks": self._ask(webhooks.listed)})

    def put_webhook(self, name: str, url: str, **fields: Any) -> Webhook:
        return _one(Webhook, self._ask(webhooks.put, webhooks.Wanted(name, url, **fields), self._by))

    def remove_webhook(self, name: str) -> None:
        if not self._ask(webhooks.remove, name):
            _known(None, NO_WEBHOOK)

    def pause_webhook(self, name: str) -> Webhook:
        return _one(Webhook, _known(self._ask(webhooks.pause, name, self._by), NO_WEBHOOK))

    def resume_webhook(self, name: str) -> Webhook:
        return _one(Webhook, _known(self._ask(webhooks.resume, name), NO_WEBHOOK))

    def test_webhook(self, name: str) -> UUID:
        return _known(self._ask(webhooks.send_test, name, Rules.of(self._settings)), NO_WEBHOOK)

    def _ask(self, question: Callable[Concatenate[db.Connection, P], R], *args: P.args, **fields: P.kwargs) -> R:
        """Call `question` on the session; each failure becomes one of the client's errors."""
        try:
            with db.in_force(conn := self._session()):
                return question(conn, *args, **fields)
        except migrations.SchemaError as e:
            raise Refused(str(e)) from None
        except tuple(MEANINGS) as e:
            raise _in_words(e) from None
        except ValueError as e:
            raise Refused("The request is not valid", str(e)) from None
        except psycopg.DataError as e:  # text that PostgreSQL cannot store
            raise Refused("The request is not valid", _words(e)) from None
        except psycopg.errors.InsufficientPrivilege as e:
            raise Forbidden("database", _words(e)) from None
        except psycopg.Error as e:
            self._forget()
            kind = Unavailable if db.is_passing(e) else Unexpected
            raise kind("database", _words(e)) from None

    def _session(self) -> db.Connection:
        if self._conn is None:
            schema = self._settings.pg_schema_queue
            self._conn = db.connect(
                self._dsn,
                name="dl-cli",
                schema=schema,
                connect_timeout=self._settings.pg_connect_timeout,
                statement_timeout=STATEMENT_SEC,
                answer_within=2 * STATEMENT_SEC,
            )
            with db.in_force(self._conn):
                migrations.check(self._conn)
        return self._conn

    def _forget(self) -> None:
        if self._conn:
            with suppress(psycopg.Error):
                self._conn.close()
        self._conn = None


class _Watch:
    """One job, read every POLL_SEC."""

    pause = POLL_SEC

    def __init__(self, farm: Direct, job_id: UUID | str) -> None:
        self._farm, self._job_id = farm, job_id

    def look(self, within: float, patience: float) -> Job:
        until = time.monotonic() + patience
        while True:
            try:
                return self._farm.status(self._job_id)
            except Unavailable:
                if time.monotonic() + 1 > until:
                    raise
                time.sleep(1)


def _in_words(error: Exception) -> ClientError:
    """The client's exception for an error of the queue, as the API would answer it."""
    means = meaning(error)
    assert means  # noqa: S101  it is an error of the table
    kind, title = means.kind
    return of_answer(means.status, "", {"type": kind, "title": title, "detail": str(error)}, None)


def _refused(error: ValidationError) -> Refused:
    """The client's exception for parameters that are not valid."""
    faults = [Fault("/" + "/".join(map(str, each["loc"])), each["type"], each["msg"]) for each in error.errors()]
    return Refused("The request is not valid", faults=tuple(faults))


def as_document(row: Any) -> Any:
    """A row as the API would write it: masked, and with JSON's types alone."""
    return json.loads(as_json(log.masked(row), None))


def _checked(fields: dict[str, Any], lease_ttl_sec: int, trace: str | None) -> enqueue.NewJob:
    """A new job, valid by the API's rules; raises Refused."""
    from dataloader.queue import new_job  # pydantic takes its time

    try:
        valid = new_job.Trigger.model_validate(fields)
        if hooks.AROUND_ENQUEUE:
            valid = new_job.Trigger.model_validate(new_job.hooked(fields))
    except ValidationError as e:
        faults = [Fault("/" + "/".join(map(str, each["loc"])), each["type"], each["msg"]) for each in e.errors()]
        raise Refused("The request is not valid", "see below", faults=tuple(faults)) from None
    except ValueError as e:  # of a hook
        raise Refused("The request is not valid", str(e)) from None
    named = {name: getattr(valid, name) for name in valid.model_fields_set}
    return enqueue.NewJob(**{"lease_ttl_sec": lease_ttl_sec, **named, "trace": trace})


def _pointer(*path: str | int) -> str:
    return "".join(f"/{step}" for step in path)


def _words(error: psycopg.Error) -> str:
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return log.masked("; ".join(filter(None, lines)))


def _one(kind: type[T], row: Any) -> T:
    if row is None:
        raise NotFound(NO_JOB, status=404)
    return read(kind, as_document(row))


def _wanted(filters: Mapping[str, Any]) -> stats.Wanted:
    times = {name: datetime.fromisoformat(at) for name, at in filters.items() if name in TIMES and isinstance(at, str)}
    return stats.Wanted(**{**filters, **times})


def _target(named: Mapping[str, Any]) -> bulk.Target:
    """The jobs that a preview names."""
    if "job_ids" in named:
        return bulk.Target(stats.Wanted(), tuple(dict.fromkeys(UUID(str(job_id)) for job_id in named["job_ids"])))
    if not given(**named["matching"]):
        raise Refused("The request is not valid", "an order needs a filter, such as status or q")
    return bulk.Target(_wanted(named["matching"]))


def _scheduled(row: Any) -> Schedule:
    return _one(Schedule, _known(row, NO_SCHEDULE))


def _known(found: T | None, otherwise: str) -> T:
    """The value `found`; raises NotFound with the text `otherwise` where it is None."""
    if found is None:
        raise NotFound(otherwise, status=404)
    return found


def _new_backfill(fields: dict[str, Any]) -> dict[str, Any]:
    from dataloader.queue.plans import new_backfill  # pydantic takes its time

    try:
        return new_backfill.checked(fields)
    except ValueError as e:
        raise Refused("The request is not valid", str(e)) from None


def _backfilled(row: Any) -> Backfill:
    return _one(Backfill, _known(row, NO_BACKFILL))


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user {os.getuid()}"
