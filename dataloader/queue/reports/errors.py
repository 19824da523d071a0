"""The errors of dead and retrying jobs in groups, by queue, task and error group. May raise psycopg.Error."""

from __future__ import annotations

from datetime import datetime

from dataloader.queue import db
from dataloader.queue.db import Conn, Row

GROUPS = 50  # of one answer
SCAN = 5_000  # dead jobs that an answer counts, all queues together
SCAN_RETRIED = 1_000  # the same of jobs that wait for a retry: the journal is asked about each
HOURS = 24
NOTE_MOST = 2_000  # characters
_SQL = db.statements("errors.sql")


def groups(conn: Conn, queue: str | None = None, task: str | None = None, since: datetime | None = None) -> Row:
    """The largest groups since then, up to GROUPS, as model.ErrorGroups; `by_hour` counts failures of HOURS."""
    wanted = {"queue": queue, "task": task, "since": since, "most": GROUPS, "scan": SCAN, "scan_retried": SCAN_RETRIED}
    with conn.transaction():
        db.by_index(conn)
        rows = _SQL.rows(conn, "groups", **wanted)
    is_cut = any([row.pop("is_cut") for row in rows])
    for row in rows:
        counts = row["by_hour"] or {}
        row |= {"by_hour": [counts.get(str(ago), 0) for ago in reversed(range(HOURS))], "hosts": row["hosts"] or []}
    return {"groups": rows, "is_cut": is_cut}


def write_note(conn: Conn, task: str, error_group: str, note: str, by: str) -> None:
    """Keep a note about a group in the place of an earlier one; "" removes it."""
    named = {"task": task, "error_group": error_group, "note": note.strip(), "by": by}
    _SQL.do(conn, "write_note" if note.strip() else "clear_note", **named)
