"""Backfills: jobs of one task for many partitions (docs/backfills.md). The reaper makes their jobs, some at once."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, Unpack

from pydantic import Field

from dataloader.model.kinds import Removed
from dataloader.model.plans import Backfill, BackfillPreview, BackfillRetried, Backfills, Partitions
from dataloader.ops.op import Call, Op, made, operations_on
from dataloader.ops.types import Text
from dataloader.queue.plans import backfills as of_backfills
from dataloader.queue.plans import new_backfill
from dataloader.queue.plans.new_backfill import BackfillName, BackfillWords, MaxRunning
from dataloader.queue.plans.partitions import MOST, STATUSES
from dataloader.queue.plans.words import Task

Name = Annotated[Text, Field(description="of the backfill")]
After = Annotated[int, Field(ge=0, le=MOST, description="`next` of the answer before")]
PartitionStatus: TypeAlias = Literal[STATUSES]  # type: ignore[valid-type]


_backfill = operations_on("backfill", "backfill", "history")


@_backfill("list", columns="name task state ended total dead eta_sec error")
def backfills(call: Call) -> Backfills:
    """List the newest backfills, up to 100: how far they are, what is wrong with them."""
    return made(Backfills, {"backfills": of_backfills.listed(call.conn, call.counts)})


@_backfill("show")
def backfill(call: Call, backfill: Name) -> Backfill:
    """Show a backfill: its progress, when it will be done, its partitions by status."""
    return made(Backfill, of_backfills.backfill(call.conn, backfill, call.counts))


@Op(
    "GET /backfills/{backfill}/partitions",
    command="backfill partitions BACKFILL",
    columns="partition status job_id",
    examples=("dataloader backfill partitions history --status failed",),
    errors=(404,),
)
def partitions(
    call: Call,
    backfill: Name,
    status: Annotated[PartitionStatus, Field(description="only these")] | None = None,
    limit: Annotated[int, Field(ge=1, le=1_000, description="partitions of a page")] = 1_000,
    after: After = 0,
) -> Partitions:
    """List the partitions of a backfill in their order, each with its job; `missing` ones have none."""
    rows = of_backfills.ledger_rows(call.conn, backfill, after, limit, status)
    following = rows[-1]["place"] if len(rows) == limit else None
    return made(Partitions, {"partitions": rows, "next": following})


@Op("POST /backfills", errors=(409,), repeatable=False)
def add_backfill(call: Call, name: BackfillName, task: Task, **words: Unpack[BackfillWords]) -> Backfill:
    """Add a backfill of a task. Its jobs are made after the answer, some hundred at once."""
    new = new_backfill.checked({"name": name, "task": task, **words})
    return made(Backfill, of_backfills.add(call.conn, new, call.by))


@Op("POST /backfills/dry-run", scope=("read",))
def try_backfill(call: Call, name: BackfillName, task: Task, **words: Unpack[BackfillWords]) -> BackfillPreview:
    """Show how a backfill would go: how many partitions, how many are done already, some of the jobs."""
    new = new_backfill.checked({"name": name, "task": task, **words})
    return made(BackfillPreview, of_backfills.preview(call.conn, new))


@_backfill(
    "set",
    done="up to {max_running:any number of} jobs of {backfill} run at once",
    examples=("dataloader backfill set history --max-running 8",),
)
def set_backfill(call: Call, backfill: Name, max_running: MaxRunning | None) -> Backfill:
    """Let so many jobs of a backfill run at once, from now on; those that run go on."""
    return made(Backfill, of_backfills.set_most(call.conn, backfill, max_running, call.by))


@_backfill("remove", done="{backfill} is removed; its jobs stay", errors=(409,), repeatable=False)
def remove_backfill(call: Call, backfill: Name) -> Removed:
    """Remove a backfill whose jobs have all ended, with its ledger; its jobs stay."""
    of_backfills.remove(call.conn, backfill, call.by)
    return Removed(name=backfill)


@_backfill(
    "pause",
    errors=(409,),
    done="{backfill} is paused; what runs goes on",
    question="Pause this backfill? It makes and starts no jobs until it is resumed.",
)
def pause_backfill(call: Call, backfill: Name) -> Backfill:
    """Make and start no jobs of a backfill until it is resumed; those that run go on."""
    return made(Backfill, of_backfills.pause(call.conn, backfill, call.by))


@_backfill("resume", errors=(409,), done="{backfill} goes on")
def resume_backfill(call: Call, backfill: Name) -> Backfill:
    """End a backfill's pause."""
    return made(Backfill, of_backfills.resume(call.conn, backfill, call.by))


@_backfill(
    "cancel",
    done="{backfill} is canceled; its jobs end within some seconds",
    question="Cancel this backfill? The jobs that have not ended are canceled.",
)
def cancel_backfill(call: Call, backfill: Name) -> Backfill:
    """Start no more jobs of a backfill; the reaper then cancels those that have not ended."""
    return made(Backfill, of_backfills.cancel(call.conn, backfill, call.by))


@_backfill(
    "retry",
    repeatable=False,
    done="{backfill}: {changed!j} queued again",
    question="Run {jobs} again, with a fresh budget of attempts?",
)
def retry_backfill(call: Call, backfill: Name, after: After = 0) -> BackfillRetried:
    """Queue the failed and lost jobs of a backfill again, each with a fresh budget of attempts."""
    changed, following = of_backfills.retry(call.conn, backfill, call.by, after)
    return made(BackfillRetried, {"changed": changed, "next": following})
