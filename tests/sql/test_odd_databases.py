"""The database around the queue: schemas and search paths, an administrator's defaults, publications of all tables."""

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from hands import Conn, Worker, enqueue, heard, plain, row, started, state, value
from psycopg import sql

from dataloader.farm import fence
from dataloader.queue import db, lifecycle, logs, migrations, operations
from dataloader.queue.reports import stats


def test_producers_and_foreign_workers_need_no_search_path(empty_db: str) -> None:
    """A plain insert, claim and finish by the table's full name from elsewhere: the triggers find their way."""
    migrations.migrate(empty_db, "Queue")
    ours = Worker(empty_db, "host:1:boot", "Queue")
    with ours.conn, psycopg.connect(empty_db, autocommit=True) as elsewhere:
        elsewhere.execute("CREATE TABLE decoy (x int)")

        def insert(queue: str, wait: str = "0") -> UUID:
            job_id = uuid4()
            elsewhere.execute(
                'INSERT INTO "Queue".dl_jobs (job_id, queue, task, lock_key, available_at)'
                " VALUES (%s, %s, 't', 'k', now() + %s::interval)",
                (job_id, queue, wait),
            )
            return job_id

        theirs, waits, later = insert("a"), insert("b"), insert("c", "1 hour")
        assert sorted(ours.notes()) == ["a", "b", "c"]
        assert row(ours.conn, later)["blocked_on"] == "time"
        change = sql.SQL('UPDATE "Queue".dl_jobs SET status = {} WHERE job_id = %s')
        elsewhere.execute(change.format("running"), (theirs,))
        elsewhere.execute("UPDATE \"Queue\".dl_jobs SET lease_expires_at = now() + '1 h'")
        assert ours.claim("b").job is None
        ours.notes()
        elsewhere.execute(change.format("succeeded"), (theirs,))
        assert heard(ours.conn) == ["b"]
        assert ours.take("b").job_id == waits


def test_a_schema_that_was_renamed_is_noticed_and_its_functions_are_written_anew(empty_db: str) -> None:
    migrations.migrate(empty_db, "jobs1")
    with db.connect(empty_db, name="test", schema="jobs1") as conn:
        logs.keep_days(conn, None)
        conn.execute("ALTER SCHEMA jobs1 RENAME TO jobs")  # the former name begins with the new one
    with db.connect(empty_db, name="test", schema="jobs") as conn:
        with pytest.raises(migrations.SchemaError, match=r"was renamed.*: run `dataloader migrate`"):
            migrations.check(conn)
        assert any("dl_jobs_journal is changed" in each for each in migrations.drifted(conn))
        assert migrations.migrate(empty_db, "jobs") != []
        migrations.check(conn)
        assert migrations.drifted(conn) == []
        left = "SELECT proname FROM pg_proc WHERE pronamespace = 'jobs'::regnamespace AND prosrc LIKE '%jobs1%'"
        assert conn.execute(left).fetchall() == []
        job_id = enqueue(conn)
        assert stats.job(conn, job_id)
        assert stats.aggregate(conn) > 0
        conn.execute("SELECT dl_unpark_freed(); SELECT dl_resolve_stranded(gen_random_uuid(), 10)")
        conn.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now() - interval '2 days'")
        assert lifecycle.prune(conn, 86_400.0, "-infinity", 100)[0] == 1
        assert logs.keep_days(conn, None) <= 1  # it finds those that it had made; at midnight a further one is due


DEFAULTS = {
    "default_transaction_isolation": "repeatable read",
    "statement_timeout": "200ms",
    "lock_timeout": "200ms",
    "idle_in_transaction_session_timeout": "200ms",
    "DateStyle": "German, DMY",
    "client_encoding": "LATIN1",
    "quote_all_identifiers": "on",
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


def test_times_and_texts_arrive_and_a_step_that_waits_for_another_goes_on_with_what_that_has_left(
    pair: tuple[Worker, Worker],
) -> None:
    """In REPEATABLE READ it would fail (40001), and with it every job whose row somebody changes meanwhile."""
    worker, other = pair
    job = worker.start_new()
    assert lifecycle.beat(worker.conn, [job], '{"step": "ж"}', True) is False
    assert worker.finish(job, "fail", error="ж") == "failed"
    found = lifecycle.status(other.conn, job.job_id) or {}
    assert (found["error"], found["progress"], found["status"]) == ("ж", {"step": "ж"}, "failed")
    assert migrations.drifted(other.conn) == []
    job = worker.start_new()
    with db.connect(other.conn.info.dsn, name="observer", schema="public") as observer:
        other.conn.execute("BEGIN")
        other.conn.execute("UPDATE dl_jobs SET cancel_requested = true WHERE status = 'running'")
        with started(lambda: worker.finish(job), worker.pid, observer) as ending:
            other.conn.execute(LONGER)
            other.conn.execute("COMMIT")
            assert ending.result() == "canceled"
    assert state(other.conn, job.job_id) == ("canceled", 1)


def test_a_pipelines_transaction_may_last(strange_db: str) -> None:
    """And is otherwise as the role wants it."""
    with psycopg.connect(strange_db, autocommit=True, options="-c statement_timeout=0 -c lock_timeout=0") as conn:
        if conn.info.server_version >= 170_000:
            make_default(conn, "transaction_timeout", "200ms")
    with fence.transaction(strange_db, "public", {uuid4(): 1}) as conn:
        conn.execute(LONGER)
        for limit in ("idle_in_transaction_session_timeout", "lock_timeout"):
            assert value(conn, "SELECT current_setting(%s)", limit) == "0"
        assert value(conn, "SELECT current_setting('default_transaction_isolation')") == "repeatable read"


def test_the_address_may_limit_what_is_otherwise_without_limit(dsn: str) -> None:
    for limit in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
        address = f"{dsn} options='-c {limit}=7s'"
        with db.connect(address, name="test", schema="public", idle_in_transaction_timeout=0) as conn:
            assert value(conn, "SELECT current_setting(%s)", limit) == "7s"


DAY = 86_400.0
# Tables whose rows a publication could not identify, with the partitions.
WITHOUT_IDENTITY = """
SELECT relname FROM pg_class c
 WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p') AND relreplident IN ('d', 'n')
   AND (relreplident = 'n' OR NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary))
"""


@pytest.fixture
def own(own_db: str, as_superuser: Callable[[str], str]) -> Iterator[Conn]:
    """A session on a database whose tables are all published."""
    with psycopg.connect(as_superuser(own_db), autocommit=True) as superuser:
        superuser.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    with db.connect(own_db, name="test", schema="public") as conn:
        yield conn


def test_every_table_and_every_partition_has_a_replica_identity(own_db: str) -> None:
    with db.connect(own_db, name="test", schema="public") as conn:
        assert logs.keep_days(conn, None) == 3  # the partitions of today and of the next days
        assert conn.execute(WITHOUT_IDENTITY).fetchall() == []


def test_jobs_with_logs_are_deleted_and_pruned(own: Conn) -> None:
    logs.keep_days(own, None)
    for ago in ("0 s", "30 days"):
        job_id = enqueue(own)
        own.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now() WHERE job_id = %s", (job_id,))
        own.execute(
            "INSERT INTO dl_job_logs VALUES (%s, 1, 1, 1, now() - %s::interval, 'info', 'log', 'x')", (job_id, ago)
        )
    operations.change(own, "delete", [job_id], "test")
    own.execute("UPDATE dl_jobs SET finished_at = now() - interval '2 days'")
    assert lifecycle.prune(own, DAY, "-infinity", 100)[0] == 1
    own.execute("INSERT INTO dl_job_logs VALUES (gen_random_uuid(), 1, 1, 1, '2020-01-01', 'info', 'log', 'x')")
    logs.keep_days(own, 10)
    assert value(own, "SELECT count(*) FROM dl_job_logs") == 0


def test_the_reapers_notes_and_the_keys_that_became_free_go_on(own: Conn) -> None:
    plain(own)
    own.execute("INSERT INTO dl_freed (key_hash, since) VALUES (1, '2001-01-01')")
    own.execute("INSERT INTO dl_freed (parent_id, since) VALUES (gen_random_uuid(), '2001-01-01')")
    own.execute("SELECT dl_unpark_freed()")
    assert value(own, "SELECT count(*) FROM dl_freed") == 0
    own.execute("UPDATE dl_rolled SET last_event = last_event; UPDATE dl_alerted SET last_event = last_event")
    assert stats.aggregate(own) > 0
