"""Who is told of what: the queues in which something may be claimable, now or when its time comes, and nobody else."""

import select
import socket
from collections.abc import Iterator

import psycopg
import pytest
from foreign import Foreign
from hands import Conn, Worker, Workers, enqueue, expire, heard, kinds, locked, many, plain, quietly, row, value
from patience import PATIENCE, until

from dataloader.queue import db, lifecycle


@pytest.fixture
def ear(dsn: str) -> Iterator[Worker]:
    """A session that only listens."""
    ear = Worker(dsn, "ear")
    yield ear
    ear.conn.close()


def test_a_new_row_tells_its_queue_now_or_later(conn: Conn, ear: Worker) -> None:
    plain(conn, queue="a")
    plain(conn, queue="b", in_sec=60)
    enqueue(conn, queue="c")
    assert ear.notes() == ["a", "b", "c"]


@pytest.mark.parametrize(
    "journaled", [0, 1, 3], ids=["another service", "code of before 0021", "copy of a row that ran"]
)
def test_an_insert_that_leaves_it_to_the_triggers_is_placed_and_told(conn: Conn, ear: Worker, journaled: int) -> None:
    job_id = plain(conn, in_sec=60, journaled=journaled)
    assert ear.notes() == ["q"]
    assert row(conn, job_id)["blocked_on"] == "time"
    assert kinds(conn, job_id) == (["queued"] if journaled == 0 else [])


def test_rows_that_are_not_queued_tell_nobody_and_are_never_woken(conn: Conn, ear: Worker) -> None:
    for status in ("running", "succeeded", "failed", "canceled", "lost"):
        job_id = plain(conn, in_sec=60, status=status)
        assert row(conn, job_id)["blocked_on"] is None
    assert (ear.notes(), lifecycle.wake(conn, 100)) == ([], 0)


def test_d1_one_transaction_tells_a_queue_once(conn: Conn, ear: Worker) -> None:
    many(conn, 1_000, queue="'q' || i % 2")
    assert sorted(ear.notes()) == ["q0", "q1"]


def test_an_update_of_its_time_or_back_to_the_queue_tells_the_queue(conn: Conn, ear: Worker) -> None:
    plain(conn, in_sec=60)
    for change, told in (
        ("available_at = now()", ["q"]),
        ("available_at = now() + interval '1 h'", ["q"]),
        ("priority = 1, progress = '{}'", []),
        ("status = 'failed', attempt = 5", []),
        ("status = 'queued', attempt = 0, available_at = now()", ["q"]),  # an operator's plain UPDATE
    ):
        ear.notes()
        conn.execute(f"UPDATE dl_jobs SET {change}".encode())
        assert ear.notes() == told, change


def test_claim_beat_and_finish_tell_nobody_when_nobody_waits(conn: Conn, worker: Worker, ear: Worker) -> None:
    for verb in ("succeed", "fail", "cancel"):
        plain(conn)
        ear.notes()
        job = worker.take()
        lifecycle.beat(worker.conn, [job], '{"p": 1}', True)
        lifecycle.keep(worker.conn, [job.job_id], [job.attempt], job.claimed_by)
        worker.finish(job, verb)
        assert ear.notes() == []


def test_jobs_that_come_back_tell_their_queue(conn: Conn, worker: Worker, ear: Worker) -> None:
    plain(conn, queue="a")
    for verb in ("retry", "hand_back"):
        ear.notes()
        worker.finish(worker.take("a"), verb)
        assert ear.notes() == ["a"]
    expire(conn, worker.take("a").job_id)
    assert lifecycle.reap(conn)
    assert ear.notes() == ["a"]


def test_a_finish_tells_only_the_queues_that_wait_for_its_key(conn: Conn, workers: Workers, ear: Worker) -> None:
    """The claim that has parked their rows told nobody, for none of them was free."""
    one, two, waiting = workers(), workers(), workers()
    plain(conn, queue="a", lock_key="k"), plain(conn, queue="a", lock_key="l")
    job, other = one.take("a"), two.take("a")
    for name, key in (("b", "k"), ("b", "k"), ("c", "k"), ("d", "l"), ("e", "free")):
        plain(conn, queue=name, lock_key=key)
    ear.notes()
    for name in "bcd":
        assert waiting.claim(name).job is None
    assert value(conn, "SELECT array_agg(queue ORDER BY queue) FROM dl_jobs WHERE blocked_on = 'key'") == [*"bbcd"]
    assert ear.notes() == []
    one.finish(job)
    assert sorted(ear.notes()) == ["b", "c"]
    two.finish(other)
    assert ear.notes() == ["d"]


def test_a_foreign_claims_refusal_tells_its_queue(conn: Conn, dsn: str, ear: Worker) -> None:
    plain(conn, lock_key="k")
    conn.execute("SELECT pg_advisory_lock(hashtext('k'))")
    other = Foreign(dsn)
    ear.notes()
    assert other.claim() is None
    other.conn.close()
    assert ear.notes() == ["q"]


def test_d11_the_longest_queue_name_that_can_be_told(conn: Conn, ear: Worker) -> None:
    """A notification has room for 7,999 octets, and the table takes no name that is near to them."""
    name = "q" * 512
    plain(conn, queue=name)
    assert ear.notes() == [name]
    with pytest.raises(psycopg.errors.CheckViolation):
        plain(conn, queue=name + "q")


def test_a_cancellation_of_a_queued_job_tells_no_worker(conn: Conn, ear: Worker) -> None:
    job_id = enqueue(conn)
    ear.notes()
    lifecycle.request_cancel(conn, job_id)
    assert heard(ear.conn, "dl_cancel") == []
    assert ear.notes() == []


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
    with locked(conn, held):
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


def test_a_claim_that_wakes_rows_tells_the_other_sleepers(conn: Conn, one: Worker, two: Worker) -> None:
    plain(conn, in_sec=60), plain(conn, in_sec=60)
    come_due(conn)
    two.notes()
    assert one.take()
    assert two.notes() == ["q"]
    assert two.take()


def test_a_claim_that_wakes_as_many_as_it_may_looks_again(conn: Conn, one: Worker, two: Worker) -> None:
    one.start_new(plain, queue="a", lock_key="k")
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


def test_a_notification_in_the_packet_of_an_answer_is_heard(dsn: str) -> None:
    """libpq reads both at once, so the socket is empty afterwards: a busy client slept until its poll."""
    with (
        db.connect(dsn, name="ear", schema="public") as ear,
        db.connect(dsn, name="mouth", schema="public") as mouth,
        socket.socket(fileno=socket.dup(ear.fileno())) as unread,
    ):
        ear.execute("LISTEN dl_jobs")
        ear.pgconn.send_query(b"SELECT 'the answer'")
        until(lambda: b"the answer" in peeked(unread), "the answer")
        mouth.execute("NOTIFY dl_jobs, 'word'")
        until(lambda: b"word" in peeked(unread), "the notification")
        while ear.pgconn.get_result():
            pass
        assert [note.payload for note in ear.notifies(timeout=0)] == ["word"]


def peeked(unread: socket.socket) -> bytes:
    """What has come and was not read yet."""
    select.select([unread], [], [], PATIENCE)
    return unread.recv(65_536, socket.MSG_PEEK)
