"""PURE: the lines of a result, their statistics, and how they are shown."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

HEADS = ("figure", "what", "ours", "bare", "unit", "ratio", "must", "")


@dataclass(frozen=True, slots=True)
class Line:
    """One figure: samples of ours and of the bare limit, a value for each round.

    `least` or `most` bounds the ratio if there is a bare limit, else the median of `ours`.
    """

    figure: str
    name: str
    unit: str
    ours: Sequence[float] = ()
    bare: Sequence[float] = ()
    least: float | None = None
    most: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """The median of the rounds' ratios: a slow moment of the machine slows both sides of a round."""
        if not (self.ours and self.bare):
            return None
        return float(statistics.median(one / other for one, other in zip(self.ours, self.bare, strict=True)))

    @property
    def is_met(self) -> bool | None:
        """True when the line keeps its bound; None without a bound or without samples."""
        if not self.ours or (self.least is None and self.most is None):
            return None
        measured = statistics.median(self.ours) if self.ratio is None else self.ratio
        return measured >= self.least if self.least is not None else measured <= (self.most or 0.0)

    def cells(self) -> list[str]:
        """The line's texts, one for each of HEADS."""
        medians = [number(statistics.median(sample)) if sample else "" for sample in (self.ours, self.bare)]
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        bound = f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}" if self.most is not None else ""
        mark = {True: " ✓", False: " ✗", None: ""}[self.is_met]
        return [self.figure, self.name, *medians, self.unit, ratio, bound + mark, self.note]


def percentile(sample: Sequence[float], percent: float) -> float:
    """The smallest value of the sample that at least `percent` of the values do not exceed (nearest rank)."""
    return float(sorted(sample)[max(1, math.ceil(len(sample) * percent / 100)) - 1])


def disorder(runs: Sequence[tuple[int, int, float, float]]) -> list[str]:
    """The faults in runs, given as (key, number, start, end).

    A key's runs must start in the order of their numbers, each after the end of the previous one.
    """
    faults, last = [], dict[int, tuple[int, float, float]]()
    for key, number_, start, end in sorted(runs, key=lambda run: (run[0], run[1])):
        if key in last and start < last[key][2]:
            how = "started before" if start < last[key][1] else "overlapped"
            faults.append(f"job {number_} of key {key} {how} job {last[key][0]}")
        last[key] = (number_, start, end)
    return faults


def number(value: float) -> str:
    """A number with three significant digits, from 100 on as a whole number."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(lines: Sequence[Line]) -> str:
    """The lines as a table in Markdown."""
    rows = [HEADS, ("---", "---", "---:", "---:", "---", "---:", "---:", "---"), *(line.cells() for line in lines)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def document(lines: Sequence[Line], about: str) -> str:
    """The lines as JSON, with all samples."""
    shown = [asdict(line) | {"ratio": line.ratio, "is_met": line.is_met} for line in lines]
    return json.dumps({"about": about, "lines": shown}, indent=2) + "\n"
