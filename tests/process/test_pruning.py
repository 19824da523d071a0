"""The reaper deletes what ended long ago, where DL_RETENTION_DAYS says so."""

from __future__ import annotations

import psycopg
import pytest
from farming import Farm, until


def finished(farm: Farm, number: int, hours_ago: int) -> None:
    """Jobs that ended so long ago, each with a row in the journal."""
    farm.conn.execute(
        "WITH made AS (INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, finished_at, journaled)"
        "  SELECT gen_random_uuid(), 'q', 't', i::text, 'succeeded', now() - make_interval(hours => %s), 1"
        "    FROM generate_series(1, %s) i RETURNING job_id)"
        " INSERT INTO dl_job_events (job_id, queue, kind) SELECT job_id, 'q', 'done' FROM made",
        (hours_ago, number),
    )


def overdue(farm: Farm) -> None:
    """A running job whose lease is over."""
    farm.conn.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, attempt, lease_expires_at)"
        " VALUES (gen_random_uuid(), 'q', 't', 'k', 'running', 1, now() - interval '1 hour')"
    )


def rows(farm: Farm) -> tuple[int, int]:
    """How many jobs and journal rows there are."""
    jobs, events = farm.rows("SELECT (SELECT count(*) FROM dl_jobs), (SELECT count(*) FROM dl_job_events)")[0]
    return jobs, events


def test_c7_the_reaper_deletes_over_several_batches_and_says_how_many(farm: Farm) -> None:
    finished(farm, 1_200, hours_ago=13)
    finished(farm, 3, hours_ago=11)
    reaper = farm.start("reaper", dl_retention_days=0.5)
    until(lambda: rows(farm) == (3, 3), "the old ones to go")
    # A round is half a second: one that may be short of time leaves the rest to the next.
    until(lambda: sum(line["count"] for line in reaper.events("reaper.pruned")) == 1_200, "the log")
    until(lambda: sum(line["count"] for line in reaper.events("jobs.pruned")) == 1_200, "the metrics")
    assert reaper.stop() == 0


def test_c7_without_the_setting_everything_is_kept(farm: Farm) -> None:
    finished(farm, 3, hours_ago=100_000)
    reaper = farm.start("reaper")
    overdue(farm)
    until(lambda: reaper.events("reaper.requeued"), "a round of the reaper")
    assert reaper.stop() == 0
    assert rows(farm)[0] == 4
    assert not reaper.events("reaper.pruned")


@pytest.mark.parametrize(
    "trouble", ["LOCK TABLE dl_rolled IN EXCLUSIVE MODE", "ALTER TABLE dl_totals DROP COLUMN buckets; COMMIT"]
)
def test_leases_end_and_old_jobs_go_although_the_journal_cannot_be_summed_up(
    farm: Farm, own_db: str, trouble: str
) -> None:
    finished(farm, 3, hours_ago=13)
    with psycopg.connect(own_db) as other:
        other.execute(trouble)  # type: ignore[arg-type]
        reaper = farm.start("reaper", dl_retention_days=0.5)
        failed = until(lambda: reaper.events("reaper.roll.failed"), "a warning")
        assert "dl_" in failed[0]["error"] or "lock timeout" in failed[0]["error"]
        until(lambda: rows(farm) == (0, 0), "the old ones to go")
        overdue(farm)
        until(lambda: reaper.events("reaper.requeued"), "the lease to be seen")
        assert not reaper.events("reaper.session.lost")
    assert reaper.stop() == 0
