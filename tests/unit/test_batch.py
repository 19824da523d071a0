"""A worker's batch: how many jobs it claims, the ends of locked rows, the jobs of lost sessions."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import structlog

from dataloader import pipelines
from dataloader.config import Settings, WorkerSpec
from dataloader.farm.batch import LOCKED_MOST, TICK_SEC, Batch, fair_share, size_after
from dataloader.farm.process import now
from dataloader.farm.slots import SharedSlots, Siblings, State
from dataloader.farm.worker import GIVE_SEC, Worker
from dataloader.queue import lifecycle, probe
from dataloader.queue.job import Finish, Job, Status
from dataloader.queue.lifecycle import Ended, Session, Step, Written

SETTINGS = Settings.model_construct(workers_json=[WorkerSpec(queue="q", concurrency=1, prefetch=100)])


def job(key: str = "key") -> Job:
    return Job(uuid4(), "q", "noop", "{}", None, key, "", 1, 5, 60, None, 1, "host:1:a")


ORDERS = SimpleNamespace(drain_by=0.0, stopping=False)
ONE = Session(SimpleNamespace(), "host:1:a", 1, datetime.now(UTC))  # lent to a batch, whose statements are replaced


def batch_of(settings: Settings = SETTINGS, queues: tuple[str, ...] = ("q",)) -> Batch:
    return Batch(settings.workers, queues, 1.0, structlog.get_logger())


@pytest.fixture
def batch() -> Batch:
    return batch_of()


@pytest.mark.parametrize(
    ("size", "seconds", "runs", "then"),
    [
        (1, 0.001, 1, 2),
        (16, 0.001, 1, 32),
        (16, TICK_SEC / 2, 10, 21),
        (64, TICK_SEC / 2, 10, 21),
        (1, TICK_SEC * 0.99, 1, 2),
        (1, TICK_SEC * 1.01, 1, 1),
        (2, TICK_SEC * 1.9, 2, 2),
        (100, TICK_SEC * 2.1, 100, 1),
        (1_000, 0.001, 1_000, 1_000),
    ],
)
def test_a_claim_takes_what_fits_beside_its_first_job_and_at_most_twice_the_last(
    size: int, seconds: float, runs: int, then: int
) -> None:
    assert size_after(size, seconds, runs) == then


def test_a_worker_begins_with_one_job_and_learns(batch: Batch) -> None:
    sizes = []
    for _ in range(9):
        sizes.append(batch.size_next())
        batch.learn(0.000_01, 10)
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 100, 100]
    batch.limit(30, "a small lock table")
    batch.limit(50, "never more again")
    assert batch.size_next() == 30
    batch.learn(TICK_SEC * 3, 30)
    assert batch.size_next() == 1


@pytest.mark.parametrize(("scheduler", "after"), [("sequential", [1, 1, 4]), ("lag", [1, 1, 1])])
def test_the_runs_of_one_queue_do_not_size_the_claims_of_another(
    monkeypatch: pytest.MonkeyPatch, scheduler: str, after: list[int]
) -> None:
    """By lag the database chooses the queue, so the smallest size counts."""
    settings = SETTINGS.model_copy(update={"workers_json": (WorkerSpec(queues=["a", "b"], scheduler=scheduler),)})
    batch = batch_of(settings, ("a", "b"))
    found, sizes = [job()._replace(queue="a")], []
    monkeypatch.setattr(lifecycle, "step", lambda *_: Step(found, {}, 0, False, None))
    for queue in ("a", "b"):
        found = [job()._replace(queue=queue)]
        sizes.append(most := batch.size_next())
        batch.claimed(batch.step(ONE, most).jobs)
        if queue == "a":
            batch.learn(0.000_01, 1), batch.learn(0.000_01, 1)
        else:
            batch.learn(TICK_SEC * 3, 1)
    assert [*sizes, batch.size_next()] == after


def test_a_worker_that_was_idle_begins_with_one_job_again(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [Step([job()], {}, 0, False, None), Step([], {}, 0, True, None), Step([], {}, 0, False, None)]
    monkeypatch.setattr(lifecycle, "step", lambda *_: steps.pop(0))
    batch.learn(0.000_01, 10)
    sizes = []
    for most in (2, 2, 2):
        batch.step(ONE, most)
        sizes.append(batch.size_next())
    assert sizes == [2, 2, 1]


@pytest.mark.parametrize(
    ("size", "siblings", "found_fewer", "share"),
    [
        (100, Siblings(3, 0), False, 100),
        (100, Siblings(3, 1), False, 50),
        (100, Siblings(3, 1), True, 25),
        (3, Siblings(1, 1), False, 1),
        (2, Siblings(9, 9), False, 1),
        (100, Siblings(0, 0), True, 100),
    ],
)
def test_idle_siblings_and_at_the_end_of_a_queue_all_have_their_share(
    size: int, siblings: Siblings, found_fewer: bool, share: int
) -> None:
    assert fair_share(size, siblings, found_fewer) == share


@pytest.mark.parametrize(
    ("given", "transactions", "most", "lines"),
    [({}, 100, 100, 0), ({}, 10, 32, 0), ({"prefetch": 100}, 10, 32, 1), ({"prefetch": 1}, 10, 1, 0)],
)
def test_the_lock_table_bounds_an_automatic_prefetch_without_a_word(
    given: dict[str, int], transactions: int, most: int, lines: int
) -> None:
    settings = Settings.model_construct(workers_json=[WorkerSpec(queue="q", concurrency=5, **given)])
    with structlog.testing.capture_logs() as said:
        batch = batch_of(settings)
        batch.fit(probe.LockTable(64, transactions))
    for _ in range(9):
        batch.learn(0.000_01, 10)
    assert (batch.size_next(), len(said)) == (most, lines)


def test_an_end_of_a_locked_row_is_kept_and_tried_again(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Ended(job(), Finish("succeed"))
    locked = [ended.job.job_id]
    tried = []

    def step(*args: Any) -> Step:
        tried.append(args[4])
        return Step([], {} if locked else {ended.job.job_id: Status.SUCCEEDED}, 0, False, None, list(locked))

    monkeypatch.setattr(lifecycle, "step", step)
    batch.add(ended)
    batch.step(ONE, 1)
    assert batch.owes == 1
    assert now() < batch.retry_at < now() + 1
    batch.step(ONE, 1)
    batch._retry_at = 0.0
    locked.clear()
    batch.step(ONE, 1)
    assert (tried, batch.owes) == ([[ended], [], [ended]], 0)


def test_a_worker_with_very_many_locked_rows_claims_nothing(batch: Batch) -> None:
    batch.locked = [Ended(job(), Finish("succeed"))] * LOCKED_MOST
    assert batch.size_next() == 0


@pytest.mark.parametrize(
    ("seconds_each", "runs", "idle", "goes_on"),
    [
        (GIVE_SEC / 2, 1, True, False),
        (GIVE_SEC / 2, 1, False, True),
        (GIVE_SEC / 9, 100, True, True),
        (GIVE_SEC / 2, 0, True, True),
        (GIVE_SEC / 2, 5, True, False),
    ],
)
def test_a_worker_leaves_an_idle_sibling_what_takes_longer_than_to_hand_it_back(
    batch: Batch, seconds_each: float, runs: int, idle: bool, goes_on: bool
) -> None:
    """It goes by the runs of this claim: the jobs before may have been shorter."""
    shared, worker = SharedSlots(2), Worker.__new__(Worker)
    orders: Any = ORDERS  # a worker's own would handle this process's signals, also for the tests behind this one
    worker.shared, worker.slot, worker.batch, worker.orders = shared, shared.slots[0], batch, orders
    worker._sound, worker._glanced_at = True, 0.0
    worker.slot.claim([uuid4()], [1])
    worker.slot.begin(0, 1, 60.0, 0.0)
    shared.slots[1].note_empty_claim(now(), None)
    shared.slots[1].state = State.IDLE if idle else State.BUSY
    batch.claimed([job(key) for key in "klm"])
    batch.learn(0.000_01, 1)
    worker._sent = sent = now() - seconds_each * runs
    shared.slots[1].empty_claim_at = sent
    assert worker._goes_on(sent, runs) is goes_on
    worker._glanced_at = now() + 60
    assert worker._goes_on(sent, runs), "it has looked for siblings just now"


def test_a_new_session_keeps_what_runs_and_what_has_run_and_hands_back_the_rest(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ends the lost statement wrote one, although its answer did not come."""
    run, waits, written, unwritten = [job(key) for key in "abcd"]
    batch.claimed([run, waits])
    assert batch.next() is not None
    for each in (written, unwritten):
        batch.add(Ended(each, Finish("succeed")))
    done: list[Any] = []
    monkeypatch.setattr(lifecycle, "end_session", lambda _conn, pid, _start: done.append(pid))
    monkeypatch.setattr(lifecycle, "still_held", lambda *_: {unwritten.job_id})
    monkeypatch.setattr(lifecycle, "has_ended", lambda *_: True)
    monkeypatch.setattr(
        lifecycle, "hand_back", lambda _c, _w, holds, _r: done.append(holds) or [(waits.job_id, "queued")]
    )
    with structlog.testing.capture_logs() as lines:
        batch.resume(ONE, [ONE, Session(ONE.conn, ONE.worker, 2, ONE.backend_start)])
    assert done == [1, 2, [run, unwritten]]
    assert (batch.next(), batch.owes) == (None, 1)
    assert [line["event"] for line in lines] == ["worker.claim.unheard"]


def test_after_a_failure_each_end_is_written_alone_and_none_is_forgotten(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [Ended(job(key), Finish("succeed")) for key in "abc"]
    tries: list[int] = []

    def finish_some(_conn: Any, _worker: str, some: list[Ended]) -> Written:
        tries.append(len(some))
        if len(tries) in (1, 3):
            raise psycopg.OperationalError
        return Written({end.job.job_id: Status.SUCCEEDED for end in some}, [])

    monkeypatch.setattr(lifecycle, "finish_some", finish_some)
    for end in ends:
        batch.add(end)
    for _ in range(2):
        with pytest.raises(psycopg.OperationalError):
            batch.write(ONE)
    assert batch.owes == 2
    batch.step(ONE, 1)
    assert (tries, batch.owes) == ([3, 1, 1, 1, 1], 0)


# --- deliveries ---


def test_the_jobs_of_a_key_make_one_run(batch: Batch) -> None:
    jobs = [job(key) for key in "kkklmm"]
    batch.claimed(jobs)
    runs = []
    while delivery := batch.next():
        runs.append((delivery.place, [each.lock_key for each in delivery.jobs]))
    assert runs == [(0, ["k"] * 3), (3, ["l"]), (4, ["m"] * 2)]


@pytest.mark.parametrize(
    ("size", "allowed", "runs"), [(None, None, "k kl m n"), (2, None, "k lm n"), (9, None, "k lmn"), (9, 2, "k lm n")]
)
def test_a_run_has_as_many_keys_as_its_pipeline_and_its_queue_allow(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, size: int | None, allowed: int | None, runs: str
) -> None:
    """And jobs of one task."""
    monkeypatch.setattr(pipelines, "batch_size", lambda task: size or 1 if task == "noop" else 1)
    batch.claimed([job("k")._replace(task="other"), *(job(key) for key in "lmn")], allowed)
    found = []
    while delivery := batch.next():
        found.append("".join(each.lock_key for each in delivery.jobs))
    assert found == (runs if size else "k l m n").split()


def test_a_claim_is_large_enough_for_one_run_of_its_pipeline(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second claim on: the first shows the worker whose jobs its queue has."""
    monkeypatch.setattr(pipelines, "batch_size", lambda task: 10)
    assert batch.size_next() == 1
    batch.claimed([job("k")])
    assert batch.next() is not None
    assert (batch.size_next(), batch.size_next(lambda: Siblings(9, 9))) == (10, 10)
    batch.claimed([job("k")], 4)
    assert batch.next() is not None
    assert batch.size_next() == 4


def test_a_delivery_is_handed_back_whole_the_last_job_first(batch: Batch) -> None:
    jobs = [job(key) for key in "kkl"]
    batch.claimed(jobs)
    batch.hand_back("drain")
    assert [end.job.job_id for end in batch._take()] == [each.job_id for each in reversed(jobs)]
    assert batch.next() is None
