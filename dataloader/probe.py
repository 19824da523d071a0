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
REFUSED = "a pooler refuses the API's sessions"
ASTRAY = "a pooler drops our search_path, and the session is on another schema"
GUIDED = "ALTER ROLE ... SET search_path = (the schema), or set DL_DB_DSN to PostgreSQL itself"
SHARED = "set pool_mode = transaction (or session) and ignore_startup_parameters = options in PgBouncer"
DIRECT = "set DL_DB_DSN (or PG_HOST, PG_PORT) to PostgreSQL itself; only the API may use a pooler"


def require_session(conn: db.Connection, dsn: str) -> None:
    """Raise ConfigError when `conn`, opened on `dsn`, is a pooler's in transaction mode, or on another schema.

    One round trip where nothing is in between; otherwise one more connection and up to HEARD_WITHIN seconds. May raise
    psycopg.Error.
    """
    if conn.is_direct:
        return
    with db.connect(dsn, name="dl-probe", schema="public", answer_within=5) as other:
        if not hears(conn, other):
            raise ConfigError(f"{POOLED}: {DIRECT}")
    if not finds_schema(conn):
        raise ConfigError(f"{ASTRAY}: {GUIDED}")


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


def finds_schema(conn: db.Connection) -> bool:
    """True when the session is on the schema that was asked for: a pooler in session mode drops our search_path."""
    there = conn.execute("SELECT current_schema()").fetchone()
    with db.in_force(conn):
        return conn.execute("SELECT current_schema()").fetchone() == there


def is_poolers_refusal(error: psycopg.Error) -> bool:
    """True for PgBouncer's refusal of the options that our sessions start with, or of transactions (statement mode)."""
    return any(part in str(error) for part in ("unsupported startup parameter", "statement pooling mode"))
