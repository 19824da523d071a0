"""Queues: their figures and keys; pause, resume and limit them, set their order, change many of their jobs.

A change holds on all hosts at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypedDict, Unpack

from pydantic import Field

from dataloader.model.jobs import QueuePrediction
from dataloader.model.queues import Changed, Keys, Moved, Overview, Queues, QueueState
from dataloader.model.runs import QueueRuns
from dataloader.ops.op import Call, Op, made
from dataloader.ops.types import Cursor, NewQueueName, PageSize, QueueName, RangeName, Text, Whole
from dataloader.queue import operations
from dataloader.queue.reports import keys as keys_of
from dataloader.queue.reports import predictions, runs, stats

AT_ONCE = 1_000  # jobs that one call changes
PerKey = Annotated[int, Field(ge=1, le=1_000, description="the most jobs of a key in one delivery")]
PerCall = Annotated[int, Field(ge=1, le=1_000, description="the most keys in one call; null: as the pipeline says")]


class Order(TypedDict, total=False):
    """The order of a queue's jobs (docs/ordered.md)."""

    ordered: Annotated[bool, Field(description="the jobs of a key start in the order of their scores")]
    merge: Annotated[bool, Field(description="one delivery takes all queued jobs of a key; needs `ordered`")]
    merge_limit: PerKey
    batch: PerCall | None
    on_dead: Annotated[Literal["continue", "hold"], Field(description="hold: a dead job stops its key")]
    fair_by: Annotated[
        Literal["partition_key", "producer"] | None,
        Field(description="jobs of different values start in turns; null: in their order"),
    ]


class Queued(TypedDict, total=False):
    """Which jobs of a queue a change is for. Filters that are given must all hold."""

    task: Annotated[Text, Field(description="of the queue's jobs only those of this task")] | None
    lock_key: Annotated[Text, Field(description="of the queue's jobs only those with this key")] | None
    partition_key: Annotated[Text, Field(description="of the queue's jobs only those of this partition")] | None


class Tried(Queued, total=False):
    """The same for jobs that have run: dead ones, and retries."""

    error: Annotated[Text, Field(description="only those whose error contains this text; no pattern")] | None
    error_group: Annotated[Text, Field(description="only those of this group of errors")] | None


def order_of(queue: QueueState) -> str:
    """The order of a queue's jobs in words."""
    if not (queue.ordered or queue.fair_by):
        return f"{queue.queue} is a plain queue: its jobs start by priority and age"
    parts = {
        "is ordered: the jobs of a key start in the order of their scores": queue.ordered,
        f"is fair: jobs of different {queue.fair_by}s start in turns": queue.fair_by,
        f"up to {queue.merge_limit} of a key in one delivery": queue.merge,
        f"up to {queue.batch} keys in one call": queue.batch,
        "a dead job stops its key": queue.on_dead == "hold",
    }
    return f"{queue.queue} " + ", ".join(words for words, holds in parts.items() if holds)


@Op("GET /queues")
def queues(call: Call) -> Queues:
    """Every queue that has jobs, a pause, a limit or a worker."""
    return made(Queues, stats.overview(call.conn))


@Op("GET /stats")
def overview(call: Call) -> Overview:
    """Length, dead, lag and more, for each queue and in total, and what does not work."""
    return made(Overview, stats.overview(call.conn) | {"wrong": stats.wrong(call.conn, call.settings.dl_alerts_queue)})


@Op(
    "GET /queues/{queue}/keys",
    command="queue keys QUEUE",
    columns="lock_key payloads job_id score attempt waiting_for",
    examples=("dataloader queue keys orders --limit 200",),
    errors=(409,),
    links="/keys/0/job_id",
)
def keys(call: Call, queue: QueueName, limit: PageSize = 50, after: Cursor | None = None) -> Keys:
    """List the keys of an ordered queue that have queued jobs: how many, and what the first job of each waits for.

    A queue that is not ordered is a conflict.
    """
    page = keys_of.page(call.conn, queue, limit, after)
    return made(Keys, {"keys": page.rows, "next": page.next})


@Op("GET /queues/{queue}/prediction")
def predict_queue(call: Call, queue: QueueName) -> QueuePrediction:
    """When all jobs that run or are due now will have ended, the range, and how right such predictions were."""
    return made(QueuePrediction, predictions.queue_prediction(call.outlook(call.conn, queue)))


@Op("GET /queues/{queue}/runs")
def queue_runs(call: Call, queue: QueueName, range: RangeName = runs.USUAL) -> QueueRuns:
    """How long the runs of a queue were: counts, failures, percentiles, a histogram, and the period before."""
    return made(QueueRuns, runs.queue_runs(call.conn, queue, range))


@Op(
    "POST /queues/{queue}/pause",
    command="pause QUEUE",
    done="{queue} is paused; what runs goes on. To go on: dataloader resume {queue!q}{flags}",
    question="Pause this queue? No job of it starts, on any host, until it is resumed.",
    examples=("dataloader pause etl.default",),
)
def pause(call: Call, queue: QueueName) -> QueueState:
    """Start no job of a queue any more, on any host; what runs goes on."""
    return _changed_state(call, queue, operations.pause)


@Op(
    "POST /queues/{queue}/resume",
    command="resume QUEUE",
    done="{queue} goes on",
    examples=("dataloader resume etl.default",),
)
def resume(call: Call, queue: QueueName) -> QueueState:
    """Start jobs of a paused queue again."""
    return _changed_state(call, queue, operations.resume)


@Op(
    "PUT /queues/{queue}/limit",
    command="limit queue QUEUE MAX_LENGTH",
    done="{queue} takes new jobs until {max_length:any number} are queued",
    examples=("dataloader limit queue etl.default 10000", "dataloader limit queue etl.default none"),
)
def limit(call: Call, queue: QueueName, max_length: Whole | None) -> QueueState:
    """Refuse to trigger jobs (429) while `max_length` of a queue wait; `none` removes the limit."""
    return _changed_state(call, queue, lambda conn, name, by: operations.limit_length(conn, name, max_length, by))


@Op(
    "PUT /queues/{queue}",
    command="queue set QUEUE",
    done=order_of,
    question="Change the order of this queue's jobs? It holds on all hosts, from the next claim on; what runs goes on.",
    examples=("dataloader queue set orders --ordered --merge", "dataloader queue set etl.default --fair-by producer"),
)
def set_queue(call: Call, queue: QueueName, **order: Unpack[Order]) -> QueueState:
    """Change the order of a queue's jobs, while jobs run; what is not named stays."""
    return _changed_state(call, queue, lambda conn, name, by: operations.set_order(conn, name, by, **order))


def _many(verb: str, only: Any, summary: str, *, done: str, **words: Any) -> None:
    """Declare an order to all jobs of one kind in a queue, 1,000 in a call; `only` are its filters."""

    def change(call: Call, queue: str, after: str | None = None, **only: Any) -> Changed:
        changed, following = operations.change_queue(call.conn, verb, queue, call.by, AT_ONCE, only, after)
        return Changed(queue=queue, changed=changed, next=following)

    change.__name__, change.__doc__ = verb.replace("-", "_"), summary
    change.__annotations__ |= {"queue": QueueName, "after": Cursor | None, "only": Unpack[only]}
    done = f"{{queue}}: {{changed!j}} {done}"
    Op(f"POST /queues/{{queue}}/{verb}", repeatable=False, done=done, **words)(change)


_many(
    "requeue-dead",
    Tried,
    "Queue the failed and lost jobs of a queue again, each with a fresh budget of attempts.",
    done="queued again",
    question="Run {jobs} again, with a fresh budget of attempts?",
)
_many(
    "delete-dead",
    Tried,
    "Delete the failed and lost jobs of a queue, with their journal.",
    done="deleted",
    question="Delete {jobs}, with their journals, for good?",
)
_many(
    "run-all",
    Queued,
    "Make jobs of a queue that wait for their time due now.",
    done="due now",
    question="Let {jobs} run now, retries in their back-off too?",
)
_many(
    "kill-retries",
    Tried,
    "Mark the jobs of a queue that wait for a retry as failed.",
    done="failed",
    command="queue kill-retries QUEUE",
    question="Let {jobs} fail for good?",
    examples=("dataloader queue kill-retries etl.default --task load.csv",),
)


@Op(
    "POST /queues/{queue}/move",
    command="queue move QUEUE TO",
    done="{moved} jobs of {queue} are jobs of {to} now. {queue} stays paused; jobs that producers still add there wait:"
    " run the command again\n    dataloader queue move {queue!q} {to!q}{flags}",
    examples=("dataloader queue move orders orders_v2",),
    errors=(409,),
)
def move(call: Call, queue: QueueName, to: NewQueueName) -> Moved:
    """Move the queued, running and dead jobs of a queue to another, in their order; running jobs go on.

    Both queues are paused until the last job has moved; the first one stays paused.
    """
    moved, is_done = operations.move(call.conn, queue, to, call.by, AT_ONCE)
    return Moved(queue=queue, to=to, moved=moved, is_done=is_done)


def _changed_state(call: Call, queue: str, change: Callable[..., dict[str, Any]]) -> QueueState:
    known = operations.known(call.conn, "queue", queue)  # asked before the change, which makes the queue known
    row = known | change(call.conn, queue, call.by) | ({} if call.may_read else {"similar": []})
    return made(QueueState, row)
