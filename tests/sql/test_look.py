"""A keeper looks what a claim may find before it wakes workers; test_model looks before each of its claims."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from hands import Worker, enqueue, value

from dataloader.queue import db, lifecycle
from dataloader.queue.lifecycle import Look


def test_a_look_counts_ready_jobs_up_to_a_bound_and_none_of_other_queues(conn: db.Connection) -> None:
    for number in range(5):
        enqueue(conn, lock_key=f"k{number}")
    enqueue(conn, queue="other")
    assert lifecycle.look(conn, ["q"], 10) == Look(5, None)
    assert lifecycle.look(conn, ["q"], 3) == Look(3, None)
    assert lifecycle.look(conn, ["q", "other"], 3) == Look(4, None)
    assert lifecycle.look(conn, ["nobody's"], 3) == Look(0, None)


def test_a_look_tells_when_the_next_job_is_due_and_counts_one_that_is(conn: db.Connection) -> None:
    now = value(conn, "SELECT now()")
    enqueue(conn, queue="other", available_at=now + timedelta(minutes=5))
    for hours in (2, 1):
        enqueue(conn, lock_key=f"k{hours}", available_at=now + timedelta(hours=hours))
    assert lifecycle.look(conn, ["q"], 10) == Look(0, pytest.approx(3_600, abs=60))
    conn.execute("UPDATE dl_jobs SET available_at = now() WHERE lock_key = 'k1'")
    assert lifecycle.look(conn, ["q"], 10).ready == 1


def test_a_job_that_is_due_never_is_looked_for_in_a_year(conn: db.Connection) -> None:
    job_id = enqueue(conn)
    conn.execute("UPDATE dl_jobs SET available_at = 'infinity' WHERE job_id = %s", (job_id,))
    assert lifecycle.look(conn, ["q"], 10) == Look(0, pytest.approx(365 * 86_400, rel=0.01))


def test_a_paused_queue_has_nothing_to_claim_whatever_is_in_it(conn: db.Connection) -> None:
    enqueue(conn)
    enqueue(conn, queue="other")
    conn.execute("INSERT INTO dl_queues (queue, paused_at) VALUES ('q', now())")
    assert lifecycle.look(conn, ["q"], 10) == Look(0, None)
    assert lifecycle.look(conn, ["q", "other"], 10) == Look(1, None)


def test_rows_that_wait_for_a_key_do_not_count_and_a_key_to_be_set_free_does(
    conn: db.Connection, workers: Callable[[], Worker]
) -> None:
    worker, other = workers(), workers()
    for _ in range(2):
        enqueue(conn, lock_key="k")
    worker.take()
    assert lifecycle.look(conn, ["q"], 10).ready == 1
    assert other.claim().job is None
    assert lifecycle.look(conn, ["q"], 10) == Look(0, None), "the claim has parked it"
    conn.execute("INSERT INTO dl_freed SELECT hashtext('k'), now()")
    assert lifecycle.look(conn, ["q"], 10) == Look(1, None)
