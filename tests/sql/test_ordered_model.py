"""Ordered and merged queues by random steps beside their rules (Lowkiq): the database does what the rules say."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from typing import Any
from uuid import UUID

import pytest
from hands import BACKOFF_SEC, Worker, enqueue, heard, plain, quietly, value
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run

from dataloader.queue import db, lifecycle, operations
from dataloader.queue.job import Delivery, End, Job, Outcome, decide
from dataloader.queue.lifecycle import Ended

HOUR = 3_600
ROWS = """
SELECT job_id, status::text, CASE WHEN status IN ('queued', 'running', 'failed', 'lost') THEN attempt END, claimed_by,
       CASE status WHEN 'queued' THEN greatest(0, round(extract(epoch FROM available_at - now()) / 3600))::int END
  FROM dl_jobs
"""
# The crash of a later attempt is followed by a wait of seconds; in the model it is an hour.
AN_HOUR = """
UPDATE dl_jobs SET available_at = now() + interval '1 hour'
 WHERE status = 'queued' AND available_at > now() AND available_at < now() + interval '30 min'
"""
CANDIDATES = """
SELECT DISTINCT lock_key FROM dl_jobs
 WHERE status = 'queued' AND (blocked_on IS NULL OR blocked_on = 'time' AND available_at <= now())
"""
NO_SCORE = 1_000_000.0  # of a job whose producer gives none; it gets its time, which is above all scores here


DEAD = ("failed", "lost")


@dataclass
class Payload:
    """One job: its place in its key is (score, number)."""

    key: str
    task: str
    score: float
    number: int
    most: int  # attempts
    at: int  # the hour from which on it is due
    status: str = "queued"
    attempt: int = 0
    by: str | None = None
    cancel: bool = False

    def leave(self, status: str, attempt: int, at: int) -> None:
        """It runs no more; a cancellation that was asked for wins."""
        self.status, self.attempt, self.at = "canceled" if self.cancel else status, attempt, at
        self.by = None


@dataclass
class Lowkiq:
    """All jobs of one queue."""

    merge: bool
    limit: int  # jobs of a delivery
    holds: bool  # a dead job stops its key
    now: int = 0
    jobs: dict[UUID, Payload] = field(default_factory=dict)

    def of(self, key: str, *statuses: str) -> list[Payload]:
        found = [job for job in self.jobs.values() if job.key == key and job.status in statuses]
        return sorted(found, key=lambda job: (job.score, job.number))

    def keys(self) -> set[str]:
        return {job.key for job in self.jobs.values()}

    def due_at(self, key: str) -> int | None:
        """The hour from which on the key may start; None: not before somebody does something."""
        queued = self.of(key, "queued")
        if not queued or self.of(key, "running") or (self.holds and self.of(key, *DEAD)):
            return None
        if not self.merge:
            return queued[0].at
        tried = [job.at for job in queued if job.attempt > 0]
        return max(tried) if tried else min(job.at for job in queued)

    def due(self) -> set[str]:
        return {key for key in self.keys() if (at := self.due_at(key)) is not None and at <= self.now}

    def next_due(self) -> int | None:
        """The first hour at which a key may start by itself."""
        return min((at for key in self.keys() if (at := self.due_at(key)) is not None), default=None)

    def start(self, key: str, worker: str) -> list[Payload]:
        """A claim of the key: its head, or with merge the jobs from the head on that have its task."""
        taken: list[Payload] = []
        for job in self.of(key, "queued")[: self.limit if self.merge else 1]:
            if job.task != (taken or [job])[0].task:
                break
            taken.append(job)
        attempt = max(job.attempt for job in taken) + 1
        for job in taken:
            job.status, job.attempt, job.by = "running", attempt, worker
        return taken

    def done(self, delivery: Sequence[Payload]) -> None:
        for job in delivery:
            job.leave("succeeded", job.attempt, job.at)

    def error(self, delivery: Sequence[Payload], delay: int) -> None:
        """Goes back as one, while the job with the fewest attempts has some left."""
        if delivery[0].attempt >= min(job.most for job in delivery):
            self.spent(delivery, "failed", delivery[0])
            return
        for job in delivery:
            job.leave("queued", job.attempt, self.now + delay)

    def spent(self, delivery: Iterable[Payload], status: str, first: Payload | None) -> None:
        """The first is dead; the others are due with all their attempts."""
        for job in delivery:
            if job is first:
                job.leave(status, job.attempt, job.at)
            else:
                job.leave("queued", 0, self.now)

    def hand_back(self, delivery: Iterable[Payload]) -> None:
        """Uncounted. A job that joined a key of more attempts than it may have keeps its last one."""
        for job in delivery:
            job.leave("queued", min(job.attempt, job.most) - 1, self.now)

    def crash(self, delivery: Sequence[Payload]) -> None:
        """The worker is gone: at once again after the first attempt, later after an hour."""
        if delivery[0].attempt >= min(job.most for job in delivery):
            self.spent(delivery, "lost", next((job for job in delivery if not job.cancel), None))
        else:
            self.error(delivery, 0 if delivery[0].attempt <= 1 else 1)

    def request_cancel(self, job: Payload) -> None:
        if job.status == "queued":
            job.status = "canceled"
        elif job.status == "running":
            job.cancel = True

    def requeue(self, job: Payload) -> None:
        """A finished job comes back with all attempts, and with merge the key's jobs that wait for a retry with it."""
        if job.status not in ("queued", "running"):
            tried = [other for other in self.of(job.key, "queued") if other.attempt > 0] if self.merge else []
            for each in [job, *tried]:
                each.status, each.attempt, each.at, each.cancel = "queued", 0, self.now, False

    def run_now(self, job: Payload) -> None:
        """A queued job is due, and with merge the key's jobs that wait for a retry with it."""
        if job.status == "queued" and job.at > self.now:
            tried = [other for other in self.of(job.key, "queued") if other.attempt > 0] if self.merge else []
            for each in [job, *tried]:
                each.at = self.now


class Hands:
    """Two workers, an operator who watches, and a listener."""

    def __init__(self, dsn: str, close: ExitStack) -> None:
        self.conn = close.enter_context(db.connect(dsn, name="test", schema="public"))
        self.workers = [Worker(dsn, f"host:{number}:boot") for number in range(2)]
        self.listener = Worker(dsn, "listener")
        for session in (*self.workers, self.listener):
            session.conn.execute("SET statement_timeout = '60s'")  # a claim that goes round for ever fails
            close.callback(session.conn.close)

    def reset(self, merge: bool, limit: int, holds: bool) -> None:
        self.conn.execute("DELETE FROM dl_jobs")
        self.conn.execute(
            "INSERT INTO dl_queues (queue, ordered, merge, merge_limit, on_dead)"
            " VALUES ('q', true, %(merge)s, %(limit)s, %(on_dead)s) ON CONFLICT (queue) DO UPDATE SET"
            " merge = %(merge)s, merge_limit = %(limit)s, on_dead = %(on_dead)s",
            {"merge": merge, "limit": limit, "on_dead": "hold" if holds else None},
        )
        for worker in self.workers:
            worker.conn.execute("SELECT pg_advisory_unlock_all()")
        self.heard()

    def heard(self) -> bool:
        """Whether the queue's workers were told of something since this was last asked."""
        return "q" in heard(self.listener.conn)


keys = st.sampled_from("klm")
picks = st.integers(0, 99)
ends = st.sampled_from([End.DONE, End.ERROR, End.ERROR, End.PERMANENT, End.HANDED_BACK, End.CANCELED])
scores = st.one_of(st.none(), st.integers(0, 4))
waits = st.sampled_from([0, 0, 1, 2])
mosts = st.integers(1, 3)


class Farm(RuleBasedStateMachine):
    def __init__(self, hands: Hands) -> None:
        super().__init__()
        self.hands, self.conn = hands, hands.conn
        self.held: dict[str, list[Delivery]] = {worker.name: [] for worker in hands.workers}
        self.time_passed = False
        self.model = Lowkiq(False, 1, False)
        self.before: tuple[set[str], set[str]] = set(), set()

    def pick(self, number: int, *statuses: str) -> tuple[UUID, Payload] | None:
        found = [pair for pair in self.model.jobs.items() if pair[1].status in statuses]
        return found[number % len(found)] if found else None

    def modelled(self, jobs: tuple[Job, ...] | list[Job]) -> list[Payload]:
        return [self.model.jobs[job.job_id] for job in jobs]

    def a_delivery(self, number: int) -> tuple[Worker, Delivery]:
        """One that runs, and its worker; the worker holds it no more."""
        running = [(worker, each) for worker in self.hands.workers for each in self.held[worker.name]]
        worker, delivery = running[number % len(running)]
        self.held[worker.name].remove(delivery)
        return worker, delivery

    def a_busy_worker(self, number: int) -> Worker:
        busy = [worker for worker in self.hands.workers if self.held[worker.name]]
        return busy[number % len(busy)]

    def has_runs(self) -> bool:
        return any(self.held.values())

    @initialize(
        merge=st.booleans(),
        limit=st.sampled_from([1, 2, 3, 1_000]),
        holds=st.sampled_from([False, False, True]),
        jobs=st.lists(st.tuples(keys, scores, mosts), min_size=3, max_size=8),
    )
    def begin(self, merge: bool, limit: int, holds: bool, jobs: list[tuple[str, int | None, int]]) -> None:
        self.model = Lowkiq(merge, limit, holds)
        self.hands.reset(merge, limit, holds)
        for key, score, most in jobs:
            self.add(key, score, most, 0, 100, "a")

    @rule(
        key=keys,
        score=scores,
        most=mosts,
        wait=waits,
        priority=st.integers(99, 101),
        task=st.sampled_from(["a", "a", "b"]),
    )
    def add(self, key: str, score: int | None, most: int, wait: int, priority: int, task: str) -> None:
        more: dict[str, Any] = {"lock_key": key, "max_attempts": most, "priority": priority, "task": task}
        more["lease_ttl_sec"] = HOUR  # no lease runs out by itself, however slow the machine is
        if wait:
            more["available_at"] = value(self.conn, "SELECT now()") + timedelta(hours=wait)
        if score is None and priority == 100:
            job_id = plain(self.conn, **more)
        else:
            job_id = enqueue(self.conn, score=score, **more)
        number = len(self.model.jobs)
        self.model.jobs[job_id] = Payload(
            key, task, NO_SCORE if score is None else score, number, most, self.model.now + wait
        )

    @rule(number=picks, most=st.integers(1, 3))
    def claim(self, number: int, most: int) -> None:
        worker = self.hands.workers[number % 2]
        self.claimed(worker, most, None if self.held[worker.name] else ())

    def claimed(self, worker: Worker, most: int, ended: tuple[Ended, ...] | None) -> None:
        """The claim starts whole deliveries of keys that are due, and all of these if it may take so many."""
        due = self.model.due()
        found = lifecycle.step(worker.session, ["q"], BACKOFF_SEC, most, ended)
        taken = [
            Delivery(tuple(jobs), place)
            for place, (_, jobs) in enumerate(groupby(found.jobs, key=lambda job: job.lock_key))
        ]
        names = [delivery.first.lock_key for delivery in taken]
        assert len(names) == len(set(names)) <= most
        assert set(names) <= due
        assert bool(names) == bool(due)
        assert most < 3 or set(names) == due
        for delivery in taken:
            expected = self.model.start(delivery.first.lock_key, worker.name)
            assert self.modelled(delivery.jobs) == expected
            assert [job.attempt for job in delivery.jobs] == [job.attempt for job in expected]
            self.held[worker.name].append(delivery)
        assert not found.backoffs
        if not names and (at := self.model.next_due()) is not None:
            assert found.due_in is not None
            assert found.due_in <= (at - self.model.now) * HOUR

    @precondition(has_runs)
    @rule(number=picks, end=ends, wait=waits, most=st.sampled_from([None, 0, 1, 3]))
    def finish(self, number: int, end: End, wait: int, most: int | None) -> None:
        """With `most` the same step claims again."""
        worker, delivery = self.a_delivery(number)
        jobs = self.modelled(delivery.jobs)
        outcome = Outcome(end, "e", delay_sec=wait * HOUR if end is End.ERROR else None)
        decided = [finish for finish in decide(delivery, outcome) if finish]
        ended = tuple(Ended(job, finish) for job, finish in zip(delivery.jobs, decided, strict=True))
        match end:
            case End.DONE:
                self.model.done(jobs)
            case End.ERROR:
                self.model.error(jobs, wait)
            case End.PERMANENT:
                self.model.spent(jobs, "failed", jobs[0])
            case End.CANCELED if len(jobs) == 1:
                jobs[0].leave("canceled", jobs[0].attempt, jobs[0].at)
            case _:
                self.model.hand_back(jobs)
        if most is None:
            written = lifecycle.finish_some(worker.conn, worker.name, ended)
            assert {job_id: str(status) for job_id, status in written.ended.items()} == {
                job.job_id: self.model.jobs[job.job_id].status for job in delivery.jobs
            }
        elif most == 0:
            assert lifecycle.step(worker.session, ["q"], BACKOFF_SEC, 0, ended).jobs == []
        else:
            self.claimed(worker, most, ended)

    @precondition(has_runs)
    @rule(number=picks, begun=st.booleans())
    def die(self, number: int, begun: bool) -> None:
        """The keeper saw the worker die, in its first run or before it had begun one."""
        worker = self.a_busy_worker(number)
        self.forget(worker)
        deliveries, self.held[worker.name] = self.held[worker.name], []
        running = deliveries[:1] if begun else []
        ids = [job.job_id for delivery in running for job in delivery.jobs]
        lifecycle.settle(self.conn, worker.name, "crash", "gone", running=ids)
        for delivery in deliveries:
            (self.model.crash if delivery in running else self.model.hand_back)(self.modelled(delivery.jobs))

    @precondition(has_runs)
    @rule(number=picks)
    def reap(self, number: int) -> None:
        """The worker is silent. Its run had begun: the first of a claim with the claim, another by its heartbeat."""
        worker, delivery = self.a_delivery(number)
        if delivery.place > 0:
            assert lifecycle.beat(worker.conn, delivery.jobs, None, False) is any(
                job.cancel for job in self.modelled(delivery.jobs)
            )
        self.forget(worker)
        ids = [job.job_id for job in delivery.jobs]
        self.conn.execute(
            "UPDATE dl_jobs SET lease_expires_at = now() - interval '1 day' WHERE job_id = ANY (%s)", (ids,)
        )
        # No job of the key starts until the reaper has seen it.
        self.claimed(next(other for other in self.hands.workers if other is not worker), 3, None)
        while lifecycle.reap(self.conn):
            pass
        self.model.crash(self.modelled(delivery.jobs))

    def forget(self, worker: Worker) -> None:
        """Its session is gone by then; to end one takes 0.1 s, and test_settle tests it."""
        worker.conn.execute("SELECT pg_advisory_unlock_all()")
        self.conn.execute("UPDATE dl_jobs SET claimed_pid = NULL WHERE claimed_pid IS NOT NULL")

    @rule(number=picks)
    def cancel(self, number: int) -> None:
        if picked := self.pick(number, "queued", "running"):
            operations.change(self.conn, "cancel", [picked[0]], "test")
            self.model.request_cancel(picked[1])

    @rule(number=picks)
    def requeue(self, number: int) -> None:
        dead = self.pick(number, "failed", "lost")
        if picked := dead or self.pick(number, "canceled", "succeeded"):
            operations.change(self.conn, "requeue", [picked[0]], "test")
            self.model.requeue(picked[1])

    @rule(number=picks)
    def delete(self, number: int) -> None:
        if picked := self.pick(number, "queued", "failed", "lost"):
            operations.change(self.conn, "delete", [picked[0]], "test")
            picked[1].status = "deleted"

    @rule(number=picks)
    def run_now(self, number: int) -> None:
        if picked := self.pick(number, "queued"):
            operations.change(self.conn, "run-now", [picked[0]], "test")
            self.model.run_now(picked[1])

    @rule()
    def switch(self) -> None:
        self.model.merge = not self.model.merge
        operations.set_order(self.conn, "q", "test", merge=self.model.merge)

    @rule(hours=st.integers(1, 2))
    def pass_time(self, hours: int) -> None:
        """As the clock does it: without a word to any trigger."""
        with quietly(self.conn):
            self.conn.execute("UPDATE dl_jobs SET available_at = available_at - make_interval(hours => %s)", (hours,))
        self.model.now += hours
        self.time_passed = True

    @invariant()
    def the_rows_are_as_the_rules_say(self) -> None:
        with quietly(self.conn):
            self.conn.execute(AN_HOUR)
        rows = {job_id: tuple(rest) for job_id, *rest in self.conn.execute(ROWS)}
        assert rows == {
            job_id: seen(job, self.model.now) for job_id, job in self.model.jobs.items() if job.status != "deleted"
        }

    @invariant()
    def whatever_may_start_is_found_and_told_of(self) -> None:
        """A key that may start has a row that a claim reads; if it had none before, the workers were notified."""
        found, due = {key for (key,) in self.conn.execute(CANDIDATES)}, self.model.due()
        assert due <= found
        had, _ = self.before
        was_told = self.hands.heard()
        assert was_told or self.time_passed or due <= had
        self.before, self.time_passed = (found, due), False

    def teardown(self) -> None:
        """One worker ends all that is left, once the time of each job has come and no dead job stops its key."""
        worker = self.hands.workers[0]
        for other in self.hands.workers:
            self.forget(other)
            lifecycle.settle(self.conn, other.name, "drain", "the end", running=[])
        dead = self.conn.execute("SELECT job_id FROM dl_jobs WHERE status IN ('failed', 'lost')").fetchall()
        operations.change(self.conn, "delete", [job_id for (job_id,) in dead], "test")
        with quietly(self.conn):
            self.conn.execute("UPDATE dl_jobs SET available_at = now() - interval '1 s' WHERE status = 'queued'")
        left = value(self.conn, "SELECT count(*) FROM dl_jobs WHERE status = 'queued'")
        jobs: list[Job] = []
        while jobs := lifecycle.step(
            worker.session, ["q"], BACKOFF_SEC, 3, [Ended(job, end) for job, end in done(jobs)]
        ).jobs:
            left -= len(jobs)
        assert (left, value(self.conn, "SELECT count(*) FROM dl_jobs WHERE status IN ('queued', 'running')")) == (0, 0)


def done(jobs: list[Job]) -> Iterator[tuple[Job, Any]]:
    for job in jobs:
        yield job, decide(Delivery((job,)), Outcome(End.DONE))[0]


def seen(job: Payload, now: int) -> tuple[Any, ...]:
    attempt = job.attempt if job.status not in ("succeeded", "canceled") else None
    return job.status, attempt, job.by, max(0, job.at - now) if job.status == "queued" else None


@pytest.fixture
def hands(own_db: str) -> Iterator[Hands]:
    """The sessions, for all runs of the machine."""
    with ExitStack() as close:
        yield Hands(own_db, close)


@pytest.mark.long
def test_an_ordered_queue_does_what_its_rules_say(hands: Hands) -> None:
    chosen = settings(database=None, derandomize=True, max_examples=60, stateful_step_count=30, phases=[Phase.generate])
    run(lambda: Farm(hands), settings=chosen)
