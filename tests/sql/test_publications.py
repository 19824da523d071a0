"""A publication FOR ALL TABLES (Debezium, an upgrade by logical replication) hurts no statement of the farm.

PostgreSQL refuses an UPDATE or a DELETE of a published table without a replica identity, whatever wal_level is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest
from hands import Conn, enqueue, plain, value

from dataloader.queue import db, lifecycle, logs, operations
from dataloader.queue.reports import stats

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
    own.execute("SELECT dl_unpark_freed(); SELECT dl_resolve_freed()")
    assert value(own, "SELECT count(*) FROM dl_freed") == 0
    own.execute("UPDATE dl_rolled SET last_event = last_event; UPDATE dl_alerted SET last_event = last_event")
    assert stats.aggregate(own) > 0
