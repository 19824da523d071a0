"""A live queue becomes another: `operations.move`. The order of each key is kept, and what runs goes on."""

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from hands import PATIENCE, Conn, Worker, Workers, enqueue, ids, locked, plain, started, step, until
from readings import row, state, value

from dataloader.queue import db, lifecycle, operations

BY = "ops"
PAUSED = "SELECT array_agg(queue ORDER BY queue) FROM dl_queues WHERE paused_at IS NOT NULL"
LEFT = "SELECT count(*) FROM dl_jobs WHERE queue = 'q' AND status IN ('queued', 'running', 'failed', 'lost')"
# A claim that has read that its queue is not paused, and has locked no row yet: it has no xid.
CLAIM = "DO $$ BEGIN PERFORM FROM dl_queues; PERFORM pg_advisory_lock_shared(4711); END $$"
WAITS_FOR_4712 = "SELECT true FROM pg_locks WHERE locktype = 'advisory' AND objid = 4712 AND NOT granted AND pid = %s"


def order(conn: Conn, queue: str = "q", **settings: Any) -> None:
    operations.set_order(conn, queue, BY, **({"ordered": True} | settings))


def move(conn: Conn, source: str = "q", target: str = "to", limit: int = 1_000) -> list[int]:
    """As the command does; returns how many each call has moved."""
    conn.execute("SET lock_timeout = '5s'")
    steps, is_done = [], False
    while not is_done:
        moved, is_done = operations.move(conn, source, target, BY, limit)
        steps.append(moved)
        assert len(steps) < 200, "the move does not end"
    return steps


def in_order(worker: Worker, queue: str = "to") -> list[UUID]:
    """The jobs that the queue starts, one by one."""
    found = []
    while job := worker.claim(queue).job:
        found.append(job.job_id)
        worker.finish(job)
    return found


def queue_of(conn: Conn, *job_ids: UUID) -> list[str]:
    return [row(conn, job_id)["queue"] for job_id in job_ids]


def test_jobs_that_are_queued_run_or_are_dead_move_and_no_others(conn: Conn, worker: Worker) -> None:
    running = enqueue(conn)
    worker.take()
    queued, later, retry = enqueue(conn), plain(conn, in_sec=60), plain(conn, in_sec=60, attempt=2)
    dead = [plain(conn, status="failed"), plain(conn, status="lost")]
    done, elsewhere = plain(conn, status="succeeded"), enqueue(conn, queue="other")
    before = row(conn, running)
    assert sum(move(conn)) == 6
    assert set(queue_of(conn, running, queued, later, retry, *dead)) == {"to"}
    assert queue_of(conn, done, elsewhere) == ["q", "other"]
    assert {**row(conn, running), "queue": "q", "now": before["now"]} == before
    waits = {job_id: row(conn, job_id)["blocked_on"] for job_id in (queued, later, retry)}
    assert waits == {queued: None, later: "time", retry: "time"}
    assert (row(conn, dead[0])["score"], value(conn, PAUSED)) == (None, ["q"])
    assert in_order(worker) == [queued]


def test_the_order_of_a_key_is_kept_and_the_target_becomes_ordered(conn: Conn, worker: Worker) -> None:
    order(conn, batch=7, on_dead="hold")
    jobs = [enqueue(conn, lock_key="k", score=float(score)) for score in random.Random(1).sample(range(40), 40)]
    by_score = sorted(jobs, key=lambda job_id: row(conn, job_id)["score"])
    assert worker.claim("q").job  # so the others are parked
    assert worker.claim("q").job is None
    conn.execute("UPDATE dl_jobs SET blocked_on = 'key' WHERE status = 'queued'")
    assert max(move(conn, limit=7)) == 7
    found = conn.execute("SELECT ordered, merge, batch, on_dead FROM dl_queues WHERE queue = 'to'").fetchone()
    assert found == (True, None, 7, "hold")
    assert in_order(worker) == []  # the first one runs
    lifecycle.settle(conn, worker.name, "drain", "the worker leaves")
    assert queue_of(conn, by_score[0]) == ["to"]


def test_a_delivery_moves_as_one_and_goes_back_as_one(conn: Conn, workers: Workers) -> None:
    order(conn, merge=True)
    worker, other = workers(), workers()
    jobs = [enqueue(conn, lock_key="k", max_attempts=1) for _ in range(3)]
    others = [enqueue(conn, lock_key=key) for key in ("a", "l")]
    assert set(ids(step(worker))) == {*jobs, *others}
    assert move(conn, limit=2) == [1, 3, 1, 0]
    lifecycle.settle(conn, worker.name, "crash", "killed", running=jobs)
    assert [state(conn, job_id) for job_id in jobs] == [("lost", 1), ("queued", 0), ("queued", 0)]
    later = enqueue(conn, queue="to", lock_key="k")
    assert set(ids(step(other, queue="to"))) == {*jobs[1:], *others, later}


def test_a_plain_queue_moves_into_an_ordered_one(conn: Conn, worker: Worker) -> None:
    """By the times of creation; what died before there was an order holds nothing."""
    order(conn, "to", on_dead="hold")
    dead = plain(conn, lock_key="k", status="failed")
    jobs = [plain(conn, lock_key="k", made_sec=-number) for number in (10, 30, 20)]
    assert sum(move(conn)) == 4
    assert row(conn, dead)["score"] is None
    assert in_order(worker) == [jobs[1], jobs[2], jobs[0]]


def test_a_move_makes_its_own_parked_keys_ready_and_looks_at_no_others(conn: Conn, worker: Worker) -> None:
    """Of a million parked keys of other queues a look at each would take minutes, in one request."""
    order(conn)
    jobs = [enqueue(conn, lock_key=key) for key in "aab"]
    there = enqueue(conn, queue="to", lock_key="a")
    elsewhere = enqueue(conn, queue="other", lock_key="c")
    conn.execute("UPDATE dl_jobs SET blocked_on = 'key'")
    conn.execute("UPDATE dl_jobs SET blocked_on = NULL WHERE job_id = %s", (jobs[0],))
    move(conn)
    assert {row(conn, job_id)["blocked_on"] for job_id in jobs} == {None}
    assert row(conn, elsewhere)["blocked_on"] == "key"
    assert in_order(worker) == [jobs[0], jobs[1], jobs[2], there]


def test_nothing_starts_before_all_have_moved(conn: Conn, worker: Worker) -> None:
    """The next move completes one that died, which leaves both queues paused, and pauses a queue that was resumed."""
    order(conn)
    jobs = [enqueue(conn, lock_key="k") for _ in range(4)]
    for _ in range(2):
        assert operations.move(conn, "q", "to", BY, limit=1) == (1, False)
        assert value(conn, PAUSED) == ["q", "to"]
        assert in_order(worker, "q") == in_order(worker, "to") == []
    operations.resume(conn, "to", "somebody")
    assert operations._move_some(conn, "q", "to", 1) == (0, False)
    assert value(conn, LEFT) == 2
    operations.resume(conn, "q", "somebody")
    assert move(conn) == [2, 0]
    assert value(conn, PAUSED) == ["q"]
    assert in_order(worker) == jobs


def test_the_pauses_of_somebody_else_stay(conn: Conn) -> None:
    """That of the source is the move's from now on, and keeps its time."""
    paused_at = operations.pause(conn, "q", "night")["paused_at"]
    operations.pause(conn, "to", "night")
    enqueue(conn)
    move(conn)
    assert value(conn, "SELECT paused_by FROM dl_queues WHERE queue = 'to'") == "night"
    found = operations.settings(conn, "q")
    assert (found["paused_at"], found["paused_by"]) == (paused_at, "queue move to to")


def test_a_claim_of_before_the_pause_is_waited_for(conn: Conn, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "CLAIMS_SEC", 0.1)
    job_id = enqueue(conn)
    with db.connect(dsn, name="claimer", schema="public") as claimer:
        conn.execute("SELECT pg_advisory_lock(4711)")
        with started(lambda: claimer.execute(CLAIM), claimer.info.backend_pid, conn):
            with pytest.raises(
                operations.Conflict, match=rf"session {claimer.info.backend_pid} \(claimer\) began before"
            ):
                operations.move(conn, "q", "to", BY)
            assert (queue_of(conn, job_id), value(conn, PAUSED)) == (["q"], ["q", "to"])
            conn.execute("SELECT pg_advisory_unlock(4711)")
    assert move(conn) == [1, 0]


def test_a_transactions_next_statement_is_not_waited_for(conn: Conn, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins after the pause. A producer may send many in one transaction, and each reads the settings."""
    next_claim = CLAIM.replace("4711", "4712")
    enqueue(conn)
    conn.execute("SELECT pg_advisory_lock(4711), pg_advisory_lock(4712)")
    with (
        db.connect(dsn, name="producer", schema="public") as producer,
        db.connect(dsn, name="eye", schema="public") as eye,
    ):
        pid = producer.info.backend_pid

        def two() -> None:
            with producer.transaction():
                producer.execute(CLAIM)
                producer.execute(next_claim)

        def go_on(_: float) -> None:
            conn.execute("SELECT pg_advisory_unlock(4711)")
            until(lambda: value(eye, WAITS_FOR_4712, pid), "the next statement to wait")

        monkeypatch.setattr(operations, "time", SimpleNamespace(monotonic=itertools.count().__next__, sleep=go_on))
        with started(two, pid, eye):
            try:
                assert operations.move(conn, "q", "to", BY) == (1, False)
            finally:
                conn.execute("SELECT pg_advisory_unlock_all()")


def test_a_move_sees_the_claims_of_other_roles(conn: Conn, dsn: str, as_superuser: Callable[[str], str]) -> None:
    """Of whose sessions the server hides most from a role without pg_read_all_stats."""
    with db.connect(as_superuser(dsn), name="claimer", schema="public") as claimer:
        conn.execute("SELECT pg_advisory_lock(4711)")
        with started(lambda: claimer.execute(CLAIM), claimer.info.backend_pid, conn):
            found = conn.execute(operations._SQL["claims_under_way"], {"statements": None}).fetchall()
            assert [pid for _, pid, _ in found] == [claimer.info.backend_pid]
            conn.execute("SELECT pg_advisory_unlock(4711)")


def test_a_producer_that_has_not_committed_is_not_waited_for(conn: Conn, dsn: str) -> None:
    with db.connect(dsn, name="producer", schema="public") as producer:
        with producer.transaction():
            job_id = enqueue(producer)
            enqueue(conn)
            assert move(conn) == [1, 0]
        assert queue_of(conn, job_id) == ["q"]
    assert move(conn) == [1, 0]


def test_a_row_that_a_worker_locks_is_tried_again(conn: Conn, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running ones at once, with nothing held: no deadlock with a worker that locks the rows of its run."""
    monkeypatch.setattr(operations, "OLDER_SEC", PATIENCE)
    job = worker.start_new()
    worker.conn.execute("BEGIN; SELECT FROM dl_jobs FOR UPDATE")
    with started(lambda: move(conn), None, worker.conn) as moved:
        until(lambda: value(worker.conn, PAUSED) == ["q", "to"], "the pause")
        worker.conn.execute("COMMIT")
        assert moved.result() == [1, 0]
    assert queue_of(conn, job.job_id) == ["to"]


def test_a_row_that_stays_locked_ends_the_move(conn: Conn, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "OLDER_SEC", 0.05)
    conn.execute("SET statement_timeout = '10s'")  # what waits for the row fails, and does not hang
    job = worker.start_new()
    words = "another session has jobs of q locked"
    with locked(worker.conn, job.job_id), pytest.raises(operations.Conflict, match=words):
        operations.move(conn, "q", "to", BY)
    assert move(conn) == [1, 0]


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ({"ordered": True}, {"ordered": False}, "q has ordered true and to has false"),
        ({"ordered": False}, {"ordered": True}, "q has ordered false and to has true"),
        ({"ordered": True}, {"ordered": True, "merge": True}, "q has merge false and to has true"),
        ({"ordered": True, "batch": 3}, {"batch": 4}, "q has batch 3 and to has 4"),
        ({"ordered": True}, {"on_dead": "hold"}, 'q has on_dead "continue" and to has "hold"'),
        ({"merge_limit": 5}, {"merge_limit": 6}, "q has merge_limit 5 and to has 6"),
    ],
)
def test_another_order_is_refused(conn: Conn, source: dict[str, Any], target: dict[str, Any], words: str) -> None:
    operations.set_order(conn, "q", BY, **source)
    operations.set_order(conn, "to", BY, **target)
    job_id, before = enqueue(conn), conn.execute("SELECT * FROM dl_queues ORDER BY queue").fetchall()
    with pytest.raises(operations.Conflict, match=words):
        operations.move(conn, "q", "to", BY)
    assert conn.execute("SELECT * FROM dl_queues ORDER BY queue").fetchall() == before
    assert queue_of(conn, job_id) == ["q"]


@pytest.mark.parametrize(
    ("paused", "first", "second", "words"),
    [
        ("q", ("q", "to"), ("q", "other"), "q is paused by a queue move to to"),
        ("to", ("q", "to"), ("to", "b"), "q is paused by a queue move to to and has jobs left"),
        ("to", ("to", "b"), ("q", "to"), "to is paused by a queue move to b"),
        ("q", ("q", "to"), ("to", "q"), "to is paused by a queue move from q"),
        ("to", ("q", "to"), ("to", "q"), "q is paused by a queue move to to"),
    ],
)
def test_a_pause_by_hand_lets_no_two_moves_run_at_once(
    conn: Conn, paused: str, first: tuple[str, str], second: tuple[str, str], words: str
) -> None:
    """They would split a key: some of its jobs in one queue, and some in another."""
    for queue in ("q", "q", "to", "to"):
        enqueue(conn, queue=queue, lock_key="k")
    operations.pause(conn, paused, "night")
    assert operations.move(conn, *first, BY, limit=1) == (1, False)
    before = conn.execute("SELECT * FROM dl_queues ORDER BY queue").fetchall()
    with pytest.raises(operations.Conflict, match=words):
        operations.move(conn, *second, BY, limit=1)
    assert conn.execute("SELECT * FROM dl_queues ORDER BY queue").fetchall() == before
    assert move(conn, *first)[-1] == 0


@pytest.mark.parametrize("status", ["queued", "running", "failed", "lost"])
def test_a_job_of_any_status_tells_that_a_move_is_not_over(conn: Conn, status: str) -> None:
    operations.pause(conn, "to", "night")
    for paused_by, queue in (("queue move to to", "x"), ("queue move to other", "y")):
        conn.execute("INSERT INTO dl_queues (queue, paused_at, paused_by) VALUES (%s, now(), %s)", (queue, paused_by))
    plain(conn, queue="x", status="succeeded"), plain(conn, queue="y")
    enqueue(conn, queue="to")
    assert operations.move(conn, "to", "b", BY, limit=1)[0] == 1
    operations.pause(conn, "fourth", "night")
    conn.execute("INSERT INTO dl_queues (queue, paused_at, paused_by) VALUES ('z', now(), 'queue move to fourth')")
    plain(conn, queue="z", status=status)
    with pytest.raises(operations.Conflict, match="z is paused by a queue move to fourth and has jobs left"):
        operations.move(conn, "fourth", "b2", BY)
