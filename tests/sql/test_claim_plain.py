"""The short claim of a plain queue: it starts what needs nothing else, and leaves the rest to dl_step."""

from typing import Any

import psycopg
import pytest
from hands import DONE, Conn, Worker, enqueue, ids, kinds, plain, row, step, value, waits

from dataloader.queue import lifecycle, operations
from dataloader.queue.job import Finish
from dataloader.queue.lifecycle import Ended, Step

SHORT = (
    "SELECT job_id FROM dl_step_plain('q', 'host:1:boot', now(), %s, NULL, NULL, NULL, NULL) WHERE job_id IS NOT NULL"
)
LOCKS = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = %s"
FREE = "SELECT pg_try_advisory_lock(hashtext(%s))"


def short(worker: Worker, most: int = 10) -> list[str]:
    return [job_id for (job_id,) in worker.conn.execute(SHORT, (most,))]


def test_it_starts_the_best_job_of_each_key_and_holds_these_keys_alone(conn: Conn, worker: Worker) -> None:
    """Each key is locked once, so one unlock frees it: an end between two claims does no more."""
    first = plain(conn, lock_key="a", priority=2)
    plain(conn, lock_key="a", priority=3), plain(conn, lock_key="a", priority=4)
    best = plain(conn, lock_key="b", priority=1)
    plain(conn, lock_key="c", queue="other", priority=0)
    assert short(worker) == [best, first]
    assert value(conn, LOCKS, worker.pid) == 2
    worker.conn.execute("SELECT pg_advisory_unlock(hashtext('a'))")
    assert value(conn, FREE, "a")


def test_it_starts_no_more_than_it_is_asked_for_and_passes_keys_that_others_have(conn: Conn, worker: Worker) -> None:
    for _ in range(10):
        plain(conn, lock_key="held")
    plain(conn, queue="another", priority=0)
    first, second = plain(conn), plain(conn)
    conn.execute("SELECT pg_advisory_lock(hashtext('held'))")
    assert short(worker, 1) == [first]
    assert value(conn, LOCKS, worker.pid) == 1
    assert short(worker, 1) == [second]


def test_of_few_keys_with_more_rows_a_sixteenth_is_left_to_others(conn: Conn, worker: Worker) -> None:
    for number in range(32):
        plain(conn, lock_key=f"k{number % 16}")
    assert len(short(worker, 100)) == 15
    assert value(conn, FREE, "k15")


@pytest.mark.parametrize(
    "odd",
    [{"cancel_requested": True}, {"attempt": 5}, {"limits": ["l"]}, {"in_sec": 60, "journaled": 2}],
    ids=["canceled", "spent", "limited", "early"],
)
def test_it_starts_nothing_behind_a_row_that_asks_more(conn: Conn, worker: Worker, odd: dict[str, object]) -> None:
    first = plain(conn)
    asks = plain(conn, **odd)
    plain(conn, lock_key="behind")
    assert short(worker) == [first]
    assert value(conn, FREE, "behind")
    assert waits(conn, asks) == [None]


def test_a_parked_row_with_limits_goes_before_a_later_one_of_its_key(conn: Conn, worker: Worker) -> None:
    plain(conn, lock_key="a", blocked_on="key", limits=["l"], made_sec=-60, journaled=2)
    plain(conn, lock_key="a")
    assert short(worker) == []
    assert value(conn, FREE, "a")


@pytest.mark.parametrize("why", ["ordered", "paused", "due", "freed"])
def test_it_starts_nothing_where_something_has_to_be_moved_before(conn: Conn, worker: Worker, why: str) -> None:
    plain(conn)
    if why == "ordered":
        operations.set_order(conn, "q", "test", ordered=True)
    elif why == "paused":
        operations.pause(conn, "q", "test")
    elif why == "due":
        conn.execute("UPDATE dl_jobs SET blocked_on = 'time' WHERE job_id = %s", (plain(conn),))
    else:
        conn.execute("INSERT INTO dl_freed (key_hash, since) VALUES (1, now() - interval '1.1 s')")
    assert short(worker) == []
    assert value(conn, LOCKS, worker.pid) == 0


def test_a_success_clears_the_row_is_journaled_once_and_frees_its_key(conn: Conn, worker: Worker) -> None:
    job = worker.start_new()
    conn.execute("UPDATE dl_jobs SET error = 'of an earlier run', error_group = 'of an earlier run'")
    assert lifecycle._step_plain(worker.session, "none", 1, [Ended(job, DONE)])[0].ended == {job.job_id: "succeeded"}
    found = row(conn, job.job_id)
    assert [found[name] for name in ("lease_expires_at", "claimed_by", "error", "error_group")] == [None] * 4
    assert kinds(conn, job.job_id) == ["queued", "picked", "done"]
    assert found["journaled"] == 4, "the trigger looks again, and that costs"
    assert value(conn, LOCKS, worker.pid) == 0


def test_ends_that_are_no_successes_are_written_before_anything_starts(conn: Conn, worker: Worker) -> None:
    enqueue(conn), enqueue(conn)
    done, canceled = step(worker, 2).jobs
    enqueue(conn)
    lifecycle.request_cancels(conn, [canceled.job_id], False, "test")
    ends = [Ended(done, DONE), Ended(canceled, DONE)]
    found, left = lifecycle._step_plain(worker.session, "q", 5, ends)
    assert (found.jobs, found.ended, ids(end.job for end in left)) == (
        [],
        {done.job_id: "succeeded"},
        [canceled.job_id],
    )
    after = step(worker, 5, *left)
    assert (len(after.jobs), after.ended) == (1, {canceled.job_id: "canceled"})


def test_ends_that_a_short_claim_has_written_are_reported_though_the_long_one_fails(
    conn: Conn, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plain(conn)
    ends = [Ended(claimed, Finish("succeed")) for claimed in step(worker, 1).jobs]

    def fails(*_: Any) -> Step:
        raise psycopg.errors.DeadlockDetected

    monkeypatch.setattr(lifecycle, "_long_step", fails)
    after = lifecycle.step(worker.session, ["q"], 0.1, 1, ends)
    assert (after.ended, after.look_again) == ({job: "succeeded"}, True)
    with pytest.raises(psycopg.errors.DeadlockDetected):
        lifecycle.step(worker.session, ["q"], 0.1, 1)
