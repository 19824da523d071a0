"""Guards that no other test would miss; see tests/mutation, which takes each away."""

from collections.abc import Callable
from functools import partial
from uuid import UUID, uuid4

import psycopg
import pytest
from hands import BACKOFF_SEC, Conn, Worker, Workers, enqueue, locked, plain, quietly, started, successor
from judge import illegal
from patience import PATIENCE
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from readings import heard, journal, keys_held, kinds, row, value
from test_order import BEFORE_THE_LOCK, at_gate

from dataloader.farm import fence
from dataloader.queue import db, lifecycle


@pytest.fixture
def other_role(dsn: str, make_role: Callable[..., str]) -> str:
    """The DSN of a role that may see what sessions there are, and has no right to end them."""
    return make_role(dsn, "IN ROLE pg_read_all_stats")


def test_our_own_inserts_say_that_they_are_journaled(conn: Conn) -> None:
    """Else the triggers do once more what the insert has done itself, and that costs."""
    assert row(conn, enqueue(conn))["journaled"] == 2


def test_a_silence_is_told_of_the_workers_run_alone_and_once_whoever_keeps_it(conn: Conn, worker: Worker) -> None:
    """After a reload another keeper asks again."""
    job = worker.start_new()

    def told(job_id: UUID = job.job_id, attempt: int = 1, by: str = worker.name, silent_sec: float = 900.0) -> int:
        lifecycle.journal_stuck(conn, job_id, attempt, by, silent_sec, "stacks")
        return kinds(conn, job.job_id).count("stuck")

    assert [told(job_id=uuid4()), told(attempt=2), told(by="somebody")] == [0, 0, 0]
    assert [told(), told(silent_sec=930.0)] == [1, 1]
    assert journal(conn, job.job_id)[-1] == ("stuck", {"attempt": 1, "silent_sec": 900.0, "stacks": "stacks"})
    conn.execute("UPDATE dl_job_events SET ts = ts - interval '2 h' WHERE kind = 'stuck'")
    assert told() == 2  # it has reported since then, and is silent once more
    worker.finish(job)
    conn.execute("UPDATE dl_job_events SET ts = ts - interval '2 h' WHERE kind = 'stuck'")
    assert told() == 2
    assert illegal(kinds(conn, job.job_id), "succeeded") is None


def test_a_running_job_may_be_forced_later_and_once_and_no_request_takes_force_back(conn: Conn, worker: Worker) -> None:
    job_id = worker.start_new().job_id
    outcomes = []
    for force in (False, True, True, False):
        lifecycle.request_cancel(conn, job_id, force)
        outcomes.append((row(conn, job_id)["cancel_forced"], len(heard(worker.conn, "dl_cancel"))))
    assert outcomes == [(False, 1), (True, 1), (True, 0), (True, 0)]
    assert kinds(conn, job_id) == ["queued", "picked", "cancel_requested", "cancel_requested"]
    with quietly(conn):  # another service puts the job back
        conn.execute("UPDATE dl_jobs SET status = 'queued'")
    lifecycle.request_cancel(conn, job_id)
    found = row(conn, job_id)
    assert (found["status"], found["cancel_forced"]) == ("canceled", True)


def test_the_keeper_hears_of_running_jobs_that_should_stop_and_of_no_others(conn: Conn, workers: Workers) -> None:
    asked, forced, other = (enqueue(conn, priority=priority) for priority in range(3))
    for _ in range(3):
        workers().take()
    lifecycle.request_cancel(conn, asked)
    lifecycle.request_cancel(conn, forced, force=True)
    ended = plain(conn, status="succeeded", cancel_requested=True)
    assert lifecycle.cancellations(conn, [asked, forced, other, ended]) == {asked: False, forced: True}


@pytest.mark.parametrize("verb", ["succeed", "retry", "fail", "hand_back", "cancel"])
def test_a_run_ends_once_in_the_journal_whatever_a_role_has_written_to_the_counter(
    conn: Conn, worker: Worker, verb: str
) -> None:
    for counted in (2**31 - 1, 1_000_000, 999_999):
        job = worker.start_new()
        conn.execute("UPDATE dl_jobs SET journaled = %s", (counted,))
        worker.finish(job, verb)
        assert row(conn, job.job_id)["status"] != "running"
        assert len(kinds(conn, job.job_id)) == 3
        if verb in ("retry", "hand_back"):
            conn.execute("UPDATE dl_jobs SET journaled = %s", (counted,))
            assert worker.take().job_id == job.job_id
            assert len(kinds(conn, job.job_id)) == 4


@pytest.mark.parametrize(("status", "lease"), [("running", "-1 s"), ("succeeded", "1 h")])
def test_a_key_held_without_a_live_run_is_put_off(
    conn: Conn, one: Worker, two: Worker, status: str, lease: str
) -> None:
    """A lease that is over, or was left behind by another service, is no run: nobody would make a parked row ready.

    While another claim holds the row, its key is free, and it is worth coming back for.
    """
    plain(conn, lock_key="k", status=status)
    conn.execute("UPDATE dl_jobs SET lease_expires_at = now() + %s::interval", (lease,))
    waiting = plain(conn, lock_key="k")
    with one.conn.transaction(force_rollback=True):
        assert one.take().job_id == waiting
        claim = two.claim()
        assert claim.job is None
        assert claim.due_in <= 0.1
    assert keys_held(conn) == [one.pid]
    claim = two.claim()
    assert (claim.job, claim.backoffs, row(conn, waiting)["blocked_on"]) == (None, 1, "time")


def test_a_refusal_waits_for_no_row_of_its_key(conn: Conn, one: Worker, two: Worker) -> None:
    conn.execute("SELECT pg_advisory_lock(hashtext('k'))")
    refused, held = plain(conn, lock_key="k", priority=0), plain(conn, lock_key="k", priority=1)
    with locked(two.conn, held), started(one.claim, None, conn) as claim:
        assert claim.result(PATIENCE).job is None
    assert (row(conn, refused)["backoffs"], row(conn, held)["backoffs"]) == (1, 0)


def test_a_session_has_the_keys_that_it_holds_and_no_others(conn: Conn, workers: Workers) -> None:
    holder, other = workers(), workers()
    has_key = "SELECT dl_session_has_key(%s, %s, %s::int)"
    key_hashes = [-(2**31), -1, 0, 2**31 - 1]
    for key_hash in key_hashes:
        holder.conn.execute("SELECT pg_advisory_lock(%s::int)", (key_hash,))
        held = [
            (worker, asked)
            for worker in (holder, other)
            for asked in key_hashes
            if value(conn, has_key, worker.pid, worker.session.backend_start, asked)
        ]
        assert held == [(holder, key_hash)]
        holder.conn.execute("SELECT pg_advisory_unlock_all()")


def test_a_retake_is_not_hindered_by_a_lease_that_is_over(conn: Conn, one: Worker, two: Worker) -> None:
    plain(conn, lock_key="k", priority=0)
    stale = plain(conn, lock_key="k", priority=1)
    job = one.take()
    conn.execute("UPDATE dl_jobs SET status = 'running', lease_expires_at = now() WHERE job_id = %s", (stale,))
    session = successor(two, one)
    assert lifecycle.retake(session, [job])


@pytest.mark.parametrize(
    "change", ["status = 'canceled'", "cancel_requested = true", "attempt = max_attempts", "blocked_on = 'time'",
               "available_at = now() + interval '1 h'", "queue = 'other'"]
)  # fmt: skip
def test_a_candidate_that_may_not_start_any_more_is_left_alone(conn: Conn, worker: Worker, change: str) -> None:
    """The row changes between the claim's look at the queue and its lock on the key."""
    job_id, other = plain(conn, lock_key="k"), plain(conn, lock_key="l")
    step = partial(lifecycle.step, worker.session, ["q"], BACKOFF_SEC, 2)
    with at_gate(conn, BEFORE_THE_LOCK, worker, step) as claim, quietly(conn):
        conn.execute(f"UPDATE dl_jobs SET {change} WHERE job_id = %s", (job_id,))
    assert [job.job_id for job in claim.result().jobs] == [other]
    assert row(conn, job_id)["started_at"] is None


@pytest.mark.parametrize(("lease", "begun"), [("1 h", 0), ("-1 s", 1)])
def test_a_candidate_whose_key_is_busy_by_now_is_left_alone(conn: Conn, worker: Worker, lease: str, begun: int) -> None:
    """By a running row whose session is lost, for as long as its lease lives."""
    other = plain(conn, lock_key="k", queue="other")
    plain(conn, lock_key="k")
    with at_gate(conn, BEFORE_THE_LOCK, worker, worker.claim) as claim, quietly(conn):
        conn.execute(
            "UPDATE dl_jobs SET status = 'running', lease_expires_at = now() + %s::interval WHERE job_id = %s",
            (lease, other),
        )
    assert len(claim.result().jobs) == begun


def test_a_row_that_its_worker_is_writing_is_settled_another_time(conn: Conn, worker: Worker) -> None:
    job = worker.start_new()
    with worker.conn.transaction():
        lifecycle.beat(worker.conn, [job], None, False)
        assert lifecycle.settle(conn, worker.name, "crash", "gone") == [lifecycle.Settled(job.job_id, None)]
    assert [found.status for found in lifecycle.settle(conn, worker.name, "crash", "gone")] == ["queued"]


def test_idle_claims_do_not_contend_with_each_other(conn: Conn, workers: Workers) -> None:
    """Each holds the running rows of what it waits for, and both may."""
    one, two, three = workers(), workers(), workers()
    one.start_new(plain, lock_key="k", priority=0)
    plain(conn, lock_key="k", priority=1)
    with two.conn.transaction():
        assert two.claim().job is None  # and has parked the other row
        late = plain(conn, lock_key="k", priority=2)
        assert three.claim().job is None
        assert row(conn, late)["blocked_on"] == "key"


# The first row that a settler changes is held up until this lock is free.
HOLD_UP = """
CREATE FUNCTION hold_up() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF current_setting('application_name') = 'settler' THEN
    PERFORM pg_advisory_xact_lock_shared(5000000000);
  END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER hold_up BEFORE UPDATE ON dl_jobs FOR EACH ROW EXECUTE FUNCTION hold_up();
"""


@pytest.mark.parametrize("change", ["status = 'succeeded'", "claimed_by = 'another'"])
def test_a_row_that_changes_hands_while_another_is_settled_is_left_alone(own_db: str, change: str) -> None:
    with db.connect(own_db, name="test", schema="public") as conn:
        conn.execute(HOLD_UP)
        plain(conn), plain(conn)
        conn.execute("UPDATE dl_jobs SET status = 'running', attempt = 1")
        conn.execute("UPDATE dl_jobs SET claimed_by = 'w'")
        settler = Worker(own_db, "settler")
        conn.execute("SELECT pg_advisory_lock(5000000000)")
        with started(lambda: lifecycle.settle(settler.conn, "w", "crash", "gone"), settler.pid, conn) as settle:
            changed = value(
                conn,
                f"UPDATE dl_jobs SET {change} WHERE job_id = (SELECT job_id FROM dl_jobs WHERE status = 'running'"
                " LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING job_id",
            )
            if "status" in change:  # even where the claim's name still stands in the row
                conn.execute("UPDATE dl_jobs SET claimed_by = 'w' WHERE job_id = %s", (changed,))
            before = row(conn, changed) | {"now": None}
            conn.execute("SELECT pg_advisory_unlock(5000000000)")
            assert changed not in [found.job_id for found in settle.result()]
        assert row(conn, changed) | {"now": None} == before
        settler.conn.close()


def test_no_other_session_is_ended_than_that_of_the_worker_nor_ones_own(
    conn: Conn, one: Worker, two: Worker, other_role: str
) -> None:
    """Another one may have the number by now, and a role may have no right to end it."""
    conn.execute(f"GRANT EXECUTE ON FUNCTION dl_end_session TO {conninfo_to_dict(other_role)['user']}".encode())
    with psycopg.connect(other_role, autocommit=True) as theirs:
        lifecycle.end_session(theirs, one.pid, one.session.backend_start)
    lifecycle.end_session(one.conn, one.pid, one.session.backend_start)
    lifecycle.end_session(two.conn, one.pid, two.session.backend_start)
    assert value(one.conn, "SELECT 1") == 1


def test_the_targets_sessions_of_another_role_are_let_be(conn: Conn, dsn: str, other_role: str) -> None:
    job = uuid4()
    theirs = make_conninfo(other_role, application_name=f"dl-job:{job}:1")
    with psycopg.connect(theirs, autocommit=True) as other:
        with fence.transaction(dsn, "public", {job: 2}):
            pass
        assert value(other, "SELECT 1") == 1


def test_a_fence_of_long_ago_is_forgotten_and_makes_nobody_wait_while_somebody_holds_it(conn: Conn, dsn: str) -> None:
    with fence.transaction(dsn, "public", {uuid4(): 1}):
        pass
    conn.execute("UPDATE dl_fence SET raised_at = now() - interval '31 days'")

    def begin() -> bool:
        with fence.transaction(dsn, "public", {uuid4(): 1}):
            return True

    with psycopg.connect(dsn) as holder:
        holder.execute("SELECT FROM dl_fence FOR UPDATE")
        with started(begin, None, conn) as transaction:
            try:
                assert transaction.result(PATIENCE)
            finally:
                holder.rollback()
    assert value(conn, "SELECT count(*) FROM dl_fence") == 2
    assert begin()
    assert value(conn, "SELECT count(*) FROM dl_fence WHERE raised_at < now() - interval '30 days'") == 0


def test_what_frees_no_key_tells_no_waiter_of_it(conn: Conn, workers: Workers) -> None:
    """A request to a running job, and the end of a parked one."""
    one, two, ear = workers(), workers(), workers()
    running, queued = enqueue(conn, queue="a", lock_key="k"), enqueue(conn, queue="c", lock_key="k")
    one.take("a")
    enqueue(conn, queue="b", lock_key="k")
    assert (two.claim("b").job, two.claim("c").job) == (None, None)
    ear.notes()
    lifecycle.request_cancel(conn, running)
    lifecycle.request_cancel(conn, queued)
    assert ear.notes() == []
