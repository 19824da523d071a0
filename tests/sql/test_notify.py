"""Who is told of what: the queues in which something may be claimable, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from foreign import Foreign
from hands import Conn, Worker, Workers, enqueue, expire, heard, kinds, plain, row

from dataloader.queue import lifecycle


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


def test_rows_that_are_not_queued_tell_nobody(conn: Conn, ear: Worker) -> None:
    for status in ("running", "succeeded", "failed", "canceled", "lost"):
        plain(conn, status=status)
    assert ear.notes() == []


def test_d1_one_transaction_tells_a_queue_once(conn: Conn, ear: Worker) -> None:
    conn.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key)"
        " SELECT gen_random_uuid(), 'q' || i % 2, 't', i::text FROM generate_series(1, 1000) i"
    )
    assert sorted(ear.notes()) == ["q0", "q1"]


def test_an_update_of_its_time_tells_the_queue(conn: Conn, ear: Worker) -> None:
    job_id = plain(conn, in_sec=60)
    ear.notes()
    conn.execute("UPDATE dl_jobs SET available_at = now() WHERE job_id = %s", (job_id,))
    assert ear.notes() == ["q"]
    conn.execute("UPDATE dl_jobs SET available_at = now() + interval '1 h' WHERE job_id = %s", (job_id,))
    assert ear.notes() == ["q"]
    conn.execute("UPDATE dl_jobs SET priority = 1, progress = '{}' WHERE job_id = %s", (job_id,))
    assert ear.notes() == []


def test_a_requeue_by_an_operators_plain_update_tells_the_queue(conn: Conn, ear: Worker) -> None:
    plain(conn, status="failed", attempt=5)
    conn.execute("UPDATE dl_jobs SET status = 'queued', attempt = 0, available_at = now()")
    assert ear.notes() == ["q"]


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
    one, two = workers(), workers()
    plain(conn, queue="a", lock_key="k"), plain(conn, queue="a", lock_key="l")
    job, other = one.take("a"), two.take("a")
    for name, key in (("b", "k"), ("c", "k"), ("d", "l"), ("e", "free")):
        plain(conn, queue=name, lock_key=key)
    waiting = workers()
    for name in "bcd":
        assert waiting.claim(name).job is None
    ear.notes()
    one.finish(job)
    assert sorted(ear.notes()) == ["b", "c"]
    two.finish(other)
    assert ear.notes() == ["d"]


def test_a_claim_that_parks_what_waits_for_a_busy_key_tells_nobody(conn: Conn, workers: Workers, ear: Worker) -> None:
    """For none of it is free."""
    one, two = workers(), workers()
    plain(conn, queue="a", lock_key="k")
    one.take("a")
    waiting = [plain(conn, queue="b", lock_key="k") for _ in range(3)]
    ear.notes()
    assert two.claim("b").job is None
    assert all(row(conn, job_id)["blocked_on"] == "key" for job_id in waiting)
    assert ear.notes() == []


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
