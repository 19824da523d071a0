"""PROCESS: the supervisor of one machine's farm forks the workers and the keeper, and compares them with the wish.

No SQL, no thread, no connection: a forked child inherits none. One tick takes the queued signals, reaps dead children,
kills overdue ones, starts missing ones and gives orders; a missed signal costs a tick.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import os
import resource
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import structlog
from setproctitle import setproctitle

from dataloader import log, periods
from dataloader.config import ConfigError, Settings
from dataloader.exits import EXIT_CANNOT_START, EXIT_OK, EXIT_RECYCLE
from dataloader.farm import process
from dataloader.farm.process import kill_group, now
from dataloader.farm.slots import INTERRUPTS, SharedSlots, Slot, State, deadlines, kill_reason

SLOTS_LEAST = 256
TICK_SEC = 0.5
MEMORY_TICK_SEC = 0.1  # while a run has a memory limit: memory is used up quickly
# Between starts of a child that dies before it is ready: the first and the longest pause.
BACKOFF_SEC = (0.5, periods.seconds("BIRTH_BACKOFF_SEC", 30.0))
KEEPER_STOP_SEC = periods.seconds("KEEPER_STOP_SEC", 10.0)
RELOAD_ERROR_MOST = 1_000  # characters that doctor and overview show
STACKS_SEC = 0.5  # from asking for stacks to reading them: a dump is written within a signal handler

_ORDERS = (signal.SIGQUIT, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTTIN)

Queues = tuple[str, ...]  # that a kind of workers serves
WorkerMain = Callable[[Settings, Queues, SharedSlots, Slot], int]
KeeperMain = Callable[[Settings, SharedSlots], int]


@dataclass
class Backoff:
    """When a kind of child may be started again: at once, unless it keeps dying before it is ready."""

    failures: int = 0
    failed_at: float = 0.0
    not_before: float = 0.0

    def failed(self, by_itself: bool) -> float:
        """A start has failed; the pause until the next, which grows over failures of the child itself."""
        self.failed_at = now()
        pause: float = min(BACKOFF_SEC[1], BACKOFF_SEC[0] * 2**self.failures) if by_itself else BACKOFF_SEC[0]
        self.failures = min(self.failures + by_itself, 16)
        self.not_before = now() + pause if by_itself else max(self.not_before, now() + pause)
        return pause


@dataclass
class Child:
    """A worker process and its slot."""

    pid: int
    slot: Slot
    queues: Queues
    started: float
    interrupted: int = 0  # the latest run that was interrupted, by its number in the slot

    @property
    def rests(self) -> bool:
        """True if the worker does not claim until it may: it has shown RESTING since it was to wait."""
        return not (self.slot.may_work or self.slot.drain_by) and self.slot.state == State.RESTING


class Supervisor:
    """The children of this machine, and how many of each kind are wished for: of those that serve the same queues."""

    def __init__(
        self, load: Callable[[], Settings], settings: Settings, worker_main: WorkerMain, keeper_main: KeeperMain
    ) -> None:
        """`load` reads the settings anew at SIGHUP; the main functions run in the forked children."""
        self.settings = settings
        self.exit_status = EXIT_OK
        self._load = load
        self._worker_main = worker_main
        self._keeper_main = keeper_main
        self._wish = wished(settings)
        self._reloads = 0
        # A dead worker's slot is in use until its jobs are recovered, and a reload may wish for more workers.
        self._shared = SharedSlots(max(SLOTS_LEAST, 4 * self._wish.total()))
        self._numbers: dict[Queues, int] = {}
        self._workers: dict[int, Child] = {}  # by pid
        self._backoffs: dict[Queues, Backoff] = defaultdict(Backoff)
        self._orphans: set[int] = set()  # killed, and not buried yet
        self._keeper: int | None = None
        self._keeper_backoff = Backoff()
        self._keeper_started = 0.0
        self._keeper_stop_at: float | None = None
        self._read_stacks_at: float | None = None
        self._draining = False
        self._ever_ready = False
        # The kinds that no worker of the latest reload has proven yet, and why new workers of theirs have died.
        self._unproven: dict[Queues, str | None] = {}
        self._reported_ready = False
        self._log = structlog.get_logger("supervisor").bind(pid=os.getpid())

    def run(self) -> int:
        """Keep the farm as wished for until a drain is over; returns the process's exit status.

        SIGTERM and SIGINT drain, SIGQUIT drains without waiting, SIGHUP reloads, SIGTTIN logs every worker's stacks.
        """
        if threading.active_count() > 1:
            raise RuntimeError("the supervisor should be single-threaded: a fork copies locks that other threads hold")
        setproctitle("dataloader: supervisor")
        process.adopt_orphans()
        self.signals = process.Signals((*_ORDERS, signal.SIGCHLD))
        process.unblock_signals()
        self._log.info("supervisor.started", workers=_shown(self._wish))
        gc.collect()
        gc.freeze()  # collectors skip the present objects, so that their pages stay shared
        while not self._tick():
            self.signals.wait(self._pause())
        self.signals.ignore()
        self._log.info("supervisor.stopped", exit_status=self.exit_status)
        return self.exit_status

    def _tick(self) -> bool:
        self._obey()
        with suppress(ChildProcessError):  # unknown children, which process 1 inherits, are only buried
            while (buried := os.wait4(-1, os.WNOHANG))[0]:
                self._bury(*buried)
        self._note_readiness()
        self._enforce()
        self._start_missing()
        self._give_orders()
        self._log_stacks()
        return self._is_over()

    def _obey(self) -> None:
        for number in _ORDERS:
            if number not in self.signals.received:
                continue
            self.signals.received.discard(number)
            if number == signal.SIGHUP:
                self._reload()
            elif number == signal.SIGTTIN:
                for pid, child in self._workers.items():
                    os.ftruncate(child.slot.stacks, 0)
                    os.kill(pid, signal.SIGTTIN)
                self._read_stacks_at = now() + STACKS_SEC
            else:
                self._drain(within=0 if number == signal.SIGQUIT else self.settings.ends_within)

    # --- death ---

    def _bury(self, pid: int, status: int, usage: resource.struct_rusage) -> None:
        exit_status = os.waitstatus_to_exitcode(status)
        if pid == self._keeper:
            self._keeper = None
            if now() - self._keeper_started > BACKOFF_SEC[1]:
                self._keeper_backoff = Backoff()
            if self._keeper_stop_at is None and exit_status != EXIT_OK:
                self._log.warning("supervisor.keeper.exited", exit_status=exit_status)
                self._start_failed("keeper", self._keeper_backoff, exit_status)
        elif pid in self._workers:
            child = self._workers.pop(pid)
            slot = child.slot
            slot.exit_status, slot.cpu = exit_status, usage.ru_utime + usage.ru_stime
            slot.peak_memory = usage.ru_maxrss * 1024
            self._worker_died(child, exit_status)
        elif pid in self._orphans:
            self._orphans.discard(pid)
            self._kill_orphans()

    def _worker_died(self, child: Child, exit_status: int) -> None:
        kill_group(child.pid)  # what its job has started; what has left the group is our child by now
        self._kill_orphans()
        os.close(child.slot.stacks)
        state = child.slot.state
        child.slot.state = State.DEAD
        if self._keeper is not None:
            os.kill(self._keeper, signal.SIGCHLD)  # wakes the keeper, which recovers the worker's jobs
        log = self._log.info if exit_status in (EXIT_OK, EXIT_RECYCLE) else self._log.warning
        log("supervisor.worker.exited", worker=child.slot.worker, worker_pid=child.pid, exit_status=exit_status)
        # No job is the cause of an error between two jobs, which would happen again at once.
        is_ours = state == State.STARTING or (exit_status > 0 and state in (State.RESTING, State.AWAKE))
        calling = child.slot.calling.decode("utf-8", "replace")
        if is_ours and not self._draining and (calling or exit_status not in (EXIT_OK, EXIT_RECYCLE)):
            self._start_failed("worker", self._backoffs[child.queues], exit_status, calling)
            if child.queues in self._unproven and child.slot.reload == self._reloads:
                why = f" in the {calling}" if calling else ""
                self._unproven[child.queues] = f"a new worker ended{why} with exit status {exit_status}, see its log"
                self._note_reload()

    def _kill_orphans(self) -> None:
        """Kill our unknown children; theirs become ours when they end, so this happens again at each burial."""
        orphans = set(process.children(os.getpid())) - self._workers.keys() - {self._keeper}
        for orphan in orphans:
            process.kill(orphan)
        self._orphans |= orphans

    def _start_failed(self, role: str, backoff: Backoff, exit_status: int, calling: str = "") -> None:
        """A child has died at its start; `calling` names the user's module or hook that it was in."""
        if exit_status == EXIT_CANNOT_START and not self._ever_ready:
            self.exit_status = EXIT_CANNOT_START
            self._log.error("supervisor.cannot.start", why=f"the {role} refused to start, see its log line")
            self._drain(within=self.settings.dl_kill_grace_sec)
        else:
            pause_sec = backoff.failed(by_itself=exit_status > 0 or bool(calling))
            facts = {"calling": calling, "exit_status": exit_status} if calling else {}
            self._log.warning("supervisor.start.failed", what=role, pause_sec=pause_sec, **facts)

    def _note_readiness(self) -> None:
        for child in self._workers.values():
            if child.slot.state != State.STARTING:
                self._ever_ready = True
                if child.slot.reload == self._reloads and child.queues in self._unproven:
                    del self._unproven[child.queues]
                    self._note_reload()
                if child.started > self._backoffs[child.queues].failed_at:
                    self._backoffs.pop(child.queues)
        are_ready = sum(child.slot.is_ready for child in self._workers.values())
        if not self._reported_ready and are_ready >= self._wish.total():
            self._reported_ready = True
            process.notify_ready()

    def _enforce(self) -> None:
        """Kill overdue processes, and interrupt once each run that has to stop and may have no safe point."""
        for pid, child in self._workers.items():
            slot = child.slot
            if why := kill_reason(slot):
                slot.why = why
                self._log.warning("supervisor.worker.killed", worker=slot.worker, why=why.name.lower())
                kill_group(pid)
            elif child.interrupted != slot.generation and any(
                each.reason in INTERRUPTS and each.stop_at < now() for each in deadlines(slot)
            ):
                child.interrupted = slot.generation
                os.kill(pid, signal.SIGUSR1)

    def _pause(self) -> float:
        """Seconds until the next tick: no later than the next deadline."""
        busy = [child.slot for child in self._workers.values() if child.slot.state == State.BUSY]
        ends = [at for slot in busy for deadline in deadlines(slot) for at in deadline[:2] if at > now()]
        tick = MEMORY_TICK_SEC if any(slot.memory_limit for slot in busy) else TICK_SEC
        return min([tick, *(max(0.05, end - now()) for end in ends)])

    # --- life ---

    def _start_missing(self) -> None:
        """Start the keeper and workers; a successor connects before an older worker may leave.

        So a slow import leaves no gap, and a reload with broken code keeps the old workers.
        """
        if self._keeper is None and self._keeper_stop_at is None and now() >= self._keeper_backoff.not_before:
            self._keeper_started = now()
            main = partial(self._keeper_main, self.settings, self._shared)
            self._keeper = self._fork("keeper", self._keeper_backoff, main)
        if self._draining:
            return
        running = Counter(child.queues for child in self._workers.values())
        for queues, wanted in self._wanted().items():
            for _ in range(wanted - running[queues]):
                if now() >= self._backoffs[queues].not_before:
                    self._start_worker(queues)

    def _wanted(self) -> Counter[Queues]:
        """The wish, and one more of each kind that still has a worker of an earlier reload."""
        earlier = {child.queues for child in self._workers.values() if child.slot.reload != self._reloads}
        return self._wish + Counter(earlier & self._wish.keys())

    def _start_worker(self, queues: Queues) -> None:
        slot = next((slot for slot in self._shared.slots if slot.state == State.FREE), None)
        if slot is None:
            return  # every dead worker's jobs wait for the keeper: the database is away
        try:  # a memory file for the stacks of the worker's threads, which the worker dumps at SIGTTIN
            stacks = os.memfd_create("stacks", os.MFD_CLOEXEC)
        except OSError as e:
            self._has_no_room("worker", self._backoffs[queues], e)
            return
        fcntl.fcntl(stacks, fcntl.F_SETFL, os.O_APPEND)
        slot.take(self._numbers.setdefault(queues, len(self._numbers)), self._reloads)
        slot.stacks = stacks
        self._set_limits(slot)

        def main() -> int:
            faulthandler.register(signal.SIGTTIN, stacks, all_threads=True)
            return self._worker_main(self.settings, queues, self._shared, slot)

        pid = self._fork("worker", self._backoffs[queues], main)
        if pid is None:
            os.close(stacks)
            slot.state = State.FREE
        else:
            self._workers[pid] = Child(pid, slot, queues, now())

    def _fork(self, role: str, backoff: Backoff, main: Callable[[], int]) -> int | None:
        """The child's pid; None: the host has no room for another process now, and the other children go on."""

        def child() -> int:
            self.signals.forget()
            return main()

        try:
            return process.fork(child)
        except OSError as e:
            self._has_no_room(role, backoff, e)
            return None

    def _has_no_room(self, role: str, backoff: Backoff, error: OSError) -> None:
        pause_sec = backoff.failed(by_itself=True)
        self._log.error("supervisor.start.failed", what=role, pause_sec=pause_sec, error=str(error))

    def _reload(self) -> None:
        """Take new settings; older workers leave one by one after their runs, each for a successor that is ready."""
        try:
            settings = self._load()
            wish, room = wished(settings), len(self._shared.slots)
            if wish.total() + len(wish) > room:
                raise ConfigError(
                    f"WORKERS_JSON: this supervisor has room for {room} workers and a successor of each kind, and not"
                    f" for {wish.total()} workers: restart the farm"
                )
        except ConfigError as e:
            self._log.error("supervisor.reload.refused", error=str(e))
            self._unproven = {}
            self._note_reload(str(e))
            return
        log.configure(settings)
        self.settings, self._wish = settings, wish
        self._reloads += 1
        for child in self._workers.values():
            self._set_limits(child.slot)
        self._backoffs.clear()  # the failures were the former code's
        self._unproven = dict.fromkeys(self._wish)
        self._note_reload()
        if self._keeper is not None:
            os.kill(self._keeper, signal.SIGTERM)
        self._log.info("supervisor.reloaded", workers=_shown(self._wish), generation=self._reloads)

    def _note_reload(self, refused: str | None = None) -> None:
        """Let the keeper show why the latest reload was refused or fails, or that it goes well."""
        error = next(filter(None, (refused, *self._unproven.values())), None)
        with self._shared.reload.changed() as note:
            note["error"] = error and log.masked(error)[:RELOAD_ERROR_MOST]

    def _set_limits(self, slot: Slot) -> None:
        slot.grace_sec, slot.silence_sec = self.settings.dl_kill_grace_sec, self.settings.dl_stall_sec

    # --- who may claim ---

    def _give_orders(self) -> None:
        """Replace the workers of earlier reloads one by one, and let as many workers claim as are wished for.

        A worker that is to wait finishes its run, and shows RESTING; only then it drains, and another worker gets its
        place. So no more jobs run at once than wished for, and no order overtakes a claim.
        """
        if self._draining:
            return
        self._replace_one([child for child in self._workers.values() if child.slot.reload != self._reloads])
        for queues, wished_for in self._wish.items():
            self._let_claim([child for child in self._workers.values() if child.queues == queues], wished_for)

    def _replace_one(self, older: list[Child]) -> None:
        """When all wanted workers are ready, end one older worker: the first that has no run."""
        ready = Counter(child.queues for child in self._workers.values() if child.slot.is_ready)
        are_ready = all(ready[queues] >= wanted for queues, wanted in self._wanted().items())
        resting = [child for child in older if child.rests]
        if are_ready and resting:
            self._drain_worker(resting[0], self.settings.ends_within)
        idle = [child for child in older if child.slot.state == State.IDLE]
        asked = (idle[:1] or older) if are_ready and not resting else []
        for child in older:
            if child.slot.works:
                self._let_work(child, child not in asked)

    def _let_claim(self, of_kind: list[Child], wished_for: int) -> None:
        """Give the free places of a kind to the workers that are ready, then to those that start; the newest first."""
        at_work = [child for child in of_kind if child.slot.may_work or child.slot.works]
        others = [child for child in of_kind if child not in at_work and not child.slot.drain_by]
        others.sort(key=lambda child: (not child.rests, -child.slot.reload))
        for child in others[: max(0, wished_for - len(at_work))]:
            self._let_work(child, True)

    def _let_work(self, child: Child, may_work: bool) -> None:
        if child.slot.may_work != may_work:
            child.slot.may_work = may_work
            if child.slot.state != State.BUSY:  # a busy worker checks its slot after the run
                os.kill(child.pid, signal.SIGHUP)

    # --- stacks ---

    def _log_stacks(self) -> None:
        if self._read_stacks_at is None or now() < self._read_stacks_at:
            return
        self._read_stacks_at = None
        for child in self._workers.values():
            dump = os.pread(child.slot.stacks, 1 << 20, 0).decode("utf-8", "replace")
            # A line for each thread, because a line's length is bounded; faulthandler dumps the pipeline's thread last.
            for stack in reversed(dump.strip().split("\n\n")):
                self._log.warning("supervisor.worker.stacks", worker=child.slot.worker, stacks=stack)

    # --- the end ---

    def _drain(self, within: float) -> None:
        """Drain every worker; each has `within` seconds to finish its job, or to hand it back."""
        was_draining, self._draining = self._draining, True
        if not was_draining:
            self._log.info("supervisor.draining", workers=len(self._workers), within_sec=within)
        for child in self._workers.values():
            self._drain_worker(child, within)

    def _drain_worker(self, child: Child, within: float) -> None:
        did_drain = child.slot.drain_by > 0
        child.slot.drain_until(now() + within)
        if not did_drain:
            os.kill(child.pid, signal.SIGTERM)

    def _is_over(self) -> bool:
        """Whether the drain is over; the keeper stops last, because it recovers the last workers' jobs."""
        if not self._draining or self._workers:
            return False
        if self._keeper is None:
            return self._keeper_stop_at is not None or all(slot.state != State.DEAD for slot in self._shared.slots)
        if self._keeper_stop_at is None:
            self._keeper_stop_at = now() + KEEPER_STOP_SEC
            os.kill(self._keeper, signal.SIGTERM)
        elif now() > self._keeper_stop_at:
            kill_group(self._keeper)
        return False


def wished(settings: Settings) -> Counter[Queues]:
    """How many workers of each kind there should be; several entries for the same queues add up."""
    wish: Counter[Queues] = Counter()
    for spec in settings.workers:
        wish[spec.served] += spec.concurrency
    return wish


def _shown(wish: Counter[Queues]) -> dict[str, int]:
    return {", ".join(queues): wished_for for queues, wished_for in wish.items()}
