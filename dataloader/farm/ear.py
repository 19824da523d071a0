"""PURE but for bells and a look at processes: which idle workers of a farm are woken for a notification.

The keeper hears notifications for all of them. While it cannot, the supervisor calls each second.

Workers of a *kin* serve the same queues with the same settings. Of a kin one worker is woken at once, and further ones
as the woken find jobs. A claim that was sent after the notification came, and found no job, ends the call: it has seen
every row for which the notification was sent. The keeper relies on no single worker: in place of a stopped one it wakes
another soon, and one more each second in which no answer comes. More would do harm: claims of many workers for one job
collide, and a crowd of them makes the server so slow that no answer comes.

For the same reason the farms of a fleet do not all begin at the same instant (`_spread_sec`). The keeper looks first
what other farms have left, and has no more workers at a claim than the farm's share of these jobs. A farm alone wakes
its first worker without a look, and looks before the next ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from dataloader.farm.process import is_running, now
from dataloader.farm.slots import SharedSlots, Slot, State
from dataloader.queue.lifecycle import Look

POLL_SEC = 0.002  # between two checks of what the woken workers have found
CHECK_SEC = 0.02  # between two checks whether the woken workers are stopped, or dead
CLAIM_SEC = 0.001  # that a claim takes, until claims have shown it
NEAR_SEC = 0.25  # for so long the answer to a claim is near, on a slow server longer
AT_ONCE = 8  # claims of one farm for one call; more would collide
SPREAD_MOST = 1.0  # within which the farms of a fleet begin
ANSWER_SEC = 1.0  # of a worker that is neither; its session may be gone, and it does not know
Kin = tuple[int, int]


class Seen(NamedTuple):
    """When the queues of a kin were looked at, and when their next row is due by that look."""

    looked_at: float
    due_at: float


def _any_number(_: list[str], most: int) -> Look:
    """Where the database cannot be asked."""
    return Look(most, None)


@dataclass(slots=True)
class Call:
    """Something may be claimable since `at`; the first worker is to be woken at `begins_at`."""

    at: float
    begins_at: float
    looks: bool  # whether the keeper looks before it wakes the first worker
    answers: tuple[float, int]
    answered_at: float = 0.0
    checked_at: float = 0.0
    stopped: int = 0
    silent: int = 0
    woken: dict[Slot, int] = field(default_factory=dict)  # with the runs that the worker had begun before

    def missing(self, answers: tuple[float, int]) -> int:
        """How many more should have been woken by now, for twice as many as have found jobs, or one where none has."""
        if now() < self.begins_at:
            return 0
        if answers != self.answers or not self.answered_at:
            self.answers, self.answered_at = answers, now()
        if now() > self.checked_at + CHECK_SEC:
            self.checked_at = now()
            self.stopped = sum(slot.state is not State.BUSY and not is_running(slot.fields.pid) for slot in self.woken)
        self.silent = int((now() - self.answered_at) / ANSWER_SEC)
        called = [slot for slot in self.woken if slot.fields.called_at >= self.at]
        found = sum(slot.runs > self.woken[slot] for slot in called)
        return max(1, 2 * found) + self.stopped + self.silent - len(called)


class Ear:
    """The calls under way in one farm, and when its kins' next rows are due."""

    def __init__(self, shared: SharedSlots, look: Callable[[list[str], int], Look] = _any_number) -> None:
        self._shared = shared
        self._look = look
        self._farms: Mapping[str, int] = {}
        self._claim_sec = CLAIM_SEC  # how long claims have taken lately
        self._learnt_at = 0.0
        self._calls: dict[Kin, Call] = {}
        self._seen: dict[Kin, Seen] = {}
        self._rung_for: dict[Kin, float] = {}  # the latest due time that was called out

    def beside(self, farms: Mapping[str, int]) -> None:
        """So many farms have idle workers for each queue, this one among them: they do not all claim at once."""
        self._farms = farms

    def _learn(self, slots: list[Slot]) -> None:
        """Learn from the latest claim how long claims take."""
        latest = max(slots, key=lambda slot: float(slot.fields.answered_at)).fields
        if latest.answered_at > self._learnt_at:
            self._learnt_at = latest.answered_at
            self._claim_sec += (latest.took - self._claim_sec) / 4

    def _spread_sec(self, slots: list[Slot]) -> float:
        """Within which time the farms begin for one notification: one after the other, as long as claims take now."""
        return min(SPREAD_MOST, 2 * self._claim_sec * self._others(slots))

    def _others(self, slots: list[Slot]) -> int:
        """How many other farms may have idle workers for these queues."""
        return max(0, max(self._farms.get(queue, 0) for queue in slots[0].queues) - 1)

    def told(self, queues: Collection[str] | None) -> None:
        """These queues may have jobs that are claimable, or earlier due; None: all queues may."""
        at = now()
        for kin, slots in _by_kin(self._shared.working()):
            if queues is None or any(queue in queues for queue in slots[0].queues):
                self._call(kin, at, slots)

    def _call(self, kin: Kin, at: float, slots: list[Slot]) -> None:
        """Begin a call, also where one is under way: the workers that it has woken may have looked before."""
        if call := self._calls.get(kin):
            call.at = at
        else:
            self._learn(slots)
            spread_sec = self._spread_sec(slots)
            begins_at = at + random.uniform(0, spread_sec)  # noqa: S311  jitter
            self._calls[kin] = Call(at, begins_at, spread_sec > 0, _answers(slots))

    def go_on(self) -> float:
        """Wake the workers whose turn it is; in how many seconds to call this again."""
        until = math.inf
        for kin, slots in _by_kin(self._shared.working()):
            until = min(until, self._due_in(kin, slots))
            if (call := self._calls.get(kin)) and self._is_over(kin, call, slots):
                del self._calls[kin]
                until = min(until, self._due_in(kin, slots))
            elif call:
                begins_in = call.begins_at - now()
                until = min(until, begins_in if begins_in > 0 else POLL_SEC)
        return until

    def _is_over(self, kin: Kin, call: Call, slots: list[Slot]) -> bool:
        """Wake the next ones; True once a claim since the call has found no job, or all have been woken.

        A busy worker claims after its run. One at a claim may have sent it before the call: it is woken as well.
        """
        if any(slot.fields.looked_at >= call.at for slot in slots):
            return True
        others = [slot for slot in slots if slot.state is not State.BUSY and slot.fields.called_at < call.at]
        others.sort(key=self._is_at_claim, reverse=True)  # to claim once more costs less than to wake
        missing = call.missing(_answers(slots))
        if missing > 0 and others and (call.looks or call.woken):
            if not (share := self._share(kin, slots)):
                return True
            room = share - sum(map(self._is_at_claim, slots))
            missing = min(missing, room + call.stopped + call.silent)
        for slot in others[: max(0, missing)]:
            slot.call(call.at)
            call.woken[slot] = slot.runs
        return len(others) == 0

    def _is_at_claim(self, slot: Slot) -> bool:
        """Whether the worker's next answer is near. It is awake, too, while a lock of others keeps it from an end."""
        return slot.state is State.AWAKE and now() < slot.fields.sent_at + max(NEAR_SEC, 8 * self._claim_sec)

    def _share(self, kin: Kin, slots: list[Slot]) -> int:
        """Look how many jobs there are for each of the farms that have idle workers; 0: there is none."""
        sent, farms = now(), self._others(slots) + 1
        look = self._look(slots[0].queues, farms * AT_ONCE)
        if not look.ready:
            self._seen[kin] = Seen(sent, math.inf if look.due_in is None else now() + look.due_in)
        return math.ceil(look.ready / farms)

    def _due_in(self, kin: Kin, slots: list[Slot]) -> float:
        """In how many seconds the kin's next row is due, by its latest look; calls once when the row is due."""
        latest = max(slots, key=lambda slot: float(slot.fields.looked_at)).fields
        by_claim = Seen(latest.looked_at, latest.due_at)
        looked_at, due_at = max(by_claim, self._seen.get(kin, by_claim))
        if looked_at == 0 or self._rung_for.get(kin) == due_at:
            return math.inf
        if now() > due_at + POLL_SEC:  # a worker that knows the time wakes by itself
            self._rung_for[kin] = due_at
            self._call(kin, now(), slots)
        return max(0.0, due_at + 2 * POLL_SEC - now())


def _answers(slots: list[Slot]) -> tuple[float, int]:
    """What changes with each claim of these workers that finds jobs, or none."""
    return max(float(slot.fields.looked_at) for slot in slots), sum(slot.runs for slot in slots)


def _by_kin(slots: Iterable[Slot]) -> list[tuple[Kin, list[Slot]]]:
    def kin(slot: Slot) -> Kin:
        return (slot.fields.kind, slot.fields.reload)

    return [(each, list(group)) for each, group in groupby(sorted(slots, key=kin), kin)]
