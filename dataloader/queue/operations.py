"""Operators' changes to jobs and queues: pause, resume, limit; requeue, run now, delete, cancel, one or many.

Every function takes `by`, the name and address of the asker, which the journal keeps. Each calls its statement of
`sql/operate.sql`, and may raise psycopg.Error.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from typing import Any
from uuid import UUID

from psycopg.rows import dict_row

from dataloader.queue import db, lifecycle
from dataloader.queue.db import Conn

__all__ = [
    "cancel",
    "delete",
    "delete_dead",
    "known",
    "limit_length",
    "pause",
    "requeue",
    "requeue_dead",
    "resume",
    "run_all",
    "run_now",
    "set_order",
    "settings",
    "tell_tasks",
]

DONE = "done"
UNKNOWN = "unknown"
NAMES = 2_000  # of queues, among which similar ones are looked for
SIMILAR = 3
AT_ONCE = 1_000  # jobs that one transaction of the functions for a whole queue changes

_SQL = db.statements("operate.sql")
_SQL = {name: text.replace("{settings}", _SQL["settings"].rstrip(";")) for name, text in _SQL.items()}
SCORES_AT_ONCE = 10_000  # jobs that one statement gives their scores
OLDER_SEC = 2.0  # how long the switch waits for transactions that began before it
ORDER = ("ordered", "merge", "merge_limit", "batch", "on_dead")  # the settings of `set_order`
Outcomes = dict[UUID, str]
# The settings of a queue of which nobody has said anything.
DEFAULTS: dict[str, Any] = {
    "paused_at": None,
    "paused_by": None,
    "max_length": None,
    "ordered": False,
    "merge": False,
    "merge_limit": 1_000,
    "batch": None,
    "on_dead": "continue",
}


def pause(conn: Conn, queue: str, by: str) -> dict[str, Any]:
    """Keep every claim that begins from now on, on any host, from starting a job of this queue; running jobs go on.

    Returns the settings of the queue (DEFAULTS). Services with the plain protocol know nothing of it.
    """
    return _one(conn, "pause", queue=queue, by=by)


def resume(conn: Conn, queue: str, by: str) -> dict[str, Any]:
    """End the queue's pause, if there is one, and wake its workers; returns what `pause` does."""
    conn.execute(_SQL["resume"], {"queue": queue})
    return settings(conn, queue)


def limit_length(conn: Conn, queue: str, max_length: int | None, by: str) -> dict[str, Any]:
    """Let the API refuse jobs for this queue (QueueFull) once it holds `max_length` queued ones; None: no limit."""
    return _one(conn, "limit_length", queue=queue, max_length=max_length)


class Contradiction(ValueError):
    """The settings of a queue do not go together, or not with those that it has."""


def set_order(conn: Conn, queue: str, by: str, **changes: Any) -> dict[str, Any]:
    """Change what a queue says of the order of its jobs (ORDER); the rest stays. Returns what `pause` does.

    `ordered`: the jobs of a key start in the order of their scores. `merge`: one delivery takes all queued jobs of a
    key, `merge_limit` (1 to 1,000) at most. `batch`: the most keys in one call of a pipeline; None: as the pipeline
    says. `on_dead`: "hold" lets a dead job stop its key, "continue" does not. Jobs go on meanwhile; from the return on
    the new settings hold for each claim. Jobs that are queued get their places by their times of creation. Raises
    Contradiction for `merge` without `ordered`, having changed nothing.
    """
    if changes.get("ordered"):
        _give_scores(conn, queue)  # before the switch, for it may take long
    with conn.transaction():
        said = _one(conn, "lock_queue", queue=queue) | changes
        if said["merge"] and not said["ordered"]:
            raise Contradiction(f"the queue {queue} would merge, so it should be ordered as well")
        transaction = conn.execute(_SQL["set_order"], {"queue": queue} | said).fetchone()
    assert transaction is not None  # noqa: S101  its row is locked
    if changes.get("ordered"):
        _wait_for_older(conn, transaction[1])
        _give_scores(conn, queue)
    after = None
    while (after := lifecycle.unpark_stranded(conn, after, AT_ONCE)) is not None:
        pass  # jobs that waited for one before them may not do so any more
    return settings(conn, queue)


def agree(conn: Conn, queue: str, ordered: bool | None, merge: bool | None) -> None:
    """Let a queue be what a farm's settings say, where nobody has said it; None: the settings say nothing.

    Raises Contradiction, which names both sides, when the queue is something else.
    """
    wanted = {name: value for name, value in (("ordered", ordered), ("merge", merge)) if value is not None}
    row = conn.execute(_SQL["said"], {"queue": queue}).fetchone() if wanted else None
    said = dict(zip(("ordered", "merge"), row or (None, None), strict=True))
    for name, value in wanted.items():
        if said[name] is not None and said[name] is not value:
            says, is_said = (str(each).lower() for each in (value, said[name]))
            raise Contradiction(
                f'WORKERS_JSON says "{name}": {says} of the queue {queue}, and the database {is_said}: correct it, or'
                f" `dataloader queue set {queue} --{'' if value else 'no-'}{name}`"
            )
    if changes := {name: value for name, value in wanted.items() if said[name] is None}:
        set_order(conn, queue, "WORKERS_JSON", **changes)


def tell_tasks(conn: Conn, max_attempts: Mapping[str, int | None]) -> None:
    """Note for producers how many attempts the jobs of these tasks have where none says a number; None: 5.

    Jobs that are in the queue keep theirs.
    """
    conn.execute(_SQL["tell_tasks"], {"tasks": list(max_attempts), "max_attempts": list(max_attempts.values())})


def _give_scores(conn: Conn, queue: str) -> None:
    after: str | None = "-infinity"
    while after:
        row = conn.execute(_SQL["give_scores"], {"queue": queue, "after": after, "limit": SCORES_AT_ONCE}).fetchone()
        assert row is not None  # noqa: S101  the function always answers
        after = row[1] if row[0] else None


def _wait_for_older(conn: Conn, transaction: str) -> None:
    """Wait until no transaction is left that may add jobs without seeing this one; not for ever."""
    until = time.monotonic() + OLDER_SEC
    while time.monotonic() < until:
        row = conn.execute(_SQL["is_past"], {"transaction": transaction}).fetchone()
        if row and row[0]:
            return
        time.sleep(0.02)


def known(conn: Conn, queue: str) -> dict[str, Any]:
    """Whether a queue of this name is known now (`is_known`); if not, the names most like it (`similar`).

    Known is a queue with jobs that wait, run or are dead, with a worker, a pause, a limit, or a journal that the reaper
    has summed up. To be asked before a change that makes it known.
    """
    rows = conn.execute(_SQL["queue_names"], {"queue": queue, "most": NAMES}, prepare=False).fetchall()
    names = [row[0] for row in rows]
    similar = [] if queue in names else get_close_matches(queue, names, SIMILAR)
    return {"is_known": queue in names, "similar": similar}


def requeue(conn: Conn, job_ids: Sequence[UUID], by: str) -> Outcomes:
    """Queue finished jobs again, due at once, with all their attempts.

    Returns for each job DONE, UNKNOWN, or the status that forbids it.
    """
    return _change(conn, "requeue", job_ids, by)


def run_now(conn: Conn, job_ids: Sequence[UUID], by: str) -> Outcomes:
    """Make queued jobs due now; a job that is due already counts as done."""
    return _change(conn, "run_now", job_ids, by)


def delete(conn: Conn, job_ids: Sequence[UUID], by: str) -> Outcomes:
    """Delete jobs and their journal, unless they run."""
    return _change(conn, "delete", job_ids, by)


def cancel(conn: Conn, job_ids: Sequence[UUID], by: str, force: bool = False) -> Outcomes:
    """Cancel queued jobs at once, ask running ones to stop (see queue.request_cancel); finished ones forbid it."""
    wanted = list(dict.fromkeys(job_ids))
    with _transaction(conn):
        lifecycle.request_cancels(conn, wanted, force, by)
        found = {row[0]: row[1:] for row in conn.execute(_SQL["cancellations"], {"job_ids": wanted})}
    return {job_id: _of_cancellation(*found.get(job_id, (UNKNOWN, False))) for job_id in wanted}


def requeue_dead(conn: Conn, queue: str, by: str, limit: int = AT_ONCE) -> int:
    """Queue up to `limit` failed or lost jobs of the queue again; returns how many. 0: none is left to take."""
    return _change_next(conn, "dead", "requeue", queue, by, limit)


def delete_dead(conn: Conn, queue: str, by: str, limit: int = AT_ONCE) -> int:
    """Delete up to `limit` failed or lost jobs of the queue; returns how many. 0: none is left to take."""
    return _change_next(conn, "dead", "delete", queue, by, limit)


def run_all(conn: Conn, queue: str, by: str, limit: int = AT_ONCE) -> int:
    """Let up to `limit` jobs of the queue wait for their time no longer; returns how many. 0: none is left to take."""
    return _change_next(conn, "not_due", "run_now", queue, by, limit)


def _change(conn: Conn, step: str, job_ids: Sequence[UUID], by: str) -> Outcomes:
    wanted = list(dict.fromkeys(job_ids))
    with _transaction(conn):
        done = {row[0] for row in conn.execute(_SQL[step], {"job_ids": wanted, "by": by})}
        left = [job_id for job_id in wanted if job_id not in done]
        others = dict(conn.execute(_SQL["statuses"], {"job_ids": left}).fetchall()) if left else {}
    return {job_id: DONE if job_id in done else others.get(job_id, UNKNOWN) for job_id in wanted}


def _change_next(conn: Conn, which: str, step: str, queue: str, by: str, limit: int) -> int:
    with _transaction(conn):
        found = conn.execute(_SQL[which], {"queue": queue, "limit": limit}).fetchall()
        changed = conn.execute(_SQL[step], {"job_ids": [row[0] for row in found], "by": by}).fetchall()
    return len(changed)


def _of_cancellation(status: str, is_requested: bool) -> str:
    return DONE if status == "canceled" or is_requested else status


def settings(conn: Conn, queue: str) -> dict[str, Any]:
    """What operators have set of a queue; DEFAULTS where nobody has."""
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(_SQL["queue"], {"queue": queue}).fetchone()
    return row or DEFAULTS | {"queue": queue}


def _one(conn: Conn, name: str, **parameters: Any) -> dict[str, Any]:
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(_SQL[name], parameters).fetchone()
    assert row is not None  # noqa: S101  the statement always returns its row
    return row


def _transaction(conn: Conn) -> AbstractContextManager[Any]:
    return conn.transaction()
