"""Commands that change jobs: requeue, run-now, delete, cancel; those of queues, limits, schedules, errors and webhooks.

The commands that are not written here are made from the operations (`made`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import UUID

import click
import psycopg

from dataloader import config
from dataloader.cli import base, made, names, screen
from dataloader.cli.connection import Reached, reaching
from dataloader.client.farm import BATCH
from dataloader.client.operations import given
from dataloader.exits import EXIT_CANNOT_START, EXIT_FAILED
from dataloader.model.jobs import BulkOutcome, Preview
from dataloader.model.kinds import OrderName
from dataloader.queue import db
from dataloader.queue.reports import args_index

MAKING_SEC = 86_400.0  # an index of many millions of jobs takes its time


class _Order(NamedTuple):
    """What an order does, to which jobs, and by which method and option to the jobs of a whole queue."""

    done: str
    rule: str
    option: str = ""
    whole: str = ""


_ORDERS: dict[str, _Order] = {
    "requeue": _Order("queued again", "only what has ended can be", "dead", "requeue_dead"),
    "start-over": _Order("queued again, from the start", "only what has ended can be"),
    "run-now": _Order("due now", "only what is queued can be", "all", "run_all"),
    "delete": _Order("deleted, with their journal", "cancel it first", "dead", "delete_dead"),
    "cancel": _Order("cancelled, or asked to stop", "it has ended"),
}
_GROUPS = {"dead": "all failed and lost jobs of this queue", "all": "all jobs of this queue that wait for their time"}
_FILTERS = {
    "task": "of this task",
    "lock-key": "with this key",
    "partition-key": "of this partition",
    "error": "whose error contains this",
}


@click.group(cls=base.Group)
def commands() -> None:
    """Changes."""


def _ordering(*options: Callable[..., Any]) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command of an order, which is named as the function: to jobs, to those of a queue, or of a search."""

    def make(function: Callable[..., Any]) -> click.Command:
        name = function.__name__.replace("_", "-")
        order = _ORDERS[name]
        filters = [each for each in _FILTERS if order.option == "dead" or (order.option and each != "error")]
        command = reaching(function)
        for option in reversed(
            [
                click.argument("job_ids", nargs=-1, metavar="[JOB_IDS]... | -"),
                *(
                    [click.option(f"--{order.option}", "queue", metavar="QUEUE", help=_GROUPS[order.option])]
                    if order.option
                    else []
                ),
                *(
                    click.option(f"--{each}", metavar="TEXT", help=f"of the queue's jobs only those {_FILTERS[each]}")
                    for each in filters
                ),
                *options,
                click.option("--matching", metavar="TEXT", help='all jobs of this search: "task:load.csv status:dead"'),
                click.option(
                    "--preview", "only_preview", is_flag=True, help="count the jobs of --matching, and why others stay"
                ),
                click.option("--yes", is_flag=True, help="do not ask for confirmation"),
            ]
        ):
            command = option(command)
        examples = [
            f"dataloader {name} {base.EXAMPLE_ID}",
            f"dataloader {name} --matching 'task:load.orders' --preview",
        ]
        if order.option:
            examples.append(f"dataloader {name} --{order.option} etl.default --task load.csv")
        return commands.command(name=name, examples=examples)(command)

    return make


@_ordering(click.option("--from-scratch", is_flag=True, help="begin at the start, not at the checkpoints"))
def requeue(reached: Reached, from_scratch: bool, queue: str | None, **named: Any) -> None:
    """Queue jobs that have ended again, each with a fresh budget of attempts; - reads their ids from stdin."""
    if from_scratch and queue is not None:
        raise click.UsageError("--from-scratch is for named jobs, not for those of a queue")
    _carry_out(reached, "start-over" if from_scratch else "requeue", queue, **named)


@_ordering()
def run_now(reached: Reached, **named: Any) -> None:
    """Make jobs due that wait for their time; - reads their ids from stdin."""
    _carry_out(reached, "run-now", **named)


@_ordering()
def delete(reached: Reached, **named: Any) -> None:
    """Delete jobs that do not run, with their journal; - reads their ids from stdin."""
    _carry_out(reached, "delete", **named)


@_ordering(click.option("--force", is_flag=True, help="do not wait for a safe point: interrupt the run, then kill it"))
def cancel(reached: Reached, force: bool, job_ids: tuple[str, ...], matching: str | None, **named: Any) -> None:
    """Cancel jobs: queued ones at once, running ones at their next safe point; - reads their ids from stdin."""
    if force and matching is not None:
        raise click.UsageError("--force is for named jobs, not for those of --matching")
    if len(job_ids) == 1 and job_ids != ("-",) and matching is None:
        reached.print_json(reached.farm.cancel(_ids(job_ids)[0], force=force))
        return
    _carry_out(reached, "cancel", None, job_ids, matching, force=force, **named)


def _carry_out(
    reached: Reached,
    verb: OrderName,
    queue: str | None,
    job_ids: tuple[str, ...],
    matching: str | None,
    only_preview: bool,
    yes: bool,
    *,
    force: bool = False,
    **filters: str | None,
) -> None:
    only = given(**filters)
    if bool(job_ids) + (queue is not None) + (matching is not None) != 1:
        raise click.UsageError("name jobs, or a queue by its option, or a search by --matching: one of them")
    if only and queue is None:
        raise click.UsageError(
            f"--{next(iter(only)).replace('_', '-')} is for the jobs of a queue: a search has fields"
        )
    if only_preview and matching is None:
        raise click.UsageError("--preview is for --matching")
    if matching is not None:
        _change_matching(reached, verb, matching, only_preview, yes)
        return
    names.require(reached, queue=queue)
    if verb == "delete" and not yes:
        if "-" in job_ids:
            raise click.UsageError("with ids from stdin nobody can be asked: add --yes")
        fit = " that pass the filter" if only else ""
        what = f"all failed and lost jobs of {screen.plain(queue)}{fit}" if queue else f"{len(job_ids)} jobs"
        click.confirm(f"Delete {what}, with their journal, for good?", abort=True, err=True)
    order = _ORDERS[verb]
    if queue is not None:
        changed = getattr(reached.farm, order.whole)(queue, **only)
        words = f"{screen.plain(queue)}: {changed} jobs {order.done.partition(',')[0]}"
        reached.answer({"queue": queue, "changed": changed}, lambda: words)
    else:
        _change_named(reached, verb, _ids(job_ids), force)


def _change_named(reached: Reached, verb: OrderName, job_ids: list[UUID], force: bool) -> None:
    outcomes: list[BulkOutcome] = []
    for start in range(0, len(job_ids), BATCH):
        some = job_ids[start : start + BATCH]
        outcomes += (
            reached.farm.cancel_jobs(some, force=force) if verb == "cancel" else reached.farm.change_jobs(verb, some)
        )
    if outcomes or reached.as_json:
        reached.answer(
            {"jobs": outcomes}, lambda: "\n".join(f"{each.job_id} {_outcome(verb, each.outcome)}" for each in outcomes)
        )
    if any(each.outcome != "done" for each in outcomes):
        sys.exit(EXIT_FAILED)


def _outcome(verb: str, outcome: str) -> str:
    done, rule = _ORDERS[verb][:2]
    known = {"done": done.removesuffix(", with their journal"), "unknown": "there is no such job"}
    return known.get(outcome) or f"is {screen.plain(outcome)}: {rule}"


def _change_matching(reached: Reached, verb: OrderName, query: str, only_preview: bool, yes: bool) -> None:
    """Preview an order to the jobs of a search, ask, and give it."""
    if not query.strip():
        raise click.UsageError("--matching needs a search: an empty one would be for every job")
    preview = reached.farm.preview(verb, matching={"q": query})
    if only_preview:
        reached.answer(preview, lambda: _previewed(preview))
        return
    click.echo(_previewed(preview), err=True)
    if preview.count and not yes:
        click.confirm(f"{verb} these {_count(preview)} jobs?", abort=True, err=True)
    changed = 0
    if preview.count or not preview.is_exact:
        changed = reached.farm.order_jobs(verb, preview.confirmation, matching={"q": query})
    words = f"{changed:,} jobs {_ORDERS[verb].done}"
    reached.answer({"order": verb, "previewed": preview.count, "changed": changed}, lambda: words)


def _count(preview: Preview) -> str:
    return f"{preview.count:,}{'' if preview.is_exact else ' or more'}"


def _previewed(preview: Preview) -> str:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in preview.changes.items()) or "none"
    left = [f"left alone: {each.count:,} {each.kind}, of which each {each.reason}" for each in preview.leaves]
    return screen.plain("\n".join([f"{preview.order}: {_count(preview)} jobs ({kinds})", *left]), lines=True)


def _ids(words: tuple[str, ...]) -> list[UUID]:
    """The named ids; a - stands for the ids on stdin."""
    texts = [text for word in words for text in (sys.stdin.read().split() if word == "-" else [word])]
    try:
        return list(dict.fromkeys(map(UUID, texts)))
    except ValueError:
        raise click.BadParameter(f"a job's id is a UUID such as {base.EXAMPLE_ID}") from None


@commands.group(
    default="queue", examples=["dataloader limit etl.default 10000", "dataloader limit set source:oracle --most 3"]
)
def limit() -> None:
    """Limits of the fleet: how many jobs run at once, start in a minute; the length of a queue.

    `limit QUEUE NUMBER` is `limit queue QUEUE NUMBER`.
    """


@commands.group(name="queue", examples=["dataloader queue set orders --ordered --merge"])
def queue_group() -> None:
    """A whole queue: the order of its jobs (docs/ordered.md), its keys, another name, its retries."""


@commands.group(examples=["dataloader schedule add nightly load.csv --cron '0 3 * * MON-FRI'"])
def schedule() -> None:
    """Jobs by the clock (docs/schedules.md)."""


@commands.group(examples=["dataloader webhook add ops https://ops.example.com/alerts --signed-by DL_WEBHOOK_KEY"])
def webhook() -> None:
    """The receivers of alerts for dead jobs, stuck runs, late and paused queues (docs/alerts.md)."""


class _Errors(base.Group):
    """Takes `errors` alone, and `errors --queue NAME`, for `errors list`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The arguments, with the command that they leave out."""
        if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@commands.group(cls=_Errors, examples=["dataloader errors -q etl.default --since 1d"])
def errors() -> None:
    """Dead and retrying jobs in groups by their errors: list them, requeue or delete a group, write a note.

    `errors` alone is `errors list`.
    """


def _of_group(name: str, done: str, text: str) -> None:
    @errors.command(
        name=name,
        help=text,
        examples=[f"dataloader errors {name} --error-group 'OSError: No space left' --task load.csv"],
    )
    @click.option("--error-group", metavar="TEXT", required=True, help="the group, as the list has it")
    @click.option("--queue", "-q", help="only jobs of this queue")
    @click.option("--task", help="only jobs of this task")
    @click.option("--yes", is_flag=True, help="do not ask for confirmation")
    @reaching
    def change(reached: Reached, error_group: str, queue: str | None, task: str | None, yes: bool) -> None:
        found = reached.farm.errors(queue=queue, task=task).groups
        dead = [each for each in found if each.error_group == error_group and each.dead]
        if not dead:
            raise click.UsageError("no dead job is in this group; `dataloader errors` lists the groups")
        for each in dead:
            click.echo(f"{screen.plain(each.queue)}: {each.dead:,} dead jobs of {screen.plain(each.task)}", err=True)
        if not yes:
            count = sum(each.dead for each in dead)
            click.confirm(f"{name.capitalize()} these {count:,} jobs?", abort=True, err=True)
        order = getattr(reached.farm, f"{name}_dead")
        changed = sum(order(each.queue, task=each.task, error_group=error_group) for each in dead)
        reached.answer({"changed": changed}, lambda: f"{changed:,} jobs {done}")


_of_group("requeue", "queued again", "Queue the dead jobs of a group again, each with a fresh budget of attempts.")
_of_group("delete", "deleted", "Delete the dead jobs of a group, with their journal.")
made.add(commands, "queues", "limits", "schedules", "failures", "alerts")


@commands.group(name="search-index", examples=["dataloader search-index create"])
def search_index() -> None:
    """The index for searches by arguments, such as args.date:2024-05-01.

    Without it such a search looks through 8,000 jobs a page. Each insert and each step of a job writes to it.
    """


@search_index.command(examples=["dataloader search-index create"])
def create() -> None:
    """Make the index beside a working farm; needs the owner of the tables."""
    click.echo("the index is made" if _change_index(args_index.create) else "the index is there already")


@search_index.command(examples=["dataloader search-index remove"])
def remove() -> None:
    """Remove the index beside a working farm."""
    click.echo("the index is removed" if _change_index(args_index.drop) else "there is no such index")


def _change_index(change: Callable[[db.Conn], bool]) -> bool:
    try:
        settings = config.load()
        with db.connect(base.dsn(settings), name="dl-search-index", schema=settings.pg_schema_queue) as conn:
            conn.answer_within = MAKING_SEC
            return change(conn)
    except config.ConfigError as e:
        base.refuse(str(e), EXIT_CANNOT_START)
    except psycopg.Error as e:
        base.refuse(f"the index was not changed: {e}", EXIT_FAILED)
