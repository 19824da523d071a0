"""Commands about jobs: trigger, wait, status, result, cancel, jobs, job, events."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID, uuid4

import click
from rich.console import Group

from dataloader.cli import base, bulk, journal, names, render, screen, watch
from dataloader.cli.connection import Reached, reaching
from dataloader.client import Started, Unavailable
from dataloader.client.farm import PAGE
from dataloader.client.operations import given
from dataloader.queue.fields import OF_PRODUCER
from dataloader.queue.job import ON_FAILURE, STATUSES

F = TypeVar("F", bound=Callable[..., Any])
QUEUE = "etl.default"  # of a job for which none is named
_SPAN = re.compile(r"(\d+(?:\.\d+)?) ?(s|sec|m|min|h|d)")
_UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


def _fields_of_producer(command: F) -> F:
    """An option for each field that a producer may set, but for those that have one of another shape."""
    for field in reversed(OF_PRODUCER):
        if field.name not in ("task", "queue", "lock_key", "args", "available_at"):
            if field.type == "text[]":  # one after the other: --limit a --limit b
                command = click.option(
                    f"--{field.name.removesuffix('s')}", field.name, multiple=True, callback=_listed, help=field.text
                )(command)
                continue
            kind = {"int": int, "float8": float}.get(field.type, str)
            command = click.option(f"--{field.name.replace('_', '-')}", type=kind, help=field.text)(command)
    failure = click.option(
        "--on-parent-failure",
        type=base.Choice(ON_FAILURE),
        help="what comes of the job when one of these does not succeed; default: cancel",
    )
    return click.option("--depends-on", multiple=True, metavar="JOB", help="a job that ends before; again for more")(
        failure(command)
    )


def _listed(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[str] | None:
    return list(values) or None


@click.group(cls=base.Group)
def commands() -> None:
    """About jobs."""


@commands.command(
    examples=[
        "dataloader trigger noop --args '{\"sleep1\": 1}' --wait",
        "dataloader trigger load.csv -q etl.default --lock-key countries --args @countries.json",
    ]
)
@click.argument("task")
@click.option("--queue", "-q", help=f"default: {QUEUE}")
@click.option("--lock-key", help="jobs of one key never run at the same time; default: the task's name")
@click.option(
    "--args",
    "args_json",
    default="{}",
    show_default=True,
    help="the pipeline's arguments, a JSON object; @FILE reads a file, @- stdin",
)
@click.option("--at", "available_at", metavar="TIME", help="not before then: 2026-01-31T06:30:00+03:00")
@_fields_of_producer
@click.option("--wait", "waits", is_flag=True, help="wait for the job's end; the exit status is that of `wait`")
@click.option("--timeout", type=float, help="with --wait: stop waiting after so many seconds; exit status 13")
@click.option("--result", "only_result", is_flag=True, help="with --wait: print only what the pipeline has returned")
@names.may_be_new
@reaching
def trigger(
    reached: Reached,
    task: str,
    is_new: bool,
    args_json: str,
    waits: bool,
    timeout: float | None,
    only_result: bool,
    **fields: Any,
) -> None:
    """Start a job and print its id and status."""
    if timeout is not None and not waits:
        raise click.UsageError("--timeout is for --wait; how long a run may take says --timeout-sec")
    if only_result and not waits:
        raise click.UsageError("--result is for --wait; of a job that has ended `dataloader result JOB` prints it")
    fields["lock_key"] = fields["lock_key"] or task
    fields["depends_on"] = fields["depends_on"] or None
    fields["idempotency_key"] = fields["idempotency_key"] or f"cli-{uuid4()}"
    args = arguments(args_json)
    names.require(reached, is_new, queue=fields["queue"], task=task)
    started = _triggered(reached, task, args, fields | {"queue": fields["queue"] or QUEUE})
    if not waits:
        reached.print_json(started.document)
        return
    click.echo(f"dataloader: job {started.job_id}", err=True)
    sys.exit(watch.to_its_end(reached, started.job_id, timeout, watch.tell_result if only_result else watch.tell_end))


@commands.command(examples=[f"dataloader wait {base.EXAMPLE_ID} --timeout 3600"])
@click.argument("job_id", type=base.JOB_ID)
@click.option("--timeout", type=float, help="stop waiting after so many seconds; exit status 13")
@reaching
def wait(reached: Reached, job_id: UUID, timeout: float | None) -> None:
    """Wait for a job's end.

    Exit status: 0 succeeded, 10 failed, 11 canceled, 12 lost, 13 not within --timeout, 130 after Ctrl-C, 1 when it
    cannot be found out.
    """
    sys.exit(watch.to_its_end(reached, job_id, timeout))


@commands.command(examples=[f"dataloader status {base.EXAMPLE_ID}"])
@click.argument("job_id", type=base.JOB_ID)
@reaching
def status(reached: Reached, job_id: UUID) -> None:
    """Print a job's status."""
    reached.print_json(reached.farm.status(job_id))


@commands.command(examples=[f"dataloader result {base.EXAMPLE_ID}"])
@click.argument("job_id", type=base.JOB_ID)
@reaching
def result(reached: Reached, job_id: UUID) -> None:
    """Print what a job's pipeline has returned, as JSON; null before the job has succeeded."""
    reached.print_json(reached.farm.result(job_id))


@commands.command(
    examples=[
        f"dataloader cancel {base.EXAMPLE_ID}",
        f"dataloader cancel {base.EXAMPLE_ID} --force",
        "dataloader cancel --matching 'task:load.orders status:queued'",
    ]
)
@click.argument("job_id", type=base.JOB_ID, required=False)
@click.option("--force", is_flag=True, help="do not wait for a safe point: interrupt the run, then kill it")
@bulk.matching("cancelled")
@reaching
def cancel(reached: Reached, job_id: UUID | None, force: bool, **many: Any) -> None:
    """Cancel a job: a queued one at once, a running one at its next safe point."""
    if bulk.is_for_many(many, job_id is not None):
        if force:
            raise click.UsageError("--force is for one job, not for those of --matching")
        bulk.order(reached, "cancel", **many)
        return
    if job_id is None:
        raise click.UsageError("name a job, or jobs by --matching")
    reached.print_json(reached.farm.cancel(job_id, force=force))


@commands.command(examples=["dataloader jobs -q etl.default --status dead --since 1d"])
@click.option("--queue", "-q")
@click.option("--task")
@click.option("--status", type=base.Choice(STATUSES))
@click.option("--lock-key")
@click.option("--partition-key")
@click.option("--producer")
@click.option("--consumer-group")
@click.option("--error-group", metavar="TEXT", help="only jobs of this group, as `dataloader errors` has it")
@click.option("--since", metavar="TIME", help="only jobs that changed since then: 2h (min, h, d) ago, or a time")
@click.option("--until", metavar="TIME", help="only jobs that changed before then")
@click.option("--sort", type=base.Choice(["changed", "key"]), default="changed", show_default=True)
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True)
@click.option("--all", "has_no_limit", is_flag=True, help="show all jobs, without a limit")
@click.option("--search", "-s", "q", metavar="TEXT", help='as in the dashboard: "load args.date:2024-05-01"')
@click.option("--tally", is_flag=True, help="print how many jobs there are of each kind, and no job")
@reaching
def jobs(
    reached: Reached, since: str | None, until: str | None, limit: int, has_no_limit: bool, tally: bool, **filters: Any
) -> None:
    """List jobs, the newest change first."""
    filters |= {"since": instant("--since", since, reached.zone), "until": instant("--until", until, reached.zone)}
    if tally:
        del filters["sort"]
        bulk.tell_tally(reached, given(**filters))
        return
    found = list(reached.farm.jobs(limit=None if has_no_limit else limit, **given(**filters)))
    if reached.as_json:
        reached.print_json({"jobs": found})
    else:
        screen.show(render.listed(found, datetime.now(UTC)))
    if not found:
        names.hint(reached, queue=filters["queue"], task=filters["task"])
    if len(found) == limit and not (has_no_limit or reached.as_json):
        click.echo(f"dataloader: these are {limit}, there may be more: --limit N or --all", err=True)


@commands.command(examples=[f"dataloader job {base.EXAMPLE_ID}"])
@click.argument("job_id", type=base.JOB_ID)
@reaching
def job(reached: Reached, job_id: UUID) -> None:
    """Show all that is known of a job: fields, arguments, attempts, journal."""
    found, events = reached.farm.job(job_id), journal.whole(reached.farm, job_id)
    if reached.as_json:
        runs = [attempt._asdict() for attempt in journal.attempts(events)]
        reached.print_json({"job": found, "attempts": runs, "events": events})
        return
    screen.show(Group(*render.whole(found, events, reached.zone)))


@commands.command(
    examples=[
        f"dataloader events {base.EXAMPLE_ID} --follow",
        "dataloader events -q etl.default --limit 100",
    ]
)
@click.argument("job_id", type=base.JOB_ID, required=False)
@click.option("--queue", "-q", help="show the events of all jobs of this queue")
@click.option("--follow", is_flag=True, help="show new events as they come, until Ctrl-C or the job's end")
@click.option(
    "--limit", type=click.IntRange(1, PAGE), default=50, show_default=True, help="how many of the newest events to show"
)
@reaching
def events(reached: Reached, job_id: UUID | None, queue: str | None, follow: bool, limit: int) -> None:
    """Show the journal of a job, or of the farm; with --json and --follow a line for each event."""
    if job_id and queue:
        raise click.UsageError("a job's journal is of one queue: leave --queue out")
    found = journal.whole(reached.farm, job_id)[-limit:] if job_id else reached.farm.events(queue=queue, limit=limit)
    if not found:
        names.hint(reached, queue=queue)
    if reached.as_json and not follow:
        reached.print_json({"events": found})
        return
    try:
        for event in journal.followed(reached.farm, job_id, queue, found) if follow else iter(found):
            if reached.as_json:
                reached.print_json(event, None)
            else:
                click.echo(render.line(event, reached.zone))
    except KeyboardInterrupt:
        return


def _triggered(reached: Reached, task: str, args: Any, fields: dict[str, Any]) -> Started:
    try:
        return reached.farm.trigger(task, args=args, **fields)
    except Unavailable as e:
        if e.is_open:
            again = shlex.join(["--idempotency-key", fields["idempotency_key"]])
            e.detail += f"\nwhether the job was added is not known; sent again with {again} it is added once"
        raise


def arguments(text: str) -> Any:
    """The JSON object of --args; raises click.BadParameter."""
    try:
        if text.startswith("@"):
            text = sys.stdin.read() if text == "@-" else Path(text[1:]).read_text("utf-8")
        args = json.loads(text)
    except OSError as e:
        raise click.BadParameter(f"{text[1:]} cannot be read: {e.strerror}", param_hint="--args") from None
    except (ValueError, RecursionError) as e:
        raise click.BadParameter(f"should be a JSON object: {e}", param_hint="--args") from None
    if not isinstance(args, dict):
        raise click.BadParameter("should be a JSON object", param_hint="--args")
    return args


def instant(name: str, text: str | None, zone: tzinfo) -> datetime | None:
    """A time, or so long ago; without an offset it is in the zone of the people."""
    if text is None:
        return None
    if span := _SPAN.fullmatch(text.strip()):
        return datetime.now(UTC) - timedelta(seconds=float(span[1]) * _UNITS[span[2]])
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(
            "should be 15min, 2h, 3d or a time such as 2026-01-31T06:30", param_hint=name
        ) from None
    return at if at.tzinfo else at.replace(tzinfo=zone)
