"""Lists of jobs, page by page: each job once, in its place, whatever the filters, the pages' size and the times are."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import UUID

import pytest
from hands import Conn, plain, row
from test_search import _holds, filled, kind_of, pages

from dataloader.queue import db
from dataloader.queue.fields import FILTERS
from dataloader.queue.job import STATUSES, TALLIED
from dataloader.queue.reports import stats
from dataloader.queue.reports.stats import Wanted

Rows = list[dict[str, Any]]


def changed(job: dict[str, Any]) -> datetime:
    at: datetime = job["finished_at"] or (job["status"] == "running" and job["started_at"]) or job["created_at"]
    return at


def passes(job: dict[str, Any], wanted: Wanted) -> bool:
    is_in_time = (wanted.since or db.EARLIEST) <= changed(job) <= (wanted.until or db.LATEST)
    has_fields = all(getattr(wanted, name) in (None, job[name]) for name in (*FILTERS, "error_group"))
    return is_in_time and has_fields and (wanted.status is None or _holds(job, f"status:{wanted.status}"))


def some_filters(rng: random.Random, jobs: Rows) -> Wanted:
    one = rng.choice(jobs)
    fields = {name: one[name] for name in (*FILTERS, "error_group") if rng.random() < 0.2}
    times = {name: changed(rng.choice(jobs)) for name in ("since", "until") if rng.random() < 0.3}
    return Wanted(**fields, **times, status=rng.choice([None, *STATUSES]))


def in_order(jobs: Rows, wanted: Wanted) -> list[UUID]:
    """The list by another reading of it: all rows, filtered and sorted in Python."""
    listed = [job for job in jobs if passes(job, wanted)]
    return [job["job_id"] for job in sorted(listed, key=lambda job: (changed(job), job["job_id"]), reverse=True)]


@pytest.mark.parametrize("seed", range(2))
def test_all_pages_have_each_job_once(conn: Conn, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Also where more jobs have one time than a page may read."""
    rng, jobs = random.Random(seed), filled(conn, seed, 60)
    by_id = {job["job_id"]: job for job in jobs}
    for _ in range(20):
        wanted, limit, scan = some_filters(rng, jobs), rng.choice([1, 2, 7, 500]), rng.choice([None, 1, 2, 5, 40])
        ids = in_order(jobs, wanted)
        assert [job["job_id"] for job in pages(conn, wanted, limit, scan)] == ids, (wanted, limit, scan)
        by_key = [job["job_id"] for job in pages(conn, replace(wanted, sort="key"), limit)]
        assert sorted(by_key) == sorted(ids), wanted

        monkeypatch.setattr(stats, "SCAN_MOST", scan or 1)
        kinds = rng.sample(TALLIED, 3)
        chosen, after = stats.chosen(conn, wanted, kinds, limit)
        while after is not None:
            more, after = stats.chosen(conn, wanted, kinds, limit, after)
            chosen += more
        assert chosen == [job_id for job_id in ids if kind_of(by_id[job_id]) in kinds], (wanted, kinds)


def test_a_job_that_goes_on_has_no_time_of_an_end_and_is_listed_without_a_start(conn: Conn) -> None:
    """Another service cannot write such a time: lists would show its job twice, or not at all."""
    added = plain(conn, finished_at="now")
    job_id, no_start = plain(conn), plain(conn)
    conn.execute(
        "UPDATE dl_jobs SET status = 'running', started_at = now(), finished_at = now() WHERE job_id = %s", (job_id,)
    )
    conn.execute("UPDATE dl_jobs SET status = 'running', attempt = 1 WHERE job_id = %s", (no_start,))
    every = {added, job_id, no_start}
    for wanted, expected in (
        (Wanted(), every),
        (Wanted(status="running"), every - {added}),
        (Wanted(sort="key"), every),
    ):
        assert sorted(job["job_id"] for job in stats.jobs(conn, wanted).rows) == sorted(expected)
    assert (row(conn, added)["finished_at"], row(conn, job_id)["finished_at"]) == (None, None)
