"""A worker's batch: how many jobs it claims, the ends of locked rows, the jobs of lost sessions; its turns."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
import structlog
from claimed import job

from dataloader import pipelines
from dataloader.config import WorkerSpec
from dataloader.farm.batch import TICK_SEC, Batch, Turns, fair_share, size_after
from dataloader.farm.slots import Siblings


@pytest.fixture
def batch() -> Batch:
    return Batch([WorkerSpec(queue="q", concurrency=1, prefetch=100)], ("q",), 1.0, structlog.get_logger())


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
    monkeypatch.setattr(pipelines, "registered", lambda: {"t": SimpleNamespace(batch_size=size)})
    batch.claimed([job("k", task="other"), *(job(key) for key in "lmn")], allowed)
    found = []
    while delivery := batch.next():
        found.append("".join(each.lock_key for each in delivery.jobs))
    assert found == (runs if size else "k l m n").split()


def test_a_claim_is_large_enough_for_one_run_of_its_pipeline(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second claim on: the first shows the worker whose jobs its queue has."""
    monkeypatch.setattr(pipelines, "registered", lambda: {"t": SimpleNamespace(batch_size=10)})
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
    assert [end.job.job_id for end in batch._due()] == [each.job_id for each in reversed(jobs)]
    assert batch.next() is None


QUEUES = ("a", "b", "c")


def turns(scheduler: str | dict[str, int] | None, queues: tuple[str, ...] = QUEUES) -> Turns:
    return Turns(queues, scheduler, random.Random(15))


@pytest.mark.parametrize(
    ("scheduler", "queues", "had_jobs", "order"),
    [
        *((scheduler, "a", "a", "a") for scheduler in ("lag", "sequential", "strict", {"a": 3}, None)),
        ("strict", "abc", "b", "abc"),
        ("sequential", "abc", "", "abc"),
        ("sequential", "abc", "ab", "cab"),
        ("sequential", "abc", "abc", "abc"),
        ("sequential", "abc", "ac", "abc"),  # also behind one that was not first: those before it were empty
        ("lag", "abc", "b", "bca"),  # the database decides; the bookmark is of the queue that had jobs
    ],
)
def test_the_next_turn_follows_from_the_queues_that_had_jobs(
    scheduler: str | dict[str, int] | None, queues: str, had_jobs: str, order: str
) -> None:
    made = turns(scheduler, tuple(queues))
    for queue in had_jobs:
        made.claimed(queue)
    for _ in range(2):  # a claim that has found nothing moves nothing
        assert made.order() == list(order)
    assert made.by_lag == (scheduler == "lag" and len(queues) > 1)


def test_weights_say_how_often_a_queue_is_first_and_then_second() -> None:
    weighted, size = turns({"c": 1, "b": 3, "a": 6}), 20_000
    orders = Counter("".join(weighted.order()) for _ in range(size))
    assert len(orders) == 6
    first = {queue: sum(count for order, count in orders.items() if order[0] == queue) / size for queue in QUEUES}
    assert first == pytest.approx({"a": 0.6, "b": 0.3, "c": 0.1}, abs=0.02)
    assert orders["abc"] / (orders["abc"] + orders["acb"]) == pytest.approx(3 / 4, abs=0.02)
