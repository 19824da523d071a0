"""Actions of people on jobs and queues: they hold on all hosts at once, are journaled, and disturb no running job."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from hands import Conn, Worker, Workers, enqueue, locked, many, plain, quietly, started
from readings import journal, keys_held, kinds, row, state, value

from dataloader.queue import db, lifecycle, operations
from dataloader.queue.enqueue import NewJob, QueueFull, require_room
from dataloader.queue.enqueue import enqueue as add
from dataloader.queue.reports import stats, waiting

BY = "token night from 10.0.0.7"


def test_a_paused_queue_starts_nothing_and_holds_no_key_and_others_go_on(conn: Conn, workers: Workers) -> None:
    first, second = workers(), workers()
    enqueue(conn, lock_key="k")
    paused = operations.pause(conn, "q", BY)
    assert (paused["queue"], paused["paused_by"]) == ("q", BY)
    assert operations.pause(conn, "q", "somebody else") == paused, "the first one stands"
    for worker in (first, second):
        claim = worker.claim()
        assert (claim.job, claim.look_again, claim.due_in) == (None, False, None)
    assert keys_held(conn) == []
    other = enqueue(conn, queue="other", lock_key="k")
    assert first.take("other").job_id == other


def test_a_queue_is_known_by_its_jobs_workers_settings_or_journal(conn: Conn, worker: Worker) -> None:
    def is_known(name: str) -> bool:
        return bool(operations.known(conn, "queue", name)["is_known"])

    names = ("load.cbr", "dead", "ended", "etl", "later")
    assert not any(map(is_known, names))
    enqueue(conn, queue="load.cbr"), plain(conn, queue="dead", status="lost"), enqueue(conn, queue="ended")
    worker.finish(worker.take("ended"))
    assert not is_known("ended")  # until the reaper has summed up its journal
    stats.aggregate(conn)
    conn.execute(
        "INSERT INTO dl_workers (worker, farm, host, pid, queue, state) VALUES ('a', 'f', 'h', 1, 'etl', 'idle')"
    )
    operations.pause(conn, "later", BY)
    assert all(map(is_known, names))
    worker.take("load.cbr")
    assert is_known("load.cbr")
    assert (is_known("load.crb"), operations.known(conn, "queue", "load.crb")["similar"]) == (False, ["load.cbr"])
    operations.resume(conn, "later", BY)
    assert not is_known("later")  # its row is left and says nothing


def test_resuming_wakes_the_sleepers_once_and_they_start(conn: Conn, worker: Worker) -> None:
    job_id = enqueue(conn)
    operations.pause(conn, "q", BY)
    worker.claim()
    worker.notes()
    for _ in range(2):
        assert operations.resume(conn, "q", BY) == operations.DEFAULTS | {"queue": "q"}
    assert worker.notes() == ["q"]
    assert worker.take().job_id == job_id


def test_a_full_queue_takes_no_more_but_known_keys(conn: Conn, worker: Worker) -> None:
    operations.limit_length(conn, "q", 2, BY)
    plain(conn, status="succeeded")
    known = add(conn, NewJob("q", "t", "k", idempotency_key="seen"), limited=True)
    add(conn, NewJob("q", "t", "k"), limited=True)
    with pytest.raises(QueueFull, match=r"the queue q is full: 2 jobs are queued, and its limit is 2"):
        add(conn, NewJob("q", "t", "k"), limited=True)
    with pytest.raises(QueueFull):
        require_room(conn, ["other", "q"])
    assert add(conn, NewJob("q", "t", "k", idempotency_key="seen"), limited=True) == known
    add(conn, NewJob("other", "t", "k"), limited=True)
    add(conn, NewJob("q", "t", "k"))  # whoever is not limited, is not
    assert value(conn, "SELECT count(*) FROM dl_jobs WHERE queue = 'q'") == 4
    operations.limit_length(conn, "q", None, BY)
    add(conn, NewJob("q", "t", "k"), limited=True)


@pytest.mark.parametrize("status", ["succeeded", "failed", "canceled", "lost"])
def test_what_has_ended_is_queued_again_with_a_fresh_budget(conn: Conn, workers: Workers, status: str) -> None:
    worker, other = workers(), workers()
    job = worker.start_new(max_attempts=1)
    verbs = {"succeeded": "succeed", "failed": "fail", "canceled": "cancel"}
    if status == "lost":
        lifecycle.settle(conn, worker.name, "crash", "killed")
    else:
        if status == "canceled":
            lifecycle.request_cancel(conn, job.job_id, force=True)
        worker.finish(job, verbs[status])
    assert state(conn, job.job_id)[0] == status
    other.notes()

    assert operations.change(conn, "requeue", [job.job_id], BY) == {job.job_id: "done"}
    assert other.notes() == ["q"]
    found = row(conn, job.job_id)
    assert (found["status"], found["attempt"], found["error"], found["finished_at"]) == ("queued", 0, None, None)
    assert (found["cancel_requested"], found["cancel_forced"]) == (False, False)
    assert journal(conn, job.job_id)[-1] == ("requeue", {"attempt": 0, "by": BY, "reason": "requeued by hand"})
    again = other.take()
    assert (again.job_id, again.attempt, again.claim) == (job.job_id, 1, 2)
    assert other.finish(again) == "succeeded"


def test_outcomes_say_what_forbids_it(conn: Conn, worker: Worker) -> None:
    running = enqueue(conn)
    worker.take()
    queued, done, unknown = enqueue(conn), plain(conn, status="succeeded", in_sec=60), uuid4()
    every = [running, queued, done, unknown]
    expected = {running: "running", queued: "queued", unknown: "unknown"}
    assert operations.change(conn, "run-now", every, BY) == expected | {queued: "done", done: "succeeded"}
    assert "requeue" not in kinds(conn, done)
    assert operations.change(conn, "requeue", every, BY) == expected | {done: "done"}
    conn.execute("UPDATE dl_jobs SET status = 'succeeded' WHERE job_id = %s", (done,))
    ended = {queued: "done", unknown: "unknown"}
    assert operations.change(conn, "cancel", every, BY) == ended | {running: "done", done: "succeeded"}
    assert operations.change(conn, "delete", every, BY) == ended | {running: "running", done: "done"}
    assert value(conn, "SELECT count(*) FROM dl_jobs") == 1
    assert value(conn, "SELECT count(DISTINCT job_id) FROM dl_job_events") == 1


def test_a_job_that_starts_while_it_is_deleted_stays(conn: Conn, worker: Worker, dsn: str) -> None:
    job_id = enqueue(conn)
    with db.connect(dsn, name="operator", schema="public") as operator:
        worker.conn.execute("BEGIN")
        worker.take()
        with started(
            lambda: operations.change(operator, "delete", [job_id], BY), operator.info.backend_pid, conn
        ) as deleted:
            worker.conn.execute("COMMIT")
            assert deleted.result() == {job_id: "running"}
    assert state(conn, job_id) == ("running", 1)


def test_the_dead_of_a_queue_in_steps(conn: Conn) -> None:
    dead = [plain(conn, status=status) for status in ("failed", "lost", "failed", "lost", "failed")]
    elsewhere, fine = plain(conn, queue="other", status="failed"), plain(conn, status="succeeded")
    conn.execute("UPDATE dl_jobs SET finished_at = now()")
    steps = ("requeue-dead", *["delete-dead"] * 3)
    assert [operations.change_queue(conn, step, "q", BY, limit=2).changed for step in steps] == [2, 2, 1, 0]
    left = {job_id for (job_id,) in conn.execute("SELECT job_id FROM dl_jobs")}
    assert len(left & set(dead)) == 2
    assert {elsewhere, fine} < left
    assert value(conn, "SELECT count(*) FROM dl_jobs WHERE status = 'queued' AND attempt = 0") == 2


def test_what_waits_for_a_retry_is_killed_and_nothing_else(conn: Conn, worker: Worker) -> None:
    tried, without_error = plain(conn, attempt=2, in_sec=60, error="no route"), plain(conn, attempt=1)
    fresh, running, elsewhere = plain(conn), plain(conn, priority=1), plain(conn, queue="other", attempt=1)
    assert worker.take().job_id == running
    assert operations.change_queue(conn, "kill-retries", "q", BY) == (2, None)
    assert [state(conn, job_id)[0] for job_id in (fresh, running, elsewhere)] == ["queued", "running", "queued"]
    found = row(conn, tried)
    assert (found["status"], found["attempt"], found["error"], found["blocked_on"]) == ("failed", 2, "no route", None)
    assert found["finished_at"] is not None
    assert journal(conn, tried)[-1] == ("failed", {"attempt": 2, "by": BY, "reason": "killed by hand"})
    assert kinds(conn, tried).count("failed") == 1
    assert row(conn, without_error)["error"] == f"killed by {BY}"
    assert operations.change_queue(conn, "requeue-dead", "q", BY).changed == 2
    assert state(conn, tried) == ("queued", 0)


GROUPS = {
    "run-all": {"in_sec": 60},
    "kill-retries": {"attempt": 1},
    "requeue-dead": {"status": "failed", "error": "no route to host"},
    "delete-dead": {"status": "lost", "error": "no route to host"},
}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(
    "only", [{"task": "a"}, {"lock_key": "a"}, {"partition_key": "a"}, {"task": "a", "lock_key": "a"}]
)
def test_a_filter_is_for_what_passes_it(conn: Conn, name: str, only: dict[str, str]) -> None:
    group = GROUPS[name]
    fits = plain(conn, **group, **only)
    others = {plain(conn, **group, **{field: "b"}) for field in ("task", "lock_key", "partition_key")}
    others.add(plain(conn, **{field: "a" for field in only}))  # not one of the group
    others.add(plain(conn, **group, **only, queue="other"))
    before = {job_id: row(conn, job_id) for job_id in others}
    assert operations.change_queue(conn, name, "q", BY, only=only) == (1, None)
    now = {"now": value(conn, "SELECT now()")}
    assert {job_id: row(conn, job_id) | now for job_id in others} == {
        job_id: was | now for job_id, was in before.items()
    }
    assert value(conn, "SELECT count(*) FROM dl_jobs") == (5 if name == "delete-dead" else 6)
    assert name == "delete-dead" or row(conn, fits)["journaled"] > 0


@pytest.mark.parametrize("name", GROUPS)
def test_what_does_not_pass_takes_nobodys_place(conn: Conn, name: str) -> None:
    """And a call changes no more than its limit."""
    for task in "bbaaa":
        plain(conn, **GROUPS[name], task=task)
    assert operations.change_queue(conn, name, "q", BY, limit=2, only={"task": "a"}).changed == 2


def test_a_filter_by_a_part_of_the_error_which_is_no_pattern(conn: Conn) -> None:
    for error in ("100% of disk", "1000 of disk", None):
        plain(conn, status="failed", error=error)
    assert operations.change_queue(conn, "delete-dead", "q", BY, only={"error": "0% o"}).changed == 1
    assert operations.change_queue(conn, "delete-dead", "q", BY, only={"error": "_00"}).changed == 0
    assert operations.change_queue(conn, "delete-dead", "q", BY, only={"error": " of disk"}).changed == 1


@pytest.mark.parametrize("name", GROUPS)
def test_a_call_looks_at_some_and_says_how_far_it_came(conn: Conn, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each step begins behind the one before, also where many rows have one time."""
    group = GROUPS[name]
    monkeypatch.setattr(operations, "SCAN", 3)
    with conn.transaction():
        for number in range(10):
            plain(conn, **group, task="a" if number in (7, 8) else "b")

    def steps(after: str | None = None, **how: Any) -> list[int]:
        changed, after = operations.change_queue(conn, name, "q", BY, after=after, **how)
        return [changed, *(steps(after, **how) if after else [])]

    found = steps(only={"task": "a"})
    assert (sum(found), len(found)) == (2, 4)
    assert steps(limit=3) == [3, 3, 2]


@pytest.mark.parametrize("group", ["of_dead", "of_time", "of_retries"])
def test_a_filter_reads_along_an_index_and_only_so_far(conn: Conn, group: str) -> None:
    with quietly(conn):
        at, status = "now() + i * interval '1 s'", "(ARRAY['failed', 'queued'])[1 + i % 2]::dl_status"
        many(conn, 20_000, status=status, attempt=1, blocked_on="'time'", created_at=at, finished_at=at)
    conn.execute("ANALYZE dl_jobs")
    given = {"task": "none", "lock_key": None, "partition_key": None, "error": None, "error_group": None, "queue": "q"}
    given |= {"after": operations._before_all(group), "limit": 1_000, "scan": 200}
    explain = "EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) "
    with conn.transaction():
        conn.execute(operations._SQL["plans"])
        row = conn.execute(explain + operations._chosen(group), given).fetchone()
    assert "Seq Scan" not in json.dumps(row[0])
    assert max(returned(row[0][0]["Plan"])) < 1_000


def returned(node: dict[str, Any]) -> Iterator[float]:
    """How many rows each node of a plan returned, in all its loops."""
    yield node["Actual Rows"] * node["Actual Loops"]
    for below in node.get("Plans", ()):
        yield from returned(below)


@pytest.mark.parametrize("name", GROUPS)
def test_rows_of_a_group_that_others_have_locked_stay(conn: Conn, worker: Worker, name: str) -> None:
    group = GROUPS[name]
    held, _ = plain(conn, **group), plain(conn, **group)
    conn.execute("SET lock_timeout = '2s'")
    with locked(worker.conn, held):
        assert operations.change_queue(conn, name, "q", BY).changed == 1
    assert operations.change_queue(conn, name, "q", BY).changed == 1


@pytest.mark.parametrize("verb", ["cancel", "requeue", "run-now", "delete"])
def test_a_thousand_jobs_cost_few_round_trips(conn: Conn, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """Else a worker that ends some of them waits as long, and a distant database outlasts the request."""
    jobs = [enqueue(conn) for _ in range(50)]
    waits, wait = [], db.Connection.wait
    monkeypatch.setattr(db.Connection, "wait", lambda *args, **more: (waits.append(1), wait(*args, **more))[1])
    operations.change(conn, verb, jobs, BY)
    assert len(waits) <= 6


def test_why_a_job_waits(conn: Conn, workers: Workers) -> None:
    worker, stranger = workers(), workers()

    def reason(job_id: UUID) -> str:
        waiting_for = (lifecycle.status(conn, job_id) or {})["waiting_for"]
        assert waiting.words(waiting_for, datetime.now(UTC)).endswith(".")
        return str(waiting_for["reason"])

    add_worker = "INSERT INTO dl_workers (worker, farm, host, pid, queue, state) VALUES (%s, 'f', 'h', 1, 'q', 'busy')"
    first, second = enqueue(conn), enqueue(conn)
    assert reason(first) == "no_worker"
    conn.execute(add_worker, ("w",))
    assert (reason(first), reason(second)) == ("worker", "worker")
    conn.execute("UPDATE dl_workers SET state = 'stopped'")
    assert reason(first) == "stopped"
    conn.execute(add_worker, ("w2",))
    assert reason(first) == "worker"
    holder = enqueue(conn, queue="other", lock_key="k")
    worker.take("other")
    locked, later = enqueue(conn, lock_key="k"), enqueue(conn, available_at=datetime(2031, 1, 1, tzinfo=UTC))
    assert (reason(locked), reason(later)) == ("lock", "time")
    refused = enqueue(conn, queue="third", lock_key="held elsewhere")
    stranger.conn.execute("SELECT pg_advisory_lock(hashtext('held elsewhere'))")
    assert worker.claim("third").backoffs == 1
    assert reason(refused) == "session"
    operations.pause(conn, "q", BY)
    assert reason(first) == "paused"
    assert (lifecycle.status(conn, holder) or {})["waiting_for"] is None

    def all_reasons(job_id: UUID) -> list[str]:
        first = (lifecycle.status(conn, job_id) or {})["waiting_for"]
        rest = first.get("besides", [])
        said = waiting.words(first, datetime.now(UTC))
        assert all(said.endswith(waiting.words(last, datetime.now(UTC))) for last in rest[-1:])
        return [each["reason"] for each in (first, *rest)]

    assert (all_reasons(first), all_reasons(locked)) == (["paused"], ["paused", "lock"])
    conn.execute("DELETE FROM dl_workers")
    assert (all_reasons(first), all_reasons(later)) == (["paused", "no_worker"], ["paused", "time", "no_worker"])
    operations.resume(conn, "q", BY)
    assert all_reasons(locked) == ["lock", "no_worker"]
