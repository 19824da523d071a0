"""The list of workers that a keeper writes for people: what it reads of each, and how often."""

from __future__ import annotations

import pytest

from dataloader.config import Settings
from dataloader.farm import keeper as module
from dataloader.farm.admission import Host
from dataloader.farm.keeper import CHANGED_SEC, UNCHANGED_SEC, WorkerRegistry
from dataloader.farm.slots import SharedSlots, State
from dataloader.queue import db

SHOWN = "SELECT worker, state, jobs, memory_bytes > 0 FROM dl_workers ORDER BY worker"


def test_workers_are_shown_after_a_change_and_from_time_to_time(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1_000.0]
    reads: list[int] = []
    monkeypatch.setattr(module, "now", lambda: clock[0])
    read = module.memory_used
    monkeypatch.setattr(module, "memory_used", lambda pid: reads.append(pid) or read(pid))
    shared = SharedSlots(3)
    for slot in shared.slots:
        slot.take(0)
        slot.occupy(f"w{slot.index}", ["q"])
        slot.state = State.IDLE
    registry = WorkerRegistry(Host(Settings(dl_db_dsn="postgresql://")))

    def looked_at() -> int:
        reads.clear()
        registry.show(conn, shared.used())
        clock[0] += 1.1 * CHANGED_SEC
        return len(reads)

    assert (looked_at(), looked_at()) == (3, 0)
    shared.slots[1].runs += 1
    shared.slots[2].state = State.BUSY
    assert looked_at() == 3
    assert conn.execute(SHOWN).fetchall() == [("w0", "idle", 0, True), ("w1", "idle", 1, True), ("w2", "busy", 0, True)]
    assert looked_at() == 0
    clock[0] += UNCHANGED_SEC
    assert looked_at() == 3
