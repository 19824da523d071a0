"""PROCESS: one worker. It claims jobs of its queues, runs one job at a time, and writes each end with the next claim.

The supervisor forks it. The worker's thread uses the session while it waits, claims and writes, the heartbeat's thread
while a pipeline runs (`farm/session.py`).
"""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import structlog

from dataloader import log, periods, pipelines
from dataloader.config import ConfigError, Settings
from dataloader.exits import EXIT_CANNOT_START, EXIT_FAILED, EXIT_OK, EXIT_RECYCLE
from dataloader.farm import process
from dataloader.farm.admission import Admission, Host, needs_of
from dataloader.farm.batch import LOCKED_SEC, REPORT, TICK_SEC, Batch, Preference, facts_of
from dataloader.farm.capture import Capture, beyond
from dataloader.farm.common_log import FarmOutage, once
from dataloader.farm.failures import headline, own_stack
from dataloader.farm.guest import Inspection, keep_children_plain
from dataloader.farm.heartbeat import LOCK_SEC, Heartbeat
from dataloader.farm.process import now
from dataloader.farm.runner import CannotStart, Runner, last_words
from dataloader.farm.session import Lost, Session, opened, read
from dataloader.farm.slots import TOOK_LONGER, SharedSlots, Slot, State
from dataloader.obs import telemetry
from dataloader.pipelines import hooks
from dataloader.pipelines.forms import own_process
from dataloader.queue import db, lifecycle, migrations, operations, probe
from dataloader.queue.hooks import Hook, identity
from dataloader.queue.job import Delivery, End, Finish, Outcome, Verb, decide
from dataloader.queue.lifecycle import Ended, Step
from dataloader.queue.plans import schedules
from dataloader.queue.reports import stats
from dataloader.queue.run_log import RunLog

START_TURN_SEC = 0.1  # between two checks of a worker that waits for on_farm_start in another one
TURN_SEC = 0.002  # a farm's first idle worker claims at once, the next after this, two after twice this
RUN = log.Template("metric", "job.run", {"queue": str, **REPORT})
LEARN_SEC = periods.seconds("LEARN_SEC", 60.0)  # between two readings of the resources that runs of tasks have used
ANSWER_SEC = periods.seconds("WORKER_ANSWER_SEC", 10.0)  # the longest wait for an answer of the server
NO_COST = {"cpu_sec": 0.0, "peak_mb": 0.0}  # of the further jobs of a run
REST_SEC = 1.0  # between tries to write the ends of locked rows while the worker rests


class Unwritten(Exception):
    """The worker could not write a job's end before it had to leave: the keeper or the reaper recovers the job."""


def main(settings: Settings, dsn: str, queues: Sequence[str], shared: SharedSlots, slot: Slot) -> int:
    """Work on these queues until an order to drain; returns the process's exit status."""
    worker = Worker(settings, dsn, queues, shared, slot)
    keep_children_plain(worker.take_signals(), worker.signals.wakeup_fd)
    os.eventfd_write(shared.born, 1)
    try:
        with last_words():
            worker.prepare()
            return worker.work()
    except CannotStart:
        return EXIT_CANNOT_START
    except (migrations.SchemaError, ConfigError) as e:
        worker.log.error("worker.schema.refused", error=str(e))
        return EXIT_CANNOT_START
    except Unwritten as e:
        worker.log.error("worker.end.unwritten", error=str(e), failures=worker.session.failures)
        return EXIT_FAILED
    finally:
        worker.capture.rest()
        worker.observed.close()


class Worker:
    """One worker process. Its parts: the session, the batch, the heartbeat, the runner.

    SIGTERM, SIGINT and the supervisor's death drain the worker; SIGHUP makes it check its slot.
    """

    def __init__(self, settings: Settings, dsn: str, queues: Sequence[str], shared: SharedSlots, slot: Slot) -> None:
        outputs = beyond() if settings.dl_job_log_kb else None
        log.configure(settings, threaded=True, output=outputs[0] if outputs else 1)
        self.settings = settings
        self.queues = tuple(queues)
        self.shared = shared
        self.slot = slot
        self.name = process.own_name()
        slot.occupy(self.name, queues)
        self.log = structlog.get_logger("worker").bind(worker=self.name, queue=", ".join(queues))
        self._dsn = dsn
        self._supervisor = shared.supervisor
        self.signals = process.Signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), self.drain)
        outage = FarmOutage(shared.outage, self.log)
        self.session = Session(self._open_session, self._resume, outage, "worker.session.lost")
        self.runner = Runner(settings, dsn)
        self.preference = Preference(settings.dl_affinity, settings.dl_affinity_wait_sec)
        self.admission = Admission(Host(settings), shared, slot, settings.dl_reserve_sec, self.log)
        self.batch = Batch(settings.workers, self.queues, settings.dl_claim_backoff_sec, self.log)
        self.capture = Capture(settings.dl_job_log_kb, slot, outputs)
        self.heartbeat = Heartbeat(self.session, self.batch, self.capture, settings.dl_heartbeat_sec)
        self.observed = telemetry.start_runs(self.name)
        self._sound = True  # False: this process should be replaced
        self._jobs = 0
        self._sent = 0.0  # when the latest claim was sent
        self._follows: object = None  # the claim and the session of the latest run: the next of both follows at once
        self._claim_sec = 0.0  # how long claims take lately; turns are no shorter, or a slow server would get a crowd
        self._due_in: float | None = None  # seconds until the next due row, as of the last claim
        self._meter = process.Meter()
        self._learn_at = 0.0  # when to learn again what runs need
        process.adopt_orphans()

    # --- orders ---

    def take_signals(self) -> Collection[int]:
        """Handle the worker's signals, also after other code has changed them; returns their numbers."""
        signal.signal(signal.SIGUSR1, self.runner.interrupt)
        return {signal.SIGUSR1, *self.signals.take()}

    def drain(self, number: int = signal.SIGTERM) -> None:
        """Stop claiming, unless the signal is SIGHUP; in a signal handler, so the method only sets values."""
        if number != signal.SIGHUP:
            self.slot.drain_until(now() + self.settings.ends_within)

    @property
    def drains(self) -> bool:
        return self.slot.drain_by > 0

    @property
    def may_claim(self) -> bool:
        """False once the worker drains, and while another worker has its place."""
        return not self.drains and self.slot.may_work

    def pause(self, seconds: float, *others: int) -> None:
        """Wait for `seconds`, a signal, the supervisor's death, or one of the file descriptors `others`."""
        self.signals.wait(seconds, *others)
        if os.getppid() != self._supervisor:  # the order that its death has sent may have come to a run's own handler
            self.drain()

    # --- the start ---

    def prepare(self) -> None:
        """Import the users' modules and call their hooks at a start; raises CannotStart."""
        with self._users_code("", "worker.pipelines.failed"):
            pipelines.load(())
        for module in (*self.settings.dl_hooks, *self.settings.dl_pipelines):
            with self._users_code(f"import of {module}", "worker.pipelines.failed"):
                pipelines.import_users(module)

        def may_wait() -> bool:
            self.pause(START_TURN_SEC)
            return not self.drains

        start_farm = partial(self._call_hook, hooks.ON_FARM_START)  # in one worker after the other
        if not hooks.ON_FARM_START or once(self.shared.farm_start, self.slot.reload, start_farm, may_wait):
            self._call_hook(hooks.ON_WORKER_START)
        self.take_signals()  # a module or a hook may have changed the handlers
        self.inspection = Inspection()

    def _call_hook(self, hook: Hook) -> None:
        for function in hook:
            facts = {"hook": hook.name, "function": identity(function)}
            with self._users_code(f"{hook.name} {identity(function)}", "hook.failed", **facts):
                function()

    @contextmanager
    def _users_code(self, name: str, event: str, **facts: str) -> Iterator[None]:
        """Run the user's code at a start, with its name for the supervisor, because it may end the process.

        An error is logged with the user's frames, once for the farm, and again as a debug line; raises CannotStart.
        """
        self.slot.called_at = now()
        self.slot.calling = name.encode()[:199]
        try:
            with own_process():
                yield
        except BaseException as e:
            head = headline(e)
            with self.shared.reported.changed() as note:
                last, note["last"] = note.get("last"), [self.slot.reload, event, facts, head]
                write = self.log.debug if last == note["last"] else self.log.error
            write(event, **facts, error=head, exception=own_stack(e))
            raise CannotStart from e
        self.slot.calling = b""

    # --- the loop ---

    def work(self) -> int:
        """Claim, run, and write the ends with the next claim, until an order to drain; returns the exit status."""
        try:
            self._claim_and_run()
        except Exception:
            with suppress(Exception):  # the first one counts; a job that is done must not run again
                if self.batch.owes:
                    self.session.call(self.batch.write)
            raise
        if self.drains:
            self.slot.state = State.LEAVING
        self._write_last()
        if self.runner.warm.keys:
            self.drain()  # the supervisor kills a worker that hangs in a release
            self.runner.warm.close()
        if not self._sound:
            return EXIT_RECYCLE
        self.log.info("worker.stopped")
        return EXIT_OK

    def _claim_and_run(self) -> None:
        while self._sound and not self.drains:
            try:
                if not self.may_claim:
                    self.session.call(self._rest)
                    continue
                if self.slot.state != State.STARTING:  # it is ready once it has a session, which may be refused
                    self._show_state(State.AWAKE, "works")
                step = self.session.call(self._write_and_claim)
                if step.jobs:
                    self._run_all(step)
                elif not step.look_again:
                    self.capture.rest()
                    self._show_state(State.IDLE, "idle")
                    self.session.call(self._wait)
            except Lost:
                self.pause(self.session.pause_sec)

    def _write_and_claim(self, session: lifecycle.Session) -> Step:
        """Write the ends of earlier runs, claim jobs, and learn what their runs need to know of them."""
        self._show_state(State.AWAKE, "works")
        if now() >= self._learn_at:
            declared = {task: (each.memory_mb, each.cpus) for task, each in pipelines.registered().items()}
            self.admission.know(needs_of(declared, stats.learned(session.conn)))
            self._learn_at = now() + LEARN_SEC
        if session.is_listening:
            read(session.conn)  # what was notified before the claim is claimable by now
        most = self.batch.size_next(lambda: self.shared.siblings(self.slot))
        without = self.admission.without() if most else ()
        affinity = None
        if (overdue := self.preference.overdue()) is not None:
            elsewhere = [key for other in self.shared.others(self.slot) for key in other.warm]
            affinity = lifecycle.Affinity(self.runner.warm.keys, elsewhere, self.settings.dl_lookahead, overdue)
        self._sent = now()
        step = self.batch.step(session, most, affinity, without)
        self._claim_sec += (now() - self._sent - self._claim_sec) / 4
        if most:
            self.admission.passed(step.left_out, without)
        if step.jobs:
            self.preference.claimed(step.jobs, step.reached)
            with_context = {task for task, each in pipelines.registered().items() if each.wants_context}
            again = [job.job_id for job in step.jobs if job.claim > 1 and job.task in with_context]
            self.runner.kept = lifecycle.checkpoints(session.conn, again) if again else {}
            job_ids = [job.job_id for job in step.jobs]
            self.observed.learn(
                lambda: lifecycle.traces(session.conn, job_ids), lambda: lifecycle.waits(session.conn, job_ids)
            )
        else:
            self._due_in = step.due_in
            if most and not step.look_again:
                self.slot.due_at = math.inf if step.due_in is None else now() + step.due_in
                self.slot.empty_claim_at = self._sent
        return step

    def _write_last(self) -> None:
        """Write all ends before the worker leaves; raises Unwritten when it has to leave before."""
        patience = now() + self.settings.ends_within
        while self.batch.owes:
            why, spare = "their rows are locked", 2 * LOCKED_SEC
            try:
                self.session.call(self.batch.write)
            except Lost as e:
                why, spare = str(e), -4 * LOCKED_SEC  # a worker that is killed at the drain's end counts as drained
            if left := self.batch.owes:
                if now() > (self.slot.drain_by or patience) - spare:
                    raise Unwritten(f"the ends of {left} jobs could not be written: {why}")
                self.pause(max(self.session.pause_sec, LOCKED_SEC if self.batch.locked else 0.0))

    # --- the session ---

    def _open_session(self) -> lifecycle.Session:
        self._show("connects")
        name, schema = f"dl-worker:{self.queues[0]}:{self.name}", self.settings.pg_schema_queue
        conn = opened(self._dsn, name, schema, self.settings.pg_connect_timeout, ANSWER_SEC, LOCK_SEC).conn
        probe.require_session(conn, self._dsn)
        session = lifecycle.open_session(conn, self.name)
        self.slot.backend = f"{session.backend_pid} {session.backend_start.isoformat()}".encode()
        return session

    def _resume(self, session: lifecycle.Session, lost: Sequence[lifecycle.Session]) -> None:
        """Before anything else is done with a new session: keep what is still this worker's, hand back the rest."""
        if not self.heartbeat.ident:  # the first session
            self._publish(session.conn)
            self.heartbeat.start()
            self.log.info("worker.started", pid=os.getpid())
        self.batch.resume(session, lost)
        self.batch.fit(probe.lock_table(session.conn))
        self._due_in = None
        self._show("works")

    def _show(self, doing: str) -> None:
        """For `ps`, unless it shows a run or that the worker rests."""
        if self.slot.state not in (State.BUSY, State.RESTING):
            self.slot.show(doing)

    def _show_state(self, state: State, doing: str) -> None:
        if self.slot.state != state:
            self.slot.state = state
            self.slot.show(doing)

    def _publish(self, conn: db.Connection) -> None:
        """Agree on the queues (raises ConfigError), and publish the tasks and schedules of the code."""
        for spec in self.settings.workers:
            for queue in filter(self.queues.__contains__, spec.served):
                try:
                    operations.agree(conn, queue, spec.ordered, spec.merge)
                except operations.Contradiction as e:
                    raise ConfigError(str(e)) from None
        operations.publish_tasks(conn, pipelines.declarations())
        declared = {task: each.schedule for task, each in pipelines.registered().items()}
        schedules.publish(conn, declared, self.settings.timezone)

    # --- one run ---

    def _run_all(self, step: Step) -> None:
        """Run claimed jobs, the best first; hand back the rest where the worker has to leave."""
        self.slot.claim([job.job_id for job in step.jobs], [job.attempt for job in step.jobs])
        self.batch.claimed(step.jobs, step.batch)
        self._meter.measure()
        began, count, why = now(), 0, ""
        while not (why or (why := self._why_not(began, count))):
            with self.session.lock:  # a new session hands back what has not begun by then
                delivery = self.batch.next()
            if delivery is None:
                break
            if self.admission.enter(delivery.first.task):
                self._run(delivery)
                self.admission.leave()
                count += 1
            else:
                why = "not started: another run has taken the room that the host had for it"
                self._hand_back(delivery, why)
        self.signals.take_wake_ups()
        if count:
            self.batch.learn(now() - began, count)
        with self.session.lock:
            self.batch.running = ()
            self.batch.hand_back(why)

    def _why_not(self, began: float, count: int) -> str:
        """Why to begin no other job of the latest claim, of which so many have run since `began`; "": do begin one."""
        if self.drains:
            return "drain"
        if count and self.slot.recalled == self.slot.generation:  # the keeper hands back what is behind the last run
            return TOOK_LONGER
        if not self._sound:
            return "not started: the worker is replaced"
        # Not the first one, or two workers could hand it to each other for ever.
        is_late = count > 0 and now() > began + TICK_SEC
        return "not started: an idle worker may take it" if is_late and self.shared.siblings(self.slot).idle else ""

    def _run(self, delivery: Delivery) -> None:
        """Run the jobs of a delivery of the latest claim; the batch keeps their ends. The cost is the first one's."""
        began, job = now(), delivery.first
        size, ttl_sec, cpu_sec = len(delivery.jobs), delivery.lease_ttl_sec, self._meter.cpu_sec
        ahead = 0 if self.batch.locked else len(self.batch.waiting)  # the ends of locked rows are to be written first
        self.slot.begin(delivery.place, size, ttl_sec, self._sent, cpu_sec, ahead)
        if began > self.slot.fence_at:
            self.slot.state = State.AWAKE
            self._hand_back(delivery, "not started: its lease ran out")
            return
        with log.context(**facts_of(job)), self.observed.run(job) as observe:
            outcome, facts, written = self._run_pipeline(delivery)
            observe(outcome)
            if error := _error_of(outcome):  # the stack; another line reports the job's status once that is written
                head, _, rest = error.partition("\n")
                stack = {"exception": rest.strip()} if rest else {}
                self.log.warning("worker.job.failed", queue=job.queue, error=head, **stack)
            notes = {"notes": outcome.notes, "changed": outcome.changed}
            noted: dict[str, Any] = facts | {name: note for name, note in notes.items() if note}
            duration_ms = round((now() - began) * 1_000, 1)
            named = facts_of(job) | {"task": log.masked(job.task)}
            report = {**named, "outcome": outcome.end, "duration_ms": duration_ms, **facts}
            if log.keeps_metrics():
                RUN.write({"queue": job.queue, **report})
            ends = []
            for each, end in zip(delivery.jobs, decide(delivery, outcome), strict=True):
                if end and end.verb == Verb.FAIL:
                    self.runner.report_exhausted(each)
                if end is None:
                    self.log.warning("worker.ownership.lost", queue=each.queue)
                elif each is job:
                    ends.append(Ended(job, end, noted, report, outcome.checkpoint, written))
                else:
                    own = report | {"job_id": each.job_id, "attempt": each.attempt} | NO_COST
                    ends.append(Ended(each, end, None, own))
            self._add(ends)

    def _hand_back(self, delivery: Delivery, reason: str) -> None:
        self._add([Ended(job, Finish("hand_back", reason)) for job in delivery.jobs])

    def _add(self, ends: Sequence[Ended]) -> None:
        """Leave ends to the batch; not while a new session asks which of them are still this worker's."""
        with self.session.lock:
            for end in ends:
                self.batch.add(end)

    def _run_pipeline(self, delivery: Delivery) -> tuple[Outcome, dict[str, float], RunLog | None]:
        """How the run has ended, its cost, and its log; afterwards the process is as before the run, or not sound."""
        self._meter.forget_peak()
        if key := delivery.first.affinity_key:
            self.slot.show_warm([*self.runner.warm.keys, key])  # siblings need not prepare it as well
        pipeline = pipelines.registered().get(delivery.first.task)
        follows = self._follows == (self._sent, self.session.tries)
        self.capture.begin(delivery.first, pipeline is None or pipeline.logs, follows)
        lease = self.heartbeat.attend(delivery, self.slot)
        self.inspection.begin(follows)
        tries = self.session.tries
        try:
            outcome = self.runner.run(delivery, lease)
            may_open = self.runner.has_prepared or self.session.tries != tries
            changed = self.inspection.changed(delivery.first.task, self.runner.warm.pids, may_open)
            written = self.capture.end(_error_of(outcome))
            self._follows = self._sent, self.session.tries
            self._meter.measure(more_follow=bool(self.batch.waiting))
            facts = self.slot.cost(self._meter.cpu_sec, self._meter.peak_memory)
            self.slot.state = State.AWAKE  # before the heartbeat lets go: it may be in the middle of a reconnect
        finally:
            self.heartbeat.leave(lease)
        if key:
            self.slot.show_warm(self.runner.warm.keys)
        self._jobs += len(delivery.jobs)
        if changed:
            self.log.warning("worker.changed", task=log.masked(delivery.first.task), changed=changed)
            outcome = outcome._replace(worker_is_sound=False, changed=changed)
        most_jobs, most_mb = self.settings.dl_max_jobs, self.settings.dl_max_rss_mb
        rss_mb = process.resident(os.getpid()) / 2**20 if most_mb else 0.0
        self._sound = outcome.worker_is_sound and self.heartbeat.is_sound
        if self._sound and (self._jobs >= (most_jobs or math.inf) or rss_mb > (most_mb or math.inf)):
            self._sound = False  # DL_MAX_JOBS and DL_MAX_RSS_MB ask for a fresh process
            self.log.info("worker.recycled", jobs=self._jobs, rss_mb=round(rss_mb))
        return outcome, facts, written

    # --- waiting ---

    def _rest(self, session: lifecycle.Session) -> None:
        """Wait until the worker may work; the state RESTING shows the supervisor that no claim is under way."""
        if self.batch.owes:
            self.batch.write(session)
        if self.slot.state != State.RESTING:
            self.capture.rest()
            self._show_state(State.RESTING, "waits to claim")
            process.call_parent(self._supervisor)
        read(session.conn)
        if not (self.may_claim or self.drains):
            self.pause(REST_SEC, session.conn.fileno())

    def _wait(self, session: lifecycle.Session) -> None:
        """Wait until a job may be claimable that no sibling has tried to claim, until the idle poll, or an order."""
        if not session.is_listening:
            lifecycle.listen(session)
            return  # and claim once more: a job may have come before
        poll_sec = self.settings.dl_claim_backoff_sec * random.uniform(0.8, 1.0)  # noqa: S311  jitter
        poll_at = min(now() + poll_sec, self.batch.retry_at)
        due_at = math.inf if self._due_in is None else now() + self._due_in
        while now() < poll_at and self.may_claim:
            # A notification that came during a statement is in psycopg's backlog, not on the socket: read, then wait.
            is_notified = any(note.payload in self.queues for note in read(session.conn))
            if is_notified or now() > due_at:
                if (due := self._due_by_sibling()) is None:
                    break
                due_at = due
            elif self.admission.has_gained_room():
                break
            else:
                until = min(poll_at, due_at + 0.001, now() + self.admission.next_check_in)
                self.pause(until - now(), session.conn.fileno())

    def _due_by_sibling(self) -> float | None:
        """The due time of the next row, if a sibling claims after this call and gets no job; else None.

        Idle workers take turns in growing groups (0, 1, 2-3, 4-7 ...). One whose turn comes before such a claim claims
        itself, so no job is left when a sibling dies, is stopped, or takes one of several jobs.
        """
        before = [
            slot for slot in self.shared.others(self.slot) if slot.state == State.IDLE and slot.index < self.slot.index
        ]
        if not before:
            return None
        called = now()
        self.pause(max(TURN_SEC, 2 * self._claim_sec) * len(before).bit_length())
        return self.shared.due_by_sibling(self.slot, called)


def _error_of(outcome: Outcome) -> str | None:
    return outcome.error if outcome.end in (End.ERROR, End.PERMANENT, End.TIMEOUT) else None
