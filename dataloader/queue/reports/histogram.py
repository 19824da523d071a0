"""PURE: histograms with slots of a fixed logarithmic scale, as in dl_spans, and their percentiles (within 10 percent).

Slot n has the values above `LEAST * RATIO ** (n - 1)` up to `LEAST * RATIO ** n`; slot 0 all up to LEAST.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LEAST = 0.001  # seconds, or MB
RATIO = 1.1
BARS = 24  # of a drawn histogram, at most
PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values by slot; `total` is the sum of the values, `largest` the largest of them."""

    counts: Mapping[int, int]
    total: float = 0.0
    largest: float = math.inf

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(self.counts.values())

    def percentile(self, share: float) -> float | None:
        """The value that `share` (0 to 1) of the values do not exceed; None without a value."""
        rank = max(1, math.ceil(round(share * self.count, 6)))
        for slot, count in sorted(self.counts.items()):
            if rank <= count:
                low, high = bounds(slot)
                part = (rank - 0.5) / count  # of the slot: on a logarithmic scale, on a plain one in slot 0
                return min(high * part if slot <= 0 else low * (high / low) ** part, self.largest)
            rank -= count
        return None

    def spread(self) -> dict[str, float] | None:
        """`p50`, `p95`, `p99`, `mean`, `largest` and `count`; None without a value."""
        if not self.count:
            return None
        percentiles = {name: self.percentile(share) or 0.0 for name, share in PERCENTILES.items()}
        return {"count": self.count, **percentiles, "mean": self.total / self.count, "largest": self.largest}


def bounds(slot: int) -> tuple[float, float]:
    """The bounds of a slot: its values are above the first and at most the second."""
    return (0.0 if slot <= 0 else upper(slot - 1)), upper(max(slot, 0))


def upper(slot: int) -> float:
    """The largest value of a slot."""
    return LEAST * RATIO**slot


def bars(*histograms: Histogram) -> list[tuple[float, float, list[int]]]:
    """Up to BARS bars, all of as many slots: lower bound, upper bound, and the count of each histogram."""
    slots = [slot for histogram in histograms for slot in histogram.counts]
    if not slots:
        return []
    first, last = min(slots), max(slots)
    wide = -(-(last - first + 1) // BARS)
    return [
        (
            bounds(begin)[0],
            upper(begin + wide - 1),
            [sum(each.counts.get(slot, 0) for slot in range(begin, begin + wide)) for each in histograms],
        )
        for begin in range(first, last + 1, wide)
    ]


def merged(parts: Iterable[Histogram]) -> Histogram:
    """One histogram of the values of all."""
    counts: dict[int, int] = {}
    total, largest = 0.0, 0.0
    for part in parts:
        for slot, count in part.counts.items():
            counts[slot] = counts.get(slot, 0) + count
        total, largest = total + part.total, max(largest, part.largest)
    return Histogram(counts, total, largest if counts else math.inf)
