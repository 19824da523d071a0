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
        figure, *rest, must, note = cells(line)
        style = {True: "green", False: "red", None: ""}[line.is_met]
        made.add_row(figure if figure != last else "", *rest, Text(must, style=style), note)
        last = figure
    return made


def cells(line: Line) -> list[str]:
    """The line's texts: figure, name, the medians of ours and of bare, unit, ratio, bound, note."""
    medians = [number(median(sample)) if sample else "" for sample in (line.ours, line.bare)]
    ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
    must = "" if line.must is None else str(line.must)
    return [line.figure, line.name, *medians, line.unit, ratio, must, line.note]


def conditions(about: dict[str, Any]) -> str:
    """The machine, the server and the rounds of a bench, in one line."""
    facts, server = about["machine"], about["machine"]["postgresql"]
    return (
        f"{facts['cores']} cores of {facts['cpu']}, PostgreSQL {server['server_version'].split()[0]} (fsync "
        f"{server['fsync']}, synchronous_commit {server['synchronous_commit']}, shared_buffers "
        f"{server['shared_buffers']}), Python {facts['python']}; medians of {about['rounds']} rounds, "
        f"{about['measured_at'][:10]}"
    )


def number(value: float) -> str:
    """A number with three significant digits, from 100 on as a whole number."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
