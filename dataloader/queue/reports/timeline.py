"""The timeline of the workers: which runs each had when; the activity: what has happened lately.

Every function may raise psycopg.Error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any, NamedTuple
from uuid import UUID

from dataloader.queue import db
from dataloader.queue.db import Conn, Row

READ = 200_000  # rows of the journal in which a page looks for its own
OF_RUNS = 12_000  # begins and ends of runs that one timeline reads
HOURS = (1, 3, 12, 24)
_SQL = db.statements("timeline.sql", "newest", "of_steps")
ENTRIES = 100  # of one activity
OF_JOBS = 5_000  # rows of each source that they are gathered from
OF_STEPS = 10_000  # rows of retries and of operators' orders that are read for them
TOGETHER = timedelta(minutes=5)
_OUTCOMES = {"done": "succeeded", "failed": "failed", "lost": "lost", "canceled": "canceled"}
# The text of each kind of entry, and the state of its mark.
KINDS = {
    "failed": ("dead: failed", "bad"),
    "lost": ("dead: lost", "bad"),
    "stuck": ("run is stuck", "bad"),
    "deadline": ("going to miss its deadline", "bad"),
    "crash": ("recovered: its worker died", "warn"),
    "lease": ("recovered: its lease ran out", "warn"),
    "requeue": ("requeued", "info"),
    "cancel_requested": ("asked to cancel", "info"),
    "canceled": ("canceled", "info"),
    "paused": ("queue paused", "warn"),
    "farm": ("oldest worker started", "info"),  # workers are replaced
    "schema": ("schema migrated", "info"),
    "backfill": ("backfill added", "info"),
    "backfill_canceled": ("backfill canceled", "warn"),
    "backfill_paused": ("backfill paused", "warn"),
    "schedule": ("schedule changed", "info"),
    "schedule_paused": ("schedule paused", "warn"),
    "schedule_error": ("schedule makes no jobs", "bad"),
    "limit": ("limit changed", "info"),
    "note": ("note about an error group", "info"),
}


class Run(NamedTuple):
    """One run at a worker; `outcome` is as in a badge: succeeded, failed, retry, …

    `started_at` None: it began before the time of the timeline; `ended_at` None: it goes on.
    """

    worker: str
    job_id: UUID
    task: str
    queue: str
    started_at: datetime | None
    ended_at: datetime | None
    outcome: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """The runs of a time, by their start; `is_cut`: the journal was read from later than asked for."""

    since: datetime
    until: datetime
    runs: list[Run]
    is_cut: bool


def read(conn: Conn, hours: int) -> Timeline:
    """The runs of the last hours; of a farm with more than OF_RUNS begins and ends in this time, the latest."""
    with conn.transaction():
        db.by_index(conn, bitmaps=True)
        (clock,) = _SQL.rows(conn, "clock", hours=hours, read=READ)
        since = max(clock["asked"], clock["oldest"] or clock["asked"])
        events = _SQL.rows(conn, "events", since=since, read=READ, most=OF_RUNS)
        running = _SQL.rows(conn, "running")
    if len(events) == OF_RUNS:
        since = events[-1]["ts"]
    return Timeline(since, clock["now"], paired(reversed(events), running, since), since > clock["asked"])


def paired(events: Iterable[Row], running: Iterable[Row], since: datetime) -> list[Run]:
    """PURE: the runs in these rows of the journal, without those whose end is unknown."""
    begun: dict[UUID, Row] = {row["job_id"]: row for row in running if row["ts"] <= since}
    now_running = {row["job_id"] for row in running}
    runs: list[Run] = []

    def add(start: Row, began: datetime | None, ended_at: datetime | None, outcome: str) -> None:
        if worker := start["worker"]:
            runs.append(Run(worker, start["job_id"], start["task"] or "", start["queue"], began, ended_at, outcome))

    for event in events:
        if event["kind"] == "picked":
            begun[event["job_id"]] = event
            continue
        start = begun.pop(event["job_id"], None) or event
        began = start["ts"] if start is not event else None
        outcome = _OUTCOMES.get(event["kind"], "retry" if event["step"] == "retry" else "requeued")
        add(start, began, event["ts"], outcome)
    for job_id, start in begun.items():
        if job_id in now_running:
            add(start, start["ts"], None, "running")
    return sorted(runs, key=lambda run: (run.started_at or since, run.worker))


def busy(runs: Iterable[Run], since: datetime, until: datetime) -> float:
    """PURE: the share of a worker's time in which it had a run; overlapping runs, those of one call, count once."""
    total, reached = timedelta(), since
    for run in sorted(runs, key=lambda run: run.started_at or since):
        end = min(run.ended_at or until, until)
        if end > reached:
            total += end - max(run.started_at or since, reached)
            reached = end
    return total / (until - since) if until > since else 0.0


def activity(conn: Conn) -> tuple[list[Row], datetime | None]:
    """The latest entries, the newest first, up to ENTRIES (see `gathered`); and since when they are complete.

    That is None where all was read. Else older jobs are missing, also in the counts.
    """
    with conn.transaction():
        db.by_index(conn, bitmaps=True)
        dead = _SQL.rows(conn, "dead", most=OF_JOBS)
        steps = _SQL.rows(conn, "steps", most=OF_JOBS, read=READ, looked=OF_STEPS)
        unread = _SQL.rows(conn, "steps_since", read=READ, looked=OF_STEPS)
        states = _SQL.rows(conn, "states", most=ENTRIES)
        (clock,) = _SQL.rows(conn, "clock", hours=0, read=READ)
    rows = gathered(dead + steps) + [row | {"task": None, "job_id": None} for row in states]
    read_to = [read[-1]["at"] for read in (dead, steps) if len(read) == OF_JOBS]
    cuts = [clock["oldest"], *read_to, *(row["at"] for row in unread)]
    return sorted(rows, key=itemgetter("at"), reverse=True)[:ENTRIES], max(filter(None, cuts), default=None)


def gathered(rows: Iterable[Row]) -> list[Row]:
    """PURE: rows of one kind, queue, task and author within TOGETHER as one entry, as of the latest; `count` jobs."""
    result: list[Row] = []
    latest: dict[tuple[Any, ...], Row] = {}
    for row in sorted(rows, key=itemgetter("at"), reverse=True):
        kind = (row["step"], row["queue"], row["task"], row["by"])
        entry = latest.get(kind)
        if entry is None or entry["at"] - row["at"] > TOGETHER:
            entry = latest[kind] = row | {"jobs": set(), "name": None}
            result.append(entry)
        entry["jobs"].add(row["job_id"])
    return [entry | {"count": len(entry["jobs"])} for entry in result]
