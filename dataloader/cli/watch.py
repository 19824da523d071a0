"""A job watched until its end: a bar in a terminal, else a line for each change; and the exit status by its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from uuid import UUID

import click
from rich.console import Console
from rich.text import Text

from dataloader.cli import screen
from dataloader.cli.connection import Reached
from dataloader.client import WaitTimeout
from dataloader.model.jobs import Status
from dataloader.model.reading import written

# Exit statuses by the job's end; 1 and 2 stand for a command that failed.
EXITS = {"succeeded": 0, "failed": 10, "canceled": 11, "lost": 12}
EXIT_TIMEOUT = 13
EXIT_INTERRUPTED = 130
LINE_SEC = 2.0  # between two lines of progress


def print_end(reached: Reached, job: Status) -> None:
    """Print the end of the job to stdout."""
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
                failure = (job.attempt, job.error)  # of a run that is tried again: told once
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
    return Text.assemble(f"job {job.job_id} ", screen.status(job.status), _in_all(job))


def waits_for(job: Status, now: datetime) -> str:
    """The reason why a queued job does not run yet, in a sentence; "" without one."""
    return screen.reason(written(job.waiting_for), now)


def doing(job: Status, now: datetime) -> str:
    """The state of the job in a few words."""
    if job.status == "queued" and (why_not := waits_for(job, now)):
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


def _in_all(job: Status) -> str:
    """The duration of the last run, its attempt and the error."""
    text = "" if job.run_sec is None else f" after {screen.duration(job.run_sec)}"
    if job.attempt > 1:
        text += f", attempt {job.attempt} of {job.max_attempts}"
        if job.started_at and job.finished_at:
            since = (job.finished_at - job.started_at).total_seconds()
            text += f", {screen.duration(since)} after its first start"
    return text + (f"\n{screen.plain(job.error, lines=True)}" if job.error else "")
