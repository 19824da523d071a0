"""`errors`: dead and retrying jobs in groups by their errors, and changes of a whole group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from dataloader.cli import base, names, screen
from dataloader.cli.connection import Reached, reaching
from dataloader.cli.jobs import instant
from dataloader.client import ErrorGroup

F = TypeVar("F", bound=Callable[..., Any])


@click.group(cls=base.Group)
def commands() -> None:
    """Errors."""


class _Errors(base.Group):
    """Takes `errors` alone, and `errors --queue NAME`, for `errors list`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The arguments, with the command that they leave out."""
        if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
            args = ["list", *args]
        return super().parse_args(ctx, args)


def _of_group(command: F) -> F:
    """The command, with the options that name a group."""
    command = click.option("--yes", is_flag=True, help="do not ask for confirmation")(command)
    for name, how in (
        ("task", {"help": "only jobs of this task"}),
        ("queue", {"help": "only jobs of this queue"}),
        ("group", {"metavar": "TEXT", "required": True, "help": "the group, as the list has it"}),
    ):
        command = click.option(f"--{name}", **how)(command)
    return command


@commands.group(cls=_Errors, examples=["dataloader errors -q etl.default --since 1d"])
def errors() -> None:
    """Dead and retrying jobs in groups by their errors: list them, requeue or delete a group, write a note.

    `errors` alone is `errors list`.
    """


@errors.command(name="list", examples=["dataloader errors list -q etl.default --since 1d"])
@click.option("--queue", "-q")
@click.option("--task")
@click.option("--since", metavar="TIME", help="only what failed since then: 2h (min, h, d) ago, or a time")
@reaching
def list_errors(reached: Reached, queue: str | None, task: str | None, since: str | None) -> None:
    """List the groups of dead and retrying jobs, the largest first."""
    found = reached.farm.errors(queue=queue, task=task, since=instant("--since", since, reached.zone))
    if reached.as_json:
        reached.print_json(found)
    else:
        screen.show(_table(found.groups))
    if not found.groups:
        names.hint(reached, queue=queue, task=task)
    if found.is_cut and not reached.as_json:
        click.echo("dataloader: counted among the latest jobs of each queue; there are more", err=True)


@errors.command(examples=["dataloader errors note --group 'OSError: No space left' --task load.csv 'the disk is full'"])
@click.option("--group", metavar="TEXT", required=True, help="the group, as the list has it")
@click.option("--task", required=True)
@click.argument("text")
@reaching
def note(reached: Reached, group: str, task: str, text: str) -> None:
    """Write a note about a group of a task, for everybody; an empty TEXT removes it."""
    written = reached.farm.write_error_note(task, group, text)
    if reached.as_json:
        reached.print_json(written)
    else:
        click.echo("the note is written" if written.note else "the note is removed")


def _named(reached: Reached, group: str, queue: str | None, task: str | None) -> list[ErrorGroup]:
    """The groups of this text, one for each queue and task, that have dead jobs."""
    found = [each for each in reached.farm.errors(queue=queue, task=task).groups if each.error_group == group]
    dead = [each for each in found if each.dead]
    if not dead:
        why = "its jobs wait for a retry" if found else "`dataloader errors` lists the groups, of which --group is one"
        raise click.UsageError(f"no dead job is in this group: {why}")
    return dead


@errors.command(examples=["dataloader errors requeue --group 'OSError: No space left' --task load.csv"])
@_of_group
@reaching
def requeue(reached: Reached, **named: Any) -> None:
    """Queue the dead jobs of a group again, each with a fresh budget of attempts."""
    _change(reached, "Requeue", "queued again", reached.farm.requeue_dead, **named)


@errors.command(examples=["dataloader errors delete --group 'OSError: No space left' --task load.csv"])
@_of_group
@reaching
def delete(reached: Reached, **named: Any) -> None:
    """Delete the dead jobs of a group, with their journal."""
    _change(reached, "Delete", "deleted", reached.farm.delete_dead, **named)


def _change(
    reached: Reached,
    label: str,
    done: str,
    change: Callable[..., int],
    group: str,
    queue: str | None,
    task: str | None,
    yes: bool,
) -> None:
    groups = _named(reached, group, queue, task)
    for each in groups:
        click.echo(f"{screen.plain(each.queue)}: {each.dead:,} dead jobs of {screen.plain(each.task)}", err=True)
    if not yes:
        count = sum(each.dead for each in groups)
        click.confirm(f"{label} these {count:,} jobs?", abort=True, err=True)
    changed = sum(change(each.queue, task=each.task, error_group=each.error_group) for each in groups)
    if reached.as_json:
        reached.print_json({"changed": changed})
    else:
        click.echo(f"{changed:,} jobs {done}")


def _table(groups: Sequence[ErrorGroup]) -> Any:
    now = datetime.now(UTC)
    titles = ("queue", "task", "dead", "retrying", "last", "group", "note")
    rows = [
        (
            screen.short(each.queue, 30),
            screen.short(each.task, 30),
            f"{each.dead:,}",
            f"{each.retrying:,}",
            screen.ago(each.last_at, now),
            screen.plain(each.error_group),
            screen.short(each.note, 40),
        )
        for each in groups
    ]
    return screen.table(titles, rows, titles[2:4], loose=("queue", "task", "note"))
