"""Commands about backfills: `backfill TASK` adds one.

Besides: backfill list, show, wait, partitions, set, pause, resume, cancel, retry, remove.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.text import Text

from dataloader import config
from dataloader.cli import base, names, screen
from dataloader.cli.connection import Reached, reaching
from dataloader.cli.jobs import arguments
from dataloader.client import Backfill
from dataloader.client.operations import given
from dataloader.queue.fields import OF_PRODUCER
from dataloader.queue.plans.partitions import MOST, STATUSES

F = TypeVar("F", bound=Callable[..., Any])
_OF_JOB = ("max_attempts", "lease_ttl_sec", "timeout_sec", "partition_key", "affinity_key")
_LOOK_SEC = 1.0  # between two looks of `wait`
_QUERY_SEC = 60.0
EXIT_DEAD, EXIT_CANCELED = 10, 11  # of `wait`, as of a job's


@click.group(cls=base.Group)
def commands() -> None:
    """About backfills."""


@commands.group(default="add", examples=["dataloader backfill load.csv --from 2019-01-01 --to 2026-11-01 --step day"])
def backfill() -> None:
    """Jobs of one task for many partitions (docs/backfills.md): `backfill TASK --from .. --to .. --step ..`."""


def _words(command: F) -> F:
    """An option for each word of a backfill."""
    for field in reversed([field for field in OF_PRODUCER if field.name in _OF_JOB]):
        kind = int if field.type == "int" else str
        command = click.option(f"--{field.name.replace('_', '-')}", type=kind, help=field.text)(command)
    for option in (
        click.option("--limit", "limits", multiple=True, help="another limit that its jobs count for; again for more"),
        click.option("--code-version", help="for --skip-done: what another version has done is not done"),
        click.option("--skip-done", is_flag=True, help="leave out what a backfill has done with the same args"),
        click.option("--max-running", type=int, help="so many of its jobs run at once; default: any number"),
        click.option("--priority", help="a number, or a template that becomes one; default: 200, behind other jobs"),
        click.option("--lock-key", help="default: {{ task }}:{{ partition }}"),
        click.option("--args", "args_json", help="a JSON object, as --args of trigger; {{ partition }} and the like"),
        click.option("--queue", "-q", help="default: etl.default"),
        click.option("--on", type=base.Choice(["target", "queue"]), default="target", help="the database of --query"),
        click.option("--query", metavar="SQL", help="the first column of what this reads: a partition each"),
        click.option("--file", "path", metavar="FILE", help="a partition a line; - is stdin"),
        click.option("--partition", "listed", multiple=True, help="a partition; again for more"),
        click.option("--step", help="of the range: day, 6 hours, week, month; of whole numbers a number"),
        click.option("--to", "until", metavar="LAST", help="the last partition begins here, or before"),
        click.option("--from", "since", metavar="FIRST", help="the first partition: 2019-01-31, 2019-01-31T06:00, 0"),
    ):
        command = option(command)
    return command


@backfill.command(
    examples=[
        "dataloader backfill add load.csv --from 2019-01-01 --to 2026-11-01 --step day",
        "dataloader backfill add load.csv --file days.txt --max-running 4 --dry-run",
    ]
)
@click.argument("task")
@click.option("--name", help="default: the task and the range")
@_words
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
        _tell(reached, reached.farm.add_backfill(name, task, **words))


@backfill.command(name="list", examples=["dataloader backfill list"])
@reaching
def list_backfills(reached: Reached) -> None:
    """List the newest backfills: how far they are, what is wrong with them."""
    found = reached.farm.backfills()
    if reached.as_json:
        reached.print_json({"backfills": [each.document for each in found]})
    else:
        screen.show(backfill_table(found))


@backfill.command(examples=["dataloader backfill show history"])
@click.argument("name")
@reaching
def show(reached: Reached, name: str) -> None:
    """Show a backfill: its progress, when it will be done, its partitions by status."""
    _tell(reached, reached.farm.backfill(name))


@backfill.command(examples=["dataloader backfill wait history"])
@click.argument("name")
@reaching
def wait(reached: Reached, name: str) -> None:
    """Wait for a backfill's end, with its progress on stderr.

    Exit status: 0 each partition is done, 10 some jobs are dead or canceled, 11 the backfill is canceled.
    """
    found, told = reached.farm.backfill(name), ""
    while found.state not in ("done", "canceled"):
        if (line := progress(found)) != told:
            click.echo(f"dataloader: {line}", err=True)
        told = line
        time.sleep(_LOOK_SEC)
        found = reached.farm.backfill(name)
    _tell(reached, found)
    undone = found.total - found.counts.get("succeeded", 0) - found.counts.get("skipped", 0)
    sys.exit(EXIT_CANCELED if found.state == "canceled" else EXIT_DEAD if undone else 0)


@backfill.command(examples=["dataloader backfill partitions history --status failed"])
@click.argument("name")
@click.option("--status", type=base.Choice(STATUSES), help="only these")
@reaching
def partitions(reached: Reached, name: str, status: str | None) -> None:
    """List the partitions of a backfill, each with its job."""
    found = reached.farm.partitions(name, status=status)
    if reached.as_json:
        reached.print_json({"partitions": [each.document for each in found]})
        return
    rows = ((each.partition, screen.status(each.status), each.job_id) for each in found)
    screen.show(screen.table(("partition", "status", "job"), rows))


@backfill.command(name="set", examples=["dataloader backfill set history --max-running 8"])
@click.argument("name")
@click.option("--max-running", required=True, metavar="N", help="so many of its jobs run at once; none: any number")
@reaching
def set_backfill(reached: Reached, name: str, max_running: str) -> None:
    """Change how many jobs of a backfill run at once, from now on; those that run go on."""
    if max_running != "none" and not (max_running.isascii() and max_running.isdigit()):
        raise click.BadParameter("should be a whole number from 1 on, or none", param_hint="--max-running")
    _tell(reached, reached.farm.set_backfill(name, None if max_running == "none" else int(max_running)))


@backfill.command(examples=["dataloader backfill pause history"])
@click.argument("name")
@reaching
def pause(reached: Reached, name: str) -> None:
    """Make and start no jobs of a backfill until it is resumed; those that run go on."""
    _tell(reached, reached.farm.pause_backfill(name))


@backfill.command(examples=["dataloader backfill resume history"])
@click.argument("name")
@reaching
def resume(reached: Reached, name: str) -> None:
    """End a backfill's pause."""
    _tell(reached, reached.farm.resume_backfill(name))


@backfill.command(examples=["dataloader backfill cancel history"])
@click.argument("name")
@reaching
def cancel(reached: Reached, name: str) -> None:
    """Start no more jobs of a backfill, and cancel those that have not ended."""
    _tell(reached, reached.farm.cancel_backfill(name))


@backfill.command(examples=["dataloader backfill retry history"])
@click.argument("name")
@reaching
def retry(reached: Reached, name: str) -> None:
    """Queue the failed and lost jobs of a backfill again."""
    count = reached.farm.retry_backfill(name)
    if reached.as_json:
        reached.print_json({"name": name, "changed": count})
    else:
        click.echo("1 job is queued again" if count == 1 else f"{count:,} jobs are queued again")


@backfill.command(examples=["dataloader backfill remove history"])
@click.argument("name")
@reaching
def remove(reached: Reached, name: str) -> None:
    """Remove a backfill that has ended, with its ledger; its jobs stay."""
    reached.farm.remove_backfill(name)
    if reached.as_json:
        reached.print_json({"name": name, "removed": True})
    else:
        click.echo(f"{screen.plain(name)} is removed; its jobs stay")


def backfill_table(found: Sequence[Backfill]) -> Any:
    """The backfills, each with its progress."""
    titles = ("backfill", "task", "state", "progress", "total", "failed", "left", "")
    rows = (
        (
            screen.short(each.name, 60),
            screen.short(each.task, 40),
            screen.status(each.state),
            screen.bar(each.ended / each.total if each.total else None),
            f"{each.total:,}",
            f"{_dead(each):,}" if _dead(each) else "",
            screen.duration(each.eta_sec),
            Text(screen.short(each.error or "", 200), style="yellow"),
        )
        for each in found
    )
    return screen.table(titles, rows, titles[4:7], loose=titles[7:])


def progress(found: Backfill) -> str:
    """How far a backfill is, on one line."""
    left = f", {screen.duration(found.eta_sec)} left" if found.eta_sec is not None else ""
    bar = screen.bar(found.ended / found.total if found.total else None)
    return f"{bar} {found.ended:,} of {found.total:,} partitions, {found.state}{left}"


def _dead(found: Backfill) -> int:
    return int(found.counts.get("failed", 0)) + int(found.counts.get("lost", 0))


def _tell(reached: Reached, found: Backfill) -> None:
    if reached.as_json:
        reached.print_json(found.document)
        return
    span = f"{found.since} to {found.until}, each {found.step}" if found.step else None
    now = datetime.now(UTC)
    rows: list[tuple[str, object]] = [
        ("backfill", found.name),
        ("task", found.task),
        ("queue", found.queue),
        ("range", span),
        ("progress", progress(found)),
        *((f"  {status}", f"{count:,}") for status, count in found.counts.items() if count),
        ("paused", found.paused_at and f"{screen.ago(found.paused_at, now)} by {found.paused_by}"),
        ("canceled", found.canceled_at and f"{screen.ago(found.canceled_at, now)} by {found.canceled_by}"),
        ("its next jobs cannot be made", found.error),
        ("most running", found.max_running),
        ("args", screen.as_json(found.args, None)),
        ("lock key", found.lock_key),
        ("code version", found.code_version),
    ]
    screen.show(screen.fields((name, value) for name, value in rows if value not in (None, "")))


def _preview(reached: Reached, found: Any) -> None:
    if reached.as_json:
        reached.print_json(found)
        return
    skipped = f", of which {found['skipped']:,} are done already" if found["skipped"] else ""
    click.echo(f"{found['name']} would have {found['total']:,} partitions{skipped}; nothing is changed")
    titles = ("partition", "args", "lock key", "priority")
    rows = (
        (each["partition"], screen.as_json(each["args"], None), each["lock_key"], each["priority"])
        for each in found["samples"]
    )
    screen.show(screen.table(titles, rows, titles[3:]))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The words that the options give."""
    found = dict(options)
    args_json, path, query, on = (found.pop(name) for name in ("args_json", "path", "query", "on"))
    listed, limits, priority = found.pop("listed"), found.pop("limits"), found.pop("priority")
    if sum(map(bool, (listed, path, query))) > 1:
        raise click.UsageError("partitions come from one of --partition, --file and --query")
    if args_json is not None:
        found["args"] = arguments(args_json)
    if priority is not None:
        found["priority"] = int(priority) if priority.isascii() and priority.isdigit() else priority
    found["limits"] = list(limits) or None
    found["skip_done"] = found["skip_done"] or None
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
