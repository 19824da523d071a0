"""The farm as a whole: workers, the database, receivers of alerts, a fault of a request."""

from __future__ import annotations

from dataclasses import field
from datetime import datetime
from typing import Annotated
from uuid import UUID

from dataloader.model.kinds import ALERTS, SHAPES, Answer, Count, Progress


class Worker(Answer):
    """A worker as its farm's keeper has last shown it, and the job it runs."""

    worker: str
    farm: str
    host: str
    pid: int
    queue: Annotated[str, "the first of its queues"]
    queues: list[str]
    state: Annotated[str, "starting, idle, awake, busy, stuck, stopped, leaving, dead"]
    is_live: bool
    memory_bytes: int | None
    cpu_percent: float | None
    jobs: Count
    started_at: datetime | None
    seen_at: datetime
    reported_at: Annotated[datetime | None, "the latest yield, progress or check of its run; null without one"]
    job_id: UUID | None
    task: str | None
    lock_key: str | None
    attempt: int | None
    progress: Progress
    job_started_at: datetime | None
    reload_error: Annotated[str | None, "why the latest reload of its farm did not succeed"] = None


class Workers(Answer):
    """The workers of all hosts that were seen in the last ten minutes."""

    workers: list[Worker]


class Name(Answer):
    """Whether the farm knows a name."""

    name: str
    is_known: bool
    similar: Annotated[list[str], "the known names most like an unknown one, for those who may read"]
    count: Annotated[Count, "how many names the farm knows; 0: it has not begun"]


class Names(Answer):
    """A queue is known that has jobs, settings or workers, a task that workers have shown or jobs name."""

    queue: Name | None
    task: Name | None


class Webhook(Answer):
    """A receiver of alerts. Its secrets are the workers'; here are the names of their variables."""

    name: str
    url: Annotated[str, "`${DL_WEBHOOK_...}`: the variable of the workers that holds a secret URL"]
    shape: Annotated[str, ", ".join(SHAPES)]
    signed_by: Annotated[str | None, "the variable with the key; null: its messages are not signed"]
    kinds: Annotated[list[str] | None, f"some of {', '.join(ALERTS)}; null: all"]
    queues: Annotated[list[str] | None, "whose alerts; null: all"]
    lag_sec: Annotated[float, "from which queue latency on a queue is late"]
    added_at: datetime
    added_by: str | None
    paused_at: Annotated[datetime | None, "since when it is told nothing; null: it is not paused"]
    paused_by: str | None
    undelivered: Annotated[int, "in a list: its messages that failed since the last one that arrived"] = 0
    last_error: Annotated[str | None, "why the latest of these failed"] = None


class Webhooks(Answer):
    """The receivers of alerts."""

    queue: Annotated[str, "of the jobs that send messages (DL_ALERTS_QUEUE)"]
    is_served: Annotated[bool, "whether a live worker of some host serves that queue"]
    webhooks: list[Webhook]


class Tested(Answer):
    """The job that sends the test message."""

    name: str
    job_id: UUID
    advice: Annotated[str | None, "what keeps the message from being sent; null: nothing is known to"]


class Transaction(Answer):
    """The oldest transaction of the database server."""

    pid: int
    user: str | None
    application: str | None
    state: str | None
    age_sec: float
    query: Annotated[str | None, "its first 200 characters"]
    holds_back_vacuum: bool


class VacuumHolder(Answer):
    """The session or slot that holds back vacuum of the queue's tables; null: the service's role may not see it."""

    kind: Annotated[str, "session, standby, prepared transaction, replication slot"]
    pid: int | None
    user: str | None
    application: Annotated[str | None, "application_name, or the name of the transaction or slot"]
    state: str | None
    age_sec: float | None
    xids: Annotated[int, "transactions since"]
    query: Annotated[str | None, "its first 200 characters"]


class Blocker(Answer):
    """A session in the way of the farm."""

    blocks: Annotated[str, "lock: an advisory lock of the farm's duties; table: dl_jobs; notifications: their queue"]
    pid: int
    user: str | None
    application: str | None
    age_sec: Annotated[float | None, "of its state or its transaction; null: the service's role may not see it"]


class Database(Answer):
    """The queue's database."""

    version: str
    database: str
    size_bytes: int
    connections: int
    max_connections: int
    queue_tables_bytes: int
    dead_tuples: int
    live_tuples: int
    last_autovacuum: datetime | None
    notify_usage: Annotated[float, "of the notification queue, 0 to 1"]
    in_recovery: bool
    read_only: bool = False
    lacking: Annotated[
        list[str], "the rights that adding and ending jobs need and the service's role does not have"
    ] = field(default_factory=list)
    disk_full: Annotated[bool, "a write of the API or of a farm failed for it within the last minute"] = False
    ids_left: Annotated[int, "transactions until the server refuses writes, without a vacuum"] = 2**31
    has_reaper: Annotated[bool, "a reaper's session has done something lately"] = True
    faults: Annotated[list[str], "of the schema: triggers, indexes, rows that are hidden"] = field(default_factory=list)
    oldest_transaction: Transaction | None
    jobs_dead_tuples: int
    jobs_live_tuples: int
    held_by: VacuumHolder | None
    blockers: list[Blocker] = field(default_factory=list)


class Fault(Answer):
    """One thing wrong in a request."""

    pointer: Annotated[str, "JSON pointer (RFC 6901) into the body, `/name` of a parameter, or empty"]
    code: str
    message: str
