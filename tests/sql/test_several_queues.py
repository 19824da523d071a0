"""One claim over several queues: one round trip, the jobs of one queue, and no queue spoils another's claim."""

from uuid import UUID

import pytest
from hands import BACKOFF_SEC, Conn, Worker, Workers, enqueue, ids, locked, plain, quietly, row, state, value

from dataloader.queue import lifecycle, operations
from dataloader.queue.lifecycle import Head, Step


def claim(worker: Worker, *queues: str, most: int = 10, by_lag: bool = False, head: Head = Head()) -> Step:  # noqa: B008
    return lifecycle.step(worker.session, list(queues), BACKOFF_SEC, most, (), head, by_lag)


def due(conn: Conn, queue: str, since_sec: float) -> UUID:
    return plain(conn, queue=queue, made_sec=since_sec, in_sec=since_sec)


def test_the_jobs_are_those_of_the_first_queue_that_has_some(conn: Conn, workers: Workers) -> None:
    """A paused queue and those whose jobs wait are passed over."""
    worker = workers()
    plain(conn, queue="busy", lock_key="k", priority=1)
    assert workers().take("busy")
    plain(conn, queue="paused"), plain(conn, queue="later", in_sec=60), plain(conn, queue="busy", lock_key="k")
    operations.pause(conn, "paused", "test")
    late, first, second = plain(conn, queue="c"), plain(conn, queue="b"), plain(conn, queue="b", priority=101)
    found = claim(worker, "empty", "paused", "later", "busy", "b", "c")
    assert (ids(found), {job.queue for job in found.jobs}) == ([first, second], {"b"})
    assert state(conn, late) == ("queued", 0)


def test_where_none_has_a_job_the_next_one_of_all_says_when(conn: Conn, worker: Worker) -> None:
    plain(conn, queue="a", in_sec=60), plain(conn, queue="b", in_sec=20), plain(conn, queue="paused", in_sec=5)
    operations.pause(conn, "paused", "test")
    found = claim(worker, "a", "b", "paused", "empty")
    assert found.jobs == []
    assert found.due_in is not None
    assert 15 < found.due_in <= 20


@pytest.mark.parametrize("by_lag", [True, False])
def test_by_lag_the_queue_comes_first_whose_job_has_waited_longest(conn: Conn, worker: Worker, by_lag: bool) -> None:
    """Not the one whose job is the oldest: that became due later. Its time has come, and no claim made it ready yet."""
    waits = plain(conn, queue="b", in_sec=60)  # as a retry, whose queue would else starve beside one never empty
    with quietly(conn):
        conn.execute("UPDATE dl_jobs SET available_at = now() - interval '1 min'")
    due(conn, "a", -10)
    plain(conn, queue="c", made_sec=-100, in_sec=-5)
    assert row(conn, waits)["blocked_on"] == "time"
    found = claim(worker, "a", "b", "c", by_lag=by_lag)
    assert (ids(found) == [waits]) is by_lag


def test_by_lag_a_paused_queue_is_the_last(conn: Conn) -> None:
    """Though its job waits longest: else no head of another queue would count while it is paused."""
    due(conn, "b", -50), due(conn, "a", -10)
    operations.pause(conn, "b", "test")
    assert value(conn, "SELECT dl_by_lag('{b,a}')") == ["a", "b"]


@pytest.mark.parametrize("is_first", [True, False])
def test_by_lag_a_head_counts_where_its_queue_is_the_first_one(conn: Conn, worker: Worker, is_first: bool) -> None:
    early, late = plain(conn, queue="a", priority=5), plain(conn, queue="a", priority=60)
    other = due(conn, "b", 10 if is_first else -50)
    with locked(conn, other):
        found = claim(worker, "a", "b", by_lag=True, head=Head(50))
    assert ids(found) == ([late] if is_first else [early, late])


@pytest.mark.parametrize("by_lag", [True, False])
def test_a_head_is_not_that_of_the_queue_in_its_place(conn: Conn, worker: Worker, by_lag: bool) -> None:
    """By lag another queue is the first one; else the first one is paused."""
    early, late = plain(conn, queue="b", priority=5), plain(conn, queue="b", priority=60)
    conn.execute("UPDATE dl_jobs SET created_at = now() - interval '1 min', available_at = now() - interval '1 min'")
    plain(conn, queue="a", priority=60)
    if not by_lag:
        operations.pause(conn, "a", "test")
    assert ids(claim(worker, "a", "b", by_lag=by_lag, head=Head(50))) == [early, late]


def test_the_batch_and_the_order_are_those_of_the_jobs_queue(conn: Conn, worker: Worker) -> None:
    operations.set_order(conn, "a", "test", ordered=True, merge=True, batch=7)
    enqueue(conn, queue="a", lock_key="k", available_at=None)
    conn.execute("UPDATE dl_jobs SET available_at = now() + interval '1 min', blocked_on = 'time'")
    plainly = plain(conn, queue="b", lock_key="k2", priority=2), plain(conn, queue="b", lock_key="k2", priority=3)
    found = claim(worker, "a", "b")
    assert (ids(found), found.batch) == ([plainly[0]], None)
