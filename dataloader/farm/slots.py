"""The shared memory between a supervisor, its workers and its keeper: a slot for each worker.

The worker writes its run and the last confirmed renewal; the keeper writes renewals and cancellations for the worker;
the supervisor writes orders and the process's death. No SQL.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import resource
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from typing import NamedTuple
from uuid import UUID

from setproctitle import setproctitle

from dataloader.config import QUEUES_MOST
from dataloader.farm.common_log import Note, Once, Told
from dataloader.farm.process import Bell, now


class State(IntEnum):
    """The phase of the slot's process."""

    FREE = 0
    STARTING = 1
    RESTING = 2  # ready, and claims nothing before another order
    AWAKE = 3  # claims or writes ends
    IDLE = 4  # waits for a notification
    BUSY = 5  # runs the job that the slot shows
    LEAVING = 6  # about to exit, for its successor
    DEAD = 7  # reaped; the keeper recovers its jobs


SLOTS_LEAST = 256  # the shared memory cannot grow when a reload wishes for more workers
FILES_OF_A_WORKER = 4  # in the supervisor or the keeper: its output, its stacks
FILES_OF_ANY = 96  # sockets, logs, libraries, pipes
JOBS_MOST = 2_000  # of one claim: 1,000, or more where the last key of a merged queue has many
WARM_MOST = 8_192  # bytes of the affinity keys that a slot shows
TOOK_LONGER = "not started: another job took longer"
_WORKING = frozenset({State.AWAKE, State.IDLE, State.BUSY})


class Needs(NamedTuple):
    """What a run uses at most: MB of memory of its worker and that one's children, and processors; 0: do not ask."""

    memory_mb: float = 0.0
    cpus: float = 0.0


NONE = Needs()


class Order(IntEnum):
    """The supervisor's order to a worker."""

    WAIT = 0  # finish the run, then claim nothing
    WORK = 1
    LEAVE = 2  # exit; only a worker that rests gets this order


class _Fields(ctypes.Structure):
    _fields_ = (
        ("generation", ctypes.c_uint64),  # odd while the worker changes the claim below
        ("place", ctypes.c_int32),  # of the run's first job in `jobs`
        ("count", ctypes.c_int32),  # of the run's jobs
        ("runs", ctypes.c_int64),  # begun since the process's start
        ("claimed", ctypes.c_int32),  # how many of `jobs` there are
        ("lease_ttl", ctypes.c_double),
        ("renewed", ctypes.c_double),  # when the last confirmed renewal was sent, by the worker
        ("kept", ctypes.c_double),  # the same, by the keeper
        ("drain_by", ctypes.c_double),  # when a draining process must be over; 0: it does not drain
        ("fence_by", ctypes.c_double),  # when a run that has lost its claim must be over; 0: it has its claim
        ("timeout_at", ctypes.c_double),  # when the run has to stop for its timeout; 0: no timeout
        ("cancel_at", ctypes.c_double),  # when the run has to stop for a cancellation, by the keeper; 0: none
        ("canceled", ctypes.c_uint64),  # the generation of the run that cancel_at is for
        ("asked", ctypes.c_uint64),  # the generation of the run whose cancellation the keeper has heard of
        ("recalled", ctypes.c_uint64),  # the generation of the run behind which the worker begins no other job
        ("reported_at", ctypes.c_double),  # when the run came to its latest safe point
        ("stall_sec", ctypes.c_double),  # after such a silence of the run it is stuck; 0: never
        ("ends_stuck", ctypes.c_bool),  # whether a stuck run is ended
        ("stacks", ctypes.c_int32),  # the descriptor in the worker to which it dumps its stacks at SIGTTIN
        ("logs", ctypes.c_bool),  # whether the worker's latest run has a log
        ("log_files", ctypes.c_int32 * 2),  # the descriptors in the worker of its output; 0: there is none
        ("log_places", ctypes.c_int64 * 2),  # up to where the run's output is in the database
        ("log_line", ctypes.c_int32),  # the number of the last line there
        ("memory_limit", ctypes.c_uint64),  # bytes that the run's processes may use together; 0: no limit
        ("memory_used", ctypes.c_uint64),  # bytes that they used at the latest look
        ("cpu_before", ctypes.c_double),  # CPU seconds that the worker had used when the run began
        ("cpu", ctypes.c_double),  # the same at its death
        ("peak_memory", ctypes.c_uint64),  # the most memory that it ever used, in bytes
        ("ahead", ctypes.c_int32),  # how many jobs wait behind the run that the keeper may hand back
        ("need_mb", ctypes.c_double),  # of memory, that the run may use; 0: it was not asked
        ("need_cpus", ctypes.c_double),
        ("why", ctypes.c_int32),
        ("state", ctypes.c_int32),
        ("pid", ctypes.c_int32),
        ("kind", ctypes.c_int32),  # the supervisor's number for workers that serve the same queues
        ("reload", ctypes.c_int32),  # the generation of settings that the process was started with
        ("order", ctypes.c_int32),  # by the supervisor
        ("looked_at", ctypes.c_double),  # when the worker sent its last claim that found no job
        ("due_at", ctypes.c_double),  # when the next row is due, by that claim's answer; written before looked_at
        ("exit_status", ctypes.c_int32),
        ("worker", ctypes.c_char * 200),
        ("starts", ctypes.c_char * 200),  # what of the user's the worker calls at its start: "import of my_pipelines"
        ("session", ctypes.c_char * 64),  # the pid and the start of its backend in PostgreSQL
        ("warm", ctypes.c_char * WARM_MOST),  # the affinity keys of the worker's resources, as JSON
        ("jobs", ctypes.c_char * (16 * JOBS_MOST)),  # the ids of the worker's last claim, in its order
        ("attempts", ctypes.c_int32 * JOBS_MOST),
        ("queues", ctypes.c_char * (QUEUES_MOST * 513)),  # names of 128 characters, a line each
    )


@dataclass(frozen=True, slots=True)
class Held:
    """The run that a slot shows, and when its lease was last renewed (monotonic seconds)."""

    job_ids: list[UUID]
    attempts: list[int]
    lease_ttl: float
    renewed: float
    generation: int

    @property
    def job_id(self) -> UUID:
        """The job that stands for the run."""
        return self.job_ids[0]


class Slot:
    """One worker's part of the shared memory."""

    def __init__(self, index: int, fields: _Fields) -> None:
        self.index = index
        self.fields = fields
        self._jobs = memoryview((ctypes.c_char * (16 * JOBS_MOST)).from_buffer(fields, _Fields.jobs.offset)).cast("B")
        self._attempts = (
            memoryview((ctypes.c_int32 * JOBS_MOST).from_buffer(fields, _Fields.attempts.offset)).cast("B").cast("i")
        )

    @property
    def state(self) -> State:
        return State(self.fields.state)

    @state.setter
    def state(self, state: State) -> None:
        self.fields.state = state

    @property
    def worker(self) -> str:
        """The identity that the worker writes to claimed_by."""
        return bytes(self.fields.worker).decode()

    @property
    def order(self) -> Order:
        """The supervisor's latest order."""
        return Order(self.fields.order)

    @order.setter
    def order(self, order: Order) -> None:
        self.fields.order = order

    @property
    def works(self) -> bool:
        """True while the worker may be at a claim, a run or an end."""
        return self.state in _WORKING

    @property
    def is_ready(self) -> bool:
        """True while the worker has a session and need not leave."""
        return self.order is not Order.LEAVE and (self.works or self.state is State.RESTING)

    @property
    def rests(self) -> bool:
        """True when the worker claims nothing until its order changes: it has shown RESTING since it got WAIT."""
        return self.order is Order.WAIT and self.state is State.RESTING

    def take(self, kind: int, reload: int = 0) -> None:
        """For a process about to be forked, with the numbers of its kind and of its settings; its order is WAIT."""
        ctypes.memset(ctypes.addressof(self.fields), 0, _Fields.jobs.offset)  # the rest counts as far as `claimed`
        self.fields.kind = kind
        self.fields.reload = reload
        self.fields.state = State.STARTING

    @property
    def session(self) -> tuple[int, datetime] | None:
        """Pid and start of the worker's latest backend, which may go on with a claim after the worker's death."""
        pid, _, start = bytes(self.fields.session).decode().partition(" ")
        return (int(pid), datetime.fromisoformat(start)) if start else None

    def connected(self, backend_pid: int, backend_start: datetime) -> None:
        """By the worker, before the session's first claim."""
        self.fields.session = f"{backend_pid} {backend_start.isoformat()}".encode()

    def occupy(self, worker: str, queues: Sequence[str] = ()) -> None:
        """By the worker: its identity and its queues."""
        self.fields.queues = "\n".join(queues).encode()
        self.fields.worker = worker.encode()
        self.fields.pid = os.getpid()

    def starts(self, what: str) -> None:
        """By the worker: at its start it calls this of the user's, which may end the process; "": it has returned."""
        self.fields.starts = what.encode()[:199]

    def show(self, doing: str) -> None:
        """By the worker: what `ps` shows of it."""
        setproctitle(f"dataloader: worker {', '.join(self.queues)}#{self.index} {doing}")

    def claim(self, job_ids: Sequence[UUID], attempts: Sequence[int]) -> None:
        """By the worker: it has claimed these jobs, and runs none of them yet."""
        fields, size = self.fields, len(job_ids)
        fields.generation += 1
        fields.place = fields.count = 0
        self._jobs[: 16 * size] = b"".join([job_id.bytes for job_id in job_ids])
        self._attempts[:size] = array("i", attempts)
        fields.claimed = size
        fields.generation += 1

    def begin(
        self, place: int, count: int, lease_ttl: float, renewed: float, cpu_sec: float = 0.0, ahead: int = 0
    ) -> None:
        """By the worker: it begins to run `count` jobs from this place of its claim on, which was sent at `renewed`.

        The worker has used `cpu_sec` so far; `ahead` jobs wait that the keeper may hand back.
        """
        fields = self.fields
        fields.generation += 1
        fields.place = place
        fields.count = count
        fields.lease_ttl = lease_ttl
        fields.renewed = renewed
        fields.kept = fields.fence_by = fields.timeout_at = fields.memory_limit = fields.stall_sec = 0
        fields.cpu_before = cpu_sec
        fields.ahead = ahead
        fields.runs += 1
        fields.generation += 1
        fields.state = State.BUSY

    def limit(self, timeout_sec: float | None, max_memory_mb: float | None) -> None:
        """By the worker: the run of the pipeline begins, and may take so many seconds and megabytes; None: any."""
        self.fields.timeout_at = now() + timeout_sec if timeout_sec else 0
        if max_memory_mb:
            self.fields.memory_limit = int(max_memory_mb * 2**20)

    @property
    def needs(self) -> Needs:
        """What the run may use, as its admission has found; NONE without a run that was asked."""
        return Needs(self.fields.need_mb, self.fields.need_cpus)

    @needs.setter
    def needs(self, needs: Needs) -> None:
        self.fields.need_mb, self.fields.need_cpus = needs

    def watch(self, stall_sec: float, ends_stuck: bool) -> None:
        """By the worker: the run is stuck once it has reported nothing for so long; 0: never."""
        self.fields.reported_at, self.fields.ends_stuck = now(), ends_stuck
        self.fields.stall_sec = stall_sec

    @property
    def stuck_at(self) -> float:
        """When the run is stuck unless it reports something before; infinity without a run that may be."""
        stall_sec = self.fields.stall_sec
        return self.fields.reported_at + stall_sec if stall_sec and self.state is State.BUSY else math.inf

    def recall(self, held: Held) -> bool:
        """By the keeper: the worker begins none of the jobs behind the run that `held` shows.

        True from the second tick on: by then either the worker has seen it, or `held` would show no such run any more.
        """
        was_recalled = bool(self.fields.recalled == held.generation)
        self.fields.recalled = held.generation
        return was_recalled

    @property
    def is_recalled(self) -> bool:
        """By the worker, after a run: whether the keeper hands back the jobs behind it."""
        return bool(self.fields.recalled == self.fields.generation)

    def cancel(self, held: Held, at: float) -> None:
        """By the keeper: the run that `held` shows has to stop at this monotonic instant."""
        self.fields.canceled = 0
        self.fields.cancel_at = at
        self.fields.canceled = held.generation

    def ask_to_stop(self, held: Held) -> None:
        """By the keeper: the run that `held` shows is cancelled, and stops at its next safe point."""
        self.fields.asked = held.generation

    @property
    def is_asked_to_stop(self) -> bool:
        """By the worker: whether the keeper has heard that the run is cancelled."""
        return bool(self.fields.asked == self.fields.generation)

    def died_of(self, exit_status: int, usage: resource.struct_rusage) -> None:
        """By the supervisor, at the process's death: its exit status and its cost."""
        self.fields.exit_status = exit_status
        self.fields.cpu = usage.ru_utime + usage.ru_stime
        self.fields.peak_memory = usage.ru_maxrss * 1024

    def cost(self, cpu: float, peak_memory: int) -> dict[str, float]:
        """The run's cost for the journal, from the process's CPU seconds and its most memory (bytes)."""
        return {"cpu_sec": round(cpu - self.fields.cpu_before, 3), "peak_mb": round(peak_memory / 2**20, 1)}

    def found_no_job(self, sent: float, due_in: float | None) -> None:
        """By the worker: the claim sent at that instant found no job; the next row is due in so many seconds."""
        self.fields.due_at = math.inf if due_in is None else now() + due_in
        self.fields.looked_at = sent

    def end(self) -> None:
        """By the worker: it runs no job any more."""
        self.fields.state = State.AWAKE

    def show_warm(self, keys: Sequence[str]) -> None:
        """By the worker: its resources have these affinity keys; of too many the last ones are shown."""
        while len(text := json.dumps(list(keys)).encode()) >= WARM_MOST:
            keys = keys[1:]
        self.fields.warm = text

    @property
    def warm(self) -> list[str]:
        """The affinity keys of the worker's resources; none while the worker writes them."""
        try:
            return list(json.loads(self.fields.warm or b"[]"))
        except ValueError:
            return []

    @property
    def queues(self) -> list[str]:
        """The queues that the worker serves."""
        return bytes(self.fields.queues).decode().split("\n")

    @property
    def runs(self) -> int:
        """How many runs the worker has begun."""
        return int(self.fields.runs)

    @property
    def begun_last(self) -> list[UUID] | None:
        """The jobs of the latest run of the last claim, over or not; None before the worker's first run."""
        return self._ids(self.fields.place, self.fields.count) if self.runs else None

    @property
    def begun_attempt(self) -> int:
        """The attempt of the first of `begun_last`."""
        return int(self._attempts[self.fields.place])

    def held(self) -> Held | None:
        """The whole run; None while there is none, or while the worker changes it."""
        fields = self.fields
        before, place, count = fields.generation, fields.place, fields.count
        held = Held(
            self._ids(place, count),
            self._attempts[place : place + count].tolist(),
            fields.lease_ttl,
            self.renewed,
            before,
        )
        is_whole = before % 2 == 0 and fields.generation == before and self.state is State.BUSY
        return held if is_whole and held.job_ids else None

    @property
    def waiting(self) -> list[UUID]:
        """The jobs of the claim that come after those of the run."""
        behind = self.fields.place + self.fields.count
        return self._ids(behind, self.fields.claimed - behind)

    def _ids(self, place: int, count: int) -> list[UUID]:
        end = min(16 * (place + count), 16 * JOBS_MOST)
        return [UUID(bytes=bytes(self._jobs[at : at + 16])) for at in range(16 * place, end, 16)]

    def drain_until(self, deadline: float) -> None:
        """The process drains, and is killed at this monotonic instant; of several instants the earliest counts."""
        self.fields.drain_by = min(self.fields.drain_by or deadline, deadline)

    def give_up(self, deadline: float) -> None:
        """By the worker: the claim is lost, the keeper renews it no more, and the run must be over by this instant."""
        self.fields.fence_by = min(self.fields.fence_by or deadline, deadline)

    @property
    def renewed(self) -> float:
        """When the last confirmed renewal of the lease was *sent*, by the worker or by the keeper."""
        return max(float(self.fields.renewed), float(self.fields.kept))

    @property
    def fence_at(self) -> float:
        """When the worker itself stops a run whose lease is not renewed: before another worker can start the job."""
        ttl = float(self.fields.lease_ttl)
        return self.renewed + ttl - fence_margin(ttl)

    @property
    def ends_by(self) -> float:
        """When the supervisor kills a run whose lease is not renewed: half the margin after `fence_at`."""
        unrenewed = self.fence_at + fence_margin(self.fields.lease_ttl) / 2
        return float(min(self.fields.fence_by or unrenewed, unrenewed))


class Siblings(NamedTuple):
    """How many other workers of the same kind there are, and how many of them wait for a job."""

    working: int = 0
    idle: int = 0


class SharedSlots:
    """The slots of one supervisor's children in anonymous shared memory, made before the first fork."""

    def __init__(self, size: int) -> None:
        self.farm_start = Once()  # the hook on_farm_start, by generation
        self.told = Told()  # errors of imports and hooks at the start
        self.outage = Note()  # whether the database is away: FarmOutage
        self.room = Note()  # held while a worker enters a run's needs; the reservation of `farm/admission.py`
        self.born = Bell()  # a new worker rings it for the keeper, which opens the files of the worker's output
        self._memory = mmap.mmap(-1, ctypes.sizeof(_Fields) * size)
        fields = (_Fields * size).from_buffer(self._memory)
        self.slots = [Slot(index, fields[index]) for index in range(size)]
        numbers = memoryview(self._memory).cast("i")  # all states by one call: there are hundreds of free slots
        self._states = numbers[_Fields.state.offset // 4 :: ctypes.sizeof(_Fields) // 4]

    def free(self) -> Slot | None:
        """A slot for a new process; None while every slot is in use."""
        return next((slot for slot in self.slots if slot.state is State.FREE), None)

    def used(self) -> list[Slot]:
        """The slots of all processes that are there, or dead and not recovered: a few of hundreds."""
        return [self.slots[index] for index, state in enumerate(self._states.tolist()) if state != State.FREE]

    def working(self) -> list[Slot]:
        """The slots of the workers that claim or run jobs."""
        return [self.slots[index] for index, state in enumerate(self._states.tolist()) if state in _WORKING]

    def idle_before(self, slot: Slot) -> int:
        """How many idle workers of the same kind have a slot before this one: their turn to claim comes first."""
        return sum(
            other.state is State.IDLE and other.fields.kind == slot.fields.kind for other in self.slots[: slot.index]
        )

    def siblings(self, slot: Slot) -> Siblings:
        """The other workers of the slot's kind."""
        working = [
            state
            for index, state in enumerate(self._states.tolist())
            if state in _WORKING and index != slot.index and self.slots[index].fields.kind == slot.fields.kind
        ]
        return Siblings(len(working), working.count(State.IDLE))

    def warm_elsewhere(self, slot: Slot) -> list[str]:
        """The affinity keys of the resources of the slot's siblings."""
        others = [other for other in self.slots if other is not slot and other.state in _WORKING]
        return [key for other in others if other.fields.kind == slot.fields.kind for key in other.warm]

    def has_found_no_job(self, slot: Slot, since: float) -> bool:
        """True while a sibling is idle whose claim since then has found no job."""
        if State.IDLE not in self._states.tolist():
            return False
        kin = (slot.fields.kind, slot.fields.reload)
        return any(
            other.state is State.IDLE and other.fields.looked_at >= since
            for other in self.slots
            if (other.fields.kind, other.fields.reload) == kin
        )

    def looked_for(self, slot: Slot, since: float) -> float | None:
        """When the next row of the slot's queues is due, if a claim of a sibling after `since` found no job; else None.

        That claim has seen every row for which a notification heard at `since` was sent. Siblings have the same queues
        and settings: other workers may claim from another database.
        """
        kin = (slot.fields.kind, slot.fields.reload)
        for other in self.slots:
            if (other.fields.kind, other.fields.reload) == kin and other.fields.looked_at >= since:
                return float(other.fields.due_at)
        return None


def slots_wanted(workers: int) -> int:
    """More slots than workers: a dead worker's slot is in use until the keeper has recovered its jobs."""
    return max(SLOTS_LEAST, 4 * workers)


def files_needed(workers: int) -> int:
    """How many files a process of such a farm may have open."""
    return FILES_OF_A_WORKER * workers + FILES_OF_ANY


def fence_margin(lease_ttl_sec: float) -> float:
    """Seconds from the instant at which a run stops by itself to the end of its unrenewed lease."""
    return min(5.0, lease_ttl_sec / 4)
