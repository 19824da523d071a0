"""Every statement in the life of one job: a function per statement of `sql/queue.sql`. Each may raise psycopg.Error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from time import monotonic
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
import structlog
from psycopg.types.json import Jsonb

from dataloader import log
from dataloader.config import ConfigError
from dataloader.queue import db, logs, probe
from dataloader.queue.db import Conn, Row, array
from dataloader.queue.job import LEADS_TO, Checkpoint, Finish, Job, Status, Verb, clip, storable
from dataloader.queue.run_log import RunLog

JOBS_CHANNEL = "dl_jobs"  # payload: a queue in which something may be claimable
CANCEL_CHANNEL = "dl_cancel"  # payload: the id of a running job that should stop

# For dl_step: its plans are made once a session, and do not depend on the statistics.
PLANS = (
    "SET plan_cache_mode = force_generic_plan; SET jit = off; SET enable_seqscan = off; SET enable_bitmapscan = off;"
    " SET enable_hashjoin = off; SET enable_mergejoin = off; SET enable_sort = off"
)
LARGE = 1_000_000  # characters of arguments of the jobs of one claim
PLAIN_AGAIN_SEC = 1.0  # until the next short claim of a queue with jobs that only dl_step may start

_log = structlog.get_logger("worker")
_SQL = db.statements("queue.sql")
_VERSIONS = f"SELECT job_id, version FROM ({_SQL['status']}) shown"  # noqa: S608  the rest of it is not computed
_REASONS = f"SELECT job_id, waiting_for FROM ({_SQL['status']}) shown"  # noqa: S608  as above
_TYPES: dict[str, Callable[[str], Any]] = {"until": db.instant, "since": db.instant, "job_id": UUID}
_TEXTS = {"notes", "error_group", "changed"}  # facts that are no numbers


@dataclass(slots=True, eq=False)
class Session:
    """A database session: the connection, and of a worker its identity, and its backend's pid and start."""

    conn: db.Connection
    worker: str = ""
    backend_pid: int = 0
    backend_start: datetime = db.EARLIEST
    is_listening: bool = False  # for queues with jobs
    makes_way: bool = False  # by the next claim, for the last one was short and found fewer jobs than it wanted
    not_plain: dict[str, float] = field(default_factory=dict)  # queues without short claims, until then (monotonic)


class Ended(NamedTuple):
    """A run that is over: what is written of its job, facts for its journal, and a masked `report` for the log."""

    job: Job
    finish: Finish
    facts: Mapping[str, Any] | None = None
    report: Mapping[str, Any] | None = None
    checkpoint: Checkpoint | None = None
    log: RunLog | None = None


class Head(NamedTuple):
    """Where a claim begins: at the queue's first row that no other session has locked; as PostgreSQL writes it."""

    priority: int = 0
    time: str = "-infinity"


class Reached(NamedTuple):
    """Up to where a claim has passed jobs of this priority over for others: those that were created before `since`."""

    priority: int
    since: datetime


class LeftOut(NamedTuple):
    """The first job that a claim has passed over for its task: the task, and since when the job is due."""

    task: str
    since: datetime


class Affinity(NamedTuple):
    """The preferences of a claim: see dl_step. `overdue`: by priority, jobs created before that time go first."""

    warm: Collection[str]
    elsewhere: Collection[str]
    lookahead: int
    overdue: Mapping[int, datetime] = {}


class Step(NamedTuple):
    """The result of a claim: jobs, the best first, or the seconds until the queue's next job is due.

    `ended`: the runs that were still ours; `locked` ones are to be written again. The next steps may begin at `head`,
    for a second. `batch`: keys in one call. `reached`, `left_out`: jobs were passed over for their affinity, or their
    tasks.
    """

    jobs: list[Job]
    ended: Mapping[UUID, Status]
    backoffs: int = 0
    look_again: bool = False
    due_in: float | None = None
    locked: Collection[UUID] = ()
    head: Head | None = None
    batch: int | None = None
    reached: Reached | None = None
    left_out: LeftOut | None = None

    @property
    def job(self) -> Job | None:
        """The best of the jobs."""
        return self.jobs[0] if self.jobs else None


class Written(NamedTuple):
    """The result of writing ends: `ended` and `locked` as in Step."""

    ended: Mapping[UUID, Status]
    locked: Collection[UUID]


class Settled(NamedTuple):
    """A job taken from a dead or silent worker, and its new status; None: the row is locked, try again."""

    job_id: UUID
    status: str | None


def _all(conn: Conn, name: str, **parameters: Any) -> list[Any]:
    return conn.execute(_SQL[name].encode(), parameters).fetchall()


def open_session(conn: db.Connection, worker: str) -> Session:
    """Set what a worker's statements rely on, and learn what identifies this session for dl_end_session.

    Raises ConfigError where the role may not see that.
    """
    conn.execute(PLANS)
    facts = "SELECT current_user, backend_start FROM pg_stat_get_activity(pg_backend_pid())"
    ((role, start),) = conn.execute(facts).fetchall()
    if start is None:
        raise ConfigError(f"{probe.BLIND.format(role)}: {probe.SIGHT.format(role)}")
    return Session(conn, worker, conn.info.backend_pid, start)


def listen(session: Session, is_idle: bool = True) -> None:
    """LISTEN for queues with jobs while the worker is idle: each listening session costs each NOTIFY a signal.

    Not `is_idle`: a worker that is busy for longer stops that; it claims again before its next wait.
    """
    session.conn.execute(f"{'LISTEN' if is_idle else 'UNLISTEN'} {JOBS_CHANNEL}")
    session.is_listening = is_idle


def listen_for_cancellations(conn: db.Connection) -> None:
    """LISTEN for running jobs that should stop: the keeper does it for all workers of its farm."""
    conn.execute(f"LISTEN {CANCEL_CHANNEL}")


def status(conn: Conn, job_id: UUID) -> Row | None:
    """One job as the API shows it, or None; `waiting_for` says why a queued job does not run yet."""
    return (versioned_status(conn, job_id) or (None,))[0]


def versioned_status(conn: Conn, job_id: UUID) -> tuple[Row, str] | None:
    """The job's `status` and its version (see `versions`), or None."""
    for row in db.rows(conn, _SQL["status"], {"job_ids": [job_id]}):
        version = row.pop("version")
        return row | {"waiting_for": _reason(row["waiting_for"])}, version
    return None


def without_holders(job: Row) -> Row:
    """A job's `status` without the ids of the jobs that hold it up, for an id is enough to cancel another's job."""
    if not (first := job["waiting_for"]):
        return job
    why, *rest = (
        {name: value for name, value in each.items() if name != "job_id" or each["reason"] == "parent"}
        for each in (first, *first.get("besides", ()))
    )
    return job | {"waiting_for": why | ({"besides": rest} if rest else {})}


def _reason(waiting_for: Row | None) -> Row | None:
    """With instants and ids as such, which JSON has as texts."""
    if waiting_for is None:
        return None
    typed: Row = {name: read(waiting_for[name]) for name, read in _TYPES.items() if waiting_for.get(name)}
    if besides := waiting_for.get("besides"):
        typed["besides"] = [_reason(each) for each in besides]
    return waiting_for | typed


def versions(conn: Conn, job_ids: Collection[UUID]) -> dict[UUID, str]:
    """A short text for each of these jobs that changes with what `status` shows of it, but for its figures."""
    return dict(conn.execute(_VERSIONS, {"job_ids": list(job_ids)}).fetchall())


def reasons(conn: Conn, job_ids: Collection[UUID]) -> dict[UUID, Row | None]:
    """Why each of these jobs does not run yet: the `waiting_for` of its `status`."""
    rows = conn.execute(_REASONS, {"job_ids": list(job_ids)}).fetchall() if job_ids else []
    return {job_id: _reason(waiting_for) for job_id, waiting_for in rows}


def request_cancel(conn: Conn, job_id: UUID, force: bool = False, by: str = "request") -> Row | None:
    """Cancel a queued job at once, ask a running one to stop, by `force` at once; then its status, or None."""
    request_cancels(conn, [job_id], force, by)
    return status(conn, job_id)


def request_cancels(conn: Conn, job_ids: Collection[UUID], force: bool, by: str) -> None:
    """`request_cancel` for many jobs in one statement, so that a worker's step waits for one statement only."""
    conn.execute(_SQL["request_cancel"], {"job_ids": list(job_ids), "force": force, "by": by})


def step(
    session: Session,
    queues: list[str],
    backoff_sec: float,
    most: int,
    ends: Collection[Ended] | None = (),
    head: Head = Head(),  # noqa: B008  a constant
    by_lag: bool = False,
    affinity: Affinity | None = None,
    without: Collection[str] = (),
    tries_short: bool = True,
) -> Step:
    """Write how runs of this worker have ended and claim up to `most` jobs, whose keys this session holds.

    They are of the first of these queues that has some; `by_lag`: of the one that has waited longest. Of an ordered
    queue the heads of up to `most` keys, of a merged one all jobs of these keys. All other keys are let go, unless
    `ends` is None. Raises psycopg.Error, having changed nothing, for an end that PostgreSQL refuses. A plain queue has
    a short claim (dl_step_plain). Where that starts nothing, dl_step follows in a transaction of its own; it reaches
    each row that a short claim reaches.
    """
    prefer: Row = {"without": list(without)} if without else {}
    if affinity:
        prefer |= {"warm": list(affinity.warm), "elsewhere": list(affinity.elsewhere), "lookahead": affinity.lookahead}
        prefer["overdue"] = {priority: instant.isoformat() for priority, instant in affinity.overdue.items()}
    before: Mapping[UUID, Status] = {}
    is_for_short = tries_short and not (prefer or (by_lag and len(queues) > 1))
    if is_short := is_for_short and _may_be_short(session, queues[0], most, ends):
        short, left = _step_plain(session, queues[0], most, ends)
        session.makes_way = 0 < len(short.jobs) < most
        if short.jobs:
            return short
        before, ends = short.ended, ends if ends is None else left
    else:
        session.makes_way = False
    parameters = {
        "queues": _texts(queues),
        "by_lag": by_lag,
        "backoff_sec": backoff_sec,
        "most": most,
        "from_priority": head.priority,
        "from_time": head.time,
        "prefer": json.dumps(prefer) if prefer else None,
    }
    try:
        step = _long_step(session, parameters, ends)
    except psycopg.Error:
        if before and not ends:  # these ends are written; the next claim meets the error again
            return Step([], before, 0, True, None)
        raise
    if is_short and step.jobs:
        session.not_plain[queues[0]] = monotonic() + PLAIN_AGAIN_SEC
    return step._replace(ended={**before, **step.ended}) if before else step


def _may_be_short(session: Session, queue: str, most: int, ends: Collection[Ended] | None) -> bool:
    return (
        most > 0
        and not session.makes_way
        and session.not_plain.get(queue, 0.0) <= monotonic()
        and all(end.finish.verb == Verb.SUCCEED for end in ends or ())
    )


def _step_plain(
    session: Session, queue: str, most: int, ends: Collection[Ended] | None
) -> tuple[Step, Collection[Ended]]:
    """The short claim, and the ends that it has not written."""
    rows = _rows_of_step(session, "step_plain", {"queue": queue, "most": most}, ends)
    *_, left, batch = rows.pop() if rows and rows[-1][0] is None else (None, None)
    jobs = [Job._make((row[0], queue, *row[1:11], session.worker, row[11])) for row in rows]
    _forget_large(session.conn, jobs)
    ended = {end.job.job_id: Status.SUCCEEDED for end in ends or () if end.job.job_id not in (left or ())}
    _spend_checkpoints(session.conn, ends or (), ended)
    return Step(jobs, ended, batch=batch), [end for end in ends or () if end.job.job_id not in ended]


def _rows_of_step(session: Session, statement: str, parameters: Row, ends: Collection[Ended] | None) -> list[Any]:
    parameters |= {"worker": session.worker, "backend_start": session.backend_start.isoformat(), **_arrays(ends)}
    _keep_before(session.conn, ends or ())
    return session.conn.repeating.execute(_SQL[statement], parameters, prepare=True).fetchall()


def _forget_large(conn: db.Connection, jobs: Sequence[Job]) -> None:
    if sum(len(job.args_json) for job in jobs) > LARGE:
        del conn.repeating  # it would hold the arguments once more while the jobs run


def _long_step(session: Session, parameters: Row, ends: Collection[Ended] | None) -> Step:
    *rows, last = _rows_of_step(session, "step", parameters, ends)
    jobs = [Job._make((*row[:12], session.worker, row[12])) for row in rows]
    _forget_large(session.conn, jobs)
    facts = json.loads(last[13]) if last[13] else {}  # see dl_step
    written = _written(ends or (), *([*map(UUID, facts.get(of, ()))] for of in ("unfinished", "canceled", "locked")))
    _spend_checkpoints(session.conn, ends or (), written.ended)
    if not facts:
        return Step(jobs, written.ended)
    passed_over = facts.get("passed_over", {})
    reached, left_out = passed_over.get("reached"), passed_over.get("left_out")
    return Step(
        jobs,
        written.ended,
        backoffs=facts.get("backoffs", 0),
        look_again=facts.get("look_again", False),
        due_in=facts.get("due_in"),
        locked=written.locked,
        head=Head(facts["from_priority"], facts["from_time"]) if "from_time" in facts else None,
        batch=facts.get("batch"),
        reached=reached and Reached(reached["priority"], db.instant(reached["since"])),
        left_out=left_out and LeftOut(left_out["task"], db.instant(left_out["since"])),
    )


def traces(conn: Conn, job_ids: Collection[UUID]) -> dict[UUID, str]:
    """The W3C traceparents of those of these jobs that have one."""
    return dict(_all(conn, "traces", job_ids=list(job_ids)))


def waits(conn: Conn, job_ids: Collection[UUID]) -> dict[UUID, float]:
    """For how many seconds each of these jobs has been due."""
    return dict(_all(conn, "waits", job_ids=list(job_ids)))


def beat(conn: Conn, jobs: Sequence[Job], progress: str | None, journal: bool, lock_sec: float = 5) -> bool | None:
    """Renew the leases of a run's jobs, with the first one's progress; True: it should stop, None: a claim is over.

    Raises LockNotAvailable where another session keeps a row locked for `lock_sec`.
    """
    facts = {"progress": progress, "journal": journal, "lock_ms": str(int(lock_sec * 1_000))}
    ((held, cancel_requested),) = _all(conn, "beat", **_claims_of(jobs), **facts)
    return cancel_requested if held == len(jobs) else None


def retake(session: Session, jobs: Sequence[Job]) -> bool | None:
    """After a reconnect: hold keys and leases again; False: one is lost, None: the former session has a key (2 s)."""
    ((held,),) = db.call(session.conn, "dl_retake", *_claims_of(jobs).values(), session.backend_start)
    return None if held is None else bool(held)


def leap(conn: Conn, job: Job, fence: int) -> int | None:
    """Give this claim a number above a fence in the target that is ahead of the queue; None when the claim is over."""
    return next((claim for (claim,) in _all(conn, "leap", **_claim_of(job), fence=fence)), None)


def finish_some(conn: Conn, worker: str, ends: Collection[Ended]) -> Written:
    """Write the ends of runs of `worker` and release their keys; returns the new statuses of the runs still its own.

    A refused end costs no other one: it is written bare, else as `failed` with PostgreSQL's reason, else left to the
    reaper.
    """
    try:
        return _finish(conn, worker, ends)
    except psycopg.Error as e:
        if db.is_passing(e):
            raise
    each = [_finish_one(conn, end) for end in ends]
    statuses = {job_id: status for written in each for job_id, status in written.ended.items()}
    return Written(statuses, [job_id for written in each for job_id in written.locked])


def _finish_one(conn: Conn, end: Ended) -> Written:
    error = (end.finish.error or "").encode("ascii", "backslashreplace").decode().replace("\0", "") or None
    bare = end._replace(finish=end.finish._replace(error=error, progress=None, error_group=None), facts=None)
    reason = ""
    for written_as in (end, bare, None):
        if written_as is None:
            error = clip(f"the database refused the end of this run ({end.finish.verb}): {reason}")
            written_as = Ended(end.job, Finish(Verb.FAIL, error), log=end.log)
        try:
            return _finish(conn, end.job.claimed_by, [written_as])
        except psycopg.Error as e:
            if db.is_passing(e):
                raise
            reason = reason or log.masked(e.diag.message_primary or str(e))
    _log.error("worker.end.refused", job_id=str(end.job.job_id), verb=end.finish.verb, error=reason)
    return Written({}, ())


def keep_results(conn: Conn, ends: Collection[Ended]) -> None:
    """Store what these runs have returned, as far as their claims hold, right before their ends are written."""
    if kept := [_claim_of(end.job) | {"result": end.finish.result} for end in ends if end.finish.result is not None]:
        with conn.cursor() as cursor:
            cursor.executemany(_SQL["keep_results"], kept)


def checkpoints(conn: Conn, job_ids: Collection[UUID]) -> dict[UUID, Checkpoint]:
    """Where those of these jobs go on that have a checkpoint, or have had one in their target."""
    return {job_id: Checkpoint(*rest) for job_id, *rest in _all(conn, "checkpoints", job_ids=list(job_ids))}


def keep_checkpoint(conn: Conn, job: Job, checkpoint: Checkpoint) -> None:
    """Store the progress of a run if its claim holds; a repetition has no effect."""
    conn.execute(_SQL["keep_checkpoint"], _claim_of(job) | checkpoint._asdict() | {"token": checkpoint.claim})


def _keep_before(conn: Conn, ends: Collection[Ended]) -> None:
    keep_results(conn, ends)
    for end in ends:
        if end.checkpoint is not None:
            keep_checkpoint(conn, end.job, end.checkpoint)
    if runs := [end.log for end in ends if end.log is not None]:
        logs.write(conn, runs, monotonic(), are_over=True)


def _spend_checkpoints(conn: Conn, ends: Collection[Ended], ended: Mapping[UUID, Status]) -> None:
    """The checkpoints of jobs that have succeeded go. They stay where this fails, until the job goes or comes back."""
    if spent := [end.job.job_id for end in ends if end.checkpoint and ended.get(end.job.job_id) is Status.SUCCEEDED]:
        with suppress(psycopg.Error):
            conn.execute(_SQL["spend_checkpoints"], {"job_ids": spent})


def _finish(conn: Conn, worker: str, ends: Collection[Ended]) -> Written:
    _keep_before(conn, ends)
    parameters = {"worker": worker, "let_go": False} | _arrays(ends)
    ((*row,),) = conn.execute(_SQL["finish"], parameters, prepare=True).fetchall()
    written = _written(ends, *row)
    _spend_checkpoints(conn, ends, written.ended)
    return written


def _written(ends: Collection[Ended], unfinished: Any = (), canceled: Any = (), locked: Any = ()) -> Written:
    statuses = {e.job.job_id: LEADS_TO[e.finish.verb] for e in ends}
    statuses |= dict.fromkeys(canceled or (), Status.CANCELED)
    for job_id in [*(unfinished or ()), *(locked or ())]:
        del statuses[job_id]
    return Written(statuses, locked or ())


def _arrays(ends: Collection[Ended] | None) -> dict[str, str | None]:
    """As dl_finish reads them: an array for each value, as a text, which costs psycopg less; None for one of nulls."""
    rows: list[tuple[str | None, ...]] = []
    for ended in ends or ():
        job, (verb, error, delay_sec, progress, _, group), facts, *_ = ended
        delay = None if delay_sec is None else str(delay_sec)
        if group is not None:
            facts = {**(facts or {}), "error_group": group}
        written = None
        if facts and _TEXTS.isdisjoint(facts):  # of numbers alone, which is quicker
            written = "{" + ", ".join([f'"{name}": {number}' for name, number in facts.items()]) + "}"
        elif facts:
            written = json.dumps(facts)
        rows.append((job.job_id.hex, str(job.attempt), verb, error, delay, progress, written))
    names = ("job_ids", "attempts", "verbs", "errors", "delays_sec", "progress", "facts")
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    arrays = {name: _texts(column) for name, column in zip(names, columns, strict=True)}
    return arrays if rows or ends is None else arrays | {"job_ids": "{}"}


def _texts(values: Sequence[str | None]) -> str | None:
    if values.count(None) == len(values):
        return None
    if any(value is not None and storable(value) != value for value in values):  # libpq would cut a text at a NUL
        raise psycopg.DataError("PostgreSQL's texts have neither NUL nor lone surrogates")
    return array(values)


def has_ended(conn: Conn, job: Job) -> bool:
    """True when the end of this claim is committed: what a finish whose answer was lost may have come to."""
    return (True,) in _all(conn, "ended", **_claim_of(job))


def keep(conn: Conn, job_ids: Sequence[UUID], attempts: Sequence[int], claimed_by: str) -> bool:
    """Renew the leases in the place of a worker that is alive but silent; False when a claim is over."""
    claims = {"job_ids": job_ids, "attempts": attempts, "claimed_by": claimed_by}
    return conn.execute(_SQL["keep"], claims).rowcount == len(job_ids)


def journal_stuck(conn: Conn, job_id: UUID, attempt: int, claimed_by: str, silent_sec: float, stacks: str) -> None:
    """Write into a running job's journal how long its run has sent no report, and the stacks of its threads."""
    claim = {"job_id": job_id, "attempt": attempt, "claimed_by": claimed_by}
    conn.execute(_SQL["tell_stuck"], claim | {"silent_sec": silent_sec, "stacks": stacks})


def end_session(conn: Conn, backend_pid: int, backend_start: datetime) -> None:
    """End the backend of a lost session, and wait up to 2 s for its exit."""
    db.call(conn, "dl_end_session", backend_pid, backend_start)


def cancellations(conn: Conn, job_ids: Collection[UUID]) -> dict[UUID, bool]:
    """Those of these running jobs that should stop, and whether they were forced to."""
    return dict(_all(conn, "cancellations", job_ids=list(job_ids)))


def settle(
    conn: Conn, worker: str, end: str, reason: str, facts: Row | None = None, running: Sequence[UUID] | None = None
) -> list[Settled]:
    """Take its jobs from a dead worker, with this `end` (crash, timeout, drain) of those `running`; None: of all.

    The others are handed back uncounted.
    """
    return [Settled(*row) for row in db.call(conn, "dl_settle", worker, running, end, reason, Jsonb(facts or {}))]


def take_back(conn: Conn, worker: str, job_ids: Sequence[UUID], reason: str) -> int:
    """Hand back, uncounted, jobs that a living worker, whose session has ended, has claimed ahead; how many."""
    return conn.execute(_SQL["take_back"], {"worker": worker, "job_ids": list(job_ids), "reason": reason}).rowcount


def still_held(conn: Conn, worker: str, jobs: Sequence[Job]) -> set[UUID]:
    """Those of these jobs whose claims this worker still has."""
    return {job_id for (job_id,) in _all(conn, "still_held", **_claims(jobs), worker=worker)}


def hand_back(conn: Conn, worker: str, holds: Sequence[Job], reason: str) -> list[tuple[UUID, str]]:
    """Hand back, uncounted, all that a living worker has claimed but for `holds`, unless locked; ids and statuses."""
    return _all(conn, "hand_back", **_claims(holds), worker=worker, reason=reason)


def settle_gone(conn: Conn, worker: str, reason: str) -> list[Settled]:
    """Take from a worker that is gone what it held; what it had not begun is handed back uncounted."""
    return [Settled(*row) for row in _all(conn, "settle_gone", worker=worker, reason=reason)]


def holders(conn: Conn, host: str) -> list[str]:
    """The workers of this host that hold running jobs, by their names' beginning."""
    return [worker for (worker,) in _all(conn, "holders", host=host)]


def clock(conn: Conn) -> tuple[float, float]:
    """The database's clock (seconds since 1970), and for how many seconds its server has been up."""
    ((now, up_sec),) = _all(conn, "clock")
    return now, up_sec


def reap(conn: Conn, up_sec: float = math.inf, patience_sec: float = 0.0) -> Settled | None:
    """Take one job whose lease has run out from its worker; None: there is none. The times are those of dl_reap."""
    ((job_id, _, status),) = db.call(conn, "dl_reap", up_sec, patience_sec)
    return None if job_id is None else Settled(job_id, status)


def wake(conn: Conn, limit: int) -> int:
    """Make up to `limit` rows of each queue claimable whose time has come; returns their number."""
    ((woken,),) = db.call(conn, "dl_wake_all", limit)
    return int(woken)


def unpark_stranded(conn: Conn, after: int | None, limit: int) -> int | None:
    """Make parked rows claimable whose key has no run, for up to `limit` keys; the next `after`, None at the end."""
    ((reached,),) = db.call(conn, "dl_unpark_stranded", -(2**31) - 1 if after is None else after, limit)
    return None if reached is None else int(reached)


def resolve_stranded(conn: Conn, after: UUID | None, limit: int) -> UUID | None:
    """Tell up to `limit` waiting jobs of parents that have ended unseen; returns the next `after`, None at the end."""
    row: tuple[UUID | None]
    (row,) = db.call(conn, "dl_resolve_stranded", after or UUID(int=0), limit)
    return row[0]


def let_in(conn: Conn) -> None:
    """Make rows claimable that wait for a limit with room, as far as it has: what ends and claims have missed."""
    db.call(conn, "dl_let_in_all")


def prune(conn: Conn, older_than_sec: float, since: str, limit: int) -> tuple[int, str]:
    """Delete up to `limit` jobs that ended so long ago, the oldest first; their number, and the next `since`."""
    ((pruned, reached),) = _all(conn, "prune", older_than_sec=older_than_sec, since=since, limit=limit)
    return pruned, reached


def _claims(jobs: Sequence[Job]) -> Row:
    return {"job_ids": [job.job_id for job in jobs], "attempts": [job.attempt for job in jobs]}


def _claims_of(jobs: Sequence[Job]) -> Row:
    return _claims(jobs) | {"claimed_by": jobs[0].claimed_by}


def _claim_of(job: Job) -> Row:
    return {"job_id": job.job_id, "attempt": job.attempt, "claimed_by": job.claimed_by}
