"""Commands that change jobs and queues: requeue, run-now, delete; pause, resume, limit; queue set and the like."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import UUID

import click

from dataloader.cli import base, bulk, names, render, screen
from dataloader.cli.connection import Reached, reaching
from dataloader.client import Limit, Queue
from dataloader.client.farm import Farm, given
from dataloader.exits import EXIT_FAILED

LONG = 1_000  # jobs of a kind; an answer does not count more than these
_DONE = {
    "requeue": "queued again",
    "start-over": "queued again, from the start",
    "run-now": "due now",
    "delete": "deleted",
}
# The verbs for a whole queue: the figure that counts its group, and what became of the jobs.
_GROUPS = {
    "requeue-dead": ("dead", "queued again"),
    "delete-dead": ("dead", "deleted"),
    "run-all": ("scheduled", "due now"),
    "kill-retries": ("retries", "failed"),
}
F = TypeVar("F", bound=Callable[..., Any])


def _filtered(command: F) -> F:
    """The command, with a filter of the jobs of a queue."""
    for name, what in (
        ("partition-key", "of this partition"),
        ("lock-key", "with this key"),
        ("task", "of this task"),
    ):
        command = click.option(f"--{name}", metavar="TEXT", help=f"of the queue's jobs only those {what}")(command)
    return command


_by_error = click.option("--error", metavar="TEXT", help="of the queue's jobs only those whose error contains this")


@click.group(cls=base.Group)
def commands() -> None:
    """Changes."""


@commands.command(
    examples=[
        f"dataloader requeue {base.EXAMPLE_ID}",
        "dataloader requeue --dead etl.default --task load.csv --error 'No space left'",
    ]
)
@click.argument("job_ids", nargs=-1, metavar="[JOB_IDS]... | -")
@click.option("--dead", metavar="QUEUE", help="all failed and lost jobs of this queue")
@_filtered
@_by_error
@click.option("--from-scratch", is_flag=True, help="named jobs begin at the start, not at their checkpoints")
@bulk.matching("requeued")
@reaching
def requeue(reached: Reached, job_ids: tuple[str, ...], dead: str | None, from_scratch: bool, **only: Any) -> None:
    """Queue jobs that have ended again, each with a fresh budget of attempts; - reads their ids from stdin."""
    many = bulk.taken(only)
    if bulk.is_for_many(many, bool(job_ids or dead is not None or given(**only))):
        bulk.order(reached, "start-over" if from_scratch else "requeue", **many)
        return
    if from_scratch and dead is not None:
        raise click.UsageError("--from-scratch is for named jobs, not for those of a queue")
    _change(reached, "start-over" if from_scratch else "requeue", job_ids, "requeue-dead", dead, given(**only))


@commands.command(
    name="run-now",
    examples=[f"dataloader run-now {base.EXAMPLE_ID}", "dataloader run-now --all etl.default"],
)
@click.argument("job_ids", nargs=-1, metavar="[JOB_IDS]... | -")
@click.option("--all", "scheduled", metavar="QUEUE", help="all jobs of this queue that wait for their time")
@_filtered
@bulk.matching("made due")
@reaching
def run_now(reached: Reached, job_ids: tuple[str, ...], scheduled: str | None, **only: Any) -> None:
    """Make jobs due that wait for their time; - reads their ids from stdin."""
    many = bulk.taken(only)
    if bulk.is_for_many(many, bool(job_ids or scheduled is not None or given(**only))):
        bulk.order(reached, "run-now", **many)
        return
    _change(reached, "run-now", job_ids, "run-all", scheduled, given(**only))


@commands.command(examples=[f"dataloader delete {base.EXAMPLE_ID}", "dataloader delete --dead etl.default --yes"])
@click.argument("job_ids", nargs=-1, metavar="[JOB_IDS]... | -")
@click.option("--dead", metavar="QUEUE", help="all failed and lost jobs of this queue")
@_filtered
@_by_error
@bulk.matching("deleted")
@reaching
def delete(reached: Reached, job_ids: tuple[str, ...], dead: str | None, **only: Any) -> None:
    """Delete jobs that do not run, with their journal; - reads their ids from stdin."""
    many = bulk.taken(only)
    yes = many["yes"]
    if bulk.is_for_many(many, bool(job_ids or dead is not None or given(**only))):
        bulk.order(reached, "delete", **many)
        return
    if not yes and "-" in job_ids:
        raise click.UsageError("with ids from stdin nobody can be asked: add --yes")
    names.require(reached, queue=dead)
    if not yes and (job_ids or dead):
        fit = " that pass the filter" if given(**only) else ""
        what = f"all failed and lost jobs of {screen.plain(dead)}{fit}" if dead else f"{len(job_ids)} jobs"
        click.confirm(f"Delete {what}, with their journal, for good?", abort=True, err=True)
    _change(reached, "delete", job_ids, "delete-dead", dead, given(**only))


@commands.command(examples=["dataloader pause etl.default"])
@click.argument("queue")
@names.may_be_new
@reaching
def pause(reached: Reached, queue: str, is_new: bool) -> None:
    """Start no job of a queue any more, on any host; what runs goes on."""
    names.require(reached, is_new, queue=queue)
    found = reached.farm.pause(queue)
    resume = reached.command("resume", queue)
    _tell(reached, found, f"{screen.plain(queue)} is paused; what runs goes on. To go on: {screen.plain(resume)}")


@commands.command(examples=["dataloader resume etl.default"])
@click.argument("queue")
@reaching
def resume(reached: Reached, queue: str) -> None:
    """Start jobs of a paused queue again."""
    names.require(reached, queue=queue)
    _tell(reached, reached.farm.resume(queue), f"{screen.plain(queue)} goes on")


@commands.group(
    default="queue", examples=["dataloader limit etl.default 10000", "dataloader limit set source:oracle --running 3"]
)
def limit() -> None:
    """Limits of the fleet: how many jobs run at once, start in a minute; the length of a queue.

    `limit QUEUE NUMBER` is `limit queue QUEUE NUMBER`.
    """


@limit.command(name="set", examples=["dataloader limit set source:oracle --running 3 --per-minute 60"])
@click.argument("name")
@click.option("--running", "most", type=click.IntRange(0), help="jobs of the limit that may run at once")
@click.option("--per-minute", type=base.Number(0.001, 1_000_000), help="jobs that may start in a minute")
@click.option(
    "--burst",
    type=click.IntRange(1),
    help="how many of these may start at once after a pause; default: as many as a second has, at least one",
)
@reaching
def set_limit(reached: Reached, name: str, most: int | None, per_minute: float | None, burst: int | None) -> None:
    """Make a limit, or replace what it allows, on all hosts at once; jobs that run go on."""
    if most is None and per_minute is None:
        raise click.UsageError("name what the limit allows: --running, --per-minute, or both")
    found = reached.farm.set_limit(name, most=most, per_minute=per_minute, burst=burst)
    if reached.as_json:
        reached.print_json(found.document)
        return
    click.echo(f"the limit {screen.plain(found.name)} allows {_allowed(found)}")


@limit.command(name="list", examples=["dataloader limit list"])
@reaching
def list_limits(reached: Reached) -> None:
    """List the limits: what each allows, how many of its jobs run, and how many wait for it."""
    found = reached.farm.limits()
    if reached.as_json:
        reached.print_json({"limits": [each.document for each in found]})
        return
    screen.show(render.limit_table(found, datetime.now(UTC)))


@limit.command(name="remove", examples=["dataloader limit remove source:oracle"])
@click.argument("name")
@reaching
def remove_limit(reached: Reached, name: str) -> None:
    """Let any number of a limit's jobs run; the jobs keep its name."""
    reached.farm.remove_limit(name)
    if reached.as_json:
        reached.print_json({"name": name})
        return
    click.echo(f"the limit {screen.plain(name)} is removed: any number of its jobs may run")


def _allowed(limit: Limit) -> str:
    parts = [] if limit.most is None else [f"{limit.most} running job{'' if limit.most == 1 else 's'}"]
    if limit.per_minute is not None:
        parts.append(f"{limit.per_minute:g} starts a minute, {limit.burst} at once")
    return " and ".join(parts)


@limit.command(
    name="queue", examples=["dataloader limit queue etl.default 10000", "dataloader limit queue etl.default none"]
)
@click.argument("queue")
@click.argument("max_length", metavar="NUMBER|none")
@names.may_be_new
@reaching
def limit_queue(reached: Reached, queue: str, max_length: str, is_new: bool) -> None:
    """Refuse to trigger jobs while so many of a queue wait; none takes the limit away."""
    if max_length != "none" and not (max_length.isascii() and max_length.isdigit()):
        raise click.BadParameter("should be a number or none", param_hint="NUMBER")
    names.require(reached, is_new, queue=queue)
    found = reached.farm.limit(queue, None if max_length == "none" else int(max_length))
    _tell(
        reached,
        found,
        f"{screen.plain(queue)} may have {max_length if found.max_length is not None else 'any number of'} jobs",
    )


@commands.group(examples=["dataloader queue set orders --ordered --merge"])
def queue() -> None:
    """A whole queue: the order of its jobs (docs/ordered.md), its keys, another name, its retries."""


@queue.command(name="keys", examples=["dataloader queue keys orders --limit 200"])
@click.argument("name", metavar="QUEUE")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True)
@click.option("--all", "has_no_limit", is_flag=True, help="show all keys, without a limit")
@reaching
def list_keys(reached: Reached, name: str, limit: int, has_no_limit: bool) -> None:
    """List the keys of an ordered queue that have queued jobs: how many, and what the first job of each waits for."""
    names.require(reached, queue=name)
    found = list(reached.farm.keys(name, limit=None if has_no_limit else limit))
    if reached.as_json:
        reached.print_json({"keys": [key.document for key in found]})
        return
    screen.show(render.key_table(found, datetime.now(UTC)))
    if len(found) == limit and not has_no_limit:
        click.echo(f"dataloader: these are {limit}, there may be more: --limit N or --all", err=True)


@queue.command(
    name="set",
    examples=["dataloader queue set orders --ordered --merge", "dataloader queue set etl.default --fair-by producer"],
)
@click.argument("name", metavar="QUEUE")
@click.option("--ordered/--no-ordered", default=None, help="the jobs of a key start in the order of their scores")
@click.option("--merge/--no-merge", default=None, help="one delivery takes all queued jobs of a key")
@click.option("--merge-limit", type=click.IntRange(1, 1_000), help="the most jobs of a key in one delivery")
@click.option("--batch", metavar="KEYS|none", help="the most keys in one call; none: as the pipeline says")
@click.option("--on-dead", type=base.Choice(["continue", "hold"]), help="hold: a dead job stops its key")
@click.option(
    "--fair-by",
    type=base.Choice(["partition_key", "producer", "none"]),
    help="jobs of different values start in turns",
)
@names.may_be_new
@reaching
def set_queue(reached: Reached, name: str, batch: str | None, fair_by: str | None, is_new: bool, **named: Any) -> None:
    """Change the order of a queue's jobs, while jobs run; what is not named stays."""
    changes = given(**named)
    if fair_by is not None:
        changes["fair_by"] = None if fair_by == "none" else fair_by
    if batch is not None:
        changes["batch"] = _batch(batch)
    if not changes:
        raise click.UsageError("name what to change: --ordered, --merge, --merge-limit, --batch, --on-dead, --fair-by")
    names.require(reached, is_new, queue=name)
    found = reached.farm.set_queue(name, **changes)
    _tell(reached, found, f"{screen.plain(name)} {_order_of(found)}")


@queue.command(name="move", examples=["dataloader queue move orders orders_v2"])
@click.argument("name", metavar="FROM")
@click.argument("to", metavar="TO")
@reaching
def move_queue(reached: Reached, name: str, to: str) -> None:
    """Make the queued, running and dead jobs of a queue those of another, in their order; what runs goes on."""
    moved = sum(reached.farm.move(name, to))
    if reached.as_json:
        reached.print_json({"queue": name, "to": to, "moved": moved})
        return
    again = reached.command("queue", "move", name, to)
    click.echo(
        f"{moved} jobs of {screen.plain(name)} are jobs of {screen.plain(to)} now. {screen.plain(name)} stays paused;"
        f" jobs that producers still add there wait: run the command again\n    {screen.plain(again)}"
    )


@queue.command(name="kill-retries", examples=["dataloader queue kill-retries etl.default --task load.csv"])
@click.argument("name", metavar="QUEUE")
@_filtered
@_by_error
@reaching
def kill_retries(reached: Reached, name: str, **only: str | None) -> None:
    """Let the jobs of a queue be failed that were tried and wait for their next attempt."""
    _change_group(reached, "kill-retries", name, given(**only))


def _batch(text: str) -> int | None:
    if text != "none" and not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1_000):
        raise click.BadParameter("should be a number from 1 to 1000, or none", param_hint="--batch")
    return None if text == "none" else int(text)


def _order_of(queue: Queue) -> str:
    if not (queue.ordered or queue.fair_by):
        return "is a plain queue: its jobs start by priority and age"
    parts = []
    if queue.ordered:
        parts.append("is ordered: the jobs of a key start in the order of their scores")
    if queue.fair_by:
        parts.append(f"is fair: jobs of different {queue.fair_by}s start in turns")
    if queue.merge:
        parts.append(f"up to {queue.merge_limit} of a key in one delivery")
    if queue.batch:
        parts.append(f"up to {queue.batch} keys in one call")
    if queue.on_dead == "hold":
        parts.append("a dead job stops its key")
    return ", ".join(parts)


def _change(
    reached: Reached,
    verb: str,
    job_ids: tuple[str, ...],
    group_verb: str,
    queue: str | None,
    only: dict[str, str],
) -> None:
    if bool(job_ids) == (queue is not None):
        raise click.UsageError("name jobs, or a queue by the option; one of the two")
    if queue is not None:
        _change_group(reached, group_verb, queue, only)
        return
    if only:
        raise click.UsageError(f"--{next(iter(only)).replace('_', '-')} is for the jobs of a queue, not for named ones")
    _change_these(reached, verb, _ids(job_ids))


def _change_group(reached: Reached, verb: str, queue: str, only: dict[str, str]) -> None:
    names.require(reached, queue=queue)
    figure, words = _GROUPS[verb]
    changed = _change_all(reached.farm, verb, queue, figure, only)
    if reached.as_json:
        reached.print_json({"queue": queue, "changed": changed})
    else:
        click.echo(f"{screen.plain(queue)}: {changed} jobs {words}")


def _change_these(reached: Reached, verb: str, job_ids: list[UUID]) -> None:
    outcomes = reached.farm.change(verb, job_ids) if job_ids else {}
    if reached.as_json:
        reached.print_json({"jobs": [{"job_id": job_id, "outcome": what} for job_id, what in outcomes.items()]})
    else:
        for job_id, what in outcomes.items():
            click.echo(f"{job_id} {_outcome(verb, what)}")
    if set(outcomes.values()) - {"done"}:
        sys.exit(EXIT_FAILED)


def _outcome(verb: str, what: str) -> str:
    if what == "done":
        return _DONE[verb]
    if what == "unknown":
        return "there is no such job"
    rule = {
        "requeue": "only what has ended can be",
        "start-over": "only what has ended can be",
        "run-now": "only what is queued can be",
        "delete": "cancel it first",
    }
    return f"is {screen.plain(what)}: {rule[verb]}"


def _change_all(farm: Farm, verb: str, queue: str, figure: str, only: dict[str, str]) -> int:
    """Change the jobs in steps, at most as many as at the start: a changed job may return to the group."""
    found = next((found for found in farm.overview().queues if found.queue == queue), None)
    there = getattr(found, figure) if found else 0
    if there >= LONG and found and found.counted_at is None:
        there = sys.maxsize  # the answer is a lower bound
    changed = 0
    for some in farm.change_all(verb, queue, **only) if there else ():
        changed += some
        if changed >= there:
            break
    return changed


def _ids(words: tuple[str, ...]) -> list[UUID]:
    """The named ids; a - stands for the ids on stdin."""
    texts = [text for word in words for text in (sys.stdin.read().split() if word == "-" else [word])]
    try:
        return list(dict.fromkeys(map(UUID, texts)))
    except ValueError:
        raise click.BadParameter(f"a job's id is a UUID such as {base.EXAMPLE_ID}") from None


def _tell(reached: Reached, queue: Queue, words: str) -> None:
    if reached.as_json:
        reached.print_json(queue.document)
    else:
        click.echo(words)
