"""Commands that change jobs, named or found: requeue, run-now, delete. Those for queues and limits are made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar
from uuid import UUID

import click

from dataloader.cli import base, bulk, made, names, screen
from dataloader.cli.connection import Reached, reaching
from dataloader.client.farm import Farm
from dataloader.client.operations import given
from dataloader.exits import EXIT_FAILED
from dataloader.model.kinds import OrderName

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


@commands.group(
    default="queue", examples=["dataloader limit etl.default 10000", "dataloader limit set source:oracle --most 3"]
)
def limit() -> None:
    """Limits of the fleet: how many jobs run at once, start in a minute; the length of a queue.

    `limit QUEUE NUMBER` is `limit queue QUEUE NUMBER`.
    """


@commands.group(examples=["dataloader queue set orders --ordered --merge"])
def queue() -> None:
    """A whole queue: the order of its jobs (docs/ordered.md), its keys, another name, its retries."""


made.add(commands, "queues", "limits")


def _change(
    reached: Reached,
    verb: OrderName,
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


def _change_these(reached: Reached, verb: OrderName, job_ids: list[UUID]) -> None:
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
