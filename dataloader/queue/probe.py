"""Whether a connection is one session, which a pooler in transaction mode is not; every worker needs that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import uuid4

import psycopg
from psycopg import sql

from dataloader.config import AUTOMATIC_PREFETCH, ConfigError, WorkerSpec
from dataloader.queue import db

LOCK_SHARE = 4  # the part of the server's lock table that a machine's workers may fill with their jobs' keys: a quarter
HEARD_WITHIN = 2.0  # seconds; a NOTIFY takes milliseconds
POOLED = "the connection leads through a pooler in transaction mode, which loses locks and notifications"
REFUSED = "a pooler refuses the API's sessions"
ASTRAY = "a pooler drops our search_path, and the session is on another schema"
GUIDED = "ALTER ROLE ... SET search_path = (the schema), or set DL_DB_DSN to PostgreSQL itself"
BLIND = "the role {} may not see the sessions of this login"
SIGHT = "GRANT pg_read_all_stats, pg_signal_backend TO {}, or log in as it"
SHARED = "set pool_mode = transaction (or session) and ignore_startup_parameters = options in PgBouncer"
DIRECT = "set DL_DB_DSN (or PG_HOST, PG_PORT) to PostgreSQL itself; only the API may use a pooler"


def require_session(conn: db.Connection, dsn: str) -> None:
    """Raise ConfigError when `conn`, opened on `dsn`, is a pooler's in transaction mode, or on another schema."""
    if conn.is_direct:
        return
    with db.connect(dsn, name="dl-probe", schema="public", answer_within=5) as other:
        if not hears(conn, other):
            raise ConfigError(f"{POOLED}: {DIRECT}")
    if not finds_schema(conn):
        raise ConfigError(f"{ASTRAY}: {GUIDED}")


def hears(listener: db.Connection, sender: db.Connection) -> bool:
    """True if `listener` gets a NOTIFY of `sender`; its own NOTIFY could arrive even behind an idle pooler."""
    channel = sql.Identifier(f"dl_probe_{uuid4().hex}")
    listener.execute(sql.SQL("LISTEN {}").format(channel))
    sender.execute(sql.SQL("NOTIFY {}").format(channel))
    heard = list(listener.notifies(timeout=HEARD_WITHIN, stop_after=1))
    listener.execute(sql.SQL("UNLISTEN {}").format(channel))
    return bool(heard)


def finds_schema(conn: db.Connection) -> bool:
    """True when the session is on the schema that was asked for: a pooler in session mode drops our search_path."""
    schema = conn.execute("SELECT current_schema()").fetchone()
    with db.in_force(conn):
        return conn.execute("SELECT current_schema()").fetchone() == schema


class LockTable(NamedTuple):
    """The settings that make the size of the server's lock table, which all sessions of all databases share."""

    per_transaction: int  # max_locks_per_transaction
    transactions: int  # max_connections and max_prepared_transactions

    @property
    def room(self) -> int:
        """How many locks the server promises to have room for."""
        return self.per_transaction * self.transactions


def lock_table(conn: db.Connection) -> LockTable:
    """The lock table of this server. May raise psycopg.Error."""
    (row,) = conn.execute(
        "SELECT current_setting('max_locks_per_transaction')::int,"
        " current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int"
    ).fetchall()
    return LockTable(*row)


def keys_wanted(table: LockTable, workers: Sequence[WorkerSpec]) -> int:
    """How many keys, each an advisory lock, a machine's workers hold when each has claimed all that it may."""
    automatic = most_at_once(table, workers, is_automatic=True)
    return sum(spec.concurrency * (automatic if spec.is_automatic else spec.prefetch) for spec in workers)


def most_at_once(table: LockTable, workers: Sequence[WorkerSpec], is_automatic: bool = False) -> int:
    """How many jobs a worker with a `prefetch`, or an automatic one, may claim at once within the share of locks."""
    share = table.room // LOCK_SHARE
    given = [spec for spec in workers if not spec.is_automatic]
    others = sum(spec.concurrency for spec in workers) - sum(spec.concurrency for spec in given)
    wanted = sum(spec.concurrency * spec.prefetch for spec in given)
    if is_automatic:
        return max(1, min(AUTOMATIC_PREFETCH, (share - min(share, wanted)) // max(1, others)))
    if wanted + others <= share:
        return max((spec.prefetch for spec in given), default=1)
    return max(1, share // (others + sum(spec.concurrency for spec in given)))


def is_poolers_refusal(error: psycopg.Error) -> bool:
    """True for PgBouncer's refusal of the options that our sessions start with, or of transactions (statement mode)."""
    return any(part in str(error) for part in ("unsupported startup parameter", "statement pooling mode"))
