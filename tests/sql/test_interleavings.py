"""Every order in which two workers and a third party can take their steps: whatever the order, the promises hold.

After PostgreSQL's isolation tester. A script has a list of steps for each actor; each interleaving of the lists is
played on two fresh jobs of one key. `begin+step` leaves its transaction open until `commit`, so that others block; a
step that blocks stays in its thread, and whatever its actor would do next waits with it. Then everything is brought to
its end, and the history is judged by the invariants that the failures name: V1 every job ends, V2 one writer, V3 final
is final, V4 attempts are starts, V5 one run a key, V6 no start too many, V9 a legal journal, V12 an acknowledged
cancellation ends canceled.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import permutations
from typing import Any
from uuid import UUID

import pytest
from hands import TRANSITIONS, Conn, Worker, blocked, enqueue, journal, row, until
from judge import illegal

from dataloader.queue import db, lifecycle
from dataloader.queue.job import FINAL, Job, Status

ONE, TWO = "host:1:boot", "host:2:boot"
MAX_ATTEMPTS = 2
VERBS = ("succeed", "retry", "fail", "cancel", "hand_back")

# The changes of rows, each with its actor, old and new value, in their order; undone with the transaction.
HISTORY = """
CREATE TABLE history (step bigserial, who text, old dl_jobs, new dl_jobs);
CREATE FUNCTION remember() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  INSERT INTO history (who, old, new) VALUES (current_setting('application_name'), OLD, NEW);
  RETURN NULL;
END $$;
CREATE TRIGGER remember AFTER UPDATE ON dl_jobs FOR EACH ROW EXECUTE FUNCTION remember();
"""
CHANGES = """
SELECT who, (new).job_id, (old).status::text, (old).attempt, (old).claimed_by,
       (new).status::text, (new).attempt, (new).max_attempts FROM history ORDER BY step
"""
LIVE = """
SELECT coalesce(max(n), 0) FROM (
  SELECT count(*) n FROM dl_jobs WHERE status = 'running' AND lease_expires_at > now() GROUP BY lock_key) runs
"""


class Actor:
    """One session with a list of steps; a worker remembers the job that it believes to be its own."""

    def __init__(self, dsn: str, name: str) -> None:
        self.worker = Worker(dsn, name)
        self.conn = self.worker.conn
        self.name = name
        self.job: Job | None = None
        self.open = False
        self.backlog: list[str] = []
        self.busy: Future[Any] | None = None


class Stage:
    """The actors, two jobs of one key, and what was promised to whom."""

    def __init__(self, dsn: str, conn: Conn, close: ExitStack) -> None:
        self.conn = conn
        conn.execute(HISTORY)
        self.actors = [Actor(dsn, name) for name in (ONE, TWO, "third", "fourth")]
        self.closer = Worker(dsn, "host:9:boot")
        for worker in (*(actor.worker for actor in self.actors), self.closer):
            close.callback(worker.conn.close)
        self.threads = close.enter_context(ThreadPoolExecutor(len(self.actors)))
        self.jobs: list[UUID] = []
        self.promised: set[UUID] = set()
        self.blockings = 0

    def reset(self) -> None:
        self.conn.execute("DELETE FROM dl_jobs")
        self.conn.execute("DELETE FROM history")
        self.jobs = [enqueue(self.conn, lock_key="k", priority=n, max_attempts=MAX_ATTEMPTS) for n in range(2)]
        self.promised = set()
        for actor in self.actors:
            actor.job = None

    def play(self, script: list[list[str]], order: tuple[int, ...]) -> None:
        """Take the steps in this order; those of an actor that is blocked as soon as it is not."""
        self.reset()
        steps = [iter(each) for each in script]
        for number in order:
            self.actors[number].backlog.append(next(steps[number]))
            self.advance()
        while any(actor.backlog or actor.busy for actor in self.actors):
            self.settle_down()
            self.advance()

    def advance(self) -> None:
        """Let everybody do what he can until only the blocked have something left to do."""
        ready = [actor for actor in self.actors if actor.backlog and not actor.busy]
        while ready:
            actor = ready[0]
            step = actor.backlog.pop(0)
            actor.busy = self.started(actor, step)
            self.settle_down()
            ready = [actor for actor in self.actors if actor.backlog and not actor.busy]

    def started(self, actor: Actor, step: str) -> Future[Any] | None:
        """Take a step: in a thread where it may meet an open transaction of another."""
        if any(other.open for other in self.actors if other is not actor):
            return self.threads.submit(take, self, actor, step)
        take(self, actor, step)
        return None

    def settle_down(self) -> None:
        """Wait until each step is done or blocked by another, and look at the rows."""
        for actor in self.actors:
            if future := actor.busy:
                until(lambda a=actor, f=future: f.done() or self.is_blocked(a), "a step to end or block")
                self.blockings += not future.done()
                if future.done():
                    actor.busy = None
                    future.result()
        live = self.conn.execute(LIVE).fetchone()
        assert live[0] <= 1, "V5: two runs of one key"

    def is_blocked(self, actor: Actor) -> bool:
        """By a transaction that is still open, that is: a lock just released may still be in the server's answer."""
        held = any(other.open for other in self.actors if other is not actor and not other.busy)
        return held and blocked(self.conn, actor.worker.pid)

    def conclude(self) -> None:
        """Everybody is gone and time passes: each job must come to an end."""
        for actor in self.actors[:2]:
            actor.conn.execute("SELECT pg_advisory_unlock_all()")
        for _ in range(2 * (MAX_ATTEMPTS + 1)):
            self.conn.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE status = 'running'")
            while lifecycle.reap(self.conn):
                pass
            self.conn.execute("UPDATE dl_jobs SET available_at = now() WHERE status = 'queued' AND blocked_on = 'time'")
            if job := self.closer.claim().job:
                self.closer.finish(job)
            elif not self.conn.execute("SELECT FROM dl_jobs WHERE status IN ('queued', 'running')").fetchone():
                return
        raise AssertionError("V1: a job that never ends")


def take(stage: Stage, actor: Actor, step: str) -> None:
    if step.startswith("begin+"):
        actor.conn.execute("BEGIN")
        actor.open = True
        step = step.removeprefix("begin+")
    if step == "commit":
        actor.conn.execute("COMMIT")
        actor.open = False
    elif step not in OF_A_RUN:
        STEPS[step](stage, actor)
    elif actor.job:
        OF_A_RUN[step](actor, actor.job)


def claim(stage: Stage, actor: Actor) -> None:
    # Its backend is forgotten, so that a reap ends no session here: that costs 0.1 s, and test_reap tests it.
    actor.job = actor.worker.claim().job
    actor.conn.execute("UPDATE dl_jobs SET claimed_pid = NULL WHERE claimed_by = %s", (actor.name,))


def lose(stage: Stage, actor: Actor) -> None:
    """The session is lost, and with it the key; the worker goes on."""
    actor.conn.execute("SELECT pg_advisory_unlock_all()")


def retake(actor: Actor, job: Job) -> None:
    lifecycle.retake(actor.worker.session, [job])
    actor.conn.execute("UPDATE dl_jobs SET claimed_pid = NULL WHERE claimed_by = %s", (actor.name,))


def request(stage: Stage, actor: Actor) -> None:
    """Ask for the first job's end; what the answer says is a promise."""
    found = lifecycle.request_cancel(actor.conn, stage.jobs[0])
    if found["status"] not in FINAL or found["status"] == "canceled":
        stage.promised.add(stage.jobs[0])


def age(stage: Stage, actor: Actor) -> None:
    actor.conn.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE status = 'running'")


OF_A_RUN: dict[str, Callable[[Actor, Job], Any]] = {
    "beat": lambda actor, job: lifecycle.beat(actor.conn, [job], None, True),
    "keep": lambda actor, job: lifecycle.keep(actor.conn, [job.job_id], [job.attempt], job.claimed_by),
    "retake": retake,
    **{verb: lambda actor, job, verb=verb: actor.worker.finish(job, verb, error="e") for verb in VERBS},
}
STEPS: dict[str, Callable[[Stage, Actor], Any]] = {
    "claim": claim,
    "lose": lose,
    "request": request,
    "age": age,
    "reap": lambda stage, actor: lifecycle.reap(actor.conn),
    "crash": lambda stage, actor: lifecycle.settle(actor.conn, ONE, "crash", "gone"),
    "drain": lambda stage, actor: lifecycle.settle(actor.conn, ONE, "drain", "gone"),
    "timeout": lambda stage, actor: lifecycle.settle(actor.conn, ONE, "timeout", "gone"),
}


def orders(counts: Iterable[int]) -> list[tuple[int, ...]]:
    """Every interleaving of so many steps of each actor."""
    steps = [actor for actor, number in enumerate(counts) for _ in range(number)]
    return sorted(set(permutations(steps)))


def judge_history(stage: Stage) -> None:
    """V2, V3, V6: every change of a row, by whom it was made."""
    for who, _, status, attempt, owner, new, counted, most in stage.conn.execute(CHANGES):
        assert (status, new) in TRANSITIONS or status == new, f"{status} -> {new}"
        assert Status(status) not in FINAL, "V3: a final row was written to"
        if status == "running" and who in (ONE, TWO):
            assert owner == who, "V2: written by one whose job it was not"
        if (status, new) == ("queued", "running"):
            assert attempt < most, "V6: a start too many"
            assert counted == attempt + 1
        elif status == new:
            assert attempt == counted, "V4: an attempt counted without a start"


def judge_ends(stage: Stage) -> None:
    """V9, V12: each job's end and journal."""
    for job_id in stage.jobs:
        found, story = row(stage.conn, job_id), journal(stage.conn, job_id)
        assert illegal([kind for kind, _ in story], found["status"]) is None, f"V9: {story}"
        assert found["claims"] == sum(kind == "picked" for kind, _ in story)
        assert job_id not in stage.promised or found["status"] == "canceled", "V12: acknowledged, and then not canceled"


@pytest.fixture
def stage(own_db: str) -> Iterator[Stage]:
    """Four sessions on a database of their own, for it gets a trigger."""
    with ExitStack() as close:
        conn = close.enter_context(db.connect(own_db, name="test", schema="public"))
        yield Stage(own_db, conn, close)


def explore(stage: Stage, script: str) -> None:
    """Play every order of a script, and judge each."""
    lists = [part.split() for part in script.split("|")]
    for order in orders(map(len, lists)):
        names = [lists[actor][order[:place].count(actor)] for place, actor in enumerate(order)]
        course = " ".join(f"{actor + 1}:{name}" for actor, name in zip(order, names, strict=True))
        try:
            stage.play(lists, order)
            stage.conclude()
            judge_history(stage)
            judge_ends(stage)
        except AssertionError as error:
            raise AssertionError(f"{course}: {error}") from error


# The subject of each, and the steps of its actors.
EXPLORED = {
    **{f"v2 v3 a worker behind its lease, {verb}": f"claim lose {verb} | claim | age reap" for verb in VERBS},
    "the keeper renews no lease that is over": "claim keep succeed | claim | age reap",
    **{f"v12 a cancellation, {verb}": f"claim beat {verb} | claim succeed | request" for verb in VERBS},
    **{
        f"v2 a settled worker that lives on, {end}": f"claim beat retry | claim succeed | {end}"
        for end in ("crash", "drain", "timeout")
    },
    "two claims at once, neither of the row nor the key of the other": (
        "begin+claim commit succeed | begin+claim commit fail"
    ),
    "a claim beside an end that is not committed yet": "claim begin+retry commit | claim succeed | request",
    "v5 v6 an heir that ends its run too": "claim lose retry | claim succeed | age reap",
    "a2 a beat behind the lease": "claim beat beat | claim beat | age reap",
    "b1 a retake when the key is another's": "claim lose retake succeed | claim succeed | age",
}
# The same where one waits for the other's commit.
BLOCKED = {
    **{
        f"j2 a cancellation that meets an open end, {verb}": f"claim begin+{verb} commit | | begin+request commit"
        for verb in VERBS
    },
    "j2 a cancellation that meets an open claim": "begin+claim commit succeed | | request",
    "a3 a reap that is not committed yet": "claim beat succeed | | age begin+reap commit",
    "a3 a beat or cancellation that is not committed yet": (
        "claim begin+beat commit succeed | | begin+request commit | reap"
    ),
}


@pytest.mark.parametrize("subject", [*EXPLORED, *BLOCKED])
@pytest.mark.long
def test_in_every_order_the_rules_hold(stage: Stage, subject: str) -> None:
    explore(stage, (EXPLORED | BLOCKED)[subject])
    assert stage.blockings or subject in EXPLORED
