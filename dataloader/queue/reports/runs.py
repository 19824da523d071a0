"""The costs of the latest runs of tasks and queues, and of those in the period before. May raise psycopg.Error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from dataloader.queue import db
from dataloader.queue.db import Conn, Row
from dataloader.queue.reports import stats
from dataloader.queue.reports.histogram import Histogram, bars, merged

FOLDED = 1_000  # spans that one call of fold makes those of an hour
FOLDING_SEC = 3.0
TASKS = 200  # of one list
PARTS = 50  # queues of a task, tasks of a queue
ENDS = ("succeeded", "failed", "canceled")
SPREADS = {
    "run_sec": "succeeded",
    "failed_sec": "failed",
    "waiting_sec": "waiting",
    "memory_mb": "memory",
    "cpu_sec": "cpu",
}
_NEEDS = (
    "max_attempts",
    *(f"{which}{need}" for which in ("", "declared_", "learned_") for need in ("memory_mb", "cpus")),
    "learned_at",
    "replaces",
)
_SQL = db.statements("runs.sql")


@dataclass(frozen=True, slots=True)
class Range:
    """How far back a question goes, from spans of which length, and how long a column of the chart is; in seconds."""

    seconds: int
    span_sec: int
    bin_sec: int


RANGES = {"1h": Range(3_600, 300, 300), "24h": Range(86_400, 3_600, 3_600), "7d": Range(604_800, 3_600, 21_600)}
USUAL = "24h"


def fold(conn: Conn) -> int:
    """Called by the reaper: make old spans those of an hour, delete older ones; FOLDED: there may be more."""
    with conn.transaction():
        db.give_up_after(conn, FOLDING_SEC)
        ((folded,),) = db.call(conn, "dl_fold_spans", FOLDED)
        return int(folded)


def task_runs(conn: Conn, task: str, range_: str = USUAL) -> Row:
    """The runs of a task in one of RANGES: `figures`, `before`, `histogram`, `by_time`, and its `queues`."""
    with conn.transaction():
        known = {"task": task, "is_known": _SQL.value(conn, "is_known", task=task)}
        return known | _runs(conn, "of_task", range_, ("queues", "queue"), task=task)


def queue_runs(conn: Conn, queue: str, range_: str = USUAL) -> Row:
    """The runs of a queue, as `task_runs` has them; `tasks` has the tasks of these runs."""
    with conn.transaction():
        return {"queue": queue} | _runs(conn, "of_queue", range_, ("tasks", "task"), queue=queue)


def listed(conn: Conn, range_: str = USUAL, like: str | None = None) -> Row:
    """The tasks with runs in both periods, those with the most time first; `like` is a part of the name."""
    with conn.transaction():
        period = _period(conn, range_)
        rows = _rows(conn, "tasks", "of_all", **period, like=like or None, most=TASKS + 1)
        names = [row["task"] for row in rows[:TASKS]]
        both = [_rows(conn, name, "of_tasks", "task", **period, tasks=names) for name in ("sums", "slots")]
    by_task: dict[str, tuple[list[Row], list[Row]]] = {name: ([], []) for name in names}
    for place, parts in enumerate(both):
        for part in parts:
            by_task[part["task"]][place].append(part)
    tasks = [row | _compared(period, *by_task[row["task"]]) for row in rows[:TASKS]]
    bounds = {"range": range_, "since": period["since"], "until": period["until"]}
    return bounds | {"tasks": tasks, "is_cut": len(rows) > TASKS}


def tasks_with_runs(conn: Conn, range_: str) -> list[Row]:
    """The rows of stats.tasks, with `figures` and `before` for the tasks that `listed` returns."""
    ran = {row["task"]: row for row in listed(conn, range_)["tasks"]}
    known = {row["task"]: row for row in stats.tasks(conn)}
    unknown = dict.fromkeys(_NEEDS) | {"runs": 0}
    nothing = {"figures": None, "before": None}
    return [
        unknown | {"task": task} | known.get(task, {}) | {name: ran.get(task, nothing)[name] for name in nothing}
        for task in sorted(ran.keys() | known.keys())
    ]


def _runs(conn: Conn, of: str, range_: str, part: tuple[str, str], **filters: str) -> Row:
    """The answer for a task or a queue; `part` is how its runs are divided: the name of the list, and the column."""
    period = _period(conn, range_)
    asked: Row = period | filters | {"bin_sec": RANGES[range_].bin_sec, "most": PARTS}
    sums, slots = (_rows(conn, name, of, "NULL", **asked) for name in ("sums", "slots"))
    histograms = _histograms((row for row in sums if row["is_now"]), (row for row in slots if row["is_now"]))
    bad = merged(histograms[end] for end in ("failed", "canceled") if end in histograms)
    drawn = bars(histograms.get("succeeded", Histogram({})), bad)
    named, column = part
    known: dict[datetime, Row] = {row["at"]: row for row in _rows(conn, "by_time", of, **asked)}
    step = timedelta(seconds=RANGES[range_].bin_sec)
    columns = [period["since"] + n * step for n in range((period["until"] - period["since"]) // step + 1)]
    return {
        "range": range_,
        "since": period["since"],
        "until": period["until"],
        **_compared(period, sums, slots),
        "histogram": [
            {"above": above, "up_to": up_to, "succeeded": succeeded, "others": others}
            for above, up_to, (succeeded, others) in drawn
        ],
        "by_time": [known.get(at, {"at": at, "runs": 0, "failed": 0}) for at in columns],
        named: _rows(conn, "parts", of, column, **asked),
    }


def _period(conn: Conn, range_: str) -> Row:
    db.by_index(conn, bitmaps=True)
    return _SQL.rows(conn, "period", seconds=RANGES[range_].seconds, span_sec=RANGES[range_].span_sec)[0]


def _compared(period: Row, sums: list[Row], slots: list[Row]) -> Row:
    lengths = {"figures": period["until"] - period["since"], "before": period["since"] - period["before"]}
    compared = {}
    for name, length in lengths.items():
        here, there = ([row for row in rows if row["is_now"] is (name == "figures")] for rows in (sums, slots))
        compared[name] = figures(_histograms(here, there), length)
    return compared


def figures(histograms: Mapping[str, Histogram], length: timedelta) -> Row:
    """PURE: counts, runs an hour, the share of failed runs, and spreads; None without a run, or a value."""
    counts = {end: histograms[end].count if end in histograms else 0 for end in ENDS}
    runs = sum(counts.values())
    return {
        "runs": runs,
        **counts,
        "per_hour": runs / (length.total_seconds() / 3_600),
        "failure_rate": counts["failed"] / runs if runs else None,
        **{name: histograms[figure].spread() if figure in histograms else None for name, figure in SPREADS.items()},
    }


def _histograms(sums: Iterable[Row], slots: Iterable[Row]) -> dict[str, Histogram]:
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    for row in slots:
        counts[row["figure"]][row["slot"]] = row["count"]
    return {
        row["figure"]: Histogram(counts[row["figure"]], row["total"], row["largest"])
        for row in sums
        if row["figure"] in counts
    }


def _rows(conn: Conn, name: str, of: str, part: str = "", **parameters: Any) -> list[Row]:
    statement = _SQL[name].replace("{of}", _SQL[of]).replace("{part}", part)
    return db.rows(conn, statement, parameters, prepare=False)
