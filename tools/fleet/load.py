"""Jobs that are added in step with a clock, from a thread, and how long they have waited."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from farming import until

from dataloader.queue import db
from dataloader.queue.enqueue import NewJob, enqueue

from .site import QUEUE, Site

# From the row of the journal that its trigger wrote to that of its first claim.
_WAITS = """
SELECT extract(epoch FROM min(ts) FILTER (WHERE kind = 'picked') - min(ts) FILTER (WHERE kind = 'queued'))::float8
  FROM dl_job_events WHERE job_id = ANY (%s) GROUP BY job_id ORDER BY 1"""
_UNFINISHED = "SELECT count(*) FROM dl_jobs WHERE job_id = ANY (%s) AND status IN ('queued', 'running')"


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds from the trigger to the claim of jobs that have all started."""

    sorted: list[float]

    def at(self, percent: float) -> float:
        """A percentile in seconds."""
        return self.sorted[min(len(self.sorted) - 1, int(len(self.sorted) * percent / 100))]

    def told(self) -> str:
        """In milliseconds, for people: p50, p95, p99, longest."""
        return " / ".join(f"{self.at(percent) * 1_000:,.1f}" for percent in (50, 95, 99, 100))


class Load(threading.Thread):
    """A producer with a session of its own; `acknowledged` are the ids that it was given."""

    def __init__(self, site: Site, rate: float, task: str, **job: Any) -> None:
        super().__init__(daemon=True)
        self.acknowledged: list[UUID] = []
        self.longest = 0.0  # seconds for one trigger
        self._site, self._rate, self._task, self._job = site, rate, task, job
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._began = time.monotonic()
        self.start()

    def run(self) -> None:
        """Add jobs until `stop`."""
        try:
            with db.connect(self._site.dsn, name="test-load", schema="public") as conn:
                conn.is_direct  # noqa: B018  as the API does
                self._add(conn)
        except BaseException as e:
            self._error = e

    def _add(self, conn: db.Connection) -> None:
        due = time.monotonic()
        while not self._is_over.wait(max(0.0, due - time.monotonic())):
            sent = time.monotonic()
            args, lease = self._job.get("args", {}), self._job.get("lease", 60)
            job = NewJob(QUEUE, self._task, f"key-{time.monotonic_ns()}", args, lease_ttl_sec=lease)
            self.acknowledged.append(enqueue(conn, job)[0])
            self.longest = max(self.longest, time.monotonic() - sent)
            due = max(due + 1 / self._rate, time.monotonic() - 1)

    def stop(self) -> None:
        """No more jobs; raises what has stopped the thread."""
        self._is_over.set()
        self.join()
        self.made_a_sec = len(self.acknowledged) / (time.monotonic() - self._began)
        if self._error:
            raise self._error

    def await_end(self, patience: float = 120) -> None:
        """Return once all its jobs have ended."""
        until(lambda: self._site.rows(_UNFINISHED, self.acknowledged) == [(0,)], "all jobs to end", patience)

    def waits(self) -> Waits:
        """How long its jobs have waited; they have all started."""
        return Waits([row[0] for row in self._site.rows(_WAITS, self.acknowledged)])
