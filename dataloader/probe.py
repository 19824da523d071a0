"""What a worker needs of its session: that it is one session, which keeps a lock and hears a NOTIFY.

A pooler in transaction mode lends a different one for each transaction: locks leak into it and LISTEN stays behind.
May import `db`.
"""

from __future__ import annotations

from uuid import uuid4

import psycopg
from psycopg import sql

from dataloader import db
from dataloader.config import ConfigError

HEARD_WITHIN = 2.0  # seconds; a NOTIFY takes milliseconds
POOLED = "the connection leads through a pooler in transaction mode, which loses locks and notifications"
DIRECT = "set DL_DB_DSN (or PG_HOST, PG_PORT) to PostgreSQL itself; only the API may use a pooler"


def require_session(conn: db.Connection, dsn: str) -> None:
    """Raise ConfigError when `conn`, opened on `dsn`, is a pooler's in transaction mode.

    One round trip where nothing is in between; otherwise one more connection and up to HEARD_WITHIN seconds. May raise
    psycopg.Error.
    """
    if is_direct(conn):
        return
    with db.connect(dsn, name="dl-probe", schema="public", answer_within=5) as other:
        if not hears(conn, other):
            raise ConfigError(f"{POOLED}: {DIRECT}")


def is_direct(conn: db.Connection) -> bool:
    """True when PostgreSQL itself opened this session; a pooler hands out cancellation keys of its own making."""
    row = conn.execute("SELECT pg_backend_pid()").fetchone()
    return row == (conn.info.backend_pid,)


def hears(listener: db.Connection, sender: db.Connection) -> bool:
    """True when `listener` hears what `sender` notifies: in transaction mode its LISTEN has stayed behind.

    Its own NOTIFY, or a lock that it still holds, would prove nothing: an idle pooler lends it the same session again.
    """
    channel = sql.Identifier(f"dl_probe_{uuid4().hex}")
    listener.execute(sql.SQL("LISTEN {}").format(channel))
    sender.execute(sql.SQL("NOTIFY {}").format(channel))
    heard = list(listener.notifies(timeout=HEARD_WITHIN, stop_after=1))
    listener.execute(sql.SQL("UNLISTEN {}").format(channel))
    return bool(heard)


def is_poolers_refusal(error: psycopg.Error) -> bool:
    """True for PgBouncer's refusal of the options that our sessions start with (before 1.20, unless configured)."""
    return "unsupported startup parameter" in str(error)
