"""PROCESS: one worker. Waits, claims, runs, finishes; one connection, one job at a time.

Forked by the supervisor, or run alone. May import `db`, `queue`, `job`, `heartbeat`, `pipelines`, `process`.
"""

from __future__ import annotations

import math
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from uuid import UUID, uuid4

import psutil
import psycopg
import structlog
from psycopg import errors
from setproctitle import setproctitle

from dataloader import log, pipelines
from dataloader.config import ConfigError, Settings
from dataloader.farm import traces
from dataloader.farm.heartbeat import LOCKED_SEC, TICK_SEC, Heartbeat
from dataloader.farm.process import (
    EXIT_CANNOT_START,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_RECYCLE,
    Peak,
    Pipes,
    Signals,
    adopt_orphans,
    cpu_used,
    end_children,
    now,
    unblock_signals,
)
from dataloader.farm.runner import Runner, headline
from dataloader.farm.slots import READY, SharedSlots, Slot, State
from dataloader.queue import db, lifecycle, migrations, probe
from dataloader.queue.job import End, Finish, Job, Outcome, Status, decide
from dataloader.queue.lifecycle import Ended, Step

HERD_SEC = 0.002  # a farm's first idle worker answers a notification at once, the next after this, two after twice this
CHILDREN_SEC = 2.0  # from SIGKILL to a job's children until a worker gives itself up with them
LOCKED_MOST = 1_000  # ends whose rows are locked, from which on a worker claims nothing
PLACE_SEC = 0.05  # between looks for a place: how late a job may start because its worker was replaced


def main(settings: Settings, dsn: str, queue_name: str, shared: SharedSlots, slot: Slot, pipes: Pipes) -> int:
    """Work on one queue until told to stop or to leave; the process's exit status."""
    log.configure(settings, threaded=True)
    worker = Worker(settings, dsn, queue_name, shared, slot, pipes)
    unblock_signals()
    try:
        pipelines.load(settings.pipeline_modules)
    except BaseException as e:
        at_length = {"exc_info": e} if _takes(pipes.tell) else {}
        worker.log.error("worker.pipelines.failed", error=headline(e), **at_length)
        return EXIT_CANNOT_START
    worker.signals.put_back()  # a module may have taken them at its import
    try:
        return worker.work()
    except (migrations.SchemaError, ConfigError) as e:
        worker.log.error("worker.schema.refused", error=str(e))
        return EXIT_CANNOT_START
    except Unwritten as e:
        worker.log.error("worker.end.unwritten", error=str(e), failures=worker.outage.failures)
        return EXIT_FAILED
    finally:
        worker.traces.close()


class Unwritten(Exception):
    """A job's end could not be written, in the time to drain or at all: it is left to the keeper or the reaper."""


class Worker:
    """The state of one worker process: its identity, its session, and whether it should stop."""

    def __init__(
        self, settings: Settings, dsn: str, queue_name: str, shared: SharedSlots, slot: Slot, pipes: Pipes
    ) -> None:
        self.settings = settings
        self.queue = queue_name
        self.shared = shared
        self.slot = slot
        self.sound = True
        self._dsn = dsn
        self._pipes = pipes
        self._orphaned = False
        self._retiring = False  # a newer generation is to take over
        self._jobs = 0
        self._stop_at: float | None = None  # when a draining worker's job must be over
        self.name = f"{socket.gethostname()[:100]}:{os.getpid()}:{uuid4().hex[:12]}"
        self.signals = Signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), self._on_signal)
        slot.occupy(self.name, queue_name)
        self.log = structlog.get_logger("worker").bind(worker=self.name, queue=queue_name)
        self.outage = log.Outage(self.log, "worker.session.back")
        self._heartbeat: Heartbeat | None = None
        self._due_in: float | None = None  # seconds until the next due row, as of the last claim
        self._prefetch = max((spec.prefetch for spec in settings.workers if spec.queue == queue_name), default=1)
        self._most = self._prefetch  # how many jobs to claim at once: less where the server's lock table is small
        self._seconds_each: float | None = None  # of the jobs claimed last
        self._locked: set[UUID] = set()  # the jobs whose rows were locked when their ends were last tried
        self._peak = Peak()
        self.runner = Runner(settings, dsn, slot, lambda: self._stop_at, self._leap)
        self.traces = traces.start(self.name)
        signal.signal(signal.SIGUSR1, lambda *_: self.runner.interrupt())
        self.signals.keep()
        adopt_orphans()

    # --- life ---

    def work(self) -> int:
        """Claim until empty, then wait; connect whenever there is no session."""
        while not self.stopping:
            try:
                if self._heartbeat is None or self.session.conn.closed:
                    self._connect()
                self._take_place()
                while self.sound and not self.stopping and not self._may_leave() and self.work_some():
                    pass
                if not self.sound or self.slot.state is State.LEAVING:
                    break
                self._wait()
            except psycopg.Error as e:
                if not db.is_passing(e):
                    raise
                self._lost(e)
        self._write_last_ends()
        if not self.sound:
            return EXIT_RECYCLE
        self.log.info("worker.stopped")
        return EXIT_OK

    @property
    def stopping(self) -> bool:
        """True once the worker drains."""
        return self._stop_at is not None

    def _on_signal(self, number: int) -> None:
        """In the signal handler: only set values."""
        if number == signal.SIGHUP:
            self._retiring = True
        else:
            self.drain()

    def _may_leave(self) -> bool:
        """Where a newer generation is to take over: try to be the one that may leave now."""
        if not self._retiring:
            return False
        before = self.slot.state
        self.slot.state = State.LEAVING  # before the permission is taken, see Supervisor._let_one_leave
        if before is State.LEAVING or _takes(self._pipes.leave):
            return True
        self.slot.state = before
        return False

    def _take_place(self) -> None:
        """Start to work, or first wait until a worker of before has left: no more jobs run at once than wished for."""
        while self.slot.state is State.STARTING and self._is_one_too_many() and not self.stopping:
            self._title("waits for a place")
            if not self._may_leave():
                self._pause(PLACE_SEC)
                list(self.session.conn.notifies(timeout=0))  # unread ones would stop the backend, and then all NOTIFY
        if self.slot.state is not State.LEAVING:
            self.slot.state = State.AWAKE
            self._title("idle")

    def _is_one_too_many(self) -> bool:
        wished_for = sum(spec.concurrency for spec in self.settings.workers if spec.queue == self.queue)
        of_queue = [slot for slot in self.shared.slots if slot.fields.queue == self.slot.fields.queue]
        return sum(slot.state in READY for slot in of_queue) >= wished_for

    def drain(self) -> None:
        """Claim nothing more; a running job has DL_DRAIN_SEC. Called by the signal handler: it only sets values."""
        if self._stop_at is None:
            self._stop_at = now() + self.settings.dl_drain_sec
            self.slot.drain_until(self._stop_at + self.settings.dl_kill_grace_sec)

    def _title(self, doing: str) -> None:
        setproctitle(f"dataloader: worker {self.queue}#{self.slot.index} {doing}")

    # --- the path of a job ---

    def work_some(self) -> bool:
        """Write the ends of earlier runs, claim jobs, run them. True: look again at once; False: nothing is there."""
        sent = now()
        most = self._appetite()
        step = self._step(most)
        if not step.jobs:
            self._due_in = step.due_in
            if most and not step.look_again:
                self.slot.left_empty_handed(sent, step.due_in)
            return step.look_again
        hold = self.heartbeat.hold
        hold.claimed(step.jobs)
        if self.traces.is_on:
            self._learn_traces(step.jobs)
        with self.heartbeat.holding():
            while self.sound and not self.stopping and (job := hold.next()):
                self._run(job, sent)
        hold.hand_back("drain" if self.stopping else "not started: the worker is replaced")
        self._seconds_each = (now() - sent) / len(step.jobs)
        self._title("idle")
        return True

    def _appetite(self) -> int:
        """How many jobs to claim at once: so many that the end of the first waits TICK_SEC at most for the others'.

        0 while the rows of LOCKED_MOST jobs are locked whose ends are to be written.
        """
        if len(self.heartbeat.hold.locked) >= LOCKED_MOST:
            return 0
        if self._most == 1 or self._seconds_each is None:
            return 1
        return min(self._most, 1 + int(TICK_SEC / self._seconds_each))

    def _learn_traces(self, jobs: Sequence[Job]) -> None:
        with suppress(psycopg.Error):  # a lost session is the heartbeat's to notice; the jobs are ours
            self.traces.learn(lifecycle.traces(self.session.conn, [job.job_id for job in jobs]))

    def _run(self, job: Job, sent: float) -> None:
        """Run a job that was claimed at `sent`; its end is kept, to be written with the next claim."""
        began = now()
        self.slot.begin(job.job_id, job.attempt, job.lease_ttl_sec, sent)
        if began > self.slot.fence_at:
            self.slot.end()
            self.heartbeat.hold.add(Ended(job, Finish("hand_back", "not started: its lease ran out")))
            return
        self._peak.forget()
        if self._prefetch == 1:
            self._title(f"job={job.job_id} attempt={job.attempt}")
        with _named(job), self.traces.run(job) as tell:
            with self.heartbeat.run_of(job, self.slot) as lease:
                try:
                    outcome = self.runner.run(job, lease)
                finally:
                    taken = self.signals.put_back()
                    facts = self.slot.cost(cpu_used(), self._peak.bytes())
                    is_alone = end_children(CHILDREN_SEC)  # what the pipeline has started does not outlive its job
                    self.slot.end()  # before the heartbeat lets go: it may be in the middle of a reconnect
            tell(outcome)
            self._tell_failure(outcome)
            self._jobs += 1
            if taken:  # whoever sent one meanwhile was not heard, and it may have been an order to leave
                self.log.warning("worker.signals.taken", changed=taken)
            is_sound = outcome.worker_is_sound and is_alone and self.heartbeat.is_sound and not taken
            self.sound = is_sound and not self._is_worn_out()
            if outcome.progress:
                outcome = outcome._replace(progress=log.masked(outcome.progress))
            end = decide(job, outcome)
            duration_ms = round((now() - began) * 1_000, 1)
            if self._prefetch == 1:
                log.metric("job.run", queue=job.queue, outcome=outcome.end, duration_ms=duration_ms, **facts)
            if end is None:
                self.log.warning("worker.ownership.lost")
            else:
                self.heartbeat.hold.add(Ended(job, end, facts))

    def _tell_failure(self, outcome: Outcome) -> None:
        """The stack of a run that has failed; what becomes of its job is another line, once that is written."""
        if outcome.end in (End.ERROR, End.PERMANENT, End.TIMEOUT) and outcome.error:
            head, _, rest = outcome.error.partition("\n")
            stack = {"exception": rest.strip()} if rest else {}
            self.log.warning("worker.job.failed", error=head, **stack)

    def _is_worn_out(self) -> bool:
        """True when DL_MAX_JOBS or DL_MAX_RSS_MB ask for a fresh process."""
        most_jobs, most_mb = self.settings.dl_max_jobs, self.settings.dl_max_rss_mb
        rss_mb = psutil.Process().memory_info().rss / 2**20 if most_mb else 0.0
        worn_out = (most_jobs is not None and self._jobs >= most_jobs) or (most_mb is not None and rss_mb > most_mb)
        if worn_out:
            self.log.info("worker.recycled", jobs=self._jobs, rss_mb=round(rss_mb))
        return worn_out

    # --- ends ---

    def _step(self, most: int) -> Step:
        """Write what has ended and claim up to `most` jobs; over as many reconnects as the ends take."""
        ends = self.heartbeat.hold.take()
        try:
            step = lifecycle.step(self.session, self.queue, self.settings.dl_claim_backoff_sec, most, ends)
        except psycopg.Error as e:
            if isinstance(e, errors.OutOfMemory):
                self._claim_at_most(max(1, most // 2), "the server has no room for more locks")
            if not ends or not (db.is_passing(e) or isinstance(e, psycopg.DataError)):
                raise
            self._write_one_by_one(ends, e)
            return Step([], {}, 0, True, None)
        self.outage.ended()
        self._written(ends, step.ended, step.locked)
        if step.backoffs:
            self.log.info("worker.claim.backoff", keys=step.backoffs)
        return step

    def _write_one_by_one(self, ends: Sequence[Ended], error: psycopg.Error) -> None:
        """What could not be written together: work that is done must not be done again."""
        if not isinstance(error, psycopg.DataError):
            self._finish_failed(error)
        before = self.session
        locked = [ended for ended in ends if not self._finish(ended)]
        self._written(locked, {}, {ended.job.job_id for ended in locked})
        if self.session is not before:
            self._give_back_unheard(before, self.session)

    def _write_last_ends(self) -> None:
        """Before the worker leaves; raises Unwritten when rows stay locked for as long as a drain may take."""
        began = now()
        while self._heartbeat is not None and self.heartbeat.hold.owes:
            try:
                self._step(0)
            except psycopg.Error as e:
                if not db.is_passing(e):
                    raise
                self._lost(e)
            if left := self.heartbeat.hold.owes:
                give_up_at = (self._stop_at or began + self.settings.dl_drain_sec) + self.settings.dl_kill_grace_sec
                if now() > give_up_at - 2 * LOCKED_SEC:
                    raise Unwritten(f"the ends of {left} jobs could not be written: their rows are locked")
                self._pause(LOCKED_SEC)

    def _finish(self, ended: Ended) -> bool:
        """Write one end, over as many reconnects as it takes; False when somebody has the job's row locked."""
        job = ended.job

        def write() -> Status | bool | None:
            again = self.session.conn.closed
            if again:
                self.heartbeat.session = self._open(self.settings.pg_connect_timeout)
            try:
                status = lifecycle.finish(self.session.conn, job, ended.finish, ended.facts)
            except errors.LockNotAvailable:
                return False
            # The first try may have been committed and only its answer lost.
            return status or (again and lifecycle.has_ended(self.session.conn, job)) or None

        try:
            status = db.patiently(write, sleep=self._sleep, give_up=self._is_overdue, on_error=self._finish_failed)
        except psycopg.Error as e:
            raise Unwritten(f"the end of job {job.job_id} could not be written: {str(e).strip()}") from e
        if status is not None and not isinstance(status, Status):
            return status  # True: the first try has committed, and its word on the status is lost
        self._written([ended], {job.job_id: status} if status else {}, ())
        return True

    def _written(self, ends: Sequence[Ended], ended: Mapping[UUID, Status], locked: Collection[UUID]) -> None:
        """Say what was written, of a batch in one line; keep the ends whose rows are locked."""
        self.heartbeat.hold.keep([end for end in ends if end.job.job_id in locked])
        if new := set(locked) - self._locked:
            self.log.warning("worker.ends.locked", jobs=[str(job_id) for job_id in new])
        self._locked = (self._locked | new) - {end.job.job_id for end in ends if end.job.job_id not in locked}
        for end in ends:
            if end.job.job_id in locked:
                continue
            if end.job.job_id not in ended:
                self.log.warning("worker.ownership.lost", job_id=str(end.job.job_id), verb=end.finish.verb)
            elif self._prefetch == 1:
                with _named(end.job):
                    error = end.finish.error and end.finish.error.splitlines()[0]
                    status = ended[end.job.job_id]
                    self.log.info("worker.job.finished", verb=end.finish.verb, status=status, error=error)
        if self._prefetch > 1 and ended:
            counts = Counter(status.value for status in ended.values())
            self.log.info("worker.jobs.finished", **counts)
            log.metric("job.runs", queue=self.queue, **counts)

    def _is_overdue(self) -> bool:
        return self._stop_at is not None and now() > self._stop_at + self.settings.dl_kill_grace_sec

    def _finish_failed(self, error: BaseException) -> None:
        self.session.conn.close()
        self.outage.failed("worker.complete.failed", error)

    # --- waiting ---

    def _wait(self) -> None:
        """Until something may be claimable that no sibling has looked for, the idle poll or a signal."""
        self.slot.state = State.IDLE
        poll_at = now() + self.settings.dl_claim_backoff_sec * random.uniform(0.8, 1.0)  # noqa: S311  jitter
        due_at = math.inf if self._due_in is None else now() + self._due_in
        if self.heartbeat.hold.locked:
            poll_at = min(poll_at, self.heartbeat.hold.retry_at)
        leave = [self._pipes.leave] if self._retiring else []
        # A notification that came during a statement is in psycopg's backlog, not on the socket: drain, then select.
        while now() < poll_at and not self.stopping and self._retiring == bool(leave):
            if self._notified() or now() > due_at:
                if (due := self._looked_for_by_sibling()) is None:
                    break
                due_at = due
            elif self._pipes.leave in self._pause(
                min(poll_at, due_at + 0.001) - now(), self.session.conn.fileno(), *leave
            ):
                break
        self.slot.state = State.AWAKE

    def _notified(self) -> bool:
        notes = list(self.session.conn.notifies(timeout=0))
        return any(n.channel == lifecycle.JOBS_CHANNEL and n.payload == self.queue for n in notes)

    def _looked_for_by_sibling(self) -> float | None:
        """When the next row is due, if a sibling looks for what called us now, and leaves empty-handed; else None.

        One after the other in growing groups (0, 1, 2-3, 4-7 ...): as many claim as there are jobs, and one that finds
        no more. Nobody relies on another to do so: who has seen no such claim by his turn makes one, so nothing is lost
        when a sibling dies, is stopped, or takes a job and leaves others.
        """
        if not (before := self.shared.idle_before(self.slot)):
            return None
        called = now()
        self._pause(HERD_SEC * before.bit_length())
        return self.shared.looked_for(self.slot, called)

    def _pause(self, seconds: float, *others: int) -> list[int]:
        """Wait for the time, a signal, one of the file descriptors `others`, or the supervisor's end: then drain.

        Returns those of `others` that can be read.
        """
        life = [] if self._orphaned else [self._pipes.life]  # at its end a pipe can be read for ever
        readable = self.signals.wait(seconds, *others, *life)
        if self._pipes.life in readable:
            self._orphaned = True
            self.drain()
        return readable

    def _sleep(self, seconds: float) -> None:
        self._pause(seconds)

    # --- the session ---

    @property
    def heartbeat(self) -> Heartbeat:
        assert self._heartbeat is not None  # noqa: S101  set by _connect, before any work
        return self._heartbeat

    @property
    def session(self) -> lifecycle.Session:
        """The session as the heartbeat left it."""
        return self.heartbeat.session

    def _open(self, within: float) -> lifecycle.Session:
        """Connect, check the schema, LISTEN."""
        conn = db.connect(
            self._dsn,
            name=f"dl-worker:{self.queue}:{self.name}",
            schema=self.settings.pg_schema_queue,
            connect_timeout=min(within, self.settings.pg_connect_timeout),
            answer_within=min(30.0, within + 5),
            lock_timeout=5,
        )
        probe.require_session(conn, self._dsn)
        migrations.check(conn)
        session = lifecycle.open_session(conn, self.name)
        self.slot.connected(session.backend_pid, session.backend_start)
        return session

    def _leap(self, job: Job, fence: int) -> int | None:
        """A number for this claim above that of a fence in the target, by a session of its own; None: it is not ours.

        The heartbeat has the worker's session, and may be looking for a new one: a failover is when fences are ahead.
        """

        def ask() -> int | None:
            with db.connect(
                self._dsn, name="dl-leap", schema=self.settings.pg_schema_queue, answer_within=10, lock_timeout=5
            ) as conn:
                return lifecycle.leap(conn, job, fence)

        claim = db.patiently(ask, sleep=time.sleep, give_up=lambda: now() > self.slot.fence_at or self._is_overdue())
        if claim is not None:
            self.log.warning("worker.fence.ahead", fence=fence, claim=job.claim, leapt_to=claim)
        return claim

    def _connect(self) -> None:
        session = db.patiently(
            lambda: self._open(self.settings.pg_connect_timeout),
            sleep=self._sleep,
            give_up=lambda: self.stopping,
            on_error=lambda e: self.outage.failed("worker.connect.failed", e),
        )
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(session, self._open, self.settings.dl_heartbeat_sec, self._written)
            self._heartbeat.start()
            self.log.info("worker.started", pid=os.getpid())
        else:
            self._give_back_unheard(self.session, session)
        self.heartbeat.session = session
        self._due_in = None
        most = probe.most_at_once(probe.lock_table(session.conn), self.settings.workers)
        self._claim_at_most(most, "the keys of this machine's jobs would fill the server's lock table")

    def _claim_at_most(self, most: int, why: str) -> None:
        """From now on; `dataloader check` says what would be right."""
        if most < self._most:
            self._most = most
            self.log.warning("worker.prefetch.lowered", prefetch=self._prefetch, at_most=most, why=why)

    def _give_back_unheard(self, lost: lifecycle.Session, session: lifecycle.Session) -> None:
        """A claim whose answer was lost with the session: its jobs were never started here, so they are not counted.

        The old backend may still be at it, so that is ended first. Then the worker writes the ends whose rows were
        locked, for those jobs have run. A row that is locked still is left as it is.
        """
        lifecycle.end_session(session.conn, lost.backend_pid, lost.backend_start)
        if ends := self.heartbeat.hold.locked:
            written = lifecycle.finish_some(session.conn, self.name, ends)
            self.heartbeat.hold.locked = []
            self._written(ends, *written)
        for job in lifecycle.settle(session.conn, self.name, "drain", "the claim's answer was lost"):
            if job.status:
                self.log.warning("worker.claim.unheard", job_id=str(job.job_id), status=job.status)

    def _lost(self, error: BaseException) -> None:
        self.outage.failed("worker.session.lost", error)
        if self._heartbeat is not None:
            self.session.conn.close()
        if not self.stopping:
            self._pause(random.uniform(0.1, 1.0))  # noqa: S311  jitter; the error may last


def _takes(pipe: int) -> bool:
    """Take a byte that one process of several may have; False when none is there."""
    try:
        return bool(os.read(pipe, 1))
    except BlockingIOError:
        return False


def _named(job: Job) -> AbstractContextManager[None]:
    """Each line in the block says whose it is."""
    return log.context(job_id=str(job.job_id), task=job.task, attempt=job.attempt)
