"""PURE: the heat map of a backfill: its partitions as cells, days as a calendar.

A page has thousands of cells. So they are written here: the template engine and the masking of each field would take
some tenths of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from itertools import groupby
from typing import Any

from markupsafe import Markup, escape

from dataloader.log import masked
from dataloader.queue.plans.partitions import moment

_NO_CELL = '<span class="cell none"></span>'
SPARSE = 3  # days for one partition: then most of a calendar would be empty
Row = Mapping[str, Any]


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
    if not _is_calendar(days, len(rows)):
        return [Block(year, False, list(of_year)) for year, of_year in years]
    return [Block(year, True, _calendar(int(year), days)) for year, _ in years]


def cells(block: Block, jobs: str) -> Markup:
    """The cells of a block in HTML, each with a link to its job, whose address is `jobs` and the id."""
    return Markup("".join(_cell(row, jobs) for row in block.cells))  # noqa: S704  of escaped parts


def _cell(row: Row | None, jobs: str) -> str:
    if row is None:
        return _NO_CELL
    # A moment holds no secret.
    name = row["partition"] if moment(row["partition"]) else masked(row["partition"])
    title, status = escape(f"{name}: {row['status']}"), row["status"]
    if row["job_id"]:
        return f'<a class="cell {status}" href="{jobs}{row["job_id"]}" title="{title}"></a>'
    return f'<span class="cell {status}" title="{title}"></span>'


def _is_calendar(days: Mapping[date, Row], count: int) -> bool:
    """Whether each has a day of its own, and the days are near each other."""
    return len(days) == count > 0 and (max(days) - min(days)).days < SPARSE * count


def _calendar(year: int, days: Mapping[date, Row]) -> list[Row | None]:
    """The days of a year behind so many empty cells that each week is a column."""
    first = date(year, 1, 1)
    length = (date(year, 12, 31) - first).days + 1
    return [None] * first.weekday() + [days.get(first + timedelta(days=day)) for day in range(length)]
