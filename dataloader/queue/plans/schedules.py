"""Schedules: their reading, their changes, and the jobs of their due times.

Any number of reapers call `tick`; a due time has one job, whose idempotency key names both. Functions may raise
psycopg.Error and plan.Unknown. `now` is for tests: a clock in place of the database's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain, islice
from typing import Any
from uuid import UUID

from dataloader import periods
from dataloader.model.plans import OVERDUE_SEC as OVERDUE_SEC
from dataloader.queue import db, lifecycle, operations
from dataloader.queue.db import Conn
from dataloader.queue.plans import times
from dataloader.queue.plans.plan import PAUSE, WORKS, Made, Plans, Row, Rows, add_jobs, shown_job
from dataloader.queue.plans.times import Timing

AT_ONCE = 1_000  # missed due times of one schedule for which one transaction makes jobs
RETRY_SEC = periods.seconds("SCHEDULE_RETRY_SEC", 60.0)  # from a failure to the next try
NEXT = 5  # due times that are shown
NEXT_MOST = 100

_WORKS = WORKS | {"retry_at": None}
_PLANS = Plans("schedule", "shown")
due_in, listen = _PLANS.due_in, _PLANS.listen


def listed(conn: Conn, count: int = NEXT) -> Rows:
    """All schedules by name, each with up to `count` of its next due times (`next`)."""
    return [_shown(row, count) for row in _PLANS.rows(conn, "listed", name=None)]


def schedule(conn: Conn, name: str, count: int = NEXT) -> Row:
    """The schedule of this name, as `listed` has it."""
    return _shown(_PLANS.named(conn, name), count)


def add(conn: Conn, new: Mapping[str, Any], by: str) -> Row:
    """Add a schedule, a `new_schedule.checked`; its first due time is the next one from now on. Raises Conflict."""
    with conn.transaction():
        next_due = times.first(_timing(new), db.now(conn))
        _PLANS.add(conn, _written(new) | {"next_due": next_due, "by": by}, "change it, or choose another name")
    return schedule(conn, new["name"])


def change(conn: Conn, name: str, changes: Mapping[str, Any], zone: str, by: str) -> Row:
    """Change fields as `new_schedule.with_changes`; from then on code does not change it. Raises plan.Wrong before."""
    from dataloader.queue.plans import new_schedule  # it needs pydantic, and a worker imports this module

    with _PLANS.locked(conn, name) as present:
        new = new_schedule.checked(new_schedule.with_changes(present, changes), zone)
        is_same = _timing(new) == _timing(present)
        next_due = present["next_due"] if is_same else times.first(_timing(new), present["now"])
        by_people = {"changed_at": present["now"], "changed_by": by}
        _PLANS.write(conn, name, _written(new) | by_people | _WORKS | {"next_due": next_due})
        _PLANS.wake(conn)
    return schedule(conn, name)


def remove(conn: Conn, name: str) -> None:
    """Remove a schedule; its jobs stay. One that a pipeline names comes back when a worker starts."""
    with _PLANS.locked(conn, name):
        _PLANS.do(conn, "remove", name=name)


def pause(conn: Conn, name: str, by: str) -> Row:
    """Make no jobs of a schedule; those that are made stay."""
    with _PLANS.locked(conn, name) as present:
        if present["paused_at"] is None:
            _PLANS.write(conn, name, {"paused_at": present["now"], "paused_by": by})
    return schedule(conn, name)


def resume(conn: Conn, name: str) -> Row:
    """End a schedule's pause; the due times of the pause get no job."""
    with _PLANS.locked(conn, name) as present:
        if present["paused_at"]:
            next_due = times.first(_timing(present), present["now"])
            _PLANS.write(conn, name, dict.fromkeys(PAUSE) | _WORKS | {"next_due": next_due})
            _PLANS.wake(conn)
    return schedule(conn, name)


def run(conn: Conn, name: str, by: str, lease_ttl_sec: int = 60) -> tuple[UUID, str]:
    """Add a job of the schedule now, for which now is the due time; id and status. Raises Conflict, QueueFull."""
    with _PLANS.locked(conn, name) as present:
        try:
            documents = _documents(present | {"jitter_sec": 0}, [present["now"]], lease_ttl_sec)
            [job] = add_jobs(conn, list(documents), by)
        except ValueError as e:
            raise operations.Conflict(str(e)) from None
        _PLANS.write(conn, name, {"last_job_id": job[0]})
    return job


def publish(conn: Conn, declared: Mapping[str, Any], zone: str) -> None:
    """Note what pipelines say of their schedules, by task; one that its pipeline names no more is retired."""
    named = [{**each, "timezone": each["timezone"] or zone} for each in declared.values() if each]
    with conn.transaction():
        changed = _PLANS.do(conn, "retire", tasks=list(declared), names=[each["name"] for each in named])
        if named:
            now = db.now(conn)
            present = [each | {"next_due": times.first(_timing(each), now)} for each in named]
            changed += _PLANS.do(conn, "publish", schedules=json.dumps(present, default=str))
        if changed:
            _PLANS.wake(conn)


def tick(
    conn: Conn, lease_ttl_sec: int = 60, now: datetime | None = None, served: list[str] | None = None
) -> Iterator[Made]:
    """Make the jobs of all due schedules, one a transaction, up to AT_ONCE jobs each. Errors as `Plans.next_made`.

    The schedules that are due longest come first, so a caller may stop early. `served` keeps the schedules of such a
    round for the next call, in which they come last: a backlog above AT_ONCE delays no other schedule.
    """
    served = [] if served is None else served
    for _ in range(2 if served else 1):
        while made := _PLANS.next_made(
            conn, lambda present: _make(conn, present, lease_ttl_sec), RETRY_SEC, now=now, made=served
        ):
            served.append(made.name)
            yield made
        served.clear()


def _make(conn: Conn, present: Row, lease_ttl_sec: int) -> Made:
    name, overlap, last_job_id = present["name"], present["overlap"], present["last_job_id"]
    chosen = times.chosen(_timing(present), present["next_due"], present["now"], present["catch_up"], AT_ONCE)
    due = chosen.due
    if overlap == "skip":
        due = due[:1] if last_job_id is None or _PLANS.value(conn, "has_ended", job_id=last_job_id) else []
    skipped = chosen.due[len(due) :]
    documents = list(_documents(present, due, lease_ttl_sec)) if due else []
    job_ids = [job_id for job_id, _ in add_jobs(conn, documents, f"schedule {name}")]
    if overlap == "cancel_old" and job_ids:
        old = [job_id for job_id in (last_job_id, *job_ids[:-1]) if job_id]
        lifecycle.request_cancels(conn, old, False, f"schedule {name}: a later due time has come")
    made = {"next_due": chosen.following, "skipped": present["skipped"] + len(skipped)} | _WORKS
    latest: dict[str, list[Any]] = {"last_due": chosen.due, "last_job_id": job_ids, "last_skipped": skipped}
    _PLANS.write(conn, name, made | {column: values[-1] for column, values in latest.items() if values})
    return Made(name, len(job_ids), len(skipped))


def _documents(present: Row, due: Sequence[datetime], lease_ttl_sec: int) -> Iterator[Row]:
    from dataloader.queue.plans import new_schedule

    name, timing = present["name"], _timing(present)
    before = times.latest(timing, due[0] - times.TICK)
    for previous, at in zip([before, *due], due, strict=False):
        job = new_schedule.job_of(name, present, times.facts(name, timing, at, previous))
        jitter = {"available_at": at + times.delay(name, at, present["jitter_sec"])} if present["jitter_sec"] else {}
        origin = {"idempotency_key": times.key_of(name, at), "producer": f"schedule {name}"}
        yield {"lease_ttl_sec": lease_ttl_sec, **job, **origin, **jitter}


def _shown(row: Row, count: int) -> Row:
    """A schedule as people see it; one that cannot be read with an error."""
    job, now = row.pop("job"), row.pop("now")
    makes = row["paused_at"] is None and row["retired_at"] is None and row["next_due"] is not None
    try:
        timing = _timing(row)
        coming = chain([row["next_due"]], times.after(timing, row["next_due"])) if makes else ()
        facts = {"words": times.words(timing), "next": list(islice(coming, count))}
    except (ValueError, OverflowError) as e:
        facts = {"words": str(e), "next": []}
    late = (now - row["next_due"]).total_seconds() if makes else 0.0
    shown = shown_job(job, lock_key=row["name"], deadline=None, deadline_sec=None)
    return row | shown | facts | {"overdue_sec": max(late, 0.0)}


def _timing(row: Mapping[str, Any]) -> Timing:
    return Timing(row["cron"], row["interval_sec"], row["timezone"])


def _written(new: Mapping[str, Any]) -> Row:
    return {**new, "job": json.dumps(new["job"])}
