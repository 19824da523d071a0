"""A step: ends are written and jobs claimed in one statement, one of each key, and nothing else changes hands."""

import pytest
from hands import DONE, Conn, Worker, Workers, enqueue, expire, ids, locked, many, plain, quietly, step
from psycopg.types.json import set_json_loads
from readings import journal, keys_held, kinds, row, state, value, waits

from dataloader.queue import lifecycle, operations
from dataloader.queue.job import Finish, Status
from dataloader.queue.lifecycle import Ended, Step


def test_it_claims_the_best_first_and_no_more_than_asked_for(conn: Conn, worker: Worker) -> None:
    """The best is that of the lowest priority, and of equals the oldest. A job with no attempts has one."""
    rows = ((4, -99, 5), (1, -1, 5), (3, -10, 5), (3, -20, 0))
    last, first, third, second = (
        plain(conn, priority=priority, made_sec=sec, max_attempts=attempts) for priority, sec, attempts in rows
    )
    found = step(worker, 3)
    assert ids(found.jobs) == [first, second, third]
    assert {job.attempt for job in found.jobs} == {1}
    assert len(keys_held(conn)) == 3
    assert state(conn, last) == ("queued", 0)
    assert all(kinds(conn, job_id)[-1] == "picked" for job_id in (first, second, third))


def test_ends_are_written_and_their_keys_free_for_the_same_step(conn: Conn, worker: Worker) -> None:
    plain(conn, lock_key="k"), plain(conn, lock_key="k"), plain(conn, lock_key="l")
    first = step(worker, 5)
    ends = [Ended(job, DONE, {"cpu_sec": 0.5}) for job in first.jobs]
    second = step(worker, 5, *ends)
    assert second.ended == dict.fromkeys(ids(first.jobs), "succeeded")
    assert [job.lock_key for job in second.jobs] == ["k"]
    assert keys_held(conn) == [worker.pid]
    kind, payload = journal(conn, first.jobs[0].job_id)[-1]
    assert (kind, payload) == ("done", {"attempt": 1, "worker": worker.name, "cpu_sec": 0.5})


def test_an_end_of_each_kind_may_be_among_them(conn: Conn, worker: Worker) -> None:
    verbs = {"succeed": "succeeded", "fail": "failed", "cancel": "canceled"}
    verbs |= dict.fromkeys(("retry", "hand_back", "restart"), "queued")
    for _ in verbs:
        enqueue(conn)
    jobs = step(worker, 6).jobs
    ends = [Ended(job, Finish(verb, "why", 60.0)) for job, verb in zip(jobs, verbs, strict=True)]
    assert list(step(worker, 0, *ends).ended.values()) == list(verbs.values())
    assert [state(conn, job.job_id)[1] for job in jobs] == [1, 1, 1, 1, 0, 0]
    assert [state(conn, job.job_id)[0] for job in jobs] == list(verbs.values())
    assert [row(conn, job.job_id)["error"] for job in jobs] == [None, "why", "why", "why", None, "why"]
    assert waits(conn, *ids(jobs)) == [None, None, None, "time", "time", None]


def test_what_is_not_ours_any_more_is_missing_and_the_rest_is_written(conn: Conn, worker: Worker) -> None:
    enqueue(conn), enqueue(conn), enqueue(conn)
    lost, kept, canceled = step(worker, 3).jobs
    expire(conn, lost.job_id)
    conn.execute("UPDATE dl_jobs SET claimed_pid = NULL")
    assert lifecycle.reap(conn)
    lifecycle.request_cancel(conn, canceled.job_id)
    ended = step(worker, 0, *(Ended(job, DONE) for job in (lost, kept, canceled))).ended
    assert ended == {kept.job_id: "succeeded", canceled.job_id: "canceled"}
    assert state(conn, lost.job_id) == ("queued", 1)
    assert keys_held(conn) == []


def test_a_step_says_what_there_is_to_say_also_of_one_thing_alone(conn: Conn, worker: Worker) -> None:
    enqueue(conn)
    (job,) = step(worker, 1).jobs
    operations.change(conn, "cancel", [job.job_id], "test")
    assert step(worker, 0, Ended(job, DONE)) == Step([], {job.job_id: Status.CANCELED})
    operations.set_order(conn, "q", "test", batch=3)
    enqueue(conn)
    found = step(worker, 1)
    assert found == Step(found.jobs, {}, batch=3)
    assert step(worker, 0, Ended(found.jobs[0], DONE)) == Step([], {found.jobs[0].job_id: Status.SUCCEEDED})


def test_what_a_step_says_is_read_whatever_a_pipeline_has_made_of_json(conn: Conn, worker: Worker) -> None:
    set_json_loads(lambda _: None, worker.conn)
    operations.set_order(conn, "q", "test", ordered=True, merge=True, batch=3)
    jobs = [plain(conn, lock_key="k", score=score) for score in (2, 1)]
    found = step(worker, 1)
    assert (ids(found.jobs), found.batch) == (jobs[::-1], 3)


def test_a_step_that_sets_aside_for_long_comes_back(conn: Conn, worker: Worker) -> None:
    """No notification wakes the worker: the rows behind those that may not start are older than this claim."""
    conn.execute(
        """
        CREATE SCHEMA late;
        CREATE FUNCTION late.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
          AS $$ SELECT pg_catalog.clock_timestamp() + interval '2 s' $$;
        """
    )
    plain(conn)
    conn.execute("UPDATE dl_jobs SET attempt = max_attempts")
    worker.conn.execute("SET search_path = late, public, pg_catalog")
    assert step(worker, 1) == Step([], {}, look_again=True)


def test_some_ends_let_go_of_their_own_keys_only(conn: Conn, worker: Worker) -> None:
    enqueue(conn), enqueue(conn)
    over, running = step(worker, 2).jobs
    lifecycle.finish_some(worker.conn, worker.name, [Ended(over, DONE)])
    session, has_key = worker.session, "SELECT dl_session_has_key(%s, %s, hashtext(%s))"
    assert value(conn, has_key, session.backend_pid, session.backend_start, running.lock_key)
    assert keys_held(conn) == [worker.pid]


def test_a_key_that_another_session_has_is_tried_once(conn: Conn, worker: Worker) -> None:
    for _ in range(3):
        plain(conn, lock_key="held")
    conn.execute("SELECT pg_advisory_lock(hashtext('held'))")
    refused = "SELECT others FROM dl_take_keys('q', false, 5, 0, '-infinity', 0, '{}', false, 0, NULL)"
    assert value(worker.conn, refused) == [value(conn, "SELECT hashtext('held')")]


def test_a_step_without_ends_lets_go_of_what_the_session_still_holds(conn: Conn, worker: Worker) -> None:
    """A key of a run that was no longer ours: its own lock would not refuse the session."""
    worker.conn.execute("SELECT pg_advisory_lock(1)")
    step(worker, 1)
    assert keys_held(conn) == []


def test_the_key_of_a_lost_job_is_let_go_while_another_of_the_batch_runs(conn: Conn, one: Worker, two: Worker) -> None:
    """The heartbeat writes such an end; the run of the other may go on for hours."""
    plain(conn, lock_key="a", priority=1)
    plain(conn, lock_key="b", priority=2)
    lost, _running = step(one, 2).jobs
    conn.execute("UPDATE dl_jobs SET status = 'queued' WHERE job_id = %s", (lost.job_id,))
    assert not lifecycle.finish_some(one.conn, one.name, [Ended(lost, DONE)]).ended
    assert two.take().job_id == lost.job_id
    assert two.claim().job is None


def test_a_row_that_somebody_holds_is_passed_over_and_its_key_let_go(conn: Conn, one: Worker, two: Worker) -> None:
    held, free = plain(conn, priority=1), plain(conn, priority=2)
    with locked(two.conn, held):
        assert ids(step(one, 5)) == [free]
        assert keys_held(conn) == [one.pid]


@pytest.mark.parametrize("is_over", [False, True])
def test_a_key_that_a_running_row_has_is_passed_over_until_its_lease_is_over(
    conn: Conn, one: Worker, two: Worker, is_over: bool
) -> None:
    """The holder has lost its session, and with it the lock; its lease speaks for it, and no reaper has come by yet."""
    job = two.start_new(plain, lock_key="k")
    plain(conn, lock_key="k"), plain(conn, lock_key="l")
    two.conn.execute("SELECT pg_advisory_unlock_all()")
    if is_over:
        expire(conn, job.job_id)
    keys = ["k", "l"] if is_over else ["l"]
    assert [job.lock_key for job in step(one, 5).jobs] == keys
    assert keys_held(conn) == [one.pid] * len(keys)


def test_two_steps_beside_each_other_share_what_is_there(conn: Conn, one: Worker, two: Worker) -> None:
    many(conn, 20, "%s")
    with one.conn.transaction():
        first = step(one, 10)
        second = step(two, 10)
    assert len({*ids(first.jobs), *ids(second.jobs)}) == 20


def test_where_keys_are_few_a_step_leaves_some_to_others(conn: Conn, one: Worker, two: Worker) -> None:
    many(conn, 320, lock_key="'key-' || (i - 1) % 32")
    assert [job.lock_key for job in step(one, 100).jobs] == [f"key-{number}" for number in range(30)]
    assert len(keys_held(conn)) == 30
    assert [job.lock_key for job in step(two, 100).jobs] == ["key-30", "key-31"]


def test_rows_that_were_parked_and_others_are_claimed_in_one_order(conn: Conn, workers: Workers) -> None:
    worker, other = workers(), workers()
    keys = ["k", "l", "m"]
    for key in keys:
        plain(conn, lock_key=key)
    runs = step(worker, 3).jobs
    parked = [plain(conn, lock_key=key, priority=priority) for key, priority in zip(keys, (1, 3, 5), strict=True)]
    assert step(other, 4).jobs == []
    others = [plain(conn, priority=priority) for priority in (2, 4, 6)]
    found = step(worker, 4, *(Ended(job, DONE) for job in runs)).jobs
    assert ids(found) == [parked[0], others[0], parked[1], others[1]]


def test_a_dead_workers_running_job_counts_and_what_it_had_not_begun_does_not(conn: Conn, worker: Worker) -> None:
    enqueue(conn), enqueue(conn), enqueue(conn)
    first, running, last = step(worker, 3).jobs
    reason = "worker killed by signal 9"
    settled = lifecycle.settle(conn, worker.name, "crash", reason, running=[running.job_id])
    assert {job.status for job in settled} == {"queued"}
    assert [state(conn, job.job_id)[1] for job in (first, running, last)] == [0, 1, 0]
    assert journal(conn, last.job_id)[-1] == ("requeue", {"attempt": 0, "reason": f"not started: {reason}"})
    assert journal(conn, running.job_id)[-1][1]["reason"] == f"{reason} on attempt 1"


def test_what_waits_behind_a_run_is_taken_back_uncounted_and_nothing_before_it(conn: Conn, workers: Workers) -> None:
    worker, other = workers(), workers()
    for number in range(7):
        enqueue(conn, priority=number, max_attempts=1)
    (elses,) = step(other, 1).jobs
    first, before, running, *behind = step(worker, 5).jobs
    enqueue(conn, priority=7)
    also_elses = step(other, 2).jobs
    waiting = [job.job_id for job in behind]
    assert lifecycle.take_back(conn, worker.name, [elses.job_id, *ids(also_elses)], "not its jobs") == 0
    assert lifecycle.take_back(conn, worker.name, waiting, "it took longer") == 2
    assert [state(conn, job.job_id) for job in behind] == [("queued", 0)] * 2
    assert journal(conn, behind[0].job_id)[-1] == ("requeue", {"attempt": 0, "reason": "it took longer"})
    assert {state(conn, job.job_id) for job in (first, before, running, elses, *also_elses)} == {("running", 1)}
    ends = [Ended(job, DONE) for job in (first, before, running, *behind)]
    assert set(step(worker, 0, *ends).ended) == {first.job_id, before.job_id, running.job_id}
    assert lifecycle.take_back(conn, worker.name, waiting, "it took longer") == 0


def test_what_has_begun_or_ended_or_is_locked_is_not_taken_back(conn: Conn, one: Worker, two: Worker) -> None:
    """Another service has ended one, whose claim is still in the row, as the plain protocol leaves it."""
    for _ in range(4):
        enqueue(conn)
    begun, held, ended, free = claimed = ids(step(one, 4).jobs)
    with quietly(conn):
        conn.execute("UPDATE dl_jobs SET status = 'succeeded' WHERE job_id = %s", (ended,))
    assert row(conn, ended)["claimed_by"] == one.name
    two.conn.execute("SET lock_timeout = '2s'")
    with locked(conn, held):
        assert lifecycle.take_back(two.conn, one.name, claimed, "it took longer") == 1
    states = [("running", 1), ("running", 1), ("succeeded", 1), ("queued", 0)]
    assert [state(conn, job_id) for job_id in (begun, held, ended, free)] == states
