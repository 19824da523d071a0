"""gate: requests that may go to the database."""

from contextlib import nullcontext
from time import monotonic

import pytest

from dataloader.api.web.sessions import Busy, Gate
from dataloader.queue import db


class InTheWay(db.Error):
    sqlstate = "57014"


@pytest.mark.parametrize(("error", "closes"), [(db.Silence("x"), True), (InTheWay("x"), False), (KeyError("x"), False)])
def test_only_a_database_that_is_away_closes_the_gate(error: Exception, closes: bool) -> None:
    gate = Gate(2)
    with pytest.raises(type(error)), gate.passed(monotonic() + 1):
        raise error
    closed = pytest.raises(Busy) if closes else nullcontext()
    # The first request afterwards, or a request that tries, and one beside it.
    with gate.passed(monotonic() + 1), closed, gate.passed(monotonic() + 1):
        pass


def test_nobody_waits_longer_than_it_may() -> None:
    gate = Gate(9)
    gate.narrow(0)
    with gate.passed(monotonic() + 1):
        with pytest.raises(Busy), gate.passed(monotonic() - 1):
            pass
        with pytest.raises(Busy), gate.passed(monotonic() + 60):
            pass
