"""Cleanups: jobs that end what canceled jobs have left behind elsewhere, as their checkpoints say by `on_cancel`.

The reaper adds a job of the same task, args and queue; its checkpoint has `canceled`, the id of the canceled job, in
the place of `on_cancel`. A run that is canceled cleans up itself. Every function may raise psycopg.Error.
"""

from __future__ import annotations

from uuid import UUID

from psycopg.rows import dict_row

from dataloader.queue import db, enqueue
from dataloader.queue.db import Conn

ATTEMPTS = 40  # of a cleanup, some seven hours with the pauses between them: the cluster may be away
PRIORITY = 0  # before other jobs, because a canceled program still uses the cluster
MOST = 1_000  # jobs of one round; the next round continues with the rest

_SQL = db.statements("cleanups.sql")


def due(conn: Conn) -> list[UUID]:
    """The canceled jobs that have left something behind and have no cleanup."""
    return [job_id for (job_id,) in conn.execute(_SQL["due"], {"most": MOST})]


def add(conn: Conn, job_id: UUID) -> UUID | None:
    """Add the cleanup of a canceled job, also to a full queue; its id, None: it is not needed, or the row is locked."""
    with conn.transaction(), conn.cursor(row_factory=dict_row) as cursor:
        job = cursor.execute(_SQL["take"], {"job_id": job_id}).fetchone()
        if job is None or cursor.execute(_SQL["strike"], {"job_id": job_id}).fetchone() is None:
            return None
        job |= {"lock_key": f"cleanup of {job_id}", "priority": PRIORITY, "max_attempts": ATTEMPTS, "limits": []}
        cleanup, _ = enqueue.enqueue(conn, enqueue.NewJob(**job, producer="cleanups"))
        conn.execute(_SQL["hand_over"], {"job_id": job_id, "cleanup": cleanup})
        return cleanup


def forget(conn: Conn) -> None:
    """Remove the notes of jobs without a cleanup."""
    conn.execute(_SQL["forget"])
