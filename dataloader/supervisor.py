"""PROCESS: the supervisor of one machine's farm: forks workers and the keeper, and compares them with the wish.

No SQL, no thread, no connection: a child is forked from a process that has nothing to inherit. One tick takes the
queued signals, reaps the dead, ends what is over its time and starts what is missing; a missed signal costs a tick.
May import `process` (the cli hands it the children's main functions).
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from setproctitle import setproctitle

from dataloader.config import Settings, WorkerSpec
from dataloader.process import (
    EXIT_CANNOT_START,
    EXIT_OK,
    EXIT_RECYCLE,
    Farm,
    Signals,
    Slot,
    State,
    Why,
    fork,
    kill_group,
    now,
)

TICK_SEC = 0.5
BACKOFF_SEC = (0.5, 30.0)  # between starts of a child that dies before it is ready
KEEPER_STOP_SEC = 10.0

WorkerMain = Callable[[WorkerSpec, Farm, Slot, int], int]
KeeperMain = Callable[[Farm, int, int], int]


@dataclass
class Backoff:
    """When a kind of child may be started again: at once, unless it keeps dying before it is ready."""

    failures: int = 0
    not_before: float = 0.0

    def failed(self) -> float:
        """A start has failed; returns the pause (seconds) until the next."""
        shortest, longest = BACKOFF_SEC
        pause: float = min(longest, shortest * 2**self.failures)
        self.failures = min(self.failures + 1, 16)
        self.not_before = now() + pause
        return pause

    def succeeded(self) -> None:
        """A child became ready."""
        self.failures = 0
        self.not_before = 0.0

    @property
    def passed(self) -> bool:
        """True when another start may be tried."""
        return now() >= self.not_before


@dataclass
class Supervisor:
    """The children of this machine and the wish that they are compared with."""

    settings: Settings
    worker_main: WorkerMain
    keeper_main: KeeperMain
    workers: dict[int, Slot] = field(default_factory=dict)  # by pid
    keeper: int | None = None
    draining: bool = False
    exit_status: int = EXIT_OK

    def __post_init__(self) -> None:
        self.wish = self.settings.workers
        size = sum(spec.concurrency for spec in self.wish)
        # More slots than workers: a dead worker's slot stays until the keeper has settled it.
        self.farm = Farm(4 * size + 16)
        self._queue_index = {spec.queue: index for index, spec in reversed(list(enumerate(self.wish)))}
        self._spec_of: dict[int, int] = {}  # slot index -> index in the wish
        self._backoffs = [Backoff() for _ in self.wish]
        self._keeper_backoff = Backoff()
        self._keeper_stop_at: float | None = None
        self._ever_ready = False
        self._log = structlog.get_logger("supervisor").bind(pid=os.getpid())

    def run(self) -> int:
        """Keep the farm as wished until SIGTERM or SIGINT, then drain it; the process's exit status."""
        if threading.active_count() > 1:
            raise RuntimeError("the supervisor should be single-threaded: a fork copies locks that other threads hold")
        setproctitle("dataloader: supervisor")
        self.signals = Signals((signal.SIGTERM, signal.SIGINT, signal.SIGCHLD))
        self._life_read, self._life_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._calls_read, self._calls_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._log.info("supervisor.started", workers={spec.queue: spec.concurrency for spec in self.wish})
        while not self._tick():
            self.signals.wait(TICK_SEC)
        self._log.info("supervisor.stopped", exit_status=self.exit_status)
        return self.exit_status

    def _tick(self) -> bool:
        """Compare once; True when all is over."""
        if self.signals.received & {signal.SIGTERM, signal.SIGINT}:
            self._drain()
        self._reap()
        self._note_readiness()
        self._enforce()
        self._start_missing()
        return self._is_over()

    # --- death ---

    def _reap(self) -> None:
        """Collect the dead; children that we do not know (we may be process 1) are only collected."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            exit_status = os.waitstatus_to_exitcode(status)
            if pid == self.keeper:
                self._keeper_died(exit_status)
            elif pid in self.workers:
                self._worker_died(pid, exit_status)

    def _worker_died(self, pid: int, exit_status: int) -> None:
        slot = self.workers.pop(pid)
        kill_group(pid)  # what its job has started does not outlive it
        started = slot.state is not State.STARTING
        slot.fields.exit_status = exit_status
        slot.state = State.DEAD if exit_status else State.FREE
        os.write(self._calls_write, b".")
        level = self._log.info if exit_status in (EXIT_OK, EXIT_RECYCLE) else self._log.warning
        level("supervisor.worker.exited", worker=slot.worker, worker_pid=pid, exit_status=exit_status)
        if not started and not self.draining:
            self._start_failed("worker", self._backoffs[self._spec_of[slot.index]], exit_status)

    def _keeper_died(self, exit_status: int) -> None:
        self.keeper = None
        if self._keeper_stop_at is None:
            self._log.warning("supervisor.keeper.exited", exit_status=exit_status)
            self._start_failed("keeper", self._keeper_backoff, exit_status)

    def _start_failed(self, what: str, backoff: Backoff, exit_status: int) -> None:
        if exit_status == EXIT_CANNOT_START and not self._ever_ready:
            self.exit_status = EXIT_CANNOT_START
            self._log.error("supervisor.cannot.start", why=f"the {what} refused to start, see its log line")
            self._drain()
        else:
            self._log.warning("supervisor.start.failed", what=what, pause_sec=backoff.failed())

    def _note_readiness(self) -> None:
        for slot in self.workers.values():
            if slot.state is not State.STARTING:
                self._ever_ready = True
                self._backoffs[self._spec_of[slot.index]].succeeded()

    def _enforce(self) -> None:
        """End what is over its time; a stuck process cannot do that itself."""
        for pid, slot in self.workers.items():
            silent = slot.state is State.BUSY and now() - slot.fields.renewed > self.settings.dl_stall_sec
            if silent:
                slot.fields.why = Why.STALLED
            if silent or (slot.fields.deadline and now() > slot.fields.deadline):
                self._log.warning("supervisor.worker.killed", worker=slot.worker, why=Why(slot.fields.why).name.lower())
                kill_group(pid)

    # --- life ---

    def _start_missing(self) -> None:
        if self.keeper is None and self._keeper_stop_at is None and self._keeper_backoff.passed:
            self.keeper = self._fork(lambda: self.keeper_main(self.farm, self._life_read, self._calls_read))
        if self.draining:
            return
        running = Counter(self._spec_of[slot.index] for slot in self.workers.values())
        for index, spec in enumerate(self.wish):
            if self._backoffs[index].passed:
                for _ in range(spec.concurrency - running[index]):
                    self._start_worker(index, spec)

    def _start_worker(self, index: int, spec: WorkerSpec) -> None:
        slot = self.farm.free()
        if slot is None:
            return  # all wait to be settled; the database is away
        slot.take(self._queue_index[spec.queue])
        self._spec_of[slot.index] = index
        pid = self._fork(lambda: self.worker_main(spec, self.farm, slot, self._life_read))
        self.workers[pid] = slot

    def _fork(self, main: Callable[[], int]) -> int:
        def child() -> int:
            self.signals.forget()
            os.close(self._life_write)
            os.close(self._calls_write)
            return main()

        return fork(child)

    # --- the end ---

    def _drain(self) -> None:
        """Tell every worker once; each has DL_DRAIN_SEC, and DL_KILL_GRACE_SEC to hand its job back."""
        if self.draining:
            return
        self.draining = True
        self._log.info("supervisor.draining", workers=len(self.workers))
        deadline = now() + self.settings.dl_drain_sec + self.settings.dl_kill_grace_sec
        for pid, slot in self.workers.items():
            slot.end_at(deadline, Why.DRAIN)
            os.kill(pid, signal.SIGTERM)

    def _is_over(self) -> bool:
        """The keeper stops last: it settles what the last workers left."""
        if not self.draining or self.workers:
            return False
        if self.keeper is None:
            return self._keeper_stop_at is not None or not self._unsettled()
        if self._keeper_stop_at is None:
            self._keeper_stop_at = now() + KEEPER_STOP_SEC
            os.kill(self.keeper, signal.SIGTERM)
        elif now() > self._keeper_stop_at:
            kill_group(self.keeper)
        return False

    def _unsettled(self) -> bool:
        return any(slot.state is State.DEAD for slot in self.farm.slots)
