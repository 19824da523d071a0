"""PURE: the reasons of `waiting_for` (lifecycle.status), each with its sentence; the holder of vacuum."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any


def words(waiting_for: dict[str, Any] | None, now: datetime) -> str:
    """The sentence of a job's reason; "" for a job that is not queued. Instants may be datetimes or RFC 3339 texts."""
    if waiting_for is None:
        return ""
    describe = REASONS.get(waiting_for["reason"])
    return describe(waiting_for, now) if describe else f"It waits for: {waiting_for['reason']}."


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


def duration(length: timedelta) -> str:
    """A duration in its two largest units, in whole seconds: 3 d 4 h, 12 min 5 s, 0 s."""
    left = max(0, round(length.total_seconds()))
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def _paused(why: dict[str, Any], now: datetime) -> str:
    by = f" by {why['by']}" if why.get("by") else ""
    return f"The queue {why['queue']} is paused: for {duration(now - _instant(why['since']))}{by}. Resume it to go on."


def _time(why: dict[str, Any], now: datetime) -> str:
    until = _instant(why["until"])
    if until <= now:
        return "Its time has come: a worker or the reaper is about to take note of that."
    return f"Its time has not come: it is due in {duration(until - now)}."


def _lock(why: dict[str, Any], now: datetime) -> str:
    return f"Its key {why['lock_key']} is held by job {why['job_id']}, which runs."


def _session(why: dict[str, Any], now: datetime) -> str:
    holder = f": {why['application'] or 'no name'}, backend {why['pid']}" if why.get("pid") else ""
    again = duration(_instant(why["until"]) - now)
    text = f"Its key {why['lock_key']} is held by a database session that runs no job of ours{holder}."
    return f"{text} Next try in {again}."


def _order(why: dict[str, Any], now: datetime) -> str:
    until = _instant(why["until"])
    due = f", which is due in {duration(until - now)}" if until > now else ", which has not run yet"
    return f"Its queue is ordered: the jobs of its key {why['lock_key']} wait for job {why['job_id']}{due}."


def _limit(why: dict[str, Any], now: datetime) -> str:
    if "until" in why:
        return f"The limit {why['limit']} lets the next job start in {duration(_instant(why['until']) - now)}."
    jobs = "1 job of it runs" if why["running"] == 1 else f"{why['running']} jobs of it run"
    return f"The limit {why['limit']} has no room: {jobs}, and it allows {why['most']}."


def _dead(why: dict[str, Any], now: datetime) -> str:
    return f"Its key {why['lock_key']} is held by the dead job {why['job_id']}: requeue or delete that job to go on."


def _worker(why: dict[str, Any], now: datetime) -> str:
    ahead, workers, queue = why.get("ahead", 0), why.get("workers", 0), why["queue"]
    if not ahead:  # a queue with running jobs and no worker that shows itself is served by older code or plain services
        worker = {0: f"a worker of {queue}", 1: f"the only worker of {queue}"}.get(
            workers, f"one of {workers} workers of {queue}"
        )
        room = f" and its host has room for its {why['need_mb']:,.0f} MB" if why.get("need_mb") else ""
        return f"It is the next of its queue: it starts when {worker} is free{room}."
    many = {1: "1 job"}.get(ahead, f"{ahead} jobs" if ahead < 1_000 else "1,000 jobs or more")
    served = {0: "", 1: "; 1 worker serves that queue"}.get(workers, f"; {workers} workers serve that queue")
    return f"{many} of the queue {queue} {'goes' if ahead == 1 else 'go'} before it{served}."


def _memory(why: dict[str, Any], now: datetime) -> str:
    return (
        f"No host of the queue {why['queue']} has the memory for it: a run of the task {why['task']} needs"
        f" {why['need_mb']:,.0f} MB, and runs may use {why['room_mb']:,.0f} MB together there (DL_HOST_MEMORY)."
    )


def _parent(why: dict[str, Any], now: datetime) -> str:
    many = "1 job" if why["parents"] == 1 else f"{why['parents']} jobs"
    first = f", the first of which is {why['job_id']}" if why["parents"] > 1 else f": {why['job_id']}"
    held = " It goes on waiting when one fails, until that has succeeded." if why["on_failure"] == "hold" else ""
    return f"It starts when {many} have ended{first}.{held}".replace("1 job have", "1 job has")


def _stopped(why: dict[str, Any], now: datetime) -> str:
    workers = why["workers"]
    subject, them = ("The only worker", "it") if workers == 1 else (f"All {workers} workers", "them")
    verb = "is" if workers == 1 else "are"
    return (
        f"{subject} of the queue {why['queue']} {verb} stopped (SIGSTOP, a debugger):"
        f" send {them} kill -CONT, or end {them} by kill -KILL and others take their place."
    )


def _no_worker(why: dict[str, Any], now: datetime) -> str:
    return f"No worker serves the queue {why['queue']}: start one, or correct WORKERS_JSON or the job's queue."


# A new reason costs a line here, its function, and its place in the statement `status`.
REASONS: dict[str, Callable[[dict[str, Any], datetime], str]] = {
    "paused": _paused,
    "time": _time,
    "parent": _parent,
    "lock": _lock,
    "session": _session,
    "order": _order,
    "dead": _dead,
    "worker": _worker,
    "stopped": _stopped,
    "no_worker": _no_worker,
    "memory": _memory,
    "limit": _limit,
}


def stuck(count: int, workers: int, silence: str) -> str:
    """The sentence that so many of these workers run jobs that have sent no report for so long."""
    whose = f"{count} of {workers} worker{'' if workers == 1 else 's'}"
    return f"{whose} {'has' if count == 1 else 'have'} reported nothing for {silence}."


def _instant(value: Any) -> datetime:
    return value if isinstance(value, datetime) else datetime.fromisoformat(value)
