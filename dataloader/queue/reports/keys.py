"""The keys of an ordered queue for people. Functions may raise psycopg.Error, and NotOrdered."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote
from uuid import UUID

import psycopg

from dataloader.queue import cursor, db, lifecycle, operations
from dataloader.queue.cursor import Page
from dataloader.queue.db import Conn, Row
from dataloader.queue.reports import stats

COUNTED = 1_000  # jobs of one key that an answer counts
LONG = 4_000  # bytes of arguments; longer ones stand on the job's own page alone
_SQL = db.statements("keys.sql")
_FIRST = ("-Infinity", "-infinity", str(UUID(int=0)))  # the place before all


class NotOrdered(Exception):
    """The queue is not ordered, so its keys have no first job."""


@dataclass(frozen=True, slots=True)
class Key:
    """The jobs of one key, queued `payloads` in their order; `head` is the first with its `waiting_for`."""

    payloads: Page
    length: int
    length_is_exact: bool
    head: Row | None
    running: list[Row]
    dead: list[Row]


def page(conn: Conn, queue: str, limit: int = 50, after: str | None = None) -> Page:
    """Up to `limit` keys with queued jobs, by name: their counts up to COUNTED and their heads. Raises WrongCursor."""
    (since,) = cursor.parts(after, 1) if after else ("",)
    with conn.transaction():
        _check(conn, queue)
        rows = _SQL.rows(conn, "keys", queue=queue, since=since, limit=limit + 1, most=COUNTED)
    reasons = lifecycle.reasons(conn, [row["job_id"] for row in rows[:limit]])
    for row in rows[:limit]:
        row |= {"payloads_is_exact": row["payloads"] < COUNTED, "waiting_for": reasons.get(row["job_id"])}
    return Page(rows[:limit], cursor.at([rows[limit]["lock_key"]]) if len(rows) > limit else None)


def key(conn: Conn, queue: str, lock_key: str, limit: int = 50, after: str | None = None, others: int = 10) -> Key:
    """The jobs of one key: a page of payloads, up to `others` running and dead ones. Raises WrongCursor."""
    of = {"queue": queue, "lock_key": lock_key, "long": LONG}
    with conn.transaction():
        _check(conn, queue)
        (count,) = _SQL.rows(conn, "length", **of, most=COUNTED)
        payloads = _jobs(conn, of, ["queued"], limit, after)
        first = _jobs(conn, of, ["queued"], 1) if after else payloads
        dead = _jobs(conn, of, ["failed", "lost"], others).rows
    running = stats.jobs(conn, stats.Wanted(lock_key=lock_key, status="running"), others).rows
    head = next(iter(first.rows), None)
    if head:
        head = head | {"waiting_for": lifecycle.reasons(conn, [head["job_id"]]).get(head["job_id"])}
    return Key(payloads, count["count"], count["count"] < COUNTED, head, running, dead)


def _jobs(conn: Conn, of: Row, statuses: list[str], limit: int, after: str | None = None) -> Page:
    score, created_at, job_id = cursor.parts(after, 3) if after else _FIRST
    behind = {"score": score, "created_at": created_at, "job_id": job_id}
    try:
        rows = _SQL.rows(conn, "jobs", **of, **behind, statuses=statuses, limit=limit + 1)
    except psycopg.DataError:  # a place that no job can have
        raise cursor.WrongCursor from None
    following = cursor.at(rows[limit - 1]["place"]) if len(rows) > limit else None
    return Page([_read(row) for row in rows[:limit]], following)


def _check(conn: Conn, queue: str) -> None:
    db.by_index(conn, sorts=False)
    if not operations.settings(conn, queue)["ordered"]:
        raise NotOrdered(
            f"the queue {queue} is not ordered, so its keys have no order;"
            f" `dataloader queue set {quote(queue)} --ordered` makes it ordered"
        )


def _read(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "place"}
