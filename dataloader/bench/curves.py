"""PROCESS: a forecast as SVG and in a page: `python -m dataloader.bench.curves forecast.json docs/`.

The program writes `scaling.svg` into the folder, and the forecast's sheets into its `scaling.md`, between the marks
`<!-- results -->` and `<!-- /results -->`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import log10
from pathlib import Path

from dataloader.bench import sheets, simulation
from dataloader.bench.capacity import ONE_BY_ONE, closed_rate
from dataloader.bench.plot import PlotError, filled, svg, text
from dataloader.bench.sheets import Forecast, Sheet

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_000)
RUN_SEC = 0.1  # of the curves' jobs: short ones, so that the server is what limits
_COLOURS = {2: "#2b6cb0", 8: "#2f855a", 32: "#b7791f"}
_LEFT, _TOP, _WIDTH, _HEIGHT = 70, 60, 560, 300
Point = tuple[float, float]


def curves(forecast: Forecast) -> dict[int, list[tuple[int, float, float]]]:
    """By processors: workers, the jobs/s of the law, and those of the simulation, for jobs of RUN_SEC."""
    way = forecast.costs.ways[ONE_BY_ONE]
    elsewhere = RUN_SEC + 1 / way.jobs_a_sec[1] - way.server_sec[1]
    demand = way.least_sec
    return {
        cores: [
            (n, closed_rate(n, demand, elsewhere, cores), simulation.jobs_a_sec(n, demand, elsewhere, cores))
            for n in WORKERS
        ]
        for cores in sheets.CORES
    }


def drawn(forecast: Forecast) -> str:
    """The curves as SVG, both axes logarithmic: lines are the law, rings the simulation."""
    found = curves(forecast)
    most = max(rate for points in found.values() for _, rate, _ in points)
    title = f"Jobs/s by workers that never lack work, jobs of {RUN_SEC:g} s; lines: the law, rings: the simulation"
    parts = [text(12, 22, title, size=14, weight="bold"), *_axes(most)]
    for number, (cores, points) in enumerate(found.items()):
        line = " ".join("{:.1f},{:.1f}".format(*_at(n, rate, most)) for n, rate, _ in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{_COLOURS[cores]}" stroke-width="2"/>')
        for n, _, simulated in points:
            x, y = _at(n, simulated, most)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="none" stroke="{_COLOURS[cores]}"/>')
        parts.append(text(_LEFT + 20 + number * 150, 44, f"{cores} processors", colour=_COLOURS[cores]))
    return svg(title, _LEFT + _WIDTH + 30, _TOP + _HEIGHT + 50, parts)


def page(forecast: Forecast) -> str:
    """The sheets as Markdown, and the curves' numbers."""
    parts = [_markdown(sheet) for sheet in forecast.sheets()]
    return "\n".join([*parts, forecast.assumptions, "", _markdown(_numbers(forecast))])


def _numbers(forecast: Forecast) -> Sheet:
    found = curves(forecast)
    rows = []
    for place, workers in enumerate(WORKERS):
        pairs = [found[cores][place][1:] for cores in sheets.CORES]
        rows.append((f"{workers:,}", *(f"{law:,.0f} / {simulated:,.0f}" for law, simulated in pairs)))
    title = f"Jobs/s of workers that never lack work, jobs of {RUN_SEC:g} s: the law / the simulation"
    return Sheet(title, ("workers", *(f"{cores} processors" for cores in sheets.CORES)), rows)


def _markdown(sheet: Sheet) -> str:
    head = [f"**{sheet.title}**", "", "| " + " | ".join(sheet.columns) + " |"]
    rule = "|---|" + "---:|" * (len(sheet.columns) - 1)
    return "\n".join([*head, rule, *("| " + " | ".join(row) + " |" for row in sheet.rows), ""])


def _at(workers: float, rate: float, most: float) -> Point:
    x = _LEFT + log10(workers) / log10(WORKERS[-1]) * _WIDTH
    return x, _TOP + _HEIGHT - log10(max(1.0, rate)) / log10(most) * _HEIGHT


def _axes(most: float) -> list[str]:
    parts = [f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#a0aec0"/>']
    for workers in (1, 10, 100, 1_000):
        x, _ = _at(workers, 1, most)
        parts.append(text(x, _TOP + _HEIGHT + 18, f"{workers:,}", anchor="middle"))
    for rate in (1, 10, 100, 1_000, 10_000, 100_000):
        if rate <= most:
            _, y = _at(1, rate, most)
            parts.append(text(_LEFT - 8, y + 4, f"{rate:,}", anchor="end"))
    return [*parts, text(_LEFT + _WIDTH / 2, _TOP + _HEIGHT + 38, "workers", anchor="middle")]


def main(arguments: Sequence[str]) -> int:
    """Read the forecast in the first argument, write into the folder in the second; the exit code."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m dataloader.bench.curves forecast.json docs/\n")
        return 2
    folder = Path(arguments[1])
    try:
        forecast = sheets.read(Path(arguments[0]).read_text("utf-8"))
        target = folder / "scaling.md"
        target.write_text(filled(target.read_text("utf-8"), page(forecast)), "utf-8")
        (folder / "scaling.svg").write_text(drawn(forecast), "utf-8")
    except (OSError, ValueError, PlotError) as error:
        sys.stderr.write(f"dataloader.bench.curves: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
