"""The registry of a farm's workers in the database, for people on any host: identity, job, cost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from math import isfinite
from typing import Any
from uuid import uuid4

import psutil

from dataloader import periods
from dataloader.farm import process
from dataloader.farm.host import Host
from dataloader.farm.process import cpu_used_by, memory_used, now
from dataloader.farm.slots import Slot, State
from dataloader.queue import db
from dataloader.queue.reports import stats

CHANGED_SEC = 2.0  # how soon a change is shown
# How often without a change: a worker that was not shown for 30 s counts as gone.
UNCHANGED_SEC = periods.seconds("UNCHANGED_SEC", 10.0)


class WorkerRegistry:
    """When the workers are to be shown again, and their CPU seconds at the last time."""

    def __init__(self, its_host: Host) -> None:
        self._its_host = its_host
        self.host = process.hostname()
        self.farm = f"{self.host}:{os.getppid()}:{uuid4().hex[:12]}"
        self._shown: list[tuple[Any, ...]] = []
        self._at = self._looked = -UNCHANGED_SEC
        self._cpu: dict[str, tuple[float, float]] = {}  # by worker: when its CPU seconds were read, and how many
        self._rows: dict[tuple[str, str, int], tuple[float, dict[str, Any]]] = {}  # by what is seen: its row, made when

    def show(self, conn: db.Connection, slots: Sequence[Slot]) -> None:
        """Show the workers in these slots, after a change or every UNCHANGED_SEC.

        To look at a worker takes a millisecond: an idle worker that has run nothing since is looked at again after
        UNCHANGED_SEC only. The statements have a short limit (see `briefly` in stats.sql). Raises psycopg.Error; the
        next try is due as after a success.
        """
        if now() < self._looked + CHANGED_SEC:
            return
        self._looked = now()
        present = {slot: _state(slot) for slot in slots if slot.state is not State.FREE and slot.worker}
        seen = [(slot.worker, state, slot.runs) for slot, state in present.items()]
        if seen == self._shown and now() < self._at + UNCHANGED_SEC:
            return
        self._shown, self._at = seen, now()
        since = now() - UNCHANGED_SEC
        recent = {each: made for each, made in self._rows.items() if each[1] == "idle" and made[0] > since}
        self._rows = {}
        for each, (slot, state) in zip(seen, present.items(), strict=True):
            self._rows[each] = recent.get(each) or (now(), self._row(slot, state))
        self._cpu = {slot.worker: self._cpu[slot.worker] for slot in present}
        bound_mb = self._its_host.bound_mb
        rows = [row for _, row in self._rows.values()]
        stats.show_workers(conn, self.farm, self.host, rows, bound_mb if isfinite(bound_mb) else None)

    def close(self, conn: db.Connection) -> None:
        """Show that the farm has no workers any more."""
        stats.show_workers(conn, self.farm, self.host, [])

    def _row(self, slot: Slot, state: str) -> dict[str, Any]:
        held = slot.held()
        return {
            "worker": slot.worker,
            "pid": slot.fields.pid,
            "queue": slot.queues[0],
            "queues": slot.queues,
            "state": state,
            "job_id": held and str(held.job_id),
            "silent_sec": now() - slot.fields.reported_at if held else None,
            "memory_bytes": memory_used(slot.fields.pid),
            "cpu_percent": self._cpu_percent(slot),
            "jobs": slot.runs,
            "started_at": _started(slot.fields.pid),
        }

    def _cpu_percent(self, slot: Slot) -> float:
        """Percent of one core since the last reading; the processes that a job has started count too."""
        at, used = now(), cpu_used_by(slot.fields.pid)
        before, had_used = self._cpu.get(slot.worker, (at, used))
        self._cpu[slot.worker] = at, used
        return round(100 * max(0.0, used - had_used) / (at - before), 1) if at > before else 0.0


def _state(slot: Slot) -> str:
    """The state for people: a stopped process cannot show it itself; a resting one has yet to start to work."""
    if slot.state is not State.DEAD and process.is_stopped(slot.fields.pid):
        return "stopped"
    if slot.stuck_at < now():
        return "stuck"
    return "starting" if slot.state is State.RESTING else slot.state.name.lower()


def _started(pid: int) -> datetime | None:
    try:
        return datetime.fromtimestamp(psutil.Process(pid).create_time(), UTC)
    except psutil.Error:
        return None
