"""The fence of the target database: a run without its claim cannot commit a transaction there.

A stopped or disconnected worker may resume writing after another worker has started its job anew. The queue refuses the
old worker's finish, but the queue has never seen the target's rows. So the target keeps a table `dl_fence` with the
highest fencing token of each job (M. Kleppmann, "How to do distributed locking", 2016); a run's token for each of its
jobs is `Job.claim`. The same row has the job's newest checkpoint that was committed with data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
from psycopg import errors, sql

from dataloader.queue import db
from dataloader.queue.job import Checkpoint

NOWHERE = Checkpoint()
_SQL = db.statements("target.sql")


class Overtaken(Exception):
    """A newer run of the job has begun: the older run's transaction is rolled back."""


@dataclass(slots=True, eq=False)
class Standing:
    """A job's checkpoints in the target: the newest at a transaction's begin, the one to commit, the committed."""

    job_id: UUID
    newest: Checkpoint = NOWHERE
    to_save: Checkpoint | None = None
    saved: Checkpoint | None = None


@contextmanager
def transaction(
    dsn: str,
    schema: str,
    tokens: dict[UUID, int],
    owner: str = "",
    leap: Callable[[UUID, int], int | None] = lambda job_id, fence: None,
    standing: Standing | None = None,
) -> Iterator[psycopg.Connection[Any]]:
    """A transaction on a connection of its own; it commits only while each token of `owner` is its job's highest.

    At its start it ends the sessions of older runs of these jobs and waits for their commits. Where another owner's
    fence stands in the way, `leap` gets the job and the fence's number and returns a higher token, or None when the job
    belongs to another worker. `standing` says which checkpoint is committed with the data. Raises Overtaken, after a
    rollback, when a newer run of one of the jobs has begun.
    """
    # No limits: a pipeline may compute for hours in one statement or between two.
    conn = db.connect(
        dsn,
        name=_name(tokens),
        schema=schema,
        answer_within=7 * 86_400,
        idle_in_transaction_timeout=0,
        keeps_defaults=True,
    )
    with conn:
        schema_name = _raise(conn, tokens, owner) or _leap(conn, tokens, owner, leap)
        conn.execute(_SQL["forget"])
        if standing is not None:
            row = conn.execute(_SQL["standing"], {"job_id": standing.job_id}).fetchone()
            standing.newest = Checkpoint(*row) if row else NOWHERE
        with conn.transaction():
            conn.execute(_SQL["unlimited"])
            yield conn
            saving = None if standing is None else standing.to_save
            if standing is None or saving is None:
                statement, facts = "hold", _fences(tokens, owner)
            else:
                statement, claim = "hold_and_save", {"job_id": standing.job_id, "claim": tokens[standing.job_id]}
                facts = claim | {"checkpoint": saving.text, "number": saving.number, "owner": owner}
            row = conn.execute(sql.SQL(_SQL[statement]).format(schema=sql.Identifier(schema_name)), facts).fetchone()
            if row is None or not row[0]:
                raise Overtaken
        if standing is not None and saving is not None:
            standing.saved = saving._replace(claim=tokens[standing.job_id])


def _name(tokens: dict[UUID, int]) -> str:
    """The session's name, by which newer runs of the first job find it."""
    return "dl-job:{}:{}".format(*next(iter(tokens.items())))


def _fences(tokens: dict[UUID, int], owner: str) -> dict[str, Any]:
    return {"job_ids": list(tokens), "claims": list(tokens.values()), "owner": owner}


def _raise(conn: db.Connection, tokens: dict[UUID, int], owner: str) -> str | None:
    """Raise the fences to this run's tokens; their schema, or None when another run's fence stands at one of them."""
    fences = _fences(tokens, owner)
    conn.execute(_SQL["end_older"], fences)
    try:
        rows = conn.execute(_SQL["raise"], fences).fetchall()
    except errors.UndefinedTable:
        # Another run may create the table at the same time: IF NOT EXISTS does not prevent these errors.
        with suppress(errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateObject):
            conn.execute(_SQL["create"])
        rows = conn.execute(_SQL["raise"], fences).fetchall()
    return str(rows[0][0]) if len(rows) == len(tokens) else None


def _leap(conn: db.Connection, tokens: dict[UUID, int], owner: str, leap: Callable[[UUID, int], int | None]) -> str:
    """Raise each fence that stands in the way above its present number, if the queue confirms this run's claim.

    After the queue was set back, a run without its claim may have the next run's token or a higher one. The run that
    finds another owner's fence asks the queue once; the queue knows one of the two runs. If the fence has risen again
    meanwhile, a later run has raised the fence.
    """
    for job_id, height in conn.execute(_SQL["in_the_way"], _fences(tokens, owner)).fetchall():
        if (token := leap(job_id, height)) is None:
            raise Overtaken
        tokens[job_id] = token
    conn.execute(_SQL["rename"], {"name": _name(tokens)})
    if schema := _raise(conn, tokens, owner):
        return schema
    raise Overtaken
