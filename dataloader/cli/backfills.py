"""Commands about backfills: `backfill TASK` adds one.

Besides: backfill list, show, wait, partitions, set, pause, resume, cancel, retry, remove.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from typing import Any

import click
from rich.console import Group

from dataloader import ops
from dataloader.cli import base, made, names, screen
from dataloader.cli.connection import Reached, reaching
from dataloader.client.operations import given

_LOOK_SEC = 1.0  # between two looks of `wait`
EXIT_DEAD, EXIT_CANCELED = 10, 11  # of `wait`, as of a job's


commands = base.Group()


@commands.group(default="add", examples=["dataloader backfill load.csv --from 2019-01-01 --to 2026-11-01 --step day"])
def backfill() -> None:
    """Jobs of one task for many partitions (docs/backfills.md): `backfill TASK --from .. --to .. --step ..`."""


@backfill.command(
    examples=[
        "dataloader backfill add load.csv --from 2019-01-01 --to 2026-11-01 --step day",
        "dataloader backfill add load.csv --file - --max-running 4 --dry-run",
    ]
)
@click.argument("task")
@click.option("--name", help="default: the task and the range")
@click.option("--from", "since", metavar="FIRST", help="the first partition: 2019-01-31, 2019-01-31T06:00, 0")
@click.option("--to", "until", metavar="LAST", help="the last partition begins here, or before")
@click.option("--partition", "listed", multiple=True, help="a partition; again for more")
@click.option("--file", type=click.File("r", "utf-8"), metavar="FILE", help="a partition a line; - is stdin")
@click.option("--dry-run", is_flag=True, help="show what it would do, and change nothing")
@names.may_be_new
@reaching
def add(reached: Reached, task: str, name: str | None, dry_run: bool, is_new: bool, **options: Any) -> None:
    """Add a backfill of a task: a range, a list or a file of partitions, and a job for each."""
    words = _words(**options)
    names.require(reached, is_new, queue=options["queue"], task=task)
    if name is None:
        is_range = "since" in words and "until" in words
        name = f"{task}:{words['since']}:{words['until']}" if is_range else f"{task}:{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    if not dry_run:
        added = reached.farm.add_backfill(name, task, **words)
        reached.answer(added, lambda: screen.sheet(added, reached.zone))
        return
    found = reached.farm.try_backfill(name, task, **words)
    skipped = f", of which {found.skipped:,} are done already" if found.skipped else ""
    text = f"{screen.plain(found.name)} would have {found.total:,} partitions{skipped}; nothing is changed"
    samples = [vars(each) | {"args": screen.as_json(each.args, None)} for each in found.samples]
    reached.answer(found, lambda: Group(text, screen.listing("partition args lock_key priority", samples)))


def _words(listed: tuple[str, ...], file: Any | None, priority: str | None, **others: Any) -> dict[str, Any]:
    """The words of a backfill that the options give."""
    if listed and file:
        raise click.UsageError("partitions come from --partition or --file")
    try:
        lines = [text for line in file if (text := line.strip())] if file else [*listed]
    except UnicodeDecodeError:
        raise click.BadParameter("it is not UTF-8", param_hint="--file") from None
    if file and not lines:
        raise click.BadParameter("there is no partition in it", param_hint="--file")
    if others["args"] is not None:
        others["args"] = base.arguments(others["args"])
    number = int(priority) if priority and priority.isascii() and priority.isdigit() else priority
    return given(**others, priority=number, partitions=lines or None)


_OTHERS = ("since", "until", "partitions")  # words that have options of another shape
_WORDS = [each for each in ops.load()["add_backfill"].parameters.values() if each.stays and each.name not in _OTHERS]
add.params[4:4] = map(made.option, _WORDS)


@backfill.command(examples=["dataloader backfill wait history"])
@click.argument("name")
@reaching
def wait(reached: Reached, name: str) -> None:
    """Wait for a backfill's end, with its progress on stderr.

    Exit status: 0 each partition is done, 10 some jobs are dead or canceled, 11 the backfill is canceled.
    """
    told = ""
    while True:
        found = reached.farm.backfill(name)
        left = f", {screen.duration(found.eta_sec)} left" if found.eta_sec is not None else ""
        line = f"{found.ended:,} of {found.total:,} partitions, {found.state}{left}"
        if line != told:
            bar = screen.bar(found.ended / found.total if found.total else None)
            click.echo(f"dataloader: {bar} {line}", err=True)
        if found.state in ("done", "canceled"):
            break
        told = line
        time.sleep(_LOOK_SEC)
    reached.answer(found, lambda: screen.sheet(found, reached.zone))
    undone = found.total - found.counts.get("succeeded", 0) - found.counts.get("skipped", 0)
    sys.exit(EXIT_CANCELED if found.state == "canceled" else EXIT_DEAD if undone else 0)


made.add(commands, "backfills")
