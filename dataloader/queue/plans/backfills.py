"""Backfills: their reading, their changes, and the jobs of their partitions.

`add` writes the backfill and its ledger (dl_partitions). The reapers then call `tick`: each call makes the jobs of up
to AT_ONCE partitions and writes their rows of the ledger in one transaction, so a killed reaper leaves nothing half
made. How many of its jobs run at once is a limit of the fleet (`new_backfill.limit_of`); while a backfill is paused
it is 0. Each function calls its statements of `sql/backfills.sql`, and may raise psycopg.Error. `by` is the name and
address of the asker.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from psycopg.rows import dict_row

from dataloader import periods
from dataloader.log import masked
from dataloader.queue import db, lifecycle, operations
from dataloader.queue.db import Conn
from dataloader.queue.enqueue import enqueue_columns, require_room_for
from dataloader.queue.fields import OF_PRODUCER
from dataloader.queue.job import clip
from dataloader.queue.plans import partitions

CHANNEL = "dl_backfills"
AT_ONCE = 100  # partitions of one transaction; a claim that commits meanwhile waits for the disk, the longer the more
REST = 4.0  # times that after it, while jobs of others run: until the next one of the same backfill
RETRIED_AT_ONCE = 500
RETRY_SEC = periods.seconds("BACKFILL_RETRY_SEC", 10.0)  # from a failure, such as a full queue, to the next try
LATELY_SEC = periods.seconds("BACKFILL_LATELY_SEC", 600.0)  # over which the pace is measured
LISTED = 100  # backfills of one list
LARGE = 2_000  # partitions of a backfill whose counting takes its time
_NOTHING = 0

_SQL = db.statements("backfills.sql")
_PARTS = {"{shown}": _SQL["shown"].rstrip(";\n "), "{status_of}": _SQL["status_of"].rstrip(";\n ")}
for _part, _text in _PARTS.items():
    _SQL = {name: text.replace(_part, _text) for name, text in _SQL.items()}
_DEFAULTS = {field.name: field.default for field in OF_PRODUCER}
_OF_JOB = ("args", "priority", "max_attempts", "lease_ttl_sec", "timeout_sec", "affinity_key", "limits")
Row = dict[str, Any]
Rows = list[Row]
Counts = Callable[[Conn, str], Rows]


class Taken(Exception):
    """There is a backfill of this name already."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is a backfill {name} already: choose another name, or remove it when it is done")


class NotNow(Exception):
    """What the backfill is now forbids the change."""


class Made(NamedTuple):
    """What one call of `tick` has done with one backfill: jobs made, partitions skipped or canceled, or the error."""

    name: str
    jobs: int = 0
    skipped: int = 0
    canceled: int = 0
    error: str | None = None


def counts(conn: Conn, name: str) -> Rows:
    """How many partitions of a backfill there are of each status, with `lately` and `since` as in backfills.sql."""
    return _rows(conn, "counts", name=name, lately_sec=LATELY_SEC)


def listed(conn: Conn, of_large: Counts = counts) -> list[Row]:
    """The newest backfills, up to LISTED, each with the counts of its partitions.

    `of_large` counts those of LARGE partitions and more: 10,000 of them take some 80 ms.
    """
    return [_shown(conn, row, of_large) for row in _rows(conn, "backfills", limit=LISTED)]


def backfill(conn: Conn, name: str, of_large: Counts = counts) -> Row | None:
    """The backfill of this name, as `listed` has it; None where there is none."""
    rows = _rows(conn, "backfill", name=name)
    return _shown(conn, rows[0], of_large) if rows else None


def known(conn: Conn, name: str) -> str | None:
    """The name, where there is a backfill of it; else None."""
    return name if _rows(conn, "backfill", name=name) else None


def of_ledger(conn: Conn, name: str, after: int, limit: int, status: str | None = None) -> list[Row]:
    """Up to `limit` partitions behind the place `after`, in their order; those of one of partitions.STATUSES."""
    return _rows(conn, "partitions", name=name, after=after, limit=limit, status=status)


def add(conn: Conn, new: Mapping[str, Any], by: str) -> Row:
    """Add a backfill, a `new_backfill.definition`; the reapers make its jobs from now on. Raises Taken."""
    written = {**new, "span": new["span"] and json.dumps(new["span"]), "job": json.dumps(new["job"])}
    with conn.transaction():
        if not conn.execute(_SQL["add"], written | {"total": len(new["partitions"]), "by": by}).fetchone():
            raise Taken(new["name"])
        conn.execute(_SQL["add_partitions"], {"name": new["name"], "partitions": new["partitions"]})
        _allow(conn, new["name"], new["max_running"], by)
    return _found(conn, new["name"])


def preview(conn: Conn, new: Mapping[str, Any]) -> Row:
    """What `add` would do, having changed nothing: how many partitions, how many of them are done, some of the jobs."""
    from dataloader.queue.plans import new_backfill  # it needs pydantic, and a worker imports this module

    listed = new["partitions"]
    skipped = _count_done(conn, new) if new["skip_done"] else 0
    found = {"name": new["name"], "task": new["task"], "queue": new["queue"], "total": len(listed), "skipped": skipped}
    return found | {"samples": new_backfill.samples(new)}


def pause(conn: Conn, name: str, by: str) -> Row | None:
    """Start no job of a backfill and make none; those that run go on. None where there is none.

    Raises NotNow for one that is canceled.
    """
    with conn.transaction():
        if (present := _lock(conn, name)) is None:
            return None
        if present["canceled_at"]:
            raise NotNow(f"the backfill {name} is canceled: it starts no jobs anyhow")
        conn.execute(_SQL["pause"], {"name": name, "by": by})
        _allow(conn, name, _NOTHING, by)
    return backfill(conn, name)


def resume(conn: Conn, name: str, by: str) -> Row | None:
    """End a backfill's pause. None where there is none; raises NotNow for one that is canceled."""
    with conn.transaction():
        if (present := _lock(conn, name)) is None:
            return None
        if present["canceled_at"]:
            raise NotNow(f"the backfill {name} is canceled: add another one, with skip_done for what is done")
        if present["paused_at"]:
            conn.execute(_SQL["resume"], {"name": name})
            _allow(conn, name, present["max_running"], by)
    return backfill(conn, name)


def cancel(conn: Conn, name: str, by: str) -> Row | None:
    """Start no job of a backfill any more; the reapers cancel its jobs, in bunches. None where there is none."""
    with conn.transaction():
        if (present := _lock(conn, name)) is None:
            return None
        if not present["canceled_at"]:
            conn.execute(_SQL["cancel"], {"name": name, "by": by})
            _allow(conn, name, _NOTHING, by)
    return backfill(conn, name)


def set_most(conn: Conn, name: str, max_running: int | None, by: str) -> Row | None:
    """Let so many jobs of a backfill run at once, from now on; None: any number. None where there is no backfill.

    One that is paused starts none before it is resumed.
    """
    with conn.transaction():
        if (present := _lock(conn, name)) is None:
            return None
        conn.execute(_SQL["set_most"], {"name": name, "max_running": max_running})
        if not present["paused_at"] and not present["canceled_at"]:
            _allow(conn, name, max_running, by)
    return backfill(conn, name)


def retry(conn: Conn, name: str, by: str, after: int = 0) -> operations.Changed:
    """Requeue up to RETRIED_AT_ONCE dead jobs of a backfill behind the place `after`; `next` is where to go on."""
    rows = conn.execute(_SQL["dead"], {"name": name, "after": after, "limit": RETRIED_AT_ONCE}).fetchall()
    outcomes = operations.requeue(conn, [job_id for _, job_id in rows], by) if rows else {}
    changed = sum(outcome == operations.DONE for outcome in outcomes.values())
    return operations.Changed(changed, str(rows[-1][0]) if len(rows) == RETRIED_AT_ONCE else None)


def remove(conn: Conn, name: str, by: str) -> str | None:
    """Remove a backfill with its ledger; its jobs stay. Returns its name, None where there is none.

    Raises NotNow for one of which a job is still to be made, or has not ended.
    """
    with conn.transaction():
        if (present := _lock(conn, name)) is None:
            return None
        is_at_work = present["made"] < present["total"] and not present["canceled_at"]
        if is_at_work or present["next_at"] or _one_value(conn, "is_open", name=name):
            raise NotNow(f"the backfill {name} still has jobs to come: cancel it, and wait until they have ended")
        conn.execute(_SQL["remove"], {"name": name})
        _allow(conn, name, None, by)
    return name


def tick(conn: Conn, lease_ttl_sec: int = 60) -> Made | None:
    """Make, or cancel, the next bunch of the backfill that has waited longest; None: there is nothing to do.

    `lease_ttl_sec` is that of jobs whose backfill names none. A backfill whose jobs cannot be made keeps the error and
    is tried again RETRY_SEC later. Raises psycopg.Error when the session is lost.
    """
    present: Row | None = None
    try:
        with conn.transaction():
            present = next(iter(_rows(conn, "lock_due")), None)
            if present is None:
                return None
            conn.execute(_SQL["by_index"])
            return _cancel_some(conn, present) if present["canceled_at"] else _make_some(conn, present, lease_ttl_sec)
    except Exception as e:  # also what users' hooks raise
        if present is None or conn.closed or db.is_passing(e):
            raise
        error = clip(masked(f"{e}".strip() or type(e).__name__))
    conn.execute(_SQL["failed"], {"name": present["name"], "error": error, "retry_sec": RETRY_SEC})
    return Made(present["name"], error=error)


def due_in(conn: Conn) -> float | None:
    """In how many seconds `tick` has something to do; 0 or less: now, None: there is nothing."""
    found: float | None = _one_value(conn, "due_in")
    return found


def listen(conn: Conn) -> None:
    """From now on this session is notified of every change that gives `tick` something to do (CHANNEL)."""
    conn.execute(_SQL["listen"])


def _make_some(conn: Conn, present: Row, lease_ttl_sec: int) -> Made:
    """The jobs of the next partitions, and their rows of the ledger."""
    from dataloader.queue.plans import new_backfill

    name = present["name"]
    bunch = {"name": name, "made": present["made"], "upto": min(present["made"] + AT_ONCE, present["total"])}
    wanted = _rows(conn, "unmade", **bunch)
    of_task = _one_value(conn, "of_task", task=present["task"]) or ()
    jobs = [new_backfill.job_of(present, row["partition"], row["place"], of_task, lease_ttl_sec) for row in wanted]
    fingerprints = [new_backfill.fingerprint(present, job["args"]) for job in jobs]
    done = _done(conn, fingerprints) if present["skip_done"] else {}
    new = [job for job, work in zip(jobs, fingerprints, strict=True) if work not in done]
    added = iter(_add(conn, new))
    job_ids = [done.get(work) or next(added) for work in fingerprints]
    places = [row["place"] for row in wanted]
    skipped = [work in done for work in fingerprints]
    ledger = {"places": places, "job_ids": job_ids, "fingerprints": fingerprints, "are_skipped": skipped}
    conn.execute(_SQL["note"], bunch | ledger)
    conn.execute(_SQL["made"], bunch | {"rest": _rest(conn, name)})
    return Made(name, len(new), sum(skipped))


def _add(conn: Conn, documents: Sequence[Row]) -> list[UUID]:
    """Add these jobs. The journal names their producer; a signature would write each of its rows a second time."""
    from dataloader.queue import new_job

    if not documents:
        return []
    columns = new_job.all_checked(documents)
    require_room_for(conn, columns)
    return [job_id for job_id, _ in enqueue_columns(conn, columns)]


def _cancel_some(conn: Conn, present: Row) -> Made:
    """Cancel the next jobs; behind the last one the limit is again what it was, for jobs that people requeue."""
    name = present["name"]
    upto = min(present["canceled"] + AT_ONCE, present["total"])
    rows = _rows(conn, "jobs_behind", name=name, canceled=present["canceled"], upto=upto)
    job_ids = [row["job_id"] for row in rows if row["job_id"]]
    by = f"{present['canceled_by']}, with the backfill {name}"
    if job_ids:
        lifecycle.request_cancels(conn, job_ids, False, by)
    conn.execute(_SQL["canceled"], {"name": name, "upto": upto, "rest": _rest(conn, name)})
    if upto == present["total"]:
        _allow(conn, name, present["max_running"], by)
    return Made(name, canceled=len(job_ids))


def _rest(conn: Conn, name: str) -> float:
    """For how many times as long as a bunch takes nothing of this backfill is made: 0 where nobody else claims jobs."""
    from dataloader.queue.plans.new_backfill import limit_of

    return REST if _one_value(conn, "has_company", limit=limit_of(name)) else 0.0


def _done(conn: Conn, fingerprints: Sequence[UUID]) -> dict[UUID, UUID]:
    """By fingerprint the job that has done this work."""
    return dict(conn.execute(_SQL["done"], {"fingerprints": list(fingerprints)}).fetchall())


def _count_done(conn: Conn, new: Mapping[str, Any]) -> int:
    from dataloader.queue.plans import new_backfill

    jobs = (new_backfill.job_of(new, partition, place) for place, partition in enumerate(new["partitions"], 1))
    fingerprints = [new_backfill.fingerprint(new, job["args"]) for job in jobs]
    done = _done(conn, fingerprints)
    return sum(work in done for work in fingerprints)


def _allow(conn: Conn, name: str, most: int | None, by: str) -> None:
    """Let so many jobs of a backfill run at once; None: any number."""
    from dataloader.queue.plans.new_backfill import limit_of

    if most is None:
        operations.remove_limit(conn, limit_of(name), by)
    else:
        operations.set_limit(conn, limit_of(name), by, most=most)


def _shown(conn: Conn, row: Row, of_large: Counts) -> Row:
    """A backfill as people see it, with its counts, its state and when it will be done."""
    found = (of_large if row["total"] >= LARGE else counts)(conn, row["name"])
    by_status = dict.fromkeys(partitions.STATUSES, 0) | {each["status"]: each["partitions"] for each in found}
    job, now = row.pop("job"), row.pop("now")
    since = min((each["since"] for each in found if each["since"]), default=None)
    lately_sec = min(LATELY_SEC, (now - since).total_seconds()) if since else 0.0
    told = {
        "state": partitions.state(
            row["total"], row["made"], by_status, bool(row["paused_at"]), bool(row["canceled_at"])
        ),
        "counts": by_status,
        "started_at": since,
    }
    left = row["total"] - row["made"] + by_status["queued"] + by_status["running"]
    goes_on = told["state"] in ("making", "running")
    told["eta_sec"] = partitions.eta_sec(left, sum(each["lately"] for each in found), lately_sec) if goes_on else None
    span = row.pop("span") or {}
    words = {name: span.get(name) for name in ("since", "until", "step")}
    shown: Row = row | words | {name: _DEFAULTS[name] for name in _OF_JOB} | partitions.OF_JOBS | job | told
    return shown


def _lock(conn: Conn, name: str) -> Row | None:
    return next(iter(_rows(conn, "lock", name=name)), None)


def _found(conn: Conn, name: str) -> Row:
    found = backfill(conn, name)
    assert found is not None  # noqa: S101  it has just been written
    return found


def _one_value(conn: Conn, statement: str, **parameters: Any) -> Any:
    row = conn.execute(_SQL[statement], parameters).fetchone()
    return row[0] if row else None


def _rows(conn: Conn, statement: str, **parameters: Any) -> list[Row]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(_SQL[statement], parameters).fetchall()
