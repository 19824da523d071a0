"""The index for searches by arguments. It makes each write dearer, so only operators make it, beside a running farm."""

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
