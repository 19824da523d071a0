"""Guards that no other test would miss; see tests/mutation, which takes each away."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID, uuid4

import psycopg
import pytest
from foreign import Foreign
from hands import Worker, enqueue, expire, heard, keys_held, kinds, plain, row, started, until, value
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dataloader.farm import fence
from dataloader.queue import db, lifecycle
from dataloader.queue.job import Status

Workers = Callable[[], Worker]


@pytest.fixture
def other_role(dsn: str, make_role: Callable[..., str]) -> str:
    """The DSN of a role that may see what sessions there are, and has no right to end them."""
    return make_role(dsn, "IN ROLE pg_read_all_stats")


# --- statements ---


def test_our_own_inserts_say_that_they_are_journaled(conn: db.Connection) -> None:
    """Else the trigger looks for the journal's row at the commit; it finds it, but that costs."""
    assert row(conn, enqueue(conn))["journaled"] == 1


def test_a_running_job_may_be_forced_later_and_once(conn: db.Connection, worker: Worker) -> None:
    job_id = enqueue(conn)
    worker.take()
    told = []
    for force in (False, True, True, False):
        lifecycle.request_cancel(conn, job_id, force)
        told.append((row(conn, job_id)["cancel_forced"], len(heard(worker.conn, "dl_cancel"))))
    assert told == [(False, 1), (True, 1), (True, 0), (True, 0)]
    assert kinds(conn, job_id) == ["queued", "picked", "cancel_requested", "cancel_requested"]


def test_a_request_without_force_takes_no_force_back(conn: db.Connection) -> None:
    """Another service put the job back that was forced to end."""
    job_id = enqueue(conn)
    conn.execute("UPDATE dl_jobs SET cancel_requested = true, cancel_forced = true")
    lifecycle.request_cancel(conn, job_id)
    found = row(conn, job_id)
    assert (found["status"], found["cancel_forced"]) == ("canceled", True)


def test_the_keeper_hears_of_running_jobs_that_should_stop_and_of_no_others(
    conn: db.Connection, workers: Workers
) -> None:
    asked, forced, other = (enqueue(conn, priority=priority) for priority in range(3))
    for _ in range(3):
        workers().take()
    lifecycle.request_cancel(conn, asked)
    lifecycle.request_cancel(conn, forced, force=True)
    ended = plain(conn, status="succeeded", cancel_requested=True)
    assert lifecycle.cancellations(conn, [asked, forced, other, ended]) == {asked: False, forced: True}


def test_a_start_has_a_token_that_grows_though_its_attempt_is_given_back(conn: db.Connection, worker: Worker) -> None:
    enqueue(conn)
    for claim in (1, 2, 3):
        job = worker.take()
        assert (job.claim, job.attempt) == (claim, 1)
        worker.finish(job, "hand_back")


# --- keys ---


def slot(conn: db.Connection, key: str = "k") -> str:
    """What becomes of an attempt to take this key's slot."""
    return value(conn, "SELECT dl_take_slot(hashtext(%s))", key)


def test_a_slot_whose_job_lost_its_session_is_busy_and_not_kept(conn: db.Connection, worker: Worker) -> None:
    job_id = plain(conn, lock_key="k")
    worker.take()
    worker.conn.execute("SELECT pg_advisory_unlock_all()")
    assert slot(conn) == "busy"
    assert keys_held(conn) == []
    expire(conn, job_id)
    assert slot(conn) == "taken"
    assert keys_held(conn) == [conn.info.backend_pid]


def test_a_slot_that_a_session_holds_is_busy_while_a_job_says_why(conn: db.Connection, worker: Worker) -> None:
    job_id = plain(conn, lock_key="k")
    worker.take()
    assert slot(conn) == "busy"
    expire(conn, job_id)
    assert slot(conn) == "refused"


def test_a_job_that_another_service_ended_with_its_lease_left_holds_no_key(
    conn: db.Connection, worker: Worker, foreign: Foreign
) -> None:
    plain(conn, lock_key="k", priority=0), plain(conn, lock_key="k", priority=1)
    taken = foreign.claim()
    assert taken is not None
    foreign.finish(*taken)
    assert worker.take().lock_key == "k"


@pytest.mark.parametrize("hot", [True, False])
def test_a_refusal_leaves_the_rows_of_other_keys_alone(conn: db.Connection, workers: Workers, hot: bool) -> None:
    one, two = workers(), workers()
    conn.execute("SELECT pg_advisory_lock(hashtext('k'))")
    refused, free = plain(conn, lock_key="k", priority=0), plain(conn, lock_key="l", priority=1)
    conn.execute("UPDATE dl_jobs SET hot = %s", (hot,))
    claim = one.look()
    assert claim.job is not None
    assert (claim.job.job_id, claim.backoffs) == (free, 1)
    assert row(conn, free)["backoffs"] == 0
    assert row(conn, refused)["backoffs"] == 1
    assert two.claim().job is None


def test_a_refusal_waits_for_no_row_of_its_key(conn: db.Connection, workers: Workers) -> None:
    one, two = workers(), workers()
    conn.execute("SELECT pg_advisory_lock(hashtext('k'))")
    refused, locked = plain(conn, lock_key="k", priority=0), plain(conn, lock_key="k", priority=1)
    with two.conn.transaction():
        two.conn.execute("SELECT FROM dl_jobs WHERE job_id = %s FOR UPDATE", (locked,))
        with started(one.claim, None, conn) as claim:
            assert claim.result(timeout=5).job is None
    assert (row(conn, refused)["backoffs"], row(conn, locked)["backoffs"]) == (1, 0)


def test_no_attempts_at_all_are_one_also_at_the_second_look(conn: db.Connection, worker: Worker) -> None:
    job_id = plain(conn, max_attempts=0)
    found = worker.look().job
    assert found is not None
    assert found.job_id == job_id


def test_a_claim_that_was_refused_ten_keys_asks_for_another_look(conn: db.Connection, worker: Worker) -> None:
    """It does not go on for ever, and says that there is more to look at."""
    keys = [row(conn, enqueue(conn))["lock_key"] for _ in range(12)]
    conn.execute("SELECT pg_advisory_lock(hashtext(key)) FROM unnest(%s::text[]) key", (keys[:11],))
    first = worker.look()
    assert (first.job, first.backoffs, first.look_again) == (None, 10, True)
    assert until(lambda: worker.look().job, "the free key").lock_key == keys[11]


def test_a_session_has_the_slots_that_it_holds_and_no_others(conn: db.Connection, workers: Workers) -> None:
    holder, other = workers(), workers()
    slots = [-(2**31), -1, 0, 2**31 - 1]
    for slot in slots:
        holder.conn.execute("SELECT pg_advisory_lock(%s::int)", (slot,))
        held = [
            (session, asked)
            for session in (holder, other)
            for asked in slots
            if value(
                conn,
                "SELECT dl_session_has_slot(%s, %s, %s::int)",
                session.pid,
                session.session.backend_start,
                asked,
            )
        ]
        assert held == [(holder, slot)]
        holder.conn.execute("SELECT pg_advisory_unlock_all()")


def test_a_retake_is_not_hindered_by_a_lease_that_is_over(conn: db.Connection, workers: Workers) -> None:
    one, two = workers(), workers()
    plain(conn, lock_key="k", priority=0)
    stale = plain(conn, lock_key="k", priority=1)
    job = one.take()
    conn.execute("UPDATE dl_jobs SET status = 'running', lease_expires_at = now() WHERE job_id = %s", (stale,))
    session = lifecycle.Session(two.conn, one.name, two.session.backend_pid, two.session.backend_start)
    assert lifecycle.retake(session, job)


# --- rows that leave while somebody looks at them ---


@pytest.mark.parametrize("status", ["running", "succeeded", "canceled"])
def test_a_candidate_that_is_not_queued_any_more_is_left_alone(conn: db.Connection, status: str) -> None:
    assert tried(conn, plain(conn, status=status)) is None


def test_a_candidate_that_waits_for_its_time_by_now_is_left_alone(conn: db.Connection) -> None:
    assert tried(conn, plain(conn, in_sec=60)) is None


def tried(conn: db.Connection, job_id: UUID) -> str | None:
    """What becomes of a claim's candidate."""
    return value(conn, "SELECT outcome FROM dl_try(%s, 'w', now(), 1)", job_id)


def test_a_row_that_its_worker_is_writing_is_settled_another_time(conn: db.Connection, worker: Worker) -> None:
    job_id = enqueue(conn)
    job = worker.take()
    with worker.conn.transaction():
        lifecycle.beat(worker.conn, job, None, False)
        assert lifecycle.settle(conn, worker.name, "crash", "gone") == [lifecycle.Settled(job_id, None)]
    assert [found.status for found in lifecycle.settle(conn, worker.name, "crash", "gone")] == ["queued"]


def test_a_drain_ends_no_job_however_many_attempts_it_has_had(conn: db.Connection, worker: Worker) -> None:
    job_id = plain(conn, max_attempts=0)
    worker.take()
    assert lifecycle.settle(conn, worker.name, "drain", "drain") == [lifecycle.Settled(job_id, Status.QUEUED)]


@pytest.mark.parametrize(("status", "lease"), [("running", "-1 s"), ("succeeded", "1 h")])
def test_a_row_whose_key_is_free_and_that_another_claim_holds_is_worth_coming_back_for(
    conn: db.Connection, workers: Workers, status: str, lease: str
) -> None:
    """A lease that is over, or was left behind by another service, says nothing of the key."""
    one, two = workers(), workers()
    plain(conn, lock_key="k", status=status)
    conn.execute("UPDATE dl_jobs SET lease_expires_at = now() + %s::interval", (lease,))
    waiting = plain(conn, lock_key="k")
    conn.execute("UPDATE dl_jobs SET hot = true WHERE job_id = %s", (waiting,))
    with one.conn.transaction(force_rollback=True):
        assert one.take().job_id == waiting
        claim = two.claim()
        assert claim.job is None
        assert claim.due_in is not None
        assert claim.due_in <= 0.1


def test_idle_claims_do_not_contend_with_each_other(conn: db.Connection, workers: Workers) -> None:
    """Each holds the running rows of what it waits for, and both may."""
    one, two, three = workers(), workers(), workers()
    plain(conn, lock_key="k", priority=0), plain(conn, lock_key="k", priority=1)
    one.take()
    assert two.claim().job is None  # and the other row is marked hot
    with two.conn.transaction():
        assert two.claim().job is None
        claim = three.claim()
        assert (claim.job, claim.due_in, claim.look_again) == (None, None, False)


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


# --- sessions ---


def test_nobody_ends_his_own_session(conn: db.Connection, worker: Worker) -> None:
    lifecycle.end_session(worker.conn, worker.pid, worker.session.backend_start)
    assert value(worker.conn, "SELECT 1") == 1


def test_a_session_that_one_may_not_end_is_let_be(conn: db.Connection, worker: Worker, other_role: str) -> None:
    conn.execute(f"GRANT EXECUTE ON FUNCTION dl_end_session TO {conninfo_to_dict(other_role)['user']}".encode())
    with psycopg.connect(other_role, autocommit=True) as theirs:
        lifecycle.end_session(theirs, worker.pid, worker.session.backend_start)
    assert value(worker.conn, "SELECT 1") == 1


def test_the_targets_sessions_of_another_role_are_let_be(conn: db.Connection, dsn: str, other_role: str) -> None:
    job = uuid4()
    theirs = make_conninfo(other_role, application_name=f"dl-job:{job}:1")
    with psycopg.connect(theirs, autocommit=True) as other:
        with fence.transaction(dsn, "public", job, 2):
            pass
        assert value(other, "SELECT 1") == 1


def test_a_process_stopped_before_its_commit_holds_the_fence_for_seconds_only(conn: db.Connection, dsn: str) -> None:
    job = uuid4()
    with fence.transaction(dsn, "public", job, 1):
        pass
    hold = sql.SQL(db.statements("target.sql")["hold"]).format(schema=sql.Identifier("public"))
    with conn.transaction():
        conn.execute(hold, {"job_id": job, "claim": 1, "owner": ""})
        assert value(conn, "SHOW idle_in_transaction_session_timeout") == "5s"


def test_a_fence_of_long_ago_that_somebody_holds_makes_nobody_wait(conn: db.Connection, dsn: str) -> None:
    with fence.transaction(dsn, "public", uuid4(), 1):
        pass
    conn.execute("UPDATE dl_fence SET raised_at = now() - interval '31 days'")

    def begin() -> bool:
        with fence.transaction(dsn, "public", uuid4(), 1):
            return True

    with psycopg.connect(dsn) as holder:
        holder.execute("SELECT FROM dl_fence FOR UPDATE")
        with started(begin, None, conn) as transaction:
            try:
                assert transaction.result(timeout=5)
            finally:
                holder.rollback()


# --- notifications ---


def test_what_frees_no_key_tells_no_waiter_of_it(conn: db.Connection, workers: Workers) -> None:
    """A request to a running job, and the end of a queued one."""
    one, two, ear = workers(), workers(), workers()
    running, queued = enqueue(conn, queue="a", lock_key="k"), enqueue(conn, queue="c", lock_key="k")
    one.take("a")
    enqueue(conn, queue="b", lock_key="k")
    assert two.claim("b").job is None
    ear.notes()
    lifecycle.request_cancel(conn, running)
    lifecycle.request_cancel(conn, queued)
    assert ear.notes() == []


def test_a_row_that_comes_back_by_its_status_alone_is_told_of(conn: db.Connection, worker: Worker) -> None:
    plain(conn, status="running", attempt=1)
    worker.notes()
    conn.execute("UPDATE dl_jobs SET status = 'queued'")
    assert worker.notes() == ["q"]
