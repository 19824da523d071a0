"""The recent events: dead jobs, recoveries, operators' steps, starts of farms. May raise psycopg.Error."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from dataloader.queue import db
from dataloader.queue.db import Conn, Row

SHOWN = 100
MOST = 300  # of each source
SCAN = 10_000  # rows of the journal that are read for rare entries
TOGETHER = timedelta(minutes=5)
_SQL = db.statements("timeline.sql")
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
    "farm": ("farm started", "info"),
    "schema": ("schema upgraded", "info"),
    "backfill": ("backfill added", "info"),
    "backfill_canceled": ("backfill canceled", "warn"),
    "backfill_paused": ("backfill paused", "warn"),
    "schedule": ("schedule changed", "info"),
    "schedule_paused": ("schedule paused", "warn"),
    "schedule_error": ("schedule makes no jobs", "bad"),
    "limit": ("limit changed", "info"),
    "note": ("note about an error group", "info"),
}


def read(conn: Conn) -> list[Row]:
    """The latest entries, the newest first, up to SHOWN, of the latest SCAN rows of the journal; see `gathered`."""
    with conn.transaction():
        conn.execute(_SQL["plans"])
        jobs = db.rows(conn, _SQL["dead"], {"most": MOST}) + db.rows(conn, _SQL["steps"], {"most": MOST, "scan": SCAN})
        states = db.rows(conn, _SQL["states"], {"most": SHOWN})
    rows = gathered(jobs) + [row | {"task": None, "job_id": None} for row in states]
    return sorted(rows, key=lambda row: row["at"], reverse=True)[:SHOWN]


def gathered(rows: Iterable[Row]) -> list[Row]:
    """PURE: rows of one kind, queue, task and author within TOGETHER as one entry with `count`, as of the latest."""
    result: list[Row] = []
    latest: dict[tuple[Any, ...], Row] = {}
    for row in sorted(rows, key=lambda row: row["at"], reverse=True):
        kind = (row["step"], row["queue"], row["task"], row["by"])
        entry = latest.get(kind)
        if entry and entry["at"] - row["at"] <= TOGETHER:
            entry["count"] += 1
        else:
            latest[kind] = row | {"count": 1, "name": None}
            result.append(latest[kind])
    return result
