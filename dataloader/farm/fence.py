"""The target database: where pipelines write, in transactions that a run without its claim cannot commit.

A worker that was stopped, or cut off, may come back when its job has been started anew, and go on writing: the queue
refuses its finish, but it has never seen the target's rows. So the target itself keeps a fence (the fencing token of
M. Kleppmann, "How to do distributed locking", 2016): a table `dl_fence` with the newest claim of each job. May import
`db`.
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
    """A newer run of the job has begun: nothing that this one does may stand."""


@contextmanager
def transaction(
    dsn: str,
    schema: str,
    job_id: UUID,
    claim: int,
    owner: str = "",
    leap: Callable[[int], int | None] = lambda fence: None,
) -> Iterator[psycopg.Connection[Any]]:
    """A transaction that commits only while `claim`, of this `owner`, is the job's newest, on a connection of its own.

    Its start ends what older runs of the job still have open there and waits for their commits. Where the fence stands
    at `claim` or above and is not the owner's, `leap` is given its number and asks the queue for a higher one: None
    when the job is somebody else's. Raises Overtaken, and rolls back, when a newer run has begun; psycopg.Error as
    psycopg does, and what `leap` raises.
    """
    # No limits: hours of computing between two statements, or in one, are what pipelines are for.
    conn = db.connect(
        dsn,
        name=_name(job_id, claim),
        schema=schema,
        answer_within=7 * 86_400,
        idle_in_transaction_timeout=0,
        keeps_defaults=True,
    )
    with conn:
        fence = {"job_id": job_id, "claim": claim, "owner": owner, "session": "^" + _name(job_id, "([0-9]+)") + "$"}
        where = _raise(conn, fence) or _leap(conn, fence, leap)
        conn.execute(_SQL["forget"])
        with conn.transaction():
            conn.execute(_SQL["unlimited"])
            yield conn
            _hold(conn, where, fence)


def _name(job_id: UUID, claim: int | str) -> str:
    return f"dl-job:{job_id}:{claim}"


def _raise(conn: db.Connection, fence: dict[str, Any]) -> str | None:
    """Raise the fence to this claim; the schema where it stands, or None when it is another's."""
    conn.execute(_SQL["end_older"], fence)
    try:
        row = conn.execute(_SQL["raise"], fence).fetchone()
    except (errors.UndefinedTable, errors.UndefinedColumn) as e:
        _make(conn, "create" if isinstance(e, errors.UndefinedTable) else "widen")
        row = conn.execute(_SQL["raise"], fence).fetchone()
    return str(row[0]) if row else None


def _leap(conn: db.Connection, fence: dict[str, Any], leap: Callable[[int], int | None]) -> str:
    """Raise the fence to a number above the one where it stands, if the queue says that the job is ours.

    When the queue has been set back, a run that has lost its job may have the same number as the next run, or a higher
    one. The run that finds the fence not its own asks, and the queue knows one of the two. Asked once: a fence that has
    risen again since is a later run's.
    """
    row = conn.execute(_SQL["height"], fence).fetchone()
    claim = leap(row[0] if row else fence["claim"])
    if claim is not None:
        fence["claim"] = claim
        conn.execute(_SQL["rename"], {"name": _name(fence["job_id"], claim)})
        if where := _raise(conn, fence):
            return where
    raise Overtaken


def _make(conn: db.Connection, what: str) -> None:
    # Somebody else may be at it: IF NOT EXISTS is no help against that.
    with suppress(errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateObject, errors.DuplicateColumn):
        conn.execute(_SQL[what])


def _hold(conn: db.Connection, where: str, fence: dict[str, Any]) -> None:
    row = conn.execute(sql.SQL(_SQL["hold"]).format(schema=sql.Identifier(where)), fence).fetchone()
    if row is None or not row[0]:
        raise Overtaken
