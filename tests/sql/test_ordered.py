"""Ordered queues: the jobs of a key start in the order of their scores, whatever happens to the ones before."""

from typing import Any
from uuid import UUID

import pytest
from hands import (
    DONE,
    Conn,
    Worker,
    Workers,
    end_all,
    enqueue,
    expire,
    ids,
    locked,
    many,
    plain,
    quietly,
    started,
    step,
    successor,
    until,
)
from readings import journal, keys_held, kinds, row, state, value, waits

import dataloader
from dataloader.queue import lifecycle, operations
from dataloader.queue.job import Finish, Job
from dataloader.queue.lifecycle import Ended


def order(conn: Conn, queue: str = "q", **settings: Any) -> None:
    """Let the queue be ordered, without a look at its rows."""
    columns = {"ordered": True} | settings
    conn.execute(
        f"INSERT INTO dl_queues (queue, {', '.join(columns)}) VALUES (%s{', %s' * len(columns)})",
        [queue, *columns.values()],
    )


@pytest.fixture
def ordered(conn: Conn) -> Conn:
    order(conn)
    return conn


@pytest.fixture
def merged(conn: Conn) -> Conn:
    order(conn, merge=True)
    return conn


def due(conn: Conn, *job_ids: UUID) -> None:
    """Let the time of waiting jobs come, as the clock would: no trigger takes note."""
    past = "UPDATE dl_jobs SET available_at = now() - interval '1 s' WHERE job_id = ANY (%s)"
    with quietly(conn):
        conn.execute(past, (list(job_ids),))


def test_a_job_of_an_ordered_queue_has_a_score_whoever_adds_it(ordered: Conn) -> None:
    """Its producer's, else its time of creation; a job of another queue has none."""
    given, ours, foreign = enqueue(ordered, score=2.5), enqueue(ordered), plain(ordered)
    by_sql, with_key = value(ordered, "SELECT dl_enqueue('q', 't', 'k')"), enqueue(ordered, idempotency_key="api")
    by_producers = [
        dataloader.enqueue(ordered, queue="q", task="t", lock_key="k", idempotency_key=key, schema="public")[0]
        for key in (None, "producer")
    ]
    created = {
        job_id: row(ordered, job_id)["created_at"].timestamp()
        for job_id in (ours, foreign, by_sql, with_key, *by_producers)
    }
    assert row(ordered, given)["score"] == row(ordered, plain(ordered, score=2.5))["score"] == 2.5
    assert row(ordered, plain(ordered, journaled=1))["score"] is not None  # as code of before 0021
    for job_id, at in created.items():
        assert row(ordered, job_id)["score"] == pytest.approx(at, abs=0.001)
    assert row(ordered, plain(ordered, queue="other"))["score"] is None
    assert row(ordered, enqueue(ordered, queue="other"))["score"] is None


def test_a_job_that_is_moved_gets_its_place_in_an_ordered_queue_and_none_in_another(conn: Conn) -> None:
    order(conn)
    order(conn, "plain", ordered=False)
    old, odd = plain(conn, queue="plain", lock_key="k", made_sec=-60), plain(conn, queue="plain", cancel_requested=True)
    assert row(conn, old)["score"] is None
    new = plain(conn, lock_key="k")
    conn.execute("UPDATE dl_jobs SET queue = 'q' WHERE job_id = %s", (old,))
    assert row(conn, old)["score"] < row(conn, new)["score"]
    other = plain(conn, queue="other", lock_key="k")
    conn.execute("UPDATE dl_jobs SET queue = 'plain' WHERE job_id = %s", (other,))
    conn.execute("SELECT dl_set_aside(ARRAY[%s::uuid])", (odd,))
    assert (row(conn, other)["score"], row(conn, odd)["status"], row(conn, odd)["score"]) == (None, "canceled", None)


def test_a_row_without_a_score_gets_it_by_the_claim(ordered: Conn, worker: Worker) -> None:
    """A transaction that began before the queue was ordered has left it."""
    late, old = plain(ordered, lock_key="k", made_sec=-10), plain(ordered, lock_key="k", made_sec=-20)
    with quietly(ordered):
        ordered.execute("UPDATE dl_jobs SET score = NULL")
    assert ids(step(worker)) == [old]
    assert row(ordered, late)["score"] is not None


@pytest.mark.parametrize("merge", [False, True])
def test_the_order_of_a_key_has_nothing_of_another_queue_or_key(conn: Conn, worker: Worker, merge: bool) -> None:
    for queue in ("other", "q"):
        order(conn, queue, merge=merge)
    own = [enqueue(conn, lock_key="k", score=score) for score in (2, 3)]
    for queue, key in (("other", "k"), ("q", "a")):
        _, tried = (enqueue(conn, queue=queue, lock_key=key, score=1, priority=200) for _ in range(2))
        later = "1 hour" if queue == "other" else "0"
        conn.execute(
            "UPDATE dl_jobs SET attempt = 1, available_at = now() + %s::interval WHERE job_id = %s", (later, tried)
        )
    conn.execute("UPDATE dl_jobs SET attempt = 1 WHERE job_id = %s", (own[1],))
    assert ids(step(worker, 1)) == (own if merge else own[:1])


def behind_a_retry(conn: Conn, worker: Worker) -> tuple[UUID, UUID]:
    """Two jobs of a key; the first waits for its retry."""
    jobs = enqueue(conn, lock_key="k"), enqueue(conn, lock_key="k")
    end_all(worker, step(worker).jobs, "retry", error="e", delay_sec=600.0)
    return jobs


@pytest.mark.parametrize("leave", ["cancel", "delete", "kill", "move", "foreign end"])
def test_a_waiting_head_that_leaves_makes_way_for_the_next(ordered: Conn, worker: Worker, leave: str) -> None:
    head, second = behind_a_retry(ordered, worker)
    assert (step(worker).jobs, waits(ordered, second)) == ([], ["key"])
    worker.notes()
    if leave in ("cancel", "delete"):
        operations.change(ordered, leave, [head], "test")
    elif leave == "kill":
        operations.change_queue(ordered, "kill-retries", "q", "test")
    elif leave == "move":
        ordered.execute("UPDATE dl_jobs SET queue = 'other' WHERE job_id = %s", (head,))
    else:
        ordered.execute("UPDATE dl_jobs SET status = 'succeeded' WHERE job_id = %s", (head,))
    assert "q" in worker.notes()
    assert ids(step(worker)) == [second]


@pytest.mark.parametrize("leave", ["cancel", "delete"])
def test_a_leaving_head_waits_for_the_claim_that_parks_behind_it(ordered: Conn, workers: Workers, leave: str) -> None:
    """Else it would look for parked rows before they are there."""
    one, operator = workers(), workers()
    head, second = behind_a_retry(ordered, one)
    with one.conn.transaction():
        assert step(one).jobs == []
        with started(lambda: operations.change(operator.conn, leave, [head], "test"), operator.pid, ordered) as left:
            one.conn.execute("COMMIT; BEGIN")
            left.result()
    assert waits(ordered, second) == [None]


def test_the_end_of_a_run_makes_way_for_both_keys_of_its_hash(ordered: Conn, one: Worker, two: Worker) -> None:
    key, twin = twins(ordered)
    _, second, *others = [enqueue(ordered, lock_key=name) for name in (key, key, twin, twin)]
    run = step(one).jobs
    assert (step(two).jobs, waits(ordered, second, *others)) == ([], ["key"] * 3)
    end_all(one, run, "retry", error="e", delay_sec=600.0)
    assert ids(step(two)) == others[:1]


def twins(conn: Conn) -> tuple[str, str]:
    """Two keys with one hash."""
    found = conn.execute(
        "SELECT min(i::text), max(i::text) FROM generate_series(1, 300000) i GROUP BY hashtext(i::text)"
        " HAVING count(*) > 1 LIMIT 1"
    ).fetchone()
    return found[0], found[1]


def test_a_claim_does_not_wait_for_a_locked_head_that_waits(ordered: Conn, worker: Worker) -> None:
    """And the job behind it says which one that is."""
    head, second = behind_a_retry(ordered, worker)
    with locked(ordered, head):
        assert step(worker).jobs == []
    assert (step(worker).jobs, waits(ordered, second)) == ([], ["key"])
    found = lifecycle.status(ordered, second)
    assert (found["waiting_for"]["reason"], found["waiting_for"]["job_id"]) == ("order", head)


MAY_NOT_START = pytest.mark.parametrize(
    ("change", "becomes"), [("cancel_requested = true", "canceled"), ("attempt = max_attempts", "lost")]
)


@MAY_NOT_START
def test_a_head_that_may_not_start_is_set_aside(ordered: Conn, worker: Worker, change: str, becomes: str) -> None:
    """Another service has changed it; it is parked, so no claim reads it first."""
    head, second = enqueue(ordered, lock_key="k", priority=200), enqueue(ordered, lock_key="k")
    ordered.execute(f"UPDATE dl_jobs SET {change}, blocked_on = 'key' WHERE job_id = %s", (head,))
    assert ids(step(worker)) == [second]
    assert state(ordered, head)[0] == becomes


@pytest.mark.parametrize("merge", [False, True])
def test_jobs_without_attempts_run_once(conn: Conn, worker: Worker, merge: bool) -> None:
    order(conn, merge=merge)
    jobs = [plain(conn, lock_key="k", max_attempts=0, score=score) for score in (1, 2)]
    assert ids(step(worker)) == jobs[: 2 if merge else 1]


@pytest.mark.parametrize("whose", ["queue", "key of the hash"])
@pytest.mark.parametrize("is_live", [True, False])
def test_a_run_of_another_queue_or_key_holds_as_long_as_its_lease(
    ordered: Conn, one: Worker, two: Worker, whose: str, is_live: bool
) -> None:
    """Its session has let go of the key; only its own key and queue wait for the reaper."""
    key, twin = twins(ordered)
    order(ordered, "other")
    queue = "other" if whose == "queue" else "q"
    running = enqueue(ordered, lock_key=key, queue=queue)
    assert one.take(queue).job_id == running
    one.conn.execute("SELECT pg_advisory_unlock_all()")
    if not is_live:
        expire(ordered, running)
    waiting = enqueue(ordered, lock_key=key if whose == "queue" else twin)
    assert ids(step(two)) == ([] if is_live else [waiting])


@pytest.mark.parametrize("way", ["requeue", "delete"])
def test_a_dead_job_holds_its_key_where_the_queue_says_so(conn: Conn, worker: Worker, way: str) -> None:
    order(conn, on_dead="hold")
    dead, second = enqueue(conn, lock_key="k"), enqueue(conn, lock_key="k")
    end_all(worker, step(worker).jobs, "fail", error="e")
    assert (step(worker).jobs, waits(conn, second)) == ([], ["key"])
    found = lifecycle.status(conn, second)
    assert (found["waiting_for"]["reason"], found["waiting_for"]["job_id"]) == ("dead", dead)
    operations.change(conn, way, [dead], "test")
    assert ids(step(worker)) == [dead if way == "requeue" else second]


def test_a_dead_job_holds_no_key_but_its_own(conn: Conn, worker: Worker) -> None:
    for queue in ("other", "q"):
        order(conn, queue, on_dead="hold")
    enqueue(conn, lock_key="l"), enqueue(conn, queue="other", lock_key="k")
    conn.execute("UPDATE dl_jobs SET status = 'failed'")
    own = enqueue(conn, lock_key="k")
    assert ids(step(worker)) == [own]


def test_a_job_that_was_dead_before_the_switch_holds_nothing(conn: Conn, worker: Worker) -> None:
    dead = plain(conn, lock_key="k", status="failed")
    waiting = plain(conn, lock_key="k")
    operations.set_order(conn, "q", "test", ordered=True, on_dead="hold")
    conn.execute("SELECT dl_give_scores('q', '-infinity', 100)")
    assert (row(conn, dead)["score"], ids(step(worker))) == (None, [waiting])


def test_retention_keeps_the_dead_jobs_that_hold_their_keys(conn: Conn) -> None:
    settings = {"holds": (True, "hold"), "goes on": (True, "continue"), "plain again": (False, "hold")}
    for name, (is_ordered, on_dead) in settings.items():
        operations.set_order(conn, name, "test", ordered=is_ordered, on_dead=on_dead)
    holds = plain(conn, queue="holds", status="failed", score=1)
    for name in ("goes on", "plain again", "plain"):
        plain(conn, queue=name, status="failed", score=1)
    plain(conn, queue="holds", status="succeeded", score=1)
    no_place = plain(conn, queue="holds", status="failed")
    conn.execute("UPDATE dl_jobs SET finished_at = now() - interval '9 days'")
    conn.execute("UPDATE dl_jobs SET score = NULL WHERE job_id = %s", (no_place,))
    assert lifecycle.prune(conn, 86_400.0, "-infinity", 100)[0] == 5
    assert conn.execute("SELECT job_id FROM dl_jobs").fetchall() == [(holds,)]


def test_a_delivery_takes_all_jobs_of_the_key_in_their_order(merged: Conn, worker: Worker) -> None:
    second, first = (enqueue(merged, lock_key="k", score=score, priority=9 - score) for score in (2, 1))
    other = enqueue(merged, lock_key="l", priority=200)
    later = enqueue(merged, lock_key="k", score=3, available_at=value(merged, "SELECT now() + interval '1 hour'"))
    found = step(worker)
    assert ids(found) == [first, second, later, other]
    assert [job.lock_key for job in found.jobs] == ["k", "k", "k", "l"]
    assert [row(merged, job_id)["heartbeat_at"] is None for job_id in ids(found)] == [False, True, True, True]
    assert len(keys_held(merged)) == 2
    assert set(end_all(worker, found.jobs).ended.values()) == {"succeeded"}
    assert keys_held(merged) == []


@MAY_NOT_START
def test_a_delivery_goes_on_behind_what_may_not_start(merged: Conn, worker: Worker, change: str, becomes: str) -> None:
    jobs = [enqueue(merged, lock_key="k") for _ in range(3)]
    merged.execute(f"UPDATE dl_jobs SET {change} WHERE job_id = %s", (jobs[1],))
    found = step(worker)
    assert (ids(found), {job.attempt for job in found.jobs}) == ([jobs[0], jobs[2]], {1})
    assert state(merged, jobs[1])[0] == becomes


def test_a_claim_of_large_keys_ends_with_the_key_that_makes_it_a_thousand(merged: Conn, worker: Worker) -> None:
    """Its clock stands still: a claim that has lasted for a second ends as well."""
    still = "still.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT now()'"
    merged.execute(f"CREATE SCHEMA still; CREATE FUNCTION {still}".encode())
    worker.conn.execute("SET search_path = still, public, pg_catalog")
    for key in "klm":
        many(merged, 600, key)
    assert [job.lock_key for job in step(worker).jobs] == ["k"] * 600 + ["l"] * 600
    assert len(keys_held(merged)) == 2


@pytest.mark.parametrize(
    ("hold", "place"),
    [
        *(("SELECT FROM dl_jobs WHERE job_id = %s FOR UPDATE", place) for place in (0, 2, 3)),
        ("SELECT FROM dl_jobs WHERE job_id = %s FOR NO KEY UPDATE", 2),
        ("SELECT FROM dl_jobs WHERE job_id = %s FOR SHARE", 2),
        ("UPDATE dl_jobs SET priority = 1 WHERE job_id = %s", 2),
        ("UPDATE dl_jobs SET status = 'canceled' WHERE job_id = %s", 0),
        ("DELETE FROM dl_jobs WHERE job_id = %s", 3),
    ],
)
def test_a_delivery_waits_for_its_locked_job(merged: Conn, one: Worker, two: Worker, hold: str, place: int) -> None:
    """All jobs of the key or none, whatever becomes of the locked one; other keys go on, and the claim comes back."""
    jobs = [enqueue(merged, lock_key="k") for _ in range(4)]
    other = enqueue(merged, lock_key="l")
    with merged.transaction(force_rollback=True):
        merged.execute(hold, (jobs[place],))
        found = step(one)
        assert ids(found) == [other]
        end_all(one, found.jobs)
        found = step(one)
        assert (found.jobs, found.look_again) == ([], False)
        assert found.due_in is not None
        assert 0.1 <= found.due_in <= 1
    found = step(two)
    assert [(job.job_id, job.attempt) for job in found.jobs] == [(job_id, 1) for job_id in jobs]


def test_of_a_delivery_that_is_spent_the_first_is_dead_and_the_others_start_over(merged: Conn, worker: Worker) -> None:
    later = value(merged, "SELECT now() + interval '1 hour'")
    jobs = [enqueue(merged, lock_key="k", max_attempts=1, available_at=at) for at in (None, None, later)]
    first, *others = step(worker).jobs
    step(worker, 0, Ended(first, Finish("fail", "e")), *(Ended(job, Finish("restart", "e")) for job in others))
    assert [state(merged, job_id) for job_id in jobs] == [("failed", 1), ("queued", 0), ("queued", 0)]
    assert journal(merged, jobs[1])[-1][1]["reason"] == "the first job of its key is dead"
    assert waits(merged, *jobs) == [None] * 3
    assert all(row(merged, job_id)["available_at"] <= row(merged, job_id)["now"] for job_id in jobs)
    assert ids(step(worker)) == jobs[1:]


def test_a_dead_job_that_is_requeued_hastens_its_key_in_its_queue_alone(merged: Conn) -> None:
    operations.set_order(merged, "other", "test", ordered=True, merge=True)
    operations.set_order(merged, "no merge", "test", ordered=True)
    places = [("q", "k"), ("q", "l"), ("other", "k"), ("no merge", "k")]
    tried = [plain(merged, queue=queue, lock_key=key, score=2, attempt=1, in_sec=600) for queue, key in places]
    for queue in ("q", "no merge"):
        dead = plain(merged, queue=queue, lock_key="k", score=1, attempt=1, status="failed")
        operations.change(merged, "requeue", [dead], "test")
    due = [value(merged, "SELECT available_at <= now() FROM dl_jobs WHERE job_id = %s", job_id) for job_id in tried]
    assert due == [True, False, False, False]


def test_a_job_that_is_made_due_hastens_its_key_where_its_queue_merges(merged: Conn, worker: Worker) -> None:
    """Nor what runs with its key."""
    operations.set_order(merged, "no merge", "test", ordered=True)
    tried = [plain(merged, queue="no merge", lock_key="k", attempt=1, in_sec=600) for _ in range(2)]
    operations.change(merged, "run-now", tried[:1], "test")
    assert waits(merged, *tried) == [None, "time"]
    running = enqueue(merged, lock_key="k")
    assert ids(step(worker)) == [running]
    before = row(merged, running)["available_at"]
    operations.change(merged, "run-now", [plain(merged, lock_key="k", in_sec=600)], "test")
    assert row(merged, running)["available_at"] == before


@pytest.mark.parametrize(("change", "status"), [("requeue", "failed"), ("run-now", "queued")])
def test_locked_jobs_of_the_key_are_not_hastened(merged: Conn, worker: Worker, change: str, status: str) -> None:
    one = plain(merged, lock_key="k", status=status, attempt=1, in_sec=600)
    other = plain(merged, lock_key="k", attempt=1, in_sec=600)
    merged.execute("SET lock_timeout = '2s'")
    with locked(worker.conn, other):
        assert operations.change(merged, change, [one], "test") == {one: operations.DONE}
    assert waits(merged, one, other) == [None, "time"]


@pytest.mark.parametrize("spent", [False, True])
@pytest.mark.parametrize("end", ["crash", "timeout", "drain"])
def test_a_delivery_of_a_dead_worker_goes_back_as_one(merged: Conn, workers: Workers, end: str, spent: bool) -> None:
    one, two = workers(), workers()
    jobs = [enqueue(merged, lock_key="k", max_attempts=1 if spent else 5) for _ in range(3)]
    assert ids(step(one)) == jobs
    two.notes()
    lifecycle.settle(two.conn, one.name, end, "gone", running=jobs)
    assert "q" in two.notes()
    states = [state(merged, job_id) for job_id in jobs]
    if end == "drain":
        assert states == [("queued", 0)] * 3
    elif spent:
        assert states == [("lost" if end == "crash" else "failed", 1), ("queued", 0), ("queued", 0)]
        rows = [row(merged, job_id) for job_id in jobs]
        assert [found["finished_at"] is None for found in rows] == [False, True, True]
        assert all(found["available_at"] <= found["now"] and found["blocked_on"] is None for found in rows[1:])
    else:
        assert states == [("queued", 1)] * 3
    due(merged, *jobs)
    assert ids(step(two)) == (jobs[1:] if spent and end != "drain" else jobs)


def test_a_locked_job_of_a_delivery_is_given_back_later(merged: Conn, one: Worker, two: Worker) -> None:
    jobs = [enqueue(merged, lock_key="k") for _ in range(2)]
    step(one)
    one.conn.close()
    two.conn.execute("SET lock_timeout = '2s'")
    with locked(merged, jobs[1]):
        found = lifecycle.settle(two.conn, one.name, "crash", "gone", running=jobs)
        assert {each.job_id: each.status for each in found} == {jobs[0]: "queued", jobs[1]: None}
        assert step(two).jobs == []
    lifecycle.settle(two.conn, one.name, "crash", "gone", running=jobs)
    assert ids(step(two)) == jobs


@pytest.mark.parametrize("other", ["worker", "queue", "key of the hash"])
def test_what_runs_beside_a_lost_job_is_not_given_back_with_it(conn: Conn, workers: Workers, other: str) -> None:
    """Its lease was over, so a job of its key, or of one with its hash, has started."""
    one, two = workers(), workers()
    key, twin = twins(conn)
    lost = enqueue(conn, lock_key=key)
    assert one.take().job_id == lost
    expire(conn, lost)
    one.conn.execute("SELECT pg_advisory_unlock_all()")
    queue = "other" if other == "queue" else "q"
    beside = enqueue(conn, lock_key=twin if other == "key of the hash" else key, queue=queue)
    assert (two if other == "worker" else one).take(queue).job_id == beside
    conn.execute("UPDATE dl_jobs SET heartbeat_at = now(), claimed_pid = NULL")
    assert lifecycle.reap(conn) is not None
    assert [state(conn, job_id) for job_id in (lost, beside)] == [("queued", 1), ("running", 1)]


def test_a_delivery_that_is_lost_before_its_first_heartbeat_counts(merged: Conn, one: Worker, two: Worker) -> None:
    """Whichever of its jobs the reaper meets first; a delivery that was claimed ahead of it does not count."""
    enqueue(merged, lock_key="k", score=1), enqueue(merged, lock_key="k", score=2), enqueue(merged, lock_key="l")
    first, second, ahead = ids(step(one))
    expire(merged, second)
    assert lifecycle.reap(two.conn) is not None
    expire(merged, ahead)
    assert lifecycle.reap(two.conn) is not None
    assert [state(merged, job_id) for job_id in (first, second, ahead)] == [("queued", 1), ("queued", 1), ("queued", 0)]


def test_a_beat_renews_all_jobs_of_a_delivery_and_hears_of_each_cancellation(merged: Conn, worker: Worker) -> None:
    jobs = [enqueue(merged, lock_key="k") for _ in range(3)]
    delivery = step(worker).jobs
    assert lifecycle.beat(worker.conn, delivery, '{"n": 1}', True) is False
    assert [row(merged, job_id)["progress"] for job_id in jobs] == [{"n": 1}, {}, {}]
    assert [kinds(merged, job_id).count("heartbeat") for job_id in jobs] == [1, 0, 0]
    assert all(row(merged, job_id)["heartbeat_at"] == row(merged, jobs[0])["heartbeat_at"] for job_id in jobs)
    operations.change(merged, "cancel", jobs[1:2], "test")
    assert lifecycle.beat(worker.conn, delivery, None, False) is True
    end_all(worker, delivery, "hand_back", error="a job of the run was canceled")
    assert [state(merged, job_id) for job_id in jobs] == [("queued", 0), ("canceled", 0), ("queued", 0)]


def test_a_delivery_is_retaken_as_one(merged: Conn, workers: Workers) -> None:
    old, new = workers(), workers()
    for key in "kkl":
        enqueue(merged, lock_key=key)
    delivery = step(old).jobs
    session = successor(new, old)
    assert lifecycle.retake(session, delivery) is True
    assert keys_held(merged) == [new.pid] * 2
    assert set(lifecycle.finish_some(new.conn, old.name, [Ended(job, DONE) for job in delivery]).ended.values()) == {
        "succeeded"
    }
    assert keys_held(merged) == []


def test_a_queue_with_a_backlog_is_switched_while_jobs_run(conn: Conn, one: Worker, two: Worker) -> None:
    jobs = [plain(conn, lock_key="k", priority=priority) for priority in (3, 2, 1)]
    other = plain(conn, queue="other")
    running = one.take()
    assert operations.set_order(conn, "q", "test", ordered=True)["ordered"] is True
    assert ids(step(two)) == []
    one.finish(running)
    assert [row(conn, job_id)["score"] is None for job_id in (*jobs, other)] == [False, False, False, True]
    assert ids(step(two)) == [jobs[0]]
    operations.set_order(conn, "q", "test", ordered=False)
    assert ids(step(one)) == []
    assert ids(step(two, 5, Ended(Job(jobs[0], "q", "t", "{}", None, "k", "", 1, 5, 60, None, 1, two.name), DONE))) == [
        jobs[1]
    ]


def test_scores_are_given_some_at_a_time_to_unlocked_jobs_of_the_queue(conn: Conn, one: Worker, two: Worker) -> None:
    jobs = [plain(conn) for _ in range(3)]
    plain(conn, queue="other")
    running = one.take("other")
    two.conn.execute("SET lock_timeout = '2s'")
    with locked(conn, jobs[0]):
        assert value(two.conn, "SELECT given FROM dl_give_scores('q', '-infinity', 1)") == 1
        assert value(two.conn, "SELECT given FROM dl_give_scores('q', '-infinity', 9)") == 1
    assert [row(conn, job_id)["score"] is None for job_id in (*jobs, running.job_id)] == [True, False, False, True]


def test_a_transaction_of_before_the_switch_loses_its_job_no_place(conn: Conn, workers: Workers, dsn: str) -> None:
    one, old = workers(), workers()
    with old.conn.transaction():
        early = plain(old.conn, lock_key="k", priority=200)
        with started(lambda: operations.set_order(one.conn, "q", "test", ordered=True), None, conn) as switch:
            until(lambda: value(conn, "SELECT ordered FROM dl_queues"), "the switch to be seen")
            plain(conn, lock_key="k", priority=1)
            old.conn.execute("COMMIT; BEGIN")
            switch.result()
    assert ids(step(one)) == [early]


@pytest.mark.parametrize(
    ("stored", "said", "outcome"),
    [
        ({}, (None, None), None),
        ({}, (True, True), (True, True)),
        ({"ordered": True}, (True, None), (True, None)),
        ({"ordered": True}, (None, None), (True, None)),
        ({"ordered": True}, (False, None), "contradiction"),
        ({"ordered": False}, (True, None), "contradiction"),
        ({"ordered": True, "merge": False}, (True, True), "contradiction"),
    ],
)
def test_a_farm_and_the_database_agree_on_a_queue(
    conn: Conn, stored: dict[str, bool], said: tuple[bool | None, bool | None], outcome: Any
) -> None:
    with pytest.raises(operations.Contradiction, match="should be ordered as well"):
        operations.set_order(conn, "q", "test", merge=True)
    if stored:
        operations.set_order(conn, "q", "test", **stored)
    before = conn.execute("SELECT ordered, merge FROM dl_queues").fetchone()
    if outcome == "contradiction":
        with pytest.raises(operations.Contradiction, match=r"WORKERS_JSON says .* of the queue q, and the database"):
            operations.agree(conn, "q", *said)
        outcome = before
    else:
        operations.agree(conn, "q", *said)
    assert conn.execute("SELECT ordered, merge FROM dl_queues").fetchone() == outcome


def test_a_merged_delivery_has_no_job_that_waits_for_a_parent(merged: Conn, workers: Workers) -> None:
    """The key waits for the parent, as for a retry."""
    one, two = workers(), workers()
    enqueue(merged, queue="other")
    parent = one.take("other")
    first, child = enqueue(merged, lock_key="k"), enqueue(merged, lock_key="k", depends_on=(parent.job_id,))
    last = enqueue(merged, lock_key="k")
    (job,) = step(two).jobs
    assert job.job_id == first
    assert step(two, 10, Ended(job, DONE)).jobs == []
    one.finish(parent)
    assert until(lambda: ids(step(two)), "the child's turn") == [child, last]
