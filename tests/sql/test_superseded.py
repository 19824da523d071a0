"""Farms of older code call the functions by their signatures of before: they find jobs, and what they write stands."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from hands import Worker, expire, journal, keys_held, plain, row, state, value
from psycopg.types.json import Jsonb

from dataloader.queue import db, operations
from dataloader.queue.fields import OF_PRODUCER

Workers = Callable[[], Worker]
STEPS = {
    "before 15": "SELECT job_id, unfinished, canceled, backoffs, look_again, due_in"
    " FROM dl_step('q', %s, %s, 15, %s, %s::json)",
    "before 19": "SELECT job_id, unfinished, canceled, backoffs, look_again, due_in"
    " FROM dl_step('q', %s, %s, 15, %s, %s::json, false)",
}
FINISHES = {
    "before 15": "SELECT unfinished, canceled FROM dl_finish(%s, %s::json, true)",
    "before 19": "SELECT unfinished, canceled FROM dl_finish(%s, %s::json, true, false)",
}


def end(job_id: UUID, verb: str, **more: Any) -> dict[str, Any]:
    """As older code writes it: every value, also those that are null, and always a delay."""
    given = {"attempt": 1, "error": None, "delay_sec": 0.0, "progress": None, "facts": None} | more
    return {"job_id": str(job_id), "verb": verb} | given


def step(worker: Worker, statement: str, most: int, *ends: dict[str, Any]) -> list[tuple[Any, ...]]:
    parameters = (worker.name, worker.session.backend_start, most, json.dumps(ends))
    return worker.conn.execute(statement.encode(), parameters).fetchall()


@pytest.mark.parametrize("statement", STEPS.values(), ids=STEPS)
def test_a_step_of_before_writes_its_ends_and_claims(conn: db.Connection, worker: Worker, statement: str) -> None:
    first, second, third = (plain(conn, lock_key="k", priority=priority) for priority in range(3))
    assert step(worker, statement, 5) == [(first, None, None, 0, False, None), (None, None, None, 0, False, None)]
    assert keys_held(conn) == [worker.pid]
    done = end(first, "succeed", progress={"n": 7}, facts={"cpu_sec": 0.5})
    assert [job_id for job_id, *_ in step(worker, statement, 5, done)] == [second, None]
    assert (state(conn, first), row(conn, first)["progress"]) == (("succeeded", 1), {"n": 7})
    assert journal(conn, first)[-1] == ("done", {"attempt": 1, "worker": worker.name, "cpu_sec": 0.5})
    assert [job_id for job_id, *_ in step(worker, statement, 0, end(second, "retry", error="e", delay_sec=60.0))] == [
        None
    ]
    found = row(conn, second)
    assert (found["status"], found["blocked_on"], found["error"]) == ("queued", "time", "e")
    assert keys_held(conn) == []
    assert step(worker, statement, 1)[0][0] == third


def test_a_step_of_before_29_claims_in_the_order_of_the_queue(conn: db.Connection, worker: Worker) -> None:
    jobs = [plain(conn, affinity_key=key) for key in "ab"]
    nothing = ", ".join(["NULL"] * 6)
    call = f"SELECT job_id, said FROM dl_step(ARRAY['q'], false, %s, now(), 15, 5, 0, '-infinity', '{{}}', {nothing})"
    assert worker.conn.execute(call, (worker.name,)).fetchall() == [*((job_id, None) for job_id in jobs), (None, None)]


@pytest.mark.parametrize("statement", FINISHES.values(), ids=FINISHES)
def test_an_end_of_before_is_written_and_makes_the_next_row_ready(
    conn: db.Connection, workers: Workers, statement: str
) -> None:
    one, two = workers(), workers()
    first, canceled, lost = (plain(conn, lock_key=key, priority=0) for key in "klm")
    for _ in range(3):
        one.take()
    waiting = plain(conn, lock_key="k")
    assert two.claim().job is None
    conn.execute("UPDATE dl_jobs SET cancel_requested = true WHERE job_id = %s", (canceled,))
    ends = [end(first, "succeed"), end(canceled, "succeed"), end(lost, "succeed", attempt=9)]
    found = one.conn.execute(statement.encode(), (one.name, json.dumps(ends))).fetchone()
    assert found == ([lost], [canceled])
    assert [state(conn, job_id)[0] for job_id in (first, canceled, lost)] == ["succeeded", "canceled", "running"]
    assert (row(conn, waiting)["blocked_on"], keys_held(conn)) == (None, [])


# The parameters that all forms have.
OLD: dict[str, Any] = {
    **{"queue": "q", "task": "ask", "args": {"model": "m"}, "idempotency_key": None, "partition_key": ""},
    **{"priority": 100, "available_at": None, "max_attempts": None, "lease_ttl_sec": 60, "timeout_sec": None},
    **{"producer": None, "consumer_group": None},
}
OF = {field.name: field.type for field in OF_PRODUCER}


def named(given: dict[str, Any], array: str) -> str:
    """The parameters by name, as older code writes them."""
    types = {name: "text" if array and OF[name] == "jsonb" else OF[name] for name in given}
    return ", ".join(f"p_{name} => %({name})s::{types[name]}{array}" for name in given)


@pytest.mark.parametrize("score", [{}, {"score": 2.5}], ids=["before 23", "before 29"])
@pytest.mark.parametrize("key", [None, "once"])
def test_jobs_of_before_are_added_as_the_pipeline_says(conn: db.Connection, score: Any, key: str | None) -> None:
    operations.tell_tasks(conn, {"ask": {"max_attempts": 2, "affinity": ["model"]}})
    one = OLD | score | {"idempotency_key": key}
    call = f"SELECT dl_enqueue_one(p_job_id => gen_random_uuid(), p_lock_key => 'one', {named(one, '')})"
    known = [conn.execute(call.encode(), one | {"args": Jsonb(one["args"])}).fetchone() for _ in range(2)]
    assert [found == (None,) for found in known] == [True, key is None]
    many = {name: [given] for name, given in one.items()} | {"args": [json.dumps(one["args"])] * 2}
    many |= {"idempotency_key": [key and "a", key and "a"]}
    call = f"""SELECT count(*) FROM dl_enqueue_many(
        p_job_id => ARRAY[gen_random_uuid(), gen_random_uuid()], p_lock_key => ARRAY['two'], p_place => NULL,
        p_since => NULL, {named(many, "[]")})"""
    assert conn.execute(call.encode(), many).fetchone() == (1 if key else 0,)
    found = conn.execute("SELECT lock_key, affinity_key, max_attempts, score FROM dl_jobs ORDER BY 1").fetchall()
    expected = [(lock_key, "m", 2, score.get("score")) for lock_key in ("one", "two")]
    assert found == [each for each in expected for _ in range(1 if key else 2)]


def test_a_reaper_of_before_recovers_a_job(conn: db.Connection, worker: Worker) -> None:
    job_id = plain(conn)
    worker.take()
    expire(conn, job_id)
    conn.execute("UPDATE dl_jobs SET claimed_pid = NULL")
    assert conn.execute("SELECT job_id, queue, status::text FROM dl_reap()").fetchall() == [(job_id, "q", "queued")]
    assert value(conn, "SELECT job_id FROM dl_reap()") is None


def test_a_keeper_of_before_settles_what_its_worker_held(conn: db.Connection, worker: Worker) -> None:
    job_id = plain(conn)
    worker.take()
    settle = "SELECT job_id, status::text FROM dl_settle(%s, 'drain', 'gone', '{}')"
    assert conn.execute(settle, (worker.name,)).fetchall() == [(job_id, "queued")]
    assert state(conn, job_id) == ("queued", 0)
