"""Commands about one job: trigger, again, wait, status, result, job, events, logs."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar
from uuid import UUID, uuid4

import click
from rich.console import Group

from dataloader.cli import base, screen, watch
from dataloader.cli.connection import Reached, may_be_new, reaching
from dataloader.client import Unavailable
from dataloader.client.farm import Farm
from dataloader.model.jobs import Event, LogLine, Triggered
from dataloader.queue.fields import OF_PRODUCER
from dataloader.queue.job import ON_FAILURE

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
QUEUE = "etl.default"  # of a job for which none is named
PAGE = 200  # events of one answer
MOST = 10_000  # events read of one job's journal
FOLLOW_SEC = 1.0
LATE_SEC = 3.0  # the longest delay between the commits of two events in the wrong order of ids


def _fields_of_producer(command: F) -> F:
    """An option for each field that a producer may set, but for those that have one of another shape."""
    for field in reversed(OF_PRODUCER):
        if field.name in ("task", "queue", "lock_key", "args", "available_at"):
            continue
        flag = f"--{field.name.replace('_', '-')}"
        options: dict[str, Any] = {"type": {"int": int, "float8": float}.get(field.type, str)}
        if field.type == "text[]":  # one after the other: --limit a --limit b
            flag, options = flag.removesuffix("s"), {"multiple": True}
        command = click.option(flag, field.name, help=field.text, **options)(command)
    text = "what comes of the job when one of these does not succeed; default: cancel"
    command = click.option("--on-parent-failure", type=base.Choice(ON_FAILURE), help=text)(command)
    text = "a job that must end before; repeat it for more"
    return click.option("--depends-on", multiple=True, metavar="JOB", help=text)(command)


commands = base.Group()


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
@may_be_new
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
    if (timeout is not None or only_result) and not waits:
        other = "--timeout-sec limits a run" if timeout is not None else "`dataloader result JOB` prints that of a job"
        raise click.UsageError(f"{'--result' if only_result else '--timeout'} is for --wait; {other}")
    key = fields.pop("idempotency_key") or f"cli-{uuid4()}"
    args = base.arguments(args_json)
    reached.require(is_new, queue=fields["queue"], task=task)
    named = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items() if value != ()}
    try:
        started = reached.farm.trigger(task, args=args, idempotency_key=key, **base.given(**named))
    except Unavailable as e:
        if e.is_open:
            again = shlex.join(["--idempotency-key", key])
            e.detail += f"\nwhether the job was added is not known; sent again with {again} it is added once"
        raise
    _started(reached, started, waits, timeout, watch.print_result if only_result else watch.print_end)


def _started(
    reached: Reached, started: Triggered, waits: bool, timeout: float | None = None, show_end: Any = watch.print_end
) -> None:
    if not waits:
        reached.print_json(started)
        return
    click.echo(f"dataloader: job {started.job_id}", err=True)
    sys.exit(watch.to_its_end(reached, started.job_id, timeout, show_end))


@commands.command(examples=(f"dataloader again {base.EXAMPLE_ID} --arg day=2026-01-31 --arg limit=10",))
@click.argument("job_id", type=click.UUID)
@click.option(
    "--arg", "pairs", multiple=True, metavar="NAME=VALUE", help="an arg to replace, JSON or text; repeat it for more"
)
@click.option("--args", "args_json", default="{}", help="args to replace, a JSON object; @FILE reads a file, @- stdin")
@click.option("--without", multiple=True, metavar="NAME", help="an arg to leave out; repeat it for more")
@click.option("--queue", "-q", help="default: the job's")
@click.option("--lock-key", help="default: the job's")
@click.option("--priority", type=int, help="default: the job's")
@click.option("--wait", "waits", is_flag=True, help="wait for the new job's end; the exit status is that of `wait`")
@reaching
def again(reached: Reached, job_id: UUID, pairs: tuple[str, ...], args_json: str, waits: bool, **fields: Any) -> None:
    """Add a job with the fields of one that has ended, with changes; args that are masked stay as they are."""
    args = base.arguments(args_json) | dict(map(base.pair, pairs))
    _started(reached, reached.farm.again(job_id, args=args, **base.given(**fields)), waits)


@commands.command(examples=[f"dataloader wait {base.EXAMPLE_ID} --timeout 3600"])
@click.argument("job_id", type=click.UUID)
@click.option("--timeout", type=float, help="stop waiting after so many seconds; exit status 13")
@reaching
def wait(reached: Reached, job_id: UUID, timeout: float | None) -> None:
    """Wait for a job's end.

    Exit status: 0 succeeded, 10 failed, 11 canceled, 12 lost, 13 not within --timeout, 130 after Ctrl-C, 1 when it
    cannot be found out.
    """
    sys.exit(watch.to_its_end(reached, job_id, timeout))


@commands.command(examples=[f"dataloader status {base.EXAMPLE_ID}"])
@click.argument("job_id", type=click.UUID)
@reaching
def status(reached: Reached, job_id: UUID) -> None:
    """Print a job's status."""
    reached.print_json(reached.farm.status(job_id))


@commands.command(examples=[f"dataloader result {base.EXAMPLE_ID}"])
@click.argument("job_id", type=click.UUID)
@reaching
def result(reached: Reached, job_id: UUID) -> None:
    """Print what a job's pipeline has returned, as JSON; null before the job has succeeded."""
    reached.print_json(reached.farm.result(job_id))


@commands.command(examples=[f"dataloader job {base.EXAMPLE_ID}"])
@click.argument("job_id", type=click.UUID)
@reaching
def job(reached: Reached, job_id: UUID) -> None:
    """Show all that is known of a job: fields, arguments, attempts, journal."""
    details, events = reached.farm.job(job_id), journal(reached.farm, job_id)
    runs = [attempt._asdict() for attempt in watch.attempts(events)]
    whole = {"job": details, "attempts": runs, "events": events}
    reached.answer(whole, lambda: Group(*watch.whole(details, events, reached.zone)))


def journal(farm: Farm, job_id: UUID) -> list[Event]:
    return list(farm.job_events(job_id, limit=MOST))


@commands.command(
    examples=[f"dataloader events {base.EXAMPLE_ID} --follow", "dataloader events -q etl.default --limit 100"]
)
@click.argument("job_id", type=click.UUID, required=False)
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
    farm = reached.farm
    rows: Sequence[Event] = journal(farm, job_id)[-limit:] if job_id else farm.events(queue=queue, limit=limit)
    if not rows:
        reached.hint(queue=queue)
    if reached.as_json and not follow:
        reached.print_json({"events": rows})
        return
    try:
        for event in rows if not follow else _new_events(farm, job_id, queue, rows):
            reached.answer_line(event, watch.line(event, reached.zone))
    except KeyboardInterrupt:
        return


def _new_events(farm: Farm, job_id: UUID | None, queue: str | None, first: Sequence[Event]) -> Iterator[Event]:
    """The events in `first`, and new ones.

    PostgreSQL assigns ids before the commit, so a smaller id may appear later: each page begins LATE_SEC in the past.
    """
    yield from first
    seen_at = {event.event_id: time.monotonic() for event in first}
    after = first[0].event_id - 1 if first else 0
    if not first and not job_id:  # the last event of the queue may be far back: begin at the farm's newest
        after = max((event.event_id for event in farm.events(limit=1)), default=0)

    def news() -> Iterator[Event]:
        nonlocal after, seen_at
        now = time.monotonic()
        after = max([after, *(number for number, at in seen_at.items() if now - at > LATE_SEC)])
        seen_at = {number: at for number, at in seen_at.items() if number > after}
        for event in farm.job_events(job_id, after=after) if job_id else _pages(farm, queue, after):
            if event.event_id not in seen_at:
                seen_at[event.event_id] = now
                yield event

    yield from _followed(farm, job_id, news)


def _pages(farm: Farm, queue: str | None, after: int) -> Iterator[Event]:
    while page := farm.events(after=after, queue=queue, limit=PAGE):
        yield from page
        after = page[-1].event_id
        if len(page) < PAGE:
            return


def _followed(farm: Farm, job_id: UUID | None, news: Callable[[], Iterable[R]]) -> Iterator[R]:
    """News as they come, until the job has ended; over a farm that is away for a while."""
    while True:
        try:
            is_over = job_id is not None and farm.status(job_id).is_final  # read before the news, to miss no last news
            yield from news()
            if is_over:
                return
        except Unavailable as e:
            click.echo(f"dataloader: {screen.plain(str(e))}; trying again", err=True)
        time.sleep(FOLLOW_SEC)


@commands.command(examples=(f"dataloader logs -f {base.EXAMPLE_ID}",))
@click.argument("job_id", type=click.UUID)
@click.option("--follow", "-f", is_flag=True, help="show new lines as they come, until Ctrl-C or the job's end")
@click.option("--attempt", type=click.IntRange(1), help="only the lines of this attempt")
@reaching
def logs(reached: Reached, job_id: UUID, follow: bool, attempt: int | None) -> None:
    """Show what the runs of a job have written: its logging, its prints, the output of its programs.

    With --json a line of JSON for each line.
    """
    run, after = 0, None

    def news() -> Iterator[LogLine]:
        nonlocal after
        for line in reached.farm.logs(job_id, attempt=attempt, after=after):
            after = line.place
            yield line

    try:
        for line in _followed(reached.farm, job_id, news) if follow else news():
            if line.claim != run and attempt is None and not reached.as_json:
                click.echo(f"--- attempt {line.attempt}")
            run = line.claim
            reached.answer_line(line, watch.log_line(line, reached.zone))
    except KeyboardInterrupt:
        return
