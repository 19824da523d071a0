"""Backfills: their reading, their changes, and the jobs of their partitions.

`add` writes the ledger; the reapers call `tick`, each for AT_ONCE partitions in one transaction. How many jobs run at
once is a limit of the fleet (`partitions.limit_of`), 0 while paused. Functions may raise psycopg.Error and
plan.Unknown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from dataloader import periods
from dataloader.queue import db, lifecycle, operations
from dataloader.queue.db import Conn
from dataloader.queue.plans import partitions
from dataloader.queue.plans.partitions import limit_of
from dataloader.queue.plans.plan import PAUSE, WORKS, Made, Plans, Row, Rows, add_jobs, shown_job

AT_ONCE = 100  # partitions of one transaction; a claim that commits meanwhile waits for the disk, the longer the more
REST = 4.0  # times that after it, while jobs of others run: until the next one of the same backfill
RETRIED_AT_ONCE = 500
RETRY_SEC = periods.seconds("BACKFILL_RETRY_SEC", 10.0)  # from a failure, such as a full queue, to the next try
LATELY_SEC = periods.seconds("BACKFILL_LATELY_SEC", 600.0)  # over which the pace is measured
LISTED = 100  # backfills of one list
LARGE = 2_000  # partitions of a backfill whose counting takes its time

_PLANS = Plans("backfill", "shown", "status_of")
due_in, listen = _PLANS.due_in, _PLANS.listen
Counts = Callable[[Conn, str], Rows]


def counts(conn: Conn, name: str) -> Rows:
    """How many partitions of a backfill there are of each status, with the other figures of backfills.sql."""
    return _PLANS.rows(conn, "counts", name=name, lately_sec=LATELY_SEC)


def listed(conn: Conn, of_large: Counts = counts) -> Rows:
    """The newest backfills with counts; `of_large` counts those of LARGE partitions: 10,000 of them take some 80 ms."""
    return [_shown(conn, row, of_large) for row in _PLANS.rows(conn, "listed", name=None, limit=LISTED)]


def backfill(conn: Conn, name: str, of_large: Counts = counts) -> Row:
    """The backfill of this name, as `listed` has it."""
    return _shown(conn, _PLANS.named(conn, name), of_large)


def ledger_rows(conn: Conn, name: str, after: int, limit: int, status: str | None = None) -> Rows:
    """Up to `limit` partitions behind the place `after`, in their order; those of one of partitions.STATUSES."""
    _PLANS.named(conn, name)
    return _PLANS.rows(conn, "partitions", name=name, after=after, limit=limit, status=status)


def add(conn: Conn, new: Mapping[str, Any], by: str) -> Row:
    """Add a backfill, a `new_backfill.checked`; the reapers make its jobs from now on. Raises Conflict."""
    written = {**new, "span": new["span"] and json.dumps(new["span"]), "job": json.dumps(new["job"])}
    with conn.transaction():
        written |= {"total": len(new["partitions"]), "by": by}
        _PLANS.add(conn, written, "choose another name, or remove it when it is done")
        _PLANS.do(conn, "add_partitions", name=new["name"], partitions=new["partitions"])
        _allow(conn, new["name"], new["max_running"], by)
    return backfill(conn, new["name"])


def preview(conn: Conn, new: Mapping[str, Any]) -> Row:
    """The result that `add` would have, without a change: the partitions, how many are done already, some jobs."""
    from dataloader.queue.plans import new_backfill  # it needs pydantic, and a worker imports this module

    skipped = 0
    if new["skip_done"]:
        jobs = (new_backfill.job_of(new, partition, place) for place, partition in enumerate(new["partitions"], 1))
        fingerprints = [new_backfill.fingerprint(new, job["args"]) for job in jobs]
        done = _done(conn, fingerprints)
        skipped = sum(work in done for work in fingerprints)
    summary = {name: new[name] for name in ("name", "task", "queue")}
    return summary | {"total": len(new["partitions"]), "skipped": skipped, "samples": new_backfill.samples(new)}


def pause(conn: Conn, name: str, by: str) -> Row:
    """Start no job of a backfill and make none; those that run go on. Raises Conflict for one that is canceled."""
    with _changing(conn, name, by, "it starts no jobs anyhow") as present:
        if present["paused_at"] is None:
            present |= {"paused_at": present["now"], "paused_by": by, "next_at": None}
    return backfill(conn, name)


def resume(conn: Conn, name: str, by: str) -> Row:
    """End a backfill's pause; raises Conflict for one that is canceled."""
    with _changing(conn, name, by, "add another one, with skip_done for what is done") as present:
        if present["paused_at"]:
            next_at = present["now"] if present["made"] < present["total"] else None
            present |= {**dict.fromkeys(PAUSE), **WORKS, "next_at": next_at}
    return backfill(conn, name)


def cancel(conn: Conn, name: str, by: str) -> Row:
    """Start no job of a backfill any more; the reapers cancel its jobs, in bunches."""
    with _changing(conn, name, by) as present:
        if present["canceled_at"] is None:
            now = present["now"]
            present |= {"canceled_at": now, "canceled_by": by, "next_at": now, **WORKS}
    return backfill(conn, name)


def set_most(conn: Conn, name: str, max_running: int | None, by: str) -> Row:
    """Let so many jobs of a backfill run at once; None: any number. A paused one starts none."""
    with _changing(conn, name, by) as present:
        present["max_running"] = max_running
    return backfill(conn, name)


@contextmanager
def _changing(conn: Conn, name: str, by: str, refusal: str = "") -> Iterator[Row]:
    """Write what the block changes in a backfill, with its limit; with a `refusal` a canceled one raises Conflict."""
    with _PLANS.locked(conn, name) as present:
        before = dict(present)
        if refusal and before["canceled_at"]:
            raise operations.Conflict(f"the backfill {name} is canceled: {refusal}")
        yield present
        # Also where the backfill stays as it is: somebody may have removed its limit.
        is_held = present["next_at"] if present["canceled_at"] else present["paused_at"]
        _allow(conn, name, 0 if is_held else present["max_running"], by)
        if changes := {column: value for column, value in present.items() if value != before[column]}:
            _PLANS.write(conn, name, changes)
            if present["next_at"]:
                _PLANS.wake(conn)


def retry(conn: Conn, name: str, by: str, after: int = 0) -> tuple[int, int | None]:
    """Requeue up to RETRIED_AT_ONCE dead jobs of a backfill behind the place `after`; how many, and where to go on."""
    _PLANS.named(conn, name)
    rows = _PLANS.rows(conn, "dead", name=name, after=after, limit=RETRIED_AT_ONCE)
    outcomes = operations.change(conn, "requeue", [row["job_id"] for row in rows], by) if rows else {}
    changed = sum(outcome == operations.DONE for outcome in outcomes.values())
    return changed, rows[-1]["place"] if len(rows) == RETRIED_AT_ONCE else None


def remove(conn: Conn, name: str, by: str) -> None:
    """Remove a backfill with its ledger; its jobs stay. Raises Conflict while jobs are to come."""
    with _PLANS.locked(conn, name) as present:
        is_at_work = present["made"] < present["total"] and not present["canceled_at"]
        if is_at_work or present["next_at"] or _PLANS.value(conn, "is_open", name=name):
            raise operations.Conflict(
                f"the backfill {name} still has jobs to come: cancel it, and wait until they have ended"
            )
        _PLANS.do(conn, "remove", name=name)
        _allow(conn, name, None, by)


def tick(conn: Conn, lease_ttl_sec: int = 60) -> Made | None:
    """Make, or cancel, the next bunch of the backfill that has waited longest. Errors as `Plans.next_made`."""

    def make(present: Row) -> Made:
        db.by_index(conn, bitmaps=True)  # a table that grows fast has no statistics yet
        return _cancel_some(conn, present) if present["canceled_at"] else _make_some(conn, present, lease_ttl_sec)

    return _PLANS.next_made(conn, make, RETRY_SEC)


def _make_some(conn: Conn, present: Row, lease_ttl_sec: int) -> Made:
    """The jobs of the next partitions, and their rows of the ledger."""
    from dataloader.queue.plans import new_backfill

    name = present["name"]
    bunch = {"name": name, "after": present["made"], "upto": min(present["made"] + AT_ONCE, present["total"])}
    wanted = _PLANS.rows(conn, "bunch", **bunch)
    of_task = _PLANS.value(conn, "of_task", task=present["task"]) or ()
    jobs = [new_backfill.job_of(present, row["partition"], row["place"], of_task, lease_ttl_sec) for row in wanted]
    fingerprints = [new_backfill.fingerprint(present, job["args"]) for job in jobs]
    done = _done(conn, fingerprints) if present["skip_done"] else {}
    new = [job for job, work in zip(jobs, fingerprints, strict=True) if work not in done]
    # The journal names their producer; a signature would write each of its rows a second time.
    added = iter(add_jobs(conn, new))
    job_ids = [done.get(work) or next(added)[0] for work in fingerprints]
    skipped = [work in done for work in fingerprints]
    ledger = {"places": [row["place"] for row in wanted], "job_ids": job_ids, "fingerprints": fingerprints}
    _PLANS.do(conn, "note", **bunch, **ledger, are_skipped=skipped)
    _PLANS.do(conn, "done_up_to", **bunch, rest=_rest(conn, name))
    return Made(name, len(new), sum(skipped))


def _cancel_some(conn: Conn, present: Row) -> Made:
    """Cancel the next jobs; behind the last one the limit is again what it was, for jobs that people requeue."""
    name, by = present["name"], f"{present['canceled_by']}, with the backfill {present['name']}"
    bunch = {"name": name, "after": present["canceled"], "upto": min(present["canceled"] + AT_ONCE, present["total"])}
    job_ids = [row["job_id"] for row in _PLANS.rows(conn, "bunch", **bunch) if row["job_id"]]
    if job_ids:
        lifecycle.request_cancels(conn, job_ids, False, by)
    _PLANS.do(conn, "done_up_to", **bunch, rest=_rest(conn, name))
    if bunch["upto"] == present["total"]:
        _allow(conn, name, present["max_running"], by)
    return Made(name, canceled=len(job_ids))


def _rest(conn: Conn, name: str) -> float:
    """The pause after a bunch, as a multiple of its duration; 0 if no other queue user claims jobs."""
    return REST if _PLANS.value(conn, "has_company", limit=limit_of(name)) else 0.0


def _done(conn: Conn, fingerprints: Sequence[UUID]) -> dict[UUID, UUID]:
    """The job that has done this work, by fingerprint."""
    return {row["fingerprint"]: row["job_id"] for row in _PLANS.rows(conn, "done", fingerprints=list(fingerprints))}


def _allow(conn: Conn, name: str, most: int | None, by: str) -> None:
    """Let so many jobs of a backfill run at once; None: any number."""
    if most is None:
        operations.remove_limit(conn, limit_of(name), by)
    else:
        operations.set_limit(conn, limit_of(name), by, most=most)


def _shown(conn: Conn, row: Row, of_large: Counts) -> Row:
    """A backfill as people see it, with its counts, its state and when it will be done."""
    rows = (of_large if row["total"] >= LARGE else counts)(conn, row["name"])
    by_status = dict.fromkeys(partitions.STATUSES, 0) | {each["status"]: each["partitions"] for each in rows}
    job, now, span = row.pop("job"), row.pop("now"), row.pop("span") or {}
    since = min((each["since"] for each in rows if each["since"]), default=None)
    lately_sec = min(LATELY_SEC, (now - since).total_seconds()) if since else 0.0
    state = partitions.state(row["total"], row["made"], by_status, bool(row["paused_at"]), bool(row["canceled_at"]))
    left = row["total"] - row["made"] + by_status["queued"] + by_status["running"]
    ended_lately = sum(each["lately"] for each in rows)
    eta_sec = partitions.eta_sec(left, ended_lately, lately_sec) if state in ("making", "running") else None
    eta_sec = eta_sec and max(eta_sec, *(each["due_sec"] or 0.0 for each in rows))
    facts = {"state": state, "counts": by_status, "started_at": since, "eta_sec": eta_sec}
    words = {name: span.get(name) for name in partitions.SPAN}
    return row | words | shown_job(job, limits=None, **partitions.OF_JOBS) | facts
