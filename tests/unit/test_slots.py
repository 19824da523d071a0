"""What a worker and its keeper write to one slot, whichever of them is first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from dataloader.farm.slots import Held, SharedSlots, Slot


class Interrupted:
    """The worker's view of a slot's fields, of which the keeper writes some behind the worker's n-th access."""

    def __init__(self, fields: Any, n: int, write: Callable[[], None]) -> None:
        self.__dict__.update(_fields=fields, _left=n, _write=write)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._fields, name)
        self._count()
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._fields, name, value)
        self._count()

    def _count(self) -> None:
        self.__dict__["_left"] -= 1
        if not self._left:
            self._write()


def running() -> tuple[Slot, Held]:
    (slot,) = SharedSlots(1).slots
    slot.claim([uuid4()], [1])
    slot.begin(0, 1, 60.0, 1.0)
    held = slot.held()
    assert held is not None
    return slot, held


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_question_that_comes_while_the_worker_looks_for_one_is_heard(n: int) -> None:
    slot, held = running()
    fields = slot.fields
    slot.fields = Interrupted(fields, n, lambda: setattr(fields, "asked", held.generation))
    assert any(slot.takes_question() for _ in range(3))
