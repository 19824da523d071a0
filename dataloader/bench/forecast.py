"""The command `capacity`: it measures costs, and says what a primary bears and what breaks first as the load grows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psycopg
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dataloader.bench import compared, costs, program, server_cpu
from dataloader.bench import place as bench
from dataloader.bench.capacity import Costs, Habits, Load, Primary
from dataloader.bench.report import number
from dataloader.bench.sheets import Forecast, Sheet, read_costs
from dataloader.check.database import api_connections
from dataloader.config import Settings
from dataloader.queue import db
from dataloader.queue.reports import runs

ROUNDS = 3  # of a comparison, in turns
EXAMPLE = Load(10_000, 60.0)  # where a farm has no history and nobody says anything


@dataclass(frozen=True, slots=True)
class Wish:
    """The load and the farm as the user gives them; None: the command takes the farm's history and settings."""

    jobs_a_day: float | None = None
    run_sec: float | None = None
    peak: float | None = None
    in_batches: bool = False
    workers_a_host: int | None = None
    kept_days: float | None = None

    def load(self, history: Load | None) -> Load:
        """The load that is asked for."""
        known = history or EXAMPLE
        return Load(
            self.jobs_a_day or known.jobs_a_day,
            known.run_sec if self.run_sec is None else self.run_sec,
            self.peak or known.peak,
            self.in_batches,
        )

    def habits(self, settings: Settings) -> Habits:
        """Return the habits of a farm with these settings, where the user gave no others."""
        return Habits(
            beat_every_sec=min(settings.dl_heartbeat_sec, settings.dl_default_lease_ttl_sec / 3),
            kept_days=settings.dl_retention_days or 30.0 if self.kept_days is None else self.kept_days,
            workers_a_host=self.workers_a_host or sum(spec.concurrency for spec in settings.workers),
            api_sessions=api_connections(settings),
        )


def run(
    settings: Settings,
    wish: Wish,
    cores: int | None,
    compare: bool,
    known: Costs | None,
    scale: float,
    json_path: str | None,
) -> int:
    """Measure, unless costs are known, compare where that is asked for, and print; the exit code.

    `cores` are the server's processors; None: it is on this machine. `json_path` is a file, or `-` for stdout.
    """
    out, err = program.console(to_stderr=False), program.console(to_stderr=True)

    def answer() -> None:
        history = _history(settings)
        with program.placed(settings, bench.Wish(rounds=ROUNDS, scale=scale), err) as place:
            forecast = _forecast(place, wish.load(history), wish.habits(settings), cores, compare, known)
        (err if json_path == "-" else out).print(_text(forecast))
        if json_path:
            document = forecast.document()
            _ = out.file.write(document) if json_path == "-" else Path(json_path).write_text(document, "utf-8")

    return program.attempted("capacity", err, answer)


def _forecast(
    place: bench.Place, load: Load, habits: Habits, cores: int | None, compare: bool, known: Costs | None
) -> Forecast:
    with place.connect("public") as conn:
        (free,) = conn.execute(bench.SQL["free_sessions"]).fetchone() or (0,)
        cores = cores or (known.cores if known else _cores_here(server_cpu.of_server(conn) is not None))
    found = known or costs.measure(place, cores)
    beside = []
    for each in compared.compare(place, found, free) if compare else ():
        said = f"{each.what}: predicted {number(each.predicted)}, measured {number(each.measured)} {each.unit}"
        place.progress.console.print(said, style="dim", highlight=False)
        beside.append(each)
    return Forecast(load, habits, found, Primary(cores, free), beside)


def _text(forecast: Forecast) -> Group:
    return Group(*map(_table, forecast.sheets()), Text(forecast.assumptions))


def _table(sheet: Sheet) -> Table:
    table = Table(title=sheet.title, title_justify="left", pad_edge=False)
    for place, column in enumerate(sheet.columns):
        table.add_column(column, justify="left" if place == 0 else "right", overflow="fold")
    for row in sheet.rows:
        table.add_row(*row)
    return table


def _history(settings: Settings) -> Load | None:
    """The load of the farm's last week; None where there was none, or no farm."""
    if settings.queue_dsn is None:
        return None
    try:
        with db.connect(settings.queue_dsn, name="dl-capacity", schema=settings.pg_schema_queue) as conn:
            told = runs.load(conn)
    except psycopg.errors.UndefinedTable:
        return None
    return Load(told["jobs_a_day"], told["run_sec"], told["peak"]) if told["jobs_a_day"] else None


def read_file(path: Path) -> Costs:
    """The costs of a file; raises ValueError, and OSError."""
    return read_costs(path.read_text("utf-8"))


def _cores_here(is_here: bool) -> int:
    if not is_here:
        raise bench.BenchError("the server runs elsewhere: say how many processors it has by --cores")
    return len(os.sched_getaffinity(0))
