"""`Direct` is a `Farm` that calls the database of the queue, with the results and errors of the client."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import UUID

import psycopg
from pydantic import ValidationError
from tenacity import Retrying

from dataloader import log, ops
from dataloader.cli.screen import as_json
from dataloader.client import Forbidden, NotFound, Refused, Unavailable, Unexpected
from dataloader.client.errors import ClientError, from_answer
from dataloader.client.farm import Farm, Snapshot
from dataloader.client.wire import repetition, understood
from dataloader.config import ConfigError, Settings
from dataloader.farm.process import hostname
from dataloader.model.farm import Fault
from dataloader.model.jobs import Triggered
from dataloader.model.reading import written
from dataloader.ops.errors import MEANINGS, meaning
from dataloader.ops.op import Call
from dataloader.queue import again, args_schema, db, enqueue, hooks, migrations, operations

P = ParamSpec("P")
R = TypeVar("R")

STATEMENT_SEC = 30.0  # the timeout of a statement; a person may wait longer than a program
POLL_SEC = 0.3


class Direct(Farm):
    """A farm on its database. The session opens at the first call, and again after a loss."""

    def __init__(self, dsn: str, settings: Settings) -> None:
        self._dsn, self._settings, self.url = dsn, settings, db.shown(dsn)
        self._conn: db.Connection | None = None
        self._actor = f"{_user()}@{hostname()} (command line)"

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
            raise _invalid(e) from None
        named = {name: getattr(checked, name) for name in checked.model_fields_set}
        result = self._in_session(lambda conn: op.run(Call(conn, self._actor, self._settings), named))
        if op.name not in ops.UNMASKED:
            result = understood(answer, as_document(written(result)))  # masked, as over HTTP
        return getattr(result, field) if field else result

    def _add(self, route: str, fields: dict[str, Any], trace: str | None) -> Triggered:
        if route.endswith("/again"):
            return self._run_again(fields, trace)
        return _triggered(*self._in_session(enqueue.enqueue, self._new(fields, trace), limited=True))

    def _run_again(self, fields: dict[str, Any], trace: str | None) -> Triggered:
        old_id, changes, without = UUID(fields.pop("job_id")), fields.pop("args", {}), fields.pop("without", [])
        if (old := self._in_session(again.fields_of, old_id)) is None:
            raise NotFound("there is no job with this job_id", status=404)
        try:
            args = again.changed(old["args"], changes, without)
        except ValueError as e:
            raise Refused("The request is not valid", str(e)) from None
        new = self._new(old | fields | {"args": args}, trace)
        return _triggered(*self._in_session(again.add, old_id, new, self._actor))

    def _new(self, fields: dict[str, Any], trace: str | None) -> enqueue.NewJob:
        """A new job; raises Refused if the rules of the API, a hook or the schema of its task refuse it."""
        from dataloader.queue import new_job

        try:
            hooks.load(self._settings.hook_modules)
            valid = new_job.Trigger.model_validate(fields)
            if hooks.AROUND_ENQUEUE:
                valid = new_job.Trigger.model_validate(new_job.hooked(fields))
        except ValidationError as e:
            raise _invalid(e) from None
        except (ConfigError, ValueError) as e:  # of a hook
            raise Refused("The job was not added", str(e)) from None
        named = {name: getattr(valid, name) for name in valid.model_fields_set}
        new = enqueue.NewJob(**{"lease_ttl_sec": self._settings.dl_default_lease_ttl_sec, **named, "trace": trace})
        self._require_args(new)
        return new

    def _require_args(self, new: enqueue.NewJob) -> None:
        """Raise Refused for args that the task's schema refuses."""
        text = self._in_session(operations.args_schemas, [new.task]).get(new.task)
        if text is None or not (faults := args_schema.faults(text, new.args)):
            return
        if self._in_session(enqueue.are_known, {new.idempotency_key}):
            return  # the job is there already
        raise _with_faults("see below", ((("args", *each.path), each.code, str(each)) for each in faults))

    def _poll(self, job_id: UUID | str, etag: str | None, seconds: int, patience: float) -> Snapshot:
        return Snapshot(Retrying(**repetition(patience))(self.status, job_id), pause=POLL_SEC)

    def _in_session(self, function: Callable[Concatenate[db.Connection, P], R], *args: P.args, **fields: P.kwargs) -> R:
        """Call `function` on the session; raises an error of the client for each failure."""
        try:
            with db.in_force(conn := self._session()):
                return function(conn, *args, **fields)
        except migrations.SchemaError as e:
            raise Refused(str(e)) from None
        except tuple(MEANINGS) as e:
            raise _client_error(e) from None
        except ValueError as e:
            raise Refused("The request is not valid", str(e)) from None
        except psycopg.DataError as e:  # text that PostgreSQL cannot store
            raise Refused("The request is not valid", _message(e)) from None
        except psycopg.errors.InsufficientPrivilege as e:
            raise Forbidden("database", _message(e)) from None
        except psycopg.Error as e:
            self._discard_session()
            kind = Unavailable if db.is_passing(e) else Unexpected
            raise kind("database", _message(e)) from None

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

    def _discard_session(self) -> None:
        if self._conn:
            with suppress(psycopg.Error):
                self._conn.close()
        self._conn = None


def _triggered(job_id: UUID, status: Any) -> Triggered:
    return Triggered(job_id=job_id, status=status)


def _client_error(error: Exception) -> ClientError:
    """The exception of the client for an error of the queue; it is the same as over HTTP."""
    known = meaning(error)
    assert known  # noqa: S101  the caller catches only the errors of MEANINGS
    kind, title = known.kind
    return from_answer(known.status, "", {"type": kind, "title": title, "detail": str(error)}, None)


def _invalid(error: ValidationError) -> Refused:
    """The exception of the client for parameters that are not valid."""
    return _with_faults("", ((each["loc"], each["type"], each["msg"]) for each in error.errors()))


def _with_faults(detail: str, triples: Iterable[tuple[tuple[str | int, ...], str, str]]) -> Refused:
    """The exception for faults, each given as a path, a code and a message."""
    faults = [Fault(pointer="/".join(("", *map(str, path))), code=code, message=text) for path, code, text in triples]
    return Refused("The request is not valid", detail, faults=tuple(faults))


def as_document(row: Any) -> Any:
    """The row as the API writes it: masked, and with only the types of JSON."""
    return json.loads(as_json(log.masked(row), None))


def _message(error: psycopg.Error) -> str:
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return log.masked("; ".join(filter(None, lines)))


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user {os.getuid()}"
