"""The args of new jobs, checked by the schemas of their tasks, as workers have told the queue."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from time import monotonic

from flask import current_app

from dataloader.api.web.json_body import pointer
from dataloader.api.web.problems import Fault, Problem
from dataloader.queue import args_schema, db, operations
from dataloader.queue.args_schema import Allowance, ArgFault
from dataloader.queue.enqueue import Columns, NewJob, are_known
from dataloader.queue.new_job import FAULTS_SHOWN

FRESH_SEC = 1.0  # a trigger asks the database for a task's schema once in this time
TASKS = 1_000  # that are known at once


class KnownSchemas:
    """The schemas of tasks, up to FRESH_SEC old. Threads share it."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, str | None]] = {}

    def of(self, conn: db.Connection, tasks: Collection[str]) -> dict[str, str]:
        """The schema of each of these tasks that has one."""
        now, known = monotonic(), self._known
        if unknown := [task for task in tasks if known.get(task, (0.0, None))[0] < now]:
            if len(known) + len(unknown) > TASKS:
                known = self._known = {}
            texts = operations.args_schemas(conn, unknown)
            known |= {task: (now + FRESH_SEC, texts.get(task)) for task in unknown}
        schemas = {task: known.get(task, (0.0, None))[1] for task in tasks}
        return {task: text for task, text in schemas.items() if text is not None}


def require(conn: db.Connection, new: NewJob) -> None:
    """Raise a 400 Problem that names each of the job's args that its task's schema refuses.

    A job whose idempotency key exists is not checked, because the existing job is the answer.
    """
    if (text := _schemas().of(conn, [new.task]).get(new.task)) is None:
        return
    faults = args_schema.faults(text, new.args)
    if faults and not are_known(conn, {new.idempotency_key}):
        raise problem(_as_faults(faults, ("args",)))


def require_all(conn: db.Connection, columns: Columns) -> None:
    """Check the jobs of a batch like `require`; one refused job refuses the whole batch."""
    if schemas := _schemas().of(conn, set(columns["task"])):
        wrong = list(_wrong(columns, schemas))
        if wrong and not are_known(conn, {key for key, _ in wrong}):
            raise problem([fault for _, faults in wrong for fault in faults])


def _wrong(columns: Columns, schemas: dict[str, str]) -> Iterator[tuple[str | None, list[Fault]]]:
    """The idempotency key and the faults of each job that a schema refuses, up to FAULTS_SHOWN jobs."""
    tasks, keys, allowance, shown = columns["task"], columns["idempotency_key"], Allowance(), 0
    for number, args in enumerate(columns["args"]):
        text = schemas.get(tasks[number % len(tasks)])
        if text is not None and (faults := allowance.faults(text, json.loads(args))):
            yield keys[number % len(keys)], _as_faults(faults, ("jobs", number, "args"))
            if (shown := shown + 1) == FAULTS_SHOWN:
                return


def _as_faults(faults: Iterable[ArgFault], path: tuple[str | int, ...]) -> list[Fault]:
    return [Fault(pointer((*path, *each.path)), each.code, str(each)) for each in faults]


def problem(faults: list[Fault]) -> Problem:
    """The 400 Problem of args with these faults."""
    detail = faults[0].message if len(faults) == 1 else f"{len(faults)} args are not valid, see errors"
    return Problem(400, detail, faults[:FAULTS_SHOWN])


def _schemas() -> KnownSchemas:
    known: KnownSchemas = current_app.extensions.setdefault("args_schemas", KnownSchemas())
    return known
