"""The deadlines of a run: each reason to stop, the instant for the run itself, the instant for the kill.

The worker, the supervisor and the keeper compute the same list from the slot; the earliest deadline wins.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

from dataloader.config import Settings
from dataloader.farm.process import is_running, memory_used, now
from dataloader.farm.slots import Slot, State


class Reason(IntEnum):
    """Why a run has to stop, or why its process was killed; the number stands in the slot."""

    NONE = 0
    DRAIN = 1
    STALLED = 2
    FENCED = 3
    TIMEOUT = 4
    CANCELED = 5
    MEMORY = 6
    STUCK = 7


STACKS_SEC = 1.0  # from the instant at which a run is stuck to its end: the keeper reads its stacks
INTERRUPTS = (Reason.TIMEOUT, Reason.CANCELED)  # the supervisor interrupts a run that has no safe point


class Deadline(NamedTuple):
    """From `stop_at` on the run stops at its next safe point; after `kill_at` its process is killed.

    Both are monotonic seconds.
    """

    stop_at: float
    kill_at: float
    reason: Reason


def deadlines(slot: Slot, settings: Settings) -> list[Deadline]:
    """The deadlines of the slot's process, and of its run while there is one."""
    fields, grace_sec = slot.fields, settings.dl_kill_grace_sec
    found = []
    if fields.drain_by:
        found.append(Deadline(fields.drain_by - grace_sec, fields.drain_by, Reason.DRAIN))
    if fields.state != State.BUSY:
        return found
    found.append(Deadline(slot.fence_at, slot.ends_by, Reason.FENCED))
    # A stalled worker cannot stop by itself: the keeper renews its lease up to here.
    if settings.dl_stall_sec:
        found.append(Deadline(math.inf, fields.renewed + max(settings.dl_stall_sec, fields.stall_sec), Reason.STALLED))
    if fields.ends_stuck:
        found.append(Deadline(math.inf, slot.stuck_at + STACKS_SEC, Reason.STUCK))
    if fields.timeout_at:
        found.append(Deadline(fields.timeout_at, fields.timeout_at + grace_sec, Reason.TIMEOUT))
    if fields.canceled == fields.generation:
        found.append(Deadline(fields.cancel_at, fields.cancel_at + grace_sec, Reason.CANCELED))
    return found


def stop_reason(slot: Slot, settings: Settings) -> Reason | None:
    """Why the run has to stop now, by the earliest of its deadlines; None while it may go on."""
    at = now()
    passed = [deadline for deadline in deadlines(slot, settings) if deadline.stop_at < at]
    return min(passed).reason if passed else None


def kill_reason(slot: Slot, settings: Settings) -> Reason | None:
    """Why the process has to be killed now, by the earliest of its deadlines; None while it may live."""
    at = now()
    passed = [(deadline.kill_at, deadline.reason) for deadline in deadlines(slot, settings) if deadline.kill_at < at]
    # A stopped process is no danger to the next run before it goes on, and it may be in a debugger.
    killing = [reason for _, reason in sorted(passed) if reason is not Reason.FENCED or is_running(slot.fields.pid)]
    return killing[0] if killing else _memory_reason(slot)


def _memory_reason(slot: Slot) -> Reason | None:
    limit = slot.fields.memory_limit if slot.state is State.BUSY else 0
    used = memory_used(slot.fields.pid) if limit else 0
    if used <= limit:
        return None  # the last figure stays: a process that is being killed frees its memory before it is gone
    slot.fields.memory_used = used
    return Reason.MEMORY
