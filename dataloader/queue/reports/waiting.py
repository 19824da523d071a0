"""PURE: the reasons of `waiting_for` (lifecycle.status), each with its sentence; the holder of vacuum."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from dataloader.queue.reports.words import duration

START_LONG = timedelta(minutes=1)  # more than a start with large libraries takes


def words(waiting_for: dict[str, Any] | None, now: datetime) -> str:
    """The sentences of a job's reasons; "" for a job that is not queued. Instants may be datetimes or texts."""
    if waiting_for is None:
        return ""
    return " Besides: ".join(_sentence(each, now) for each in (waiting_for, *(waiting_for.get("besides") or ())))


def _sentence(waiting_for: dict[str, Any], now: datetime) -> str:
    """The sentence of one reason. A new one costs a case here, and its place in the statement `status`."""
    why = waiting_for | {
        name: datetime.fromisoformat(at) for name in ("since", "until") if isinstance(at := waiting_for.get(name), str)
    }
    queue, key, job_id, until = (why.get(name) for name in ("queue", "lock_key", "job_id", "until"))
    workers = why.get("workers", 0)
    match why["reason"]:
        case "paused":
            by = f" by {why['by']}" if why.get("by") else ""
            return f"The queue {queue} is paused: for {duration(now - why['since'])}{by}. Resume it to go on."
        case "time" if why["until"] <= now:
            return "Its time has come: a worker or the reaper is about to take note of that."
        case "time":
            return f"Its time has not come: it is due in {duration(why['until'] - now)}."
        case "parent":
            held = (
                " It goes on waiting when one fails, until that has succeeded." if why["on_failure"] == "hold" else ""
            )
            first = f"{why['task']} ({key})" if why.get("task") else job_id
            if why.get("since"):
                ago = duration(now - why["since"])
                return f"Its parent {first} ended {ago} ago without success: requeue that, or run this job now."
            if why["parents"] == 1:
                return f"It starts when 1 job has ended: {first}.{held}"
            return f"It starts when {why['parents']} jobs have ended, the first of which is {first}.{held}"
        case "lock":
            return f"Its key {key} is held by {f'job {job_id}' if job_id else 'another job'}, which runs."
        case "session":
            who = f": {why['application'] or 'no name'}, backend {why['pid']}" if why.get("pid") else ""
            again = duration(why["until"] - now)
            return f"Its key {key} is held by a database session that runs no job of ours{who}. Next try in {again}."
        case "order":
            due = f"is due in {duration(until - now)}" if until and until > now else "has not run yet"
            before = f"job {job_id}" if job_id else "another job"
            return f"Its queue is ordered: the jobs of its key {key} wait for {before}, which {due}."
        case "dead":
            dead = f"the dead job {job_id}" if job_id else "a dead job"
            return f"Its key {key} is held by {dead}: requeue or delete that job to go on."
        case "worker" if why.get("ahead"):
            ahead = why["ahead"]
            many = {1: "1 job"}.get(ahead, f"{ahead} jobs" if ahead < 1_000 else "1,000 jobs or more")
            served = {0: "", 1: "; 1 worker serves that queue"}.get(workers, f"; {workers} workers serve that queue")
            return f"{many} of the queue {queue} {'goes' if ahead == 1 else 'go'} before it{served}."
        case "worker":  # a queue with running jobs and without a worker that shows itself is served by plain services
            who = {0: "a worker", 1: "the only worker"}.get(workers, f"one of {workers} workers")
            room = f" and its host has room for its {why['need_mb']:,.0f} MB" if why.get("need_mb") else ""
            return f"It is the next of its queue: it starts when {who} of {queue} is free{room}."
        case "stopped":
            who, verb, them = (
                ("The only worker", "is", "it") if workers == 1 else (f"All {workers} workers", "are", "them")
            )
            return (
                f"{who} of the queue {queue} {verb} stopped (SIGSTOP, a debugger):"
                f" send {them} kill -CONT, or end {them} by kill -KILL and others take their place."
            )
        case "no_worker":
            return f"No worker serves the queue {queue}: start one, or correct WORKERS_JSON or the job's queue."
        case "memory":
            return (
                f"No host of the queue {queue} has the memory for it: a run of the task {why['task']} needs"
                f" {why['need_mb']:,.0f} MB, and runs may use {why['room_mb']:,.0f} MB together there (DL_HOST_MEMORY)."
            )
        case "limit" if until:
            return f"The limit {why['limit']} lets the next job start in {duration(until - now)}."
        case "limit":
            jobs = "1 job of it runs" if why["running"] == 1 else f"{why['running']} jobs of it run"
            return f"The limit {why['limit']} has no room: {jobs}, and it allows {why['most']}."
    return f"It waits for: {why['reason']}."


def holder(held: dict[str, Any]) -> str:
    """The holder of vacuum (see stats.vacuum), as the subject of a sentence."""
    if held["kind"] in ("session", "standby"):
        name = f" ({held['application']})" if held.get("application") else ""
        subject = "The standby" if held["kind"] == "standby" else "The database session"
        return f"{subject} of {held.get('user') or 'an unknown role'}{name}, backend {held['pid']},"
    return f"The {held['kind']} {held['application']}"


def release(held: dict[str, Any]) -> str:
    """The step that ends the hold."""
    ends = {
        "session": f"SELECT pg_terminate_backend({held['pid']})",
        "standby": "hot_standby_feedback there sends the oldest snapshot of its queries: end those",
        "prepared transaction": f"COMMIT PREPARED or ROLLBACK PREPARED '{held['application']}'",
        "replication slot": "let its reader go on, or pg_drop_replication_slot",
    }
    return ends.get(held["kind"], "see docs/troubleshooting.md")


def stuck(count: int, workers: int, silence: str) -> str:
    """The sentence that so many of these workers run jobs that have sent no report for so long."""
    whose = f"{count} of {workers} worker{'' if workers == 1 else 's'}"
    return f"{whose} {'has' if count == 1 else 'have'} reported nothing for {silence}."


def starting(queue: str, workers: Sequence[tuple[str, datetime | None]], now: datetime) -> str:
    """The sentence that all workers of a queue, by state and start, have been starting for long; else ""."""
    starts = [began for state, began in workers if state == "starting" and began is not None]
    if not starts or len(starts) < len(workers) or now - max(starts) < START_LONG:
        return ""
    return f"No worker of queue {queue} has finished its start for {duration(now - max(starts))}."
