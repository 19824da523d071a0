"""Limits of the fleet: how many jobs of a limit may run at once and start in a minute, on all hosts together."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dataloader.model.kinds import Gone
from dataloader.model.queues import Limit, Limits
from dataloader.ops.errors import Unknown, known
from dataloader.ops.op import Call, Op, made, operations_on
from dataloader.ops.types import PRINTABLE, Whole
from dataloader.queue import new_job, operations
from dataloader.queue.reports import stats

LimitName = Annotated[new_job.LimitName, Field(description="of the limit", json_schema_extra={"pattern": PRINTABLE})]


_limit = operations_on("limit", "limit", "source:oracle")


@_limit("list", columns="name running most waiting per_minute burst tokens changed_at changed_by")
def limits(call: Call) -> Limits:
    """List the limits: what each allows, how many of its jobs run, and how many wait for it."""
    return made(Limits, {"limits": stats.limits(call.conn)})


@Op("GET /limits/{limit}", errors=(404,))
def get_limit(call: Call, limit: LimitName) -> Limit:
    """One limit."""
    return _one(call, limit)


@Op(
    "PUT /limits/{limit}",
    command="limit set LIMIT",
    done=lambda limit: f"the limit {limit.name} allows {allowed(limit)}",
    examples=("dataloader limit set source:oracle --most 3 --per-minute 60",),
)
def set_limit(
    call: Call,
    limit: LimitName,
    most: Annotated[Whole, Field(description="jobs that may run at once; null: any number")] | None = None,
    per_minute: Annotated[
        float, Field(ge=0.001, le=1_000_000, allow_inf_nan=False, description="jobs that may start in a minute")
    ]
    | None = None,
    burst: Annotated[
        int,
        Field(
            ge=1, le=1_000_000, description="so many of these may start at once after a pause; null: those of a second"
        ),
    ]
    | None = None,
) -> Limit:
    """Make a limit, or replace what it allows, on all hosts at once; jobs that run go on."""
    operations.set_limit(call.conn, limit, call.by, most, per_minute, burst)
    return _one(call, limit)


@_limit("remove", done="the limit {name} is removed: any number of its jobs may run")
def remove_limit(call: Call, limit: LimitName) -> Gone:
    """Remove a limit; its jobs keep its name, and any number of them may run."""
    if not operations.remove_limit(call.conn, limit, call.by):
        raise Unknown("limit")
    return Gone(name=limit)


def allowed(limit: Limit) -> str:
    """The bounds of a limit in words."""
    parts = [] if limit.most is None else [f"{limit.most} running job{'' if limit.most == 1 else 's'}"]
    if limit.per_minute is not None:
        parts.append(f"{limit.per_minute:g} starts a minute, {limit.burst} at once")
    return " and ".join(parts)


def _one(call: Call, name: str) -> Limit:
    return made(Limit, known(next(iter(stats.limits(call.conn, name)), None), "limit"))
