"""Jobs that ended long ago are deleted with their journal, in small batches, beside everybody's work (fault C7)."""

from uuid import UUID

import pytest
from foreign import Foreign
from hands import Conn, Worker, age, buffers, enqueue, journal, kinds, many, plain, quietly, row, state

from dataloader.queue import db, lifecycle
from dataloader.queue.job import FINAL

DAY = 86_400.0


def ended(conn: Conn, days_ago: float, status: str = "succeeded") -> UUID:
    """A job with a journal that ended so long ago."""
    job_id = enqueue(conn)
    conn.execute("UPDATE dl_jobs SET status = %s, finished_at = now() WHERE job_id = %s", (status, job_id))
    age(conn, job_id, "finished_at", days_ago * DAY)
    return job_id


def many_ended(conn: Conn, number: int, days_ago: float, events: int = 1) -> None:
    """Jobs that ended within a second, each with so many rows in the journal."""
    many(conn, number, "k%s")
    with quietly(conn):
        conn.execute(
            "UPDATE dl_jobs SET status = 'succeeded', finished_at = now() - make_interval(days => 0, secs => %s)"
            " + (created_at - now()) / 3600 WHERE status = 'queued'",
            (days_ago * DAY,),
        )
        conn.execute(
            "INSERT INTO dl_job_events (job_id, queue, kind)"
            " SELECT job_id, queue, 'done' FROM dl_jobs, generate_series(1, %s) WHERE finished_at IS NOT NULL",
            (events,),
        )


def prune(conn: Conn, days: float = 7, limit: int = 500, since: str = "-infinity") -> int:
    return lifecycle.prune(conn, days * DAY, since, limit)[0]


def left(conn: Conn) -> set[UUID]:
    return {job_id for (job_id,) in conn.execute("SELECT job_id FROM dl_jobs")}


def test_c7_what_ended_long_ago_goes_with_its_journal(conn: Conn) -> None:
    old, young = ([ended(conn, days, status) for status in FINAL] for days in (7.01, 6.99))
    assert all(kinds(conn, job_id) for job_id in old)
    assert prune(conn) == len(FINAL)
    assert left(conn) == set(young)
    assert {job_id for job_id in [*old, *young] if journal(conn, job_id)} == set(young)


def test_c7_an_end_that_another_service_gave_no_time_is_found_too(conn: Conn, foreign: Foreign, worker: Worker) -> None:
    """By an UPDATE or in a row that is inserted as finished. A time that the service gives stands."""
    long_ago = "2020-02-02 00:00+00"
    ours = worker.start_new().job_id  # whose claim has to be taken off the row
    conn.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = %s", (long_ago,))
    assert (row(conn, ours)["claimed_by"], row(conn, ours)["finished_at"].year) == (None, 2020)
    updated = plain(conn)
    assert foreign.claim()
    foreign.conn.execute("UPDATE dl_jobs SET status = 'succeeded' WHERE job_id = %s", (updated,))
    inserted = plain(conn, status="lost")
    plain(conn, status="failed", finished_at=long_ago)
    assert prune(conn, days=0.0001) == 2
    assert left(conn) == {updated, inserted}
    for job_id in (updated, inserted):
        age(conn, job_id, "finished_at", 30 * DAY)
    assert prune(conn) == 2


def test_c7_the_living_keep_their_journal_however_old(conn: Conn, worker: Worker) -> None:
    """Also where a plain service has left the end of an earlier run in the row, and a job that is being put back."""
    running = enqueue(conn)
    worker.take()
    queued, future, old = enqueue(conn), plain(conn, in_sec=DAY), ended(conn, 30)
    for column in ("created_at", "started_at", "finished_at"):
        conn.execute(f"UPDATE dl_jobs SET {column} = now() - interval '1 year'")
    with worker.conn.transaction():
        worker.conn.execute("UPDATE dl_jobs SET status = 'queued', available_at = now() WHERE job_id = %s", (old,))
        assert prune(conn) == 0
    assert prune(conn) == 0
    assert left(conn) == {running, queued, future, old}
    assert kinds(conn, running) == ["queued", "picked"]
    assert (state(conn, old), kinds(conn, old)[-1]) == (("queued", 0), "requeue")
    assert {worker.take().job_id, worker.take().job_id} == {queued, old}


def test_c7_batches_are_bounded_and_go_on_where_the_last_one_was(conn: Conn) -> None:
    oldest, middle, newest = (ended(conn, days) for days in (30, 20, 10))
    young = ended(conn, 1)
    found, since = lifecycle.prune(conn, 7 * DAY, "-infinity", 2)
    assert (found, left(conn)) == (2, {newest, young})
    late = ended(conn, 40)
    assert lifecycle.prune(conn, 7 * DAY, since, 2)[0] == 1
    assert left(conn) == {late, young}
    found, since = lifecycle.prune(conn, 7 * DAY, "-infinity", 2)
    assert (found, lifecycle.prune(conn, 7 * DAY, since, 2)) == (1, (0, since))
    assert {oldest, middle}.isdisjoint(left(conn))


@pytest.mark.parametrize("end", ["-infinity", "4000-01-01 BC"])
def test_c7_an_end_that_python_cannot_read_is_no_obstacle(conn: Conn, end: str) -> None:
    job_id = ended(conn, 30)
    ended(conn, 10)
    conn.execute("UPDATE dl_jobs SET finished_at = %s WHERE job_id = %s", (end, job_id))
    found, since = lifecycle.prune(conn, 7 * DAY, "-infinity", 1)
    assert (found, lifecycle.prune(conn, 7 * DAY, since, 1)[0]) == (1, 1)
    assert left(conn) == set()


@pytest.mark.parametrize("strength", ["KEY SHARE", "UPDATE"])
def test_c7_a_row_that_somebody_holds_is_skipped_and_taken_later(conn: Conn, worker: Worker, strength: str) -> None:
    held, other = ended(conn, 30), ended(conn, 20)
    with worker.conn.transaction():
        worker.conn.execute(f"SELECT FROM dl_jobs WHERE job_id = %s FOR {strength}", (held,))
        assert prune(conn) == 1
        assert left(conn) == {held}
        assert kinds(conn, other) == []
    assert prune(conn) == 1


def test_c7_nobody_waits_for_a_batch(conn: Conn, worker: Worker) -> None:
    """Producers, claims, beats and ends go on beside an uncommitted batch of the same queue."""
    old = [ended(conn, 30) for _ in range(5)]
    mine = enqueue(conn)
    worker.conn.execute("SET lock_timeout = '2s'")
    with conn.transaction():
        assert prune(conn) == 5
        job = worker.take()
        assert (job.job_id, lifecycle.beat(worker.conn, [job], None, True)) == (mine, False)
        added = enqueue(worker.conn)
        assert worker.finish(job) == "succeeded"
        assert worker.take().job_id == added
        assert prune(worker.conn) == 0
    assert left(conn).isdisjoint(old)


@pytest.mark.parametrize("statistics", ["none", "of dead rows"])
def test_c7_a_batch_costs_the_same_whatever_the_table_and_its_statistics(own_db: str, statistics: str) -> None:
    """In a database of its own: statistics of a journal of one job, from another test, would say to read it whole.

    The planner takes a table whose rows were all dead for empty, though it has pages.
    """
    call = "SELECT * FROM dl_prune(%s, '-infinity', %s)"
    with db.connect(own_db, name="test", schema="public") as conn:
        conn.execute("ALTER TABLE dl_job_events SET (autovacuum_enabled = off)")
        if statistics == "of dead rows":
            many_ended(conn, 10, days_ago=1)
            conn.execute("DELETE FROM dl_jobs")
            conn.execute("ANALYZE dl_job_events")
        many_ended(conn, 3_000, days_ago=1, events=3)
        assert least_buffers(conn, call) < 30
        many_ended(conn, 100, days_ago=30)
        assert least_buffers(conn, call) < 10 * 30


def least_buffers(conn: Conn, call: str) -> int:
    """Of three calls, each undone: the first plans, and another does when autovacuum has just been at the table."""

    def one() -> int:
        with conn.transaction(force_rollback=True):
            return buffers(conn, call, 7 * DAY, 10)

    return min(one() for _ in range(3))
