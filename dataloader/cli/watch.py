"""A job as text: watched until its end, or all its fields, its runs, its journal, its log.

A job is watched by a bar in a terminal, else by a line for each change; its end gives the exit status.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click
from rich.console import Console
from rich.text import Text

from dataloader.cli import screen
from dataloader.cli.connection import Reached
from dataloader.client import WaitTimeout
from dataloader.model.jobs import Event, FarmEvent, Job, LogLine, Status

if TYPE_CHECKING:
    from dataloader.queue.reports import stats

# Exit statuses by the job's end; 1 and 2 stand for a command that failed.
EXITS = {"succeeded": 0, "failed": 10, "canceled": 11, "lost": 12}
EXIT_TIMEOUT = 13
EXIT_INTERRUPTED = 130
LINE_SEC = 2.0  # between two lines of progress


def print_end(reached: Reached, job: Status) -> None:
    if reached.as_json or not screen.console().is_terminal:
        reached.print_json(job)
    else:
        screen.show(_in_words(job))


def print_result(reached: Reached, job: Status) -> None:
    """Print what the pipeline has returned to stdout; the end of a job that has not succeeded goes to stderr."""
    if job.status == "succeeded":
        reached.print_json(reached.farm.result(job.job_id))
    else:
        click.echo(f"dataloader: {_in_words(job).plain}", err=True)


def to_its_end(
    reached: Reached, job_id: UUID, timeout: float | None, show_end: Callable[[Reached, Status], None] = print_end
) -> int:
    """Watch the job on stderr until its end, then `show_end` that. Returns the exit status, see EXITS."""
    err = screen.console(sys.stderr)
    again = reached.command("wait", job_id)
    shown = None
    try:
        with _as_bar(err) if err.is_terminal else nullcontext(_in_lines()) as draw:

            def show(job: Status) -> None:
                nonlocal shown
                failure = (job.attempt, job.error)  # of a run that is tried again: shown once
                if job.status == "queued" and job.attempt and job.error and failure != shown:
                    shown, tried = failure, f"attempt {job.attempt} of {job.max_attempts}"
                    err.print(f"dataloader: {tried} failed: {screen.short(job.error, 400)}", soft_wrap=True)
                draw(job)

            job = reached.farm.wait(job_id, timeout, show)
    except WaitTimeout as e:
        click.echo(f"dataloader: {screen.plain(e)}; the job goes on. To go on watching: {again}", err=True)
        return EXIT_TIMEOUT
    except KeyboardInterrupt:
        stop = reached.command("cancel", job_id)
        click.echo(f"\ndataloader: the job goes on. To go on watching: {again}; to end it: {stop}", err=True)
        return EXIT_INTERRUPTED
    show_end(reached, job)
    return EXITS.get(job.status, 1)


def _in_words(job: Status) -> Text:
    """The end of a job: the duration of the last run, its attempt and the error."""
    text = "" if job.run_sec is None else f" after {screen.duration(job.run_sec)}"
    if job.attempt > 1:
        text += f", attempt {job.attempt} of {job.max_attempts}"
        if job.started_at and job.finished_at:
            since = (job.finished_at - job.started_at).total_seconds()
            text += f", {screen.duration(since)} after its first start"
    text += f"\n{screen.plain(job.error, lines=True)}" if job.error else ""
    return Text.assemble(f"job {job.job_id} ", screen.status(job.status), text)


def doing(job: Status, now: datetime) -> str:
    if job.status == "queued" and (why_not := screen.reason(job.waiting_for, now)):
        return screen.plain(f"queued. {why_not}")
    words = [job.status]
    if job.status == "running" and job.attempt > 1:
        words.append(f"attempt {job.attempt} of {job.max_attempts}")
    if job.cancel_requested and not job.is_final:
        words.append("asked to stop")
    if reported := screen.progress(job.progress):
        words.append(reported)
    if job.is_final and job.error:
        words.append(screen.short(job.error, 200))
    return ", ".join(words)


@contextmanager
def _as_bar(err: Console) -> Iterator[Callable[[Status], None]]:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(30))
    with Progress(*columns, TaskProgressColumn(), TimeElapsedColumn(), console=err, transient=True) as drawn:
        bar = drawn.add_task("asking", total=None)

        def draw(job: Status) -> None:
            text = screen.short(doing(job, datetime.now(UTC)), max(20, err.width - 55))
            total = None if job.fraction is None else 1.0
            drawn.update(bar, description=text, total=total, completed=job.fraction or 0.0)

        yield draw


def _in_lines() -> Callable[[Status], None]:
    last_status, last_time = "", 0.0

    def draw(job: Status) -> None:
        nonlocal last_status, last_time
        if job.status != last_status or time.monotonic() - last_time >= LINE_SEC:
            last_status, last_time = job.status, time.monotonic()
            click.echo(f"dataloader: {job.job_id} {doing(job, datetime.now(UTC))}", err=True)

    return draw


_RUNS = "run attempt started=started_at took=seconds end peak_memory=peak_mb CPU=cpu_sec worker reason=outcome"
# Fields that the sheet of a job leaves out: they stand below it, or nowhere.
_LEFT_OUT = ("args", "error", "waiting_for", "claims", "backoffs", "blocked_on")


def attempts(events: Sequence[Event]) -> list[stats.Attempt]:
    from dataloader.queue.reports import stats  # not at the top: other questions need no driver

    return stats.attempts(vars(event) for event in events if isinstance(event.payload, dict | None))


def whole(job: Job, events: Sequence[Event], zone: tzinfo) -> Iterator[Any]:
    hidden = [name for name, value in vars(job).items() if value is False]
    yield screen.sheet(job, zone, [*_LEFT_OUT, *hidden])
    if job.waiting_for:
        yield Text("\n" + screen.plain(screen.reason(job.waiting_for, datetime.now(UTC))), style="yellow")
    if job.args:
        yield Text("\nargs", style="bold")
        yield Text(screen.as_json(job.args))
    if job.error:
        yield Text("\nerror", style="bold")
        yield Text(screen.plain(job.error.rstrip(), lines=True), style="red")
    if runs := attempts(events):
        yield Text("\nattempts", style="bold")
        yield screen.listing(_RUNS, [_run(run, zone) for run in runs])
    yield Text("\njournal" + (" (its newest 20)" if len(events) > 20 else ""), style="bold")
    for event in events[-20:]:
        yield Text(line(event, zone))


def _run(run: stats.Attempt, zone: tzinfo) -> dict[str, Any]:
    again = f", requeued by {run.requeued_by}" if run.requeued_by else ""
    begun = Text(screen.clock(run.started_at, zone))
    words = {"attempt": f"{run.attempt}{again}", "started_at": begun, "end": run.end or "running"}
    return run._asdict() | words | {"outcome": outcome(run)}


def outcome(run: stats.Attempt) -> str:
    """The known reasons of a run's end."""
    reason = "" if run.error and run.reason == "error" else run.reason or ""
    signal = f"killed by signal {run.signal}" if run.signal and "signal" not in reason else ""
    status = f"left with exit status {run.exit_status}" if run.exit_status and "status" not in reason else ""
    return "; ".join(part for part in (signal, status, reason, run.error) if part)


def line(event: Event, zone: tzinfo) -> str:
    """An event on one line; one of the farm's journal names its job."""
    job = f"{event.job_id} {screen.plain(event.queue)}" if isinstance(event, FarmEvent) else ""
    words = (screen.clock(event.ts, zone), job, screen.plain(event.kind), _payload(event.payload))
    return " ".join(filter(None, words))


def _payload(payload: Any) -> str:
    """An event's payload on one line: the first line of each value."""
    if not isinstance(payload, dict):
        return "" if payload is None else screen.short(payload, 200)
    texts = {name: value if isinstance(value, str) else screen.as_json(value, None) for name, value in payload.items()}
    return " ".join(f"{screen.plain(name)}={screen.short(text, 120)}" for name, text in texts.items())


def log_line(line: LogLine, zone: tzinfo) -> str:
    """A line of a log, after the number of lines before it that were left out."""
    source = line.level if line.source == "log" else line.source
    text = f"{screen.clock(line.at, zone)} {screen.plain(source):8} {screen.plain(line.text)}"
    if line.left_out:
        return f"... {line.left_out:,} lines were left out: the log is larger than DL_JOB_LOG_KB\n{text}"
    return text
