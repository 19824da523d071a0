"""Commands about jobs: trigger, wait, status, cancel, jobs, job, events, requeue, run-now, delete."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import click
from rich.console import Group
from rich.text import Text

from dataloader import stats
from dataloader.cli import screen, watch
from dataloader.cli.ways import Reached, Way, reaching
from dataloader.client import Event, Job, Started, Unavailable
from dataloader.process import EXIT_FAILED

STATUSES = ("queued", "running", "succeeded", "failed", "canceled", "lost", "scheduled", "fresh", "retries", "dead")
PAGE = 200  # events of one answer
EVENTS_READ = 10_000  # of one job's journal
FOLLOW_SEC = 1.0
LATE_SEC = 3.0  # an event may be committed so much later than one with a greater id
_SPAN = re.compile(r"(\d+(?:\.\d+)?) ?(s|sec|m|min|h|d)")
_UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_DONE = {"requeue": "queued again", "run-now": "due now", "delete": "deleted"}


@click.group()
def commands() -> None:
    """About jobs."""


@commands.command()
@click.argument("task")
@click.option("--queue", default="etl.default", show_default=True)
@click.option("--lock-key", help="jobs of one key never run at the same time; default: the task's name")
@click.option(
    "--args",
    "args_json",
    default="{}",
    show_default=True,
    help="the pipeline's arguments, a JSON object; @FILE reads a file, @- stdin",
)
@click.option("--idempotency-key", help="the same key, the same job, however often it is triggered")
@click.option("--timeout-sec", type=int, help="how long one run may take; default: what the pipeline says")
@click.option("--partition-key")
@click.option("--priority", type=int, help="the lower runs first; default: 100")
@click.option("--at", "available_at", metavar="TIME", help="not before then: 2026-01-31T06:30:00+03:00")
@click.option("--max-attempts", type=int)
@click.option("--lease-ttl-sec", type=int)
@click.option("--producer")
@click.option("--consumer-group")
@click.option("--wait", "waits", is_flag=True, help="wait for its end; the exit status tells which, as that of `wait`")
@click.option("--timeout", type=float, help="with --wait: seconds until it is left alone; exit status 13")
@reaching
def trigger(reached: Reached, task: str, args_json: str, waits: bool, timeout: float | None, **fields: Any) -> None:
    """Start a job and print its id and status."""
    if timeout is not None and not waits:
        raise click.UsageError("--timeout is for --wait; how long a run may take says --timeout-sec")
    fields["lock_key"] = fields["lock_key"] or task
    fields["idempotency_key"] = fields["idempotency_key"] or f"cli-{uuid4()}"
    started = _triggered(reached, task, _arguments(args_json), fields)
    if not waits:
        reached.print_json(started.document)
        return
    click.echo(f"dataloader: job {started.job_id}", err=True)
    sys.exit(watch.to_its_end(reached, started.job_id, timeout))


@commands.command()
@click.argument("job_id", type=click.UUID)
@click.option("--timeout", type=float, help="seconds until it is left alone; exit status 13")
@reaching
def wait(reached: Reached, job_id: UUID, timeout: float | None) -> None:
    """Wait for a job's end.

    Exit status: 0 succeeded, 10 failed, 11 canceled, 12 lost, 13 not within --timeout, 130 after Ctrl-C, 1 when it
    cannot be found out.
    """
    sys.exit(watch.to_its_end(reached, job_id, timeout))


@commands.command()
@click.argument("job_id", type=click.UUID)
@reaching
def status(reached: Reached, job_id: UUID) -> None:
    """Print a job's status."""
    reached.print_json(reached.way.status(job_id).document)


@commands.command()
@click.argument("job_id", type=click.UUID)
@click.option("--force", is_flag=True, help="do not wait for a safe point: interrupt the run, then kill it")
@reaching
def cancel(reached: Reached, job_id: UUID, force: bool) -> None:
    """Cancel a job: a queued one at once, a running one at its next safe point."""
    reached.print_json(reached.way.cancel(job_id, force=force).document)


@commands.command()
@click.option("--queue")
@click.option("--task")
@click.option("--status", type=click.Choice(STATUSES))
@click.option("--lock-key")
@click.option("--partition-key")
@click.option("--producer")
@click.option("--consumer-group")
@click.option("--since", metavar="TIME", help="changed since 2h (min, h, d) ago, or since a time")
@click.option("--until", metavar="TIME", help="changed before that")
@click.option("--sort", type=click.Choice(["changed", "key"]), default="changed", show_default=True)
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True)
@click.option("--all", "has_no_limit", is_flag=True, help="all of them")
@reaching
def jobs(
    reached: Reached, since: str | None, until: str | None, limit: int, has_no_limit: bool, **filters: Any
) -> None:
    """List jobs, the newest change first."""
    filters |= {"since": _instant("--since", since, reached.zone), "until": _instant("--until", until, reached.zone)}
    found = list(reached.way.jobs(limit=None if has_no_limit else limit, **filters))
    if reached.as_json:
        reached.print_json({"jobs": [job.document for job in found]})
        return
    screen.show(_listed(found, datetime.now(UTC)))
    if len(found) == limit and not has_no_limit:
        click.echo(f"dataloader: these are {limit}, there may be more: --limit N or --all", err=True)


@commands.command()
@click.argument("job_id", type=click.UUID)
@reaching
def job(reached: Reached, job_id: UUID) -> None:
    """Show all that is known of a job: fields, arguments, attempts, journal."""
    found, events = reached.way.job(job_id), journal(reached.way, job_id)
    if reached.as_json:
        runs = [attempt._asdict() for attempt in attempts(events)]
        reached.print_json({"job": found.document, "attempts": runs, "events": [e.document for e in events]})
        return
    screen.show(Group(*_whole(found, events, reached.zone)))


@commands.command()
@click.argument("job_id", type=click.UUID, required=False)
@click.option("--queue", help="of all jobs of this queue")
@click.option("--follow", is_flag=True, help="go on with what happens; until Ctrl-C, or the job's end")
@click.option("--limit", type=click.IntRange(1, EVENTS_READ), default=50, show_default=True, help="the newest so many")
@reaching
def events(reached: Reached, job_id: UUID | None, queue: str | None, follow: bool, limit: int) -> None:
    """Show the journal of a job, or of the farm; with --json and --follow a line for each event."""
    if job_id and queue:
        raise click.UsageError("a job's journal is of one queue: leave --queue out")
    newest = min(limit, PAGE)
    found = journal(reached.way, job_id)[-limit:] if job_id else reached.way.events(queue=queue, limit=newest)
    if reached.as_json and not follow:
        reached.print_json({"events": [event.document for event in found]})
        return
    try:
        for event in _followed(reached, job_id, queue, found) if follow else iter(found):
            if reached.as_json:
                reached.print_json(event.document, None)
            else:
                click.echo(_line(event, reached.zone, job_id is None))
    except KeyboardInterrupt:
        return


@commands.command()
@click.argument("job_ids", nargs=-1, metavar="[JOB_IDS]... | -")
@click.option("--dead", metavar="QUEUE", help="all failed and lost jobs of this queue")
@reaching
def requeue(reached: Reached, job_ids: tuple[str, ...], dead: str | None) -> None:
    """Queue jobs that have ended again, each with a fresh budget of attempts; - reads their ids from stdin."""
    _change(reached, "requeue", job_ids, dead, "dead", reached.way.requeue_dead)


@commands.command(name="run-now")
@click.argument("job_ids", nargs=-1, metavar="[JOB_IDS]... | -")
@click.option("--all", "scheduled", metavar="QUEUE", help="all jobs of this queue that wait for their time")
@reaching
def run_now(reached: Reached, job_ids: tuple[str, ...], scheduled: str | None) -> None:
    """Make jobs due that wait for their time; - reads their ids from stdin."""
    _change(reached, "run-now", job_ids, scheduled, "scheduled", reached.way.run_all)


@commands.command()
@click.argument("job_ids", nargs=-1, metavar="[JOB_IDS]... | -")
@click.option("--dead", metavar="QUEUE", help="all failed and lost jobs of this queue")
@click.option("--yes", is_flag=True, help="do not ask")
@reaching
def delete(reached: Reached, job_ids: tuple[str, ...], dead: str | None, yes: bool) -> None:
    """Delete jobs that do not run, with their journal; - reads their ids from stdin."""
    if not yes and "-" in job_ids:
        raise click.UsageError("with ids from stdin nobody can be asked: add --yes")
    if not yes and (job_ids or dead):
        what = f"all failed and lost jobs of {screen.plain(dead)}" if dead else f"{len(job_ids)} jobs"
        click.confirm(f"Delete {what}, with their journal, for good?", abort=True, err=True)
    _change(reached, "delete", job_ids, dead, "dead", reached.way.delete_dead)


def journal(way: Way, job_id: UUID) -> list[Event]:
    """The job's whole journal."""
    found: list[Event] = []
    while len(found) < EVENTS_READ:
        page = way.events(job_id, after=found[-1].event_id if found else 0, limit=PAGE)
        found += page
        if len(page) < PAGE:
            break
    return found


def attempts(events: Sequence[Event]) -> list[stats.Attempt]:
    """The runs that the journal tells of."""
    rows = [{"kind": event.kind, "ts": event.ts, "payload": event.payload} for event in events]
    return stats.attempts(row for row in rows if isinstance(row["payload"], dict | None))


def _triggered(reached: Reached, task: str, args: Any, fields: dict[str, Any]) -> Started:
    try:
        return reached.way.trigger(task, args=args, **fields)
    except Unavailable as e:
        if e.is_open:
            again = shlex.join(["--idempotency-key", fields["idempotency_key"]])
            e.detail += f"\nwhether the job was added is not known; sent again with {again} it is added once"
        raise


def _change(
    reached: Reached,
    verb: str,
    job_ids: tuple[str, ...],
    queue: str | None,
    group: str,
    change_some: Callable[[str], int],
) -> None:
    if bool(job_ids) == (queue is not None):
        raise click.UsageError("name jobs, or a queue by the option; one of the two")
    if queue is None:
        _change_these(reached, verb, _ids(job_ids))
        return
    changed = _change_all(reached.way, queue, group, change_some)
    if reached.as_json:
        reached.print_json({"queue": queue, "changed": changed})
    else:
        click.echo(f"{screen.plain(queue)}: {changed} jobs {_DONE[verb]}")


def _change_these(reached: Reached, verb: str, job_ids: list[UUID]) -> None:
    outcomes = reached.way.change(verb, job_ids) if job_ids else {}
    if reached.as_json:
        reached.print_json({"jobs": [{"job_id": job_id, "outcome": what} for job_id, what in outcomes.items()]})
    else:
        for job_id, what in outcomes.items():
            click.echo(f"{job_id} {_outcome(verb, what)}")
    if set(outcomes.values()) - {"done"}:
        sys.exit(EXIT_FAILED)


def _outcome(verb: str, what: str) -> str:
    if what == "done":
        return _DONE[verb]
    if what == "unknown":
        return "there is no such job"
    rule = {
        "requeue": "only what has ended can be",
        "run-now": "only what is queued can be",
        "delete": "cancel it first",
    }
    return f"is {screen.plain(what)}: {rule[verb]}"


def _change_all(way: Way, queue: str, group: str, change_some: Callable[[str], int]) -> int:
    """By steps; no more than there were at the start, for what was changed may come back."""
    there = next((getattr(found, group) for found in way.overview().queues if found.queue == queue), 0)
    changed = 0
    while changed < there and (some := change_some(queue)):
        changed += some
    return changed


def _ids(words: tuple[str, ...]) -> list[UUID]:
    """The ids that are named, where a - stands for those on stdin."""
    texts = [text for word in words for text in (sys.stdin.read().split() if word == "-" else [word])]
    try:
        return list(dict.fromkeys(map(UUID, texts)))
    except ValueError:
        raise click.BadParameter("a job's id is a UUID such as 01890a5d-ac96-774b-bcce-b302099a8057") from None


def _arguments(text: str) -> Any:
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


def _instant(name: str, text: str | None, zone: tzinfo) -> datetime | None:
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


def _listed(found: Sequence[Job], now: datetime) -> Any:
    titles = ("job", "status", "queue", "task", "key", "attempt", "changed", "progress or error")
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
                screen.ago(job.changed_at or job.created_at, now),
                screen.short(job.error, 60) if job.error else screen.progress(job.progress)[:60],
            )
            for job in found
        ),
    )


def _whole(job: Job, events: Sequence[Event], zone: tzinfo) -> Iterator[Any]:
    now = datetime.now(UTC)
    yield screen.table(("", ""), _fields(job, zone))
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
        yield Text(_line(event, zone, False))


def _fields(job: Job, zone: tzinfo) -> Iterator[tuple[str, Any]]:
    shown: dict[str, Any] = {name: getattr(job, name) for name in Job.__slots__}
    for name in ("document", "args", "error", "waiting_for", "job_id", "status", "progress"):
        del shown[name]
    yield "job", str(job.job_id)
    yield "status", screen.status(job.status)
    for name, value in shown.items():
        if value not in (None, "", False):
            yield name.replace("_", " "), screen.clock(value, zone) if isinstance(value, datetime) else value
    if job.progress:
        yield "progress", f"{screen.bar(job.fraction)} {screen.progress(job.progress)}".strip()


def attempts_table(runs: Sequence[stats.Attempt], zone: tzinfo) -> Any:
    """The runs of a job, the first one first."""
    titles = ("attempt", "started", "took", "end", "peak memory", "CPU", "worker", "what it said")
    return screen.table(
        titles,
        (
            (
                run.attempt,
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
    )


def said(run: stats.Attempt) -> str:
    """Why a run has ended, as far as it is known."""
    reason = "" if run.error and run.reason == "error" else run.reason or ""
    signal = f"killed by signal {run.signal}" if run.signal and "signal" not in reason else ""
    status = f"left with exit status {run.exit_status}" if run.exit_status and "status" not in reason else ""
    return "; ".join(part for part in (signal, status, reason, run.error) if part)


def _line(event: Event, zone: tzinfo, with_job: bool) -> str:
    job = f"{event.job_id} {screen.plain(event.queue)}" if with_job else ""
    words = (screen.clock(event.ts, zone), job, screen.plain(event.kind), _told(event.payload))
    return " ".join(filter(None, words))


def _told(payload: Any) -> str:
    """What an event says beside its kind, on one line; of an error its first one."""
    if not isinstance(payload, dict):
        return "" if payload is None else screen.short(payload, 200)
    texts = {name: value if isinstance(value, str) else screen.as_json(value, None) for name, value in payload.items()}
    return " ".join(f"{screen.plain(name)}={screen.short(text, 120)}" for name, text in texts.items())


def _followed(reached: Reached, job_id: UUID | None, queue: str | None, first: list[Event]) -> Iterator[Event]:
    """The events so far and then those that come; of one job until its end.

    Ids are given before the commit, so a smaller one may come later: each look begins where all was seen LATE_SEC ago.
    """
    yield from first
    seen = {event.event_id: time.monotonic() for event in first}
    after = 0 if job_id or not first else first[0].event_id - 1
    is_over = False
    while not is_over:
        is_over = job_id is not None and _has_ended(reached.way, job_id)
        after = max([after, *(number for number, at in seen.items() if time.monotonic() - at > LATE_SEC)])
        seen = {number: at for number, at in seen.items() if number > after}
        for event in _news(reached.way, job_id, queue, after):
            if event.event_id not in seen:
                seen[event.event_id] = time.monotonic()
                yield event
        if not is_over:
            time.sleep(FOLLOW_SEC)


def _has_ended(way: Way, job_id: UUID) -> bool:
    try:
        return way.status(job_id).is_final
    except Unavailable:
        return False


def _news(way: Way, job_id: UUID | None, queue: str | None, after: int) -> Iterator[Event]:
    """What the journal has behind `after`, as far as it goes; nothing while the farm cannot be asked."""
    try:
        while page := way.events(job_id, after=after, queue=queue, limit=PAGE):
            yield from page
            after = page[-1].event_id
            if len(page) < PAGE:
                return
    except Unavailable as e:
        click.echo(f"dataloader: {screen.plain(str(e))}; trying again", err=True)
