"""A job as text: all its fields, its runs, a line of its journal or its log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Any

from rich.text import Text

from dataloader.cli import screen, watch
from dataloader.model.jobs import Event, FarmEvent, Job, LogLine

if TYPE_CHECKING:
    from dataloader.queue.reports import stats

_RUNS = "run attempt started=started_at took=seconds end peak_memory=peak_mb CPU=cpu_sec worker reason=said"
_APART = ("args", "error", "waiting_for", "claims", "backoffs", "blocked_on")  # fields that are not in the sheet


def attempts(events: Sequence[Event]) -> list[stats.Attempt]:
    """The runs in the journal."""
    from dataloader.queue.reports import stats  # not at the top: other questions need no driver

    rows = [{"kind": event.kind, "ts": event.ts, "payload": event.payload} for event in events]
    return stats.attempts(row for row in rows if isinstance(row["payload"], dict | None))


def whole(job: Job, events: Sequence[Event], zone: tzinfo) -> Iterator[Any]:
    """All that is known of a job."""
    hidden = [name for name, value in vars(job).items() if value is False]
    yield screen.sheet(job, zone, [*_APART, *hidden])
    if job.waiting_for:
        yield Text("\n" + screen.plain(watch.waits_for(job, datetime.now(UTC))), style="yellow")
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
    return run._asdict() | words | {"said": outcome(run)}


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
    """The payload of an event on one line, of an error its first line."""
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
