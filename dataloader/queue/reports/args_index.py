"""The index for searches by arguments (`args.date:2024-05-01`), which operators make where they want it.

Each insert and each change of a job's status writes to it, so no migration makes it. Both functions work beside a
running farm, need the owner of dl_jobs, and may raise psycopg.Error.
"""

from __future__ import annotations

from dataloader.queue import db
from dataloader.queue.db import Conn
from dataloader.queue.reports import stats

_SQL = db.statements("search.sql")


def create(conn: Conn) -> bool:
    """Make the index, outside of any transaction; False: it was there. One that is invalid is made anew."""
    if stats.has_args_index(conn):
        return False
    conn.execute(_SQL["drop_args_index"])
    conn.execute(_SQL["create_args_index"])
    return True


def drop(conn: Conn) -> bool:
    """Remove the index, outside of any transaction; False: there was none."""
    found = conn.execute(_SQL["args_index"]).fetchone()
    conn.execute(_SQL["drop_args_index"])
    return found is not None
