"""PROCESS: the reaper, for all that is due or lost in the cluster. Any number may run, none leads.

Returns jobs whose lease has run out (their whole VM is gone) and wakes due rows of queues that nobody claims from. May
import `db`, `queue`, `process`.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

import psycopg
import structlog
from setproctitle import setproctitle

from dataloader import db, migrations, queue
from dataloader import log as logs
from dataloader.config import Settings
from dataloader.process import EXIT_CANNOT_START, EXIT_OK, Signals, now

WAKE_BATCH = 1_000


def main(settings: Settings, dsn: str) -> int:
    """Reap every DL_REAPER_PERIOD_SEC until SIGTERM or SIGINT; the process's exit status."""
    logs.configure(settings, threaded=True)
    signals = Signals((signal.SIGTERM, signal.SIGINT))
    setproctitle("dataloader: reaper")
    log = structlog.get_logger("reaper").bind(pid=os.getpid())
    conn: db.Connection | None = None
    while not signals.received:
        try:
            if conn is None or conn.closed:
                conn = _connect(settings, dsn)
                log.info("reaper.started")
            started = now()
            reap(conn, log)
            signals.wait(settings.dl_reaper_period_sec - (now() - started))
        except migrations.SchemaError as e:
            log.error("reaper.schema.refused", error=str(e))
            return EXIT_CANNOT_START
        except psycopg.Error as e:
            if not db.is_passing(e):
                raise
            log.warning("reaper.session.lost", error=str(e).strip())
            if conn is not None:
                conn.close()
            signals.wait(1.0)
    log.info("reaper.stopped")
    return EXIT_OK


def reap(conn: db.Connection, log: structlog.stdlib.BoundLogger) -> None:
    """One round: every expired lease, one short transaction each, then all rows whose time has come."""
    taken: Counter[str] = Counter()
    while job := queue.reap(conn):
        taken[str(job.status)] += 1
        logs.metric("job.run", job_id=str(job.job_id), outcome="expired", status=job.status)
        log.warning("reaper.job.taken", job_id=str(job.job_id), status=job.status)
    if taken:
        log.warning("reaper.requeued", count=taken.total(), **taken)
    while queue.wake(conn, WAKE_BATCH) >= WAKE_BATCH:
        pass


def _connect(settings: Settings, dsn: str) -> db.Connection:
    conn = db.connect(
        dsn,
        name="dl-reaper",
        schema=settings.pg_schema_queue,
        connect_timeout=settings.pg_connect_timeout,
        answer_within=30,
        lock_timeout=10,
    )
    migrations.check(conn)
    return conn
