"""The fence of the target database: a run without its claim cannot commit a transaction there.

A stopped or disconnected worker may resume writing after another worker has started its job anew. The queue refuses the
old worker's finish, but the queue has never seen the target's rows. So the target keeps a table `dl_fence` with the
highest fencing token of each job (M. Kleppmann, "How to do distributed locking", 2016); a run's token is `Job.claim`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

import psycopg
from psycopg import errors, sql

from dataloader.queue import db

_SQL = db.statements("target.sql")


class Overtaken(Exception):
    """A newer run of the job has begun: the older run's transaction is rolled back."""


@contextmanager
def transaction(
    dsn: str,
    schema: str,
    job_id: UUID,
    fence_token: int,
    owner: str = "",
    leap: Callable[[int], int | None] = lambda fence: None,
) -> Iterator[psycopg.Connection[Any]]:
    """A transaction on a connection of its own; it commits only while `fence_token` of `owner` is the job's highest.

    At its start the transaction ends the sessions of older runs of the job and waits for their commits. Where another
    owner's fence stands at `fence_token` or above, `leap` gets the fence's number and returns a higher token from the
    queue, or None when the job belongs to another worker. Raises Overtaken, after a rollback, when a newer run has
    begun; psycopg.Error as psycopg does; any exception of `leap`.
    """
    # No limits: a pipeline may compute for hours in one statement or between two.
    conn = db.connect(
        dsn,
        name=_name(job_id, fence_token),
        schema=schema,
        answer_within=7 * 86_400,
        idle_in_transaction_timeout=0,
        keeps_defaults=True,
    )
    with conn:
        session = "^" + _name(job_id, "([0-9]+)") + "$"
        fence = {"job_id": job_id, "claim": fence_token, "owner": owner, "session": session}
        where = _raise(conn, fence) or _leap(conn, fence, leap)
        conn.execute(_SQL["forget"])
        with conn.transaction():
            conn.execute(_SQL["unlimited"])
            yield conn
            _hold(conn, where, fence)


def _name(job_id: UUID, fence_token: int | str) -> str:
    return f"dl-job:{job_id}:{fence_token}"


def _raise(conn: db.Connection, fence: dict[str, Any]) -> str | None:
    """Raise the fence to this run's token; the schema of the fence, or None when another run's fence stands there."""
    conn.execute(_SQL["end_older"], fence)
    try:
        row = conn.execute(_SQL["raise"], fence).fetchone()
    except (errors.UndefinedTable, errors.UndefinedColumn) as e:
        _make(conn, "create" if isinstance(e, errors.UndefinedTable) else "widen")
        row = conn.execute(_SQL["raise"], fence).fetchone()
    return str(row[0]) if row else None


def _leap(conn: db.Connection, fence: dict[str, Any], leap: Callable[[int], int | None]) -> str:
    """Raise the fence above its present number, if the queue confirms this run's claim.

    After the queue was set back, a run without its claim may have the next run's token or a higher one. The run that
    finds another owner's fence asks the queue once; the queue knows one of the two runs. If the fence has risen again
    meanwhile, a later run has raised the fence.
    """
    row = conn.execute(_SQL["height"], fence).fetchone()
    fence_token = leap(row[0] if row else fence["claim"])
    if fence_token is not None:
        fence["claim"] = fence_token
        conn.execute(_SQL["rename"], {"name": _name(fence["job_id"], fence_token)})
        if where := _raise(conn, fence):
            return where
    raise Overtaken


def _make(conn: db.Connection, what: str) -> None:
    # Another run may create the table at the same time: IF NOT EXISTS does not prevent these errors.
    with suppress(errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateObject, errors.DuplicateColumn):
        conn.execute(_SQL[what])


def _hold(conn: db.Connection, where: str, fence: dict[str, Any]) -> None:
    row = conn.execute(sql.SQL(_SQL["hold"]).format(schema=sql.Identifier(where)), fence).fetchone()
    if row is None or not row[0]:
        raise Overtaken
