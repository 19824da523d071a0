"""The logs of jobs: how workers write and people read them. Writing may lose lines, and never a job."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from uuid import UUID

import psycopg
import structlog

from dataloader import periods
from dataloader.queue import db
from dataloader.queue.cursor import Page, WrongCursor
from dataloader.queue.db import Conn, Row
from dataloader.queue.run_log import Line, RunLog

PAGE = 1_000  # lines of one answer
# Between the clocks of a worker and of PostgreSQL, as far as they differ in a run.
SLACK_SEC = periods.seconds("SLACK_SEC", 60.0)
_SQL = db.statements("logs.sql")
_log = structlog.get_logger("worker")


def write(
    conn: Conn, runs: Collection[RunLog], at: float, are_over: bool = False, lock_sec: float | None = None
) -> None:
    """Write the new lines of these runs. Raises only errors that a new session may heal; the lines then wait.

    LockNotAvailable too, while another session has the table locked, for `lock_sec` or as the session has it; lines of
    runs that `are_over` are dropped then, unless the jobs are locked too, for which the end of the runs waits.
    """
    todo = [(run, run.unwritten()) for run in runs if run.has_news]
    if not todo:
        return
    try:
        with conn.transaction() if lock_sec else nullcontext():
            if lock_sec:
                conn.execute("SELECT set_config('lock_timeout', %s, true)", (f"{lock_sec * 1_000:.0f}ms",))
            for run, unwritten in todo:
                if unwritten.left_out:
                    _leave_out(conn, run, unwritten.left_out, at)
            _insert(conn, [(run, line) for run, unwritten in todo for line in unwritten.lines], at)
    except psycopg.Error as e:
        for run, _ in todo:
            run.is_in_doubt = run.is_in_doubt or conn.closed
        if are_over and isinstance(e, psycopg.errors.LockNotAvailable):
            conn.execute("SELECT FROM dl_jobs LIMIT 0")
        elif db.is_passing(e):
            raise
        _log.warning("worker.logs.failed", error=str(e).strip())
    for run, unwritten in todo:
        run.confirm(unwritten)


def _leave_out(conn: Conn, run: RunLog, lines: tuple[int, int], at: float) -> None:
    job, (first, last) = run.job, lines
    claim = {"job_id": job.job_id, "attempt": job.attempt, "claimed_by": job.claimed_by, "claim": job.claim}
    _SQL.do(conn, "leave_out", **claim, first=first, last=last, age_sec=at - run.began + SLACK_SEC)


def _insert(conn: Conn, lines: Sequence[tuple[RunLog, Line]], at: float) -> None:
    _SQL.do(
        conn,
        "write",
        job_ids=[run.job.job_id for run, _ in lines],
        attempts=[run.job.attempt for run, _ in lines],
        claimed_by=[run.job.claimed_by for run, _ in lines],
        lines=[line.number for _, line in lines],
        ages_sec=[max(0.0, at - line.at) for _, line in lines],
        levels=[line.level for _, line in lines],
        sources=[line.source for _, line in lines],
        texts=[line.text for _, line in lines],
    )


def args_of_run(conn: Conn, job_ids: Collection[UUID], claimed_by: str) -> list[Any]:
    """The arguments of these running jobs of a worker."""
    return [row["args"] for row in _SQL.rows(conn, "args_of_run", job_ids=list(job_ids), claimed_by=claimed_by)]


def page(conn: Conn, job_id: UUID, after: str | None = None, attempt: int | None = None, limit: int = PAGE) -> Page:
    """Up to `limit` lines of a job behind a place, each with what was `left_out` before it. Raises WrongCursor."""
    match = re.fullmatch(r"(\d{1,9})\.(\d{1,9})", after or "0.0")
    if not match:
        raise WrongCursor
    claim, line = map(int, match.groups())
    rows = _SQL.rows(conn, "lines", job_id=job_id, attempt=attempt, limit=limit, claim=claim, line=line)
    lines = [*_with_gaps(rows, claim, line)]
    return Page(lines, str(lines[-1]["place"]) if len(lines) == limit else None)


def last(conn: Conn, job_id: UUID, attempt: int | None = None, limit: int = PAGE) -> list[Row]:
    """The last lines of an attempt, or of the job, in their order."""
    rows = _SQL.rows(conn, "last_lines", job_id=job_id, attempt=attempt, limit=limit)
    before = (0, 0) if len(rows) < limit else (rows[0]["claim"], rows[0]["line"] - 1)
    return [*_with_gaps(rows, *before)]


def attempts(conn: Conn, job_id: UUID) -> list[int]:
    """The attempts of a job that have written something."""
    return [row["attempt"] for row in _SQL.rows(conn, "attempts", job_id=job_id)]


def keep_days(conn: Conn, days: float | None) -> int | None:
    """Make the partitions of the next days, and drop those older than so many days; see dl_log_days."""
    ((made,),) = db.call(conn, "dl_log_days", days)
    return None if made is None else int(made)


def _with_gaps(rows: Sequence[Row], claim: int, line: int) -> Iterator[Row]:
    """The rows, the first of which follows a line of a claim; with their `place`, as `1.200`."""
    for row in rows:
        expected = line + 1 if row["claim"] == claim else 1
        yield row | {"left_out": row["line"] - expected, "place": f"{row['claim']}.{row['line']}"}
        claim, line = row["claim"], row["line"]
