"""`errors`: dead and retrying jobs in groups by their errors, and changes of a whole group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

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
        reached.print_json(found.document)
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
    reached.farm.write_error_note(task, group, text)
    if reached.as_json:
        reached.print_json({"task": task, "error_group": group, "note": text.strip() or None})
    else:
        click.echo("the note is written" if text.strip() else "the note is removed")


def _named(reached: Reached, group: str, queue: str | None, task: str | None) -> list[ErrorGroup]:
    """The groups of this text, one for each queue and task, that have dead jobs."""
    found = [each for each in reached.farm.errors(queue=queue, task=task).groups if each.error_group == group]
    dead = [each for each in found if each.dead]
    if not dead:
        why = "its jobs wait for a retry" if found else "`dataloader errors` lists the groups, of which --group is one"
        raise click.UsageError(f"no dead job is in this group: {why}")
    return dead


class _Order(NamedTuple):
    """What may become of the dead jobs of a group: the order to a queue, what became of them, the help."""

    verb: str
    done: str
    text: str


_ORDERS = {
    "requeue": _Order(
        "requeue-dead", "queued again", "Queue the dead jobs of a group again, each with a fresh budget of attempts."
    ),
    "delete": _Order("delete-dead", "deleted", "Delete the dead jobs of a group, with their journal."),
}


def _command(name: str, order: _Order) -> click.Command:
    """The command that gives an order to a group."""

    @click.command(
        name=name,
        cls=base.Command,
        help=order.text,
        examples=[f"dataloader errors {name} --group 'OSError: No space left' --task load.csv"],
    )
    @_of_group
    @click.option("--yes", is_flag=True, help="do not ask for confirmation")
    @reaching
    def change(reached: Reached, group: str, queue: str | None, task: str | None, yes: bool) -> None:
        groups = _named(reached, group, queue, task)
        for each in groups:
            click.echo(f"{screen.plain(each.queue)}: {each.dead:,} dead jobs of {screen.plain(each.task)}", err=True)
        if not yes:
            count = sum(each.dead for each in groups)
            click.confirm(f"{name.capitalize()} these {count:,} jobs?", abort=True, err=True)
        _tell(reached, order, sum(_carry_out(reached, order, each) for each in groups))

    made: click.Command = change
    return made


for _name, _order in _ORDERS.items():
    errors.add_command(_command(_name, _order))


def _carry_out(reached: Reached, order: _Order, group: ErrorGroup) -> int:
    only = {"task": group.task, "error_group": group.error_group}
    return sum(reached.farm.change_all(order.verb, group.queue, **only))


def _tell(reached: Reached, order: _Order, changed: int) -> None:
    if reached.as_json:
        reached.print_json({"changed": changed})
    else:
        click.echo(f"{changed:,} jobs {order.done}")


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
