"""Commands that show the farm: jobs, queues, ps, tasks, predict, top, completion; tables of queues and workers."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, tzinfo
from typing import Any
from uuid import UUID

import click
from click.shell_completion import get_completion_class
from rich.console import Group
from rich.live import Live
from rich.text import Text

from dataloader import ops
from dataloader.cli import base, made, screen
from dataloader.cli.connection import Reached, reaching
from dataloader.client import Unavailable
from dataloader.client.farm import Farm
from dataloader.model.jobs import JobPrediction, QueuePrediction
from dataloader.model.queues import Overview, Queue, Total
from dataloader.queue.reports import predictions
from dataloader.queue.reports.words import COUNTED, count, figure, percent

QUEUE_TITLES = ("queue", "length", "fresh", "retries", "scheduled", "busy", "dead", "lag", "workers", "")
commands = base.Group()


made.add(commands, "jobs", "farm")


@commands.command(examples=["dataloader queues"])
@reaching
def queues(reached: Reached) -> None:
    """List the queues: what waits, runs and has failed, and for how long the oldest due job has waited."""
    overview = reached.farm.overview()
    reached.answer(overview, lambda: queue_table(overview))


@commands.command(examples=["dataloader predict etl.default", f"dataloader predict {base.EXAMPLE_ID}"])
@click.argument("what", metavar="JOB_ID|QUEUE")
@reaching
def predict(reached: Reached, what: str) -> None:
    """Say when a job will end, or all work that is due in a queue now, with the range of that."""
    prediction: JobPrediction | QueuePrediction
    try:
        prediction = reached.farm.predict(UUID(what))
    except ValueError:  # it is the name of a queue
        reached.require(queue=what)
        prediction = reached.farm.predict_queue(what)
    reached.answer(prediction, lambda: screen.plain(ending(prediction, reached.zone), lines=True))


def ending(prediction: JobPrediction | QueuePrediction, zone: tzinfo) -> str:
    """A prediction in words, and how right the last ones were."""
    of_job = prediction if isinstance(prediction, JobPrediction) else None
    subject = f"job {of_job.job_id}" if of_job else f"the work due now in {prediction.queue}"
    if prediction.ends_at is None:
        reason = predictions.REASONS.get(prediction.reason or "", f"The reason is {prediction.reason}.")
        return f"when {subject} ends is not known. {reason}"
    words = f"{subject} ends about {screen.clock(prediction.ends_at, zone)}, "
    words += f"between {screen.clock(prediction.earliest, zone)} and {screen.clock(prediction.latest, zone)}"
    if of_job and of_job.deadline:
        words += f"; its deadline {'is missed then' if of_job.is_late else 'is'}: {screen.clock(of_job.deadline, zone)}"
    if prediction.accuracy.predictions:
        words += f"\nof the last day {prediction.accuracy.predictions} predictions were off by"
        words += f" {percent(prediction.accuracy.error)} in the median"
    return words


@commands.command(examples=["dataloader top --every 5"])
@click.option("--every", type=base.Number(0.2, 3600), default=2.0, show_default=True, help="seconds")
@click.option("--once", is_flag=True, help="show the screen once, then end")
@reaching
def top(reached: Reached, every: float, once: bool) -> None:
    """Watch the farm: queues, and workers with what they run; q leaves."""
    farm = reached.farm
    if reached.as_json:
        reached.print_json({"overview": farm.overview(), "workers": farm.workers()})
        return
    if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        screen.show(_picture(farm, reached.zone))
        return
    drawn: Any = Text(f"asking {farm.url}")
    with (
        suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(drawn, console=screen.console(), screen=True, auto_refresh=False) as live,
    ):
        key = ""
        while key not in ("q", "Q", "\x03", "\x04"):
            try:
                drawn = _picture(farm, reached.zone)
            except Unavailable as e:
                text = f"{screen.clock(datetime.now(UTC), reached.zone)} {screen.plain(str(e))}; trying again"
                rest = drawn.renderables[1:] if isinstance(drawn, Group) else ()
                drawn = Group(Text(text, style="red"), *rest)
            live.update(drawn, refresh=True)
            key = pressed(every)


def _picture(farm: Farm, zone: tzinfo) -> Group:
    overview, workers = farm.overview(), [worker for worker in farm.workers() if worker.state != "dead"]
    workers.sort(key=lambda worker: (worker.job_id is None, worker.queue))  # those with a job first
    worker_table = screen.listing(ops.load()["workers"].columns, workers)
    return Group(Text(screen.clock(overview.at, zone), style="bold"), "", queue_table(overview), "", worker_table)


@contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits some seconds for a key without Enter."""
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def pressed(within: float) -> str:
        if not select.select([number], [], [], within)[0]:
            return ""
        return os.read(number, 1).decode("ascii", "replace") or "q"  # the terminal is gone

    try:
        tty.setcbreak(number)
        yield pressed
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


@commands.command(examples=['eval "$(dataloader completion bash)"'])
@click.argument("shell", type=base.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete our commands: eval "$(dataloader completion bash)"."""
    from dataloader.cli.main import main

    completion_of: Any = get_completion_class(shell)
    click.echo(completion_of(main, {}, "dataloader", "_DATALOADER_COMPLETE").source())


def queue_table(overview: Overview) -> Any:
    queues: list[Queue | Total] = [*overview.queues]
    queues += [overview.total] if len(overview.queues) != 1 else []
    rows = (_queue_row(queue, overview.at) for queue in queues)
    return screen.table(QUEUE_TITLES, rows, QUEUE_TITLES[1:9], QUEUE_TITLES[9:])


def _queue_row(queue: Queue | Total, now: datetime) -> Sequence[object]:
    remarks = []
    if queue.keys is not None:
        remarks.append(f"{figure(queue.keys, queue.counted_at)} keys")
    if queue.paused_at:
        remarks.append(f"paused {screen.ago(queue.paused_at, now)} by {screen.short(queue.paused_by, 60)}")
    if queue.max_length is not None:
        remarks.append(f"at most {queue.max_length:,}")
    return (
        Text("all", style="bold") if queue.queue is None else screen.short(queue.queue, 60),
        count(queue.length, queue.length_is_exact, queue.counted_at),  # ~: counted before, +: or more
        count(queue.fresh, queue.length < COUNTED, queue.counted_at),
        figure(queue.retries, queue.counted_at),
        figure(queue.scheduled, queue.counted_at),
        Text(f"{queue.busy:,}", style="cyan" if queue.busy else ""),
        Text(figure(queue.dead, queue.counted_at), style="red" if queue.dead else ""),
        screen.duration(queue.lag_sec) if queue.lag_sec else "-",
        Text(str(queue.workers), style="red" if queue.length and not queue.workers else ""),
        Text(", ".join(remarks), style="yellow"),
    )
