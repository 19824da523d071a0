"""PURE: one line of the result, and its statistics."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Must:
    """The bound of a line's figure: `least` or `most`, and the aim beyond it."""

    least: float | None = None
    most: float | None = None
    aim: float | None = None

    def __post_init__(self) -> None:
        if (self.least is None) == (self.most is None):
            raise ValueError("a bound should be either the least or the most")

    def is_met(self, figure: float) -> bool:
        """True when the figure keeps the bound."""
        return figure >= self.least if self.least is not None else figure <= (self.most or 0)

    def __str__(self) -> str:
        return f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"


@dataclass(frozen=True, slots=True)
class Line:
    """One figure: samples of ours and of the bare limit, a value for each round.

    `must` bounds the ratio if there is a bare limit, else the median of `ours`.
    """

    figure: str
    name: str
    unit: str
    ours: Sequence[float] = ()
    bare: Sequence[float] = ()
    must: Must | None = None
    note: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def skipped(cls, figure: str, name: str, why: str) -> Self:
        """The line of a figure that could not be measured, with the reason."""
        return cls(figure, name, "", note=f"skipped: {why}")

    @property
    def ratio(self) -> float | None:
        """The ratio of ours to the bare limit; None if one of them is missing."""
        return paired_ratio(self.ours, self.bare) if self.ours and self.bare else None

    @property
    def is_met(self) -> bool | None:
        """True when the line keeps its bound; None without a bound or without samples."""
        if self.must is None or not self.ours:
            return None
        measured = self.ratio if self.bare else median(self.ours)
        return None if measured is None else self.must.is_met(measured)

    def document(self) -> dict[str, Any]:
        """The line as a dict for JSON, with its medians."""
        medians = {
            "ours_median": median(self.ours) if self.ours else None,
            "bare_median": median(self.bare) if self.bare else None,
            "ratio": self.ratio,
            "is_met": self.is_met,
        }
        plain = asdict(self) | {"ours": list(self.ours), "bare": list(self.bare)}
        return plain | medians


def median(sample: Sequence[float]) -> float:
    """The median of a sample; ValueError when it is empty."""
    if not sample:
        raise ValueError("a sample should have at least one value")
    return float(statistics.median(sample))


def percentile(sample: Sequence[float], percent: float) -> float:
    """The smallest value of the sample that at least `percent` of the values do not exceed (nearest rank)."""
    if not sample:
        raise ValueError("a sample should have at least one value")
    if not 0 <= percent <= 100:
        raise ValueError("a percentile should be from 0 to 100")
    rank = max(1, math.ceil(len(sample) * percent / 100))
    return float(sorted(sample)[rank - 1])


def paired_ratio(ours: Sequence[float], bare: Sequence[float]) -> float:
    """The median of the rounds' ratios: a slow moment of the machine slows both sides of a round."""
    return median([one / other for one, other in zip(ours, bare, strict=True)])


def gaps(runs: Sequence[tuple[float, float]]) -> list[float]:
    """The times from the end of each run to the start of the next, for runs as (start, end) in any order."""
    ordered = sorted(runs)
    return [after[0] - before[1] for before, after in itertools.pairwise(ordered)]


def disorder(runs: Sequence[tuple[int, int, float, float]]) -> list[str]:
    """The faults in runs, given as (key, number, start, end).

    A key's runs must start in the order of their numbers, each after the end of the previous one.
    """
    wrong, last = [], dict[int, tuple[int, float, float]]()
    for key, number, start, end in sorted(runs, key=lambda run: (run[0], run[1])):
        if key in last and start < last[key][2]:
            how = "started before" if start < last[key][1] else "overlapped"
            wrong.append(f"job {number} of key {key} {how} job {last[key][0]}")
        last[key] = (number, start, end)
    return wrong
