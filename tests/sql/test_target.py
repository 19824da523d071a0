"""The fence in the target database: what a run that lost its claim writes there does not stand."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from uuid import UUID, uuid4

import psycopg
import pytest
from hands import PATIENCE, until, value

from dataloader import db, target
from dataloader.target import Overtaken


@pytest.fixture
def table(conn: db.Connection) -> db.Connection:
    """A session on the target, where pipelines fill `written`."""
    conn.execute("DROP TABLE IF EXISTS dl_fence")
    conn.execute("CREATE TABLE written (claim int)")
    return conn


def written(conn: db.Connection) -> list[int]:
    return [claim for (claim,) in conn.execute("SELECT claim FROM written ORDER BY claim")]


def test_the_newest_claim_commits_as_often_as_it_likes(table: db.Connection, dsn: str) -> None:
    job = uuid4()
    for claim in (1, 1, 3):
        with target.transaction(dsn, "public", job, claim) as conn:
            conn.execute("INSERT INTO written VALUES (%s)", (claim,))
    assert written(table) == [1, 1, 3]


def test_a8_an_older_claim_cannot_begin(table: db.Connection, dsn: str) -> None:
    job = uuid4()
    with target.transaction(dsn, "public", job, 2):
        pass
    with pytest.raises(Overtaken), target.transaction(dsn, "public", job, 1):
        pytest.fail("began")


def test_a8_a_run_that_is_overtaken_meanwhile_cannot_commit(table: db.Connection, dsn: str) -> None:
    """Even where its session could not be ended, such as another role's."""
    job = uuid4()
    with pytest.raises(Overtaken), target.transaction(dsn, "public", job, 1) as conn:  # noqa: PT012
        conn.execute("SET application_name = 'in disguise'")
        conn.execute("INSERT INTO written VALUES (1)")
        with target.transaction(dsn, "public", job, 2) as newer:
            newer.execute("INSERT INTO written VALUES (2)")
    assert written(table) == [2]


def test_a_newer_run_ends_the_sessions_of_older_ones_and_their_locks(table: db.Connection, dsn: str) -> None:
    job = uuid4()
    with pytest.raises(psycopg.OperationalError), target.transaction(dsn, "public", job, 9) as conn:  # noqa: PT012
        conn.execute("LOCK TABLE written")
        with target.transaction(dsn, "public", job, 10) as newer:
            newer.execute("INSERT INTO written VALUES (10)")
        conn.execute("INSERT INTO written VALUES (9)")
    assert written(table) == [10]


def test_other_jobs_and_runs_beside_it_are_left_alone(table: db.Connection, dsn: str) -> None:
    job = uuid4()
    with (
        target.transaction(dsn, "public", job, 1) as one,
        target.transaction(dsn, "public", job, 1) as same,
        target.transaction(dsn, "public", uuid4(), 7) as other,
    ):
        for conn in (one, same, other):
            conn.execute("INSERT INTO written VALUES (1)")
    assert written(table) == [1, 1, 1]


def test_a_newer_run_waits_for_a_commit_under_way(table: db.Connection, dsn: str) -> None:
    """Either it is seen by the newer run, or it does not happen."""
    job = uuid4()
    table.execute("ALTER TABLE written ADD UNIQUE (claim) DEFERRABLE INITIALLY DEFERRED")
    table.execute("INSERT INTO written VALUES (0)")
    holder = psycopg.connect(dsn)
    holder.execute("DELETE FROM written")

    def older() -> None:
        with target.transaction(dsn, "public", job, 1) as conn:
            conn.execute("SET application_name = 'older'")
            conn.execute("INSERT INTO written VALUES (0)")  # its commit waits for the holder's delete

    def newer() -> list[int]:
        with target.transaction(dsn, "public", job, 2) as conn:
            return [claim for (claim,) in conn.execute("SELECT claim FROM written")]

    with holder, ThreadPoolExecutor(2) as pool:
        committing = pool.submit(older)
        older_pid = until(lambda: waiting(table, "older"), "the older run to commit")
        seen = pool.submit(newer)
        until(lambda: older_pid in blockers(table, f"dl-job:{job}:2"), "the newer run to wait for it")
        holder.commit()
        committing.result(PATIENCE)
        assert seen.result(PATIENCE) == [0]
        holder.rollback()


def test_a_newer_run_waits_until_an_older_ones_session_is_gone(table: db.Connection, dsn: str) -> None:
    """So it finds no locks of it on the target's rows."""
    job = uuid4()
    with suppress(psycopg.OperationalError), target.transaction(dsn, "public", job, 1) as older:
        backend = older.info.backend_pid
        os.kill(backend, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            newer = pool.submit(lambda: run(dsn, job, 2))
            try:
                until(lambda: "BackendTermination" in events(table, f"dl-job:{job}:2"), "the newer run to wait for it")
            finally:
                os.kill(backend, signal.SIGCONT)
            newer.result(PATIENCE)


def run(dsn: str, job: UUID, claim: int) -> None:
    with target.transaction(dsn, "public", job, claim):
        pass


def events(conn: db.Connection, name: str) -> list[str]:
    return [
        event
        for (event,) in conn.execute("SELECT wait_event FROM pg_stat_activity WHERE application_name = %s", (name,))
    ]


def waiting(conn: db.Connection, name: str) -> int:
    return value(
        conn, "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock'", name
    )


def blockers(conn: db.Connection, name: str) -> list[int]:
    return value(conn, "SELECT pg_blocking_pids(pid) FROM pg_stat_activity WHERE application_name = %s", name) or []


def test_twenty_runs_may_be_the_first(table: db.Connection, dsn: str) -> None:
    """The table is made on first use, by whoever comes first."""

    def run(number: int) -> None:
        with target.transaction(dsn, "public", uuid4(), 1) as conn:
            conn.execute("INSERT INTO written VALUES (%s)", (number,))

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(run, range(20)))
    assert written(table) == list(range(20))


def test_a_search_path_of_the_pipelines_own_does_not_matter(table: db.Connection, dsn: str) -> None:
    with target.transaction(dsn, "public", uuid4(), 1) as conn:
        conn.execute("SET search_path = pg_catalog")
        conn.execute("INSERT INTO public.written VALUES (1)")
    assert written(table) == [1]


def test_fences_of_long_ago_are_forgotten(table: db.Connection, dsn: str) -> None:
    with target.transaction(dsn, "public", uuid4(), 1):
        pass
    table.execute("UPDATE dl_fence SET raised_at = now() - interval '31 days'")
    with target.transaction(dsn, "public", uuid4(), 1):
        pass
    assert value(table, "SELECT count(*) FROM dl_fence") == 1
