"""Turns: which queue is first at a claim."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dataloader.farm.batch import Turns

QUEUES = ("a", "b", "c")


def turns(scheduler: str | dict[str, int] | None, queues: tuple[str, ...] = QUEUES) -> Turns:
    return Turns(queues, scheduler, random.Random(15))


@pytest.mark.parametrize("scheduler", ["lag", "sequential", "strict", {"a": 3}, None])
def test_one_queue_is_always_first(scheduler: str | dict[str, int] | None) -> None:
    one = turns(scheduler, ("a",))
    assert (one.order(), one.by_lag) == (["a"], False)
    one.claimed("a")
    assert one.order() == ["a"]


def test_strict_keeps_the_order() -> None:
    strict = turns("strict")
    strict.claimed("b")
    assert (strict.order(), strict.by_lag) == (["a", "b", "c"], False)


def test_sequential_goes_on_behind_the_queue_that_had_jobs() -> None:
    """Also behind one that was not first: those before it were empty."""
    sequential, found = turns("sequential"), []
    for _ in range(4):
        found.append(sequential.order()[0])
        sequential.claimed(found[-1])
    sequential.claimed("c")
    assert (found, sequential.order()) == (["a", "b", "c", "a"], ["a", "b", "c"])
    assert sequential.order() == ["a", "b", "c"]  # a claim that has found nothing moves nothing


def test_by_lag_the_database_decides_and_the_bookmark_is_of_the_queue_that_had_jobs() -> None:
    lag = turns("lag")
    assert lag.by_lag
    lag.claimed("b")
    assert lag.order() == ["b", "c", "a"]


def test_weights_say_how_often_a_queue_is_first_and_then_second() -> None:
    weighted, size = turns({"c": 1, "b": 3, "a": 6}), 20_000
    orders = Counter("".join(weighted.order()) for _ in range(size))
    assert len(orders) == 6
    first = {queue: sum(count for order, count in orders.items() if order[0] == queue) / size for queue in QUEUES}
    assert first == pytest.approx({"a": 0.6, "b": 0.3, "c": 0.1}, abs=0.02)
    assert orders["abc"] / (orders["abc"] + orders["acb"]) == pytest.approx(3 / 4, abs=0.02)
