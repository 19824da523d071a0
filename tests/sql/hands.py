"""Hands on the queue: workers without processes, producers and workers that know only the contract's columns.

A step that may block runs in a thread, and the test waits until PostgreSQL itself says that it is blocked.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import psycopg
from patience import PATIENCE, until  # noqa: F401
from psycopg import sql
from readings import blocked, buffers, heard, journal, keys_held, kinds, row, state, value, waits  # noqa: F401

from dataloader.queue import db, lifecycle, operations
from dataloader.queue.enqueue import NewJob
from dataloader.queue.enqueue import enqueue as add
from dataloader.queue.job import Finish, Job, Status
from dataloader.queue.lifecycle import Ended, Head, Step

BACKOFF_SEC = 15.0
DONE = Finish("succeed")
Conn = db.Connection
# queued -> lost: a row comes back with its attempts spent; queued -> failed: an operator kills a retry.
TRANSITIONS = {("queued", status) for status in ("running", "canceled", "failed", "lost")}
TRANSITIONS |= {("running", status) for status in ("queued", "succeeded", "failed", "canceled", "lost")}
_keys = itertools.count(1)


class Worker:
    """One session of a worker that a test moves step by step; it LISTENs, as that of an idle worker does."""

    def __init__(self, dsn: str, name: str, schema: str = "public") -> None:
        self.name = name
        self.conn = db.connect(dsn, name=name, schema=schema)
        self.session = lifecycle.open_session(self.conn, name)
        lifecycle.listen(self.session)
        lifecycle.listen_for_cancellations(self.conn)  # as the keeper does for its workers

    @property
    def pid(self) -> int:
        return self.conn.info.backend_pid

    def claim(self, queue_name: str = "q", backoff_sec: float = BACKOFF_SEC) -> Step:
        """One look into the queue, for the best job; the session keeps its keys."""
        return lifecycle.step(self.session, [queue_name], backoff_sec, 1, None)

    def take(self, queue_name: str = "q") -> Job:
        """Claim where there must be a job."""
        job = self.claim(queue_name).job
        assert job is not None, "nothing was claimed"
        return job

    def start_new(self, add: Callable[..., UUID] | None = None, **columns: Any) -> Job:
        """Add a job, by `enqueue` where nothing else is given, and claim it."""
        job_id = (add or enqueue)(self.conn, **columns)
        job = self.take(columns.get("queue", "q"))
        assert job.job_id == job_id
        return job

    def finish(self, job: Job, verb: str = "succeed", **how: Any) -> Status | None:
        """End a run by this verb of queue.sql; again when a locked row is free, as a worker does that waits for it.

        A retry is due at once where `how` has no delay_sec.
        """
        how = {"delay_sec": 0.0} | how
        while True:
            written = lifecycle.finish_some(self.conn, job.claimed_by, [Ended(job, Finish(verb, **how))])
            if not written.locked:
                return written.ended.get(job.job_id)
            self.conn.execute("SELECT FROM dl_jobs WHERE job_id = %s FOR NO KEY UPDATE", (job.job_id,))

    def notes(self) -> list[str]:
        """The queues this session was told of since it was last asked; nothing committed is still on its way."""
        return heard(self.conn)


Workers = Callable[[], Worker]


def step(worker: Worker, most: int = 10, *ends: Ended, queue: str = "q", head: Head = Head()) -> Step:  # noqa: B008
    """End these runs and claim so many; a statement that waits for a row fails, and does not hang."""
    worker.conn.execute("SET lock_timeout = '20s'")
    return lifecycle.step(worker.session, [queue], BACKOFF_SEC, most, ends, head)


def ids(jobs: Step | Iterable[Job]) -> list[UUID]:
    return [job.job_id for job in (jobs.jobs if isinstance(jobs, Step) else jobs)]


def end_all(worker: Worker, jobs: Iterable[Job], verb: str = "succeed", **how: Any) -> Step:
    """End the runs of these jobs, and claim nothing."""
    return step(worker, 0, *(Ended(job, Finish(verb, **how)) for job in jobs))


def successor(new: Worker, old: Worker) -> lifecycle.Session:
    """The session with which the old worker goes on, whose own was lost."""
    return lifecycle.Session(new.conn, old.name, new.session.backend_pid, new.session.backend_start)


@contextmanager
def started(step: Callable[[], Any], pid: int | None, observer: psycopg.Connection[Any]) -> Iterator[Future[Any]]:
    """Run a step in a thread; with `pid`, go on once that backend is blocked by another."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(step)
        if pid is not None:
            until(lambda: future.done() or blocked(observer, pid), f"backend {pid} to block")
            assert not future.done(), f"was not blocked: {future.result()}"
        yield future


def plain(conn: psycopg.Connection[Any], *, in_sec: float = 0, made_sec: float = 0, **columns: Any) -> UUID:
    """Insert a job as a producer does that knows only the contract's columns.

    `in_sec` and `made_sec` set available_at and created_at, relative to now.
    """
    given: dict[str, Any] = {"job_id": uuid4(), "queue": "q", "task": "t", "lock_key": f"key-{next(_keys)}"} | columns
    later = {"available_at": in_sec, "created_at": made_sec}
    moments = {column: sec for column, sec in later.items() if sec and column not in given}
    conn.execute(
        sql.SQL("INSERT INTO dl_jobs ({}) VALUES ({})").format(
            sql.SQL(", ").join(map(sql.Identifier, [*given, *moments])),
            sql.SQL(", ").join(
                [sql.Placeholder()] * len(given) + [sql.SQL("now() + make_interval(secs => %s)")] * len(moments)
            ),
        ),
        [*given.values(), *moments.values()],
    )
    return given["job_id"]


def many(conn: psycopg.Connection[Any], number: int, key: str = "k%s", **columns: object) -> None:
    """Insert rows in the order they are claimed; %s in `key` is their number i, of which `columns` are SQL."""
    given = {"job_id": "gen_random_uuid()", "queue": "'q'", "task": "'t'"}
    given["lock_key"] = f"replace('{key}', '%s', i::text)"
    given["created_at"] = "now() - interval '1 hour' + i * interval '1 ms'"
    values = given | columns
    names, selected = ", ".join(values), ", ".join(map(str, values.values()))
    conn.execute(f"INSERT INTO dl_jobs ({names}) SELECT {selected} FROM generate_series(1, {number}) i".encode())


@contextmanager
def quietly(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """No triggers in the block: for rows by the hundred thousand, all of them claimable at once."""
    conn.execute("SET session_replication_role = replica")
    yield
    conn.execute("RESET session_replication_role")


@contextmanager
def locked(conn: psycopg.Connection[Any], *job_ids: UUID) -> Iterator[None]:
    """The session has these rows locked for the block."""
    with conn.transaction():
        conn.execute("SELECT FROM dl_jobs WHERE job_id = ANY (%s) FOR UPDATE", (list(job_ids),))
        yield


@contextmanager
def ended_beside(conn: psycopg.Connection[Any], worker: Worker, job: Job, *rows: UUID) -> Iterator[None]:
    """The worker's run ends while a session has these rows locked; the session has them for the block."""
    with locked(conn, *rows):
        worker.finish(job)
        yield


def enqueue(conn: psycopg.Connection[Any], **more: Any) -> UUID:
    """Add a job as the API does."""
    new = {"queue": "q", "task": "t", "lock_key": f"key-{next(_keys)}"} | more
    return add(conn, NewJob(**new))[0]


def age(conn: psycopg.Connection[Any], job_id: UUID, column: str, sec: float) -> None:
    """Move one of a job's times into the past, instead of sleeping."""
    conn.execute(
        sql.SQL("UPDATE dl_jobs SET {0} = {0} - make_interval(secs => %s) WHERE job_id = %s").format(
            sql.Identifier(column)
        ),
        (sec, job_id),
    )


def took(conn: psycopg.Connection[Any], job_id: UUID, sec: float) -> None:
    """Let the job's only run, which has succeeded, have taken exactly so long."""
    conn.execute(
        "UPDATE dl_job_events e SET ts = done.ts - make_interval(secs => %s) FROM dl_job_events done"
        " WHERE e.job_id = %s AND e.kind = 'picked' AND done.job_id = e.job_id AND done.kind = 'done'",
        (sec, job_id),
    )


def expire(conn: psycopg.Connection[Any], job_id: UUID) -> None:
    age(conn, job_id, "lease_expires_at", 100_000)


def remove(conn: db.Connection, job_id: UUID, by: str) -> None:
    """Delete a job that has ended: `by` an operator, by retention or by a plain delete."""
    if by == "operator":
        operations.change(conn, "delete", [job_id], "test")
    elif by == "retention":
        age(conn, job_id, "finished_at", 8 * 86_400)
        assert lifecycle.prune(conn, 7 * 86_400.0, "-infinity", 10)[0] == 1
    else:
        conn.execute("DELETE FROM dl_jobs WHERE job_id = %s", (job_id,))
