"""Schedules: their reading, their changes, and the jobs of their due times.

Any number of reapers call `tick`. A due time has one job: a reaper locks the schedule, adds the jobs and writes the
next due time in one transaction, and the job's idempotency key names the schedule and the due time. Each function calls
its statements of `sql/schedules.sql`, and may raise psycopg.Error. `by` is the name and address of the asker. `now` is
for tests: a clock in place of the database's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain, islice
from typing import Any, NamedTuple
from uuid import UUID

from psycopg.rows import dict_row

from dataloader import periods
from dataloader.log import masked
from dataloader.queue import db, lifecycle
from dataloader.queue.db import Conn
from dataloader.queue.enqueue import Asker, enqueue_columns, require_room_for
from dataloader.queue.fields import OF_PRODUCER
from dataloader.queue.job import clip
from dataloader.queue.plans import times
from dataloader.queue.plans.times import Timing

CHANNEL = "dl_schedules"
AT_ONCE = 1_000  # missed due times of one schedule for which one transaction makes jobs
RETRY_SEC = periods.seconds("SCHEDULE_RETRY_SEC", 60.0)  # from a failure to the next try
OVERDUE_SEC = periods.seconds("SCHEDULE_OVERDUE_SEC", 120.0)  # from then on nobody seems to make the jobs
NEXT = 5  # due times that are shown
NEXT_MOST = 100

_SQL = db.statements("schedules.sql")
_SQL = {name: text.replace("{shown}", _SQL["shown"]) for name, text in _SQL.items()}
_DEFAULTS = {field.name: field.default for field in OF_PRODUCER}
_OF_JOB = ("args", "priority", "max_attempts", "lease_ttl_sec", "timeout_sec", "partition_key", "affinity_key")
Row = dict[str, Any]


class Taken(Exception):
    """There is a schedule of this name already."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is a schedule {name} already: change it, or choose another name")


class Made(NamedTuple):
    """What one reaper has done with one schedule: the jobs made, the due times skipped, or the error."""

    name: str
    jobs: int = 0
    skipped: int = 0
    error: str | None = None


def listed(conn: Conn, count: int = NEXT) -> list[Row]:
    """All schedules by name, each with up to `count` of its next due times (`next`)."""
    return [_shown(row, count) for row in _rows(conn, "schedules")]


def schedule(conn: Conn, name: str, count: int = NEXT) -> Row | None:
    """The schedule of this name, as `listed` has it; None where there is none."""
    rows = _rows(conn, "schedule", name=name)
    return _shown(rows[0], count) if rows else None


def add(conn: Conn, new: Mapping[str, Any], by: str) -> Row:
    """Add a schedule, a `new_schedule.definition`; its first due time is the next one from now on. Raises Taken."""
    with conn.transaction():
        next_due = times.first(_timing(new), _clock(conn))
        if not conn.execute(_SQL["add"], _written(new) | {"next_due": next_due, "by": by}).fetchone():
            raise Taken(new["name"])
    return _found(conn, new["name"])


def change(conn: Conn, name: str, changes: Mapping[str, Any], zone: str, by: str) -> Row | None:
    """Change fields of a schedule, as `new_schedule.with_changes`; None where there is none.

    From then on a schedule of code is what people say, whatever the code says. Raises ValueError, having changed
    nothing, which names every wrong field.
    """
    from dataloader.queue.plans import new_schedule  # it needs pydantic, and a worker imports this module

    with conn.transaction():
        if (present := _one(conn, "lock", name=name)) is None:
            return None
        new = new_schedule.checked(new_schedule.with_changes(present, changes), zone)
        is_same = _timing(new) == _timing(present)
        next_due = present["next_due"] if is_same else times.first(_timing(new), present["now"])
        conn.execute(_SQL["change"], _written(new) | {"next_due": next_due, "by": by})
    return _found(conn, name)


def remove(conn: Conn, name: str) -> str | None:
    """Remove a schedule; its jobs stay. Returns its name, None where there is none.

    One that a pipeline names comes back when a worker starts.
    """
    found: str | None = _one_value(conn, "remove", name=name)
    return found


def pause(conn: Conn, name: str, by: str) -> Row | None:
    """Make no jobs of a schedule; those that are made stay. None where there is none."""
    conn.execute(_SQL["pause"], {"name": name, "by": by})
    return schedule(conn, name)


def resume(conn: Conn, name: str) -> Row | None:
    """End a schedule's pause; the due times of the pause get no job. None where there is none."""
    with conn.transaction():
        if (present := _one(conn, "lock", name=name)) is None:
            return None
        conn.execute(_SQL["resume"], {"name": name, "next_due": times.first(_timing(present), present["now"])})
    return schedule(conn, name)


def run(conn: Conn, name: str, by: str, lease_ttl_sec: int = 60) -> tuple[UUID, str] | None:
    """Add a job of the schedule now, paused or not, for which now is the due time; returns its id and status.

    None where there is none. Raises ValueError for fields that make no valid job, QueueFull.
    """
    with conn.transaction():
        if (present := _one(conn, "lock", name=name)) is None:
            return None
        [found] = _add(conn, present | {"jitter_sec": 0}, [present["now"]], by, lease_ttl_sec)
        conn.execute(_SQL["ran"], {"name": name, "job_id": found[0]})
    return found


def tell(conn: Conn, said: Mapping[str, Mapping[str, Any] | None], zone: str) -> None:
    """Note what pipelines say of their schedules: by task a `new_schedule.definition`, or None.

    `zone` is the time zone of one that names none. A schedule that its pipeline names no more is retired: it stays, and
    makes no jobs until a pipeline names it again.
    """
    named = [{**each, "timezone": each["timezone"] or zone} for each in said.values() if each]
    with conn.transaction():
        conn.execute(_SQL["retire"], {"tasks": list(said), "names": [each["name"] for each in named]})
        if named:
            now = _clock(conn)
            told = [each | {"next_due": times.first(_timing(each), now)} for each in named]
            conn.execute(_SQL["tell"], {"schedules": json.dumps(told, default=str)})


def tick(conn: Conn, lease_ttl_sec: int = 60, now: datetime | None = None) -> Iterator[Made]:
    """Make the jobs of all schedules that are due, one schedule a transaction, up to AT_ONCE jobs each; yields each.

    `lease_ttl_sec` is that of jobs whose schedule names none. A schedule whose jobs cannot be made keeps the error and
    is tried again RETRY_SEC later; the others go on. Raises psycopg.Error when the session is lost.
    """
    after = ""
    while made := _tick_next(conn, after, lease_ttl_sec, now):
        after = made.name
        yield made


def due_in(conn: Conn, now: datetime | None = None) -> float | None:
    """In how many seconds the next schedule is due; 0 or less: now, None: there is none."""
    found = conn.execute(_SQL["due_in"], {"now": now}).fetchone()
    return found[0] if found else None


def listen(conn: Conn) -> None:
    """From now on this session is notified of every change by which a schedule may be due earlier (CHANNEL)."""
    conn.execute(_SQL["listen"])


def _tick_next(conn: Conn, after: str, lease_ttl_sec: int, now: datetime | None) -> Made | None:
    """Make the jobs of the next schedule behind the name `after` that is due; None: there is none."""
    present: Row | None = None
    try:
        with conn.transaction():
            present = _one(conn, "lock_due", now=now, after=after)
            return _make(conn, present, lease_ttl_sec) if present else None
    except Exception as e:  # also what users' hooks raise
        if present is None or conn.closed or db.is_passing(e):
            raise
        error = clip(masked(f"{e}".strip() or type(e).__name__))
    conn.execute(_SQL["failed"], {"name": present["name"], "error": error, "now": now, "retry_sec": RETRY_SEC})
    return Made(present["name"], error=error)


def _make(conn: Conn, present: Row, lease_ttl_sec: int) -> Made:
    name, overlap, last_job_id = present["name"], present["overlap"], present["last_job_id"]
    chosen = times.chosen(_timing(present), present["next_due"], present["now"], present["catch_up"], AT_ONCE)
    due = chosen.due
    if overlap == "skip":
        due = due[:1] if last_job_id is None or _one_value(conn, "has_ended", job_id=last_job_id) else []
    skipped = chosen.due[len(due) :]
    job_ids = [job_id for job_id, _ in _add(conn, present, due, f"schedule {name}", lease_ttl_sec)]
    if overlap == "cancel_old" and job_ids:
        old = [job_id for job_id in (last_job_id, *job_ids[:-1]) if job_id]
        lifecycle.request_cancels(conn, old, False, f"schedule {name}: a later due time has come")
    _note(conn, present, chosen, skipped, job_ids)
    return Made(name, len(job_ids), len(skipped))


def _note(conn: Conn, present: Row, chosen: times.Choice, skipped: Sequence[datetime], job_ids: Sequence[UUID]) -> None:
    said = {
        "name": present["name"],
        "next_due": chosen.following,
        "last_due": chosen.due[-1] if chosen.due else None,
        "last_job_id": job_ids[-1] if job_ids else None,
        "skipped": len(skipped),
        "last_skipped": skipped[-1] if skipped else None,
    }
    conn.execute(_SQL["made"], said)


def _add(conn: Conn, present: Row, due: Sequence[datetime], by: str, lease_ttl_sec: int) -> list[tuple[UUID, str]]:
    """Add the jobs of these due times; of one that has a job already, that job. Returns ids and statuses."""
    from dataloader.queue import new_job  # it needs pydantic, and a worker imports this module

    if not due:
        return []
    columns = new_job.all_checked(list(_documents(present, due, lease_ttl_sec)))
    require_room_for(conn, columns)
    return enqueue_columns(conn, columns, asker=Asker(by, sees_all=True))


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
    """A schedule as people see it; one that cannot be read, for the zone is gone, with an error."""
    job, now = row.pop("job"), row.pop("now")
    found = {"task": job["task"], "queue": job["queue"], "lock_key": row["name"]}
    found |= {name: _DEFAULTS[name] for name in _OF_JOB} | {"deadline": None, "deadline_sec": None} | job
    makes = row["paused_at"] is None and row["retired_at"] is None and row["next_due"] is not None
    try:
        timing = _timing(row)
        coming = chain([row["next_due"]], times.after(timing, row["next_due"])) if makes else ()
        told = {"words": times.words(timing), "next": list(islice(coming, count))}
    except (ValueError, OverflowError) as e:
        told = {"words": str(e), "next": []}
    late = (now - row["next_due"]).total_seconds() if makes else 0.0
    return row | found | told | {"overdue_sec": max(late, 0.0)}


def _timing(row: Mapping[str, Any]) -> Timing:
    return Timing(row["cron"], row["interval_sec"], row["timezone"])


def _written(new: Mapping[str, Any]) -> Row:
    return {**new, "job": json.dumps(new["job"])}


def _clock(conn: Conn) -> datetime:
    found: datetime = _one_value(conn, "clock", now=None)
    return found


def _found(conn: Conn, name: str) -> Row:
    found = schedule(conn, name)
    assert found is not None  # noqa: S101  it has just been written
    return found


def _one_value(conn: Conn, statement: str, **parameters: Any) -> Any:
    row = conn.execute(_SQL[statement], parameters).fetchone()
    return row[0] if row else None


def _one(conn: Conn, statement: str, **parameters: Any) -> Row | None:
    return next(iter(_rows(conn, statement, **parameters)), None)


def _rows(conn: Conn, statement: str, **parameters: Any) -> list[Row]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(_SQL[statement], parameters).fetchall()
