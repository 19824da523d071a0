"""The lease of a run, and the heartbeat that keeps it: a thread that uses the worker's session while pipelines run.

The thread renews the lease, writes progress, hears cancellations and replaces a lost session; where the claim is lost,
the thread stops the run. A beat uses the session with the key's advisory lock, so a beat proves the lease and the lock.
The thread also hands back jobs that wait behind a long run, and writes ends that have waited for their batch.

The worker does not wake the thread for a run shorter than TICK_SEC: the thread checks that often during runs.
So a short job costs no switch between threads, and no title of the process.
"""

from __future__ import annotations

import math
import os
import threading
from functools import partial
from typing import Any

import structlog
from psycopg import errors

from dataloader import log, periods
from dataloader.exits import EXIT_FENCED
from dataloader.farm.batch import TICK_SEC, Batch
from dataloader.farm.capture import Capture
from dataloader.farm.process import drain_pipe, now, readable
from dataloader.farm.session import Lost, Session, read
from dataloader.farm.slots import TOOK_LONGER, Reason, Slot, stop_reason
from dataloader.queue import lifecycle, logs
from dataloader.queue.job import Checkpoint, Delivery, End, beat_interval, to_json

CHECK_SEC = 0.005  # between two checks of a run's deadlines
REST_SEC = 1.0  # without a run until the thread sleeps
PROGRESS_SEC = 1.0  # progress and checkpoints are written at most once in this time
LOGS_AGAIN_SEC = 10.0  # from a write of lines that fails to the next one
LOCK_SEC = 4.0  # for a lock that another session has; less than RETAKE_SEC
RETAKE_SEC = periods.seconds("RETAKE_SEC", 5.0)  # for taking the key again: the former session has 2 s to end
LONG_SEC = 1.0  # after so long a run UNLISTENs at a beat, because unread notifications cost the server
LOST_SEC = 1.0  # until a run stops whose key another worker may have


class Lease:
    """One run's hold on its jobs, shared by the pipeline's thread and the heartbeat."""

    def __init__(self, delivery: Delivery, slot: Slot, heartbeat: Heartbeat | None = None) -> None:
        """`slot` shows the run; without a `heartbeat` the lease is not renewed."""
        self.delivery = delivery
        self.job = delivery.first
        self.slot = slot
        self.began = now()
        self.released = False  # the run is over
        self.reported: dict[str, Any] | None = None  # the latest progress
        self.progress: dict[str, Any] | None = None  # the same while it is not written
        self.progress_at = 0.0  # when progress and checkpoints may be written again
        self.checkpoint: Checkpoint | None = None  # the latest
        self.written: Checkpoint | None = None  # the latest one in the queue
        self.confirmed: Checkpoint | None = None  # the latest one in the queue behind which the claim still held
        self.stop: End | None = None
        self.reason: str | None = None
        self._heartbeat = heartbeat
        self._timeout = ""  # how a run ends that goes on for too long
        self._check_at = self.began + CHECK_SEC

    # --- the pipeline's thread ---

    def limit(self, timeout_sec: float | None, max_memory_mb: float | None, subject: str = "the run") -> None:
        """`subject` begins now, and may take so many seconds and megabytes; None: any."""
        self._timeout = f"timeout: {subject} took more than {timeout_sec or 0:g} s"
        self.slot.timeout_at = now() + timeout_sec if timeout_sec else 0.0
        if max_memory_mb:
            self.slot.memory_limit = int(max_memory_mb * 2**20)

    def watch(self, stall_sec: float | None, ends_stuck: bool) -> None:
        """Set the time without a report after which the run counts as stuck; None: DL_STALL_SEC."""
        self.slot.reported_at, self.slot.ends_stuck = now(), ends_stuck
        self.slot.stall_sec = self.slot.silence_sec if stall_sec is None else stall_sec

    def must_stop(self) -> bool:
        """Whether the run has to stop; a safe point, so the run is not stuck. Checks at most every CHECK_SEC."""
        if (at := now()) < self._check_at:
            return self.stop is not None
        self.slot.reported_at = at
        return self.must_stop_now()

    def must_stop_now(self) -> bool:
        """Check the deadlines now: before a commit, and when the supervisor interrupts the run."""
        self._check_at = now() + CHECK_SEC
        if self.stop is None and self.slot.canceled == self.slot.generation:
            self.end(End.CANCELED, None)
        match stop_reason(self.slot) if self.goes_on else None:
            case Reason.TIMEOUT:
                self.end(End.TIMEOUT, self._timeout)
            case Reason.FENCED:
                self.give_up(End.HANDED_BACK, "the lease ran out")
            case Reason.DRAIN:
                self.end(End.HANDED_BACK, "drain")
            case Reason.CANCELED:
                self.end(End.CANCELED, "canceled by force")
        if self.goes_on and self._heartbeat is not None and not self._heartbeat.is_alive():
            self.give_up(End.HANDED_BACK, "the heartbeat is dead")
        return self.stop is not None

    def report(self, progress: dict[str, Any]) -> None:
        """Keep progress for the next write; copied, because the pipeline may go on changing it."""
        had_news = self.has_news
        self.reported = self.progress = dict(progress)
        self._hurry(had_news)

    def save(self, checkpoint: Checkpoint) -> None:
        had_news = self.has_news
        self.checkpoint = checkpoint
        self._hurry(had_news)

    def _hurry(self, had_news: bool) -> None:
        if self._heartbeat is not None and not had_news:
            self._heartbeat.hurry()

    @property
    def is_saved(self) -> bool:
        """Whether the latest checkpoint is in the queue: the next run gets it, however this one ends."""
        return self.checkpoint is self.confirmed

    @property
    def stop_for_others(self) -> End | None:
        """How the run ends as seen from elsewhere: GONE once the lease is over, for the next run may have begun."""
        return End.GONE if self.stop is not None and now() >= self.slot.fence_at else self.stop

    # --- both threads ---

    @property
    def has_news(self) -> bool:
        """Whether there is progress or a checkpoint that is not written."""
        return self.progress is not None or self.checkpoint is not self.written

    @property
    def goes_on(self) -> bool:
        """True while the claim holds and no deadline has passed; a requested cancellation changes neither."""
        return self.stop in (None, End.CANCELED)

    def end(self, end: End, reason: str | None) -> None:
        """The run has to stop at its next safe point; a lost claim outweighs a cancellation."""
        if self.stop is None or self.stop is End.CANCELED or end is End.GONE:
            self.stop, self.reason = end, reason

    def give_up(self, end: End, reason: str, within: float | None = None) -> None:
        """The claim is lost: the run stops, or its process is killed `within` seconds (by default with the lease)."""
        self.end(end, reason)
        self.slot.give_up(self.slot.ends_by if within is None else min(self.slot.ends_by, now() + within))


def progress_json(progress: dict[str, Any] | None) -> str | None:
    """A run's progress as the queue keeps it: JSON without known secrets.

    The function logs a progress that the queue cannot keep, and returns None for it.
    """
    if progress is None:
        return None
    document = to_json(progress, log.without_known)
    if document is None:
        structlog.get_logger("worker").warning("progress.dropped", why="not JSON, or too large")
    return document


class Heartbeat(threading.Thread):
    """The thread of one worker; it sleeps while no job runs."""

    def __init__(self, session: Session, batch: Batch, capture: Capture, beat_sec: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._session = session
        self._batch = batch
        self._beat_sec = beat_sec
        self._capture = capture
        self._lease: Lease | None = None  # of the run under way
        self._interval = 0.0  # between two beats of this run
        self._lock_sec = LOCK_SEC  # of this run
        self._next_beat = 0.0
        self._failed = False
        self._latest_session: lifecycle.Session | None = None  # the latest session of the run
        self._has_key = True  # False: another session than the present one has the key
        self._is_attending = False  # True: the thread may be waiting beside a run
        self._sleeps_until = math.inf
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._log = structlog.get_logger("heartbeat")

    # --- the worker's thread ---

    def attend(self, delivery: Delivery, slot: Slot) -> Lease:
        """Keep the leases of a run's jobs, which the worker's slot shows, until `leave`."""
        self._lease = lease = Lease(delivery, slot, self)
        if self._sleeps_until > lease.began + TICK_SEC:
            os.write(self._write, b".")
        return lease

    def leave(self, lease: Lease) -> None:
        lease.released = True
        self._lease = None
        self.hurry()

    def hurry(self) -> None:
        """Wake the thread if it watches this run already; otherwise its next check is soon enough."""
        if self._is_attending:
            os.write(self._write, b".")

    @property
    def is_sound(self) -> bool:
        """False once the thread has ended or met an error that is not the database's absence."""
        return self.is_alive() and not self._failed

    # --- the thread itself ---

    def run(self) -> None:
        last_busy = now()
        while True:
            is_idle = now() - last_busy > REST_SEC
            self._sleeps_until = math.inf if is_idle else now() + TICK_SEC
            if self._lease is None or not is_idle:  # a run that has just begun: its thread saw this one awake
                self._pause(self._sleeps_until - now())
            self._is_attending = True
            if (lease := self._lease) is not None:
                try:
                    self._keep(lease)
                except BaseException as e:  # after any error the run must not go on without a heartbeat
                    self._failed = True
                    self._log.exception("heartbeat.failed")
                    lease.give_up(End.HANDED_BACK, f"heartbeat failed: {type(e).__name__}")
                    self._wait_for_release(lease)
                last_busy = now()
            self._is_attending = False

    def _keep(self, lease: Lease) -> None:
        self._interval = beat_interval(self._beat_sec, lease.delivery.lease_ttl_sec)
        patience = max(1.0, self._interval)
        self._lock_sec = min(LOCK_SEC, patience / 2)  # a wait for an answer that is not in time costs the session
        self._latest_session, self._has_key = self._batch.claimed_in, True
        # A beat marks jobs that were claimed ahead as begun (see dl_reap), unless the run is over sooner.
        is_shown = lease.job.job_id == self._batch.begun and len(lease.delivery.jobs) == 1
        first_mark = math.inf if is_shown else lease.began + TICK_SEC
        self._next_beat = min(lease.slot.last_renewed + self._interval, first_mark)
        lease.slot.show(f"job={lease.job.job_id} attempt={lease.job.attempt}")
        while not lease.released:
            try:
                self._session.call(partial(self._write_or_sleep, lease), answer_within=patience)
            except Lost:
                if now() > lease.slot.fence_at:
                    lease.give_up(End.HANDED_BACK, "the lease ran out while the database was away")
                self._pause(self._session.pause_sec)
            if lease.slot.fence_by:  # a run that leaves in a drain still needs its lease
                self._wait_for_release(lease)
        lease.slot.show("works")

    def _write_or_sleep(self, lease: Lease, session: lifecycle.Session) -> None:
        """Write what is due, else wait for the next beat, progress, the batch, the server, or the pipeline's thread.

        The run may be over by the time that this thread has the session. Jobs that wait behind a long run go back.
        """
        if lease.released:
            return
        batch, capture = self._batch, self._capture
        try:
            read(session.conn)  # notifications, and the server's farewell
            if session is not self._latest_session:  # the claim's session was lost: lock the key again first
                self._latest_session, self._has_key, self._next_beat = session, False, now()
            is_beat_due = now() >= self._next_beat
            if is_beat_due and not self._has_key and not self._regain(lease, session):
                return
            has_news = lease.has_news and now() >= lease.progress_at
            if is_beat_due or has_news:
                return self._beat(lease, session, has_news, is_beat_due)
            if now() >= capture.read_at:
                capture.read_output()
            if (written := capture.run) is not None and written.has_news and now() >= capture.write_at:
                # Before the write: another session may have locked the table, and beats are not to wait for it.
                places, capture.write_at = capture.places(), now() + LOGS_AGAIN_SEC
                logs.write(session.conn, [written], now(), lock_sec=self._lock_sec)
                return capture.written(written, places)
            if lease.began < now() - TICK_SEC:
                lease.slot.ahead = 0  # this thread is alive: the keeper need not do it
                batch.hand_back(TOOK_LONGER)
            if batch.is_due(lease.began):
                return batch.write(session)
        except errors.LockNotAvailable:
            self._next_beat = now() + 1.0  # another session has locked the row; ours is sound
            return
        until = min(self._next_beat, lease.progress_at) if lease.has_news else self._next_beat
        if capture.run is not None:
            until = min(until, capture.read_at)
        if batch.waiting or batch.owes:
            until = min(until, now() + TICK_SEC)
        if self._read in readable([self._read, session.conn.fileno()], until - now()):
            drain_pipe(self._read)

    def _beat(self, lease: Lease, session: lifecycle.Session, has_news: bool, is_beat_due: bool) -> None:
        """Renew the lease and hear of a cancellation; write the news: at once, later ones every PROGRESS_SEC."""
        jobs, document, progress = lease.delivery.jobs, None, lease.progress
        if has_news:
            lease.progress_at = now() + PROGRESS_SEC
            checkpoint = lease.checkpoint
            if checkpoint is not None and checkpoint is not lease.written:
                lifecycle.keep_checkpoint(session.conn, lease.job, checkpoint)
                lease.written = checkpoint
            document = progress_json(progress)
        sent, written = now(), lease.written
        answer = lifecycle.beat(session.conn, jobs, document, journal=is_beat_due, lock_sec=self._lock_sec)
        if has_news and lease.progress is progress:  # a beat that fails leaves it to the next one
            lease.progress = None
        if answer is None:
            end = End.GONE if len(jobs) == 1 else End.HANDED_BACK  # the others' claims may hold
            lease.give_up(end, "the claim belongs to another worker", within=LOST_SEC)
        else:
            lease.slot.renewed, lease.confirmed = sent, written
            if answer:
                lease.end(End.CANCELED, None)
        if is_beat_due:
            self._next_beat = now() + self._interval
            if session.is_listening and now() > lease.began + LONG_SEC:
                lifecycle.listen(session, is_idle=False)

    def _regain(self, lease: Lease, session: lifecycle.Session) -> bool:
        """Renew, and take the key for this session; False: the claim or the key is lost, and the run has to stop."""
        patience, session.conn.answer_within = session.conn.answer_within, max(RETAKE_SEC, self._interval)
        sent = now()
        has_key = lifecycle.retake(session, lease.delivery.jobs)
        session.conn.answer_within = patience
        if has_key is False:
            lease.give_up(End.HANDED_BACK, "the claim or its key was taken while the session was lost", LOST_SEC)
            return False
        self._has_key = has_key is True
        lease.slot.renewed = sent
        return True

    def _wait_for_release(self, lease: Lease) -> None:
        """Wait for the run's end; at its last instant end the process, for another worker may start the job then."""
        deadline = lease.slot.ends_by
        while not lease.released:
            self._pause(deadline - now())
            if not lease.released and now() >= deadline:
                self._log.error("worker.fenced", job_id=str(lease.job.job_id), reason=lease.reason)
                log.flush()
                os._exit(EXIT_FENCED)

    def _pause(self, seconds: float) -> None:
        if readable([self._read], min(seconds, 3600.0)):
            drain_pipe(self._read)
