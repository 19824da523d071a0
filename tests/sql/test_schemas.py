"""Queues in schemas of their own: who writes from elsewhere needs no search_path, and two queues do not mix."""

from __future__ import annotations

from uuid import UUID, uuid4

import psycopg
import pytest
from hands import Worker, enqueue, heard, row
from psycopg import sql

from dataloader.queue import db, lifecycle, logs, migrations
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


def test_two_queues_in_two_schemas_of_one_database_do_not_mix(empty_db: str) -> None:
    for schema in ("one", "two"):
        migrations.migrate(empty_db, schema)
    one, two = Worker(empty_db, "host:1:boot", "one"), Worker(empty_db, "host:2:boot", "two")
    with one.conn, two.conn:
        enqueue(one.conn)
        assert two.claim().job is None
        assert one.take()


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
        assert logs.keep_days(conn, None) == 0
