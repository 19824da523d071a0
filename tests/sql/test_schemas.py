"""Queues in schemas of their own: who writes from elsewhere needs no search_path, and two queues do not mix."""

from __future__ import annotations

from uuid import UUID, uuid4

import psycopg
from hands import Worker, enqueue, heard, row
from psycopg import sql

from dataloader.queue import migrations


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
