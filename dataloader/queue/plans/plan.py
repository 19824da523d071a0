"""The common part of schedules and backfills: named templates, from which the reapers make jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from dataloader.log import masked
from dataloader.model.jobs import Template
from dataloader.queue import db
from dataloader.queue.db import Conn
from dataloader.queue.db import Row as Row
from dataloader.queue.enqueue import Asker, enqueue_columns, require_room_for
from dataloader.queue.fields import OF_PRODUCER, REQUIRED
from dataloader.queue.job import clip
from dataloader.queue.operations import Conflict

CONTENDED_SEC = 5.0  # from a failure to the next try, where another session had something locked
Rows = list[Row]
PAUSE = ("paused_at", "paused_by")  # the columns of a pause; both are null where there is none
WORKS = dict.fromkeys(("error", "error_at"))  # the columns that say why jobs cannot be made, empty
# The fields of the jobs, beside the task, the queue and the limits.
OF_JOB = [each.name for each in fields(Template) if each.name not in ("name", "task", "queue")]
_DEFAULTS = {
    each.name: each.default
    for each in OF_PRODUCER
    if each.name in ("priority", *OF_JOB) and each.default is not REQUIRED
}


class Unknown(Exception):
    """There is no schedule or backfill of this name."""


class Wrong(ValueError):
    """Parameters of no valid schedule or backfill; the text names each wrong one and its valid form."""


class Made(NamedTuple):
    """The result of a reaper's round for one of them: jobs made, skipped or canceled, or the error."""

    name: str
    jobs: int = 0
    skipped: int = 0
    canceled: int = 0
    error: str | None = None


class Plans(db.Statements):
    """The statements of the schedules, or of the backfills; `parts` stand in the others as {their name}."""

    def __init__(self, noun: str, *parts: str) -> None:
        super().__init__(db.statements(f"{noun}s.sql", *parts))
        self.noun, self.channel = noun, f"dl_{noun}s"

    def named(self, conn: Conn, name: str, statement: str = "listed") -> Row:
        """The one of this name, as people see it; raises Unknown."""
        if row := self.first(conn, statement, name=name, limit=None):
            return row
        raise Unknown(f"there is no {self.noun} with this name")

    @contextmanager
    def locked(self, conn: Conn, name: str) -> Iterator[Row]:
        """A transaction with a lock on this plan, against people and reapers; raises Unknown."""
        with conn.transaction():
            yield self.named(conn, name, "lock")

    def write(self, conn: Conn, name: str, changes: Row) -> None:
        """Change these columns of a plan that is locked."""
        columns = ", ".join(f"{column} = %({column})s" for column in changes)
        conn.execute(self["write"].replace("{changes}", columns).encode(), changes | {"name": name})

    def add(self, conn: Conn, new: Mapping[str, Any], advice: str) -> None:
        """Write a new one, and wake the reapers; raises Conflict, which ends with the advice."""
        if not self.do(conn, "add", **new):
            raise Conflict(f"there is a {self.noun} {new['name']} already: {advice}")
        self.wake(conn)

    def wake(self, conn: Conn) -> None:
        """The commit notifies the sessions that `listen`."""
        conn.execute("SELECT pg_notify(%s, '')", (self.channel,))

    def next_made(self, conn: Conn, make: Callable[[Row], Made], retry_sec: float, **due: Any) -> Made | None:
        """Make jobs of the next one that is due, in a transaction; None: none is. After an error, try again later."""
        present: Row | None = None
        try:
            with conn.transaction():
                present = self.first(conn, "lock_due", **due)
                return make(present) if present else None
        except Exception as e:  # also what users' hooks raise
            if present is None or conn.closed or (db.is_outage(e) and not db.is_limit(e)):
                raise
            if db.is_passing(e):
                retry_sec = min(retry_sec, CONTENDED_SEC)
            error = clip(masked(f"{e}".strip() or type(e).__name__))
        self.do(conn, "failed", name=present["name"], error=error, retry_sec=retry_sec, **due)
        return Made(present["name"], error=error)

    def due_in(self, conn: Conn, now: datetime | None = None) -> float | None:
        """The seconds until `tick` has work; 0 or less: now, None: never."""
        seconds: float | None = self.value(conn, "due_in", now=now)
        return seconds

    def listen(self, conn: Conn) -> None:
        """From now on this session is notified of every change by which `tick` may have to do something earlier."""
        conn.execute(f"LISTEN {self.channel}")


def add_jobs(conn: Conn, documents: Sequence[Row], by: str | None = None) -> list[tuple[UUID, str]]:
    """Add these jobs, signed `by` in the journal if given; ids and statuses. Raises ValueError, QueueFull."""
    from dataloader.queue import new_job  # it needs pydantic, and a worker imports this module

    if not documents:
        return []
    columns = new_job.all_checked(documents)
    require_room_for(conn, columns)
    return enqueue_columns(conn, columns, asker=Asker(by, sees_all=True) if by else None)


def shown_job(template: Mapping[str, Any], **defaults: Any) -> Row:
    """The fields of the jobs of a template, with their defaults."""
    return _DEFAULTS | defaults | dict(template)
