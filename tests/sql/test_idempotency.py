"""One idempotency key, one job, under any concurrency."""

from __future__ import annotations

import pytest
from hands import Conn, Worker, Workers, kinds, started, value

from dataloader.queue.enqueue import NewJob
from dataloader.queue.enqueue import enqueue as add

NEW = NewJob("q", "t", "k", idempotency_key="once")


def test_the_same_key_is_the_same_job_whatever_else_it_says(conn: Conn, worker: Worker) -> None:
    first = add(conn, NEW)
    assert add(conn, NewJob("other", "x", "y", {"a": 1}, idempotency_key="once")) == first
    worker.finish(worker.take())
    assert add(conn, NEW) == (first[0], "succeeded")
    assert kinds(conn, first[0]) == ["queued", "picked", "done"]


@pytest.mark.parametrize("commits", [True, False])
def test_j1_a_twin_under_way_is_waited_for(conn: Conn, workers: Workers, commits: bool) -> None:
    one, two = workers(), workers()
    with one.conn.transaction():
        first = add(one.conn, NEW)
        with started(lambda: add(two.conn, NEW), two.pid, conn) as twin:
            one.conn.execute("COMMIT; BEGIN" if commits else "ROLLBACK; BEGIN")
            second = twin.result()
    assert (second == first) == commits
    assert value(conn, "SELECT count(*) FROM dl_jobs") == 1
    assert value(conn, "SELECT count(*) FROM dl_job_events") == 1


def test_a_key_is_free_again_when_its_job_is_removed(conn: Conn) -> None:
    first = add(conn, NEW)
    conn.execute("DELETE FROM dl_jobs")
    assert add(conn, NEW) != first
