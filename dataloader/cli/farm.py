"""Commands about the farm: queues, ps, tasks, predict, top, completion; and the tables of queues and workers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime, tzinfo
from typing import Any
from uuid import UUID

import click
from click.shell_completion import get_completion_class
from rich.text import Text

from dataloader.cli import base, names, screen
from dataloader.cli.connection import Reached, reaching
from dataloader.client import JobPrediction, Overview, Queue, QueuePrediction, Task, TaskRuns, Worker
from dataloader.model.kinds import fraction
from dataloader.model.queues import QueueFigures, Total
from dataloader.model.runs import Figures, Spread
from dataloader.ops.types import RangeName
from dataloader.queue.reports import predictions, words
from dataloader.queue.reports.runs import RANGES
from dataloader.queue.reports.stats import COUNTED
from dataloader.queue.reports.words import percent

QUEUE_TITLES = ("queue", "length", "fresh", "retries", "scheduled", "busy", "dead", "lag", "workers", "")
NUMBERS = QUEUE_TITLES[1:9]


@click.group(cls=base.Group)
def commands() -> None:
    """About the farm."""


@commands.command(examples=["dataloader queues"])
@reaching
def queues(reached: Reached) -> None:
    """List the queues: what waits, runs and has failed, and for how long the oldest due job has waited."""
    overview = reached.farm.overview()
    if reached.as_json:
        reached.print_json(overview)
    else:
        screen.show(queue_table(overview))


@commands.command(examples=["dataloader ps"])
@reaching
def ps(reached: Reached) -> None:
    """List the workers of all hosts, and what they run."""
    found = reached.farm.workers()
    if reached.as_json:
        reached.print_json({"workers": found})
    else:
        screen.show(worker_table(found, datetime.now(UTC)))


@commands.command(examples=["dataloader tasks", "dataloader tasks --range 7d", "dataloader tasks load.csv"])
@click.argument("name", required=False)
@click.option(
    "--range", "range_", type=base.Choice(tuple(RANGES)), help="what the runs of this time took  [with NAME: 24h]"
)
@reaching
def tasks(reached: Reached, name: str | None, range_: RangeName | None) -> None:
    """List the tasks, and what a run of each needs of its host: declared by its pipeline, or learned from its runs.

    With --range, what the runs of each took. With NAME, what the runs of this task took.
    """
    if name is not None:
        _show_runs(reached, reached.farm.task_runs(name, range=range_))
        return
    found = reached.farm.tasks(range=range_)
    if reached.as_json:
        reached.print_json({"tasks": found})
    elif range_:
        screen.show(run_table(found))
    else:
        screen.show(task_table(found, datetime.now(UTC)))


def _show_runs(reached: Reached, found: TaskRuns) -> None:
    if reached.as_json:
        reached.print_json(found)
        return
    if not found.is_known:
        click.echo(f"dataloader: no worker has a pipeline {screen.plain(found.task)}, and no run is known", err=True)
    screen.show(runs_table(found))


def runs_table(found: TaskRuns) -> Any:
    """The figures of a task or a queue, beside those of the time before."""
    both = (found.figures, found.before)
    rows: list[tuple[str, ...]] = [("runs", *(f"{each.runs:,}" for each in both)), ("failed", *map(_failed, both))]
    for label, name in (("run time", "run_sec"), ("waiting", "waiting_sec"), ("CPU time", "cpu_sec")):
        rows += [(f"{label}, {which}", *(_seconds(getattr(each, name), which) for each in both)) for which in _SHOWN]
    for which in _SHOWN:
        rows.append((f"memory, {which}", *(_figure(_of(each.memory_mb, which), " MB") for each in both)))
    return screen.table(("", f"last {found.range}", "before"), rows, (f"last {found.range}", "before"))


_SHOWN = ("p50", "p95", "p99", "largest")


def run_table(tasks: Sequence[Task]) -> Any:
    """The tasks with the run times of a range; those without runs are left out."""
    titles = ("task", "runs", "failed", "p50", "p95", "p99", "p95 before", "waiting p95")
    rows = [_run_row(each.task, each.figures, each.before) for each in tasks if each.figures]
    return screen.table(titles, rows, titles[1:])


def _run_row(task: str, figures: Figures, before: Figures | None) -> Sequence[object]:
    return (
        screen.short(task, 60),
        f"{figures.runs:,}",
        _failed(figures),
        *(_seconds(figures.run_sec, p) for p in ("p50", "p95", "p99")),
        _seconds(before.run_sec if before else None, "p95"),
        _seconds(figures.waiting_sec, "p95"),
    )


def _failed(figures: Figures) -> str:
    return percent(figures.failure_rate)


def _seconds(spread: Spread | None, which: str) -> str:
    return "" if spread is None else words.duration(getattr(spread, which))


def _of(spread: Spread | None, which: str) -> float | None:
    return None if spread is None else float(getattr(spread, which))


@commands.command(examples=["dataloader predict etl.default", f"dataloader predict {base.EXAMPLE_ID}"])
@click.argument("what", metavar="JOB_ID|QUEUE")
@reaching
def predict(reached: Reached, what: str) -> None:
    """Say when a job will end, or all that is queued in a queue now, with the range of that."""
    found: JobPrediction | QueuePrediction
    try:
        found = reached.farm.predict(UUID(what))
    except ValueError:  # it is the name of a queue
        names.require(reached, queue=what)
        found = reached.farm.predict_queue(what)
    if reached.as_json:
        reached.print_json(found)
    else:
        click.echo(screen.plain(ending(found, reached.zone)))


def ending(told: JobPrediction | QueuePrediction, zone: tzinfo) -> str:
    """A prediction in words, and how right the last ones were."""
    of_job = told if isinstance(told, JobPrediction) else None
    what = f"job {of_job.job_id}" if of_job else f"what is queued in {told.queue} now"
    if told.ends_at is None:
        reason = predictions.REASONS.get(told.reason or "", f"The reason is {told.reason}.")
        return f"when {what} ends is not known. {reason}"
    words = f"{what} ends about {screen.clock(told.ends_at, zone)}, between {screen.clock(told.earliest, zone)}"
    words += f" and {screen.clock(told.latest, zone)}"
    if of_job and of_job.deadline:
        words += f"; its deadline {'is missed then' if of_job.is_late else 'is'}: {screen.clock(of_job.deadline, zone)}"
    if told.accuracy.predictions:
        words += f"\nof the last day {told.accuracy.predictions} predictions were off by"
        words += f" {percent(told.accuracy.error)} in the median"
    return words


@commands.command(examples=["dataloader top --every 5"])
@click.option("--every", type=base.Number(0.2, 3600), default=2.0, show_default=True, help="seconds")
@click.option("--once", is_flag=True, help="show the screen once, then end")
@reaching
def top(reached: Reached, every: float, once: bool) -> None:
    """Watch the farm: queues, and workers with what they run; q leaves."""
    if reached.as_json:
        overview, workers = reached.farm.overview(), reached.farm.workers()
        reached.print_json({"overview": overview, "workers": workers})
        return
    from dataloader.cli import top as program

    if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        screen.show(program.picture(reached.farm))
    else:
        program.run(reached.farm, every)


@commands.command(examples=['eval "$(dataloader completion bash)"'])
@click.argument("shell", type=base.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete our commands: eval "$(dataloader completion bash)"."""
    from dataloader.cli.main import main

    made = get_completion_class(shell)
    assert made  # noqa: S101  click knows these shells
    click.echo(made(main, {}, "dataloader", "_DATALOADER_COMPLETE").source())


def queue_table(overview: Overview) -> Any:
    """The queues, and all of them together."""
    queues: list[Queue | Total] = [*overview.queues]
    queues += [overview.total] if len(overview.queues) != 1 else []
    return screen.table(QUEUE_TITLES, (_queue_row(queue, overview.at) for queue in queues), NUMBERS, QUEUE_TITLES[9:])


def _queue_row(queue: Queue | Total, now: datetime) -> Sequence[object]:
    return (
        Text("all", style="bold") if queue.queue is None else screen.short(queue.queue, 60),
        length(queue),
        f"{queue.fresh:,}",
        f"{queue.retries:,}",
        f"{queue.scheduled:,}",
        Text(f"{queue.busy:,}", style="cyan" if queue.busy else ""),
        Text(f"{queue.dead:,}", style="red" if queue.dead else ""),
        screen.duration(queue.lag_sec) if queue.lag_sec else "-",
        Text(str(queue.workers), style="red" if queue.length and not queue.workers else ""),
        Text(_remarks(queue, now), style="yellow"),
    )


def length(queue: QueueFigures) -> str:
    """How many jobs wait: `~` where the reaper has counted them some time ago, `+` where there may be more."""
    return _counted(queue.length, queue.length_is_exact, queue.counted_at)


def _counted(number: int, is_exact: bool, at: datetime | None) -> str:
    if is_exact:
        return f"{number:,}"
    return f"~{number:,}" if at else f"{number:,}+"


def _remarks(queue: Queue | Total, now: datetime) -> str:
    words = []
    if queue.keys is not None:
        words.append(f"{_counted(queue.keys, queue.keys < COUNTED, queue.counted_at)} keys")
    if queue.paused_at:
        words.append(f"paused {screen.ago(queue.paused_at, now)} by {screen.short(queue.paused_by, 60)}")
    if queue.max_length is not None:
        words.append(f"at most {queue.max_length:,}")
    return ", ".join(words)


def task_table(tasks: Sequence[Task], now: datetime) -> Any:
    """The tasks with the needs of a run; what nobody declares and no run has shown is empty."""
    titles = ("task", "memory", "CPUs", "learned memory", "learned CPUs", "runs", "learned")
    return screen.table(titles, (_task_row(task, now) for task in tasks), titles[1:6])


def _task_row(task: Task, now: datetime) -> Sequence[object]:
    return (
        screen.short(task.task, 60),
        _need(task.memory_mb, task.declared_memory_mb, " MB"),
        _need(task.cpus, task.declared_cpus),
        _figure(task.learned_memory_mb, " MB"),
        _figure(task.learned_cpus),
        f"{task.runs:,}",
        screen.ago(task.learned_at, now) if task.learned_at else "",
    )


def _need(counts: float | None, declared: float | None, unit: str = "") -> str:
    return _figure(counts, unit) + (" declared" if declared is not None else "")


def _figure(number: float | None, unit: str = "") -> str:
    """Megabytes whole, processors with one digit behind the point."""
    return "" if number is None else f"{number:,.{0 if unit else 1}f}{unit}"


def worker_table(workers: Sequence[Worker], now: datetime) -> Any:
    """The workers, those with a job first."""
    titles = ("worker", "queue", "state", "memory", "CPU", "jobs", "task", "key", "runs", "progress")
    rows = (_worker_row(each, now) for each in sorted(workers, key=lambda each: (each.job_id is None, each.queue)))
    return screen.table(titles, rows, titles[3:6], loose=titles[6:8] + titles[9:])


def _worker_row(worker: Worker, now: datetime) -> Sequence[object]:
    runs = screen.duration((now - worker.job_started_at).total_seconds()) if worker.job_started_at else ""
    return (
        f"{worker.host}:{worker.pid}",
        screen.short(", ".join(worker.queues), 40),
        screen.status(worker.state) if worker.is_live else Text(f"{screen.plain(worker.state)}, silent", style="red"),
        screen.size(worker.memory_bytes),
        "" if worker.cpu_percent is None else f"{worker.cpu_percent:.0f}%",
        f"{worker.jobs:,}",
        screen.short(worker.task, 40),
        screen.short(worker.lock_key, 30),
        runs,
        screen.bar(fraction(worker.progress), 10) or screen.short(screen.progress(worker.progress), 40),
    )
