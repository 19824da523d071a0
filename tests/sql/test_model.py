"""A farm by random steps beside a small model of it: the database must do what the model says, step by step."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from typing import Any
from uuid import UUID

import pytest
from foreign import Foreign
from hands import Worker, enqueue, expire, keys_held, quietly, value
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run
from judge import illegal

from dataloader.queue import db, lifecycle
from dataloader.queue.job import Job

FOREIGN = "foreign"
LEASE_SEC = 3_600  # no lease runs out by itself, however slow the machine is
ROWS = (
    "SELECT job_id, status::text, attempt, claims, backoffs, cancel_requested, cancel_forced, claimed_by FROM dl_jobs"
)
EVENTS = "SELECT job_id, array_agg(kind ORDER BY event_id) FROM dl_job_events GROUP BY job_id"
# Waits are an hour or over: the few seconds that a run of the machine takes change nothing.
STAND_STILL = """
UPDATE dl_jobs SET available_at = now() + interval '1 hour'
 WHERE status = 'queued' AND blocked_on = 'time' AND available_at > now() - interval '1 hour'
"""
STRANDED = """
SELECT count(*) FROM dl_jobs parked
 WHERE blocked_on = 'key' AND NOT EXISTS (
   SELECT FROM dl_jobs j
    WHERE j.lock_key = parked.lock_key
      AND (j.status = 'running' OR j.status = 'queued' AND j.blocked_on IS NULL
                                   AND (j.priority, j.created_at) <= (parked.priority, parked.created_at)))
"""
LIVE = """
SELECT count(*) FROM dl_jobs a JOIN dl_jobs b ON a.lock_key = b.lock_key AND a.job_id < b.job_id
 WHERE a.status = 'running' AND b.status = 'running' AND a.lease_expires_at > now() AND b.lease_expires_at > now()
   AND a.claimed_by IS NOT NULL AND b.claimed_by IS NOT NULL
"""


@dataclass
class ModelJob:
    key: str
    priority: int
    max_attempts: int
    due: bool
    status: str = "queued"
    attempt: int = 0
    claims: int = 0
    backoffs: int = 0
    cancel: bool = False
    force: bool = False
    by: str | None = None
    live: bool = False  # its lease
    story: list[str] = field(default_factory=lambda: ["queued"])

    def end(self, status: str, attempt: int | None = None, due: bool = True) -> None:
        """It leaves `running`, or ends in the queue: a cancellation that was asked for wins."""
        self.step("canceled" if self.cancel else status, attempt, due)

    def step(self, status: str, attempt: int | None = None, due: bool = True) -> None:
        """It is in another state from now on, and nobody's."""
        self.status = status
        self.attempt = self.attempt if attempt is None else attempt
        self.due, self.by, self.live = due, None, False
        self.story.append({"succeeded": "done", "queued": "requeue"}.get(self.status, self.status))

    def start(self, by: str) -> None:
        self.status, self.by, self.live = "running", by, True
        self.attempt += 1
        self.story.append("picked")

    def lose(self, end: str) -> None:
        """Its worker is gone."""
        if end == "drain":
            self.end("queued", self.attempt - 1)
        elif self.attempt < self.max_attempts:
            self.end("queued", due=end == "crash" and self.attempt <= 1)
        else:
            self.end("failed" if end == "timeout" else "lost")


class Model:
    """All jobs, by age, and the sessions' locks."""

    def __init__(self) -> None:
        self.jobs: dict[UUID, ModelJob] = {}
        self.locks: dict[str, str] = {}

    def ready(self, parked: Collection[UUID] = ()) -> list[ModelJob]:
        """The queued jobs whose time has come, but for those parked, in the order of a claim."""
        queued = [job for job_id, job in self.jobs.items() if job.status == "queued" and job_id not in parked]
        found = [job for job in queued if job.due]
        return sorted(found, key=lambda job: job.priority)

    def busy(self, key: str) -> bool:
        """Does a running job with a live lease hold the key?"""
        return any(job.status == "running" and job.live and job.key == key for job in self.jobs.values())

    def claim(self, worker: str, parked: set[UUID]) -> tuple[ModelJob | None, int]:
        """Our claim: the job, or how many keys it has put off. Rows that may not start end on the way."""
        for looks in (False, True):
            is_over = False
            while not is_over:
                odd, first = self.look(worker, looks, parked)
                for job in odd:
                    job.end("lost")
                if first and not self.busy(first.key):
                    self.start(job := self.first_of(first.key), worker)
                    return job, 0
                is_over = not odd
        return None, self.put_off(parked)

    def look(self, worker: str, looks: bool, parked: set[UUID]) -> tuple[list[ModelJob], ModelJob | None]:
        """The ready rows that may not start, and behind them the first one whose key the worker gets."""
        odd = []
        for job in self.ready(parked):
            if job.cancel or job.attempt >= job.max_attempts:
                odd.append(job)
            elif self.locks.get(job.key, worker) == worker and not (looks and self.busy(job.key)):
                return odd, job
        return odd, None

    def first_of(self, key: str) -> ModelJob:
        return next(job for job in self.ready() if job.key == key)

    def put_off(self, parked: set[UUID]) -> int:
        """All rows of the keys that somebody holds without a run; only ready rows are looked at."""
        refused = {job.key for job in self.ready(parked) if not self.busy(job.key)}
        for key in refused:
            self.first_of(key).story.append("requeue")
            jobs = [job for job in self.ready() if job.key == key]
            backoffs = max(job.backoffs for job in jobs) + 1
            for job in jobs:
                job.due, job.backoffs = False, backoffs
        return len(refused)

    def start(self, job: ModelJob, worker: str) -> None:
        self.locks[job.key] = worker
        job.start(worker)
        job.claims, job.backoffs = job.claims + 1, 0

    def claim_foreign(self) -> ModelJob | None:
        """The plain protocol's: the first row that is due, whatever its key; put back when the key is taken."""
        for job in self.ready()[:1]:
            job.start(FOREIGN)
            if self.locks.setdefault(job.key, FOREIGN) == FOREIGN:
                return job
            job.step("queued", job.attempt - 1, due=False)
        return None

    def unlock(self, owner: str) -> None:
        self.locks = {key: who for key, who in self.locks.items() if who != owner}


class Hands:
    """Three workers, a foreign one, and whoever looks at the tables."""

    def __init__(self, dsn: str, close: ExitStack) -> None:
        self.conn = close.enter_context(db.connect(dsn, name="test", schema="public"))
        self.workers = [Worker(dsn, f"host:{number}:boot") for number in range(3)]
        self.foreign = Foreign(dsn)
        for session in (*self.workers, self.foreign):
            close.callback(session.conn.close)
        self.pids = {worker.name: worker.pid for worker in self.workers}
        self.pids[FOREIGN] = self.foreign.conn.info.backend_pid

    def reset(self) -> None:
        self.conn.execute("DELETE FROM dl_jobs")
        for session in (*self.workers, self.foreign):
            session.conn.execute("SELECT pg_advisory_unlock_all()")


def after_cancel(model: ModelJob, force: bool) -> None:
    """The effect of a request on a job."""
    if model.status == "queued":
        model.cancel = True
        model.force = model.force or force
        model.step("canceled")
    elif model.status == "running" and (not model.cancel or (force and not model.force)):
        model.cancel, model.force = True, model.force or force
        model.story.append("cancel_requested")


workers = st.integers(0, 2)
ends = st.sampled_from(["crash", "timeout", "drain"])
verbs = st.sampled_from(["succeed", "retry", "fail", "cancel", "hand_back"])
picks = st.integers(0, 99)
keys = st.sampled_from(["k", "l", "m"])
priorities, mosts = st.integers(0, 2), st.integers(1, 3)


class Farm(RuleBasedStateMachine):
    """Each rule is a step of the farm and of its model; a worker holds on to a job that it lost, as a zombie does."""

    def __init__(self, hands: Hands) -> None:
        super().__init__()
        self.hands, self.conn, self.model = hands, hands.conn, Model()
        self.held: dict[str, Job] = {}
        self.taken: tuple[UUID, str] | None = None
        hands.reset()

    def pick(self, number: int, status: str | None = None) -> tuple[UUID, ModelJob] | None:
        found = [pair for pair in self.model.jobs.items() if status is None or pair[1].status == status]
        return found[number % len(found)] if found else None

    def mine(self, worker: Worker) -> ModelJob | None:
        job = self.model.jobs[self.held[worker.name].job_id]
        return job if job.by == worker.name else None

    def busy(self, number: int) -> Worker | None:
        """One of the workers that hold a job."""
        found = [worker for worker in self.hands.workers if worker.name in self.held]
        return found[number % len(found)] if found else None

    @initialize(jobs=st.lists(st.tuples(keys, priorities, mosts), min_size=4, max_size=7))
    def begin(self, jobs: list[tuple[str, int, int]]) -> None:
        for key, priority, most in jobs:
            self.enqueue(key, priority, True, most)

    @rule(key=keys, priority=priorities, due=st.booleans(), most=mosts)
    def enqueue(self, key: str, priority: int, due: bool, most: int) -> None:
        at = None if due else value(self.conn, "SELECT now()") + timedelta(hours=1)
        more = {"lock_key": key, "priority": priority, "max_attempts": most, "available_at": at}
        job_id = enqueue(self.conn, lease_ttl_sec=LEASE_SEC, **more)
        self.model.jobs[job_id] = ModelJob(key, priority, most, due)

    @precondition(lambda self: len(self.held) < 3)
    @rule(number=workers)
    def claim(self, number: int) -> None:
        idle = [worker for worker in self.hands.workers if worker.name not in self.held]
        worker = idle[number % len(idle)]
        lifecycle.wake(self.conn, 100)  # as the claim does
        parked = {job_id for (job_id,) in self.conn.execute("SELECT job_id FROM dl_jobs WHERE blocked_on = 'key'")}
        claim = worker.claim()
        expected, refused = self.model.claim(worker.name, parked)
        found = claim.job and self.model.jobs[claim.job.job_id]
        assert found is expected
        assert claim.backoffs == refused
        if claim.job and expected:
            self.held[worker.name] = claim.job
            assert (claim.job.attempt, claim.job.claim) == (expected.attempt, expected.claims)
        else:
            waiting = any(job.status == "queued" and not job.due for job in self.model.jobs.values())
            assert (claim.due_in is not None) == waiting

    @precondition(lambda self: self.held)
    @rule(number=workers, journal=st.booleans())
    def beat(self, number: int, journal: bool) -> None:
        worker = self.busy(number)
        job = self.mine(worker)
        found = lifecycle.beat(worker.conn, [self.held[worker.name]], None, journal)
        assert found == (job.cancel if job else None)
        if job:
            job.live = True
            job.story += ["heartbeat"] * journal

    @precondition(lambda self: self.held)
    @rule(number=workers, verb=verbs, delay=st.sampled_from([0, 3_600]))
    def finish(self, number: int, verb: str, delay: int) -> None:
        worker = self.busy(number)
        job = self.mine(worker)
        status = worker.finish(self.held.pop(worker.name), verb, delay_sec=delay)
        self.model.unlock(worker.name)
        if job:
            again, attempt = verb in ("retry", "hand_back"), job.attempt - (verb == "hand_back")
            end = {"succeed": "succeeded", "fail": "failed", "cancel": "canceled"}.get(verb, "queued")
            job.end(end, attempt, due=not (again and delay))
        assert status == (job.status if job else None)

    @precondition(lambda self: self.held)
    @rule(number=workers, end=ends)
    def die(self, number: int, end: str) -> None:
        """The keeper saw it. Its session is gone by then: to end one takes 0.1 s, and test_settle tests it."""
        worker = self.busy(number)
        job = self.mine(worker)
        worker.conn.execute("SELECT pg_advisory_unlock_all()")
        self.forget_sessions()
        settled = lifecycle.settle(self.conn, worker.name, end, "gone")
        del self.held[worker.name]
        self.model.unlock(worker.name)
        if job:
            job.lose(end)
        assert [found.status for found in settled] == ([job.status] if job else [])

    @rule(number=picks)
    def lease_runs_out(self, number: int) -> None:
        if picked := self.pick(number, "running"):
            expire(self.conn, picked[0])
            picked[1].live = False

    @rule()
    def reap(self) -> None:
        self.forget_sessions()
        found = set()
        while settled := lifecycle.reap(self.conn):
            found.add(settled.job_id)
        expected = {job_id for job_id, job in self.model.jobs.items() if job.status == "running" and not job.live}
        assert found == expected
        for job_id in expected:
            self.model.jobs[job_id].lose("crash")

    @rule(number=picks, force=st.booleans())
    def request_cancel(self, number: int, force: bool) -> None:
        """Mostly of a running job: a queued one has nothing more to tell."""
        if picked := self.pick(number, "running" if number % 4 else None):
            found = lifecycle.request_cancel(self.conn, picked[0], force)
            after_cancel(picked[1], force)
            assert found["status"] == picked[1].status

    @rule()
    def hours_pass(self) -> None:
        """As the clock does it: without a word to any trigger."""
        with quietly(self.conn):
            self.conn.execute("UPDATE dl_jobs SET available_at = '2001-01-01' WHERE blocked_on = 'time'")
        for job in self.model.jobs.values():
            job.due = job.due or job.status == "queued"

    @rule()
    def wake(self) -> None:
        lifecycle.wake(self.conn, 100)

    @precondition(lambda self: self.taken is None)
    @rule()
    def foreign_claim(self) -> None:
        self.taken = self.hands.foreign.claim()
        expected = self.model.claim_foreign()
        assert (self.taken and self.model.jobs[self.taken[0]]) is expected

    @precondition(lambda self: self.taken)
    @rule(end=st.sampled_from(["finish", "put back"]))
    def foreign_end(self, end: str) -> None:
        """Its finish has no guard; so that it harms nobody it lets go of a job that is not its own any more."""
        assert self.taken is not None
        (job_id, key), self.taken = self.taken, None
        job = self.model.jobs[job_id]
        if job.by == FOREIGN and end == "finish":
            self.hands.foreign.finish(job_id, key)
            job.step("succeeded")
        else:
            if job.by == FOREIGN:
                self.hands.foreign.put_back(job_id, 3_600)
                job.step("queued", due=False)
            self.hands.foreign.unlock(key)
        self.model.unlock(FOREIGN)

    def forget_sessions(self) -> None:
        self.conn.execute("UPDATE dl_jobs SET claimed_pid = NULL WHERE claimed_pid IS NOT NULL")

    @invariant()
    def the_rows_are_as_the_model_says(self) -> None:
        self.conn.execute(STAND_STILL)
        rows = {job_id: tuple(rest) for job_id, *rest in self.conn.execute(ROWS)}
        assert rows == {job_id: seen(job) for job_id, job in self.model.jobs.items()}

    @invariant()
    def the_journal_is_as_the_model_says_and_legal(self) -> None:
        journals = dict(self.conn.execute(EVENTS).fetchall())
        assert journals == {job_id: job.story for job_id, job in self.model.jobs.items()}
        for job in self.model.jobs.values():
            # A request that is made once more, by force, is told once more.
            story = [kind for kind, same in groupby(job.story) for _ in (same if kind != "cancel_requested" else "1")]
            assert illegal(story, job.status) is None

    @invariant()
    def no_two_of_ours_run_with_one_key(self) -> None:
        assert value(self.conn, LIVE) == 0

    @invariant()
    def whoever_is_parked_waits_for_a_run_or_behind_a_ready_row(self) -> None:
        assert value(self.conn, STRANDED) == 0

    @invariant()
    def the_keys_are_held_as_the_model_says(self) -> None:
        assert keys_held(self.conn) == sorted(self.hands.pids[owner] for owner in self.model.locks.values())


def seen(job: ModelJob) -> tuple[Any, ...]:
    by = None if job.by == FOREIGN else job.by
    return job.status, job.attempt, job.claims, job.backoffs, job.cancel, job.force, by


@pytest.fixture
def hands(own_db: str) -> Iterator[Hands]:
    """The sessions, for all runs of the machine."""
    with ExitStack() as close:
        yield Hands(own_db, close)


@pytest.mark.long
def test_the_farm_does_what_the_model_says(hands: Hands) -> None:
    chosen = settings(database=None, derandomize=True, max_examples=80, stateful_step_count=40)
    run(lambda: Farm(hands), settings=chosen)
