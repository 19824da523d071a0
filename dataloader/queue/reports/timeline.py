"""The timeline of the workers: which runs each had when, from the journal. Every function may raise psycopg.Error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from dataloader.queue import db
from dataloader.queue.db import Conn, Row

SCAN = 12_000  # rows of the journal that one answer reads
HOURS = (1, 3, 12, 24)
_SQL = db.statements("timeline.sql")
_OUTCOMES = {"done": "succeeded", "failed": "failed", "lost": "lost", "canceled": "canceled"}


class Run(NamedTuple):
    """One run at a worker; `ended_at` None while it goes on. `outcome` is as in a badge: succeeded, failed, retry, …"""

    worker: str
    job_id: UUID
    task: str
    queue: str
    started_at: datetime
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
    """The runs of the last hours; of a farm with more than SCAN rows of the journal in this time, the latest."""
    with conn.transaction():
        conn.execute(_SQL["plans"])
        (clock,) = db.rows(conn, _SQL["clock"], {"hours": hours, "scan": SCAN})
        since = max(clock["asked"], clock["oldest"] or clock["asked"])
        events = db.rows(conn, _SQL["events"], {"since": since, "scan": SCAN}, prepare=False)
        running = db.rows(conn, _SQL["running"])
    is_cut = since > clock["asked"]
    return Timeline(since, clock["now"], paired(events, running, since), is_cut)


def paired(events: Iterable[Row], running: Iterable[Row], since: datetime) -> list[Run]:
    """PURE: the runs that these rows of the journal tell of, but for those of which the begin or end is unknown."""
    begun: dict[UUID, Row] = {row["job_id"]: row for row in running if row["ts"] < since}
    now_running = {row["job_id"] for row in running}
    runs: list[Run] = []

    def add(start: Row, at: datetime, ended_at: datetime | None, outcome: str) -> None:
        if worker := start["worker"]:
            runs.append(Run(worker, start["job_id"], start["task"] or "", start["queue"], at, ended_at, outcome))

    for event in events:
        if event["kind"] == "picked":
            begun[event["job_id"]] = event
            continue
        start = begun.pop(event["job_id"], None) or event
        at = max(start["ts"], since) if start is not event else since
        add(start, at, event["ts"], _OUTCOMES.get(event["kind"], "retry" if event["step"] == "retry" else "requeued"))
    for job_id, start in begun.items():
        if job_id in now_running:
            add(start, max(start["ts"], since), None, "running")
    return sorted(runs, key=lambda run: (run.started_at, run.worker))


def busy(runs: Iterable[Run], since: datetime, until: datetime) -> float:
    """PURE: the share of a worker's time in which it had a run; overlapping runs, those of one call, count once."""
    total, reached = timedelta(), since
    for run in sorted(runs, key=lambda run: run.started_at):
        end = min(run.ended_at or until, until)
        if end > reached:
            total += end - max(run.started_at, reached)
            reached = end
    return total / (until - since) if until > since else 0.0
