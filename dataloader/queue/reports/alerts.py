"""PURE: what is wrong with a farm by its figures: `farm_alerts` for people, `conditions` for webhooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from dataloader import periods
from dataloader.queue.reports import stats, waiting
from dataloader.queue.reports.words import count, duration, figure, percent

Row = Mapping[str, Any]
LAG_SEC = periods.seconds("ALERT_LAG_SEC", 300.0)  # the wait of a due job that raises an alert
FULL = 0.9  # of connections
FEW_IDS = 200_000_000  # of transactions; autovacuum keeps ten times as many
VACUUM = "VACUUM each database of the server; what holds vacuum back are old transactions and unused replication slots."
LOCKED = "has locked dl_jobs: no job can be added or ended."


class Alert(NamedTuple):
    """One fault: a text, advice, and a link (`queue`, or a filter of jobs, or a page of the dashboard)."""

    text: str
    advice: str = ""
    queue: str | None = None
    status: str | None = None
    is_grave: bool = True
    page: str | None = None
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Condition:
    """A fault of a queue that lasts: its kind, since when, and a sentence."""

    kind: str
    queue: str
    since: datetime
    text: str


def is_late(queue: Row, lag_sec: float) -> bool:
    """Whether a queue that is not paused has a due job that has waited for more than so many seconds."""
    return not queue["paused_at"] and (queue["lag_sec"] or 0) > lag_sec


def conditions(queue: Row, lag_sec: float, paused_sec: float, now: datetime) -> Iterator[Condition]:
    """The faults of a queue that last now, by the seconds from which on they count; kinds are in model.kinds.ALERTS."""
    name, waits = queue["queue"], queue["lag_sec"] or 0.0
    if is_late(queue, lag_sec):
        text = f"The oldest due job of queue {name} has waited {duration(waits)}."
        yield Condition("lag", name, now - timedelta(seconds=waits), text)
    if queue["paused_at"] and now - queue["paused_at"] >= timedelta(seconds=paused_sec):
        by = f" by {queue['paused_by']}" if queue["paused_by"] else ""
        text = f"Queue {name} has been paused for {duration(now - queue['paused_at'])}{by}."
        yield Condition("paused", name, queue["paused_at"], text)


def farm_alerts(overview: Row, workers: Sequence[Row], postgres: Row | None, wrong: Sequence[Row]) -> list[Alert]:
    """The farm's alerts, the grave ones first; `wrong` is of stats.wrong."""
    lag_sec = max((queue["lag_sec"] for queue in overview["queues"]), default=0.0)
    active = [*(_server_alerts(postgres, lag_sec) if postgres else ()), *_silent_workers(workers), *map(_broken, wrong)]
    for queue in overview["queues"]:
        active += _queue_alerts(queue)
    return sorted(active, key=lambda alert: not alert.is_grave)


def _queue_alerts(queue: Row) -> Iterator[Alert]:
    name = queue["queue"]
    due = queue["length"] - queue["scheduled"]
    if queue["paused_at"]:
        by = f" by {queue['paused_by']}" if queue["paused_by"] else ""
        advice, since = "No job of it starts until it is resumed.", queue["paused_at"]
        yield Alert(f"Queue {name} is paused{by}.", advice, name, is_grave=False, since=since)
    elif due > 0 and not queue["workers"] and not queue["busy"]:
        advice = "Start workers for it: WORKERS_JSON of a farm should name this queue."
        many = figure(due, queue["counted_at"])
        yield Alert(f"Queue {name} has {many} due {'job' if due == 1 else 'jobs'} and no worker.", advice, name)
    elif queue["stopped"]:
        advice = "A SIGSTOP or a debugger stopped their processes: kill -CONT resumes them, kill -KILL replaces them."
        stopped, workers = queue["stopped"], queue["workers"]
        who = f"{stopped} of {workers} workers" if stopped < workers else f"All {workers} workers"
        text = (
            f"{'The only worker' if workers == 1 else who} of queue {name} {'is' if stopped == 1 else 'are'} stopped."
        )
        yield Alert(text, advice, name, is_grave=stopped == workers)
    elif is_late(queue, LAG_SEC):
        advice = "Its workers are too few, or its jobs wait for a key, a limit or memory."
        text = f"The oldest due job of queue {name} has waited {duration(queue['lag_sec'])}."
        yield Alert(text, advice, name, "queued", is_grave=False)
    if queue["max_length"] and queue["length"] >= queue["max_length"]:
        advice = "New jobs are refused until there is room."
        jobs = f"{figure(queue['length'], queue['counted_at'])} {'job is' if queue['length'] == 1 else 'jobs are'}"
        yield Alert(f"Queue {name} is full: {jobs} queued.", advice, name)
    if queue["at_risk"]:
        is_one = queue["at_risk"] == 1
        jobs = f"1 job of queue {name} is" if is_one else f"{count(queue['at_risk'])} jobs of queue {name} are"
        text = f"{jobs} going to miss {'its deadline, or has' if is_one else 'their deadlines, or have'}."
        yield Alert(text, "More workers, or fewer jobs that go before, would help.", name)
    if queue["dead"]:
        jobs = f"{figure(queue['dead'], queue['counted_at'])} {'job is' if queue['dead'] == 1 else 'jobs are'}"
        advice = "Look at the errors, then requeue or delete."
        yield Alert(f"{jobs} dead in queue {name}.", advice, name, "dead")


def _silent_workers(workers: Sequence[Row]) -> Iterator[Alert]:
    silent = [worker for worker in workers if not worker["is_live"] and worker["state"] not in ("dead", "leaving")]
    if silent:
        hosts = ", ".join(sorted({worker["host"] for worker in silent}))
        noun = "worker has" if len(silent) == 1 else "workers have"
        yield Alert(f"{len(silent)} {noun} not been heard of ({hosts}).", "Look at the host and its log.")
    refused = {(worker["host"], worker["reload_error"]) for worker in workers if worker.get("reload_error")}
    for host, error in sorted(refused):
        advice = "Its workers keep their settings and code. Correct it, and reload again."
        yield Alert(f"The latest reload of the farm on {host} did not succeed: {error}.", advice)
    live = [worker for worker in workers if worker["is_live"]]
    start = [worker for worker in live if worker["state"] == "starting"]
    for queue in sorted({queue for worker in start for queue in worker["queues"]}):
        of_queue = [worker for worker in live if queue in worker["queues"]]
        states = [(worker["state"], worker["started_at"]) for worker in of_queue]
        if text := waiting.starting(queue, states, of_queue[0]["seen_at"]):
            advice = "An import or a hook may hang: SIGTTIN to the supervisor logs the stacks of its workers."
            yield Alert(text, advice, page="workers")
    stuck = [worker for worker in live if worker["state"] == "stuck"]
    if stuck:
        silent_sec = min((worker["seen_at"] - worker["reported_at"]).total_seconds() for worker in stuck)
        advice = "The journals of their jobs have the stacks of their threads. Cancel them by force, or set on_stall."
        text = waiting.stuck(len(stuck), len(live), duration(silent_sec))
        yield Alert(text, advice, is_grave=False, page="workers")


def _broken(wrong: Row) -> Alert:
    """The alert of a schedule, a backfill, a webhook or a task that does not work, and of the others of its kind."""
    kind, name, number = wrong["kind"], wrong["name"], wrong["number"]
    one, many = "makes no jobs", "make no jobs"
    if kind == "webhook":
        one, many = "does not receive its messages", "do not receive their messages"
    elif kind == "task":
        one, many = "does not start", "do not start"
    who = f"The {kind} {name} {one}" if number == 1 else f"{count(number)} {kind}s {many}, among them {name}"
    is_grave = kind != "task"  # a host that starts again is away for a moment
    return Alert(f"{who}: {wrong['error']}.", page=f"{kind}s", since=wrong["since"], is_grave=is_grave)


def unfit(fitness: Row) -> Iterator[Alert]:
    """Why no job could be added and ended now, by stats.fitness; /ready says the first of them."""
    if fitness["in_recovery"]:
        yield Alert("The database is a standby: nothing can be written.", "Point DL_DB_DSN at the primary.")
    elif fitness["read_only"]:
        advice = "See the server's log and default_transaction_read_only: a full disk, or a switch-over."
        yield Alert("The database is read-only: nothing can be written.", advice)
    if lacking := fitness["lacking"]:
        more = f" and {len(lacking) - 3} more rights" if len(lacking) > 3 else ""
        text = f"The farm's role lacks {', '.join(lacking[:3])}{more}."
        yield Alert(text, "Grant them again: `dataloader migrate --roles farm=NAME`, as the owner of the tables.")
    if fitness["ids_left"] <= 0:
        yield Alert("The server has no transaction ids left: nothing can be written.", VACUUM)
    if fitness["disk_full"]:
        yield Alert("The server's disk is full: a write failed within the last minute.", "Make room there.")


def blocked(blockers: Sequence[Row]) -> Iterator[Alert]:
    """The sessions that stats.blockers names."""
    for each in blockers:
        since = "" if each["age_sec"] is None else f" for {duration(each['age_sec'])}"
        does = f"has held an advisory lock of the farm{since}: some duties of reaper and workers wait for it."
        if each["blocks"] == "notifications":
            does = f"has been in a transaction{since}, and may keep the NOTIFY queue from being emptied."
        elif each["blocks"] == "table":
            does = LOCKED
        advice = f"Unless its work should go on: SELECT pg_terminate_backend({each['pid']})."
        yield Alert(f"{waiting.holder({**each, 'kind': 'session'})} {does}", advice)


def _server_alerts(postgres: Row, lag_sec: float) -> Iterator[Alert]:
    # A role that may neither add nor change jobs is a reader's, which looks with `dataloader doctor --direct`.
    is_reader = {"INSERT on dl_jobs", "UPDATE on dl_jobs"} <= set(postgres["lacking"])
    yield from unfit({**postgres, "lacking": []} if is_reader else postgres)
    if 0 < postgres["ids_left"] < FEW_IDS:
        text = f"The server has {count(postgres['ids_left'])} transaction ids left: at 0 nothing can be written."
        yield Alert(text, VACUUM)
    if faults := postgres["faults"]:
        number = "a fault" if len(faults) == 1 else f"{len(faults)} faults; the first"
        advice = "`dataloader check` names each with its remedy."
        yield Alert(f"The schema has {number}: {faults[0]}.", advice)
    if not postgres["has_reaper"]:
        advice = "Start `dataloader reaper`; kill -CONT resumes one that was stopped."
        yield Alert("No reaper works: jobs of lost workers do not return, and schedules make none.", advice)
    if postgres["connections"] >= FULL * postgres["max_connections"]:
        text = f"{postgres['connections']} of {postgres['max_connections']} database connections are in use."
        yield Alert(text, "Workers and API will soon get no new connection.")
    if postgres["notify_usage"] > stats.NOTIFY_FULL:
        text = f"The NOTIFY queue is {percent(postgres['notify_usage'])} full."
        yield Alert(text, "A listening session does not read its notifications; at 100 % no job can be added.")
    yield from blocked(postgres["blockers"])
    if held := stats.slows_claims(dict(postgres), lag_sec):
        since = f" for {duration(held['age_sec'])}" if held["age_sec"] is not None else ""
        dead = f"{count(postgres['jobs_dead_tuples'])} dead rows of dl_jobs cannot be removed"
        advice = f"Claims get slower until it ends: {waiting.release(held)}."
        yield Alert(f"{waiting.holder(held)} has held back vacuum{since}: {dead}.", advice)
