"""The shared memory between a supervisor, its workers and its keeper: a slot for each worker.

The worker shows there what it runs and until when its claim is confirmed; the keeper when it renewed or cancelled for
it; the supervisor how it died. Each field has one writer. No SQL. May import `process`.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import resource
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from uuid import UUID

from dataloader.farm.process import cpu_used, now


class State(IntEnum):
    """What the process of a slot is doing."""

    FREE = 0
    STARTING = 1
    RESTING = 2  # ready, and claims nothing before another order
    AWAKE = 3  # claims or writes ends
    IDLE = 4  # waits for a notification
    BUSY = 5  # runs the job that the slot shows
    LEAVING = 6  # about to exit, for its successor
    DEAD = 7  # reaped; the keeper recovers its jobs


class Order(IntEnum):
    """The supervisor's order to a worker."""

    WAIT = 0  # finish the run, then claim nothing
    WORK = 1
    LEAVE = 2  # exit; only a worker that rests gets this order


class _Fields(ctypes.Structure):
    _fields_ = (
        ("generation", ctypes.c_uint64),  # odd while the worker changes the claim below
        ("job", ctypes.c_ubyte * 16),
        ("attempt", ctypes.c_int32),
        ("lease_ttl", ctypes.c_double),
        ("renewed", ctypes.c_double),  # when the last confirmed renewal was sent, by the worker
        ("kept", ctypes.c_double),  # the same, by the keeper
        ("drain_by", ctypes.c_double),  # when a draining process must be over; 0: it does not drain
        ("fence_by", ctypes.c_double),  # when a run that gave its claim up must be over; 0: it did not
        ("timeout_at", ctypes.c_double),  # when the run has lasted long enough; 0: it may last
        ("cancel_at", ctypes.c_double),  # when it has to stop because it was cancelled, by the keeper; 0: not yet
        ("canceled", ctypes.c_uint64),  # the generation that cancel_at is for
        ("memory_limit", ctypes.c_uint64),  # bytes that its processes may use together; 0: no limit
        ("memory_used", ctypes.c_uint64),  # what they used when they were ended for it
        ("cpu_before", ctypes.c_double),  # CPU seconds that the worker had used when the run began
        ("cpu", ctypes.c_double),  # the same when it was dead
        ("peak_memory", ctypes.c_uint64),  # and the most memory it ever used, in bytes
        ("why", ctypes.c_int32),
        ("state", ctypes.c_int32),
        ("pid", ctypes.c_int32),
        ("queue", ctypes.c_int32),  # the number that the supervisor gives the queue
        ("reload", ctypes.c_int32),  # and the settings that the process was started with
        ("order", ctypes.c_int32),  # by the supervisor
        ("explains", ctypes.c_bool),  # whether the process logs the stack of a failed import
        ("looked_at", ctypes.c_double),  # when the worker's last claim that found nothing was sent
        ("due_at", ctypes.c_double),  # when the next row is due, as it was told by that; written before looked_at
        ("exit_status", ctypes.c_int32),
        ("worker", ctypes.c_char * 200),
        ("queue_name", ctypes.c_char * 520),  # 128 characters
        ("session", ctypes.c_char * 64),  # its backend in PostgreSQL: pid and start
    )


@dataclass(frozen=True, slots=True)
class Held:
    """The claim that a slot shows: whose job, and when its lease was last renewed (monotonic seconds)."""

    job_id: UUID
    attempt: int
    lease_ttl: float
    renewed: float
    generation: int


class Slot:
    """One worker's place in the shared memory. The worker writes its claim, the supervisor life and death."""

    def __init__(self, index: int, fields: _Fields) -> None:
        self.index = index
        self.fields = fields

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
        """What the supervisor has ordered."""
        return Order(self.fields.order)

    @order.setter
    def order(self, order: Order) -> None:
        self.fields.order = order

    @property
    def works(self) -> bool:
        """True while the worker may be at a claim, a run or an end."""
        return self.state in (State.AWAKE, State.IDLE, State.BUSY)

    @property
    def is_ready(self) -> bool:
        """True while the worker has a session and need not leave."""
        return self.order is not Order.LEAVE and (self.works or self.state is State.RESTING)

    @property
    def rests(self) -> bool:
        """True when the worker claims nothing until its order changes: it has shown RESTING since it got WAIT."""
        return self.order is Order.WAIT and self.state is State.RESTING

    def take(self, queue: int, reload: int = 0, explains: bool = False) -> None:
        """For a process about to be forked, with the numbers of its queue and of its settings; its order is WAIT."""
        ctypes.memset(ctypes.addressof(self.fields), 0, ctypes.sizeof(self.fields))
        self.fields.queue = queue
        self.fields.reload = reload
        self.fields.explains = explains
        self.fields.state = State.STARTING

    @property
    def session(self) -> tuple[int, datetime] | None:
        """Pid and start of the worker's latest backend, which may be at work on a claim after the worker is dead."""
        pid, _, start = bytes(self.fields.session).decode().partition(" ")
        return (int(pid), datetime.fromisoformat(start)) if start else None

    def connected(self, backend_pid: int, backend_start: datetime) -> None:
        """By the worker, before the session's first claim."""
        self.fields.session = f"{backend_pid} {backend_start.isoformat()}".encode()

    def occupy(self, worker: str, queue: str = "") -> None:
        """By the worker: who and where it is, and whom it serves."""
        self.fields.worker = worker.encode()
        self.fields.queue_name = queue.encode()
        self.fields.pid = os.getpid()

    def begin(self, job_id: UUID, attempt: int, lease_ttl: float, renewed: float) -> None:
        """By the worker: it holds this job."""
        self.fields.generation += 1
        self.fields.job[:] = job_id.bytes
        self.fields.attempt = attempt
        self.fields.lease_ttl = lease_ttl
        self.fields.renewed = renewed
        self.fields.kept = self.fields.fence_by = self.fields.timeout_at = self.fields.memory_limit = 0
        self.fields.cpu_before = cpu_used()
        self.fields.generation += 1
        self.fields.state = State.BUSY

    def limit(self, timeout_sec: float | None, max_memory_mb: float | None) -> None:
        """By the worker: the run of the pipeline begins, and may take so many seconds and megabytes; None: any."""
        self.fields.timeout_at = now() + timeout_sec if timeout_sec else 0
        self.fields.memory_limit = int((max_memory_mb or 0) * 2**20)

    def cancel(self, held: Held, at: float) -> None:
        """By the keeper: the run that `held` shows has to stop at this monotonic instant."""
        self.fields.canceled = 0
        self.fields.cancel_at = at
        self.fields.canceled = held.generation

    def died_of(self, exit_status: int, usage: resource.struct_rusage) -> None:
        """By the supervisor, which has buried the process: how it ended and what it had used."""
        self.fields.exit_status = exit_status
        self.fields.cpu = usage.ru_utime + usage.ru_stime
        self.fields.peak_memory = usage.ru_maxrss * 1024

    def cost(self, cpu: float, peak_memory: int) -> dict[str, float]:
        """What the run has cost, for the journal, when its process has used so much (seconds, bytes)."""
        return {"cpu_sec": round(cpu - self.fields.cpu_before, 3), "peak_mb": round(peak_memory / 2**20, 1)}

    def left_empty_handed(self, sent: float, due_in: float | None) -> None:
        """By the worker: a claim that was sent then found nothing; the next row is due in so many seconds, if any."""
        self.fields.due_at = math.inf if due_in is None else now() + due_in
        self.fields.looked_at = sent

    def end(self) -> None:
        """By the worker: it runs no job any more."""
        self.fields.state = State.AWAKE

    @property
    def queue_name(self) -> str:
        """The queue that the worker serves."""
        return bytes(self.fields.queue_name).decode()

    @property
    def jobs(self) -> int:
        """How many jobs the worker has begun to run."""
        return int(self.fields.generation // 2)

    @property
    def begun_last(self) -> UUID | None:
        """The last job that the worker began to run, whether that is over or not; None while there was none."""
        job = bytes(self.fields.job)
        return UUID(bytes=job) if any(job) else None

    def held(self) -> Held | None:
        """The claim as a whole, or None when there is none or it is being changed."""
        before = self.fields.generation
        held = Held(
            UUID(bytes=bytes(self.fields.job)),
            self.fields.attempt,
            self.fields.lease_ttl,
            self.renewed,
            before,
        )
        whole = before % 2 == 0 and self.fields.generation == before and self.state is State.BUSY
        return held if whole else None

    def drain_until(self, deadline: float) -> None:
        """The process must be over by this monotonic instant, or is ended; the earliest counts."""
        self.fields.drain_by = min(self.fields.drain_by or deadline, deadline)

    def give_up(self, deadline: float) -> None:
        """By the worker: its claim is over, nobody should renew it, and the run must be by this monotonic instant."""
        self.fields.fence_by = min(self.fields.fence_by or deadline, deadline)

    @property
    def renewed(self) -> float:
        """When the last confirmed renewal of the claim's lease was *sent*, by the worker or the keeper."""
        return max(float(self.fields.renewed), float(self.fields.kept))

    @property
    def fence_at(self) -> float:
        """When the worker itself stops a run whose lease is not renewed, so that nobody else can start before."""
        ttl = float(self.fields.lease_ttl)
        return self.renewed + ttl - fence_margin(ttl)

    @property
    def ends_by(self) -> float:
        """When a busy worker's job must be over unless its lease is renewed: half the margin after `fence_at`."""
        unrenewed = self.fence_at + fence_margin(self.fields.lease_ttl) / 2
        return float(min(self.fields.fence_by or unrenewed, unrenewed))


class SharedSlots:
    """The slots of one supervisor's children in anonymous shared memory, made before the first fork."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, ctypes.sizeof(_Fields) * size)
        fields = (_Fields * size).from_buffer(self._memory)
        self.slots = [Slot(index, fields[index]) for index in range(size)]

    def free(self) -> Slot | None:
        """A slot for a new process."""
        return next((slot for slot in self.slots if slot.state is State.FREE), None)

    def idle_before(self, slot: Slot) -> int:
        """How many idle workers of the same queue stand before `slot`: the first answers a notification at once."""
        return sum(
            other.state is State.IDLE and other.fields.queue == slot.fields.queue for other in self.slots[: slot.index]
        )

    def looked_for(self, slot: Slot, since: float) -> float | None:
        """When the next row of the slot's queue is due, if a claim of a sibling since then has found nothing.

        Such a claim has seen all that a notification heard at `since` may have been about, so it need not be repeated.
        Siblings have the same settings: others may look into another database. None: nobody has left empty-handed.
        """
        kin = (slot.fields.queue, slot.fields.reload)
        for other in self.slots:
            if (other.fields.queue, other.fields.reload) == kin and other.fields.looked_at >= since:
                return float(other.fields.due_at)
        return None


def fence_margin(lease_ttl_sec: float) -> float:
    """Seconds before the end of an unrenewed lease at which its run should stop by itself."""
    return min(5.0, lease_ttl_sec / 4)
