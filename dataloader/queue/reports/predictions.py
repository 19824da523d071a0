"""Predicted ends of jobs and queues, the reaper's notes of them, and their accuracy. May raise psycopg.Error."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import chain
from typing import NamedTuple
from uuid import UUID

from dataloader.model.kinds import fraction
from dataloader.queue import db
from dataloader.queue.db import Conn, Row
from dataloader.queue.reports import prediction
from dataloader.queue.reports.prediction import MIN_SHARE, Line, Range, Running, Waiting

LINE = 5_000  # queued jobs that a prediction reads; of further ones it uses only the number
SAMPLE = 5  # jobs of a queue whose predictions a round notes, besides those with a deadline
ALERTED = 1_000  # jobs with a deadline that a round reads for each queue
NEVER_SEC = 10 * 366 * 86_400.0  # an end that far away is none
LOCK = 0x646C_7072_6564_6963  # an advisory lock outside the range of keys
# Why there is no prediction, each with its sentence. A client may get others in the future.
REASONS = {
    "over": "The job has ended.",
    "paused": "Its queue is paused.",
    "no_worker": "No worker of its queue takes jobs.",
    "no_runs": "No run of its task, or of the job that holds its key, has succeeded yet.",
    "parents": "It waits for other jobs.",
    "merge": "Its queue merges the jobs of a key, so nobody knows how many runs there will be.",
    "held": "By what is known now it never starts: its key or a limit holds it.",
    "nothing": "No job of the queue runs or is due.",
}
_SQL = db.statements("predictions.sql")
_ENDS = ("earliest", "ends_at", "latest")


@dataclass(frozen=True, slots=True)
class Outlook:
    """The prediction of a queue at the time `at`, in seconds from then; `reason` (of REASONS): why there is none.

    `ends` and `line` are corrected, `plain` is not. `line` is the end of all that runs or is due (None: no job does);
    `last` that of the line's last job.
    """

    queue: str
    at: datetime
    accuracy: Row
    reason: str | None = None
    jobs: Sequence[UUID] = ()
    ends: Mapping[UUID, Range] = field(default_factory=dict)
    plain: Mapping[UUID, float] = field(default_factory=dict)
    line: Range | None = None
    last: Range | None = None


def outlook(conn: Conn, queue: str) -> Outlook:
    """The prediction of a queue now. With LINE queued jobs or more it needs some tenths of a second."""
    with conn.transaction():
        db.by_index(conn)
        facts = _SQL.rows(conn, "queue", queue=queue)[0]
        accuracy = _SQL.rows(conn, "accuracy", queue=queue)[0]
        waiting, running = _SQL.rows(conn, "waiting", queue=queue, most=LINE), _SQL.rows(conn, "running", queue=queue)
        tasks = {row["task"] for row in chain(waiting, running)}
        durations = {row["task"]: row["seconds"] for row in _SQL.rows(conn, "durations", tasks=list(tasks))}
        room = {row["name"]: row["room"] for row in _SQL.rows(conn, "room", queue=queue)}
    correction = prediction.correction(accuracy.pop("ratios") or [])
    line = line_of(facts, waiting, running, room)
    hindrances = {
        "nothing": not line.waiting and not line.running,
        "paused": facts["is_paused"],
        "merge": facts["merges"],
        "no_worker": not line.workers and not line.running,
    }
    reason = next((reason for reason, holds in hindrances.items() if holds), None)
    result = Outlook(queue, facts["at"], accuracy, reason, [row["job_id"] for row in waiting + running])
    if reason:
        return result
    forecast = prediction.forecast(line, durations, result.jobs)
    if forecast is None:
        return replace(result, reason="no_runs")
    known = [each for each in line.running if each.task in durations or (each.share or 0.0) >= MIN_SHARE]
    ends = {each.job: forecast.jobs[each.job] for each in known}
    # The farm cannot predict the ends of these runs, nor the ends of jobs that wait for their keys.
    endless = {each.takes[0] for each in line.running if each.job not in ends}
    waits = [each for each in line.waiting if each.task in durations and each.takes[0] not in endless]
    plain = {each.job: forecast.jobs[each.job].middle for each in waits}
    ends |= {job: prediction.corrected(forecast.jobs[job], correction) for job in plain}
    last = prediction.corrected(forecast.jobs[line.waiting[-1].job], correction) if line.waiting else None
    whole = prediction.corrected(forecast.line, correction) if line.waiting else forecast.line
    has_due = line.running or any(each.due_sec <= 0 for each in line.waiting)
    return replace(result, ends=ends, plain=plain, line=whole if has_due else None, last=last)


def line_of(facts: Row, waiting: Sequence[Row], running: Sequence[Row], room: Mapping[str, int]) -> Line:
    """PURE: the rows of a queue as a line to be played; jobs that are claimed ahead wait before all others."""

    def done(row: Row) -> float | None:
        # The progress of a run that began at a checkpoint, or after another run, does not show its speed.
        return fraction(row["progress"]) if row["claims"] <= 1 else None

    first = {row["worker"]: row for row in reversed(running)}  # of the jobs of each worker the one that runs
    ahead = [row | {"due_sec": 0.0} for row in running if row is not first[row["worker"]]]
    due = sum(row["due_sec"] <= 0 for row in waiting)
    return Line(
        max(round(facts["workers"]), 1) if facts["workers"] else 0,
        [Running(row["job_id"], row["task"], row["ran_sec"], done(row), _takes(row, room)) for row in first.values()],
        [Waiting(row["job_id"], row["task"], _takes(row, room), row["due_sec"]) for row in [*ahead, *waiting]],
        max(facts["length"] - due, 0) if len(waiting) >= LINE else 0,
        room,
    )


def _takes(row: Row, room: Mapping[str, int]) -> list[str]:
    """The key of a job, under a name that no limit has, and its limits that have a bound."""
    return [f"\0{row['lock_key']}", *(name for name in row["limits"] or () if name in room)]


def queue_prediction(seen: Outlook) -> Row:
    """PURE: the report of when all jobs that run or are due now will have ended."""
    return {"queue": seen.queue, **_shown(seen, seen.line, seen.reason or (None if seen.line else "nothing"))}


def job(conn: Conn, job_id: UUID) -> Row | None:
    """The facts of a job that `job_prediction` needs besides its queue's outlook; None for an unknown id."""
    return _SQL.first(conn, "job", job_id=job_id)


def job_prediction(seen: Outlook, job: Row) -> Row:
    """PURE: the report of when a job will end; one beyond LINE ends after LINE and before all that is due."""
    range_, reason = seen.ends.get(job["job_id"]), seen.reason
    if job["status"] not in ("queued", "running"):
        reason = "over"
    elif job["blocked_on"] == "parent":
        reason = "parents"
    elif job["is_held"] and reason in (None, "nothing"):
        reason = "held"
    if range_ is None and not reason:
        if len(seen.plain) < LINE or not seen.last:
            reason = "no_runs"
        else:
            end = Range(*map(max, seen.last, seen.line or seen.last))
            middle = (seen.last.middle + end.middle) / 2
            range_ = Range(*(max(each, job["due_sec"]) for each in (seen.last.low, middle, end.high)))
    shown = _shown(seen, range_, reason)
    is_late = bool(job["deadline"] and shown["ends_at"] and shown["ends_at"] > job["deadline"])
    return {name: job[name] for name in ("job_id", "queue", "status", "deadline")} | shown | {"is_late": is_late}


def _shown(outlook: Outlook, range_: Range | None, reason: str | None) -> Row:
    """The instants of a range, or the reason why there is none."""
    if range_ and range_.middle > NEVER_SEC:
        range_, reason = None, "held"
    times: Row = dict.fromkeys(_ENDS)
    if range_ and not reason:
        times = {
            name: outlook.at + timedelta(seconds=min(end, NEVER_SEC)) for name, end in zip(_ENDS, range_, strict=True)
        }
    return {"at": outlook.at, **times, "reason": reason, "accuracy": outlook.accuracy}


def late(conn: Conn, queue: str, most: int) -> list[Row]:
    """Up to `most` jobs of a queue that are predicted to miss their deadlines, or have missed them."""
    return _SQL.rows(conn, "late", queue=queue, most=most)


class Noted(NamedTuple):
    """Of which queue the predictions were noted, how many jobs were shown to be late, or why it could not be done."""

    queue: str
    late: int = 0
    error: str | None = None


def note(conn: Conn, after: str) -> Noted | None:
    """Called by the reaper: note what is predicted of the next queue behind the name `after`, and at "" compare.

    The journal notes once that a job will miss its deadline. None: no queue is left, or another reaper is at it.
    """
    with conn.transaction():
        db.give_up_after(conn, 1.0, lock_sec=0.1)  # the reaper has one session for this and for leases
        if db.call(conn, "pg_try_advisory_xact_lock", LOCK) == [(False,)]:
            return None  # one reaper at a time
        if not after:
            _SQL.do(conn, "compare")
        queue = next((row["queue"] for row in _SQL.rows(conn, "queues") if row["queue"] > after), None)
        if queue is None:
            return None
        try:
            with conn.transaction():
                seen = outlook(conn, queue)
                _SQL.do(conn, "note", made_at=seen.at, forecast=json.dumps(list(_noted(conn, seen)), default=str))
                return Noted(queue, len(_SQL.rows(conn, "alert", queue=queue)))
        except Exception as e:  # the rows of a queue may cause any error
            if conn.closed:
                raise
            return Noted(queue, error=f"{type(e).__name__}: {e}".strip())


def _noted(conn: Conn, outlook: Outlook) -> Iterator[Row]:
    """The rows to note: all jobs with a deadline, and SAMPLE others of the line."""
    rows = _SQL.rows(conn, "with_deadlines", job_ids=list(outlook.jobs), most=ALERTED)
    due = {row["job_id"]: row["deadline"] for row in rows}
    sample = list(outlook.ends)[:: max(len(outlook.ends) // SAMPLE, 1)]
    for job_id in dict.fromkeys([*due, *sample]):
        report = _shown(outlook, outlook.ends.get(job_id), None)
        times = {name: report[name] for name in _ENDS}
        own = {"job_id": job_id, "queue": outlook.queue, "deadline": due.get(job_id)}
        if report["ends_at"] or own["deadline"]:
            yield own | times | {"plain_sec": outlook.plain.get(job_id) if report["ends_at"] else None}
