"""Jobs as text: a list, one job with all fields, its runs, a line of its journal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Any

from rich.text import Text

from dataloader.cli import screen, watch
from dataloader.cli.journal import attempts
from dataloader.client import Event, FarmEvent, Job, ListedJob

if TYPE_CHECKING:
    from dataloader.queue.reports import stats


FIRST = ("queue", "task", "lock_key", "partition_key", "priority")  # fields of a job, before the others


def listed(found: Sequence[ListedJob], now: datetime) -> Any:
    titles = ("job", "status", "queue", "task", "key", "attempt", "changed", "says")
    return screen.table(
        titles,
        (
            (
                job.job_id,
                screen.status(job.status),
                screen.short(job.queue, 40),
                screen.short(job.task, 40),
                screen.short(job.lock_key, 40),
                f"{job.attempt}/{job.max_attempts}",
                screen.ago(job.changed_at, now),
                screen.short(job.error, 60) if job.error else screen.progress(job.progress)[:60],
            )
            for job in found
        ),
        loose=titles[2:5] + titles[7:],
    )


def whole(job: Job, events: Sequence[Event], zone: tzinfo) -> Iterator[Any]:
    now = datetime.now(UTC)
    yield screen.fields(_fields(job, zone))
    if job.waiting_for:
        yield Text("\n" + screen.plain(watch.waits_for(job, now)), style="yellow")
    if job.args:
        yield Text("\nargs", style="bold")
        yield Text(screen.as_json(job.args))
    if job.error:
        yield Text("\nerror", style="bold")
        yield Text(screen.plain(job.error.rstrip(), lines=True), style="red")
    if runs := attempts(events):
        yield Text("\nattempts", style="bold")
        yield attempts_table(runs, zone)
    yield Text("\njournal" + (" (its newest 20)" if len(events) > 20 else ""), style="bold")
    for event in events[-20:]:
        yield Text(line(event, zone))


def _fields(job: Job, zone: tzinfo) -> Iterator[tuple[str, Any]]:
    values = {name: getattr(job, name) for name in FIRST} | vars(job)
    for name in ("args", "error", "waiting_for", "job_id", "status", "progress", "claims", "backoffs", "blocked_on"):
        del values[name]
    yield "job", str(job.job_id)
    yield "status", screen.status(job.status)
    if (run_sec := values.pop("run_sec")) is not None:
        yield "last run took", screen.duration(run_sec)
    for name, value in values.items():
        if name == "schedule" and value:
            yield "schedule", f"{screen.plain(value.name)}, due {screen.clock(value.due, zone)}"
        elif name == "checkpoint" and value:
            yield "checkpoint", f"{value.bytes:,} bytes, saved {screen.clock(value.saved_at, zone)}"
        elif value not in (None, "", False):
            yield name.replace("_", " "), screen.clock(value, zone) if isinstance(value, datetime) else value
    if job.progress:
        yield "progress", f"{screen.bar(job.fraction)} {screen.progress(job.progress)}".strip()


def attempts_table(runs: Sequence[stats.Attempt], zone: tzinfo) -> Any:
    """The runs of a job, in their order."""
    titles = ("run", "attempt", "started", "took", "end", "peak memory", "CPU", "worker", "what it said")
    return screen.table(
        titles,
        (
            (
                run.run,
                f"{run.attempt}, requeued by {screen.short(run.requeued_by, 40)}" if run.requeued_by else run.attempt,
                screen.clock(run.started_at, zone),
                screen.duration(run.seconds),
                screen.status(run.end or "running"),
                screen.size(run.peak_mb and run.peak_mb * 1_000_000),
                screen.duration(run.cpu_sec),
                run.worker,
                screen.short(said(run), 80),
            )
            for run in runs
        ),
        loose=titles[7:],
    )


def said(run: stats.Attempt) -> str:
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
    """The payload of an event on one line, of an error its first line."""
    if not isinstance(payload, dict):
        return "" if payload is None else screen.short(payload, 200)
    texts = {name: value if isinstance(value, str) else screen.as_json(value, None) for name, value in payload.items()}
    return " ".join(f"{screen.plain(name)}={screen.short(text, 120)}" for name, text in texts.items())
