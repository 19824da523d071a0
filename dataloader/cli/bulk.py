"""Orders to the jobs that a search finds: the options --matching, --preview and --yes of requeue, cancel and so on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from dataloader.cli import screen
from dataloader.cli.connection import Reached
from dataloader.client import Preview
from dataloader.model.kinds import OrderName

OPTIONS = ("query", "only_preview", "yes")
F = TypeVar("F", bound=Callable[..., Any])
_DONE = {
    "requeue": "queued again",
    "start-over": "queued again, from the start",
    "cancel": "cancelled, or asked to stop",
    "delete": "deleted, with their journal",
    "run-now": "due now",
}


def matching(done: str) -> Callable[[F], F]:
    """A command's options for all jobs that a search finds."""

    def add(command: F) -> F:
        for option in (
            click.option("--yes", is_flag=True, help="do not ask for confirmation"),
            click.option(
                "--preview", "only_preview", is_flag=True, help=f"count the jobs of --matching that would be {done}"
            ),
            click.option(
                "--matching",
                "query",
                metavar="TEXT",
                help='all jobs of this search: "task:load.csv status:dead"',
            ),
        ):
            command = option(command)
        return command

    return add


def taken(options: dict[str, Any]) -> dict[str, Any]:
    """These options, taken out of a command's."""
    return {name: options.pop(name) for name in OPTIONS}


def is_for_many(many: Mapping[str, Any], names_others: bool) -> bool:
    """Whether the command is for the jobs of a search; raises click.UsageError where it names others as well."""
    if many["query"] is None:
        if many["only_preview"]:
            raise click.UsageError("--preview is for --matching")
        return False
    if names_others:
        raise click.UsageError("--matching names the jobs by itself: a search has fields such as queue: and task:")
    if not many["query"].strip():
        raise click.UsageError("--matching needs a search: an empty one would be for every job")
    return True


def order(reached: Reached, name: OrderName, *, query: str, only_preview: bool, yes: bool) -> None:
    """Preview an order, ask, and give it; prints how many jobs it has changed."""
    preview = reached.farm.preview(name, matching={"q": query})
    if only_preview:
        if reached.as_json:
            reached.print_json(preview)
        else:
            click.echo("\n".join(_words(preview)))
        return
    click.echo("\n".join(_words(preview)), err=True)
    if preview.count and not yes:
        click.confirm(f"{name} these {_count(preview)} jobs?", abort=True, err=True)
    changed = _give(reached, preview, query) if preview.count or not preview.is_exact else 0
    if reached.as_json:
        reached.print_json({"order": name, "previewed": preview.count, "changed": changed})
    else:
        click.echo(f"{changed:,} jobs {_DONE[name]}")


def tell_tally(reached: Reached, filters: Mapping[str, Any]) -> None:
    """Print how many jobs of a list count as what."""
    found = reached.farm.tally(**filters)
    if reached.as_json:
        reached.print_json(found)
        return
    for kind, count in vars(found.counts).items():
        click.echo(f"{kind:<10} {count:>10,}{'+' if kind in found.at_least else ''}")
    click.echo(f"{'total':<10} {found.total:>10,}{'+' if found.at_least else ''}")


def _give(reached: Reached, preview: Preview, query: str) -> int:
    changed = 0
    for some in reached.farm.change_previewed(preview, matching={"q": query}):
        changed += some
        if some:
            click.echo(f"dataloader: {changed:,} of {_count(preview)}", err=True)
    return changed


def _count(preview: Preview) -> str:
    return f"{preview.count:,}{'' if preview.is_exact else ' or more'}"


def _words(preview: Preview) -> list[str]:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in preview.changes.items()) or "none"
    left = [f"left alone: {each.count:,} {each.kind}, of which each {each.reason}" for each in preview.leaves]
    return [screen.plain(line) for line in (f"{preview.order}: {_count(preview)} jobs ({kinds})", *left)]
