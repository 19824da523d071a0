"""Commands about schedules: schedule list, show, add, set, pause, resume, run, remove."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, tzinfo
from typing import Any, TypeVar

import click
from rich.text import Text

from dataloader.cli import base, names, screen
from dataloader.cli.connection import Reached, reaching
from dataloader.cli.jobs import arguments
from dataloader.client import Schedule
from dataloader.client.operations import given
from dataloader.queue.fields import OF_PRODUCER
from dataloader.queue.plans.schedules import OVERDUE_SEC

F = TypeVar("F", bound=Callable[..., Any])
_SPAN = re.compile(r"([1-9]\d{0,8}) ?(s|sec|min|h|d|)")
_UNITS = {"": 1, "s": 1, "sec": 1, "min": 60, "h": 3_600, "d": 86_400}
_OF_JOB = ("partition_key", "priority", "max_attempts", "lease_ttl_sec", "timeout_sec", "affinity_key")
_SHOWN = ("queue", "args", "lock_key", *_OF_JOB)


def _words(command: F) -> F:
    """An option for each word of a schedule."""
    for field in reversed([field for field in OF_PRODUCER if field.name in _OF_JOB]):
        kind = int if field.type == "int" else str
        command = click.option(f"--{field.name.replace('_', '-')}", type=kind, help=field.text)(command)
    for option in (
        click.option("--lock-key", help="of its jobs, {{ due }} and the like are filled in; default: the name"),
        click.option("--args", "args_json", help="a JSON object, as --args of trigger; {{ date }} and the like"),
        click.option("--queue", "-q", help="default: etl.default"),
        click.option("--deadline", metavar="TIME", help="its jobs should have ended by then, such as 07:00"),
        click.option("--deadline-sec", type=int, help="instead of --deadline: so many seconds after the due time"),
        click.option("--jitter-sec", type=float, help="a job begins up to so many seconds after its due time"),
        click.option("--overlap", help="while the job before has not ended: skip, queue (the default) or cancel_old"),
        click.option("--catch-up", help="missed due times get jobs: none, last (the default: one) or all"),
        click.option("--timezone", help="of --cron; default: TIMEZONE"),
        click.option("--every", metavar="SPAN", help="instead of --cron: 30s, 15min, 2h, 1d"),
        click.option("--cron", metavar="FIELDS", help="five fields, such as '0 3 * * MON-FRI': docs/schedules.md"),
    ):
        command = option(command)
    return command


@click.group(cls=base.Group)
def commands() -> None:
    """About schedules."""


@commands.group(examples=["dataloader schedule add nightly load.csv --cron '0 3 * * MON-FRI'"])
def schedule() -> None:
    """Jobs by the clock (docs/schedules.md)."""


@schedule.command(name="list", examples=["dataloader schedule list"])
@reaching
def list_schedules(reached: Reached) -> None:
    """List the schedules: when they are due, their last jobs, what is wrong with them."""
    found = reached.farm.schedules()
    if reached.as_json:
        reached.print_json({"schedules": [each.document for each in found]})
    else:
        screen.show(schedule_table(found, reached.zone, datetime.now(UTC)))


@schedule.command(examples=["dataloader schedule show nightly --next 20"])
@click.argument("name")
@click.option("--next", "count", type=click.IntRange(0, 100), default=5, show_default=True, help="due times")
@reaching
def show(reached: Reached, name: str, count: int) -> None:
    """Show a schedule with its next due times."""
    _tell(reached, reached.farm.schedule(name, count=count))


@schedule.command(
    examples=[
        "dataloader schedule add nightly load.csv --cron '0 3 * * MON-FRI' --args @day.json",
        "dataloader schedule add poll noop --every 15min",
    ]
)
@click.argument("name")
@click.argument("task")
@_words
@names.may_be_new
@reaching
def add(reached: Reached, name: str, task: str, is_new: bool, **options: Any) -> None:
    """Add a schedule of a task."""
    words = _given(options)
    names.require(reached, is_new, queue=options["queue"], task=task)
    _tell(reached, reached.farm.add_schedule(name, task, **words))


@schedule.command(name="set", examples=["dataloader schedule set nightly --cron '30 2 * * *'"])
@click.argument("name")
@click.option("--task", help="another task")
@_words
@names.may_be_new
@reaching
def set_schedule(reached: Reached, name: str, is_new: bool, **options: Any) -> None:
    """Change a schedule; what is not named stays. From then on code changes it no more."""
    if not (words := _given(options)):
        raise click.UsageError("name what to change, such as --cron or --args")
    names.require(reached, is_new, queue=options["queue"], task=options["task"])
    _tell(reached, reached.farm.change_schedule(name, **words))


@schedule.command(examples=["dataloader schedule pause nightly"])
@click.argument("name")
@reaching
def pause(reached: Reached, name: str) -> None:
    """Make no jobs of a schedule until it is resumed."""
    _tell(reached, reached.farm.pause_schedule(name))


@schedule.command(examples=["dataloader schedule resume nightly"])
@click.argument("name")
@reaching
def resume(reached: Reached, name: str) -> None:
    """End a schedule's pause; the due times of the pause get no job."""
    _tell(reached, reached.farm.resume_schedule(name))


@schedule.command(examples=["dataloader schedule run nightly"])
@click.argument("name")
@reaching
def run(reached: Reached, name: str) -> None:
    """Add a job of a schedule now, paused or not; now is its due time."""
    reached.print_json(reached.farm.run_schedule(name).document)


@schedule.command(examples=["dataloader schedule remove nightly"])
@click.argument("name")
@reaching
def remove(reached: Reached, name: str) -> None:
    """Remove a schedule; its jobs stay. One that a pipeline names comes back when a worker starts: pause it instead."""
    reached.farm.remove_schedule(name)
    if reached.as_json:
        reached.print_json({"name": name, "removed": True})
    else:
        click.echo(f"{screen.plain(name)} is removed; its jobs stay")


def schedule_table(found: Sequence[Schedule], zone: tzinfo, now: datetime) -> Any:
    """The schedules, each with its next due time and its last job."""
    titles = ("schedule", "task", "due", "next", "last job", "status", "skipped", "")
    rows = (
        (
            screen.short(each.name, 60),
            screen.short(each.task, 40),
            screen.short(each.words, 80),
            screen.clock(each.next[0], zone) if each.next else "",
            each.last_job_id,
            screen.status(each.last_job_status or ""),
            f"{each.skipped:,}" if each.skipped else "",
            Text(screen.short(remark(each, now), 200), style="yellow"),
        )
        for each in found
    )
    return screen.table(titles, rows, titles[6:7], loose=(titles[2], titles[7]))


def remark(found: Schedule, now: datetime) -> str:
    """Why a schedule makes no jobs; "" where it does."""
    if found.paused_at:
        return f"paused {screen.ago(found.paused_at, now)} by {found.paused_by}"
    if found.retired_at:
        return f"retired {screen.ago(found.retired_at, now)}: its pipeline names it no more"
    if found.error:
        return f"its jobs cannot be made: {found.error}"
    if found.overdue_sec > OVERDUE_SEC:
        return f"overdue for {screen.duration(found.overdue_sec)}: no reaper makes its jobs"
    return ""


def _tell(reached: Reached, found: Schedule) -> None:
    if reached.as_json:
        reached.print_json(found.document)
        return
    now = datetime.now(UTC)
    rows: list[tuple[str, object]] = [
        ("schedule", found.name),
        ("task", found.task),
        ("due", found.words + (f" ({found.cron})" if found.cron else "")),
        *(("next" if not number else "", _time(at, now, reached.zone)) for number, at in enumerate(found.next)),
        ("last job", found.last_job_id and f"{found.last_job_id} {found.last_job_status or 'deleted'}"),
        ("skipped", found.skipped or None),
        ("remark", remark(found, now)),
        *(
            (name.replace("_", " "), _plain(found.document.get(name)))
            for name in ("queue", "args", "lock_key", *_OF_JOB)
        ),
        ("catch up", found.catch_up),
        ("overlap", found.overlap),
        ("deadline", found.document.get("deadline")),
        ("deadline sec", found.document.get("deadline_sec")),
        ("jitter sec", found.jitter_sec or None),
        ("origin", found.origin),
    ]
    screen.show(screen.fields((name, value) for name, value in rows if value not in (None, "")))


def _time(at: datetime, now: datetime, zone: tzinfo) -> str:
    return f"{screen.clock(at, zone)}, {screen.ago(at, now)}"


def _plain(value: Any) -> Any:
    return screen.as_json(value, None) if isinstance(value, dict) else value


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The words that the options give."""
    found = dict(options)
    args_json, every = found.pop("args_json"), found.pop("every")
    if args_json is not None:
        found["args"] = arguments(args_json)
    if every is not None:
        found["interval_sec"] = _seconds(every)
    return given(**found)


def _seconds(text: str) -> int:
    if not (span := _SPAN.fullmatch(text.strip())):
        raise click.BadParameter("should be a span such as 30s, 15min, 2h or 1d", param_hint="--every")
    return int(span[1]) * _UNITS[span[2]]
