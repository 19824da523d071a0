"""The database's part of a run's history: rows, journals, signs of life, and rows in the target."""

from __future__ import annotations

from typing import Any

import psycopg

from .history import Event, History, Row, Sign, Written

_ROWS = """
SELECT job_id::text, idempotency_key, lock_key, task, status::text, attempt, max_attempts, claims, lease_ttl_sec
  FROM dl_jobs ORDER BY created_at"""
_EVENTS = """
SELECT job_id::text, kind, extract(epoch FROM ts)::float8, (payload->>'attempt')::int, payload->>'reason'
  FROM dl_job_events ORDER BY event_id"""
_SIGNS = "SELECT job_id::text, claim, lock_key, pid, farm, what, at FROM runs ORDER BY at"
_WRITTEN = "SELECT job_id::text, claim, older FROM written ORDER BY n"


def gather(dsn: str, history: History) -> None:
    """Add the database's part to the history."""
    with psycopg.connect(dsn) as conn:

        def rows(statement: str) -> list[tuple[Any, ...]]:
            return conn.execute(statement).fetchall()

        history.rows += [Row(*row) for row in rows(_ROWS)]
        history.events += [Event(*row) for row in rows(_EVENTS)]
        history.signs += [Sign(*row) for row in rows(_SIGNS)]
        history.written += [Written(*row) for row in rows(_WRITTEN)]
