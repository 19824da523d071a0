"""A worker's batch: how many jobs it claims, the ends of locked rows, claims whose answers were lost."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import structlog

from dataloader.config import Settings, WorkerSpec
from dataloader.farm.batch import LOCKED_MOST, TICK_SEC, Batch
from dataloader.farm.orders import Orders
from dataloader.farm.process import now
from dataloader.farm.session import WorkerSession
from dataloader.farm.slots import SharedSlots
from dataloader.queue import lifecycle
from dataloader.queue.job import Finish, Job, Status
from dataloader.queue.lifecycle import Ended, Session, Step, Written

SETTINGS = Settings.model_construct(workers_json=[WorkerSpec(queue="q", concurrency=1, prefetch=100)])


def job() -> Job:
    return Job(uuid4(), "q", "noop", "{}", None, "key", "", 1, 5, 60, None, 1, "host:1:a")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> WorkerSession:
    """A session that opens without a server; each is known by its backend's number."""
    slot = SharedSlots(1).slots[0]
    monkeypatch.setattr("dataloader.farm.orders.Signals", lambda *_: SimpleNamespace(wait=lambda *_: []))
    session = WorkerSession(SETTINGS, "", "q", Orders(SETTINGS, slot, -1), slot, structlog.get_logger())
    pids = iter(range(1, 9))

    def opened(_: float) -> None:
        conn: Any = SimpleNamespace(closed=False)
        conn.close = lambda: setattr(conn, "closed", True)
        session._current = Session(conn, "host:1:a", next(pids), datetime.now(UTC))

    monkeypatch.setattr(session, "open", opened)
    session.connect()
    return session


@pytest.fixture
def batch(session: WorkerSession) -> Batch:
    return Batch(SETTINGS, "q", session, session._orders, structlog.get_logger())


def test_the_next_claim_takes_what_fits_beside_the_first_job(batch: Batch) -> None:
    assert batch.size_next() == 1
    batch.took(TICK_SEC / 2, 10)
    assert batch.size_next() == 21
    batch.took(0.000_01, 10)
    assert batch.size_next() == 100
    batch.limit(30, "a small lock table")
    batch.limit(50, "never more again")
    assert batch.size_next() == 30


def test_an_end_of_a_locked_row_is_kept_and_tried_again(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Ended(job(), Finish("succeed"))
    locked = [ended.job.job_id]
    tried = []

    def step(*args: Any) -> Step:
        tried.append(args[4])
        return Step([], {} if locked else {ended.job.job_id: Status.SUCCEEDED}, 0, False, None, list(locked))

    monkeypatch.setattr(lifecycle, "step", step)
    batch.add(ended)
    batch.step(1)
    assert (batch.owes, batch.has_ends) == (1, False)
    assert now() < batch.retry_at < now() + 1
    batch.step(1)
    batch._retry_at = 0.0
    locked.clear()
    batch.step(1)
    assert (tried, batch.owes) == ([[ended], [], [ended]], 0)


def test_a_worker_with_very_many_locked_rows_claims_nothing(batch: Batch) -> None:
    batch._locked = [Ended(job(), Finish("succeed"))] * LOCKED_MOST
    assert batch.size_next() == 0


def test_every_lost_sessions_claim_is_recovered_also_after_a_failure(
    batch: Batch, session: WorkerSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend of the first lost session may be at a claim: its end is tried again, before the jobs go back."""
    ended: list[Any] = []

    def end_session(conn: Any, pid: int, start: datetime) -> None:
        ended.append(pid)
        if ended == [1]:
            raise psycopg.OperationalError

    def settle(*_: Any) -> list[Any]:
        ended.append("settled")
        return []

    monkeypatch.setattr(lifecycle, "end_session", end_session)
    monkeypatch.setattr(lifecycle, "settle", settle)
    session.connect()
    with pytest.raises(psycopg.OperationalError):
        batch.recover()
    session.connect()
    batch.recover()
    assert ended == [1, 1, 2, "settled"]
    assert not session.unrecovered


def test_jobs_that_have_run_are_written_before_the_lost_claims_jobs_go_back(
    batch: Batch, session: WorkerSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    end = Ended(job(), Finish("succeed"))
    monkeypatch.setattr(lifecycle, "end_session", lambda *_: order.append("ended"))
    monkeypatch.setattr(lifecycle, "finish_some", lambda *_: order.append("written") or Written({}, [end.job.job_id]))
    monkeypatch.setattr(lifecycle, "settle", lambda *_: order.append("settled") or [])
    batch._locked, batch._retry_at = [end], now() + 60
    session.connect()
    batch.recover()
    assert order == ["ended", "written", "settled"]
    assert batch.owes == 1
