"""The load of a farm's last week, from what its runs took."""

from __future__ import annotations

import pytest

from dataloader.queue import db
from dataloader.queue.reports import runs

SPAN = """
INSERT INTO dl_spans (task, queue, minutes, at, figure, count, total, largest, slots, counts)
VALUES (%s, 'q', 60, date_trunc('hour', now()) - make_interval(hours => %s), %s, %s, %s, 1, '{0}', '{1}')"""

SINCE = "SELECT 10 + extract(epoch FROM now() - date_trunc('hour', now()))::float8 / 3600"


def test_without_runs_there_is_no_load(conn: db.Connection) -> None:
    assert runs.load(conn) == {"jobs_a_day": 0.0, "run_sec": None, "peak": 1.0}


def test_the_busiest_hour_is_set_beside_the_mean_one(conn: db.Connection) -> None:
    for task, hours, figure, count, seconds in (
        ("a", 10, "succeeded", 30, 300.0),
        ("b", 10, "failed", 10, 20.0),
        ("a", 3, "canceled", 10, 80.0),
        ("a", 3, "waiting", 1_000, 5_000.0),
        ("a", 24 * 8, "succeeded", 5_000, 5_000.0),
    ):
        conn.execute(SPAN, (task, hours, figure, count, seconds))
    told = runs.load(conn)
    (hours,) = conn.execute(
        "SELECT 10 + extract(epoch FROM now() - date_trunc('hour', now()))::float8 / 3600"
    ).fetchone()
    assert told["run_sec"] == pytest.approx(8)
    assert told["jobs_a_day"] == pytest.approx(50 / hours * 24, rel=0.01)
    assert told["peak"] == pytest.approx(40 / (50 / hours), rel=0.01)
