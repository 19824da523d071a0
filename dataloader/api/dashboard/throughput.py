"""PURE: the chart of the overview: its ranges, and the columns that the page draws and lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Range:
    """A span up to now, in steps (seconds); `name` stands in the address, the words on the page."""

    name: str
    span: str
    step: str
    span_sec: int
    step_sec: int


RANGES = {
    each.name: each
    for each in (
        Range("1h", "1 hour", "minute", 3_600, 60),
        Range("6h", "6 hours", "5 minutes", 6 * 3_600, 300),
        Range("24h", "24 hours", "15 minutes", 24 * 3_600, 900),
        Range("7d", "7 days", "hour", 7 * 86_400, 3_600),
    )
}
DEFAULT = "1h"


def range_of(name: str) -> Range:
    """The range of this name. Raises ValueError with a text for people."""
    if name not in RANGES:
        raise ValueError(f"The range should be one of: {', '.join(RANGES)}.")
    return RANGES[name]


def chart(wanted: Range, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The steps of `stats.throughput` in the form of the page.

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
