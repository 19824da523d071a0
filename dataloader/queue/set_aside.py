"""Find jobs that make every claim fail, in any queue, and set them aside, so that the other jobs run.

The claim is repeated in transactions that are rolled back, each time with half of the jobs hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple
from uuid import UUID

import psycopg

from dataloader.log import masked
from dataloader.queue import db
from dataloader.queue.job import clip

LOCK = 0x646C_6173_6964_6521  # an advisory lock outside the range of keys
SUSPECTS = 1_100  # jobs of a queue, of each kind: a claim reads hardly more
# Errors of a row: a wrong number of rows, data, a constraint, a limit of the server, a trigger that raises.
_OF_A_ROW = ("21", "22", "23", "54", "P0")
_SQL = db.statements("set_aside.sql")


class _Disturbed(Exception):
    """Another session has locked some of the jobs, so the trial has no result."""


class Aside(NamedTuple):
    """A job that was set aside, the status that it has now, and why."""

    job_id: UUID
    queue: str
    status: str
    error: str


def is_of_a_row(error: psycopg.Error) -> bool:
    """Whether the values of a row may have caused the error, and not the session or the schema."""
    return error.sqlstate is not None and error.sqlstate.startswith(_OF_A_ROW)


def set_aside(
    conn: db.Connection, queues: Collection[str], claim: Callable[[], object], error: psycopg.Error
) -> Aside | None:
    """Find the job on which `claim` has failed with `error`, and count that as a failed run of the job.

    None: another session was quicker. Raises `error` where no job of these queues is the cause.
    """
    if db.call(conn, "pg_try_advisory_lock", LOCK) == [(False,)]:
        return None  # another session would see the rows that this one has hidden as locked ones
    try:
        if (failure := _failure(conn, [], claim)) is None:
            return None
        jobs = [row["job_id"] for row in _SQL.rows(conn, "suspects", queues=list(queues), most=SUSPECTS)]
        if not jobs or _failure(conn, jobs, claim):
            raise error
        suspects = jobs
        while len(suspects) > 1:
            half = set(suspects[: len(suspects) // 2])
            if of_half := _failure(conn, [job for job in jobs if job not in half], claim):
                suspects, failure = list(half), of_half
            else:
                suspects = [job for job in suspects if job not in half]
        text = clip(masked(f"no worker can claim the job: {failure.diag.message_primary or failure}"))
        parameters = {"job_id": suspects[0], "error": text}
        try:
            changed = conn.execute(_SQL["fail"], parameters).fetchone()
        except psycopg.Error as e:
            if not is_of_a_row(e):
                raise
            changed = conn.execute(_SQL["replace"], parameters).fetchone()
        return Aside(suspects[0], changed[0], changed[1], text) if changed else None
    except _Disturbed:
        return None
    finally:
        if not conn.closed:  # of the keys too that the claims on trial have taken
            db.call(conn, "pg_advisory_unlock_all")


def _failure(conn: db.Connection, hidden: Sequence[UUID], claim: Callable[[], object]) -> psycopg.Error | None:
    """How the claim fails while these jobs are hidden; None: it does not. Nothing stays changed."""
    try:
        with conn.transaction(force_rollback=True):
            _SQL.do(conn, "hide", job_ids=list(hidden))
            if _SQL.value(conn, "locked", job_ids=list(hidden)):
                raise _Disturbed
            claim()
    except psycopg.Error as e:
        if not is_of_a_row(e):
            raise
        return e
    return None
