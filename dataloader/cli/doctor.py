"""`doctor`: the reasons why a job, a schedule or a backfill does not go on as it should, each with what helps.

`doctor` without an argument: what is wrong with the farm, as on the dashboard; of a queue: why its claims are slow.
The functions `diagnose…` and `…_findings` are pure: from facts to findings.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import click
from rich.text import Text

from dataloader.cli import base, screen
from dataloader.cli.connection import Reached, reaching
from dataloader.cli.direct import Direct
from dataloader.cli.jobs import journal
from dataloader.cli.watch import attempts, outcome
from dataloader.client import NotFound
from dataloader.client.farm import Farm
from dataloader.model.farm import Database, Worker
from dataloader.model.jobs import Event, Job
from dataloader.model.plans import Backfill, Schedule
from dataloader.model.queues import Overview, Queue
from dataloader.model.runs import ErrorGroups, Task
from dataloader.queue.plans.schedules import OVERDUE_SEC
from dataloader.queue.reports import alerts, stats

SILENT_SEC = 60.0  # without a heartbeat, which is sent every 10 s by default
# The lists of what the page of an alert shows.
LISTS: dict[str, tuple[str, ...]] = {f"{noun}s": (noun, "list") for noun in ("schedule", "backfill", "webhook")}
LISTS["tasks"] = ("tasks",)
PAGES_MANY = 100  # that a claim reads beside those of its jobs


class Finding(NamedTuple):
    """One finding; `command` (the words after `dataloader`) helps or shows more."""

    text: str
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    job: Job
    runs: Sequence[stats.Attempt]
    events: Sequence[Event]
    serving: Sequence[str]  # queues that have workers
    worker: Worker | None  # the one that runs the job
    farm: Sequence[Finding]  # the faults that may keep any job from running
    now: datetime


commands = base.Group()


@commands.command(examples=["dataloader doctor", f"dataloader doctor {base.EXAMPLE_ID}"])
@click.argument("what", metavar="[JOB_ID|SCHEDULE|BACKFILL|QUEUE]", required=False)
@reaching
def doctor(reached: Reached, what: str | None) -> None:
    """Say why a job, a schedule or a backfill does not go on, or what is wrong with the farm.

    Of a queue, with --direct: how a claim finds its next job, which shows why claims are slow.
    """
    if what is None:
        _print(reached, list(_whole_farm(reached.farm)), {})
        return
    try:
        job_id = UUID(what)
    except ValueError:
        _named(reached, what)
        return
    case = _case(reached.farm, job_id)
    job = case.job
    title = Text.assemble(f"job {job.job_id} (", screen.short(job.task), "): ", screen.status(job.status))
    _print(reached, list(diagnose(case)), {"job_id": job.job_id, "status": job.status}, title)


def _named(reached: Reached, name: str) -> None:
    """Diagnose the schedule of this name, else the backfill, else the queue."""
    farm = reached.farm
    with suppress(NotFound):
        findings = list(diagnose_schedule(farm.schedule(name)))
        return _print(reached, findings, {"schedule": name}, Text(f"schedule {name}"))
    with suppress(NotFound):
        findings = list(diagnose_backfill(farm.backfill(name), farm.overview().queues, _serving(farm.workers())))
        return _print(reached, findings, {"backfill": name}, Text(f"backfill {name}"))
    if isinstance(farm, Direct) and name in {each.queue for each in farm.overview().queues}:
        plan = farm.claim_plan(name)
        _print(reached, list(diagnose_claim(plan)), {"queue": name, "plan": plan}, Text(f"queue {name}"))
        if not reached.as_json:
            click.echo("\n".join(map(screen.plain, plan)))
        return None
    queue = "there is no such queue either" if isinstance(farm, Direct) else "a queue needs --direct"
    unknown = f"there is no schedule and no backfill with this name, and it is no job_id; {queue}"
    raise NotFound(unknown, status=404)


def farm_findings(
    overview: Overview, workers: Sequence[Worker], database: Database, *, of_all: bool = False
) -> Iterator[Finding]:
    """The alerts of the dashboard's overview, the grave ones first; with `of_all` those that concern every job."""
    of = asdict(overview)
    for alert in alerts.farm_alerts(of, [asdict(each) for each in workers], asdict(database), of["wrong"]):
        if of_all and (alert.queue or alert.page in LISTS):
            continue
        command = LISTS.get(alert.page or "", ("ps",) if alert.queue is None else ("queues",))
        if alert.status:
            command = ("jobs", "-q", alert.queue or "", "--status", alert.status)
        yield Finding(f"{alert.text} {alert.advice}".strip(), command)


def _whole_farm(farm: Farm) -> Iterator[Finding]:
    overview = farm.overview()
    findings = list(farm_findings(overview, farm.workers(), farm.database()))
    findings += error_findings(farm.errors(), overview.total.dead) if overview.total.dead else ()
    findings += task_findings(farm.tasks())
    yield from findings or [Finding("Nothing is wrong with the farm.")]


def _print(reached: Reached, findings: Sequence[Finding], of: Mapping[str, object], title: Text | None = None) -> None:
    if reached.as_json:
        listed = [{"text": f.text, "command": reached.command(*f.command) if f.command else None} for f in findings]
        reached.print_json({**of, "findings": listed})
        return
    if title is not None:
        screen.show(title)
    for finding in findings:
        click.echo(f"- {screen.plain(finding.text)}")
        if finding.command:
            click.echo(f"    {screen.plain(reached.command(*finding.command))}")


def diagnose(case: Case) -> Iterator[Finding]:
    """The findings, the most important first."""
    yield from _BY_STATUS.get(case.job.status, _over)(case)
    yield from _earlier_runs(case)


def diagnose_claim(plan: Sequence[str]) -> Iterator[Finding]:
    """Findings about the cost of a claim, from its plan (postgres.claim_plan)."""
    text = "\n".join(plan)
    chosen, read, *_ = map(int, re.findall(r"Limit \(actual.* rows=(\d+)", text))
    buffers = re.search(r"Buffers: shared(.*)", text)
    pages = sum(map(int, re.findall(r"(?:hit|read)=(\d+)", buffers[1]))) if buffers else 0
    duration = "".join(re.findall(r"Execution Time: (\S+ ms)", text))
    yield Finding(
        f"A claim reads {pages} pages in {duration}, and passes over {read - chosen} of its first 1,000 jobs."
    )
    if read > chosen:
        yield Finding("Their keys are busy, or they may not start. Further claims park or end them.")
    if pages > PAGES_MANY + 10 * read:
        yield Finding("Most of these pages have only dead rows. To see which session holds back vacuum:", ("doctor",))


def diagnose_schedule(schedule: Schedule) -> Iterator[Finding]:
    """Why a schedule makes no jobs, or that it does."""
    last = ("doctor", str(schedule.last_job_id)) if schedule.last_job_id and schedule.last_job_status else ()
    if schedule.paused_at:
        text = f"It is paused by {schedule.paused_by}, so it makes no jobs."
        yield Finding(text, ("schedule", "resume", schedule.name))
    elif schedule.retired_at:
        text = "Its pipeline no longer declares it, so it makes no jobs. To drop it for good, remove it;"
        command = ("schedule", "remove", schedule.name)
        yield Finding(f"{text} else declare it again: @register(..., schedule=...)", command)
    elif schedule.error:
        text = f"Its jobs cannot be made: {screen.short(schedule.error, 300)}. The reaper tries again every minute."
        yield Finding(text, ("schedule", "show", schedule.name))
    elif schedule.overdue_sec > OVERDUE_SEC:
        late = screen.duration(schedule.overdue_sec)
        text = f"A due time of {late} ago has no job: no reaper runs (start one: `dataloader reaper`)"
        yield Finding(f"{text}, or its log says why it makes none.")
    elif schedule.next_due is None:
        yield Finding("It will never be due again.", ("schedule", "show", schedule.name))
    else:
        yield Finding(f"It is due as it should be: {schedule.words}.", ("schedule", "show", schedule.name))
    if schedule.skipped and schedule.overlap == "skip":
        text = f"{schedule.skipped:,} due times got no job, because the job before had not ended (overlap skip)."
        yield Finding(text, last)
    elif last and schedule.last_job_status != "succeeded":
        yield Finding(f"Its last job is {schedule.last_job_status}.", last)


def error_findings(errors: ErrorGroups, dead: int) -> Iterator[Finding]:
    """The most frequent error of so many dead jobs, and one of these jobs."""
    worst = max(errors.groups, key=lambda each: each.dead, default=None)
    if worst is None or not worst.dead:
        return
    dead = max(dead, sum(each.dead for each in errors.groups))
    of = f"at least {worst.dead:,}" if errors.is_cut else f"{worst.dead:,} of {dead:,}"
    share = "The dead job has the error" if dead == 1 else f"The top error, of {of} dead jobs"
    place = f"task {worst.task}, queue {worst.queue}"
    text = f"{share}: {screen.short(worst.error_group, 200)} ({place})."
    if worst.note:
        text += f" Its note: {screen.short(worst.note, 200)}."
    yield Finding(f"{text} One such job:", ("doctor", str(worst.job_id)))
    fields = {"error_group": worst.error_group, "queue": worst.queue, "task": worst.task}
    quoted = {name: text.replace("\\", r"\\").replace('"', r"\"") for name, text in fields.items()}
    search = " ".join([*(f'{name}:"{text}"' for name, text in quoted.items()), "status:dead"])
    yield Finding("Once the cause is removed:", ("requeue", "--matching", search))


def task_findings(tasks: Sequence[Task]) -> Iterator[Finding]:
    """The tasks whose runs cost more workers than they should."""
    for each in tasks:
        if each.replaces:
            runs, replaced = each.replaces.runs, each.replaces.replaced
            facts = ", ".join(screen.short(name, 40) for name in each.replaces.changed[:10])
            text = f"{replaced:,} of the last {runs:,} runs of task {screen.short(each.task)} have changed their"
            why = "so their workers were replaced: a run should leave its process as it was."
            yield Finding(f"{text} process ({facts}), {why}")


def diagnose_backfill(backfill: Backfill, queues: Sequence[Queue], serving: Collection[str]) -> Iterator[Finding]:
    """Why a backfill does not go on, or that it does; `serving` are the queues that have workers."""
    reasons = [*_not_made(backfill), *_not_run(backfill, queues, serving)]
    if backfill.state in ("making", "running", "done") and not reasons:
        done = "is done" if backfill.state == "done" else "goes on"
        text = f"It {done}: {backfill.ended:,} of {backfill.total:,} partitions."
        yield Finding(text, ("backfill", "show", backfill.name))
    yield from reasons
    if dead := {status: backfill.counts.get(status, 0) for status in ("failed", "lost") if backfill.counts.get(status)}:
        listed = " and ".join(f"{count:,} {status}" for status, count in dead.items())
        text = f"It has partitions that ended badly: {listed}. The first of these:"
        yield Finding(text, ("backfill", "partitions", backfill.name, "--status", next(iter(dead))))
        yield Finding("Once the cause is removed:", ("backfill", "retry", backfill.name))
    if backfill.state == "done" and (missing := backfill.counts.get("missing")):
        text = f"{missing:,} of its partitions have no job: somebody has deleted it before its end."
        yield Finding(text, ("backfill", "partitions", backfill.name, "--status", "missing"))


def _not_made(backfill: Backfill) -> Iterator[Finding]:
    if backfill.state == "canceled":
        yield Finding(f"It is canceled by {backfill.canceled_by}, so none of its jobs starts any more.")
    elif backfill.state == "paused":
        text = f"It is paused by {backfill.paused_by}, so none of its jobs starts."
        yield Finding(text, ("backfill", "resume", backfill.name))
    elif backfill.error:
        text = f"Its next jobs cannot be made: {screen.short(backfill.error, 300)}. The reaper tries again every 10 s."
        yield Finding(text, ("backfill", "show", backfill.name))
    elif backfill.overdue_sec > OVERDUE_SEC:
        late = screen.duration(backfill.overdue_sec)
        text = f"Its next jobs have waited for a reaper for {late}: none runs (start one: `dataloader reaper`)"
        yield Finding(f"{text}, or its log says why it makes none.")


def _not_run(backfill: Backfill, queues: Sequence[Queue], serving: Collection[str]) -> Iterator[Finding]:
    if backfill.state not in ("making", "running") or not backfill.counts.get("queued"):
        return
    queue = next((each for each in queues if each.queue == backfill.queue), None)
    if backfill.queue not in serving:
        yield Finding(f"No worker serves its queue {backfill.queue}.{_others(serving)}", ("ps",))
    if queue and queue.paused_at:
        yield Finding(f"Its queue {backfill.queue} is paused.", ("resume", backfill.queue))
    if backfill.max_running and backfill.counts.get("running", 0) >= backfill.max_running:
        text = f"As many of its jobs run as may: {backfill.max_running:,}. To let more run:"
        yield Finding(text, ("backfill", "set", backfill.name, "--max-running", str(2 * backfill.max_running)))


def _case(farm: Farm, job_id: UUID) -> Case:
    job, events = farm.job(job_id), journal(farm, job_id)
    overview, workers = farm.overview(), farm.workers()
    return Case(
        job=job,
        runs=attempts(events),
        events=events,
        serving=_serving(workers),
        worker=next((worker for worker in workers if worker.job_id == job_id), None),
        farm=list(farm_findings(overview, workers, farm.database(), of_all=True)),
        now=overview.at,
    )


def _serving(workers: Sequence[Worker]) -> list[str]:
    return sorted({queue for worker in workers if worker.is_live for queue in worker.queues})


def _others(serving: Collection[str]) -> str:
    return f" There are workers for: {', '.join(sorted(serving))}." if serving else " No worker is alive at all."


def _waiting(case: Case) -> Iterator[Finding]:
    job, why = case.job, case.job.waiting_for
    reason = why.reason if why else ""
    text = screen.reason(why, case.now) or "It is queued, and nothing is known that keeps it from running."
    more = {
        "time": " It rests after a run that ended badly." if case.runs else "",
        "session": " When that session is not to have it, end it in PostgreSQL by pg_terminate_backend.",
        "memory": " Start a worker of its queue on a larger host, or raise DL_HOST_MEMORY. Where a run needs less,"
        " declare its `memory_mb`.",
        "no_worker": _others(case.serving),
    }
    helps: dict[str, tuple[str, ...]] = {
        "paused": ("resume", job.queue),
        "time": ("run-now", str(job.job_id)),
        "session": (),
        "memory": ("tasks",),
        "limit": ("limit", "list"),
        "no_worker": ("ps",),
        **dict.fromkeys(("lock", "order", "dead", "parent"), ("doctor", str(why.job_id if why else None))),
    }
    yield Finding(text + more.get(reason, ""), helps.get(reason, ("top",)))
    if reason in ("", "worker", "no_worker"):
        yield from case.farm


def _running(case: Case) -> Iterator[Finding]:
    job, worker = case.job, case.worker
    since = case.runs[-1].started_at if case.runs else job.started_at
    place = f" on {worker.host}, process {worker.pid}" if worker else f" by {job.claimed_by}" if job.claimed_by else ""
    duration = f" for {screen.duration((case.now - since).total_seconds())}" if since else ""
    reported = screen.progress(job.progress)
    news = f"it reports: {reported}." if reported else "it has reported nothing yet."
    yield Finding(f"It runs{place}{duration}; {news}")
    if job.lease_expires_at and job.lease_expires_at < case.now:
        late = screen.duration((case.now - job.lease_expires_at).total_seconds())
        text = f"Its lease ran out {late} ago: its worker renews it no longer, and no reaper has noticed."
        yield Finding(f"{text} Is a reaper running?", ("ps",))
    elif job.heartbeat_at and (silent := (case.now - job.heartbeat_at).total_seconds()) > SILENT_SEC:
        text = f"Its last heartbeat was {screen.duration(silent)} ago: its worker may be stopped or cut off."
        yield Finding(text, ("ps",))
    if worker and worker.state == "stuck" and worker.reported_at:
        silence = screen.duration((case.now - worker.reported_at).total_seconds())
        text = f"Its run has reported nothing for {silence}, so it counts as stuck."
        yield Finding(f"{text} Its journal has its threads' stacks:", ("job", str(job.job_id)))
    if job.cancel_forced:
        yield Finding("Its cancellation is forced: it is being interrupted, and then killed.")
    elif job.cancel_requested:
        text = "It is asked to stop and has not come to a safe point (a yield, context.check). To stop it all the same:"
        yield Finding(text, ("cancel", str(job.job_id), "--force"))


def _failed(case: Case) -> Iterator[Finding]:
    job = case.job
    tried = f"after {job.attempt} of {job.max_attempts} attempts"
    if job.attempt < (job.max_attempts or 0):
        tried = "with attempts left (a permanent error, or killed by hand)"
    yield Finding(f"It has failed, {tried}: {screen.short(job.error, 300) or 'it left no error'}")
    yield Finding("The whole error, and its journal:", ("job", str(job.job_id)))
    yield Finding("Once the cause is removed, with a fresh budget of attempts:", ("requeue", str(job.job_id)))


def _lost(case: Case) -> Iterator[Finding]:
    job = case.job
    tries = f"the last of {job.attempt} attempts" if job.attempt > 1 else "its only attempt"
    ends = [text for run in case.runs if (text := outcome(run))]
    death = screen.short(ends[-1] if ends else job.error, 300) or "the cause is unknown"
    yield Finding(f"Its worker died on {tries}, so it is not tried again: {death}")
    if any(run.signal == signal.SIGKILL for run in case.runs):
        peak = max((run.peak_mb or 0 for run in case.runs), default=0)
        held = f" (it had up to {peak:,.0f} MB)" if peak else ""
        text = f"A kill by signal 9 is mostly the machine being short of memory{held}, or a limit of the pipeline's: "
        yield Finding(text + "look for it in the kernel's log (dmesg), and at max_memory_mb and timeout_sec.")
    if any(run.signal in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS) for run in case.runs):
        yield Finding("Its code, or a C library of its, crashed the process: the worker's log has the stack.")
    yield Finding("To try it again, with a fresh budget of attempts:", ("requeue", str(job.job_id)))


def _canceled(case: Case) -> Iterator[Finding]:
    asked = [event.payload for event in case.events if event.kind in ("cancel_requested", "canceled")]
    by = next((payload["by"] for payload in asked if isinstance(payload, dict) and payload.get("by")), None)
    note = f" {screen.short(case.job.error, 300)}" if case.job.error else ""
    yield Finding(f"It was canceled{f' by {by}' if by else ''}.{note}")
    yield Finding("To run it all the same:", ("requeue", str(case.job.job_id)))


def _over(case: Case) -> Iterator[Finding]:
    seconds = case.runs[-1].seconds if case.runs else None
    duration = f" in {screen.duration(seconds)}" if seconds else ""
    yield Finding(f"It has {case.job.status}{duration}; nothing is the matter.")


def _earlier_runs(case: Case) -> Iterator[Finding]:
    bad = [run for run in case.runs if run.end and run.end != "done" and outcome(run)]
    if case.job.status in ("queued", "running", "succeeded") and bad:
        last = bad[-1]
        count = f"{len(bad)} of its runs" if len(bad) > 1 else "One run"
        number = f"attempt {last.attempt}" + (f" (run {last.run})" if last.run != last.attempt else "")
        text = f"{count} did not succeed; the last one, {number}: {screen.short(outcome(last), 300)}"
        yield Finding(text, ("job", str(case.job.job_id)))


_BY_STATUS = {"queued": _waiting, "running": _running, "failed": _failed, "lost": _lost, "canceled": _canceled}
