"""The lines as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.table import Table
from rich.text import Text

from dataloader.bench.line import Line, median


def document(lines: Iterable[Line], about: dict[str, Any]) -> str:
    """JSON with `about`, the facts of the bench, and the lines with all samples."""
    return json.dumps(about | {"lines": [line.document() for line in lines]}, ensure_ascii=False, indent=2) + "\n"


def table(lines: Iterable[Line], title: str) -> Table:
    """A row for each line: the medians of ours and of bare, the ratio, the bound."""
    made = Table(title=title, title_justify="left", pad_edge=False)
    for column in ("figure", "what"):
        made.add_column(column, overflow="fold")
    for column in ("ours", "bare", "unit", "ratio", "must"):
        made.add_column(column, justify="right", no_wrap=True)
    made.add_column("note", overflow="fold")
    last = ""
    for line in lines:
        if last and line.figure != last:
            made.add_section()
        figure = line.figure if line.figure != last else ""
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        made.add_row(
            figure, line.name, _shown(line.ours), _shown(line.bare), line.unit, ratio, _judged(line), line.note
        )
        last = line.figure
    return made


def number(value: float) -> str:
    """A number with three significant digits, from 100 on as a whole number."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _shown(sample: Any) -> str:
    return number(median(sample)) if sample else "-"


def _judged(line: Line) -> Text:
    if line.must is None:
        return Text("")
    style = {True: "green", False: "red", None: ""}[line.is_met]
    return Text(str(line.must), style=style)
