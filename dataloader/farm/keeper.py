"""PROCESS: the farm's keeper, one beside the workers. Single-threaded, one connection, no pipelines.

The keeper hears of cancellations for all workers, renews the lease of a worker that is alive but silent (a C call holds
its GIL) and hands back what the worker has claimed ahead, recovers a dead worker's jobs at once, shows the workers to
people, and ends the workers of a supervisor that was killed.
"""

from __future__ import annotations

import math
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import structlog
from setproctitle import setproctitle

from dataloader import log, periods
from dataloader.config import Settings
from dataloader.exits import EXIT_CANNOT_START, EXIT_FENCED, EXIT_OK
from dataloader.farm import process
from dataloader.farm.admission import Host
from dataloader.farm.capture import NAMES, SOURCES
from dataloader.farm.common_log import FarmOutage, Note
from dataloader.farm.process import call_parent, cpu_used_by, kill_group, memory_used, now
from dataloader.farm.session import Lost, Session, opened, read
from dataloader.farm.slots import TOOK_LONGER, Held, Reason, SharedSlots, Slot, State, kill_reason
from dataloader.queue import db, lifecycle, logs, migrations, run_log
from dataloader.queue.job import Job, beat_interval
from dataloader.queue.reports import stats
from dataloader.queue.run_log import SAVED, Keys, RunLog, Splitter, Text, harmless

TICK_SEC = 0.25
ANSWER_SEC = periods.seconds("KEEPER_ANSWER_SEC", 10.0)  # the longest wait for an answer of the server
LOCK_SEC = 2.0  # for a lock that another session has
SILENT_SEC = 1.0  # from a claim until the keeper hands back what waits behind a run that holds the GIL
# How long the keeper asks which runs are cancelled: the slot of a job's worker may not show the job yet.
HEARD_SEC = periods.seconds("HEARD_SEC", 5.0)
# How long a keeper in a drain tries to recover the last jobs.
LAST_RECOVERY_SEC = periods.seconds("LAST_RECOVERY_SEC", 5.0)
# The same without a supervisor; then the reaper recovers them.
ORPHAN_RECOVERY_SEC = periods.seconds("ORPHAN_RECOVERY_SEC", 60.0)
GONE = "the worker was gone when a farm of its host started"
_STOP = (signal.SIGTERM, signal.SIGINT)


def main(settings: Settings, dsn: str, shared: SharedSlots) -> int:
    """Keep until an order to stop; returns the process's exit status."""
    log.configure(settings, threaded=True)
    keeper = Keeper(settings, dsn, shared)
    process.unblock_signals()
    try:
        return keeper.keep()
    except migrations.SchemaError as e:
        keeper.log.error("keeper.schema.refused", error=str(e))
        return EXIT_CANNOT_START


class Keeper:
    """The state of the keeper: its connection, and whether the supervisor is still there."""

    def __init__(self, settings: Settings, dsn: str, shared: SharedSlots) -> None:
        self.log = structlog.get_logger("keeper").bind(pid=os.getpid())
        self._settings = settings
        self._shared = shared
        schema, within = settings.pg_schema_queue, settings.pg_connect_timeout
        begin = partial(opened, dsn, "dl-keeper", schema, within, ANSWER_SEC, LOCK_SEC)
        outage = FarmOutage(shared.outage, self.log)
        self._session = Session(begin, self._resume, outage, "keeper.session.lost")
        self._supervisor = shared.supervisor
        self._retry_at = 0.0
        self._has_settled = False  # whether the jobs of this host's earlier, dead workers are settled
        self._ask_until = 0.0  # until then a run may be canceled
        self._leave_at: float | None = None
        self._registry = WorkerRegistry(Host(settings), self._shared.reload)
        self._stuck = StuckRuns()
        self._salvage = Salvage(settings.dl_job_log_kb)
        self._signals = process.Signals((*_STOP, signal.SIGCHLD))  # SIGCHLD: the supervisor has reaped a worker
        setproctitle("dataloader: keeper")

    def keep(self) -> int:
        while not self._may_leave():
            self._drain_orphans()
            self._salvage.open_new(self._shared.used())
            self._signals.received.discard(signal.SIGCHLD)
            if now() < self._retry_at:
                self._sleep()
                continue
            try:
                self._session.call(self._tick)
            except Lost:
                self._retry_at = now() + self._session.pause_sec
        with suppress(psycopg.Error, Lost):
            if self._session.is_open:
                self._session.call(lambda session: self._registry.close(session.conn))
        return EXIT_OK

    def _tick(self, session: lifecycle.Session) -> None:
        """Look after all slots, then wait for TICK_SEC, or until a birth, a cancellation or a signal."""
        conn = session.conn
        # Renewals first: recovery may have to wait for a session's end.
        for slot in self._shared.used():
            if (held := slot.held()) and not slot.fence_by:
                interval = beat_interval(self._settings.dl_heartbeat_sec, held.lease_ttl)
                has_missed_a_beat = (sent := now()) - held.renewed > 1.5 * interval
                # Not for a stopped worker, nor after a deadline.
                if has_missed_a_beat and not kill_reason(slot) and process.is_running(slot.pid):
                    is_held = lifecycle.keep(conn, held.job_ids, held.attempts, slot.worker)
                    if is_held and slot.held() is not None:
                        slot.kept = sent
        if not self._has_settled:
            self._settle_the_gone(conn)
        for slot, held, silent_sec, stacks in self._stuck.answered(self._shared.used()):
            facts = {"worker": slot.worker, "job_id": str(held.job_id), "silent_sec": silent_sec}
            self.log.warning("keeper.stuck", **facts)
            lifecycle.journal_stuck(conn, held.job_id, held.attempts[0], slot.worker, silent_sec, stacks)
        self._enforce_cancellations(conn)
        for slot in self._shared.used():
            if slot.state == State.DEAD:
                self._recover(conn, slot)
            elif slot.ahead:
                self._take_back(conn, slot)
        try:
            self._registry.show(conn, self._shared.used())
        except psycopg.Error as e:  # for people only: a failure here changes no lease and closes no session
            if conn.closed:
                raise
            self.log.warning("keeper.census.failed", error=str(e).strip())
        if not self._hears_of_cancellations(conn):
            self._sleep(conn.fileno())

    def _enforce_cancellations(self, conn: db.Connection) -> None:
        """Let the supervisor interrupt cancelled runs, because a C call may hold a worker's GIL."""
        self._hears_of_cancellations(conn)
        if now() > self._ask_until:
            return
        held_by = [(slot, held) for slot in self._shared.used() if (held := slot.held())]
        holders = {job_id: (slot, held) for slot, held in held_by for job_id in held.job_ids}
        for job_id, is_forced in (lifecycle.cancellations(conn, list(holders)) if holders else {}).items():
            slot, held = holders[job_id]
            grace = 0.0 if is_forced else self._settings.dl_cancel_grace_sec
            stop_at = math.inf if grace is None else now() + grace
            if slot.canceled != held.generation or stop_at < slot.cancel_at:
                slot.cancel_at = stop_at
                slot.canceled = held.generation
                call_parent(self._supervisor)  # it interrupts and ends runs

    def _recover(self, conn: db.Connection, slot: Slot) -> None:
        """Recover the jobs of this slot's dead worker; where the database refuses that, the reaper does later."""
        jobs, (end, reason, facts) = [], death(slot)
        try:
            if slot.worker:
                if slot.session:
                    # This is first: a claim under way could commit after the check, and no worker would run its job.
                    lifecycle.end_session(conn, *slot.session)
                self._salvage.write(conn, slot)
                jobs = lifecycle.settle(conn, slot.worker, end, reason, facts, slot.begun_last)
        except psycopg.Error as e:
            if conn.closed or db.is_passing(e):
                raise
            self.log.error("keeper.settle.failed", worker=slot.worker, error=str(e).strip())
        if self._have_settled(jobs, slot.worker, reason):
            self._salvage.forget(slot)
            slot.state = State.FREE

    def _have_settled(self, jobs: Sequence[lifecycle.Settled], worker: str, reason: str) -> bool:
        """Report the settled jobs of a dead worker; False where a row is locked, and the next tick tries again."""
        for job in jobs:
            if job.status:
                became = {"job_id": str(job.job_id), "status": job.status}
                log.metric("job.run", outcome="died", **became)
                self.log.warning("keeper.settled", reason=reason, worker=worker, **became)
        return all(job.status for job in jobs)

    def _take_back(self, conn: db.Connection, slot: Slot) -> None:
        """Hand back the jobs behind a worker's run when the heartbeat cannot: a C call holds the GIL.

        The worker's session ends, for it has the keys of these jobs. The run goes on: its row has its key, and the
        worker takes the key again after the call.
        """
        held = slot.held()
        if held is None or now() < slot.renewed + SILENT_SEC or not slot.recall(held) or not slot.session:
            return
        lifecycle.end_session(conn, *slot.session)
        jobs = lifecycle.take_back(conn, slot.worker, slot.waiting, TOOK_LONGER)
        self.log.info("keeper.taken_back", worker=slot.worker, job_id=str(held.job_id), jobs=jobs)
        slot.ahead = 0

    def _resume(self, session: lifecycle.Session, lost: Sequence[lifecycle.Session]) -> None:
        lifecycle.listen_for_cancellations(session.conn)
        self._ask_until = now() + HEARD_SEC  # a cancellation may have come without a session

    def _settle_the_gone(self, conn: db.Connection) -> None:
        """Recover, once, jobs of this host's workers that are gone with their supervisor: no other keeper does."""
        self._has_settled = True
        for worker in filter(process.is_gone, lifecycle.holders(conn, process.hostname())):
            self._has_settled &= self._have_settled(lifecycle.settle_gone(conn, worker, GONE), worker, GONE)

    def _hears_of_cancellations(self, conn: db.Connection) -> bool:
        """Whether running jobs are cancelled; for HEARD_SEC the keeper asks for those of the runs that it sees."""
        if has_heard := bool(read(conn)):
            self._ask_until = now() + HEARD_SEC
        return has_heard

    def _sleep(self, *others: int) -> None:
        """Wait for TICK_SEC, a signal, a birth or one of the file descriptors `others`."""
        self._signals.wait(TICK_SEC, self._shared.born, *others)
        with suppress(BlockingIOError):
            os.eventfd_read(self._shared.born)

    def _may_leave(self) -> bool:
        """After an order, once no dead worker is left; without a supervisor, once no worker is left at all."""
        left = {slot.state for slot in self._shared.used()} - {State.FREE}
        is_orphaned = self._is_orphaned()
        if not (is_orphaned or self._signals.received & set(_STOP)) or (is_orphaned and left - {State.DEAD}):
            return False
        if self._leave_at is None:
            self._leave_at = now() + (ORPHAN_RECOVERY_SEC if is_orphaned else LAST_RECOVERY_SEC)
        return State.DEAD not in left or now() > self._leave_at

    def _is_orphaned(self) -> bool:
        # Not by SIGTERM, which the supervisor's death sends: the signal may come first, and orders nothing.
        return os.getppid() != self._supervisor

    def _drain_orphans(self) -> None:
        """After the supervisor was killed: its workers drain, and the keeper kills overdue ones."""
        if not self._is_orphaned():
            return
        for slot in self._shared.used():
            if slot.state == State.DEAD:
                continue
            slot.drain_until(now() + self._settings.ends_within)
            if why := kill_reason(slot):
                slot.why = why
                kill_group(slot.pid)
            # A newborn worker shows its pid soon. A slot keeps none where the supervisor has died before the fork.
            is_gone = process.started(slot.pid) is None if slot.pid else bool(why)
            if is_gone:
                kill_group(slot.pid)  # the processes that its job has started
                slot.exit_status = -signal.SIGKILL
                slot.state = State.DEAD


# The end of a dead worker's jobs and the text, by reason. Other reasons count as crashes.
_ENDS = {
    Reason.DRAIN: ("drain", "drain"),
    Reason.STALLED: ("crash", "worker killed: no heartbeat for DL_STALL_SEC"),
    Reason.FENCED: ("drain", "the lease ran out"),
    Reason.STUCK: (
        "timeout",
        "stuck: the run reported nothing for its stall_sec and was killed; its journal has the stacks",
    ),
    Reason.TIMEOUT: ("timeout", "timeout: the run took too long, did not stop and was killed"),
    Reason.CANCELED: ("crash", "canceled by force: the run did not stop and was killed"),
}


def death(slot: Slot) -> tuple[str, str, dict[str, float]]:
    """The end of the worker's jobs, the reason as text, the facts of the journal.

    The last has the process's exit status, and its last run's cost where the supervisor has buried it.
    """
    status = slot.exit_status
    # A worker that has left by itself after the loss of its claim was fenced as well.
    reason = Reason.FENCED if status == EXIT_FENCED and slot.fence_by else Reason(slot.why)
    cause = f"killed by signal {-status}" if status < 0 else f"exited with {status}"
    end, text = _ENDS.get(reason, ("crash", f"worker {cause}"))
    if reason is Reason.MEMORY:
        used, limit = slot.memory_used >> 20, slot.memory_limit >> 20
        text = f"out of memory: the run used {used} MB, max_memory_mb is {limit}, and was killed"
    facts: dict[str, float] = {"signal": -status} if status < 0 else {"exit_status": status}
    return end, text, facts | (slot.cost(slot.cpu, slot.peak_memory) if slot.peak_memory else {})


# --- stuck runs ---

DUMP_SEC = 0.2  # from the signal until the stacks are read
STACKS_MOST = 16_384  # bytes that are kept


class StuckRuns:
    """The silences for which the keeper has asked a worker for its stacks, by slot."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[float, float]] = {}  # the silence's begin, and when to read the stacks

    def answered(self, slots: Sequence[Slot]) -> Iterator[tuple[Slot, Held, float, str]]:
        """Ask newly stuck workers for their stacks; slot, run, seconds of silence and stacks, each silence once."""
        for slot in slots:
            since = slot.reported_at
            asked_since, read_at = self._asked.get(slot.index, (0.0, 0.0))
            if slot.stuck_at > now() or not (held := slot.held()):
                self._asked.pop(slot.index, None)
            elif asked_since != since:
                with suppress(OSError):
                    os.truncate(_memory_file(slot.pid, slot.stacks, "stacks"), 0)
                    os.kill(slot.pid, signal.SIGTTIN)
                self._asked[slot.index] = since, now() + DUMP_SEC
            elif now() > read_at:
                dump = ""
                with suppress(OSError):
                    file = Path(_memory_file(slot.pid, slot.stacks, "stacks"))
                    dump = file.read_bytes()[:STACKS_MOST].decode("utf-8", "replace")
                parts = dump.strip().split("\n\n")
                yield slot, held, round(now() - since, 1), "\n\n".join(reversed(parts))  # the pipeline's thread is last
                self._asked[slot.index] = since, math.inf  # only now: the caller may have failed to write it


def _memory_file(pid: int, fd: int, name: str) -> str:
    """The path of a worker's memory file. Raises OSError: the process is gone, and its number may be another's."""
    path = f"/proc/{pid}/fd/{fd}"
    if not os.readlink(path).startswith(f"/memfd:{name}"):
        raise FileNotFoundError(path)
    return path


# --- the list of workers ---

CHANGED_SEC = 2.0  # how soon a change is shown
# How often without a change: a worker that was not shown for 30 s counts as gone.
UNCHANGED_SEC = periods.seconds("UNCHANGED_SEC", 10.0)


class WorkerRegistry:
    """The workers as shown last in dl_workers, and the CPU seconds of each of them."""

    def __init__(self, its_host: Host, reload: Note) -> None:
        self._its_host, self._reload = its_host, reload
        self._name = process.hostname()
        self._farm = f"{self._name}:{os.getppid()}:{uuid4().hex[:12]}"
        self._shown: list[tuple[Any, ...]] = []
        self._at = self._checked_at = -UNCHANGED_SEC
        self._cpu: dict[str, tuple[float, float]] = {}  # by worker: when its CPU seconds were read, and how many

    def show(self, conn: db.Connection, slots: Sequence[Slot]) -> None:
        """Show the workers in these slots, after a change or every UNCHANGED_SEC; briefly, see stats.sql."""
        if now() < self._checked_at + CHANGED_SEC:
            return
        self._checked_at = now()
        present = [(slot, _state(slot)) for slot in slots if slot.state != State.FREE and slot.worker]
        error = self._reload.read().get("error")
        shown: list[tuple[Any, ...]] = [(slot.worker, state, slot.runs) for slot, state in present] + [(error,)]
        if shown == self._shown and now() < self._at + UNCHANGED_SEC:
            return
        self._shown, self._at = shown, now()
        rows = [self._row(slot, state) for slot, state in present]
        self._cpu = {slot.worker: self._cpu[slot.worker] for slot, _ in present}
        bound_mb = self._its_host.bound_mb
        stats.show_workers(conn, self._farm, self._name, rows, bound_mb if math.isfinite(bound_mb) else None, error)

    def close(self, conn: db.Connection) -> None:
        stats.show_workers(conn, self._farm, self._name, [])

    def _row(self, slot: Slot, state: str) -> dict[str, Any]:
        held = slot.held()
        at, used = now(), cpu_used_by(slot.pid)
        before, had_used = self._cpu.get(slot.worker, (at, used))
        self._cpu[slot.worker] = at, used
        return {
            "worker": slot.worker,
            "pid": slot.pid,
            "queue": slot.queues[0],
            "queues": slot.queues,
            "state": state,
            "job_id": held and str(held.job_id),
            "silent_sec": now() - slot.reported_at if held else None,
            "memory_bytes": memory_used(slot.pid),
            # Of one core since the last reading; the processes that a job has started count too.
            "cpu_percent": round(100 * max(0.0, used - had_used) / (at - before), 1) if at > before else 0.0,
            "jobs": slot.runs,
            "started_at": process.started_at(slot.pid),
        }


def _state(slot: Slot) -> str:
    """The state for people: a stopped process cannot show it itself; a resting one has yet to start to work."""
    if slot.state != State.DEAD and process.is_stopped(slot.pid):
        return "stopped"
    if slot.stuck_at < now():
        return "stuck"
    return "starting" if slot.state == State.RESTING else State(slot.state).name.lower()


# --- the last words of dead workers ---

SAVED_MOST = 65_536  # bytes of each file that are saved
DOUBT_SEC = 86_400.0  # the largest age of stored lines that the worker's slot does not show
KEY_MOST = 16_384  # bytes before these in which a private key may begin


class Salvage:
    """The files of the living workers' output, by slot: the worker's pid and the descriptors here."""

    def __init__(self, most_kb: int) -> None:
        self._most = int(most_kb * 1024 * SAVED)
        self._echoes = dict(zip(SOURCES, (log.echo(1), log.echo(2)), strict=True)) if most_kb else {}
        self._files: dict[int, tuple[int, list[int]]] = {}
        # A keeper without a free descriptor could not reconnect.
        self._most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4

    def open_new(self, slots: Sequence[Slot]) -> None:
        """Open the files of new workers, at once: a worker may die in its first run."""
        for slot in slots:
            is_known = self._files.get(slot.index, (0,))[0] == slot.pid
            if is_known or slot.state in (State.FREE, State.DEAD) or not slot.log_files[0]:
                continue
            self.forget(slot)
            if len(self._files) >= self._most_files:
                continue
            opened: list[int] = []
            try:
                for number, name in zip(slot.log_files, NAMES, strict=True):
                    opened.append(os.open(_memory_file(slot.pid, number, name), os.O_RDONLY | os.O_CLOEXEC))
                self._files[slot.index] = slot.pid, opened
            except OSError:  # it has died meanwhile
                for fd in opened:
                    os.close(fd)

    def write(self, conn: db.Connection, slot: Slot) -> None:
        """Write what the latest run of a dead worker has left, if its job is still this worker's."""
        pid, files = self._files.get(slot.index, (0, []))
        if pid != slot.pid or not files or not slot.logs or not (job_ids := slot.begun_last):
            return
        places = [*zip(files, slot.log_places, SOURCES, strict=True)]
        if all(_begin(fd, at) == os.fstat(fd).st_size for fd, at, _ in places):
            return
        claim = Job(job_ids[0], "", "", "{}", None, "", "", slot.attempts[slot.place], 0, 0, None, 0, slot.worker)
        run = RunLog(claim, self._most, now() - DOUBT_SEC, slot.log_line)
        run.is_in_doubt = True  # the worker may have died between its last write and the note of it
        args = logs.args_of_run(conn, job_ids, slot.worker)
        log.learn_job({"jobs": args})
        try:
            lines = [each for place in places for each in last_words(*place)]
            for each in lines:
                run.add(min(now(), each.at or now()), each.level, each.source, each.text)
            logs.write(conn, [run], now(), are_over=True)
            for each in lines:
                if each.at is None:  # the output goes on to where the worker's own had led
                    self._echoes[each.source](each.text.encode("utf-8", "backslashreplace") + b"\n")
        finally:
            log.learn_job({})
        slot.logs = False  # once

    def forget(self, slot: Slot) -> None:
        for fd in self._files.pop(slot.index, (0, []))[1]:
            os.close(fd)


def last_words(fd: int, at: int, source: str) -> Iterator[Text]:
    """The lines behind a place, masked, as far as they are in the last SAVED_MOST bytes."""
    begin = _begin(fd, at)
    # The lines may begin within a private key, whose first line the worker may have written itself.
    first, keys = max(0, begin - KEY_MOST), Keys()
    for raw in _lines(os.pread(fd, begin - first, first)):
        keys.masked(raw.decode("utf-8", "replace"), log.MASK)
    for raw in _lines(os.pread(fd, os.fstat(fd).st_size - begin, begin)):
        line = run_log.read(raw, source)
        yield line._replace(text=keys.masked(log.masked(harmless(line.text)), log.MASK))


def _begin(fd: int, at: int) -> int:
    """The place, or the first line of the last SAVED_MOST bytes."""
    size = os.fstat(fd).st_size
    place, cut = 0 if size < at else at, size - SAVED_MOST
    return place if cut <= place else cut + os.pread(fd, SAVED_MOST, cut).find(b"\n") + 1


def _lines(data: bytes) -> list[bytes]:
    splitter = Splitter()
    return [*splitter.feed(data.lstrip(b"\0")), *splitter.finish()]  # without memory that was given back
