"""Facts that reaper and keeper gather for people: counts of queues, sessions that hold back vacuum, the workers."""

from typing import Any

import psycopg
import pytest
import structlog
from hands import Conn, enqueue, many, quietly, until, value
from structlog.testing import capture_logs

from dataloader.farm import reaper
from dataloader.queue import db
from dataloader.queue.reports import stats

LOG = structlog.get_logger("reaper")


def watched(conn: Conn, watch: reaper.Watch) -> list[Any]:
    """The events of one round."""
    with capture_logs() as lines, reaper.going_on(conn, LOG, "reaper.watch.failed"):
        watch.check(conn, None)
    return [line for line in lines if line["event"].startswith("reaper.")]


def test_who_holds_back_vacuum_is_told_once_and_when_it_is_over(own_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a database of its own: another test's dead rows would count too."""
    monkeypatch.setattr(stats, "HELD_SEC", 0.0)
    monkeypatch.setattr(stats, "MUCH_DEAD", 1_000)
    watch = reaper.Watch(LOG, 0)
    with db.connect(own_db, name="test", schema="public") as conn:
        with quietly(conn):
            many(conn, 2_000, "k%s")
        with psycopg.connect(own_db, application_name="report") as report:
            report.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            report.execute("SELECT count(*), 'password=canary-5f2c' FROM dl_jobs")
            assert watched(conn, watch) == []  # so far it does no harm
            conn.execute("UPDATE dl_jobs SET priority = priority + 1")  # which makes dead rows
            conn.execute("SELECT pg_stat_force_next_flush()")
            (entry,) = until(lambda: watched(conn, watch), "the server to count the dead rows")
            assert (entry["event"], entry["log_level"]) == ("reaper.vacuum.held_back", "warning")
            assert (entry["kind"], entry["pid"], entry["application"]) == ("session", report.info.backend_pid, "report")
            assert entry["dead_tuples"] >= 1_000
            assert entry["age_sec"] >= 0
            assert entry["query"].startswith("SELECT count(*), 'password=***")
            assert "canary" not in str(entry)
            assert watched(conn, watch) == []  # said, and not said again for some minutes
            monkeypatch.setattr(reaper, "HELD_AGAIN_SEC", 0.0)
            watch.held_again_at = 0.0
            assert [line["event"] for line in watched(conn, watch)] == ["reaper.vacuum.held_back"]
        assert [line["event"] for line in watched(conn, watch)] == ["reaper.vacuum.released"]
        assert watched(conn, watch) == []


def test_a_round_goes_on_where_the_queues_cannot_be_counted(conn: Conn, dsn: str) -> None:
    enqueue(conn)
    watch = reaper.Watch(LOG, 0)
    with psycopg.connect(dsn) as other:
        other.execute("LOCK TABLE dl_lengths IN ACCESS EXCLUSIVE MODE")
        (entry,) = watched(conn, watch)
    assert entry["event"] == "reaper.watch.failed"
    assert watch.note_at > reaper.now()
    watch.note_at = 0.0
    assert watched(conn, watch) == []
    assert value(conn, "SELECT count(*) FROM dl_lengths") == 1
