"""New jobs by the rules of a trigger: the bounds of their fields, the hooks, and the schemas of their tasks.

An invalid job is a Problem that names each fault. Hooks run before a session is open.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from psycopg import errors

from dataloader.model.farm import Fault
from dataloader.ops.checks import BODY_LIMIT, pointer, refusal, validated
from dataloader.ops.errors import Problem, invalid
from dataloader.ops.op import Call
from dataloader.queue import hooks, new_job, operations
from dataloader.queue.args_schema import Allowance
from dataloader.queue.enqueue import Columns, NewJob, are_known, as_json
from dataloader.queue.new_job import FAULTS_SHOWN, Trigger
from dataloader.queue.parents import Parents, fault

BATCH_JOBS = 10_000
BATCH_LIMIT = 16 * 1024 * 1024  # bytes
BATCH_DEPTH = new_job.DEPTH_LIMIT + 2  # so each job may be nested as deep as a trigger's body
# W3C Trace Context: version, trace id, span id, flags; a later version may say more behind them.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?")


def one(call: Call, fields: dict[str, Any]) -> NewJob:
    """The job of these fields of a trigger; raises a Problem, and the errors of hooks."""
    if hooks.AROUND_ENQUEUE:
        validated(Trigger, new_job.keyed(fields))
        fields = _hooked(fields, ())
        if faults := new_job.WrongJobs([fields]).faults:
            raise refusal([each | {"loc": each["loc"][1:]} for each in faults], Trigger, "field")
        args = as_json(fields.get("args", {}))
        _require_small(args, "/args")
        fields = fields | {"args": json.loads(args)}  # as schemas and workers see them: JSON has no tuples
    trigger = validated(Trigger, fields)
    given = {name: getattr(trigger, name) for name in trigger.model_fields_set}
    _require_sound([given.get("depends_on")], 1, "/depends_on")
    new = NewJob(**{"lease_ttl_sec": call.settings.dl_default_lease_ttl_sec, **given, "trace": _trace(call)})
    _require_args(call, [new.task], [new.idempotency_key], [new.args])
    return new


def many(call: Call, jobs: list[Any]) -> Columns:
    """The jobs of a batch, each by the rules of a trigger; a Problem names the place of each wrong job."""
    if hooks.AROUND_ENQUEUE:
        _columns(call, [new_job.keyed(job) if isinstance(job, dict) else job for job in jobs])
        jobs = [_hooked(job, ("jobs", number)) for number, job in enumerate(jobs)]
    columns = _columns(call, jobs)
    if trace := _trace(call):
        columns["trace"] = [trace]
    _require_args(call, columns["task"], columns["idempotency_key"], columns["args"], is_batch=True)
    return columns


def warnings(call: Call, tasks: Sequence[str]) -> dict[str, str]:
    """A sentence for each of these tasks that no worker has shown and that has not run; at most FAULTS_SHOWN."""
    unknown = {}
    for task in sorted(set(tasks) - call.schemas(call.conn, set(tasks)).keys())[:FAULTS_SHOWN]:
        if (similar := operations.similar_tasks(call.conn, task)) is not None:
            meant = f": did you mean {' or '.join(map(repr, similar))}?" if similar and call.may_read else ""
            unknown[task] = f"no worker knows the task {task!r}, and no job of it has run{meant}"
    return unknown


def _columns(call: Call, jobs: list[Any]) -> Columns:
    try:
        columns = new_job.columns_of(jobs, call.settings.dl_default_lease_ttl_sec)
    except new_job.WrongJobs as e:
        raise refusal(e.faults, Trigger, "field", ("jobs",)) from None
    _require_sound(columns["depends_on"], len(columns["args"]), "/jobs")
    for number, args in enumerate(columns["args"]):
        _require_small(args, f"/jobs/{number}/args")
    return columns


def _require_small(args: str, place: str) -> None:
    if len(args) > BODY_LIMIT // 4 and len(args.encode()) > BODY_LIMIT:
        message = f"args should be at most {BODY_LIMIT} bytes of JSON"
        raise Problem(413, message, [Fault(pointer=place, code="too_large", message=message)])


def _require_sound(depends_on: Sequence[Parents | None], count: int, place: str) -> None:
    if wrong := fault(depends_on, count):
        raise invalid(place, "depends_on", wrong)


def _trace(call: Call) -> str | None:
    """The call's W3C traceparent where it is valid: an invalid one is ignored, not refused."""
    match = _TRACEPARENT.fullmatch(call.trace or "")
    return None if match is None or (match["more"] and match[0].startswith("00")) else match[0][:55]


def _require_args(
    call: Call,
    tasks: Sequence[str],
    keys: Sequence[str | None],
    all_args: Sequence[str | Mapping[str, Any]],
    *,
    is_batch: bool = False,
) -> None:
    """Refuse args that the schemas of their tasks refuse, of up to FAULTS_SHOWN jobs.

    Where the idempotency keys of the wrong jobs have jobs, these are the answer, whatever else the body says.
    """
    known, allowance, wrong = call.schemas(call.conn, set(tasks)), Allowance(), []
    schemas = {task: text for task, text in known.items() if text is not None}
    for number, args in enumerate(all_args) if schemas else ():
        text = schemas.get(tasks[number % len(tasks)])
        path = ("jobs", number, "args") if is_batch else ("args",)
        if text and (refused := allowance.faults(text, json.loads(args) if isinstance(args, str) else args)):
            at = [Fault(pointer=pointer((*path, *each.path)), code=each.code, message=str(each)) for each in refused]
            wrong.append((keys[number % len(keys)], at))
            if len(wrong) == FAULTS_SHOWN:
                break
    if wrong and not are_known(call.conn, {key for key, _ in wrong}):
        faults = [each for _, at in wrong for each in at]
        detail = faults[0].message if len(faults) == 1 else f"{len(faults)} args are not valid, see errors"
        raise Problem(400, detail, faults[:FAULTS_SHOWN])


def _hooked(job: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    try:
        return new_job.hooked(job)
    except ValueError as e:
        raise invalid(pointer(path), "refused", str(e)) from None
    except (errors.InsufficientPrivilege, errors.UndefinedTable) as e:  # of a session of the hook, and not of the farm
        raise RuntimeError(type(e).__name__).with_traceback(e.__traceback__) from None
