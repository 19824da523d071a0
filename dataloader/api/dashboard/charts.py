"""PURE: the pages' charts: columns over time, bars of a histogram, lanes of workers, throughput, a backfill's heat map.

A template draws the rectangles; their sizes are attributes, for the content security policy forbids styles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from itertools import groupby
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from dataloader.log import masked
from dataloader.queue.plans.partitions import moment
from dataloader.queue.reports.timeline import Run, busy

WIDTH, HEIGHT = 720.0, 120.0
LANE, GAP = 20.0, 6.0
LANES = 40  # workers of one chart, those with the most time first
RECTANGLES = 3_000  # of one chart
THINNEST = 1.0  # in a chart's own units
SPARSE = 3  # days for one partition: then most of a calendar would be empty
Row = Mapping[str, Any]


class Rectangle(NamedTuple):
    """A part of a chart, and the text of it."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    row: Any


class Lane(NamedTuple):
    """A worker's runs: `busy` is the share of the time in which it had one."""

    worker: str
    runs: int
    busy: float
    rectangles: list[Rectangle]


class Range(NamedTuple):
    """A span up to now, in steps (seconds); `name` stands in the address, the words on the page."""

    name: str
    span: str
    step: str
    span_sec: int
    step_sec: int


RANGES = {
    "1h": Range("1h", "1 hour", "minute", 3_600, 60),
    "6h": Range("6h", "6 hours", "5 minutes", 6 * 3_600, 300),
    "24h": Range("24h", "24 hours", "15 minutes", 24 * 3_600, 900),
    "7d": Range("7d", "7 days", "hour", 7 * 86_400, 3_600),
}
DEFAULT_RANGE = "1h"


def throughput(wanted: Range, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The steps of `stats.throughput` as the page shows them.

    `columns` are drawn: instants (seconds since 1970), runs that ended, runs of them that failed. `rows` are listed:
    the steps with a run and the present one, the newest first.
    """
    columns = [
        [int(step["at"].timestamp()) for step in steps],
        [step["processed"] for step in steps],
        [step["failed"] for step in steps],
    ]
    return {
        "range": wanted,
        "columns": columns,
        "processed": sum(columns[1]),
        "failed": sum(columns[2]),
        "rows": [step for step in reversed(steps) if step["processed"] or step is steps[-1]],
    }


def stacked(rows: Sequence[Mapping[str, Any]], below: str, above: str) -> list[Rectangle]:
    """A column for each row: the count `below` at the bottom, of the kind `done`, and on it `above`, `failed`.

    Each count above 0 is at least THINNEST high.
    """
    most = max((row[below] + row[above] for row in rows), default=0) or 1
    step = WIDTH / max(len(rows), 1)
    bars = []
    for number, row in enumerate(rows):
        y = HEIGHT
        for name, kind in ((below, "done"), (above, "failed")):
            if row[name]:
                height = max(row[name] / most * HEIGHT, THINNEST)
                y = max(y - height, 0.0)
                x, width = _short(number * step), _short(step * 0.86)
                bars.append(Rectangle(x, _short(y), width, _short(height), kind, row))
    return bars


def lanes(runs: Iterable[Run], since: datetime, until: datetime) -> list[Lane]:
    """A lane for each worker, by name; of more than LANES those that had the most to do.

    Runs that would overlap on the screen are drawn as one, and no more than RECTANGLES of all.
    """
    of_worker: dict[str, list[Run]] = {}
    for run in runs:
        of_worker.setdefault(run.worker, []).append(run)
    all_lanes = [Lane(worker, len(own), busy(own, since, until), []) for worker, own in of_worker.items()]
    shown = sorted(sorted(all_lanes, key=lambda lane: -lane.busy)[:LANES], key=lambda lane: lane.worker)
    most = RECTANGLES // max(len(shown), 1)
    for number, lane in enumerate(shown):
        lane.rectangles.extend(_lane_boxes(of_worker[lane.worker], number * (LANE + GAP), since, until)[-most:])
    return shown


def drawn(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The charts of a task's or a queue's runs (queue/reports/runs.py): `columns` over time, `bars` of run times."""
    by_time = [row | {"good": row["runs"] - row["failed"]} for row in figures["by_time"]]
    return {
        "columns": stacked(by_time, "good", "failed"),
        "bars": stacked(figures["histogram"], "succeeded", "others"),
        "chart": {"width": WIDTH, "height": HEIGHT},
    }


def _lane_boxes(runs: Sequence[Run], y: float, since: datetime, until: datetime) -> list[Rectangle]:
    scale = WIDTH / max((until - since).total_seconds(), 1.0)
    boxes: list[Rectangle] = []
    for run in runs:
        x = max(((run.started_at or since) - since).total_seconds() * scale, 0.0)
        end = min(((run.ended_at or until) - since).total_seconds() * scale, WIDTH)
        width = max(end - x, THINNEST)
        if boxes and x < boxes[-1].x + boxes[-1].width:
            boxes[-1] = _joined(boxes[-1], x + width, run)
        else:
            boxes.append(Rectangle(_short(x), y, _short(width), LANE, run.outcome, {"run": run, "count": 1}))
    return boxes


def _joined(last: Rectangle, end: float, run: Run) -> Rectangle:
    """One rectangle of several runs; a bad end of any of them shows."""
    kind = last.kind if last.kind in ("failed", "lost", "retry") else run.outcome
    width = max(last.width, _short(end - last.x))
    return last._replace(width=width, kind=kind, row={"run": run, "count": last.row["count"] + 1})


def _short(number: float) -> float:
    return round(number, 2)


@dataclass(frozen=True, slots=True)
class Block:
    """A year, or what else stands together. In a calendar the cells go down by weekday from Monday; None is no cell."""

    label: str
    is_calendar: bool
    cells: list[Row | None] = field(default_factory=list)


def blocks(rows: Sequence[Row]) -> list[Block]:
    """The partitions by year, those of days as calendars; what has no date in one block."""
    moments = {row["partition"]: moment(row["partition"]) for row in rows}
    if any(at is None for at in moments.values()):
        return [Block("", False, list(rows))] if rows else []
    days = {at.date(): row for row in rows if (at := moments[row["partition"]])}
    years = groupby(rows, key=lambda row: row["partition"][:4])
    is_calendar = len(days) == len(rows) > 0 and (max(days) - min(days)).days < SPARSE * len(rows)
    if not is_calendar:  # a partition has no day of its own, or the days are far from each other
        return [Block(year, False, list(of_year)) for year, of_year in years]
    return [Block(year, True, _calendar(int(year), days)) for year, _ in years]


def cells(block: Block, jobs: str) -> Markup:
    """The cells of a block in HTML, each with a link to its job, whose address is `jobs` and the id.

    A page has thousands of cells: the template engine and the masking of each field would take some tenths of a second.
    """
    return Markup("".join(_cell(row, jobs) for row in block.cells))  # noqa: S704  of escaped parts


def _cell(row: Row | None, jobs: str) -> str:
    if row is None:
        return '<span class="cell none"></span>'
    # A moment holds no secret.
    name = row["partition"] if moment(row["partition"]) else masked(row["partition"])
    title, status = escape(f"{name}: {row['status']}"), row["status"]
    if row["job_id"]:
        return f'<a class="cell {status}" href="{jobs}{row["job_id"]}" title="{title}"></a>'
    return f'<span class="cell {status}" title="{title}"></span>'


def _calendar(year: int, days: Mapping[date, Row]) -> list[Row | None]:
    """The days of a year behind so many empty cells that each week is a column."""
    first = date(year, 1, 1)
    length = (date(year, 12, 31) - first).days + 1
    return [None] * first.weekday() + [days.get(first + timedelta(days=day)) for day in range(length)]
