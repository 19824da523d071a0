"""The pure parts of the dashboard's pages: the chart's columns, a job's card, times of a zone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from dataloader.api.dashboard import card, charts, formats

NOW = datetime(2026, 11, 24, 12, tzinfo=UTC)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def test_the_chart_draws_every_step_and_lists_those_with_runs() -> None:
    steps = [
        {"at": ago(120), "processed": 5, "failed": 1},
        {"at": ago(60), "processed": 0, "failed": 0},
        {"at": NOW, "processed": 0, "failed": 0},
    ]
    drawn = charts.throughput(charts.range_of("1h"), steps)
    assert drawn["columns"] == [[1_795_521_480, 1_795_521_540, 1_795_521_600], [5, 0, 0], [1, 0, 0]]
    assert drawn["rows"] == [steps[2], steps[0]]
    assert (drawn["processed"], drawn["failed"]) == (5, 1)


JOB: dict[str, Any] = {"status": "running", "cancel_requested": False, "error": None, "claims": 1}


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"status": "queued"}, "its key is busy"),
        ({}, ""),
        ({"cancel_requested": True}, "asked to stop"),
        ({"status": "failed", "error": "ValueError: no\n\nTraceback"}, "ValueError: no"),
        ({"status": "lost", "error": "x" * 500}, "x" * 159 + "…"),
        ({"status": "succeeded", "error": "of an attempt before"}, ""),
    ],
)
def test_the_reason_of_a_state_is_a_line(job: dict[str, Any], reason: str) -> None:
    assert card.reason(JOB | job, "its key is busy") == reason


def beat(seconds_ago: float, done: int) -> dict[str, Any]:
    return {"kind": "heartbeat", "ts": ago(seconds_ago), "payload": {"progress": {"processed": done, "total": 100}}}


PICKED = {"kind": "picked", "ts": ago(100), "payload": {"attempt": 1}}


@pytest.mark.parametrize(
    ("done", "events", "claims", "left"),
    [
        (50, [PICKED], 1, 100.0),  # as fast as from its start
        (50, [PICKED], 2, None),  # it may have begun at a checkpoint
        (50, [PICKED, beat(60, 40)], 2, 250.0),  # 10 in 50 s; the report of the 50 is 10 s old, so 240 s are left
        (50, [beat(500, 1), PICKED, beat(60, 40)], 2, 250.0),  # a run before does not count
        (50, [PICKED, beat(60, 50)], 2, None),  # it stands still
        (0, [PICKED], 1, None),
        (100, [PICKED], 1, 0.0),
    ],
)
def test_what_is_left_of_a_run_follows_from_its_own_progress(
    done: int, events: list[dict[str, Any]], claims: int, left: float | None
) -> None:
    job = JOB | {"progress": {"processed": done, "total": 100}, "heartbeat_at": ago(10), "claims": claims}
    expected = None if left is None else max(left - (10 if len(events) > 1 else 0), 0.0)
    assert card.remaining_sec(job, events, 100.0, NOW) == pytest.approx(expected)
    assert card.remaining_sec(job | {"progress": "none"}, events, 100.0, NOW) is None
    assert card.remaining_sec(job, events, None, NOW) is None


def test_a_relative_time_takes_the_focus_and_has_the_instant_as_its_title() -> None:
    told = formats.clock(lambda: ZoneInfo("Asia/Tokyo"), lambda: NOW, is_relative=True)(ago(180))
    assert told == (
        '<time datetime="2026-11-24T11:57:00Z"'
        ' title="2026-11-24 20:57:00 Asia/Tokyo = 2026-11-24 11:57:00.000000 UTC"'
        ' class="ago" tabindex="0">20:57:00</time>'
    )
    assert formats.clock(lambda: ZoneInfo("UTC"), lambda: NOW)(NOW).count("UTC") == 1
