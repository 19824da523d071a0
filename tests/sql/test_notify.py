"""Notifications: they name the queues in which a job may be claimable, now or when its time comes, and no others."""

from collections.abc import Iterator

import psycopg
import pytest
from foreign import Foreign
from hands import Conn, Worker, enqueue, expire, kinds, locked, many, plain, quietly, row, value

from dataloader.queue import lifecycle


@pytest.fixture
def ear(dsn: str) -> Iterator[Worker]:
    """A session that only listens."""
    ear = Worker(dsn, "ear")
    yield ear
    ear.conn.close()


def test_a_new_row_tells_its_queue_now_or_later_unless_it_is_not_queued(conn: Conn, ear: Worker) -> None:
    for status in ("running", "succeeded", "failed", "canceled", "lost"):
        assert row(conn, plain(conn, in_sec=60, status=status))["blocked_on"] is None
    assert (ear.notes(), lifecycle.wake(conn, 100)) == ([], 0)
    plain(conn, queue="a"), plain(conn, queue="b", in_sec=60), enqueue(conn, queue="c")
    assert ear.notes() == ["a", "b", "c"]


@pytest.mark.parametrize(
    "journaled", [0, 1, 3], ids=["another service", "code of before 0021", "copy of a row that ran"]
)
def test_an_insert_that_leaves_it_to_the_triggers_is_placed_and_told(conn: Conn, ear: Worker, journaled: int) -> None:
    job_id = plain(conn, in_sec=60, journaled=journaled)
    assert ear.notes() == ["q"]
    assert row(conn, job_id)["blocked_on"] == "time"
    assert kinds(conn, job_id) == (["queued"] if journaled == 0 else [])


def test_d1_d11_one_transaction_tells_a_queue_once_also_one_of_the_longest_name(conn: Conn, ear: Worker) -> None:
    """A notification has room for 7,999 octets, and the table takes no name that is near to them."""
    many(conn, 1_000, queue="repeat('q', 511) || i % 2")
    assert sorted(ear.notes()) == ["q" * 511 + "0", "q" * 511 + "1"]
    with pytest.raises(psycopg.errors.CheckViolation):
        plain(conn, queue="q" * 513)


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


def test_a_run_tells_nobody_but_when_its_job_comes_back(conn: Conn, worker: Worker, ear: Worker) -> None:
    for verb, told in {"succeed": [], "fail": [], "cancel": [], "retry": ["q"], "hand_back": ["q"]}.items():
        conn.execute("DELETE FROM dl_jobs")
        plain(conn)
        ear.notes()
        job = worker.take()
        lifecycle.beat(worker.conn, [job], '{"p": 1}', True)
        lifecycle.keep(worker.conn, [job.job_id], [job.attempt], job.claimed_by)
        assert ear.notes() == []
        worker.finish(job, verb)
        assert ear.notes() == told, verb
    expire(conn, worker.take().job_id)
    assert lifecycle.reap(conn)
    assert ear.notes() == ["q"]


def test_a_foreign_claims_refusal_tells_its_queue(conn: Conn, dsn: str, ear: Worker) -> None:
    plain(conn, lock_key="k")
    conn.execute("SELECT pg_advisory_lock(hashtext('k'))")
    other = Foreign(dsn)
    ear.notes()
    assert other.claim() is None
    other.conn.close()
    assert ear.notes() == ["q"]


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


def test_each_queue_wakes_some_rows_by_their_times_and_those_of_one_time_in_the_order_of_the_claim(conn: Conn) -> None:
    """A row that woke first would start first."""
    with conn.transaction():
        third, second, first = (plain(conn, in_sec=60, priority=n, made_sec=s) for n, s in ((2, 0), (1, 0), (1, -5)))
        last = plain(conn, in_sec=61, priority=0)
    with quietly(conn):
        conn.execute("UPDATE dl_jobs SET available_at = available_at - interval '70 s'")
    for number, woken in enumerate((first, second, third, last)):
        elsewhere = plain(conn, queue=f"other {number}", in_sec=60)
        with quietly(conn):
            conn.execute("UPDATE dl_jobs SET available_at = now() WHERE job_id = %s", (elsewhere,))
        assert [row(conn, job_id)["blocked_on"] for job_id in (woken, elsewhere)] == ["time"] * 2
        assert lifecycle.wake(conn, 1) == 2
        assert [row(conn, job_id)["blocked_on"] for job_id in (woken, elsewhere)] == [None] * 2


def test_a_due_row_that_somebody_holds_is_woken_another_time_and_a_claim_comes_back(conn: Conn, worker: Worker) -> None:
    """The holder of a row sends no notification when it lets go of the row."""
    held, free = plain(conn, in_sec=60), plain(conn, in_sec=60)
    come_due(conn)
    with locked(conn, held):
        assert lifecycle.wake(worker.conn, 100) == 1
        assert worker.take().job_id == free
        claim = worker.claim()
        assert (claim.job, claim.due_in) == (None, 1)
    assert worker.take().job_id == held
