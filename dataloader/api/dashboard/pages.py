"""The dashboard's pages. Each view reads by `stats` and renders.

htmx requests a page's changing part every two seconds; the answer is 304 while it has not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from flask import Blueprint, Response, redirect, request, url_for
from flask.typing import ResponseReturnValue

from dataloader import log, ops, periods
from dataloader.api.dashboard import actions, charts, formats
from dataloader.api.dashboard.render import chosen_zone, named_queue, show
from dataloader.api.web import auth, cache
from dataloader.api.web.endpoint import session
from dataloader.check import database
from dataloader.model.kinds import fraction
from dataloader.model.plans import ENDED
from dataloader.ops.errors import Problem, Unknown, known
from dataloader.queue import again, db, fields, lifecycle, operations, parents
from dataloader.queue import logs as of_logs
from dataloader.queue.cursor import Page
from dataloader.queue.job import GROUPS, STATUSES, TALLIED
from dataloader.queue.plans import backfills as of_backfills
from dataloader.queue.plans import schedules as of_schedules
from dataloader.queue.reports import alerts, predictions, runs, stats, tallies, waiting
from dataloader.queue.reports import errors as of_errors
from dataloader.queue.reports import keys as of_keys
from dataloader.queue.reports import timeline as of_timeline
from dataloader.queue.reports import webhooks as receivers
from dataloader.queue.reports.messages import KINDS
from dataloader.queue.reports.postgres import health

blueprint = Blueprint("dashboard", __name__)
SHOWN = 50  # jobs of a page, workers of the overview
LISTED = 10  # jobs of each list on a queue's page
ALERTS = 8  # shown on the overview
CHECKED_SEC = periods.seconds("CHECKED_SEC", 30.0)  # for which the findings of `check` are shown
EVENTS = 10_000  # of a journal on one page; as many as heartbeats in a day
LINES = 200  # of a log, on the page of its job
CELLS = 2_000  # partitions of one page: five years of days
RESULT_SHOWN = 10_000  # characters of a result on its job's page
LATEST = 10  # jobs of a task on its page
RUNS = 100  # of the timeline's table
FILTERS = (*fields.FILTERS, "error_group")
OF_LIST = (*FILTERS, "q", "status", "since", "until", "sort")  # the parameters of a list, beside its page
Rows = list[dict[str, Any]]
T = TypeVar("T")


@blueprint.get("/")
def overview() -> Response:
    """The overview: alerts, figures, throughput, queues, workers, the database; the address holds the chart's range."""
    wanted = charts.RANGES[asked_range(charts.RANGES, charts.DEFAULT_RANGE)]
    farm, workers, postgres, wrong, beginning = cache.ask(_read_overview)
    steps = cache.ask(stats.throughput, wanted.span_sec, wanted.step_sec)
    active = alerts.farm_alerts(farm, workers, postgres, wrong)
    return show(
        "overview.html",
        total=farm["total"],
        queues=farm["queues"],
        alerts=active[:ALERTS],
        more_alerts=len(active[ALERTS:]),
        workers=workers[:SHOWN],
        more_workers=len(workers) if len(workers) > SHOWN else 0,
        postgres=postgres,
        is_new=bool(beginning and not beginning["has_begun"]),
        has_workers=any(worker["is_live"] for worker in workers),
        has_reaper=postgres["has_reaper"],
        chart=charts.throughput(wanted, steps),
        ranges=charts.RANGES.values(),
    )


def _read_overview(conn: db.Connection) -> tuple[dict[str, Any], Rows, dict[str, Any], Rows, dict[str, Any] | None]:
    farm = stats.overview(conn)
    has_jobs = any(queue["length"] or queue["busy"] or queue["dead"] for queue in farm["queues"])
    workers = _alive_first(stats.workers(conn))
    postgres = stats.postgres(conn, auth.settings().dl_reaper_period_sec)
    wrong = stats.wrong(conn, auth.settings().dl_alerts_queue)
    return farm, workers, postgres, wrong, None if has_jobs else stats.beginning(conn)


@blueprint.get("/workers")
def workers() -> Response:
    with session() as conn:
        return show("workers.html", workers=_alive_first(stats.workers(conn)))


@blueprint.get("/postgres")
def postgres() -> Response:
    """The health of the queue's database, and what `dataloader check` would warn of there."""
    sections: dict[str, Any] = cache.ask(health)
    return show("postgres.html", findings=cache.ask(_read_findings, fresh_sec=CHECKED_SEC), **sections)


def _read_findings(conn: db.Connection) -> list[database.Finding]:
    return database.session_findings(conn, auth.settings(), auth.settings().queue_dsn or "")


@blueprint.get("/schedules")
def schedules() -> Response:
    with session() as conn:
        rows = of_schedules.listed(conn)
        known = operations.args_schemas(conn, [row["task"] for row in rows])
    listed = [row | {"is_known": row["task"] in known, "buttons": actions.schedule_buttons(row)} for row in rows]
    return show("schedules.html", schedules=listed, overdue_most=of_schedules.OVERDUE_SEC)


@blueprint.get("/backfills")
def backfills() -> Response:
    rows = cache.ask(of_backfills.listed, cache.counts)
    return show("backfills.html", backfills=list(map(_with_ended, rows)))


@blueprint.get("/backfills/<name>")
def backfill(name: str) -> Response:
    """One backfill: its progress, its buttons, and its partitions as a heat map; the address holds the page of it."""
    row, rows, is_served = cache.ask(_read_backfill, name, request.args.get("after", 0, type=int))
    return show(
        "backfill.html",
        b=_with_ended(row),
        is_served=is_served,
        blocks=charts.blocks(rows),
        cells=partial(charts.cells, jobs=url_for(".job", job_id="")),
        buttons=actions.backfill_buttons(row),
        **_next("backfill", str(rows[-1]["place"]) if len(rows) == CELLS else None, name=name),
    )


def _read_backfill(conn: db.Connection, name: str, after: int) -> tuple[dict[str, Any], Rows, bool]:
    row, rows = of_backfills.backfill(conn, name, cache.counts), of_backfills.ledger_rows(conn, name, after, CELLS)
    made = row["total"] if row["canceled_at"] else row["made"]
    shown = [each | {"status": "planned"} if each["place"] > made else each for each in rows]
    return row, shown, receivers.is_served(conn, row["queue"])


def _with_ended(backfill: dict[str, Any]) -> dict[str, Any]:
    """A backfill with the number of its ended partitions; the count `missing` loses the `planned` ones."""
    counts, planned = backfill["counts"], 0 if backfill["canceled_at"] else backfill["total"] - backfill["made"]
    shown = counts | {"missing": max(counts["missing"] - planned, 0), "planned": planned}
    return backfill | {"ended": sum(counts[status] for status in ENDED), "counts": shown}


@blueprint.get("/errors")
def errors() -> Response:
    """The groups of dead and retrying jobs; the address holds the filter."""
    given = {name: request.args.get(name, "") for name in ("queue", "task", "since")}
    try:
        since = _instant(given["since"])
    except ValueError as error:
        raise Problem(400, str(error)) from None
    groups: dict[str, Any] = cache.ask(of_errors.groups, given["queue"] or None, given["task"] or None, since)
    return show(
        "errors.html",
        given=given | {"since": _local(since)},
        is_filtered=any(given.values()),
        groups=[row | {"buttons": actions.error_buttons(row, groups["is_cut"])} for row in groups["groups"]],
        is_cut=groups["is_cut"],
        most=of_errors.GROUPS,
    )


@blueprint.get("/limits")
def limits() -> Response:
    with session() as conn:
        return show("limits.html", limits=stats.limits(conn))


@blueprint.get("/webhooks")
@auth.require("operate")
def webhooks() -> Response:
    """The webhooks: the receivers of alerts for dead jobs, stuck runs, late and paused queues."""
    queue = auth.settings().dl_alerts_queue
    with session() as conn:
        rows, is_served = receivers.with_deliveries(conn), receivers.is_served(conn, queue)
    return show("webhooks.html", webhooks=rows, queue=queue, is_served=is_served, kinds=KINDS)


def _alive_first(workers: Rows) -> Rows:
    """Busy workers first, then idle ones, then gone ones; each group by host and process."""
    return sorted(workers, key=lambda w: (not w["is_live"], w["job_id"] is None, w["host"] or "", w["pid"] or 0))


@blueprint.get("/jobs")
def jobs() -> ResponseReturnValue:
    """A list of jobs, and how many there are; the address holds its filters, order and page."""
    given = {name: request.args.get(name, "") for name in OF_LIST}
    filters: dict[str, Any] = {name: value for name, value in given.items() if value}
    after = request.args.get("after") or None
    if not all(request.args.values()):  # a form sends its empty fields, too
        return redirect(url_for(".jobs", **filters, after=after), 303)
    page, mistake, local, matching = Page([], None), "", {"since": "", "until": ""}, ""
    tally, similar = None, {}
    try:
        wanted = _wanted(given)
        local = {"since": _local(wanted.since), "until": _local(wanted.until)}
        matching = actions.matching(wanted)
        with session() as conn:
            page = stats.jobs(conn, wanted, SHOWN, after)
            if not page.rows and not page.next:
                names = {kind: getattr(wanted.whole, kind) for kind in ("queue", "task")}
                similar = {kind: operations.known(conn, kind, name)["similar"] for kind, name in names.items() if name}
        tally = cache.ask(tallies.tally, wanted)
    except ValueError as error:
        mistake = str(error)
    return show(
        "jobs.html",
        400 if mistake else 200,
        given=given | local,
        is_filtered=any(value for name, value in given.items() if name != "sort"),
        statuses={status: f"{status}: {GROUPS[status]}" if status in GROUPS else status for status in STATUSES},
        more=FILTERS[3:],
        shows_more=any(given[name] for name in (*FILTERS[3:], "since", "until")),
        jobs=page.rows,
        mistake=mistake,
        similar=similar,
        advice=page.advice,
        tally=tally,
        to_kind={kind: url_for(".jobs", **filters | {"status": kind}) for kind in TALLIED},
        matching=matching,
        orders=actions.ORDERS,
        **_next("jobs", page.next, **filters),
    )


def _wanted(given: Mapping[str, str]) -> stats.Wanted:
    """The filters of the address. Raises ValueError for one that is not valid, with a text for the page."""
    if given["status"] and given["status"] not in STATUSES:
        raise ValueError(f"The status should be one of: {', '.join(STATUSES)}.")
    texts = {name: given[name] or None for name in (*FILTERS, "q", "status")}
    sort = "key" if given["sort"] == "key" else "changed"
    return stats.Wanted(**texts, since=_instant(given["since"]), until=_instant(given["until"]), sort=sort)


def _instant(text: str) -> datetime | None:
    """An instant of a filter, in the zone of the page."""
    if not text:
        return None
    try:
        at, zone = datetime.fromisoformat(text), chosen_zone()
        return (at if at.tzinfo else at.replace(tzinfo=zone)).astimezone(zone)
    except (ValueError, OverflowError):
        raise ValueError("A time should be a date and a time, as 2026-01-31T14:30.") from None


def _local(at: datetime | None) -> str:
    """An `_instant` as the value of an HTML field for date and time."""
    return at.strftime("%Y-%m-%dT%H:%M:%S") if at else ""


@blueprint.get("/jobs/<uuid:job_id>")
def job(job_id: UUID) -> Response:
    """One job: the reason why it waits, its fields, its attempts and its journal."""
    after = request.args.get("after", 0, type=int)
    with session() as conn:
        row = known(stats.job(conn, job_id), "job")
        events = stats.events(conn, job_id, max(after, 0), EVENTS)
        is_ordered = operations.settings(conn, row["queue"])["ordered"]
        returned = stats.result(conn, job_id)
        family = parents.family(conn, job_id)
        ending = _ending(conn, job_id)
        used = stats.used(conn, job_id, row["claimed_by"]) if row["status"] == "running" else None
        written = _logs(conn, job_id)
    waiting_for, is_stuck = row["waiting_for"] or {}, bool(used and used["stuck_since"])
    entries = [event for event in events if event["kind"] != "heartbeat"]
    attempts = stats.attempts(events)
    now = datetime.now(UTC)
    is_running = attempts and attempts[-1].ended_at is None
    run_sec = (now - attempts[-1].started_at).total_seconds() if is_running else None
    return show(
        "job.html",
        job=row,
        **_result(returned),
        **written,
        family=family,
        family_most=parents.SHOWN,
        ending=None if is_stuck else ending,
        reasons=predictions.REASONS,
        waiting=waiting.words(row["waiting_for"], now),
        holder=waiting_for.get("job_id"),
        is_ordered=is_ordered,
        run_sec=run_sec,
        remaining_sec=None if row["status"] != "running" or is_stuck else remaining_sec(row, run_sec),
        used=used,
        attempts=attempts,
        events=entries,
        heartbeats=len(events) - len(entries),
        later=url_for(".job", job_id=job_id, after=events[-1]["event_id"]) if len(events) == EVENTS else None,
        buttons=actions.job_buttons(row, is_stuck),
        **again.links(events),
    )


def remaining_sec(job: Mapping[str, Any], run_sec: float | None) -> float | None:
    """The seconds until the present run ends, at its rate so far; None if the rate is not known.

    A later claim may have begun at a checkpoint, with progress that is not its own.
    """
    done = fraction(job["progress"])
    return run_sec / done * (1 - done) if done and run_sec is not None and job["claims"] <= 1 else None


def _queue_row(conn: db.Connection, queue: str) -> dict[str, Any]:
    """The queue's row of the overview; zeros for a known queue without a row. Raises Unknown."""
    farm = stats.overview(conn)
    row: dict[str, Any] | None = next((row for row in farm["queues"] if row["queue"] == queue), None)
    if row:
        return row
    if (
        not operations.known(conn, "queue", queue)["is_known"]
        and not stats.jobs(conn, stats.Wanted(queue=queue), 1, scan=stats.SCAN).rows
    ):
        raise Unknown("queue")
    nothing = {name: 0 if isinstance(value, int | float) else value for name, value in farm["total"].items()}
    nothing |= {"length_is_exact": True, "counted_at": None, "keys": None}
    return nothing | operations.settings(conn, queue)


@blueprint.get("/jobs/<uuid:job_id>/log.txt")
def log_text(job_id: UUID) -> Response:
    """All lines that an attempt, or by default the job, has written, as text."""
    asked, after = request.args.get("attempt", type=int), "0.0"
    gap = "[{} lines were left out: the log is larger than DL_JOB_LOG_KB]\n"
    lines = []
    with session() as conn:
        known(lifecycle.status(conn, job_id), "job")
        attempt = asked if asked in of_logs.attempts(conn, job_id) else None
        while after:
            page = of_logs.page(conn, job_id, after, attempt)
            for row in page.rows:
                lines += [gap.format(row["left_out"])] if row["left_out"] else []
                lines.append(f"{row['at'].isoformat()} {row['level']} {log.masked(row['text'])}\n")
            after = page.next or ""
    return Response("".join(lines), mimetype="text/plain")


def _logs(conn: db.Connection, job_id: UUID) -> dict[str, Any]:
    """The last lines of the attempt that the address names, or of the latest one that has written something."""
    attempts = of_logs.attempts(conn, job_id)
    asked = request.args.get("attempt", type=int)
    attempt = asked if asked in attempts else max(attempts, default=None)
    lines = of_logs.last(conn, job_id, attempt, LINES) if attempt is not None else []
    is_cut = len(lines) == LINES and lines[0]["line"] > 1
    return {"log": lines, "log_attempts": attempts, "log_attempt": attempt, "log_is_cut": is_cut}


def _ending(conn: db.Connection, job_id: UUID) -> dict[str, Any] | None:
    wanted = predictions.job(conn, job_id)
    if wanted is None or wanted["status"] not in ("queued", "running"):
        return None
    return predictions.job_prediction(cache.outlook(conn, wanted["queue"]), wanted)


def _result(returned: Mapping[str, Any] | None) -> dict[str, Any]:
    """The first RESULT_SHOWN characters of the result, and whether it is longer."""
    if returned is None or returned["result"] is None:
        return {"result": None}
    text = formats.pretty(returned["result"])
    return {"result": text[:RESULT_SHOWN], "result_goes_on": len(text) > RESULT_SHOWN}


@blueprint.get("/keys")
def keys() -> Response:
    """The keys of an ordered queue that have queued jobs, by name; the address holds the queue and the page."""
    queue = _asked("queue")
    with session() as conn:
        page = of_keys.page(conn, queue, SHOWN, request.args.get("after") or None)
    return show("keys.html", name=queue, keys=_worded(page.rows), **_next("keys", page.next, queue=queue))


@blueprint.get("/key")
def key() -> Response:
    """One key of an ordered queue: what holds it, its jobs in their order, its running and dead ones."""
    queue, lock_key = _asked("queue"), _asked("lock_key")
    with session() as conn:
        report = of_keys.key(conn, queue, lock_key, SHOWN, request.args.get("after") or None)
        on_dead = operations.settings(conn, queue)["on_dead"]
    head = report.head
    return show(
        "key.html",
        name=lock_key,
        queue=queue,
        length=report.length,
        length_is_exact=report.length_is_exact,
        head=head,
        waiting=waiting.words(head["waiting_for"], datetime.now(UTC)) if head else "",
        payloads=report.payloads.rows,
        running=report.running,
        dead=report.dead,
        on_dead=on_dead,
        **_next("key", report.payloads.next, queue=queue, lock_key=lock_key),
    )


def _asked(name: str) -> str:
    """A parameter of the address that has to be there; raises a 400 Problem."""
    if (text := request.args.get(name)) is None:
        raise Problem(400, f"The address should name a {name.replace('_', ' ')}.")
    return text


def _worded(rows: Rows) -> Rows:
    """The keys, each with the sentence that says what its first job waits for."""
    now = datetime.now(UTC)
    return [row | {"waits": waiting.words(row["waiting_for"], now)} for row in rows]


def _next(endpoint: str, following: str | None, **of: Any) -> dict[str, Any]:
    """The addresses of the first page and of the next one."""
    is_later = "after" in request.args
    return {
        "first": url_for(f".{endpoint}", **of) if is_later else None,
        "older": url_for(f".{endpoint}", **of, after=following) if following else None,
    }


@blueprint.get("/queues/<anything:queue>")
def queue(queue: str) -> Response:
    """One queue: its figures, its buttons, its dead, running, retried and scheduled jobs."""
    queue, first_keys = named_queue(queue), list[dict[str, Any]]()
    lists: dict[str, Rows] = {}
    with session() as conn:
        row = _queue_row(conn, queue)
        with suppress(of_keys.NotOrdered):  # not any more
            first_keys = of_keys.page(conn, queue, LISTED).rows if row["ordered"] else []
        ending = predictions.queue_prediction(cache.outlook(conn, queue))
        late = predictions.late(conn, queue, LISTED) if row["at_risk"] else []
        for status in ("dead", "running", "retries", "scheduled"):
            lists[status] = stats.jobs(conn, stats.Wanted(queue=queue, status=status), LISTED, scan=stats.SCAN).rows
    return show(
        "queue.html",
        name=queue,
        q=row,
        lists=lists,
        ending=ending,
        late=late,
        reasons=predictions.REASONS,
        keys=_worded(first_keys),
        **runs_of(runs.queue_runs, queue),
        buttons=actions.queue_buttons(row),
        order_question=ops.load()["set_queue"].question,
    )


def runs_of(read: Callable[..., Any], *of: str) -> dict[str, Any]:
    """The runs of a queue or a task, with their charts, in the range of the address."""
    figures = lately(read, *of, asked_range())
    return {"report": figures, "ranges": list(runs.RANGES), **charts.drawn(figures)}


def lately(read: Callable[..., T], *of: Any) -> T:
    """The answer of the database about runs, up to twice LATELY_SEC old."""
    return cache.ask(read, *of, fresh_sec=cache.LATELY_SEC)


def asked_range(known: Collection[str] = runs.RANGES.keys(), usual: str = runs.USUAL) -> str:
    """The range of the address; raises a 400 Problem."""
    range_ = request.args.get("range", usual)
    if range_ not in known:
        raise Problem(400, f"The range should be one of: {', '.join(known)}.")
    return range_


@blueprint.get("/tasks")
def tasks() -> Response:
    """All tasks with their figures; the address holds the range and the filter."""
    range_, like = asked_range(), request.args.get("like", "")
    report = lately(runs.listed, range_, like)
    return show("tasks.html", report=report, like=like, ranges=list(runs.RANGES))


@blueprint.get("/tasks/<anything:task>")
def task(task: str) -> Response:
    """One task: its figures, charts, queues and last jobs."""
    if not (task := named_queue(task)):
        raise Problem(404, "The address names no task.")
    shown = runs_of(runs.task_runs, task)
    page = lately(stats.jobs, stats.Wanted(task=task), LATEST)
    return show("task.html", name=task, jobs=page.rows, is_cut=page.next is not None, **shown)


@blueprint.get("/timeline")
def timeline() -> Response:
    """The runs of each worker in the last hours."""
    text = request.args.get("hours", str(of_timeline.HOURS[0]))
    if text not in map(str, of_timeline.HOURS):
        raise Problem(400, f"The hours should be one of: {', '.join(map(str, of_timeline.HOURS))}.")
    report = lately(of_timeline.read, int(text))
    shown = charts.lanes(report.runs, report.since, report.until)
    return show(
        "timeline.html",
        report=report,
        runs=report.runs[: -RUNS - 1 : -1],
        lanes=shown,
        more_workers=len({run.worker for run in report.runs}) - len(shown),
        hours=int(text),
        choices=of_timeline.HOURS,
        height=max(len(shown), 1) * (charts.LANE + charts.GAP),
        width=charts.WIDTH,
    )


@blueprint.get("/activity")
def activity() -> Response:
    """The page lists dead jobs, recoveries, operators' changes and starts of workers, of all hosts."""
    entries, complete_since = lately(of_timeline.activity)
    return show("activity.html", entries=entries, complete_since=complete_since, kinds=of_timeline.KINDS)
