"""gate: requests that may go to the database, by a clock that the test sets."""

from __future__ import annotations

from math import inf
from time import monotonic

import pytest

from dataloader.api.web.gate import STALL_SEC, Busy, Gate
from dataloader.queue import db


def full(most: int = 3, at: float = 100.0) -> Gate:
    gate = Gate(most)
    for _ in range(most):
        assert gate.enter(at, inf)
    return gate


def test_a_full_gate_is_waited_at_while_it_moves() -> None:
    gate, now = full(), 100.0
    for _ in range(50):
        now += STALL_SEC * 0.9
        assert not gate.enter(now, inf)
        gate.leave(now, is_away=False)
        assert gate.enter(now, inf)
    with pytest.raises(Busy):
        gate.enter(now + STALL_SEC, inf)


def test_a_long_rest_before_a_rush_is_no_stall() -> None:
    assert not full(at=1_000.0).enter(1_000.1, inf)


def test_after_a_silence_one_at_a_time_tries() -> None:
    gate = full()
    gate.leave(103.0, is_away=True)
    with pytest.raises(Busy):
        gate.enter(103.0, inf)
    gate.leave(103.0, is_away=True)
    gate.leave(103.0, is_away=True)
    assert gate.enter(103.0, inf)
    with pytest.raises(Busy):
        gate.enter(105.0, inf)
    gate.leave(105.8, is_away=True)
    assert gate.enter(105.8, inf)
    gate.leave(105.9, is_away=False)
    for _ in range(3):
        assert gate.enter(106.0, inf)


class InTheWay(db.Error):
    sqlstate = "57014"


@pytest.mark.parametrize(("error", "closes"), [(db.Silence("x"), True), (InTheWay("x"), False), (KeyError("x"), False)])
def test_only_a_database_that_is_away_closes_the_gate(error: Exception, closes: bool) -> None:
    gate = Gate(2)
    with pytest.raises(type(error)), gate.passed(monotonic() + 1):
        raise error
    with gate.passed(monotonic() + 1):  # the first request afterwards, or a request that tries
        if closes:
            with pytest.raises(Busy), gate.passed(monotonic() + 1):
                pass
        else:
            with gate.passed(monotonic() + 1):
                pass


def test_nobody_waits_longer_than_it_may() -> None:
    gate = Gate(9)
    gate.narrow(0)
    with gate.passed(monotonic() + 1):
        with pytest.raises(Busy), gate.passed(monotonic() - 1):
            pass
        with pytest.raises(Busy), gate.passed(monotonic() + 60):
            pass
