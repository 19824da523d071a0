"""The commands of backfills: `backfill TASK` adds one.

The others are `backfill list`, show, wait, partitions, set, pause, resume, cancel, retry and remove.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from typing import Any

import click
from rich.console import Group

from dataloader import ops
from dataloader.cli import base, made, screen
from dataloader.cli.connection import Reached, may_be_new, reaching

_POLL_SEC = 1.0  # between two polls of `wait`
EXIT_DEAD, EXIT_CANCELED = 10, 11  # of `wait`; the same as for one job

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
@click.option("--partition", "listed", multiple=True, help="a partition; repeat it for more")
@click.option("--file", type=click.File("r", "utf-8"), metavar="FILE", help="a partition a line; - is stdin")
@click.option("--dry-run", is_flag=True, help="show what it would do, and change nothing")
@may_be_new
@reaching
def add(reached: Reached, task: str, name: str | None, dry_run: bool, is_new: bool, **options: Any) -> None:
    """Add a backfill of a task: one job for each partition of a range, a list or a file."""
    fields = _fields(**options)
    reached.require(is_new, queue=options["queue"], task=task)
    if name is None:
        is_range = "since" in fields and "until" in fields
        suffix = f"{fields['since']}:{fields['until']}" if is_range else f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        name = f"{task}:{suffix}"
    if not dry_run:
        added = reached.farm.add_backfill(name, task, **fields)
        reached.answer(added, lambda: screen.sheet(added, reached.zone))
        return
    planned = reached.farm.try_backfill(name, task, **fields)
    skipped = f", of which {planned.skipped:,} are done already" if planned.skipped else ""
    text = f"{screen.plain(planned.name)} would have {planned.total:,} partitions{skipped}; nothing is changed"
    samples = [vars(each) | {"args": screen.as_json(each.args, None)} for each in planned.samples]
    reached.answer(planned, lambda: Group(text, screen.listing("partition args lock_key priority", samples)))


def _fields(listed: tuple[str, ...], file: Any | None, priority: str | None, **others: Any) -> dict[str, Any]:
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
    return base.given(**others, priority=number, partitions=lines or None)


_SPECIAL = ("since", "until", "partitions")  # parameters with options of another shape
_PARAMETERS = ops.load()["add_backfill"].parameters.values()
add.params[4:4] = [made.option(each) for each in _PARAMETERS if each.stays and each.name not in _SPECIAL]


@backfill.command(examples=["dataloader backfill wait history"])
@click.argument("name")
@reaching
def wait(reached: Reached, name: str) -> None:
    """Wait for the end of a backfill, with its progress on stderr.

    Exit status: 0 each partition is done, 10 some jobs are dead or canceled, 11 the backfill is canceled.
    """
    last_line = ""
    while True:
        current = reached.farm.backfill(name)
        left = f", {screen.duration(current.eta_sec)} left" if current.eta_sec is not None else ""
        line = f"{current.ended:,} of {current.total:,} partitions, {current.state}{left}"
        if line != last_line:
            bar = screen.bar(current.ended / current.total if current.total else None)
            click.echo(f"dataloader: {bar} {line}", err=True)
        if current.state in ("done", "canceled"):
            break
        last_line = line
        time.sleep(_POLL_SEC)
    reached.answer(current, lambda: screen.sheet(current, reached.zone))
    undone = current.total - current.counts.get("succeeded", 0) - current.counts.get("skipped", 0)
    sys.exit(EXIT_CANCELED if current.state == "canceled" else EXIT_DEAD if undone else 0)


made.add(commands, "backfills")
