"""The dashboard's pure parts: forms of values, alerts, buttons, charts, the heat map; its vendored files."""

import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from answering import shown

from dataloader.api import dashboard
from dataloader.api.dashboard import actions, charts, formats, pages
from dataloader.api.web.cache import SharedAnswer
from dataloader.model.farm import Database
from dataloader.model.kinds import fraction
from dataloader.model.queues import Queue
from dataloader.queue.job import FINAL
from dataloader.queue.plans import partitions
from dataloader.queue.reports import alerts
from dataloader.queue.reports.words import count, duration, percent

VENDOR = [Path(dashboard.__file__).parent / "static/vendor", Path(__file__).parents[1] / "browser/vendor"]
QUEUE = shown(Queue, queue="q", workers=1, lag_sec=0.0)
POSTGRES = shown(Database, max_connections=100, has_reaper=True, ids_left=2_000_000_000)
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "–"), (0, "0 s"), (-3, "0 s"), (0.0804, "80 ms"), (1, "1 s"), (2.54, "2.5 s"), (59.6, "1 min"),
        (61, "1 min 1 s"), (3_600, "1 h"), (7_512, "2 h 5 min"), (90_061, "1 d 1 h"), (172_805, "2 d"),
        (timedelta(minutes=3), "3 min"),
    ],
)  # fmt: skip
def test_durations(seconds: Any, words: str) -> None:
    assert duration(seconds) == words


def test_sizes_counts_and_shares() -> None:
    assert [formats.size(n) for n in (None, 0, 999, 1_000, 99_949, 123_456, 8_400_000, 2.5e12)] == [
        "–", "0 B", "999 B", "1.0 KB", "99.9 KB", "123 KB", "8.4 MB", "2.5 TB",
    ]  # fmt: skip
    assert [count(1_234_567), count(1_000, False), count(None)] == ["1,234,567", "1,000+", "–"]
    assert [percent(x) for x in (0, 0.004, 0.37, 1, None)] == ["0 %", "0.4 %", "37 %", "100 %", "–"]


@pytest.mark.parametrize(
    ("progress", "part", "words"),
    [
        (None, None, ""),
        ({}, None, ""),
        ([1], None, ""),
        ({"processed": 500, "total": 1_000}, 0.5, "500 of 1,000"),
        ({"processed": 5, "total": 0}, None, "processed 5 · total 0"),
        ({"processed": 9, "total": 3, "step": "a"}, 1.0, "9 of 3 · step a"),
        ({"processed": True, "total": "many"}, None, "processed true · total many"),
        ({"processed": 10**400, "total": 1}, None, None),
        ({"percent": 25}, 0.25, "percent 25"),
        ({"deep": {"a": [1]}}, None, 'deep {"a": [1]}'),
    ],
)
def test_progress_whatever_a_pipeline_yields(progress: Any, part: float | None, words: str | None) -> None:
    assert fraction(progress) == part
    assert words is None or formats.steps(progress) == words
    assert len(formats.steps(progress)) <= 120


def test_instants_are_in_the_zone_with_utc_beside_them() -> None:
    moment = formats.clock(lambda: ZoneInfo("Europe/Moscow"), lambda: NOW)
    assert moment(NOW) == (
        '<time datetime="2026-11-21T12:00:00Z"'
        ' title="2026-11-21 15:00:00 Europe/Moscow = 2026-11-21 12:00:00.000000 UTC">15:00:00</time>'
    )
    assert ">00:30:00<" in moment(NOW.replace(day=20, hour=21, minute=30))  # today in that zone
    assert ">20 Nov 15:00:00<" in moment(NOW - timedelta(days=1))
    assert ">21 Nov 2025 15:00<" in moment(NOW - timedelta(days=365))
    assert moment("2026-11-21T12:00:00+00:00") == moment(NOW)
    assert moment("<b>") == "&lt;b&gt;"
    assert moment(None) == "–"


def test_many_webhooks_or_plans_that_do_not_work_are_one_alert() -> None:
    wrong = [
        {"kind": "schedule", "name": "a", "error": "no such day", "since": NOW, "number": 5_000},
        {"kind": "webhook", "name": "ops", "error": "1 undelivered", "since": None, "number": 2},
        {"kind": "backfill", "name": "q1", "error": "it is overdue", "since": NOW, "number": 1},
    ]
    queue = QUEUE | {"length": 3, "workers": 0}
    assert [(alert.text, alert.page) for alert in alerts.farm_alerts({"queues": [queue]}, (), POSTGRES, wrong)] == [
        ("5,000 schedules make no jobs, among them a: no such day.", "schedules"),
        ("2 webhooks do not receive their messages, among them ops: 1 undelivered.", "webhooks"),
        ("The backfill q1 makes no jobs: it is overdue.", "backfills"),
        ("Queue q has 3 due jobs and no worker.", None),
    ]


def test_what_is_wrong_is_said_the_gravest_first() -> None:
    def of(seen: Any = (), postgres: Any = None, **queue: Any) -> list[str]:
        found = alerts.farm_alerts({"queues": [QUEUE | queue]}, seen, POSTGRES | (postgres or {}), ())
        return [alert.text for alert in found]

    assert of() == []
    assert of(dead=1, length=3, workers=0) == ["Queue q has 3 due jobs and no worker.", "1 job is dead in queue q."]
    assert of(length=3, workers=2, stopped=2) == ["All 2 workers of queue q are stopped."]
    assert of(length=3, workers=1, stopped=1) == ["The only worker of queue q is stopped."]
    assert of(workers=3, stopped=1) == ["1 of 3 workers of queue q is stopped."]
    assert of(paused_at=NOW, paused_by="token boss from ::1") == ["Queue q is paused by token boss from ::1."]
    assert of(lag_sec=400.0, length=1) == ["The oldest due job of queue q has waited 6 min 40 s."]
    late = QUEUE | {"lag_sec": 400.0, "length": 1}
    (alert,) = alerts.farm_alerts({"queues": [late]}, (), POSTGRES, ())
    assert (alert.queue, alert.status) == ("q", "queued")  # the page of each says why it waits
    assert of(at_risk=1) == ["1 job of queue q is going to miss its deadline, or has."]
    assert of(at_risk=2, dead=1)[0] == "2 jobs of queue q are going to miss their deadlines, or have."
    assert of(max_length=5, length=5) == ["Queue q is full: 5 jobs are queued."]
    assert of(max_length=1, length=1, workers=1) == ["Queue q is full: 1 job is queued."]
    silent = {"is_live": False, "state": "busy", "host": "vm-2"}
    assert of([silent, silent]) == ["2 workers have not been heard of (vm-2)."]
    assert of([silent | {"state": "dead"}]) == []
    fine = {"is_live": True, "state": "busy", "queues": ["q"], "started_at": NOW}
    hangs = fine | {"state": "stuck", "seen_at": NOW, "reported_at": NOW - timedelta(minutes=12)}
    assert of([hangs, fine]) == ["1 of 2 workers has reported nothing for 12 min."]
    # docs/alerts.md: critical
    assert of([hangs], paused_at=NOW, paused_by=None, dead=1)[0] == "1 job is dead in queue q."
    assert {alert.page for alert in alerts.farm_alerts({"queues": []}, [hangs], POSTGRES, ())} == {"workers"}
    held = {"kind": "session", "pid": 7, "user": "bi", "application": "report", "age_sec": 4_000.0, "xids": 5}
    assert of(postgres={"held_by": held}) == []  # beside an idle queue an old transaction does no harm
    assert of(postgres={"held_by": held, "jobs_dead_tuples": 50_000}) == [
        "The database session of bi (report), backend 7, has held back vacuum for 1 h 6 min:"
        " 50,000 dead rows of dl_jobs cannot be removed."
    ]
    bad = {"in_recovery": True, "connections": 95, "notify_usage": 0.5}
    assert [text.split()[0] for text in of(postgres=bad)] == ["The", "95", "The"]
    assert of(postgres={"read_only": True}) == ["The database is read-only: nothing can be written."]
    assert of(postgres={"lacking": list("abcde")}) == ["The farm's role lacks a, b, c and 2 more rights."]
    reader = ["DELETE on dl_jobs", "INSERT on dl_jobs", "UPDATE on dl_jobs"]
    assert of(postgres={"lacking": reader}) == []  # it only looks
    assert of(postgres={"has_reaper": False})[0].startswith("No reaper works")


def test_buttons_are_those_that_a_state_allows() -> None:
    job: dict[str, Any] = {"status": "queued", "cancel_requested": False, "waiting_for": {"reason": "time"}}

    def of(**more: Any) -> list[str]:
        return [button.name + "!" * bool(button.because) for button in actions.job_buttons(job | more)]

    assert of() == ["run_now", "cancel", "delete"]
    assert of(waiting_for={"reason": "lock"}) == ["run_now!", "cancel", "delete"]
    assert of(status="running") == ["cancel", "cancel", "delete!"]
    assert of(status="running", cancel_requested=True) == ["cancel!", "cancel", "delete!"]
    for final in sorted(FINAL):
        assert of(status=final) == ["requeue", "delete"]
    names = [button.name + "!" * bool(button.because) for button in actions.queue_buttons(QUEUE)]
    assert names == ["pause", "run_all!", "kill_retries!", "requeue_dead!", "delete_dead!"]
    paused = actions.queue_buttons(
        QUEUE | {"paused_at": NOW, "dead": 1, "scheduled": 2_000, "retries": 3, "counted_at": NOW}
    )
    assert next(button.name for button in paused if not button.because) == "resume"
    assert "all ~2,000 scheduled jobs" in paused[1].question
    assert "all 3 jobs that wait for a retry" in paused[2].question
    assert "the one dead job" in paused[4].question


def test_viewers_share_an_answer_but_not_a_failure() -> None:
    shared: SharedAnswer[int] = SharedAnswer(fresh_sec=60)
    answers = iter([ConnectionError(), 3])

    def question() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(ConnectionError):
        shared.ask(question)
    assert [shared.ask(question) for _ in range(3)] == [3, 3, 3]


@pytest.mark.parametrize("folder", VENDOR, ids=("shipped", "tests"))
def test_what_is_vendored_is_what_was_published(folder: Path) -> None:
    """Every file is in the list of checksums, matches its checksum, and has its licence."""
    listed = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text("utf-8").splitlines())
    files = {path.name for path in folder.iterdir()} - {"SHA256SUMS"}
    assert {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files} == listed
    for name in files:
        assert any(other.startswith(name.split("-")[0]) and "LICENSE" in other for other in files)


def test_arguments_are_brief_and_their_numbers_as_they_are() -> None:
    assert (
        formats.brief({"order": 1042, "state": "paid\nnow", "lines": [1, 2]})
        == "order 1042 · state paid · lines [1, 2]"
    )
    assert formats.brief({"text": "x" * 500}).endswith("…")
    assert len(formats.brief({"text": "x" * 500})) == 120
    assert (formats.brief(None), formats.brief([1]), formats.brief({})) == ("", "", "")
    numbers = {None: "–", 3.0: "3", 0.5: "0.5", 1795411234.123456: "1795411234.123456", 1e300: "1e+300"}
    assert {value: formats.number(value) for value in numbers} == numbers


def rows(*names: str) -> list[dict[str, Any]]:
    return [{"partition": name, "status": "queued"} for name in names]


def test_days_are_a_calendar_a_year_whose_columns_are_weeks() -> None:
    days = rows(*partitions.partitions_between("2019-12-30", "2020-01-02", "day"))
    first, second = charts.blocks(days)
    assert (first.label, first.is_calendar, second.label) == ("2019", True, "2020")
    assert first.cells[:2] == [None, None], "1 January 2019 is a Tuesday: one empty cell, and no partition"
    assert [cell["partition"] for cell in first.cells if cell] == ["2019-12-30", "2019-12-31"]
    assert first.cells.index(days[0]) % 7 == 0, "a Monday"
    assert second.cells.index(days[2]) == 2, "a Wednesday"


def test_other_partitions_flow_by_year_or_in_one_block() -> None:
    hours = rows(*partitions.partitions_between("2019-12-31T12:00", "2020-01-01", "6 hours"))
    assert [(block.label, block.is_calendar, len(block.cells)) for block in charts.blocks(hours)] == [
        ("2019", False, 2),
        ("2020", False, 1),
    ]
    months = rows(*partitions.partitions_between("2019-01", "2019-12", "month"))
    assert [(block.is_calendar, len(block.cells)) for block in charts.blocks(months)] == [(False, 12)]
    assert [(block.label, len(block.cells)) for block in charts.blocks(rows("moscow", "2019-01-01"))] == [("", 2)]
    assert charts.blocks([]) == []


@pytest.mark.parametrize(
    ("progress", "claims", "left"),
    [
        ({"processed": 50, "total": 100}, 1, 100.0),  # as fast as from its start
        ({"processed": 50, "total": 100}, 2, None),  # it may have begun at a checkpoint
        ({"processed": 0, "total": 100}, 1, None),
        ({"processed": 100, "total": 100}, 1, 0.0),
        ("none", 1, None),
    ],
)
def test_what_is_left_of_a_run_follows_from_its_own_progress(progress: Any, claims: int, left: float | None) -> None:
    job = {"status": "running", "cancel_requested": False, "error": None, "claims": claims, "progress": progress}
    assert pages.remaining_sec(job, 100.0) == left
    assert pages.remaining_sec(job, None) is None
