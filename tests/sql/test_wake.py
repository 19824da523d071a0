"""Rows of the future become claimable when their time has come, by the claim or by the reaper."""

from __future__ import annotations

from hands import Conn, Worker, Workers, plain, quietly, row, value

from dataloader.queue import lifecycle


def come_due(conn: Conn) -> None:
    """Let the time of every waiting row come, as the clock does: without a word to any trigger."""
    with quietly(conn):
        conn.execute("UPDATE dl_jobs SET available_at = now() - interval '1 s' WHERE blocked_on = 'time'")


def test_due_rows_of_every_queue_wake_and_their_sleepers_are_told_once(conn: Conn, worker: Worker) -> None:
    for name in ("a", "a", "b", "c"):
        plain(conn, queue=name, in_sec=60)
    come_due(conn)
    later = plain(conn, queue="c", in_sec=60)
    worker.notes()
    assert lifecycle.wake(conn, 100) == 4
    assert sorted(worker.notes()) == ["a", "b", "c"]
    assert row(conn, later)["blocked_on"] == "time"
    assert value(conn, "SELECT count(*) FROM dl_jobs WHERE blocked_on IS NULL") == 4
    assert lifecycle.wake(conn, 100) == 0
    assert worker.notes() == []


def test_rows_whose_time_comes_at_one_instant_wake_in_the_order_of_the_claim(conn: Conn) -> None:
    """A claim wakes some at a time; whatever woke first would start first."""
    with conn.transaction():
        last, second, first = (plain(conn, in_sec=60, priority=n, made_sec=s) for n, s in ((2, 0), (1, 0), (1, -5)))
    with quietly(conn):
        conn.execute("UPDATE dl_jobs SET available_at = now() - interval '1 s'")
    for woken in (first, second, last):
        assert row(conn, woken)["blocked_on"] == "time"
        assert lifecycle.wake(conn, 1) == 1
        assert row(conn, woken)["blocked_on"] is None


def test_each_queue_wakes_up_to_the_limit_the_oldest_first(conn: Conn) -> None:
    for name in ("a", "b"):
        for number in range(5):
            plain(conn, queue=name, in_sec=60, priority=number)
    with quietly(conn):
        conn.execute("UPDATE dl_jobs SET available_at = now() - make_interval(secs => priority + 1)")
    assert lifecycle.wake(conn, 3) == 6
    awake = conn.execute("SELECT priority FROM dl_jobs WHERE blocked_on IS NULL ORDER BY priority").fetchall()
    assert [priority for (priority,) in awake] == [2, 2, 3, 3, 4, 4]
    assert lifecycle.wake(conn, 3) == 4


def test_a_row_that_somebody_holds_is_woken_another_time(conn: Conn, worker: Worker) -> None:
    held, free = plain(conn, in_sec=60), plain(conn, in_sec=60)
    come_due(conn)
    with conn.transaction():
        conn.execute("SELECT FROM dl_jobs WHERE job_id = %s FOR UPDATE", (held,))
        assert lifecycle.wake(worker.conn, 100) == 1
    assert row(conn, free)["blocked_on"] is None
    assert lifecycle.wake(worker.conn, 100) == 1


def test_a_claim_comes_back_for_due_rows_that_others_have_locked(conn: Conn, worker: Worker) -> None:
    """Nobody notifies when they let go of them."""
    late = plain(conn, in_sec=60)
    come_due(conn)
    with conn.transaction():
        conn.execute("SELECT FROM dl_jobs FOR UPDATE")
        claim = worker.claim()
        assert (claim.job, claim.due_in) == (None, 1)
    assert worker.take().job_id == late


def test_a_claim_that_wakes_rows_tells_the_other_sleepers(conn: Conn, workers: Workers) -> None:
    one, two = workers(), workers()
    plain(conn, in_sec=60), plain(conn, in_sec=60)
    come_due(conn)
    two.notes()
    assert one.take()
    assert two.notes() == ["q"]
    assert two.take()


def test_a_claim_that_wakes_as_many_as_it_may_looks_again(conn: Conn, workers: Workers) -> None:
    one, two = workers(), workers()
    plain(conn, queue="a", lock_key="k")
    one.take("a")
    for _ in range(101):
        plain(conn, lock_key="k", in_sec=60)
    come_due(conn)
    assert two.claim().look_again
    assert not two.claim().look_again


def test_d7_a_row_that_comes_earlier_than_all_others_is_heard_of(conn: Conn, worker: Worker) -> None:
    plain(conn, in_sec=600)
    assert (worker.claim().due_in or 0) > 500
    worker.notes()
    plain(conn, in_sec=60)
    assert worker.notes() == ["q"]
    assert (worker.claim().due_in or 0) < 61


def test_final_rows_with_a_future_time_are_never_woken(conn: Conn) -> None:
    for status in ("running", "succeeded", "failed", "canceled", "lost"):
        job_id = plain(conn, in_sec=60, status=status)
        assert row(conn, job_id)["blocked_on"] is None
    assert lifecycle.wake(conn, 100) == 0
