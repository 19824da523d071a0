"""Commands about backfills: `backfill TASK` adds one.

Besides: backfill list, show, wait, partitions, set, pause, resume, cancel, retry, remove.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Group

from dataloader import config, ops
from dataloader.cli import base, made, names, screen
from dataloader.cli.connection import Reached, reaching
from dataloader.client.operations import given
from dataloader.model.plans import Backfill, BackfillPreview
from dataloader.queue.plans.partitions import MOST

_LOOK_SEC = 1.0  # between two looks of `wait`
_QUERY_SEC = 60.0
EXIT_DEAD, EXIT_CANCELED = 10, 11  # of `wait`, as of a job's


@click.group(cls=base.Group)
def commands() -> None:
    """About backfills."""


@commands.group(default="add", examples=["dataloader backfill load.csv --from 2019-01-01 --to 2026-11-01 --step day"])
def backfill() -> None:
    """Jobs of one task for many partitions (docs/backfills.md): `backfill TASK --from .. --to .. --step ..`."""


@backfill.command(
    examples=[
        "dataloader backfill add load.csv --from 2019-01-01 --to 2026-11-01 --step day",
        "dataloader backfill add load.csv --file days.txt --max-running 4 --dry-run",
    ]
)
@click.argument("task")
@click.option("--name", help="default: the task and the range")
@click.option("--from", "since", metavar="FIRST", help="the first partition: 2019-01-31, 2019-01-31T06:00, 0")
@click.option("--to", "until", metavar="LAST", help="the last partition begins here, or before")
@click.option("--partition", "listed", multiple=True, help="a partition; again for more")
@click.option("--file", "path", metavar="FILE", help="a partition a line; - is stdin")
@click.option("--query", metavar="SQL", help="the first column of what this reads: a partition each")
@click.option("--on", type=base.Choice(["target", "queue"]), default="target", help="the database of --query")
@click.option("--dry-run", is_flag=True, help="show what it would do, and change nothing")
@names.may_be_new
@reaching
def add(reached: Reached, task: str, name: str | None, dry_run: bool, is_new: bool, **options: Any) -> None:
    """Add a backfill of a task: a range, a list, a file or a query of partitions, and a job for each."""
    words = _given(options)
    names.require(reached, is_new, queue=options["queue"], task=task)
    name = name or _name(task, words)
    if dry_run:
        _preview(reached, reached.farm.try_backfill(name, task, **words))
    else:
        _show(reached, reached.farm.add_backfill(name, task, **words))


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
        if (line := progress(found)) != told:
            click.echo(f"dataloader: {line}", err=True)
        if found.state in ("done", "canceled"):
            break
        told = line
        time.sleep(_LOOK_SEC)
    _show(reached, found)
    undone = found.total - found.counts.get("succeeded", 0) - found.counts.get("skipped", 0)
    sys.exit(EXIT_CANCELED if found.state == "canceled" else EXIT_DEAD if undone else 0)


made.add(commands, "backfills")


def progress(found: Backfill) -> str:
    """How far a backfill is, on one line."""
    left = f", {screen.duration(found.eta_sec)} left" if found.eta_sec is not None else ""
    bar = screen.bar(found.ended / found.total if found.total else None)
    return f"{bar} {found.ended:,} of {found.total:,} partitions, {found.state}{left}"


def _show(reached: Reached, found: Backfill) -> None:
    reached.answer(found, lambda: screen.sheet(found, reached.zone))


def _preview(reached: Reached, found: BackfillPreview) -> None:
    skipped = f", of which {found.skipped:,} are done already" if found.skipped else ""
    words = f"{screen.plain(found.name)} would have {found.total:,} partitions{skipped}; nothing is changed"
    samples = [vars(each) | {"args": screen.as_json(each.args, None)} for each in found.samples]
    reached.answer(found, lambda: Group(words, screen.listing("partition args lock_key priority", samples)))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The words that the options give."""
    found = dict(options)
    listed, path, query, on = (found.pop(name) for name in ("listed", "path", "query", "on"))
    if sum(map(bool, (listed, path, query))) > 1:
        raise click.UsageError("partitions come from one of --partition, --file and --query")
    if found["args"] is not None:
        found["args"] = base.arguments(found["args"])
    priority = found["priority"] or ""
    found["priority"] = int(priority) if priority.isascii() and priority.isdigit() else priority or None
    found["partitions"] = _of_query(query, on) if query else _of_file(path) if path else list(listed) or None
    return given(**found)


def _of_file(path: str) -> list[str]:
    """The lines of a file that are not empty."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise click.BadParameter(f"{path} cannot be read: {reason}", param_hint="--file") from None
    return _some((line.strip() for line in text.splitlines()), "--file")


def _of_query(query: str, on: str) -> list[str]:
    """The first column of what a query reads, which may change nothing."""
    import psycopg  # a command for the API needs no driver

    from dataloader.queue import db

    settings = config.load()
    dsn = (settings.target_dsn if on == "target" else None) or base.dsn(settings)
    try:
        with db.connect(dsn, name="dl-cli", schema=settings.pg_schema_queue, statement_timeout=_QUERY_SEC) as conn:
            conn.read_only = True
            with conn.transaction(), conn.pipeline():  # in which PostgreSQL takes one statement alone
                rows = conn.execute(query.encode()).fetchmany(MOST + 1)
    except psycopg.Error as e:
        words = " ".join(str(e).split())
        raise click.BadParameter(
            f"should be one SELECT that the {on} can read: {words}", param_hint="--query"
        ) from None
    return _some((str(row[0]) for row in rows if row[0] is not None), "--query")


def _some(found: Iterable[str], option: str) -> list[str]:
    names = [name for name in found if name]
    if not names:
        raise click.BadParameter("there is no partition in it", param_hint=option)
    return names


def _name(task: str, words: dict[str, Any]) -> str:
    """The task and its range; of a list the task and the time."""
    if "since" in words and "until" in words:
        return f"{task}:{words['since']}:{words['until']}"
    return f"{task}:{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
