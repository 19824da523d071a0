"""Cleanups: jobs that end what canceled jobs have left behind elsewhere, as their checkpoints say by `on_cancel`.

The reaper adds a job of the same task, args and queue; its checkpoint has `canceled`, the id of the canceled job, in
the place of `on_cancel`. A run that is canceled cleans up itself. Every function may raise psycopg.Error.
"""

from __future__ import annotations

from uuid import UUID

from dataloader.queue import db, enqueue
from dataloader.queue.db import Conn

ATTEMPTS = 40  # of a cleanup, some seven hours with the pauses between them: the cluster may be away
PRIORITY = 0  # before other jobs, because a canceled program still uses the cluster
MOST = 1_000  # jobs of one round; the next round continues with the rest

_SQL = db.statements("cleanups.sql")


def due(conn: Conn) -> list[UUID]:
    """The canceled jobs that have left something behind and have no cleanup."""
    return [row["job_id"] for row in _SQL.rows(conn, "due", most=MOST)]


def add(conn: Conn, job_id: UUID) -> UUID | None:
    """Add the cleanup of a canceled job, also to a full queue; its id, None: it is not needed, or the row is locked."""
    with conn.transaction():
        job = _SQL.first(conn, "take", job_id=job_id)
        if job is None or not _SQL.do(conn, "strike", job_id=job_id):
            return None
        job |= {"lock_key": f"cleanup of {job_id}", "priority": PRIORITY, "max_attempts": ATTEMPTS, "limits": []}
        cleanup, _ = enqueue.enqueue(conn, enqueue.NewJob(**job, producer="cleanups"))
        _SQL.do(conn, "hand_over", job_id=job_id, cleanup=cleanup)
        return cleanup


def forget(conn: Conn) -> None:
    """Remove the notes of jobs without a cleanup."""
    _SQL.do(conn, "forget")
