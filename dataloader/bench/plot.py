"""PROCESS: results as SVG and as a table in a page: `python -m dataloader.bench.plot results.json docs/`.

The program writes a `performance-….svg` for each entry of PLOTS into the folder, and the table into its
`performance.md`, between the marks `<!-- results -->` and `<!-- /results -->`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

from dataloader.bench.line import Line, Must, median
from dataloader.bench.report import cells, conditions, number

BEGIN, END = "<!-- results -->\n", "<!-- /results -->"
# The file's name: the figure, the prefix of the lines' names, the title, the labels of ours and of bare.
PLOTS = {
    "drain": ("drain", "one by one", "Draining a queue of jobs that do nothing, one by one", "farm", "pgbench"),
    "prefetch": ("drain", "prefetch", "Draining a queue of jobs that do nothing, with prefetch", "farm", "pgbench"),
    "claim": ("claim", "", "One claim behind a backlog, median", "behind it", "among 1,000 jobs"),
    "latency": ("latency", "", "From the commit of a job to its start", "farm", "bare LISTEN loop"),
}
_COLOURS = ("#2b6cb0", "#b0b7c3")
_LEFT, _WIDTH, _RIGHT, _BAR = 230, 400, 130, 14
Doc = dict[str, Any]


class PlotError(Exception):
    """The results or the page have a wrong form; the message names it."""


def bars(title: str, series: Sequence[str], groups: Sequence[tuple[str, Sequence[float | None]]], unit: str) -> str:
    """Horizontal bars as SVG: each group has a bar for each series with a value; the longest bar fills the width."""
    most = max((value for _, values in groups for value in values if value is not None), default=0) or 1
    height = 56 + len(groups) * (len(series) * _BAR + 12)
    parts = [text(12, 22, title, size=15, weight="bold"), *_legend(series)]
    y = 56
    for label, values in groups:
        parts.append(text(_LEFT - 8, y + len(series) * _BAR / 2 + 4, label, anchor="end"))
        for place, value in enumerate(values):
            if value is not None:
                parts += _bar(y + place * _BAR, value / most * _WIDTH, _COLOURS[place], f"{number(value)} {unit}")
        y += len(series) * _BAR + 12
    return svg(title, _LEFT + _WIDTH + _RIGHT, height, parts)


def svg(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    """An SVG of these parts on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    style = ' font-family="sans-serif" font-size="12" role="img">'
    back = f'<title>{escape(title)}</title><rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head + style, back, *parts, "</svg>", ""])


def table(results: Doc) -> str:
    """The lines as Markdown."""
    rows = ["| figure | what | ours | bare | unit | ratio | must | |", "|---|---|---:|---:|---|---:|---:|---|"]
    return "\n".join([f"{conditions(results)}.", "", *rows, *map(_row, _lines(results)), ""])


def filled(page: str, results: str) -> str:
    """The page with the results between its marks; PlotError when the page has no marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise PlotError(f"the page should have the lines {BEGIN.strip()} and {END}")
    return before + begin + "\n" + results + "\n" + end + after


def plot(results: Doc, folder: Path) -> list[Path]:
    """Write the page and an SVG for each figure in the results; the written files."""
    page = folder / "performance.md"
    page.write_text(filled(page.read_text("utf-8"), table(results)), "utf-8")
    written = [page]
    for name, (figure, beginning, title, *series) in PLOTS.items():
        lines = [line for line in _lines(results) if line.figure == figure and line.name.startswith(beginning)]
        groups = [(line.name, (median(line.ours), median(line.bare))) for line in lines if line.ours and line.bare]
        if groups:
            written.append(folder / f"performance-{name}.svg")
            written[-1].write_text(bars(title, series, groups, lines[0].unit), "utf-8")
    return written


def main(arguments: Sequence[str]) -> int:
    """Read the results in the first argument, write into the folder in the second; the exit code."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m dataloader.bench.plot results.json docs/\n")
        return 2
    try:
        for path in plot(_read(Path(arguments[0])), Path(arguments[1])):
            sys.stdout.write(f"{path}\n")
    except (OSError, PlotError) as error:
        sys.stderr.write(f"dataloader.bench.plot: {error}\n")
        return 1
    return 0


def _read(path: Path) -> Doc:
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise PlotError(f"{path} should be the output of `dataloader bench --json`: {error}") from None
    if not isinstance(found, dict) or not {"lines", "machine", "rounds"} <= found.keys():
        raise PlotError(f"{path} should be the output of `dataloader bench --json`")
    return found


def _lines(results: Doc) -> list[Line]:
    names = [field.name for field in fields(Line)]
    given = [{name: line[name] for name in names} for line in results["lines"]]
    return [Line(**line | {"must": Must(**line["must"]) if line["must"] else None}) for line in given]


def _row(line: Line) -> str:
    *texts, must, note = cells(line)
    verdict = {True: " ✓", False: " ✗", None: ""}[line.is_met]
    return "| " + " | ".join(text.replace("|", "\\|") for text in [*texts, must + verdict, note]) + " |"


def _legend(series: Sequence[str]) -> list[str]:
    parts, x = [], _LEFT
    for name, colour in zip(series, _COLOURS, strict=False):
        parts.append(f'<rect x="{x}" y="34" width="10" height="10" fill="{colour}"/>')
        parts.append(text(x + 15, 43, name))
        x += 30 + 7 * len(name)
    return parts


def _bar(y: float, length: float, colour: str, label: str) -> list[str]:
    rect = f'<rect x="{_LEFT}" y="{y}" width="{max(1, length):.1f}" height="{_BAR - 2}" fill="{colour}"/>'
    return [rect, text(_LEFT + max(1, length) + 6, y + _BAR - 4, label)]


def text(
    x: float,
    y: float,
    words: str,
    size: int = 12,
    anchor: str = "start",
    weight: str = "normal",
    colour: str = "#1a202c",
) -> str:
    """A text of an SVG."""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text {place} fill="{colour}">{escape(words)}</text>'


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
