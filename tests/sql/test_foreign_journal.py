"""The journal of what other services do: one row for each change of a status, whoever made it, and never two."""

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from foreign import REAP, Foreign
from hands import Conn, Worker, journal, kinds, many, plain, row, value
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

READ = "SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'dl_job_events'"
TELL = "INSERT INTO dl_job_events (job_id, queue, kind) VALUES (%s, 'q', %s)"


def change(conn: psycopg.Connection[Any], job_id: UUID, status: str) -> None:
    """Change the row by a plain UPDATE."""
    conn.execute("UPDATE dl_jobs SET status = %s WHERE job_id = %s", (status, job_id))


def test_a_plain_life_is_told_from_its_insert_to_its_end(conn: Conn, foreign: Foreign) -> None:
    job_id = plain(conn, lock_key="k")
    assert foreign.claim() == (job_id, "k")
    conn.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s', heartbeat_at = now()")
    conn.execute(REAP)
    assert foreign.claim() == (job_id, "k")
    foreign.finish(job_id, "k")
    assert kinds(conn, job_id) == ["queued", "picked", "requeue", "picked", "done"]
    author = {"by": "another service", "user": value(conn, "SELECT session_user")}
    assert [payload for _, payload in journal(conn, job_id)] == [
        author | {"attempt": 0, "application": "test"},
        author | {"attempt": 1, "application": "foreign"},
        author | {"attempt": 1, "application": "test"},
        author | {"attempt": 2, "application": "foreign"},
        author | {"attempt": 2, "application": "foreign"},
    ]


@pytest.mark.parametrize(
    ("end", "kind"), [("succeeded", "done"), *((end, end) for end in ("failed", "canceled", "lost"))]
)
def test_every_end_has_its_kind_and_what_is_put_back_a_fresh_budget_or_what_is_said(
    conn: Conn, worker: Worker, end: str, kind: str
) -> None:
    job_id = plain(conn, attempt=3, max_attempts=3)
    for _ in range(2):
        ended = "UPDATE dl_jobs SET status = %s, cancel_requested = %s, finished_at = now()"
        conn.execute(ended, (end, end == "canceled"))
    assert kinds(conn, job_id) == ["queued", kind]
    change(conn, job_id, "queued")
    assert kinds(conn, job_id) == ["queued", kind, "requeue"]
    assert row(conn, job_id)["finished_at"] is None
    job = worker.take()
    assert (job.job_id, job.attempt) == (job_id, 1)
    assert worker.finish(job) == "succeeded"
    conn.execute("UPDATE dl_jobs SET status = 'queued', attempt = 2, cancel_requested = true")
    assert worker.claim().job is None
    assert (row(conn, job_id)["status"], row(conn, job_id)["attempt"]) == ("canceled", 2)


def tell_of_another_time(conn: Conn, *what: object) -> None:
    conn.execute(TELL.replace("kind)", "kind, ts)").replace("%s)", "%s, '2001-01-01')"), what)


def tell_in_a_savepoint(conn: Conn, *what: object) -> None:
    """It has a transaction number of its own."""
    with conn.transaction():
        conn.execute(TELL, what)


@pytest.mark.parametrize("tell", [tell_of_another_time, tell_in_a_savepoint])
def test_a_service_that_keeps_the_journal_itself_is_not_repeated(conn: Conn, tell: Callable[..., None]) -> None:
    with conn.transaction():
        job_id = plain(conn)
        tell(conn, job_id, "queued")
    with conn.transaction():
        change(conn, job_id, "running")
        tell(conn, job_id, "picked")
    with conn.transaction():
        tell(conn, job_id, "done")
        change(conn, job_id, "succeeded")
    assert journal(conn, job_id) == [("queued", None), ("picked", None), ("done", None)]


def test_what_is_undone_or_deleted_leaves_no_trace(conn: Conn) -> None:
    with conn.transaction():
        conn.execute("DELETE FROM dl_jobs WHERE job_id = %s", (plain(conn),))
    with conn.transaction(force_rollback=True):
        plain(conn)
    job_id = plain(conn)
    with conn.transaction():
        change(conn, job_id, "canceled")
        conn.execute("DELETE FROM dl_jobs")
    assert value(conn, "SELECT count(*) FROM dl_job_events") == 0


def test_inserts_and_deletions_need_no_rights_on_the_journal(
    conn: Conn, dsn: str, make_role: Callable[[str], str]
) -> None:
    """Nor does the search_path matter, nor a table of the role's own by the journal's name."""
    theirs = make_role(dsn)
    role = str(conninfo_to_dict(theirs)["user"])
    conn.execute(sql.SQL("GRANT INSERT, SELECT, DELETE ON dl_jobs TO {}").format(sql.Identifier(role)))
    with psycopg.connect(theirs, autocommit=True) as service:
        service.execute("CREATE TEMP TABLE dl_job_events (job_id uuid)")
        service.execute("SET search_path = pg_temp")
        job_id = uuid4()
        service.execute(
            "INSERT INTO public.dl_jobs (job_id, queue, task, lock_key) VALUES (%s, 'q', 't', 'k')", (job_id,)
        )
        assert [(kind, payload["user"]) for kind, payload in journal(conn, job_id)] == [("queued", role)]
        service.execute("DELETE FROM public.dl_jobs")
    assert value(conn, "SELECT count(*) FROM dl_job_events") == 0


def test_many_inserts_and_steps_at_once_find_their_rows_by_the_index(conn: Conn, dsn: str) -> None:
    """The triggers' plans are kept: made for short tables, they would read all of long ones for each row."""
    job_id = plain(conn)
    conn.execute("VACUUM ANALYZE dl_jobs, dl_job_events")
    with psycopg.connect(dsn, autocommit=True) as service:
        for status in ["canceled", "queued"] * 5:  # five times until PostgreSQL keeps a plan
            change(service, job_id, status)
        for step in (lambda: many(service, 500), lambda: service.execute("UPDATE dl_jobs SET status = 'canceled'")):
            service.execute("SELECT pg_stat_force_next_flush()")
            before = value(conn, READ)
            step()
            service.execute("SELECT pg_stat_force_next_flush()")
            assert value(conn, READ) - before < 500
    told = conn.execute("SELECT kind, count(*)::int FROM dl_job_events WHERE kind IN ('queued', 'canceled') GROUP BY 1")
    assert dict(told.fetchall()) == {"queued": 501, "canceled": 506}
