"""Defaults that an administrator gave the server, the database or the role do not reach the queue's sessions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from hands import Worker, enqueue, started, state, value
from psycopg import sql

from dataloader.farm import fence
from dataloader.queue import db, lifecycle

DEFAULTS = {
    "default_transaction_isolation": "repeatable read",
    "statement_timeout": "200ms",
    "lock_timeout": "200ms",
    "idle_in_transaction_session_timeout": "200ms",
    "DateStyle": "German, DMY",
    "client_encoding": "LATIN1",
}
LONGER = "SELECT pg_sleep(0.3)"


@pytest.fixture
def strange_db(own_db: str) -> str:
    """A database whose sessions begin with DEFAULTS."""
    with psycopg.connect(own_db, autocommit=True) as conn:
        for name, default in DEFAULTS.items():
            make_default(conn, name, default)
    return own_db


def make_default(conn: psycopg.Connection[Any], name: str, default: str) -> None:
    """Of later sessions in this database."""
    names = map(sql.Identifier, (conn.info.dbname, name))
    conn.execute(sql.SQL("ALTER DATABASE {} SET {} = {}").format(*names, sql.Literal(default)))


@pytest.fixture
def pair(strange_db: str) -> Iterator[tuple[Worker, Worker]]:
    """Two sessions there."""
    pair = Worker(strange_db, "w"), Worker(strange_db, "v")
    yield pair
    for worker in pair:
        worker.conn.close()


def test_times_and_texts_arrive_as_they_are(pair: tuple[Worker, Worker]) -> None:
    worker, other = pair
    job_id = enqueue(other.conn)
    job = worker.take()
    assert lifecycle.beat(worker.conn, [job], '{"step": "ж"}', True) is False
    assert worker.finish(job, "fail", error="ж") == "failed"
    found = lifecycle.status(other.conn, job_id) or {}
    assert (found["error"], found["progress"], found["status"]) == ("ж", {"step": "ж"}, "failed")


def test_a_step_that_waits_for_another_goes_on_with_what_that_has_left(pair: tuple[Worker, Worker]) -> None:
    """In REPEATABLE READ it would fail (40001), and with it every job whose row somebody changes meanwhile."""
    worker, other = pair
    job_id = enqueue(other.conn)
    job = worker.take()
    with db.connect(other.conn.info.dsn, name="observer", schema="public") as observer:
        other.conn.execute("BEGIN")
        other.conn.execute("UPDATE dl_jobs SET cancel_requested = true")
        with started(lambda: worker.finish(job), worker.pid, observer) as ending:
            other.conn.execute(LONGER)
            other.conn.execute("COMMIT")
            assert ending.result() == "canceled"
    assert state(other.conn, job_id) == ("canceled", 1)


def test_a_pipelines_transaction_may_last(strange_db: str) -> None:
    """And is otherwise as the role wants it."""
    with psycopg.connect(strange_db, autocommit=True) as conn:
        if conn.info.server_version >= 170_000:
            make_default(conn, "transaction_timeout", "200ms")
    with fence.transaction(strange_db, "public", {uuid4(): 1}) as conn:
        conn.execute(LONGER)
        assert value(conn, "SELECT current_setting('default_transaction_isolation')") == "repeatable read"


def test_a_pool_of_sessions_is_as_one_session(strange_db: str) -> None:
    with db.pool(strange_db, name="test", schema="public", max_size=1) as pool, pool.connection() as conn:
        names = ("default_transaction_isolation", "DateStyle", "lock_timeout", "client_encoding")
        shown = [value(conn, "SELECT current_setting(%s)", name) for name in names]
    assert shown == ["read committed", "ISO, MDY", "0", "UTF8"]


@pytest.mark.parametrize("limit", ["statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"])
def test_the_address_may_limit_what_is_otherwise_without_limit(dsn: str, limit: str) -> None:
    address = f"{dsn} options='-c {limit}=7s'"
    with db.connect(address, name="test", schema="public", idle_in_transaction_timeout=0) as conn:
        assert value(conn, "SELECT current_setting(%s)", limit) == "7s"
