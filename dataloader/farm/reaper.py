"""PROCESS: the reaper recovers lost jobs, wakes due ones, makes those of schedules and backfills.

Any number may run, none leads. The reaper returns jobs whose lease has run out (their machine is gone), wakes due
rows of queues without a worker, and deletes jobs that ended DL_RETENTION_DAYS ago. It makes the jobs of schedules
when they are due, and those of backfills, between its rounds too. It aggregates the journal, counts the queues,
predicts when jobs end, adds the messages to webhooks, and names the sessions that hold back vacuum.
"""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import structlog
from setproctitle import setproctitle

from dataloader import log as logs
from dataloader import periods
from dataloader.config import ConfigError, Settings
from dataloader.exits import EXIT_CANNOT_START, EXIT_OK
from dataloader.farm.common_log import FarmOutage, Note
from dataloader.farm.process import Signals, notify_ready, now
from dataloader.farm.session import Lost, Session, opened, read
from dataloader.queue import cleanups, db, hooks, lifecycle, migrations
from dataloader.queue import logs as logs_of_jobs
from dataloader.queue.plans import backfills, schedules
from dataloader.queue.reports import predictions, runs, stats, webhooks

WAKE_BATCH = 1_000
STRANDED_BATCH = 200  # keys of parked rows that one round checks
PRUNE_BATCH = (10, 500)  # jobs that one transaction deletes
PRUNE_SEC = 0.02  # how long one should take: a job of hours has thousands of heartbeats in its journal
PRUNE_PAUSE = 4  # times that after each: a claim's commit waits until its deletions are on the disk
LOG_DAYS_SEC = periods.seconds("LOG_DAYS_SEC", 600.0)  # between two checks of the partitions of logs
LOG_DAYS_AGAIN_SEC = periods.seconds("LOG_DAYS_AGAIN_SEC", 60.0)  # the same after a failure
PREDICT_SEC = periods.seconds("PREDICT_SEC", 60.0)  # from one round over all queues to the next
NOTE_SELDOM = 20  # times as long as a count: until the next count
HELD_AGAIN_SEC = periods.seconds("HELD_AGAIN_SEC", 300.0)  # how often the same session that holds back vacuum is named
DAY_SEC = 86_400
# With PG_CONNECT_TIMEOUT: within it a living worker reaches a database that is back, and writes.
PATIENCE_SEC = periods.seconds("PATIENCE_SEC", 10.0)
ANSWER_SEC = periods.seconds("REAPER_ANSWER_SEC", 30.0)  # the longest wait for an answer of the server
LOCK_SEC = periods.seconds("REAPER_LOCK_SEC", 10.0)  # for a lock that another session has
TRIES = 3  # for a duty whose session is lost, until the next duty has its turn
JUMP_SEC = 1.0  # of the database's clock against this machine's, between two rounds
GAP_SEC = 1.0  # from the loss of a session to an answer in the next one: no lease need end in this time
RETRY_SEC = 1.0  # before the next try of plans that did not finish in time, or that another reaper has locked
SILENCE_SEC = periods.seconds("SILENCE_SEC", 5.0)  # a database that needs longer for the simplest answer was away

Duty = Callable[[db.Connection, Callable[[], bool]], object]  # while the function returns True
Log = structlog.stdlib.BoundLogger


def main(settings: Settings, dsn: str) -> int:
    """Reap every DL_REAPER_PERIOD_SEC until SIGTERM or SIGINT; returns the process's exit status."""
    logs.configure(settings, threaded=True)
    signals = Signals((signal.SIGTERM, signal.SIGINT))
    setproctitle("dataloader: reaper")
    log = structlog.get_logger("reaper").bind(pid=os.getpid())
    try:
        Reaper(settings, dsn, signals, log).work()
    except migrations.SchemaError as e:
        log.error("reaper.schema.refused", error=str(e))
        return EXIT_CANNOT_START
    signals.ignore()
    log.info("reaper.stopped")
    return EXIT_OK


class Uptime:
    """For how long the database has been available to this reaper, with a clock that did not jump."""

    def __init__(self) -> None:
        self.is_patient = False  # True: living workers may not have reached it yet
        self.jump_sec = 0.0  # how far its clock jumped forwards before the latest answer
        self._back = -math.inf  # since when (monotonic seconds)
        self._unsure_since: float | None = None  # since when it may have been away; None: it is there
        self._ahead = math.inf  # how far its clock is ahead of ours, at most

    def lost(self, sent: float) -> None:
        """A statement, or a try to connect, that was sent at this monotonic instant had no answer."""
        if self._unsure_since is None:
            self._unsure_since = sent

    def is_there(self, at: float) -> None:
        """The database has answered by this instant. A session that is replaced within GAP_SEC was no absence of it."""
        if self._unsure_since is not None and at - self._unsure_since > GAP_SEC:
            self._back = at
        self._unsure_since = None

    def answered(self, sent: float, got: float, clock: float, server_age: float) -> float:
        """The database answered between these instants, with its clock and its age; for how long it has been available.

        0.0 when it has just come back, or its clock has just jumped forwards.
        """
        self.is_there(got)
        jump = clock - got - self._ahead
        self.jump_sec = jump if jump > JUMP_SEC else 0.0
        self._ahead = clock - sent
        if self.jump_sec or got - sent > SILENCE_SEC:
            self._back = got
        if server_age >= 0:  # else its clock was set back to before its start
            self._back = max(self._back, got - server_age)
        return got - self._back


class Reaper:
    """The reaper's rounds: a table of duties, each done by itself, so that none keeps the others from their turn."""

    def __init__(self, settings: Settings, dsn: str, signals: Signals, log: Log) -> None:
        self._settings = settings
        self._signals = signals
        self._log = log
        schema, within = settings.pg_schema_queue, settings.pg_connect_timeout
        begin = partial(opened, dsn, "dl-reaper", schema, within, ANSWER_SEC, LOCK_SEC)
        self._session = Session(begin, self._resume, FarmOutage(Note(), log), "reaper.session.lost")
        self._is_known = False
        self._uptime = Uptime()
        self._schedules = Schedules(settings, log)
        self._watch = Watch(log, settings.dl_reaper_period_sec)
        self._patience_sec = PATIENCE_SEC + settings.pg_connect_timeout
        self._stranded_after: int | None = None  # the last parked key that was checked
        self._waiting_after: UUID | None = None
        self._predict_at = 0.0
        self._predicted = ""  # the last queue that has its predictions
        self._log_days_at = 0.0
        # Each duty begins no other piece of its work after its share of a round, or after an order to stop.
        self._duties: tuple[tuple[str, Duty, float], ...] = (
            ("reap", self._reap, 1),
            ("unpark", self._unpark, 1),
            ("let_in", lambda conn, _: lifecycle.let_in(conn), 1),
            ("cleanups", self._clean_up, 1),
            ("roll", self._aggregate, 0.3),
            ("watch", self._watch.check, 1),
            ("predict", self._predict, 0.2),
            ("alerts", self._publish_alerts, 1),
            ("log_days", self._keep_log_days, 1),
            ("prune", self._prune, 0.8),
        )

    def work(self) -> None:
        period_sec = self._settings.dl_reaper_period_sec
        while not self._signals.received:
            started = now()
            for name, duty, share in self._duties:
                self._do(name, duty, now() + share * period_sec)
                # The jobs of schedules should be punctual, and thousands of them should not delay the next duty.
                self._do("schedules", self._schedules.make, now() + 0.6 * period_sec / len(self._duties))
            self._pause(started + period_sec)

    def _do(self, name: str, duty: Duty, until: float = math.inf) -> None:
        """Do a duty, up to TRIES times where the session is lost; another failure is logged, and the round goes on."""

        def may_go_on() -> bool:
            return now() < until and not self._signals.received

        def guarded(session: lifecycle.Session) -> None:
            # Where `reap` meets a limit, heartbeats may meet it too, and living workers need time afterwards.
            with going_on(session.conn, self._log, f"reaper.{name}.failed", over_limits=name != "reap"):
                duty(session.conn, may_go_on)

        for _ in range(TRIES):
            if self._signals.received:
                return
            sent = now()
            try:
                self._session.call(guarded)
                return self._uptime.is_there(now())
            except Lost:
                self._uptime.lost(sent)
                self._signals.wait(self._session.pause_sec)

    def _pause(self, until: float) -> None:
        """Wait until this instant, or a signal; make the jobs of schedules that are due meanwhile."""
        while not self._signals.received:
            self._do("schedules", self._schedules.make, until)
            if until <= now():
                return
            wake_at = min(until, self._schedules.due_at)
            self._do("pause", lambda conn, _: self._signals.wait(wake_at - now(), conn.fileno()))  # noqa: B023

    def _resume(self, session: lifecycle.Session, lost: Sequence[lifecycle.Session]) -> None:
        schedules.listen(session.conn)
        backfills.listen(session.conn)
        self._schedules.due_at = -math.inf
        if not self._is_known:
            self._is_known = True
            self._log.info("reaper.started")
            notify_ready()

    # --- the duties ---

    def _reap(self, conn: db.Connection, may_go_on: Callable[[], bool]) -> None:
        """Recover every expired lease in a transaction of its own, then wake all due rows."""
        uptime, log, patience_sec = self._uptime, self._log, self._patience_sec
        sent = now()
        clock = lifecycle.clock(conn)
        up_sec = uptime.answered(sent, now(), *clock)
        was_patient, uptime.is_patient = uptime.is_patient, up_sec < patience_sec
        if uptime.is_patient and not was_patient:
            log.warning("reaper.patient", patience_sec=patience_sec)
        if uptime.jump_sec:
            log.warning("reaper.clock.jumped", forwards_sec=round(uptime.jump_sec, 1))
        recovered: Counter[str] = Counter()
        while job := lifecycle.reap(conn, up_sec, patience_sec):
            recovered[job.status or ""] += 1
            logs.metric("job.run", job_id=str(job.job_id), outcome="expired", status=job.status)
            log.warning("reaper.job.taken", job_id=str(job.job_id), status=job.status)
            if not may_go_on():
                break
        if recovered:
            log.warning("reaper.requeued", count=recovered.total(), **recovered)
        while lifecycle.wake(conn, WAKE_BATCH) >= WAKE_BATCH and may_go_on():
            pass

    def _unpark(self, conn: db.Connection, _: object) -> None:
        """Free parked and waiting rows that missed their wake-up, some in each round."""
        self._stranded_after = lifecycle.unpark_stranded(conn, self._stranded_after, STRANDED_BATCH)
        self._waiting_after = lifecycle.resolve_stranded(conn, self._waiting_after, STRANDED_BATCH)

    def _clean_up(self, conn: db.Connection, _: object) -> None:
        """Add a job for each canceled one that has left something behind elsewhere."""
        for job_id in cleanups.due(conn):
            log = self._log.bind(canceled=str(job_id))
            with going_on(conn, log, "reaper.cleanup.failed"):
                if cleanup := cleanups.add(conn, job_id):
                    log.info("reaper.cleanup.added", job_id=str(cleanup))
        cleanups.forget(conn)

    def _aggregate(self, conn: db.Connection, may_go_on: Callable[[], bool]) -> None:
        """Aggregate new rows of the journal; the next round goes on with the rest."""
        while (rolled := stats.aggregate(conn)) >= stats.AGGREGATED and may_go_on():
            pass
        while runs.fold(conn) >= runs.FOLDED and may_go_on():
            pass
        if rolled == stats.ANEW:
            self._log.warning("reaper.roll.anew", why="the sequence of dl_job_events has been set back")

    def _predict(self, conn: db.Connection, may_go_on: Callable[[], bool]) -> None:
        """Note when jobs will end, queue by queue, all queues once in PREDICT_SEC."""
        while self._predict_at <= now() and may_go_on():
            after = self._predicted
            self._predicted, self._predict_at = "", now() + PREDICT_SEC  # behind the last queue, and after a failure
            if (noted := predictions.note(conn, after)) is None:
                return
            self._predicted, self._predict_at = noted.queue, 0.0
            if noted.late:
                self._log.warning("reaper.deadlines.at_risk", queue=noted.queue, jobs=noted.late)
            if noted.error:
                self._log.warning("reaper.predict.failed", queue=noted.queue, error=noted.error)

    def _keep_log_days(self, conn: db.Connection, _: object) -> None:
        """Make the next days' partitions of the logs of jobs, and drop those older than DL_RETENTION_DAYS."""
        if now() < self._log_days_at:
            return
        self._log_days_at = now() + LOG_DAYS_AGAIN_SEC
        if changed := logs_of_jobs.keep_days(conn, self._settings.dl_retention_days):
            self._log.info("reaper.log_days", changed=changed)
        self._log_days_at = now() + LOG_DAYS_SEC

    def _publish_alerts(self, conn: db.Connection, _: object) -> None:
        if published := webhooks.publish(conn, self._settings):
            self._log.info("reaper.alerts.told", count=published)

    def _prune(self, conn: db.Connection, may_go_on: Callable[[], bool]) -> None:
        """Delete jobs that ended DL_RETENTION_DAYS ago, in batches; other sessions have most of the time."""
        if (days := self._settings.dl_retention_days) is None:
            return
        started, pruned = now(), 0
        since, size = "-infinity", PRUNE_BATCH[1]
        while may_go_on():
            sent = now()
            deleted, since = lifecycle.prune(conn, days * DAY_SEC, since, size)
            seconds = now() - sent
            pruned += deleted
            if deleted < size:
                break
            least, most = PRUNE_BATCH
            size = max(least, min(most, int(size * PRUNE_SEC / max(seconds, 0.001))))
            self._pause(now() + PRUNE_PAUSE * seconds)
        if pruned:
            self._log.info("reaper.pruned", count=pruned)
            logs.metric("jobs.pruned", count=pruned, duration_ms=round((now() - started) * 1_000, 1))


class Schedules:
    """Makes the jobs of schedules when they are due, those of backfills in bunches; a notification wakes the reaper."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self._settings = settings
        self._log = log
        self._hooks_error: str | None = None
        self._served: list[str] = []  # the schedules of a round that had no time for all
        self.due_at = -math.inf  # the monotonic time of the next check

    def make(self, conn: db.Connection, may_go_on: Callable[[], bool]) -> None:
        """Make due jobs while that may go on; without a due one and without a change this runs no statement."""
        if not read(conn) and now() < self.due_at:
            return
        self.due_at = now() + RETRY_SEC  # where an error ends this
        pause = 0.0 if self._made(conn, may_go_on) else RETRY_SEC  # another reaper does it, or no job can be made
        left = [seconds for due_in in (schedules.due_in, backfills.due_in) if (seconds := due_in(conn)) is not None]
        self.due_at = now() + (max(min(left, default=math.inf), 0) or pause)
        if read(conn):  # it came during a statement, and ends no wait
            self.due_at = -math.inf

    def _made(self, conn: db.Connection, may_go_on: Callable[[], bool]) -> bool:
        """Make the jobs of schedules that are due, and one bunch of the backfills'; whether there was one."""
        try:
            hooks.load(self._settings.dl_hooks)  # without the functions around the adding of jobs none is made
        except ConfigError as e:
            if str(e) != self._hooks_error:
                self._log.error("reaper.hooks.failed", error=str(e))
            self._hooks_error = str(e)
            return False
        lease_ttl_sec = self._settings.dl_default_lease_ttl_sec
        made = None
        for made in schedules.tick(conn, lease_ttl_sec, served=self._served):
            if made.error:
                self._log.warning("reaper.schedule.failed", schedule=made.name, error=made.error)
            else:
                self._log.info("reaper.schedule.made", schedule=made.name, jobs=made.jobs, skipped=made.skipped)
            if not may_go_on():  # leases that have run out are not to wait for thousands of schedules
                break
        if bunch := backfills.tick(conn, lease_ttl_sec):
            if bunch.error:
                self._log.warning("reaper.backfill.failed", backfill=bunch.name, error=bunch.error)
            else:
                facts = {"jobs": bunch.jobs, "skipped": bunch.skipped, "canceled": bunch.canceled}
                self._log.info("reaper.backfill.made", backfill=bunch.name, **facts)
        return bool(made or bunch)


class Watch:
    """Counts the queues for pages and metrics, and names the session that holds back vacuum while it slows claims."""

    def __init__(self, log: Log, period_sec: float) -> None:
        self._log = log
        self._period_sec = period_sec
        self._lag_sec = 0.0
        self._held: tuple[Any, ...] | None = None  # the session that holds back vacuum
        self.held_again_at = 0.0  # when it is named again
        self.note_at = 0.0  # the next count of the queues

    def check(self, conn: db.Connection, _: object) -> None:
        """One round."""
        if now() >= self.note_at:
            began = now()
            self.note_at = began + NOTE_SELDOM * stats.NOTING_SEC  # after a failure as after the slowest count
            lag_sec = stats.note_lengths(conn, self._period_sec / 2)
            self._lag_sec = self._lag_sec if lag_sec is None else lag_sec
            self.note_at = now() + NOTE_SELDOM * (now() - began)
        vacuum = stats.vacuum(conn)
        held = stats.slows_claims(vacuum, self._lag_sec)
        holder = (held["kind"], held["pid"], held["application"]) if held else None
        dead = vacuum["jobs_dead_tuples"]
        if held and (holder != self._held or now() >= self.held_again_at):
            facts = logs.masked({name: value for name, value in held.items() if name != "xids"})
            lag_sec = round(self._lag_sec, 1)
            self._log.warning("reaper.vacuum.held_back", **facts, dead_tuples=dead, lag_sec=lag_sec)
            self.held_again_at = now() + HELD_AGAIN_SEC
        elif self._held and not held:
            self._log.info("reaper.vacuum.released", dead_tuples=dead)
        self._held = holder


@contextmanager
def going_on(conn: db.Connection, log: Log, event: str, over_limits: bool = True) -> Iterator[None]:
    """Log a failure in this block as `event`; raises where the session is lost or the server does no work.

    With `over_limits` a limit of the server that the block's statement has met is a failure, too.
    """
    try:
        yield
    except Exception as e:  # a value that Python cannot read is no reason to leave the other duties undone
        if conn.closed or (db.is_outage(e) and not (over_limits and db.is_limit(e))):
            raise
        log.warning(event, error=str(e).strip() if isinstance(e, psycopg.Error) else repr(e))
