"""Every statement in the life of one job: a function per statement of `sql/queue.sql`, by the same name.

A connection is an argument; nothing is cached and nothing decided here (see `job.decide`). Every function may raise
psycopg.Error; `db.is_passing` tells whether a new connection heals it. May import `db` and `job`.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row, tuple_row
from psycopg.types.json import Jsonb

from dataloader import db
from dataloader.job import Finish, Job, Status

JOBS_CHANNEL = "dl_jobs"  # payload: a queue in which something may be claimable
CANCEL_CHANNEL = "dl_cancel"  # payload: the id of a running job that should stop

# For dl_step: its plans are made once a session, and are what they should be whatever the statistics say.
PLANS = (
    "SET plan_cache_mode = force_generic_plan; SET jit = off; SET enable_seqscan = off; SET enable_bitmapscan = off;"
    " SET enable_hashjoin = off; SET enable_mergejoin = off"
)
LARGE = 1_000_000  # characters of arguments of the jobs of one claim
AT_ONCE = 1_000  # jobs that enqueue_many adds in one statement

_SQL = db.statements("queue.sql")
_NOT_YET = UUID(int=0)
_loader = psycopg.adapters.get_loader(psycopg.adapters.types["uuid"].oid, psycopg.pq.Format.BINARY)
assert _loader  # noqa: S101  psycopg knows the type
_uuid_of = _loader(0).load  # of sixteen bytes; in half of the time that UUID() takes where psycopg is in C
_STATUS = {
    "succeed": Status.SUCCEEDED,
    "retry": Status.QUEUED,
    "fail": Status.FAILED,
    "cancel": Status.CANCELED,
    "hand_back": Status.QUEUED,
}
_TYPES: dict[str, Callable[[str], Any]] = {
    "until": datetime.fromisoformat,
    "since": datetime.fromisoformat,
    "job_id": UUID,
}
Conn = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class NewJob:
    """What a producer says of a job; `available_at` None means now, `timeout_sec` None what its pipeline says.

    `trace` is the W3C traceparent of the request that asks for it.
    """

    queue: str
    task: str
    lock_key: str
    args: Mapping[str, Any] = field(default_factory=dict)
    idempotency_key: str | None = None
    partition_key: str = ""
    priority: int = 100
    available_at: datetime | None = None
    max_attempts: int = 5
    lease_ttl_sec: int = 60
    timeout_sec: int | None = None
    producer: str | None = None
    consumer_group: str | None = None
    trace: str | None = None


class QueueFull(Exception):
    """As many jobs are queued as the queue may hold (`operate.limit_length`)."""

    def __init__(self, queue: str, max_length: int) -> None:
        super().__init__(f"the queue {queue} is full: {max_length} jobs are queued, which is its limit")
        self.queue = queue
        self.max_length = max_length


Columns = dict[str, list[Any]]
_GETTERS = {field.name: attrgetter(field.name) for field in fields(NewJob)}
as_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Session:
    """A worker's database session: the connection, the worker's identity, and its backend's pid and start."""

    conn: db.Connection
    worker: str
    backend_pid: int
    backend_start: datetime


class Ended(NamedTuple):
    """A run that is over: what is to be written of its job, and the facts that join its row in the journal."""

    job: Job
    finish: Finish
    facts: Mapping[str, Any] | None = None


class Step(NamedTuple):
    """What a look into the queue came to: jobs, the best first, or for how long (seconds) nothing will be due.

    `ended` is what became of the runs that were to be ended; without those that were not ours any more.
    """

    jobs: list[Job]
    ended: Mapping[UUID, Status]
    backoffs: int
    look_again: bool
    due_in: float | None

    @property
    def job(self) -> Job | None:
        """The best of the jobs."""
        return self.jobs[0] if self.jobs else None


@dataclass(frozen=True, slots=True)
class Settled:
    """A job that was taken from a dead or silent worker, and what became of it; None: it is locked, try again."""

    job_id: UUID
    status: Status | None


def open_session(conn: db.Connection, worker: str) -> Session:
    """LISTEN for jobs and cancellations, and learn what identifies this session for dl_end_session."""
    conn.execute(PLANS)
    conn.execute(psycopg.sql.SQL("LISTEN {}").format(psycopg.sql.Identifier(JOBS_CHANNEL)))
    listen_for_cancellations(conn)
    row = conn.execute("SELECT backend_start FROM pg_stat_get_activity(pg_backend_pid())").fetchone()
    assert row is not None  # noqa: S101  a session always finds itself
    return Session(conn, worker, conn.info.backend_pid, row[0])


def listen_for_cancellations(conn: Conn) -> None:
    """Hear the ids of running jobs that should stop."""
    conn.execute(psycopg.sql.SQL("LISTEN {}").format(psycopg.sql.Identifier(CANCEL_CHANNEL)))


def enqueue(conn: Conn, new: NewJob, limited: bool = False) -> tuple[UUID, str]:
    """Add a job and return its id and status; for an idempotency key seen before, those of the job that has it.

    `limited`: raises QueueFull, having added nothing, when the queue holds as many jobs as it may.
    """
    parameters = asdict(new) | {"args": Jsonb(new.args), "limited": limited}
    while True:
        row = conn.execute(_SQL["enqueue"], parameters).fetchone()
        # A statement of its own, for its own snapshot: in one with the insert the twin's row stays invisible.
        row = row or conn.execute(_SQL["find"], parameters).fetchone()
        if row:
            return row[0], row[1]
        if limited:
            require_room(conn, [new.queue])
        # The job that had the key was deleted between the two: the key is free again.


def require_room(conn: Conn, queues: Iterable[str]) -> None:
    """Raise QueueFull for the first of these queues that holds as many jobs as it may."""
    for queue in queues:
        limit = conn.execute(_SQL["limit"], {"queue": queue}).fetchone()
        if limit and limit[1]:
            raise QueueFull(queue, limit[0])


def require_room_for(conn: Conn, columns: Columns) -> None:
    """require_room for the jobs of a list, unless all of them are there already: whoever sends it again is answered."""
    try:
        require_room(conn, sorted(set(columns["queue"])))
    except QueueFull:
        if not _are_known(conn, set(columns["idempotency_key"])):
            raise


def _are_known(conn: Conn, keys: set[str | None]) -> bool:
    found = conn.execute(_SQL["known"], {"keys": list(keys)}).fetchone()
    return bool(found and found[0] == len(keys))  # None, a job without a key, is never found


def enqueue_many(conn: Conn, jobs: Sequence[NewJob], schema: str | None = None) -> list[tuple[UUID, str]]:
    """Add jobs, all or none; for each, in the order of the list, what `enqueue` returns.

    Jobs of equal priority run in the order of the list. A key may stand in the list twice. Any connection will do: one
    in a transaction stays in it, one without autocommit is left in one; `schema` is the queue's where the connection's
    search_path does not lead to it. Lists of more than AT_ONCE jobs take several statements, sent without waiting.
    """
    return enqueue_columns(conn, columns(jobs), schema)


def columns(jobs: Sequence[NewJob]) -> Columns:
    """Jobs as enqueue_columns takes them."""
    found = {name: merged(values) for name, values in spread(jobs).items() if name != "args"}
    return found | {"args": as_texts([job.args for job in jobs])}


def spread(jobs: Sequence[NewJob]) -> Columns:
    """A list for each field."""
    return {name: list(map(get, jobs)) for name, get in _GETTERS.items()}


def merged(values: list[Any]) -> list[Any]:
    """One value in place of many that are the same."""
    if not values or values[0] != values[-1]:  # it need not be counted
        return values
    alike = values.count(values[0]) == len(values) and len(set(map(type, values))) == 1
    return values[:1] if alike else values


def as_texts(objects: list[Mapping[str, Any]]) -> list[str]:
    """Each dict as JSON, by one call for all where that can be cut apart: it takes a fifth of the time."""
    texts = as_json(objects)[1:-1].split(",{")  # which stands between any two of them
    if len(texts) != len(objects):  # and also within one
        return list(map(as_json, objects))
    return [texts[0], *["{" + text for text in texts[1:]]]


def enqueue_columns(conn: Conn, columns: Columns, schema: str | None = None) -> list[tuple[UUID, str]]:
    """What enqueue_many does, for jobs whose fields are in lists.

    `args` are JSON texts, one for each job; the other lists have a value for each job or one for all of them.
    """
    count = len(columns["args"])
    results = [(_NOT_YET, "queued")] * count
    left = _fixed_order(columns["idempotency_key"], count)
    with _in_one_transaction(conn):
        since = _now(conn) if count > AT_ONCE else None
        while left:
            left = _add(conn, columns, results, left, since, schema)
        _set_traces(conn, columns, results, schema)
    return results


def _set_traces(conn: Conn, columns: Columns, results: list[tuple[UUID, str]], schema: str | None) -> None:
    """A statement for each trace, of which a list mostly has one or none."""
    traces = columns.get("trace", [])
    for trace in set(traces) - {None}:
        of_it = [result[0] for number, result in enumerate(results) if traces[number % len(traces)] == trace]
        _execute(conn, _in_schema(_SQL["set_trace"], schema), {"trace": trace, "job_ids": of_it})


def _fixed_order(keys: list[str | None], count: int) -> Sequence[int]:
    """The order of the keys: over all statements it keeps two lists with the same keys from a deadlock."""
    if len(keys) < count or count <= AT_ONCE:  # within a statement the function sees to it
        return range(count)
    return sorted(range(count), key=lambda number: keys[number] or "")


def _add(
    conn: Conn,
    columns: Columns,
    results: list[tuple[UUID, str]],
    wanted: Sequence[int],
    since: str | None,
    schema: str | None,
) -> list[int]:
    """Add the jobs of these numbers; `results` learn of them, also of those that have another's key.

    Returns the numbers of those whose key's job was deleted while we looked: the key is free again.
    """
    statement, new_ids, steps = _in_schema(_SQL["enqueue_many"], schema), _new_ids(len(wanted)), _steps(wanted)
    sent, gone = [], []
    with conn.pipeline() if len(steps) > 1 else nullcontext():
        for step in steps:  # while the server adds one, the next is made ready here
            ids = list(islice(new_ids, len(step)))
            sent.append(_execute(conn, statement, _parameters(columns, ids, step, since)))
            for number, new_id in zip(step, ids, strict=True):
                results[number] = new_id, "queued"
        for step, cursor in zip(steps, sent, strict=True):
            for nth, job_id, status in cursor:
                if job_id:
                    results[step[nth - 1]] = UUID(job_id), status
                else:
                    gone.append(step[nth - 1])
    return gone


def _steps(wanted: Sequence[int]) -> list[Sequence[int]]:
    """What goes into each statement. The first of several is small: the server is to begin soon."""
    if len(wanted) <= AT_ONCE:
        return [wanted]
    starts = [0, *range(1 + AT_ONCE // 4, len(wanted), AT_ONCE)]
    return [wanted[start:end] for start, end in zip(starts, [*starts[1:], len(wanted)], strict=True)]


def _parameters(columns: Columns, ids: list[UUID], numbers: Sequence[int], since: str | None) -> dict[str, Any]:
    """Those of one statement: these jobs, with these ids."""
    found: dict[str, Any] = {name: _chosen(values, numbers) for name, values in columns.items()}
    in_a_row = isinstance(numbers, range)
    place = None if in_a_row or since is None else [number + 1 for number in numbers]
    return found | {"job_id": ids, "since": since, "before": numbers[0] if in_a_row else 0, "place": place}


def _chosen(values: list[Any], numbers: Sequence[int]) -> list[Any]:
    """The values of these jobs, or the one of all of them."""
    if len(values) == 1:
        return values
    if isinstance(numbers, range):
        return values[numbers.start : numbers.stop]
    return [values[number] for number in numbers]


def _execute(conn: Conn, statement: str, parameters: Mapping[str, Any]) -> psycopg.Cursor[tuple[Any, ...]]:
    """Tuples from any connection, whatever its owner has made its cursors and rows."""
    return psycopg.Cursor(conn, row_factory=tuple_row).execute(statement.encode(), parameters)


def _in_schema(statement: str, schema: str | None) -> str:
    """The statement with the function that it calls named in full."""
    if schema is None:
        return statement
    name = psycopg.sql.Identifier(schema).as_string().replace("%", "%%")
    return statement.replace("FROM dl_", f"FROM {name}.dl_").replace("UPDATE dl_", f"UPDATE {name}.dl_")


def _in_one_transaction(conn: Conn) -> AbstractContextManager[Any]:
    """A transaction of our own where the caller has none; his is not ours to end."""
    idle = conn.info.transaction_status == TransactionStatus.IDLE
    return conn.transaction() if conn.autocommit and idle else nullcontext()


def _now(conn: Conn) -> Any:
    return _execute(conn, "SELECT clock_timestamp()::text", {}).fetchall()[0][0]


def _new_ids(count: int) -> Iterator[UUID]:
    """Time-ordered UUIDs (version 7, RFC 9562), a microsecond apart: an index takes them at its right edge."""
    first = time.time_ns() // 1_000
    noise = struct.unpack(f">{count}Q", os.urandom(8 * count))
    return (_uuid_of((_time_of(at) | random >> 2).to_bytes(16)) for at, random in enumerate(noise, first))


def _time_of(microseconds: int) -> int:
    """The bits of such a UUID that are not random: milliseconds, version, parts of 4,096 of the last one, variant."""
    return microseconds // 1_000 << 80 | (0x7000 | microseconds % 1_000 * 4_096 // 1_000) << 64 | 1 << 63


def status(conn: Conn, job_id: UUID) -> dict[str, Any] | None:
    """One job as the API shows it, or None; `waiting_for` says why a queued job does not run yet."""
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(_SQL["status"], {"job_id": job_id}).fetchone()
    return row and row | {"progress": parsed(row["progress"]), "waiting_for": _reason(row["waiting_for"])}


def _reason(waiting_for: dict[str, str] | None) -> dict[str, Any] | None:
    """With instants and ids as such, which JSON has as texts."""
    typed = {name: read(waiting_for[name]) for name, read in _TYPES.items() if waiting_for and waiting_for.get(name)}
    return waiting_for and waiting_for | typed


def versions(conn: Conn, job_ids: Collection[UUID]) -> dict[UUID, str]:
    """What changes with whatever `status` shows of these jobs, but for the others that they wait for."""
    return dict(conn.execute(_SQL["versions"], {"job_ids": list(job_ids)}).fetchall())


def request_cancel(conn: Conn, job_id: UUID, force: bool = False, by: str = "request") -> dict[str, Any] | None:
    """Cancel a queued job at once, ask a running one to stop; then its status, or None when there is no such job.

    With `force` a running one need not reach a safe point: it is interrupted, and killed after DL_KILL_GRACE_SEC.
    `by` is who asks, for the journal.
    """
    request_cancels(conn, [job_id], force, by)
    return status(conn, job_id)


def request_cancels(conn: Conn, job_ids: Collection[UUID], force: bool, by: str) -> None:
    """The same for many, in one statement: a worker's step that ends some of them waits no longer than for one."""
    conn.execute(_SQL["request_cancel"], {"job_ids": list(job_ids), "force": force, "by": by})


def step(session: Session, queue: str, backoff_sec: float, most: int, ends: Collection[Ended] | None = ()) -> Step:
    """Write how runs of this worker have ended and claim up to `most` jobs of `queue`, whose keys this session holds.

    All other keys of the session are let go, unless `ends` is None. One transaction, one round trip. Raises
    psycopg.DataError, having changed nothing, for an end that PostgreSQL cannot store; `finish` can.
    """
    parameters = {
        "queue": queue,
        "worker": session.worker,
        "backend_start": session.backend_start,
        "backoff_sec": backoff_sec,
        "most": most,
        "ends": None if ends is None else _as_json(ends),
    }
    *rows, last = session.conn.repeating.execute(_SQL["step"], parameters, prepare=True).fetchall()
    jobs = [Job(*(row[0], queue, *row[1:11], session.worker)) for row in rows]
    if sum(len(job.args_json) for job in jobs) > LARGE:
        del session.conn.repeating  # it would hold the arguments once more while the jobs run
    return Step(jobs, _ended(ends or (), *last[11:13]), *last[13:])


def claim(session: Session, queue: str, backoff_sec: float) -> Step:
    """Claim the best job of `queue` that may run now, holding its key for this session besides those that it has."""
    return step(session, queue, backoff_sec, 1, None)


def traces(conn: Conn, job_ids: Collection[UUID]) -> dict[UUID, str]:
    """The W3C traceparents of those of these jobs that have one."""
    return dict(conn.execute(_SQL["traces"], {"job_ids": list(job_ids)}).fetchall())


def beat(conn: Conn, job: Job, progress: str | None, journal: bool) -> bool | None:
    """Renew the lease, with progress where given; True when the job should stop, None when it is no longer ours."""
    row = conn.execute(_SQL["beat"], _claim_of(job) | {"progress": progress, "journal": journal}).fetchone()
    return row[0] if row else None


def retake(session: Session, job: Job) -> bool | None:
    """After a reconnect: hold the key by this session again and renew; False when claim or key are lost.

    None: renewed, but the former session cannot end and still has the key. May take 2 s, which that one is given.
    """
    row = session.conn.execute(_SQL["retake"], _claim_of(job) | {"backend_start": session.backend_start}).fetchone()
    assert row is not None  # noqa: S101  the function always answers
    held: bool | None = row[0]
    return held


def finish(
    conn: Conn, job: Job, end: Finish, facts: Mapping[str, Any] | None = None, let_go: bool = True
) -> Status | None:
    """Write how a run has ended and let go of its key, or of all of the session's; None when it is no longer ours.

    What PostgreSQL cannot store of it is left out rather than keep the job from ending.
    """
    try:
        ended = _finish(conn, job.claimed_by, [Ended(job, end, facts)], let_go)
    except psycopg.DataError:
        plain = (end.error or "").encode("ascii", "backslashreplace").decode()
        bare = end._replace(error=plain.replace("\x00", "") or None, progress=None)
        ended = _finish(conn, job.claimed_by, [Ended(job, bare, facts)], let_go)
    return ended.get(job.job_id)


def finish_some(conn: Conn, worker: str, ends: Collection[Ended]) -> Mapping[UUID, Status]:
    """Write how runs of `worker` ended, let go of their keys; what became of those still its own."""
    try:
        return _finish(conn, worker, ends, let_go=False)
    except psycopg.DataError:
        each = {e.job.job_id: finish(conn, e.job, e.finish, e.facts, let_go=False) for e in ends}
        return {job_id: status for job_id, status in each.items() if status}


def _finish(conn: Conn, worker: str, ends: Collection[Ended], let_go: bool) -> Mapping[UUID, Status]:
    parameters = {"worker": worker, "ends": _as_json(ends), "let_go": let_go}
    row = conn.execute(_SQL["finish"], parameters, prepare=True).fetchone()
    assert row is not None  # noqa: S101  the function always answers
    return _ended(ends, *row)


def _ended(ends: Collection[Ended], unfinished: Any, canceled: Any) -> Mapping[UUID, Status]:
    statuses = {e.job.job_id: _STATUS[e.finish.verb] for e in ends}
    statuses |= dict.fromkeys(canceled or (), Status.CANCELED)
    for job_id in unfinished or ():
        del statuses[job_id]
    return statuses


def _as_json(ends: Collection[Ended]) -> str:
    """As dl_finish reads them. Progress is JSON already."""
    return "[" + ",".join(map(_end_as_json, ends)) + "]"


def _end_as_json(ended: Ended) -> str:
    job, end = ended.job, ended.finish
    error = "null" if end.error is None else json.dumps(end.error)
    return (
        f'{{"job_id":"{job.job_id}","attempt":{job.attempt},"verb":"{end.verb}","error":{error},'
        f'"delay_sec":{end.delay_sec},"progress":{end.progress or "null"},"facts":{json.dumps(ended.facts or {})}}}'
    )


def has_ended(conn: Conn, job: Job) -> bool:
    """True when the end of this claim is committed: what a finish whose answer was lost may have come to."""
    row = conn.execute(_SQL["ended"], _claim_of(job)).fetchone()
    return bool(row and row[0])


def keep(conn: Conn, job_id: UUID, attempt: int, claimed_by: str) -> bool:
    """Renew the lease in the place of a worker that is alive but silent; False when the claim is over."""
    claim = {"job_id": job_id, "attempt": attempt, "claimed_by": claimed_by}
    return conn.execute(_SQL["keep"], claim).rowcount == 1


def end_session(conn: Conn, backend_pid: int, backend_start: datetime) -> None:
    """End a lost session's backend, which may still be at work, and wait up to 2 s until it is gone."""
    conn.execute(_SQL["end_session"], {"backend_pid": backend_pid, "backend_start": backend_start})


def cancellations(conn: Conn, job_ids: Collection[UUID]) -> dict[UUID, bool]:
    """Those of these running jobs that should stop, and whether they were forced to."""
    return dict(conn.execute(_SQL["cancellations"], {"job_ids": list(job_ids)}).fetchall())


def settle(
    conn: Conn, worker: str, end: str, reason: str, facts: Mapping[str, Any] | None = None, running: UUID | None = None
) -> list[Settled]:
    """Take from a dead worker what it held; `end` is crash, timeout or drain (see dl_lose in functions.sql).

    It is said of `running`, the job that the worker had begun last; others are handed back uncounted. None: of all.
    """
    parameters = {"worker": worker, "running": running, "end": end, "reason": reason, "facts": Jsonb(facts or {})}
    rows = conn.execute(_SQL["settle"], parameters).fetchall()
    return [Settled(job_id, Status(status) if status else None) for job_id, status in rows]


def reap(conn: Conn) -> Settled | None:
    """Take one job whose lease has run out from its worker; None when there is none left."""
    row = conn.execute(_SQL["reap"]).fetchone()
    return Settled(row[0], Status(row[2])) if row else None


def wake(conn: Conn, limit: int) -> int:
    """Make up to `limit` rows of each queue claimable whose time has come; returns their number."""
    row = conn.execute(_SQL["wake"], {"limit": limit}).fetchone()
    return row[0] if row else 0


def prune(conn: Conn, older_than_sec: float, since: str, limit: int) -> tuple[int, str]:
    """Delete up to `limit` jobs that ended more than so many seconds ago, with their journal, the oldest first.

    Returns their number and where to go on: `since` (at first "-infinity") of the next call. Fewer than `limit`: there
    are no more, or others hold them.
    """
    row = conn.execute(_SQL["prune"], {"older_than_sec": older_than_sec, "since": since, "limit": limit}).fetchone()
    assert row is not None  # noqa: S101  the function always answers
    return row[0], row[1]


def _claim_of(job: Job) -> dict[str, Any]:
    return {"job_id": job.job_id, "attempt": job.attempt, "claimed_by": job.claimed_by}


def parsed(text: str) -> Any:
    """JSON as PostgreSQL has it; a number too long for Python is left as text."""
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(text, parse_int=str)
