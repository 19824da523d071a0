"""The target database: where pipelines write, in transactions that a run without its claim cannot commit.

A worker that was stopped, or cut off, may come back when its job has been started anew, and go on writing: the queue
refuses its finish, but it has never seen the target's rows. So the target itself keeps a fence (the fencing token of
M. Kleppmann, "How to do distributed locking", 2016): a table `dl_fence` with the newest claim of each job. May import
`db`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

import psycopg
from psycopg import errors, sql

from dataloader import db

_SQL = db.statements("target.sql")


class Overtaken(Exception):
    """A newer run of the job has begun: nothing that this one does may stand."""


@contextmanager
def transaction(dsn: str, schema: str, job_id: UUID, claim: int) -> Iterator[psycopg.Connection[Any]]:
    """A transaction that commits only while `claim` is the job's newest, on a connection of its own.

    Its start ends what older runs of the job still have open there and waits for their commits. Raises Overtaken, and
    rolls back, when a newer run has begun; psycopg.Error as psycopg does.
    """
    # No limits: hours of computing between two statements, or in one, are what pipelines are for.
    conn = db.connect(
        dsn,
        name=f"dl-job:{job_id}:{claim}",
        schema=schema,
        answer_within=7 * 86_400,
        idle_in_transaction_timeout=0,
        keeps_defaults=True,
    )
    with conn:
        fence = {"job_id": job_id, "claim": claim, "session": f"^dl-job:{job_id}:(\\d+)$"}
        conn.execute(_SQL["end_older"], fence)
        where = _raise(conn, fence)
        with conn.transaction():
            conn.execute(_SQL["unlimited"])
            yield conn
            _hold(conn, where, fence)


def _raise(conn: db.Connection, fence: dict[str, Any]) -> str:
    """Raise the fence to this claim; returns the schema where it stands."""
    try:
        row = conn.execute(_SQL["raise"], fence).fetchone()
    except errors.UndefinedTable:
        _create(conn)
        row = conn.execute(_SQL["raise"], fence).fetchone()
    if row is None:
        raise Overtaken
    conn.execute(_SQL["forget"])
    return str(row[0])


def _create(conn: db.Connection) -> None:
    # Somebody else may be at it: IF NOT EXISTS is no help against that.
    with suppress(errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateObject):
        conn.execute(_SQL["create"])


def _hold(conn: db.Connection, where: str, fence: dict[str, Any]) -> None:
    row = conn.execute(sql.SQL(_SQL["hold"]).format(schema=sql.Identifier(where)), fence).fetchone()
    if row is None or not row[0]:
        raise Overtaken
