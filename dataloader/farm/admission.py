"""Admission: a run begins only while the host has room for it, beside what runs there. No SQL.

The worker asks before each claim which tasks have no room now, and enters a run's needs into the host's account before
it begins. Tasks without needs are always admitted, and a farm that has no others pays nothing.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from dataloader import periods
from dataloader.farm.host import MB, Host, Load, Room
from dataloader.farm.host_account import Book, Entry, HostAccount, NoAccount, Reservation
from dataloader.farm.process import memory_used, now
from dataloader.queue.lifecycle import LeftOut

MEASURED_SEC = 0.25  # how old a measurement may be
LOOK_SEC = (0.03, 0.08)  # between an idle worker's looks at the account; at random, so that one of many comes first
LEAST_SHARE = 0.5  # of the processors that a run needs, which the measured load leaves free
# After its last refresh a reservation is over: workers with a job that waits claim once a second.
RESERVED_SEC = periods.seconds("RESERVED_SEC", 5.0)


class Needs(NamedTuple):
    """What a run uses at most: MB of memory of its worker and that one's children, and processors; 0: do not ask."""

    memory_mb: float = 0.0
    cpus: float = 0.0


class Running(NamedTuple):
    """A run under way: what it needs, the memory that its processes use now, and the processors they kept busy."""

    needs: Needs
    used_mb: float
    used_cpus: float = 0.0


def fits(needs: Needs, own_mb: float, room: Room, runs: Sequence[Running], others_cpus: float = 0.0) -> bool:
    """PURE: whether the host has room for a run of these needs, in a worker that uses `own_mb` already.

    What the runs under way use is a part of the memory that is not free; what they are still to use counts besides.
    Others than these runs keep `others_cpus` processors busy.
    """
    if room.is_hot or needs.memory_mb > room.bound_mb:
        return False
    growth_mb = max(0.0, needs.memory_mb - own_mb)
    growing_mb = sum(max(0.0, run.needs.memory_mb - run.used_mb) for run in runs)
    has_memory = not needs.memory_mb or growth_mb + growing_mb <= room.free_mb
    return has_memory and (not needs.cpus or _has_processors(needs.cpus, room.cpus, runs, others_cpus))


def _has_processors(cpus: float, of_host: float, runs: Sequence[Running], others_cpus: float) -> bool:
    """PURE: whether the runs need no more processors than there are, and the load leaves half of what this one needs.

    Half, for a host is never quite idle: two runs of a processor each would never share two processors. With fewer
    than it needs a run is slow, and nothing kills it, so the first one begins in any case.
    """
    needed = sum(run.needs.cpus for run in runs)
    busy = others_cpus + sum(max(run.needs.cpus, run.used_cpus) for run in runs)
    return not needed or (cpus + needed <= of_host and cpus * LEAST_SHARE + busy <= of_host)


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


class Admission:
    """What one worker may begin."""

    def __init__(self, host: Host, account: HostAccount, reserve_sec: float, logger: Any) -> None:
        """`reserve_sec` is how long a job waits until room gathers for it; 0: for none does room gather."""
        self._host = host
        self._account = account
        self._log = logger
        self._patience = Patience(reserve_sec)
        self._needs: Mapping[str, Needs] = {}
        self._room = Room()
        self._used_mb: dict[int, float] = {}  # by process, at the latest measurement
        self._load = Load({}, 0.0)
        self._measured_at = -MEASURED_SEC
        self._has_entry = False  # as far as this process could write
        self._is_away = False  # the account could not be read
        self._left_out: frozenset[str] = frozenset()  # the tasks without room at the latest claim that passed jobs over

    def know(self, needs: Mapping[str, Needs]) -> None:
        """The needs of all tasks that have some, from now on."""
        self._needs = needs if self._host.bounds_something else {}

    def without(self) -> Collection[str]:
        """The tasks that the next claim should pass over, for the host has no room for them now."""
        if not (self._needs or self._has_entry):
            return ()
        oldest_sec = 0.0 if self._account.has_changed() else MEASURED_SEC  # room that a run has left is there at once
        if (book := self._changed(lambda _: None)) is None:
            return list(self._needs)
        self._measure(book, oldest_sec)
        return [task for task, needs in self._needs.items() if not self._has_room(task, needs, book)]

    def passed(self, left_out: LeftOut | None, without: Collection[str]) -> None:
        """The worker tells what its claim has passed over, for these tasks had no room.

        For a job that was passed over for long enough the host lets room gather.
        """
        self._patience.passed(left_out)
        self._left_out = frozenset(without if left_out else ())
        if self._patience.over:  # as of now: at the next claim another worker may have begun that job
            self._changed(self._reserve)

    @property
    def look_in(self) -> float:
        """In how many seconds an idle worker should ask whether it `has_gained_room`; infinity where none waits for it.

        Nobody notifies of room, and a claim in vain costs more than a look.
        """
        return random.uniform(*LOOK_SEC) if self._left_out else math.inf  # noqa: S311  jitter

    def has_gained_room(self) -> bool:
        """Whether a task that the latest claim has passed over has room by now, for the account has changed."""
        return bool(self._left_out) and self._account.has_changed() and not self._left_out <= {*self.without()}

    def enter(self, task: str) -> bool:
        """Claim the room that a run of this task needs; False when there is none any more."""
        if (needs := self._needs.get(task)) is None:
            return True
        if (book := self._changed(lambda _: None)) is None:
            return False
        self._measure(book, 0.0)
        self._changed(partial(self._enter, task, needs))
        return self._has_entry

    def leave(self) -> None:
        """The run is over; its room is free for others."""
        if self._has_entry:
            self._changed(lambda _: None)

    def _enter(self, task: str, needs: Needs, book: Book) -> None:
        if self._has_room(task, needs, book):
            book.entries.append(self._account.entry(task, *needs))
            if book.reservation and book.reservation.task == task:
                book.reservation = None
            self._has_entry = True

    def _reserve(self, book: Book) -> None:
        """Let room gather for the job that has been passed over for too long, unless another reservation stands."""
        task = self._patience.over
        needs = self._needs.get(task or "")
        if task is None or needs is None or needs.memory_mb > self._room.bound_mb:
            return
        if book.reservation is None:
            self._log.info("worker.room.reserved", task=task, **needs._asdict())
        if book.reservation is None or book.reservation.task == task:
            book.reservation = Reservation(task, *needs, now() + RESERVED_SEC)

    def _changed(self, change: Callable[[Book], None]) -> Book | None:
        """The book after a change, without this worker's former entry; None when the account cannot be used."""
        had_entry = self._has_entry
        try:
            with self._account.opened() as book:
                book.entries = [each for each in book.entries if each.pid != os.getpid()]
                self._has_entry = False
                change(book)
        except NoAccount as e:
            if not self._is_away:
                self._log.error("worker.account.failed", error=str(e))
            self._is_away, self._has_entry = True, had_entry
            return None
        self._is_away = False
        return book

    def _measure(self, book: Book, oldest_sec: float) -> None:
        """What the runs in the book use, and then what is free: what they take meanwhile counts rather twice."""
        if now() < self._measured_at + oldest_sec:
            return
        workers = (os.getpid(), *(each.pid for each in book.entries))
        self._used_mb = {pid: memory_used(pid) / MB for pid in workers}
        self._room = self._host.room(sum(self._used_mb.values()))
        self._load = self._host.load(workers)
        self._measured_at = now()

    def _has_room(self, task: str, needs: Needs, book: Book) -> bool:
        runs = [*map(self._running, book.entries)]
        reserved = book.reservation
        if reserved and reserved.task != task:
            runs.append(Running(Needs(reserved.memory_mb, reserved.cpus), 0.0))
        return fits(needs, self._used_mb[os.getpid()], self._room, runs, self._load.others)

    def _running(self, entry: Entry) -> Running:
        used_cpus = self._load.of_workers.get(entry.pid, 0.0)
        return Running(Needs(entry.memory_mb, entry.cpus), self._used_mb.get(entry.pid, 0.0), used_cpus)


def needs_of(
    declared: Mapping[str, tuple[float | None, float | None]], learned: Mapping[str, tuple[float, float]]
) -> dict[str, Needs]:
    """PURE: the needs of all tasks that have some. What a pipeline declares wins over what its runs have shown."""
    found = {}
    for task in {*declared, *learned}:
        of_runs = learned.get(task, (0.0, 0.0))
        said = declared.get(task, (None, None))
        needs = Needs(*(shown if word is None else word for word, shown in zip(said, of_runs, strict=True)))
        if any(needs):
            found[task] = needs
    return found
