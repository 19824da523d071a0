"""The runs of a farm that have reported nothing for too long, and where their threads hang. No SQL.

The keeper asks a stuck worker for its stacks by a signal, which also a C call lets through: the handler is
faulthandler's. It reads them at a later tick from the memory file that the worker has inherited.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dataloader.farm.process import now
from dataloader.farm.slots import Held, Slot

DUMP_SEC = 0.2  # from the signal until the stacks are read
STACKS_MOST = 16_384  # bytes that are kept


@dataclass(frozen=True, slots=True)
class Stuck:
    """A stuck run: the worker that hangs in it, for how long it has reported nothing (seconds), and its stacks."""

    worker: str
    held: Held
    silent_sec: float
    stacks: str


class StuckRuns:
    """Which stuck runs the keeper has asked for their stacks, by slot: the silence's begin, and when it has asked."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[float, float]] = {}
        self._told: dict[int, float] = {}  # the begin of the latest silence that was told

    def look(self, slots: Sequence[Slot]) -> Iterator[Stuck]:
        """Ask newly stuck workers for their stacks; yields those that have answered, each silence once."""
        for slot in slots:
            silent_since = float(slot.fields.reported_at)
            if slot.stuck_at > now() or self._told.get(slot.index) == silent_since or not (held := slot.held()):
                self._asked.pop(slot.index, None)
            elif self._asked.get(slot.index, (0.0, 0.0))[0] != silent_since:
                ask(slot)
                self._asked[slot.index] = silent_since, now()
            elif now() > self._asked[slot.index][1] + DUMP_SEC:
                yield Stuck(slot.worker, held, round(now() - silent_since, 1), stacks(slot))
                self._told[slot.index] = silent_since  # only now: the caller may have failed to write it


def ask(slot: Slot) -> None:
    """Let the slot's worker write the stacks of its threads."""
    with suppress(OSError):
        if _is_dump(slot):
            os.truncate(_dump(slot), 0)
            os.kill(slot.fields.pid, signal.SIGTTIN)


def stacks(slot: Slot) -> str:
    """What the worker has written, the pipeline's thread first; empty when the process is gone."""
    dump = ""
    with suppress(OSError):
        if _is_dump(slot):
            dump = Path(_dump(slot)).read_bytes()[:STACKS_MOST].decode("utf-8", "replace")
    return "\n\n".join(reversed(dump.strip().split("\n\n")))


def _is_dump(slot: Slot) -> bool:
    """Whether the worker's descriptor is the memory file: the process may be gone, and its number another's."""
    return os.readlink(_dump(slot)).startswith("/memfd:stacks")


def _dump(slot: Slot) -> str:
    return f"/proc/{slot.fields.pid}/fd/{slot.fields.stacks}"
