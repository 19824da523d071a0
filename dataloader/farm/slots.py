"""The shared memory between a supervisor, its workers and its keeper: a slot for each worker.

The worker writes its run and the last confirmed renewal; the keeper writes renewals and cancellations for the worker;
the supervisor writes orders and the process's death. All three compute the same deadlines from the slot: each has a
reason, the instant at which the run stops by itself, and the instant of the kill; the earliest wins. No SQL.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from enum import IntEnum
from typing import Annotated, Any, NamedTuple, get_type_hints
from uuid import UUID

from setproctitle import setproctitle

from dataloader.config import QUEUES_MOST
from dataloader.farm.common_log import Note
from dataloader.farm.process import is_running, memory_used, now


class State(IntEnum):
    """The phase of the slot's process."""

    FREE = 0
    STARTING = 1
    RESTING = 2  # ready; claims once the supervisor has set may_work
    AWAKE = 3  # claims or writes ends
    IDLE = 4  # waits for a notification
    BUSY = 5  # runs the job that the slot shows
    LEAVING = 6  # about to exit
    DEAD = 7  # reaped; the keeper recovers its jobs


FILES_OF_A_WORKER = 4  # in the supervisor or the keeper: its output, its stacks
FILES_OF_ANY = 96  # sockets, logs, libraries, pipes
JOBS_MOST = 2_000  # of one claim: 1,000, or more where the last key of a merged queue has many
WARM_MOST = 8_192  # bytes of the affinity keys that a slot shows
TOOK_LONGER = "not started: another job took longer"
_WORKING = frozenset({State.AWAKE, State.IDLE, State.BUSY})


class Needs(NamedTuple):
    """The largest use of a run: MB of memory of its worker with children, and processors; 0: not checked."""

    memory_mb: float = 0.0
    cpus: float = 0.0


NONE = Needs()


_Int = Annotated[int, ctypes.c_int32]
_Long = Annotated[int, ctypes.c_int64]
_Count = Annotated[int, ctypes.c_uint64]
_Seconds = Annotated[float, ctypes.c_double]
_Flag = Annotated[bool, ctypes.c_bool]
_Text = Annotated[bytes, ctypes.c_char * 200]


class Held(NamedTuple):
    """The run that a slot shows, and when its lease was last renewed (monotonic seconds)."""

    job_ids: list[UUID]
    attempts: list[int]
    lease_ttl: float
    renewed: float
    generation: int

    @property
    def job_id(self) -> UUID:
        return self.job_ids[0]


class Slot(ctypes.Structure):
    """One worker's part of the shared memory; the annotated attributes are its fields.

    One process writes a field, and others read it. A method exists where several fields belong together, or where the
    order of the writes matters. Instants are monotonic seconds.
    """

    generation: _Count  # odd while the worker changes the claim below
    place: _Int  # of the run's first job in `jobs`
    count: _Int  # of the run's jobs
    runs: _Long  # begun since the process's start
    claimed: _Int  # how many of `jobs` there are
    lease_ttl: _Seconds
    renewed: _Seconds  # when the last confirmed renewal was sent, by the worker
    kept: _Seconds  # the same, by the keeper
    drain_by: _Seconds  # when a draining process must be over; 0: it does not drain
    fence_by: _Seconds  # when a run that has lost its claim must be over; 0: it has its claim
    timeout_at: _Seconds  # when the run has to stop for its timeout; 0: no timeout
    canceled: _Count  # the generation of the run whose cancellation the keeper has heard of: it stops at a safe point
    cancel_at: _Seconds  # when that run has to stop in any case; infinity: it may go on to a safe point
    recalled: _Count  # the generation of the run behind which the worker begins no other job
    reported_at: _Seconds  # when the run came to its latest safe point
    grace_sec: _Seconds  # DL_KILL_GRACE_SEC, from a deadline to the kill; by the supervisor, as the next one
    silence_sec: _Seconds  # DL_STALL_SEC, without a beat until the worker counts as stalled; 0: it never does
    stall_sec: _Seconds  # after such a silence of the run it is stuck; 0: never
    ends_stuck: _Flag  # whether a stuck run is ended
    stacks: _Int  # the descriptor in the worker to which it dumps its stacks at SIGTTIN
    logs: _Flag  # whether the worker's latest run has a log
    log_files: Annotated[list[int], ctypes.c_int32 * 2]  # the descriptors of its output; 0: none
    log_places: Annotated[list[int], ctypes.c_int64 * 2]  # up to where that is in the database
    log_line: _Int  # the number of the last line there
    memory_limit: _Count  # bytes that the run's processes may use together; 0: no limit
    memory_used: _Count  # bytes that they used at the latest measurement
    cpu_before: _Seconds  # CPU seconds that the worker had used when the run began
    cpu: _Seconds  # the same at its death
    peak_memory: _Count  # the most memory that it ever used, in bytes
    ahead: _Int  # how many jobs wait behind the run that the keeper may hand back
    need_mb: _Seconds  # of memory, that the run may use; 0: it was not asked
    need_cpus: _Seconds
    why: _Int  # the process was killed
    state: _Int
    pid: _Int
    kind: _Int  # the supervisor's number for workers that serve the same queues
    reload: _Int  # the number of the reload whose settings the process has
    may_work: _Flag  # by the supervisor; False: the worker finishes its run, then does not claim
    empty_claim_at: _Seconds  # when the worker sent its last claim that returned no job
    due_at: _Seconds  # when the next row is due, by that claim's answer; written before empty_claim_at
    exit_status: _Int
    identity: _Text  # what the worker writes to claimed_by
    calling: _Text  # the user's code that the worker is calling at its start: "import of my_pipelines"; empty: none
    called_at: _Seconds  # when that call began; written before `calling`
    backend: _Text  # the pid and the start of the session's backend in PostgreSQL
    warm_json: Annotated[bytes, ctypes.c_char * WARM_MOST]  # the affinity keys of the worker's resources
    jobs: Annotated[Any, (ctypes.c_char * 16) * JOBS_MOST]  # the ids of the worker's last claim, in its order
    attempts: Annotated[list[int], ctypes.c_int32 * JOBS_MOST]
    queue_lines: Annotated[bytes, ctypes.c_char * (QUEUES_MOST * 513)]  # names of 128 characters, a line each

    index: int  # of the slot among those of the farm

    @property
    def worker(self) -> str:
        return self.identity.decode()

    @property
    def queues(self) -> list[str]:
        return self.queue_lines.decode().split("\n")

    @property
    def works(self) -> bool:
        """True while the worker may be at a claim, a run or an end."""
        return self.state in _WORKING

    @property
    def is_ready(self) -> bool:
        """True while the worker has a session and does not drain."""
        return not self.drain_by and (self.works or self.state == State.RESTING)

    @property
    def session(self) -> tuple[int, datetime] | None:
        """Pid and start of the worker's latest backend, which may outlive the worker."""
        pid, _, start = self.backend.decode().partition(" ")
        return (int(pid), datetime.fromisoformat(start)) if start else None

    def take(self, kind: int, reload: int = 0) -> None:
        """Prepare the slot for a process that will be forked, and may not work yet."""
        ctypes.memset(ctypes.addressof(self), 0, Slot.jobs.offset)  # the rest counts as far as `claimed`
        self.kind = kind
        self.reload = reload
        self.state = State.STARTING

    def occupy(self, worker: str, queues: Sequence[str] = ()) -> None:
        self.queue_lines = "\n".join(queues).encode()
        self.identity = worker.encode()
        self.pid = os.getpid()

    def show(self, doing: str) -> None:
        """Set the worker's title in `ps`; the worker calls it."""
        setproctitle(f"dataloader: worker {', '.join(self.queues)}#{self.index} {doing}")

    # --- the claim and the run ---

    def claim(self, job_ids: Sequence[UUID], attempts: Sequence[int]) -> None:
        """Note the claimed jobs, before the first runs; the worker calls it."""
        size = len(job_ids)
        self.generation += 1
        self.place = self.count = 0
        self.attempts[:size] = attempts  # raises ValueError for more than JOBS_MOST
        ctypes.memmove(self.jobs, b"".join([job_id.bytes for job_id in job_ids]), 16 * size)
        self.claimed = size
        self.generation += 1

    def begin(
        self, place: int, count: int, lease_ttl: float, renewed: float, cpu_sec: float = 0.0, ahead: int = 0
    ) -> None:
        """Note that `count` jobs from this place of the claim begin; `renewed` is when the claim was sent."""
        self.generation += 1
        self.place = place
        self.count = count
        self.lease_ttl = lease_ttl
        self.renewed = renewed
        self.kept = self.fence_by = self.timeout_at = self.stall_sec = 0.0
        self.memory_limit = 0
        self.cpu_before = cpu_sec
        self.ahead = ahead
        self.runs += 1
        self.generation += 1
        self.state = State.BUSY

    def held(self) -> Held | None:
        """The whole run; None while there is none, or while the worker changes it."""
        before, place, count = self.generation, self.place, self.count
        attempts = self.attempts[place : place + count]
        held = Held(self._ids(place, count), attempts, self.lease_ttl, self.last_renewed, before)
        is_whole = before % 2 == 0 and self.generation == before and self.state == State.BUSY
        return held if is_whole and held.job_ids else None

    @property
    def begun_last(self) -> list[UUID] | None:
        """The jobs of the latest run of the last claim, over or not; None before the worker's first run."""
        return self._ids(self.place, self.count) if self.runs else None

    @property
    def waiting(self) -> list[UUID]:
        """The jobs of the claim that come after those of the run."""
        behind = self.place + self.count
        return self._ids(behind, self.claimed - behind)

    def _ids(self, place: int, count: int) -> list[UUID]:
        return [UUID(bytes=job.raw) for job in self.jobs[place : place + count]]

    def recall(self, held: Held) -> bool:
        """Forbid the worker to begin the jobs behind the run that `held` shows; the keeper calls it.

        True from the second tick on: by then the worker has seen it, or `held` does not show this run any more.
        """
        was_recalled = self.recalled == held.generation
        self.recalled = held.generation
        return was_recalled

    def cost(self, cpu: float, peak_memory: int) -> dict[str, float]:
        """The run's cost for the journal, from the process's CPU seconds and its most memory (bytes)."""
        return {"cpu_sec": round(cpu - self.cpu_before, 3), "peak_mb": round(peak_memory / 2**20, 1)}

    # --- deadlines ---

    def drain_until(self, deadline: float) -> None:
        """The process drains, and is killed at this instant; of several instants the earliest counts."""
        self.drain_by = min(self.drain_by or deadline, deadline)

    def give_up(self, deadline: float) -> None:
        """Note that the claim is lost: the keeper stops renewing it, and the run must end by this instant."""
        self.fence_by = min(self.fence_by or deadline, deadline)

    @property
    def last_renewed(self) -> float:
        """The time when the last confirmed renewal of the lease was *sent*, by the worker or by the keeper."""
        return max(self.renewed, self.kept)

    @property
    def fence_at(self) -> float:
        """When the worker itself stops a run whose lease is not renewed: before another worker can start the job."""
        return self.last_renewed + self.lease_ttl - fence_margin(self.lease_ttl)

    @property
    def ends_by(self) -> float:
        """When the supervisor kills a run whose lease is not renewed: half the margin after `fence_at`."""
        unrenewed = self.fence_at + fence_margin(self.lease_ttl) / 2
        return min(self.fence_by or unrenewed, unrenewed)

    @property
    def stuck_at(self) -> float:
        """When the run is stuck unless it reports something before; infinity without a run that may be."""
        return self.reported_at + self.stall_sec if self.stall_sec and self.state == State.BUSY else math.inf

    # --- what the siblings need to know ---

    @property
    def needs(self) -> Needs:
        """The needs of the run that its admission has set; NONE without such a run."""
        return Needs(self.need_mb, self.need_cpus)

    @needs.setter
    def needs(self, needs: Needs) -> None:
        self.need_mb, self.need_cpus = needs

    def show_warm(self, keys: Sequence[str]) -> None:
        """Show the affinity keys of the worker's resources; of too many, the last ones."""
        while len(text := json.dumps(list(keys)).encode()) >= WARM_MOST:
            keys = keys[1:]
        self.warm_json = text

    @property
    def warm(self) -> list[str]:
        """The affinity keys of the worker's resources; none while the worker writes them."""
        with suppress(ValueError):
            return list(json.loads(self.warm_json or b"[]"))
        return []


Slot._fields_ = [
    (name, hint.__metadata__[0])
    for name, hint in get_type_hints(Slot, include_extras=True).items()
    if hasattr(hint, "__metadata__")
]


class Siblings(NamedTuple):
    """How many other workers of the same kind there are, and how many of them wait for a job."""

    working: int = 0
    idle: int = 0


class SharedSlots:
    """The slots of one supervisor's children in anonymous shared memory, made before the first fork.

    The siblings of a slot are the workers of its kind; where settings count, those of its reload.
    """

    def __init__(self, size: int) -> None:
        self.supervisor = os.getpid()  # a child that asks for its parent may ask after the supervisor's death
        self.farm_start = Note()  # the hook on_farm_start, by reload
        self.reported = Note()  # the latest error of an import or a hook at the start
        self.reload = Note()  # why the latest reload did not succeed, by the supervisor
        self.outage = Note()  # whether the database is away: FarmOutage
        self.room = Note()  # held while a worker enters a run's needs; the reservation of `farm/admission.py`
        # A new worker writes to this eventfd for the keeper, which opens the files of the worker's output.
        self.born = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._memory = mmap.mmap(-1, ctypes.sizeof(Slot) * size)
        self.slots: list[Slot] = [*(Slot * size).from_buffer(self._memory)]
        for index, slot in enumerate(self.slots):
            slot.index = index
        numbers = memoryview(self._memory).cast("i")  # all states by one call: there are hundreds of free slots
        self._states = numbers[Slot.state.offset // 4 :: ctypes.sizeof(Slot) // 4]  # type: ignore[attr-defined]

    def __del__(self) -> None:
        os.close(self.born)

    def used(self) -> list[Slot]:
        """The slots of all processes that are there, or dead and not recovered: a few of hundreds."""
        return [self.slots[index] for index, state in enumerate(self._states.tolist()) if state != State.FREE]

    def working(self) -> list[Slot]:
        return [slot for slot in self.used() if slot.works]

    def others(self, slot: Slot) -> list[Slot]:
        return [other for other in self.working() if other is not slot and other.kind == slot.kind]

    def siblings(self, slot: Slot) -> Siblings:
        states = [other.state for other in self.others(slot)]
        return Siblings(len(states), states.count(State.IDLE))

    def due_by_sibling(self, slot: Slot, since: float) -> float | None:
        """The due time of the next row of these queues, by a sibling's empty claim after `since`; else None.

        That claim has seen every row for which a notification heard at `since` was sent.
        """
        for other in self.slots:  # workers of another reload may claim from another database
            if other.empty_claim_at >= since and (other.kind, other.reload) == (slot.kind, slot.reload):
                return other.due_at
        return None


def files_needed(workers: int) -> int:
    """How many files a process of such a farm may have open."""
    return FILES_OF_A_WORKER * workers + FILES_OF_ANY


def fence_margin(lease_ttl_sec: float) -> float:
    """Seconds from the instant at which a run stops by itself to the end of its unrenewed lease."""
    return min(5.0, lease_ttl_sec / 4)


# --- deadlines of a process and its run ---


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
    """From `stop_at` on the run stops at its next safe point; after `kill_at` its process is killed."""

    stop_at: float
    kill_at: float
    reason: Reason


def deadlines(slot: Slot) -> list[Deadline]:
    """The deadlines of the slot's process, and of its run while there is one."""
    grace_sec = slot.grace_sec
    ends = [Deadline(slot.drain_by - grace_sec, slot.drain_by, Reason.DRAIN)] if slot.drain_by else []
    if slot.calling and slot.silence_sec:
        ends.append(Deadline(math.inf, slot.called_at + slot.silence_sec, Reason.STALLED))
    if slot.state != State.BUSY:
        return ends
    ends.append(Deadline(slot.fence_at, slot.ends_by, Reason.FENCED))
    # A stalled worker cannot stop by itself: the keeper renews its lease up to here.
    if slot.silence_sec:
        ends.append(Deadline(math.inf, slot.renewed + max(slot.silence_sec, slot.stall_sec), Reason.STALLED))
    if slot.ends_stuck:
        ends.append(Deadline(math.inf, slot.stuck_at + STACKS_SEC, Reason.STUCK))
    if slot.timeout_at:
        ends.append(Deadline(slot.timeout_at, slot.timeout_at + grace_sec, Reason.TIMEOUT))
    if slot.canceled == slot.generation:
        ends.append(Deadline(slot.cancel_at, slot.cancel_at + grace_sec, Reason.CANCELED))
    return ends


def stop_reason(slot: Slot) -> Reason | None:
    """Why the run has to stop now, by the earliest of its deadlines; None while it may go on."""
    at = now()
    passed = [deadline for deadline in deadlines(slot) if deadline.stop_at < at]
    return min(passed).reason if passed else None


def kill_reason(slot: Slot) -> Reason | None:
    """Why the process has to be killed now, by the earliest of its deadlines; None while it may live."""
    at = now()
    for kill_at, reason in sorted((each.kill_at, each.reason) for each in deadlines(slot)):
        # A stopped process is no danger to the next run before it goes on, and it may be in a debugger.
        if kill_at < at and (reason is not Reason.FENCED or is_running(slot.pid)):
            return reason
    limit = slot.memory_limit if slot.state == State.BUSY else 0
    used = memory_used(slot.pid) if limit else 0
    if used <= limit:
        return None  # the last figure stays: a process that is being killed frees its memory before it is gone
    slot.memory_used = used
    return Reason.MEMORY
