"""The lease of one run: its deadlines, its progress, and how it has to end.

Each deadline has a reason, the instant at which the run stops by itself, and the instant of the kill. The worker, the
supervisor and the keeper compute the same list from the slot; the earliest deadline wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from dataloader.config import Settings
from dataloader.farm.process import is_running, memory_used, now
from dataloader.farm.slots import Slot, State
from dataloader.queue.job import Checkpoint, Delivery, End


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
    grace_sec = settings.dl_kill_grace_sec
    found = []
    if slot.drain_by:
        found.append(Deadline(slot.drain_by - grace_sec, slot.drain_by, Reason.DRAIN))
    if slot.state != State.BUSY:
        return found
    found.append(Deadline(slot.fence_at, slot.ends_by, Reason.FENCED))
    # A stalled worker cannot stop by itself: the keeper renews its lease up to here.
    if settings.dl_stall_sec:
        found.append(Deadline(math.inf, slot.renewed + max(settings.dl_stall_sec, slot.stall_sec), Reason.STALLED))
    if slot.ends_stuck:
        found.append(Deadline(math.inf, slot.stuck_at + STACKS_SEC, Reason.STUCK))
    if slot.timeout_at:
        found.append(Deadline(slot.timeout_at, slot.timeout_at + grace_sec, Reason.TIMEOUT))
    if slot.canceled == slot.generation:
        found.append(Deadline(slot.cancel_at, slot.cancel_at + grace_sec, Reason.CANCELED))
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
    killing = [reason for _, reason in sorted(passed) if reason is not Reason.FENCED or is_running(slot.pid)]
    return killing[0] if killing else _memory_reason(slot)


def _memory_reason(slot: Slot) -> Reason | None:
    limit = slot.memory_limit if slot.state == State.BUSY else 0
    used = memory_used(slot.pid) if limit else 0
    if used <= limit:
        return None  # the last figure stays: a process that is being killed frees its memory before it is gone
    slot.memory_used = used
    return Reason.MEMORY


LOOK_SEC = 0.005

_ENDS = {
    Reason.DRAIN: (End.HANDED_BACK, "drain"),
    Reason.FENCED: (End.HANDED_BACK, "the lease ran out"),
    Reason.CANCELED: (End.CANCELED, "canceled by force"),
}


class Lease:
    """One run's hold on its jobs, shared by the pipeline's thread and the heartbeat."""

    def __init__(
        self,
        delivery: Delivery,
        slot: Slot,
        settings: Settings,
        wake: Callable[[], None],
        is_watched: Callable[[], bool],
    ) -> None:
        """`wake` wakes the heartbeat; `is_watched` tells whether the heartbeat is alive."""
        self.delivery = delivery
        self.job = delivery.first
        self.slot = slot
        self.began = now()
        self.released = False  # the run is over
        self.reported: dict[str, Any] | None = None  # the latest progress
        self.progress: dict[str, Any] | None = None  # the same while it is not written
        self.progress_at = 0.0  # when progress and checkpoints may be written again
        self.checkpoint: Checkpoint | None = None  # the latest
        self.written: Checkpoint | None = None  # the latest one in the queue
        self.confirmed: Checkpoint | None = None  # the latest one in the queue behind which the claim still held
        self.stop: End | None = None
        self.reason: str | None = None
        self._settings = settings
        self._wake = wake
        self._is_watched = is_watched
        self._timeout_sec: float | None = None
        self._limited = "the run"
        self._look_at = self.began + LOOK_SEC

    def limit(self, timeout_sec: float | None, max_memory_mb: float | None, what: str = "the run") -> None:
        """`what` begins now, and may take so many seconds and megabytes; None: any."""
        self._timeout_sec, self._limited = timeout_sec, what
        self.slot.timeout_at = now() + timeout_sec if timeout_sec else 0.0
        if max_memory_mb:
            self.slot.memory_limit = int(max_memory_mb * 2**20)

    def watch(self, stall_sec: float | None, ends_stuck: bool) -> None:
        """The run is stuck once it has reported nothing for so long; None: for DL_STALL_SEC."""
        self.slot.reported_at, self.slot.ends_stuck = now(), ends_stuck
        self.slot.stall_sec = self._settings.dl_stall_sec if stall_sec is None else stall_sec

    def renewed(self, sent: float) -> None:
        """The database confirmed a renewal that was sent at this instant."""
        self.slot.renewed = sent

    def end(self, how: End, reason: str | None) -> None:
        """The run has to stop at its next safe point; a lost claim outweighs a cancellation."""
        if self.stop is None or self.stop is End.CANCELED or how is End.GONE:
            self.stop, self.reason = how, reason

    def give_up(self, how: End, reason: str, within: float | None = None) -> None:
        """The claim is lost: the run stops, or its process is killed `within` seconds (by default with the lease)."""
        self.end(how, reason)
        self.slot.give_up(self.slot.ends_by if within is None else min(self.slot.ends_by, now() + within))

    @property
    def goes_on(self) -> bool:
        """True while the claim holds and no deadline has passed; a requested cancellation changes neither."""
        return self.stop in (None, End.CANCELED)

    def must_stop(self) -> bool:
        """Whether the run has to stop; a safe point, so the run is not stuck.

        Every `yield` asks, so this looks at the deadlines every LOOK_SEC at most.
        """
        if (at := now()) < self._look_at:
            return self.stop is not None
        self.slot.reported_at = at
        return self.must_stop_now()

    def must_stop_now(self) -> bool:
        """The same, by a look at the deadlines: before a commit, and when the supervisor interrupts the run."""
        self._look_at = now() + LOOK_SEC
        if self.stop is None and self.slot.asked == self.slot.generation:
            self.end(End.CANCELED, None)
        if self.goes_on and (reason := stop_reason(self.slot, self._settings)):
            self._pass(reason)
        if self.goes_on and not self._is_watched():
            self.give_up(End.HANDED_BACK, "the heartbeat is dead")
        return self.stop is not None

    def _pass(self, reason: Reason) -> None:
        if reason is Reason.TIMEOUT:
            self.end(End.TIMEOUT, f"timeout: {self._limited} took more than {self._timeout_sec:g} s")
        elif reason is Reason.FENCED:
            self.give_up(*_ENDS[reason])
        else:
            self.end(*_ENDS[reason])

    def report(self, progress: dict[str, Any]) -> None:
        """Keep progress for the next write; copied, because the pipeline may go on changing it."""
        is_first = not self.has_news
        self.reported = self.progress = dict(progress)
        if is_first:
            self._wake()

    def save(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint for the next write."""
        is_first = not self.has_news
        self.checkpoint = checkpoint
        if is_first:
            self._wake()

    @property
    def is_saved(self) -> bool:
        """Whether the latest checkpoint is in the queue: the next run gets it, however this one ends."""
        return self.checkpoint is self.confirmed

    @property
    def stop_for_others(self) -> End | None:
        """How the run has to end, as far as work elsewhere is concerned: GONE once the lease is over.

        Whatever has ended the run before, the next one may have begun by then, and such work may be its own.
        """
        return End.GONE if self.stop is not None and now() >= self.slot.fence_at else self.stop

    @property
    def has_news(self) -> bool:
        """Whether there is progress or a checkpoint that is not written."""
        return self.progress is not None or self.checkpoint is not self.written
