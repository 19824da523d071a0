"""Admission: a run begins only while the host has room for it, beside what runs there. No SQL.

The worker asks before each claim which tasks have no room now, and enters a run's needs into its slot before it begins.
Two workers enter one after the other, so they do not both take the last room. Tasks without needs are always admitted,
and a farm that has no others pays nothing. Another farm of the host counts by what it uses, as any other program.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from dataloader import periods
from dataloader.farm.common_log import Busy
from dataloader.farm.host import MB, Host, Load, Room
from dataloader.farm.process import memory_used, now
from dataloader.farm.slots import NONE, Needs, SharedSlots, Slot
from dataloader.queue.lifecycle import LeftOut

MEASURED_SEC = 0.25  # how old a measurement may be
LOOK_SEC = (0.03, 0.08)  # between an idle worker's looks at the slots; at random, so that one of many comes first
LEAST_SHARE = 0.5  # of the processors that a run needs, which the measured load leaves free
# After its last refresh a reservation is over: workers with a job that waits claim once a second.
CLOSED_SEC = 1.0  # until the next try, where a stopped process is about to enter a run
RESERVED_SEC = periods.seconds("RESERVED_SEC", 5.0)


class Running(NamedTuple):
    """A run under way: what it needs, the memory that its processes use now, and the processors they kept busy."""

    needs: Needs
    used_mb: float
    used_cpus: float = 0.0


def fits(needs: Needs, own_mb: float, room: Room, runs: Sequence[Running], others_cpus: float = 0.0) -> bool:
    """PURE: whether the host has room for a run of these needs, in a worker that uses `own_mb` already.

    What the runs under way use is a part of the memory that is not free; what they are still to use counts besides.
    Others than these runs keep `others_cpus` processors busy. The runs may need no more processors than there are, and
    the load has to leave half of what this one needs. Half, for a host is never quite idle: two runs of a processor
    each would never share two processors. With fewer than it needs a run is slow, and nothing kills it, so the first
    one begins in any case.
    """
    if room.is_hot or needs.memory_mb > room.bound_mb:
        return False
    growth_mb = max(0.0, needs.memory_mb - own_mb)
    growing_mb = sum(max(0.0, run.needs.memory_mb - run.used_mb) for run in runs)
    has_memory = not needs.memory_mb or growth_mb + growing_mb <= room.free_mb
    if not (has_memory and needs.cpus):
        return has_memory
    needed = sum(run.needs.cpus for run in runs)
    busy = others_cpus + sum(max(run.needs.cpus, run.used_cpus) for run in runs)
    return not needed or (needs.cpus + needed <= room.cpus and needs.cpus * LEAST_SHARE + busy <= room.cpus)


class Patience:
    """Since when the claims of a worker have passed over the job that is the first of its queue without room."""

    def __init__(self, reserve_sec: float) -> None:
        self._reserve_sec = reserve_sec
        self._first: LeftOut | None = None
        self._since = 0.0

    def passed(self, left_out: LeftOut | None) -> None:
        """What the latest claim has passed over; another job than before begins anew."""
        if left_out != self._first:
            self._first, self._since = left_out, now()

    @property
    def over(self) -> str | None:
        """The task of the job that has been passed over for DL_RESERVE_SEC; None without one."""
        is_over = self._first and self._reserve_sec and now() >= self._since + self._reserve_sec
        return self._first.task if self._first and is_over else None


class Reservation(NamedTuple):
    """The needs of a job that waits while room gathers for it, until a monotonic instant."""

    task: str
    needs: Needs
    until: float


class Admission:
    """What one worker may begin, beside the runs of its farm and whatever else the host does."""

    def __init__(self, host: Host, shared: SharedSlots, slot: Slot, reserve_sec: float, logger: Any) -> None:
        """`reserve_sec` is how long a job waits until room gathers for it; 0: for none does room gather."""
        self._host = host
        self._shared = shared
        self._slot = slot
        self._log = logger
        self._patience = Patience(reserve_sec)
        self._needs: Mapping[str, Needs] = {}
        self._room = Room()
        self._used_mb: dict[int, float] = {}  # by process, at the latest measurement
        self._load = Load({}, 0.0)
        self._measured_at = -MEASURED_SEC
        self._seen: tuple[object, ...] = ()  # the runs and the reservation at the latest look
        self._closed_until = 0.0  # a process is stopped that was about to enter a run
        self._left_out: frozenset[str] = frozenset()  # the tasks without room at the latest claim that passed jobs over

    def know(self, needs: Mapping[str, Needs]) -> None:
        """The needs of all tasks that have some, from now on."""
        self._needs = needs if self._host.bounds_something else {}

    def without(self) -> Collection[str]:
        """The tasks that the next claim should pass over, for the host has no room for them now."""
        if not self._needs:
            return ()
        if now() < self._closed_until:
            return list(self._needs)
        oldest_sec = 0.0 if self._state() != self._seen else MEASURED_SEC  # room that a run has left is there at once
        self._measure(oldest_sec)
        self._seen, reserved = self._state(), _standing(self._shared.room.read())
        return [task for task, needs in self._needs.items() if not self._has_room(task, needs, reserved)]

    def passed(self, left_out: LeftOut | None, without: Collection[str]) -> None:
        """The worker reports the job that its claim has passed over, because these tasks had no room.

        For a job that was passed over for long enough the host lets room gather.
        """
        self._patience.passed(left_out)
        self._left_out = frozenset(without if left_out else ())
        task = self._patience.over  # as of now: at the next claim another worker may have begun that job
        needs = self._needs.get(task) if task else None
        if task is None or needs is None or needs.memory_mb > self._room.bound_mb:
            return
        with suppress(Busy), self._shared.room.changed(must=True) as note:
            reserved = _standing(note)
            if reserved is None:
                self._log.info("worker.room.reserved", task=task, **needs._asdict())
            if reserved is None or reserved.task == task:  # else another job's stands
                note.update(task=task, needs=needs, until=now() + RESERVED_SEC)

    @property
    def look_in(self) -> float:
        """In how many seconds an idle worker should ask whether it `has_gained_room`; infinity where none waits for it.

        Nobody notifies of room, and a claim in vain costs more than a look.
        """
        return random.uniform(*LOOK_SEC) if self._left_out else math.inf  # noqa: S311  jitter

    def has_gained_room(self) -> bool:
        """Whether a task that the latest claim has passed over has room by now, because a run has ended."""
        return bool(self._left_out) and self._state() != self._seen and not self._left_out <= {*self.without()}

    def enter(self, task: str) -> bool:
        """Claim the room that a run of this task needs; False when there is none any more."""
        if (needs := self._needs.get(task)) is None:
            return True
        try:
            with self._shared.room.changed(must=True) as note:
                self._measure(0.0)
                reserved = _standing(note)
                if not self._has_room(task, needs, reserved):
                    return False
                self._slot.needs = needs
                if reserved and reserved.task == task:
                    note.clear()
        except Busy:
            self._closed_until = now() + CLOSED_SEC
            return False
        return True

    def leave(self) -> None:
        """The run is over; its room is free for others."""
        self._slot.needs = NONE

    def _others(self) -> list[Slot]:
        """The slots of the other workers whose runs have room."""
        return [slot for slot in self._shared.working() if slot.needs != NONE and slot is not self._slot]

    def _state(self) -> tuple[object, ...]:
        """The runs with room, and whose reservation stands."""
        reserved = _standing(self._shared.room.read())
        return *((slot.index, slot.needs) for slot in self._others()), reserved and reserved.task

    def _measure(self, oldest_sec: float) -> None:
        """What the runs use, and then what is free: what they take meanwhile counts rather twice."""
        if now() < self._measured_at + oldest_sec:
            return
        workers = (os.getpid(), *(slot.pid for slot in self._others()))
        self._used_mb = {pid: memory_used(pid) / MB for pid in workers}
        self._room = self._host.room(sum(self._used_mb.values()))
        self._load = self._host.load(workers)
        self._measured_at = now()

    def _has_room(self, task: str, needs: Needs, reserved: Reservation | None) -> bool:
        used_mb, load = self._used_mb, self._load
        pids = [(slot.needs, slot.pid) for slot in self._others()]
        runs = [Running(of_run, used_mb.get(pid, 0.0), load.of_workers.get(pid, 0.0)) for of_run, pid in pids]
        if reserved and reserved.task != task:
            runs.append(Running(reserved.needs, 0.0))
        return fits(needs, used_mb[os.getpid()], self._room, runs, load.others)


def _standing(note: Mapping[str, Any]) -> Reservation | None:
    """The reservation that the note holds, unless it is over."""
    if now() > note.get("until", 0.0):
        return None
    return Reservation(note["task"], Needs(*note["needs"]), note["until"])


def needs_of(
    declared: Mapping[str, tuple[float | None, float | None]], learned: Mapping[str, tuple[float, float]]
) -> dict[str, Needs]:
    """PURE: the needs of all tasks that have some. What a pipeline declares wins over what its runs have shown."""
    by_task = {}
    for task in {*declared, *learned}:
        of_runs = learned.get(task, (0.0, 0.0))
        own = declared.get(task, (None, None))
        needs = Needs(*(shown if word is None else word for word, shown in zip(own, of_runs, strict=True)))
        if any(needs):
            by_task[task] = needs
    return by_task
