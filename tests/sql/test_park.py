"""Parked rows: a claim puts rows of busy keys aside, and whoever frees a key makes its first parked row ready."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

import pytest
from hands import DONE, Conn, Worker, Workers, age, ended_beside, expire, ids, locked, many, plain, step
from readings import keys_held, kinds, row, state, value, waits

from dataloader.queue import db, lifecycle, operations
from dataloader.queue.job import Job
from dataloader.queue.lifecycle import Ended


def parked(conn: Conn, claimant: Worker, number: int, queue: str = "q", key: str = "k") -> list[UUID]:
    """Rows of a busy key, in their order, that a claim has found and parked."""
    rows = [plain(conn, queue=queue, lock_key=key, priority=priority) for priority in range(1, number + 1)]
    assert claimant.claim(queue).job is None
    assert waits(conn, *rows) == ["key"] * number
    return rows


def run(conn: Conn, worker: Worker, queue: str = "q", key: str = "k") -> Job:
    plain(conn, queue=queue, lock_key=key, priority=0)
    return worker.take(queue)


def freed(conn: Conn, when: str) -> None:
    """Let the time of each row of dl_freed be so far ahead, when no claim looks at it yet, or behind."""
    conn.execute("UPDATE dl_freed SET since = clock_timestamp() + %s::interval", (when,))


def test_only_the_rows_of_busy_keys_are_parked(conn: Conn, one: Worker, two: Worker) -> None:
    """Not those of a key whose lease is over, nor of another queue, nor of a key that a stranger's session has.

    A step of a job that had ended makes nobody ready.
    """
    ended = plain(conn, lock_key="k", status="failed")
    run(conn, one)
    over = run(conn, one, key="over")
    expire(conn, over.job_id)
    busy, other = plain(conn, lock_key="k"), plain(conn, queue="other", lock_key="k")
    late, held = plain(conn, lock_key="over"), plain(conn, lock_key="held")
    conn.execute("SELECT pg_advisory_lock(hashtext('held'))")
    assert two.claim().job is None
    assert waits(conn, busy, other, late, held) == ["key", None, "time", "time"]
    assert kinds(conn, busy) == ["queued"]
    conn.execute("UPDATE dl_jobs SET status = 'canceled' WHERE job_id = %s", (ended,))
    assert waits(conn, busy) == ["key"]


def test_a_row_is_parked_without_a_wait_for_anybody(conn: Conn, one: Worker, two: Worker) -> None:
    """A row that a stranger has locked stays ready, and so do all rows of a key whose running row is locked."""
    jobs = [run(conn, one, key=key) for key in ("k", "l")]
    held, free, behind = (plain(conn, lock_key=key) for key in ("k", "k", "l"))
    with conn.transaction():
        conn.execute("SELECT FROM dl_jobs WHERE job_id = ANY (%s) FOR UPDATE", ([held, jobs[1].job_id],))
        found = step(two, 5)
        assert (found.jobs, found.due_in) == ([], 0.1)
        assert waits(conn, held, free, behind) == [None, "key", None]
    assert step(two, 5).due_in is None
    assert waits(conn, held, free, behind) == ["key"] * 3


@pytest.mark.parametrize(("passed", "parks"), [(200, 200), (20, 0)])
def test_a_claim_that_has_passed_many_rows_parks_them_beside_its_job(
    conn: Conn, one: Worker, two: Worker, passed: int, parks: int
) -> None:
    """But not a few: to park each row of a key whose turn is near would cost more than to pass it."""
    run(conn, one)
    many(conn, passed, "k", priority=1)
    free = plain(conn, priority=2)
    assert ids(step(two, 1)) == [free]
    assert value(conn, "SELECT count(*) FROM dl_jobs WHERE blocked_on = 'key'") == parks


@pytest.mark.parametrize("why", ["busy", "held", "canceled"])
def test_a_claim_goes_on_until_nothing_is_in_its_way(conn: Conn, one: Worker, two: Worker, why: str) -> None:
    """It reads a thousand rows at a time."""
    if why == "busy":
        run(conn, one)
    if why == "held":
        conn.execute("SELECT pg_advisory_lock(hashtext('k'))")
    many(conn, 2_100, "k")
    if why == "canceled":
        conn.execute("UPDATE dl_jobs SET cancel_requested = true")
    good = plain(conn, priority=200)
    while (found := step(two, 1)).look_again and not found.jobs:
        pass  # a claim stops after a second
    assert ids(found) == [good]


def test_a_claim_with_some_keys_does_not_read_on_for_long_among_busy_ones(conn: Conn, one: Worker, two: Worker) -> None:
    """To park a row and make it ready again costs as much as to pass over it fifty times."""
    many(conn, 2_560, lock_key="i % 64")
    assert len(step(one, 60).jobs) == 60
    assert len(step(two, 100).jobs) == 4
    assert value(conn, "SELECT count(*) FROM dl_jobs WHERE blocked_on = 'key'") == 0


def test_the_end_of_a_run_makes_the_first_of_each_queue_ready_and_tells_it(conn: Conn, workers: Workers) -> None:
    one, two, ear = workers(), workers(), workers()
    job = run(conn, one)
    rows = {queue: parked(conn, two, 3, queue) for queue in ("a", "b", "c")}
    run(conn, one, key="l")
    others = parked(conn, two, 2, "d", key="l")
    ear.notes()
    one.finish(job)
    assert sorted(ear.notes()) == ["a", "b", "c"]
    assert [waits(conn, *queued) for queued in rows.values()] == [[None, "key", "key"]] * 3
    assert waits(conn, *others) == ["key", "key"]
    assert two.take("b").job_id == rows["b"][0]
    assert [workers().claim(queue).job for queue in ("a", "c")] == [None, None]


def crash(conn: Conn, worker: Worker, job: Job) -> None:
    conn.execute("UPDATE dl_jobs SET attempt = attempt + 1 WHERE job_id = %s", (job.job_id,))  # later, then
    lifecycle.settle(conn, worker.name, "crash", "gone")


def lose(conn: Conn, worker: Worker, job: Job) -> None:
    conn.execute("UPDATE dl_jobs SET claimed_pid = NULL WHERE job_id = %s", (job.job_id,))
    expire(conn, job.job_id)
    assert lifecycle.reap(conn)


def by_statement(statement: str) -> Callable[[Conn, UUID], object]:
    return lambda conn, job_id: conn.execute(f"{statement} WHERE job_id = %s", (job_id,))


ENDS: dict[str, Callable[[Conn, Worker, Job], object]] = {
    "finish": lambda conn, worker, job: worker.finish(job),
    "heartbeat": lambda conn, worker, job: lifecycle.finish_some(worker.conn, worker.name, [Ended(job, DONE)]),
    "retry": lambda conn, worker, job: worker.finish(job, "retry", delay_sec=60.0),
    "settle": lambda conn, worker, job: lifecycle.settle(conn, worker.name, "drain", "gone"),
    "crash": crash,
    "reap": lose,
}
BY_OTHERS = {
    "another service": "UPDATE dl_jobs SET status = 'succeeded'",
    "an end that clears the claim": "UPDATE dl_jobs SET status = 'succeeded', claimed_by = NULL",
    "put back": "UPDATE dl_jobs SET status = 'queued'",
    "move": "UPDATE dl_jobs SET lock_key = 'another'",
    "deletion": "DELETE FROM dl_jobs",
}


@pytest.mark.parametrize("end", [*ENDS, *BY_OTHERS])
def test_whoever_ends_a_run_makes_the_next_row_ready(conn: Conn, one: Worker, two: Worker, end: str) -> None:
    job = run(conn, one)
    first, second = parked(conn, two, 2)
    two.notes()
    ENDS[end](conn, one, job) if end in ENDS else by_statement(BY_OTHERS[end])(conn, job.job_id)
    is_back = state(conn, job.job_id)[0] == "queued" if end != "deletion" else False
    is_first = is_back and waits(conn, job.job_id) == [None]  # the job itself: it is the first of its key again
    assert waits(conn, first, second) == ["key" if is_first else None, "key"]
    assert "q" in two.notes()


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_an_end_in_an_older_snapshot_is_looked_at_by_a_claim(conn: Conn, workers: Workers, isolation: str) -> None:
    """Such a transaction does not see the rows that were parked after its snapshot."""
    one, two = workers(), workers()
    conn.execute("INSERT INTO dl_workers (worker, farm, host, pid, queue, state) VALUES ('w', 'f', 'h', 1, 'q', '-')")
    job = run(conn, one)
    one.conn.execute(f"BEGIN ISOLATION LEVEL {isolation}")
    one.conn.execute("SELECT FROM dl_jobs")
    (waiting,) = parked(conn, two, 1)
    two.notes()
    one.conn.execute("UPDATE dl_jobs SET status = 'succeeded' WHERE job_id = %s", (job.job_id,))
    one.conn.execute("COMMIT")
    assert (waits(conn, waiting), two.notes()) == (["key"], ["q"])
    freed(conn, "1 h")
    assert two.claim().due_in == 1
    freed(conn, "-1 s")
    one.conn.execute("SELECT pg_advisory_unlock_all()")
    assert two.take().job_id == waiting


def test_the_reaper_unparks_the_stranded(
    conn: Conn, one: Worker, two: Worker, dsn: str, as_superuser: Callable[[str], str]
) -> None:
    """A run of the key `gone` has ended without the triggers; that of `k` goes on."""
    run(conn, one)
    job = run(conn, one, key="gone")
    (waiting,) = parked(conn, two, 1)
    first, second = parked(conn, two, 2, key="gone")
    with db.connect(as_superuser(dsn), name="test", schema="public") as admin:
        admin.execute("SET session_replication_role = replica")
        admin.execute("DELETE FROM dl_jobs WHERE job_id = %s", (job.job_id,))
    two.notes()
    one.conn.execute("SELECT pg_advisory_unlock_all()")
    after = None
    for _ in range(2):
        after = lifecycle.unpark_stranded(conn, after, 1)
        assert after is not None
    assert lifecycle.unpark_stranded(conn, after, 1) is None
    assert waits(conn, waiting, first, second) == ["key", None, "key"]
    assert two.notes() == ["q"]
    assert lifecycle.unpark_stranded(conn, None, 5) is None  # it goes on from key to key


LEAVE: dict[str, Callable[[Conn, UUID], object]] = {
    "canceled": by_statement("UPDATE dl_jobs SET status = 'canceled'"),
    "deleted": by_statement("DELETE FROM dl_jobs"),
    "put off": by_statement("UPDATE dl_jobs SET available_at = now() + interval '1 h'"),
    "to another queue": by_statement("UPDATE dl_jobs SET queue = 'other'"),
    "to another key": by_statement("UPDATE dl_jobs SET lock_key = 'other'"),
    "canceled by us": lifecycle.request_cancel,
    "deleted by an operator": lambda conn, job_id: operations.change(conn, "delete", [job_id], "test"),
}


@pytest.mark.parametrize("leave", LEAVE)
def test_a_head_that_leaves_passes_its_place_on(conn: Conn, one: Worker, two: Worker, leave: str) -> None:
    """And a parked row that leaves takes nobody with it; in another queue or key it is ready."""
    job = run(conn, one)
    parked_one, head, second, third = parked(conn, two, 4)
    LEAVE[leave](conn, parked_one)
    assert waits(conn, head, second, third) == ["key"] * 3
    assert not leave.startswith("to another") or waits(conn, parked_one) == [None]
    one.finish(job)
    assert waits(conn, head, second, third) == [None, "key", "key"]
    two.notes()
    LEAVE[leave](conn, head)
    assert waits(conn, second, third) == [None, "key"]
    assert "q" in two.notes()
    assert second in ids(step(two, 5))


def test_a_head_that_may_not_start_passes_its_place_on(conn: Conn, one: Worker, two: Worker) -> None:
    """A service has set the column only: the claim ends the job, and makes the next row ready."""
    job = run(conn, one)
    head, second, third = parked(conn, two, 3)
    one.finish(job)
    conn.execute("UPDATE dl_jobs SET cancel_requested = true WHERE job_id = %s", (head,))
    two.notes()
    assert two.claim().job is None
    assert state(conn, head) == ("canceled", 0)
    assert waits(conn, second, third) == [None, "key"]
    assert two.notes() == ["q"]
    assert two.take().job_id == second


def test_a_parked_row_that_may_not_start_and_has_become_the_first_is_set_aside(conn: Conn, workers: Workers) -> None:
    """A plain UPDATE of these two columns fires no trigger. One that is locked is passed over."""
    one, two = workers(), workers()
    job = run(conn, one)
    head, canceled = parked(conn, two, 2)
    one.finish(job)
    conn.execute("UPDATE dl_jobs SET cancel_requested = true, priority = 0 WHERE job_id = %s", (canceled,))
    odd = plain(conn, priority=0, cancel_requested=True)
    with locked(conn, odd):
        assert ids(step(two, 1)) == [head]
        assert (state(conn, canceled), state(conn, odd)) == (("canceled", 0), ("queued", 0))


def test_what_is_right_again_by_now_is_neither_set_aside_nor_put_off(conn: Conn, workers: Workers) -> None:
    """Since the claim's look somebody has given a row attempts, which waits for its key on, and a key is free."""
    worker = workers()
    run(conn, workers())
    (waiting,) = parked(conn, worker, 1)
    assert value(conn, "SELECT dl_set_aside(ARRAY[%s])", waiting) == 0
    assert waits(conn, waiting) == ["key"]
    held, ready = keys_held(conn), plain(conn, lock_key="free")
    assert value(worker.conn, "SELECT dl_put_off('q', ARRAY[hashtext('free')], 15)") == 0
    assert (keys_held(conn), waits(conn, ready)) == (held, [None])


def test_all_rows_of_a_key_that_a_session_holds_are_put_off_at_once_and_alike(conn: Conn, workers: Workers) -> None:
    """Were each put off by itself, each would cost a claim and its pauses."""
    one, two = workers(), workers()
    job = run(conn, one, key="held")
    rows = parked(conn, two, 3, key="held")
    conn.execute("UPDATE dl_jobs SET backoffs = 3 WHERE job_id = %s", (rows[1],))
    one.finish(job)
    conn.execute("SELECT pg_advisory_lock(hashtext('held'))")
    found = step(two, 5)
    assert (found.jobs, found.backoffs) == ([], 1)
    assert waits(conn, *rows) == ["time"] * 3
    assert value(conn, "SELECT count(DISTINCT (available_at, backoffs)) FROM dl_jobs WHERE blocked_on = 'time'") == 1
    assert row(conn, rows[0])["backoffs"] == 4


def test_keys_that_sessions_hold_are_put_off_each_by_its_own_refusals(conn: Conn, worker: Worker) -> None:
    """In another queue they are left to that queue's claims."""
    often, never, there = (plain(conn, queue=queue, lock_key=key) for queue, key in ("qo", "qn", "rn"))
    conn.execute("UPDATE dl_jobs SET backoffs = 3 WHERE job_id = %s", (often,))
    conn.execute("SELECT pg_advisory_lock(hashtext('o')), pg_advisory_lock(hashtext('n'))")
    assert worker.claim().backoffs == 2
    assert [row(conn, job_id)["backoffs"] for job_id in (often, never, there)] == [4, 1, 0]
    assert waits(conn, often, never, there) == ["time", "time", None]


def test_a_key_whose_parked_rows_are_all_locked_is_tried_again(conn: Conn, one: Worker, two: Worker) -> None:
    """Within a second, by the next claim of any queue; it says that there is something to come back for."""
    job = run(conn, one)
    rows = parked(conn, two, 2)
    with ended_beside(conn, one, job, *rows):
        assert value(one.conn, "SELECT count(*) FROM dl_freed") == 1
    assert waits(conn, *rows) == ["key", "key"]
    freed(conn, "1 h")
    found = two.claim()
    assert (found.job, found.due_in) == (None, 1)
    freed(conn, "-1 s")
    assert two.take().job_id == rows[0]
    assert waits(conn, rows[1]) == ["key"]
    assert value(conn, "SELECT count(*) FROM dl_freed") == 0


def test_an_end_while_a_claim_tries_the_key_again_writes_its_own_row(conn: Conn, workers: Workers) -> None:
    """The claim may have looked before the end, and takes its row away at its commit. Other claims leave it the key."""
    one, two, three = workers(), workers(), workers()
    job = run(conn, one)
    rows = parked(conn, two, 2)
    conn.execute("INSERT INTO dl_freed (key_hash, since) VALUES (hashtext('k'), now() - interval '1 min')")
    with locked(conn, *rows), three.conn.transaction():
        three.conn.execute("SELECT FROM dl_freed FOR UPDATE")
        assert step(two, 1).due_in == 1
        one.finish(job)
        assert value(one.conn, "SELECT count(*) FROM dl_freed") == 2
        one.conn.execute("SELECT dl_unpark(ARRAY[hashtext('k')])")
        assert value(one.conn, "SELECT count(*) FROM dl_freed") == 2


def test_a_claim_that_starts_a_job_reads_few_of_many_freed_keys(conn: Conn, one: Worker) -> None:
    """A transaction with one snapshot leaves a row for each job that it ends."""
    conn.execute("INSERT INTO dl_freed SELECT n, clock_timestamp() + interval '1 min' FROM generate_series(1, 9999) n")
    plain(conn)
    with one.conn.transaction():
        assert lifecycle.step(one.session, ["q"], 1, 1, None, tries_short=False).jobs
        assert value(one.conn, "SELECT seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'dl_freed'") <= 100


@contextmanager
def locked_head(conn: Conn, stranger: Worker, number: int = 80) -> Iterator[None]:
    """A stranger has so many rows locked, which are the first of the queue."""
    many(conn, number, "locked-%s", priority=1)
    with stranger.conn.transaction():
        stranger.conn.execute("SELECT FROM dl_jobs WHERE priority = 1 FOR UPDATE")
        yield


def test_a_claim_with_the_bookmark_finds_what_is_behind_and_later_what_is_before(
    conn: Conn, one: Worker, two: Worker
) -> None:
    """A few locked rows are no reason to pass over the head."""
    with locked_head(conn, two, 10):
        plain(conn, priority=2)
        assert step(one, 1).head is None
    conn.execute("DELETE FROM dl_jobs")
    with locked_head(conn, two):
        behind = [plain(conn, priority=2) for _ in range(3)]
        found = step(one, 1)
        assert ids(found) == behind[:1]
        assert found.head.priority == 2
        urgent = plain(conn, priority=0)
        assert ids(step(one, 5, head=found.head)) == behind[1:]
        assert ids(step(one, 1, head=found.head)) == [urgent]
        nothing = step(one, 1, head=found.head)
        assert (nothing.jobs, nothing.look_again, nothing.due_in) == ([], False, 0.1)
    assert [job.lock_key for job in step(one, 1, head=found.head).jobs] == ["locked-1"]


def test_the_order_of_a_key_holds_across_the_bookmark(conn: Conn, one: Worker, two: Worker) -> None:
    """A job before the bookmark may be free by now, and comes first; if it is not, the jobs behind wait for it."""
    before = plain(conn, lock_key="k", priority=1)
    with locked_head(conn, two):
        plain(conn, priority=2)
        head = step(one, 1).head
        assert head is not None
        behind = plain(conn, lock_key="k", priority=2)
        assert step(one, 1, head=head).jobs == []
    assert ids(step(one, 1, head=head)) == [before]
    assert state(conn, behind) == ("queued", 0)


def test_a_time_ahead_goes_before_any_other_reason_and_a_past_one_is_none(conn: Conn, one: Worker, two: Worker) -> None:
    run(conn, one)
    (waiting,) = parked(conn, two, 1)
    age(conn, waiting, "available_at", 1)
    assert waits(conn, waiting) == ["key"]
    age(conn, waiting, "available_at", -3_601)
    assert waits(conn, waiting) == ["time"]
    age(conn, waiting, "available_at", 3_600)
    assert waits(conn, waiting) == [None]
