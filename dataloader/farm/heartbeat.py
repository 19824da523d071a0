"""The heartbeat: a thread that uses the worker's session while pipelines run.

The thread renews the lease, writes progress, hears cancellations and replaces a lost session; where the claim is lost,
the thread stops the run. A beat uses the session with the key's advisory lock, so a beat proves the lease and the lock.
The thread also hands back jobs that wait behind a long run, and writes ends that have waited for their batch.

The worker does not wake the thread for a run shorter than TICK_SEC: the thread looks that often while there are runs.
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
from dataloader.config import Settings
from dataloader.farm.batch import TICK_SEC, Batch
from dataloader.farm.capture import Capture
from dataloader.farm.lease import Lease
from dataloader.farm.process import EXIT_FENCED, drain_pipe, now, readable
from dataloader.farm.session import Lost, Session, read
from dataloader.farm.slots import TOOK_LONGER, Slot
from dataloader.queue import lifecycle, logs
from dataloader.queue.job import Delivery, End, as_progress, beat_interval, to_json

REST_SEC = 1.0  # without a run until the thread sleeps
PROGRESS_SEC = 1.0  # progress and checkpoints are written at most once in this time
RETAKE_SEC = periods.seconds("RETAKE_SEC", 5.0)  # for taking the key again: the former session has 2 s to end
LONG_SEC = 1.0  # a run that lasts so long until a beat leaves LISTEN: its triggers would cost the server for nothing
LOST_SEC = 1.0  # until a run stops whose key another worker may have


class Heartbeat(threading.Thread):
    """The thread of one worker; it sleeps while no job runs."""

    def __init__(self, session: Session[lifecycle.Session], batch: Batch, settings: Settings, capture: Capture) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._session = session
        self._batch = batch
        self._settings = settings
        self._capture = capture
        self._lease: Lease | None = None  # of the run under way
        self._next_beat = 0.0
        self._failed = False
        self._seen: lifecycle.Session | None = None  # the latest session of the run
        self._has_key = True  # False: another session than the present one has the key
        self._is_attending = False  # True: the thread may be waiting beside a run
        self._sleeps_until = math.inf
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._log = structlog.get_logger("heartbeat")

    def attend(self, delivery: Delivery, slot: Slot) -> Lease:
        """Keep the leases of a run's jobs, which the worker's slot shows, until `leave`."""
        self._lease = lease = Lease(delivery, slot, self._settings, self._hurry, self.is_alive)
        if self._sleeps_until > lease.began + TICK_SEC:
            self._wake()
        return lease

    def leave(self, lease: Lease) -> None:
        """The run is over."""
        lease.released = True
        self._lease = None
        self._hurry()

    @property
    def is_sound(self) -> bool:
        """False once the thread has ended or met an error that is not the database's absence."""
        return self.is_alive() and not self._failed

    def run(self) -> None:
        """Look after each run, for the life of the worker."""
        seen = now()
        while True:
            self._rest(now() - seen > REST_SEC)
            self._is_attending = True
            if (lease := self._lease) is not None:
                self._look_after(lease)
                seen = now()
            self._is_attending = False

    def _rest(self, is_idle: bool) -> None:
        """Wait until the next look at the runs, or until another thread wakes this one."""
        self._sleeps_until = math.inf if is_idle else now() + TICK_SEC
        if self._lease is None or not is_idle:  # a run that has just begun: its thread saw this one awake
            self._pause(self._sleeps_until - now())

    def _look_after(self, lease: Lease) -> None:
        try:
            self._keep(lease)
        except BaseException as e:  # after any error the run must not go on without a heartbeat
            self._failed = True
            self._log.exception("heartbeat.failed")
            lease.give_up(End.HANDED_BACK, f"heartbeat failed: {type(e).__name__}")
            self._wait_for_release(lease)

    def _wake(self) -> None:
        os.write(self._write, b".")

    def _hurry(self) -> None:
        """Wake the thread while it looks after this run; otherwise its next look is soon enough."""
        if self._is_attending:
            self._wake()

    def _keep(self, lease: Lease) -> None:
        """Beat until the run is over."""
        interval = self._interval(lease)
        self._seen, self._has_key = self._batch.claimed_in, True
        # A beat marks jobs that were claimed ahead as begun (see dl_reap), unless the run is over sooner.
        is_shown = lease.job.job_id == self._batch.begun and len(lease.delivery.jobs) == 1
        self._next_beat = min(lease.slot.last_renewed + interval, math.inf if is_shown else lease.began + TICK_SEC)
        lease.slot.show(f"job={lease.job.job_id} attempt={lease.job.attempt}")
        while not lease.released:
            try:
                self._session.call(partial(self._beat_or_sleep, lease), answer_within=max(1.0, interval))
            except Lost:
                if lease.goes_on and now() > lease.slot.fence_at:
                    lease.give_up(End.HANDED_BACK, "the lease ran out while the database was away")
                self._pause(self._session.pause_sec)
            if lease.stop in (End.GONE, End.HANDED_BACK):
                self._wait_for_release(lease)
        lease.slot.show("works")

    def _interval(self, lease: Lease) -> float:
        return beat_interval(self._settings.dl_heartbeat_sec, lease.delivery.lease_ttl_sec)

    def _beat_or_sleep(self, lease: Lease, session: lifecycle.Session) -> None:
        """Write what is due, else wait; the run may be over by the time that this thread has the session."""
        if lease.released:
            return
        try:
            if not self._wrote_what_is_due(lease, session):
                self._sleep(lease, session)
        except errors.LockNotAvailable:
            self._next_beat = now() + 1.0  # another session has locked the row; ours is sound

    def _wrote_what_is_due(self, lease: Lease, session: lifecycle.Session) -> bool:
        """Write what is due; False when nothing was due, so that the thread may sleep."""
        read(session.conn)  # notifications, and the server's farewell
        if session is not self._seen:  # the claim's session was lost: take the key again before anything else
            self._seen, self._has_key, self._next_beat = session, False, now()
        due = now() >= self._next_beat
        has_news = lease.has_news and now() >= lease.progress_at
        if not (due or has_news):
            return self._wrote_log(session) or self._unburden(lease, session)
        if due and not self._has_key and not self._regain(lease, session):
            return True
        progress = self._take_news(lease, session) if has_news else None
        self._beat(lease, session, progress, journal=due)
        if due:
            self._next_beat = now() + self._interval(lease)
            if session.is_listening and now() > lease.began + LONG_SEC:
                lifecycle.unlisten(session)
        return True

    def _wrote_log(self, session: lifecycle.Session) -> bool:
        """Write what the run has written, at most every second; False: there is nothing, or it is not due."""
        capture = self._capture
        if now() >= capture.look_at:
            capture.look()
        run = capture.run
        if run is None or not run.has_news or now() < capture.write_at:
            return False
        places = capture.places()
        logs.write(session.conn, [run], now())
        capture.written(run, places)
        return True

    def _unburden(self, lease: Lease, session: lifecycle.Session) -> bool:
        """Write ends that have waited for their batch, hand back jobs behind a long run; False: nothing was written."""
        if lease.began < now() - TICK_SEC:
            lease.slot.ahead = 0  # this thread is alive: the keeper need not do it
            self._batch.hand_back(TOOK_LONGER)
        if not self._batch.is_due(lease.began):
            return False
        self._batch.write(session)
        return True

    def _sleep(self, lease: Lease, session: lifecycle.Session) -> None:
        """Wait for the next beat, progress, the batch, the server, or the pipeline's thread."""
        until = min(self._next_beat, lease.progress_at) if lease.has_news else self._next_beat
        if self._capture.run is not None:
            until = min(until, self._capture.look_at)
        if not self._batch.is_empty:
            until = min(until, now() + TICK_SEC)
        if self._read in readable([self._read, session.conn.fileno()], until - now()):
            drain_pipe(self._read)

    def _take_news(self, lease: Lease, session: lifecycle.Session) -> dict[str, Any] | None:
        """Write the checkpoint and return the progress: the first at once, later ones at most every PROGRESS_SEC."""
        lease.progress_at = now() + PROGRESS_SEC
        checkpoint = lease.checkpoint
        if checkpoint is not None and checkpoint is not lease.written:
            lifecycle.keep_checkpoint(session.conn, lease.job, checkpoint)
            lease.written = checkpoint
        progress, lease.progress = lease.progress, None
        return progress

    def _beat(self, lease: Lease, session: lifecycle.Session, progress: dict[str, Any] | None, journal: bool) -> None:
        document = to_json(log.masked(as_progress(progress))) if progress else None
        if progress and document is None:
            self._log.warning("progress.dropped", job_id=str(lease.job.job_id), why="not JSON, or too large")
        sent, written = now(), lease.written
        jobs = lease.delivery.jobs
        answer = lifecycle.beat(session.conn, jobs, document, journal)
        if answer is None:
            how = End.GONE if len(jobs) == 1 else End.HANDED_BACK  # the others' claims may hold
            lease.give_up(how, "the claim belongs to another worker", within=LOST_SEC)
            return
        lease.renewed(sent)
        lease.confirmed = written
        if answer:
            lease.end(End.CANCELED, None)

    def _regain(self, lease: Lease, session: lifecycle.Session) -> bool:
        """Renew, and take the key for this session; a former session that cannot end keeps the key.

        False: the claim or the key is lost, and the run has to stop.
        """
        patience, session.conn.answer_within = session.conn.answer_within, max(RETAKE_SEC, self._interval(lease))
        sent = now()
        has_key = lifecycle.retake(session, lease.delivery.jobs)
        session.conn.answer_within = patience
        if has_key is False:
            lease.give_up(End.HANDED_BACK, "the claim or its key was taken while the session was lost", LOST_SEC)
            return False
        self._has_key = has_key is True
        lease.renewed(sent)
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
