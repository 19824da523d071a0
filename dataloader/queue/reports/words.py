"""PURE: figures as people read them, in pages, alerts and the command line's diagnosis."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from math import isfinite
from typing import Any

NOTHING = "–"
COUNTED = 1_000  # jobs of one kind and queue that an answer counts itself; for more it uses the noted number
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def duration(seconds: float | timedelta | None) -> str:
    """The two largest units: `2 h 5 min`, `12 s`, `80 ms`."""
    if seconds is None:
        return NOTHING
    left = seconds.total_seconds() if isinstance(seconds, timedelta) else float(seconds)
    if not isfinite(left):  # of a job whose times are infinite
        return NOTHING
    if left < 0:
        return "0 s"
    if left < 1:
        return f"{round(left * 1_000)} ms" if left else "0 s"
    if left < 10:
        return f"{left:.1f}".removesuffix(".0") + " s"
    whole, parts = round(left), []
    for name, size in _UNITS:
        if count := whole // size:
            parts.append(f"{count} {name}")
            whole -= count * size
        elif parts:
            break  # not `2 d 5 s`
    return " ".join(parts[:2])


def count(number: int | None, is_exact: bool = True, counted_at: datetime | None = None) -> str:
    """`1,234,567`; `1,000+` for a lower bound, `~1,234,567` for an earlier count."""
    if number is None:
        return NOTHING
    return f"{number:,}" if is_exact else f"~{number:,}" if counted_at else f"{number:,}+"


def figure(number: int, counted_at: datetime | None = None) -> str:
    """A figure of a queue: from COUNTED on a lower bound, or what the reaper has counted earlier."""
    return count(number, number < COUNTED, counted_at)


def plain(value: Any) -> str:
    """A text as it is, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def percent(share: float | None) -> str:
    """A share of 1 as `37 %`; below one percent with a decimal."""
    if share is None:
        return NOTHING
    return f"{share * 100:.1f} %" if 0 < share < 0.01 else f"{share * 100:.0f} %"
