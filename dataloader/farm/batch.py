"""A worker's jobs and ends besides the run under way: claimed jobs that have not begun, ends that are not written.

The worker's thread and the heartbeat's share a batch; the thread that has the session's lock changes it. An end stays
until it is known to be written.
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from itertools import groupby
from operator import attrgetter
from types import NoneType
from typing import Any
from uuid import UUID

import psycopg
from psycopg import errors

from dataloader import log, periods, pipelines
from dataloader.config import WorkerSpec
from dataloader.farm.process import now
from dataloader.farm.slots import Siblings
from dataloader.queue import db, lifecycle, probe
from dataloader.queue.job import Delivery, Finish, Job, Status
from dataloader.queue.lifecycle import Ended, Reached, Step
from dataloader.queue.set_aside import is_of_a_row, set_aside

TICK_SEC = 0.05  # how long an end may wait for its batch, and a job behind another job's run
HEAD_SEC = 1.0  # how long a worker passes over rows at the head of the queue that other sessions had locked
SIZE_MOST = 1_000  # the largest `prefetch`
LOCKED_SEC = 0.25  # until the next try to write the end of a row that another session has locked
ASIDE_SEC = 0.5  # until the next claim, while another worker sets the job aside on which claims fail
LOCKED_MOST = 1_000  # locked ends from which on a worker claims nothing
REPORT: dict[str, type] = {
    "job_id": UUID,
    "task": str,
    "attempt": int,
    "outcome": StrEnum,
    "duration_ms": float,
    "cpu_sec": float,
    "peak_mb": float,
}  # the fields of a run's line
# After a job with an affinity key a worker's claims ask for more of them.
WARM_SEC = periods.seconds("MEMORY_SEC", 600.0)
MARKS_MOST = 64  # within the longest wait: the bound is as exact as that
PRIORITIES_MOST = 16  # classes whose bounds a worker keeps
FINISHED = log.Template(
    "worker",
    "worker.job.finished",
    {"worker": str, "queue": str, **REPORT, "verb": StrEnum, "status": StrEnum, "error": NoneType},
)


def size_after(size: int, seconds: float, runs: int) -> int:
    """How many jobs to claim after a claim of up to `size`, whose runs took so many seconds together.

    The first job's end waits at most TICK_SEC for the others. After a long run the worker starts over with one.
    """
    if seconds > 2 * TICK_SEC:
        return 1
    return min(2 * size, 1 + int(TICK_SEC * runs / seconds), SIZE_MOST)


def fair_share(size: int, siblings: Siblings, found_fewer: bool) -> int:
    """How many of `size` jobs a worker takes: its idle siblings want as many, at the end of a queue all siblings."""
    wanting = siblings.working if found_fewer else siblings.idle
    return max(1, size // (1 + wanting))


class Bookmark:
    """Where a session's next claim begins: behind the rows that its claims of the last HEAD_SEC have found locked."""

    def __init__(self) -> None:
        self.head = lifecycle.Head()
        self._until = 0.0

    def start(self) -> lifecycle.Head:
        """Begin a claim here; every HEAD_SEC a claim begins at the head of the queue."""
        if now() >= self._until:
            self.head, self._until = lifecycle.Head(), now() + HEAD_SEC
        return self.head


class Batch:
    """The jobs and ends of one worker, and how many jobs its next claim asks for."""

    def __init__(self, machine: Sequence[WorkerSpec], queues: tuple[str, ...], backoff_sec: float, logger: Any) -> None:
        """`machine` are all workers of this machine, `backoff_sec` DL_CLAIM_BACKOFF_SEC."""
        entries = [spec for spec in machine if spec.served == queues]
        self._spec = max(entries, key=lambda spec: spec.prefetch, default=WorkerSpec(queues=list(queues)))
        self.claimed_in: lifecycle.Session | None = None  # the session that took the keys of the last claim
        self.running: tuple[Job, ...] = ()  # the jobs of the run under way, until their ends are here
        self.begun: UUID | None = None  # the first job of the last claim: the claim itself marks its row as begun
        self.waiting: deque[Delivery] = deque()  # the jobs of one key each, of the last claim, that have not begun
        self._machine = machine
        self._backoff_sec = backoff_sec
        self._turns = Turns(queues, self._spec.scheduler, random.Random())  # noqa: S311  whose turn it is, is no secret
        self._order = self._turns.order()
        self._log = logger
        self._most = self._spec.prefetch  # less where the server's lock table is small
        self._queue = queues[0]  # of the last claim that had jobs
        self._sizes = dict.fromkeys(queues, 1)  # of the next claim of a queue, as its last runs suggest
        self._keys = dict.fromkeys(queues, 1)  # of a run, as the pipeline of the queue's last one takes them
        self._keys_most: int | None = None  # of a run, as the queue allows
        self._found_fewer = False  # the last claim returned fewer jobs than it asked for
        self._ends: dict[UUID, Ended] = {}  # by job, in their order
        self._ended_at = 0.0  # when the oldest of them was added that no locked row holds up
        self._has_failed = False  # the last write has: each end is written alone
        self.locked: set[UUID] = set()  # the ends whose rows another session has locked
        self._retry_at = 0.0  # when these are due again
        self._bookmarks = {queue: Bookmark() for queue in queues}

    # --- jobs ---

    def size_next(self, siblings: Callable[[], Siblings] = Siblings) -> int:
        """How many keys to claim: a fair share beside `siblings` that want jobs too, and enough for one run.

        0 while LOCKED_MOST ends wait for locked rows.
        """
        if len(self.locked) >= LOCKED_MOST:
            return 0
        self._order = self._turns.order()
        queues = self._order if self._turns.by_lag else self._order[:1]
        size = min(self._most, *(self._sizes[queue] for queue in queues))
        if size > 1:
            size = fair_share(size, siblings(), self._found_fewer)
        return max(size, min(self._most, *(self._keys[queue] for queue in queues)))

    def limit(self, most: int, why: str) -> None:
        if most < self._most:
            self._most = most
            self._log.warning("worker.prefetch.lowered", prefetch=self._spec.prefetch, at_most=most, why=why)

    def fit(self, table: probe.LockTable) -> None:
        """Claim at most as many jobs as the server's lock table has room for."""
        most = probe.most_at_once(table, self._machine, self._spec.is_automatic)
        if self._spec.is_automatic:  # nobody has asked for more
            self._most = min(self._most, most)
        else:
            self.limit(most, "the keys of this machine's jobs would fill the server's lock table")

    def claimed(self, jobs: Sequence[Job], keys_most: int | None = None) -> None:
        """Keep claimed jobs, the best first, those of a key together; a run may have so many keys."""
        self.begun, self._queue = jobs[0].job_id, jobs[0].queue
        self._keys_most = keys_most
        place = 0
        for _, of_key in groupby(jobs, key=attrgetter("lock_key")):
            delivery = Delivery(tuple(of_key), place)
            place += len(delivery.jobs)
            self.waiting.append(delivery)

    def next(self) -> Delivery | None:
        """The best waiting jobs that make one run, or None; to be called with the session's lock."""
        self.running = ()
        if not self.waiting:
            return None
        first = self.waiting.popleft()
        pipeline = pipelines.registered().get(first.first.task)
        self.running, keys = first.jobs, (pipeline and pipeline.batch_size) or 1
        if keys > 1:
            keys = min(keys, self._keys_most or SIZE_MOST)
        self._keys[self._queue] = keys
        kind = attrgetter("task", "affinity_key")
        while (keys := keys - 1) > 0 and self.waiting and kind(self.waiting[0].first) == kind(first.first):
            self.running += self.waiting.popleft().jobs
        return first if self.running is first.jobs else Delivery(self.running, first.place)

    def hand_back(self, reason: str) -> None:
        """Give up the waiting jobs, the last first; their attempts do not count, for no run has begun."""
        while self.waiting:
            for job in reversed(self.waiting.pop().jobs):
                self.add(Ended(job, Finish("hand_back", reason)))

    def learn(self, seconds: float, runs: int) -> None:
        self._sizes[self._queue] = size_after(self._sizes[self._queue], seconds, runs)

    # --- ends ---

    def add(self, end: Ended) -> None:
        if len(self._ends) == len(self.locked):
            self._ended_at = now()
        self._ends[end.job.job_id] = end

    @property
    def owes(self) -> int:
        """How many ends are not written."""
        return len(self._ends)

    @property
    def retry_at(self) -> float:
        """When the ends of locked rows are due again (monotonic seconds); infinity without such ends."""
        return self._retry_at if self.locked else math.inf

    def is_due(self, began: float) -> bool:
        """Whether the heartbeat should write: ends, or a run that `began` then, have lasted TICK_SEC."""
        is_late = min(self._ended_at, began) <= now() - TICK_SEC
        return (is_late and len(self._ends) > len(self.locked)) or now() >= self.retry_at

    def _due(self) -> list[Ended]:
        """The ends to be written now; those of locked rows once their LOCKED_SEC are over."""
        held_up = self.locked if now() < self._retry_at else ()
        return [end for job_id, end in self._ends.items() if job_id not in held_up]

    # --- writing, by whoever has the session ---

    def step(
        self,
        session: lifecycle.Session,
        most: int,
        affinity: lifecycle.Affinity | None = None,
        without: Collection[str] = (),
    ) -> Step:
        """Write the ends and claim up to `most` jobs in one statement; the ends stay here until they are confirmed."""
        if self._has_failed or not most:
            self.write(session)
            return Step([], {}, 0, most > 0, None)
        ends, queues = self._due(), self._order
        start = self._bookmarks[queues[0]].start()
        self._has_failed = bool(ends)  # unless the statement succeeds
        try:
            step = lifecycle.step(
                session, queues, self._backoff_sec, most, ends, start, self._turns.by_lag, affinity, without
            )
            self._has_failed = False
        except psycopg.Error as e:
            if isinstance(e, errors.OutOfMemory):
                self.limit(max(1, most // 2), "the server has no room for more locks")
            if db.is_passing(e):
                raise
            if ends:
                self.write(session)  # the database refuses an end: it costs none of the others
            elif not is_of_a_row(e):
                raise
            else:
                aside = set_aside(
                    session.conn,
                    queues,
                    lambda: lifecycle.step(
                        session, queues, 0.0, most, by_lag=self._turns.by_lag, without=without, tries_short=False
                    ),
                    e,
                )
                if aside is None:  # another worker does that
                    return Step([], {}, 0, False, ASIDE_SEC)
                self._log.error("worker.job.set_aside", **aside._asdict())
            return Step([], {}, 0, True, None)
        self._found_fewer = len(step.jobs) < most  # of a merged queue sometimes fewer keys all the same
        if not (step.jobs or step.look_again):
            self._sizes = dict.fromkeys(self._sizes, 1)  # the next job may be of another kind: it is claimed alone
        if step.jobs:
            self.claimed_in = session
            self._turns.claimed(step.jobs[0].queue)
            bookmark = self._bookmarks[step.jobs[0].queue]
            bookmark.head = step.head or bookmark.head
        self._written(ends, step.ended, step.locked)
        if step.backoffs:
            self._log.info("worker.claim.backoff", keys=step.backoffs)
        return step

    def write(self, session: lifecycle.Session) -> None:
        """Write the ends without a claim, after a failure each alone: a job that is done must not be done again."""
        ends = self._due()
        size = 1 if self._has_failed else max(1, len(ends))
        self._has_failed = bool(ends)  # unless all statements succeed
        for some in (ends[at : at + size] for at in range(0, len(ends), size)):
            self._written(some, *lifecycle.finish_some(session.conn, session.worker, some))
        self._has_failed = False

    def resume(self, session: lifecycle.Session, lost: Sequence[lifecycle.Session]) -> None:
        """Put right what lost sessions have left: waiting jobs and those of a claim whose answer was lost go back.

        A lost session's backend may still be at its claim, so it ends first. The reaper gets jobs with a locked row.
        """
        for each in lost:
            lifecycle.end_session(session.conn, each.backend_pid, each.backend_start)
        self.waiting.clear()
        if self._ends:
            ours = lifecycle.still_held(session.conn, session.worker, [end.job for end in self._ends.values()])
            for job_id in self._ends.keys() - ours:  # written by the lost statement, or their claim is another worker's
                end = self._forget(job_id)
                if not lifecycle.has_ended(session.conn, end.job):
                    self._log.warning("worker.ownership.lost", job_id=str(job_id), verb=end.finish.verb)
        holds = [*self.running, *(end.job for end in self._ends.values())]
        for job_id, status in lifecycle.hand_back(session.conn, session.worker, holds, "the session was lost"):
            self._log.warning("worker.claim.unheard", job_id=str(job_id), status=status)

    def _written(self, ends: Sequence[Ended], ended: Mapping[UUID, Status], locked: Collection[UUID]) -> None:
        """Log the written ends; those whose rows are locked stay."""
        if locked:
            if now() >= self._retry_at:
                self._retry_at = now() + LOCKED_SEC
            if new := set(locked) - self.locked:
                self._log.warning("worker.ends.locked", jobs=[str(job_id) for job_id in new])
            self.locked.update(locked)
        for job_id in (end.job.job_id for end in ends if end.job.job_id not in locked):
            end = self._forget(job_id)
            if status := ended.get(job_id):
                became = {"verb": end.finish.verb, "status": status}
                if end.report and not end.finish.error:
                    FINISHED.write({"worker": end.job.claimed_by, "queue": end.job.queue, **end.report, **became})
                else:  # only a line with an error's text goes the long way through the log
                    error = (end.finish.error or "").split("\n", 1)[0] or None
                    of_run = {"queue": end.job.queue, **(end.report or facts_of(end.job))}
                    self._log.info("worker.job.finished", **of_run, **became, error=error)
            else:
                level = logging.WARNING if end.report else logging.INFO  # a job that was not begun: nothing is lost
                self._log.log(level, "worker.ownership.lost", job_id=str(job_id), verb=end.finish.verb)

    def _forget(self, job_id: UUID) -> Ended:
        self.locked.discard(job_id)
        return self._ends.pop(job_id)


def facts_of(job: Job) -> dict[str, Any]:
    return {"job_id": job.job_id, "task": job.task, "attempt": job.attempt}


class Preference:
    """Whether the claims of a worker ask for its affinity keys first, and which jobs go before these.

    Jobs that claims have passed over for `wait_sec` go first. The age of a job is no measure: in a backlog of an hour
    every job is old, and each would load another resource.
    """

    def __init__(self, is_wanted: bool, wait_sec: float) -> None:
        self._is_wanted = is_wanted
        self._wait_sec = wait_sec
        self._until = 0.0
        self._marks: dict[int, deque[tuple[float, datetime]]] = {}  # by priority: when claims reached which creation

    def claimed(self, jobs: Sequence[Job], reached: Reached | None) -> None:
        """A claim has returned these jobs, and passed others over up to `reached`."""
        if self._is_wanted and any([job.affinity_key for job in jobs]):
            self._until = now() + WARM_SEC
        if reached:
            marks = self._marks.pop(reached.priority, deque())
            self._marks[reached.priority] = marks  # the last
            if not marks or (reached.since > marks[-1][1] and now() > marks[-1][0] + self._wait_sec / MARKS_MOST):
                marks.append((now(), reached.since))
            if len(self._marks) > PRIORITIES_MOST:
                del self._marks[next(iter(self._marks))]

    def overdue(self) -> dict[int, datetime] | None:
        """By priority, the time before which waiting jobs are overdue; None: the next claim asks for no warm keys."""
        if now() >= self._until:
            return None
        since, marked = now() - self._wait_sec, {}
        for priority, marks in self._marks.items():
            while len(marks) > 1 and marks[1][0] <= since:
                marks.popleft()
            if marks[0][0] <= since:
                marked[priority] = marks[0][1]
        return marked


class Turns:
    """The order of the queues of one worker, from claim to claim."""

    def __init__(self, queues: Sequence[str], scheduler: str | Mapping[str, int] | None, chance: random.Random) -> None:
        """`scheduler` as in WORKERS_JSON, None: "lag"; `chance` decides by weight which queue is first."""
        self._queues = list(queues)
        self._scheduler = scheduler or "lag"
        self._chance = chance
        self._next = 0  # whose turn it is
        self.by_lag = len(self._queues) > 1 and self._scheduler == "lag"  # the database finds the order

    def order(self) -> list[str]:
        """All queues, the first one first.

        "strict" keeps the order of WORKERS_JSON. By the others every queue is first at times, so no queue starves:
        "sequential" goes round, weights draw lots, and "lag" lets the database look whose job has waited longest.
        """
        if isinstance(self._scheduler, str):
            return self._queues[self._next :] + self._queues[: self._next]
        # Efraimidis and Spirakis 2006: in this order a queue is first as often as its weight says, then the next one.
        lots = [self._chance.random() ** (1 / self._scheduler[queue]) for queue in self._queues]
        return [queue for _, queue in sorted(zip(lots, self._queues, strict=True), reverse=True)]

    def claimed(self, queue: str) -> None:
        if self._scheduler == "sequential":
            self._next = (self._queues.index(queue) + 1) % len(self._queues)
        elif self.by_lag:
            self._next = self._queues.index(queue)  # where the bookmark is that a claim takes along
