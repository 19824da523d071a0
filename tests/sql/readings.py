"""Helpers by which tests read the queue: rows, the journal, locks and notifications."""

from typing import Any
from uuid import UUID, uuid4

import psycopg
from patience import PATIENCE
from psycopg.rows import dict_row


def value(conn: psycopg.Connection[Any], statement: str, *parameters: Any) -> Any:
    """The first value of a statement's first row; None without one."""
    row = conn.execute(statement, parameters or None).fetchone()
    return row[0] if row else None


def row(conn: psycopg.Connection[Any], job_id: UUID) -> dict[str, Any]:
    with conn.cursor(row_factory=dict_row) as cursor:
        found = cursor.execute("SELECT *, now() AS now FROM dl_jobs WHERE job_id = %s", (job_id,)).fetchone()
    assert found is not None
    return found


def state(conn: psycopg.Connection[Any], job_id: UUID) -> tuple[str, int]:
    found = row(conn, job_id)
    return found["status"], found["attempt"]


def waits(conn: psycopg.Connection[Any], *job_ids: UUID) -> list[str | None]:
    return [row(conn, job_id)["blocked_on"] for job_id in job_ids]


def journal(conn: psycopg.Connection[Any], job_id: UUID) -> list[tuple[str, dict[str, Any]]]:
    return conn.execute(
        "SELECT kind, payload FROM dl_job_events WHERE job_id = %s ORDER BY event_id", (job_id,)
    ).fetchall()


def kinds(conn: psycopg.Connection[Any], job_id: UUID) -> list[str]:
    return [kind for kind, _ in journal(conn, job_id)]


def keys_held(conn: psycopg.Connection[Any]) -> list[int]:
    """The backends that hold an advisory lock in this database, once per lock."""
    rows = conn.execute(
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) ORDER BY pid"
    )
    return [pid for (pid,) in rows]


def blocked(observer: psycopg.Connection[Any], pid: int) -> bool:
    """Does this backend wait for a lock of another?"""
    return bool(value(observer, "SELECT cardinality(pg_blocking_pids(%s)) > 0", pid))


def buffers(conn: psycopg.Connection[Any], statement: str, *parameters: Any) -> int:
    """How many shared buffers a statement touches, with whatever its functions do."""
    (plan,) = value(conn, "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) " + statement, *parameters)
    return plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]


def heard(listener: psycopg.Connection[Any], channel: str = "dl_jobs") -> list[str]:
    """The payloads a listening session got since it was last asked.

    Notifications come in the order of the commits, so once its own mark is there nothing older is missing.
    """
    mark = uuid4().hex
    notes = list(listener.notifies(timeout=0))
    listener.execute("SELECT pg_notify(%s, %s)", (channel, mark))
    while not any(note.payload == mark for note in notes):
        notes += listener.notifies(timeout=PATIENCE, stop_after=1)
    return [note.payload for note in notes if note.channel == channel and note.payload != mark]
