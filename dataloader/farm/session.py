"""A worker's session with the queue's database: opened, lost, replaced.

One thread uses the session at a time: the worker's own, or the heartbeat's while jobs run (`Heartbeat.holding`).
"""

from __future__ import annotations

import random
import time
from typing import Any

from dataloader.config import Settings
from dataloader.farm.common_log import FarmOutage
from dataloader.farm.orders import Orders
from dataloader.farm.process import now
from dataloader.farm.slots import Slot
from dataloader.queue import db, lifecycle, migrations, probe
from dataloader.queue.job import Job


class WorkerSession:
    """The one session of a worker; the slot shows the session's backend, and `outage` logs failures for the farm."""

    def __init__(
        self, settings: Settings, dsn: str, queue: str, orders: Orders, slot: Slot, logger: Any, outage: FarmOutage
    ) -> None:
        self.outage = outage
        self._settings = settings
        self._dsn = dsn
        self._queue = queue
        self._orders = orders
        self._slot = slot
        self._log = logger
        self._current: lifecycle.Session | None = None
        self.unrecovered: list[lifecycle.Session] = []  # lost sessions, each perhaps with a claim (`Batch.recover`)

    @property
    def current(self) -> lifecycle.Session:
        """The latest session, which may be closed."""
        assert self._current is not None  # noqa: S101  the worker connects before any work
        return self._current

    @property
    def conn(self) -> db.Connection:
        """The connection of `current`."""
        return self.current.conn

    @property
    def is_open(self) -> bool:
        """False before the first `connect` and after a loss."""
        return self._current is not None and not self.conn.closed

    def connect(self) -> None:
        """Reopen the session over as many tries as it takes.

        Raises psycopg.Error when the worker drains, or for an error that a new try does not heal; SchemaError when the
        schema is not this code's.
        """
        db.patiently(
            self.reopen,
            sleep=self._orders.pause,
            give_up=lambda: self._orders.stopping,
            on_error=lambda e: self.outage.failed("worker.connect.failed", e),
        )

    def reopen(self) -> None:
        """Open a session between two runs; a claim of the former session is to be recovered. Raises as `connect`."""
        former = self._current
        self.open(self._settings.pg_connect_timeout)
        if former is not None:
            self.unrecovered.append(former)

    def open(self, within: float) -> None:
        """Open a session within so many seconds, and check the schema. Raises as `connect`."""
        conn = db.connect(
            self._dsn,
            name=f"dl-worker:{self._queue}:{self._slot.worker}",
            schema=self._settings.pg_schema_queue,
            connect_timeout=min(within, self._settings.pg_connect_timeout),
            answer_within=min(30.0, within + 5),
            lock_timeout=5,
        )
        probe.require_session(conn, self._dsn)
        migrations.check(conn)
        session = lifecycle.open_session(conn, self._slot.worker)
        self._slot.connected(session.backend_pid, session.backend_start)
        self._current = session

    def read(self) -> None:
        """Read what the server says unasked: its farewell, which ends a wait. Raises psycopg.Error when it was one."""
        for _ in self.conn.notifies(timeout=0):
            pass

    def lost(self, error: BaseException) -> None:
        """Close the session after a passing error; pause before the next try, except in a drain."""
        self.outage.failed("worker.session.lost", error)
        if self._current is not None:
            self.conn.close()
        if not self._orders.stopping:
            self._orders.pause(random.uniform(0.1, 1.0))  # noqa: S311  jitter; the error may last

    def leap(self, job: Job, fence: int) -> int | None:
        """A fencing token for this claim above the target's `fence`; None when the job is another worker's.

        By a connection of its own: the heartbeat uses the worker's, and may be replacing it after a failover, which is
        when fences are ahead of the queue.
        """

        def ask() -> int | None:
            with db.connect(
                self._dsn, name="dl-leap", schema=self._settings.pg_schema_queue, answer_within=10, lock_timeout=5
            ) as conn:
                return lifecycle.leap(conn, job, fence)

        fence_token = db.patiently(
            ask, sleep=time.sleep, give_up=lambda: now() > self._slot.fence_at or self._orders.is_overdue
        )
        if fence_token is not None:
            self._log.warning("worker.fence.ahead", fence=fence, claim=job.claim, leapt_to=fence_token)
        return fence_token
