"""PURE a forecast: as JSON, which can be read again, and as sheets for terminals and pages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from dataloader.bench.capacity import (
    IN_BATCHES,
    ONE_BY_ONE,
    UTILISATION,
    Compared,
    Costs,
    Day,
    Habits,
    Load,
    Primary,
    Way,
    day,
    most_farms,
    most_jobs_a_sec,
    most_times,
    most_triggers_a_sec,
)
from dataloader.bench.report import number

TIMES = (1, 10, 100, 1_000)
CORES = (2, 8, 32)
GB = 1e9
DIVISORS = ("cores", "add_sec", "arrival_sec", "api_sec", "beat_sec")  # of the costs


@dataclass(frozen=True, slots=True)
class Sheet:
    """A title, the heads of the columns, and rows of as many cells."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Forecast:
    """The load that a primary bears, with the measurements and the wishes that it was computed from."""

    load: Load
    habits: Habits
    costs: Costs
    primary: Primary
    compared: Sequence[Compared] = ()

    def days(self) -> Iterator[tuple[int, Day]]:
        """The load of today and its multiples."""
        for times in TIMES:
            yield times, day(self.load.times(times), self.costs, self.primary, self.habits)

    def document(self) -> str:
        """The forecast as JSON; `costs` of it can be given back."""
        days = [{"times": times, **asdict(told)} for times, told in self.days()]
        bears = [{"cores": cores, **_bears(self.costs, self._with(cores))} for cores in self._cores()]
        asked = {"load": asdict(self.load), "habits": asdict(self.habits)}
        beside = [asdict(each) | {"off": each.off} for each in self.compared]
        found = {"costs": asdict(self.costs), "primary": asdict(self.primary), "bears": bears, "days": days}
        return json.dumps(asked | found | {"compared": beside}, indent=2) + "\n"

    def sheets(self) -> list[Sheet]:
        """The costs, what primaries bear, the multiples of the load, and the comparison where there is one."""
        told = [_costs(self.costs), self._primaries(), self._multiples()]
        return told + ([_comparison(self.compared)] if self.compared else [])

    def _cores(self) -> list[int]:
        return sorted({self.primary.cores, *CORES})

    def _with(self, cores: int) -> Primary:
        return Primary(cores, self.primary.sessions)

    def _primaries(self) -> Sheet:
        told = [_bears(self.costs, self._with(cores)) for cores in self._cores()]
        rows = [(name, *(number(each[name]) for each in told)) for name in told[0]]
        return Sheet("What one primary bears, by its processors", ("", *map(str, self._cores())), rows)

    def _multiples(self) -> Sheet:
        load = self.load
        most = most_times(load, self.costs, self.primary, self.habits)
        title = (
            f"{number(load.jobs_a_day)} jobs a day of {number(load.run_sec)} s, the busiest hour {number(load.peak)}"
            f" times the mean: a primary of {self.primary.cores} processors and {self.primary.sessions} sessions bears"
            f" {number(most)} times as many"
        )
        rows = [(name, *cells) for name, cells in _rows([day for _, day in self.days()], self.costs.session_bytes)]
        return Sheet(title, ("", *(f"{times:,}x" for times in TIMES)), rows)

    @property
    def assumptions(self) -> str:
        """One paragraph: the assumptions behind the sheets."""
        habits = self.habits
        return (
            f"Of the processors {UTILISATION:.0%} may be used; each does as much as one of those measured. Workers run"
            f" on other machines, {habits.workers_a_host} each. History is kept for {habits.kept_days:g} days, leases"
            f" are renewed each {habits.beat_every_sec:g} s. docs/scaling.md says what else is assumed."
        )


def read(text: str) -> Forecast:
    """The forecast of a document that `Forecast.document` has written; raises ValueError."""
    costs = read_costs(text)
    told = json.loads(text)
    beside = [Compared(**{name: value for name, value in each.items() if name != "off"}) for each in told["compared"]]
    return Forecast(Load(**told["load"]), Habits(**told["habits"]), costs, Primary(**told["primary"]), beside)


def read_costs(text: str) -> Costs:
    """The costs of a document that `Forecast.document` has written; raises ValueError."""
    try:
        told = json.loads(text)["costs"]
        _check(told)
        ways = {name: _way(told["ways"][name]) for name in (ONE_BY_ONE, IN_BATCHES)}
        return Costs(**told | {"ways": ways})
    except WrongCost:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError("the file should be what `dataloader capacity --json FILE` has written") from None


class WrongCost(ValueError):
    """No server has this cost."""


def _check(told: dict[str, Any], of: str = "costs") -> None:
    """Raise WrongCost for a cost that is no number of 0 or more, or that is 0 and divides."""
    for name, value in told.items():
        if isinstance(value, dict):
            _check(value, f"{of}.{name}")
        elif value is not None and not (isinstance(value, (int, float)) and isfinite(value) and value >= 0):
            raise WrongCost(f"{of}.{name} should be a number of 0 or more, not {value}")
        elif value == 0 and (name in DIVISORS or of.endswith(("jobs_a_sec", "server_sec"))):
            raise WrongCost(f"{of}.{name} should be above 0")


def _way(told: dict[str, Any]) -> Way:
    by_workers = ("jobs_a_sec", "server_sec", "worker_sec")
    points = {name: {int(workers): float(value) for workers, value in told[name].items()} for name in by_workers}
    return Way(**points, wal_bytes=float(told["wal_bytes"]))


def _bears(found: Costs, primary: Primary) -> dict[str, float]:
    triggers = most_triggers_a_sec(found, primary)
    return {
        "jobs/s, claimed one by one": most_jobs_a_sec(found.ways[ONE_BY_ONE], primary),
        "jobs/s, claimed in batches": most_jobs_a_sec(found.ways[IN_BATCHES], primary),
        "jobs/s that come and end alone": min(triggers, primary.cpu / found.arrival_sec),
        "triggers/s, each in a transaction": triggers,
        "triggers/s, many in a transaction": primary.cpu / found.add_sec,
        "triggers/s of an API process": 1 / found.api_sec,
        "renewals/s of leases": primary.cpu / found.beat_sec,
        "workers, by the sessions that are left": float(primary.sessions),
        "farms with idle workers, at 10 triggers/s": float(most_farms(found, primary, 10)),
        "the same, at 100 triggers/s": float(most_farms(found, primary, 100)),
    }


def _rows(days: Sequence[Day], session_bytes: float | None) -> Iterator[tuple[str, list[str]]]:
    yield "jobs a day", [number(each.load.jobs_a_day) for each in days]
    yield "jobs/s in the busiest hour", [number(each.load.peak_jobs_a_sec) for each in days]
    yield "workers", [number(each.workers) for each in days]
    yield "hosts", [number(each.hosts) for each in days]
    yield "sessions", [number(each.sessions) for each in days]
    if session_bytes:
        yield "memory of the sessions, GB", [number(each.sessions * session_bytes / GB) for each in days]
    yield "WAL, GB a day", [number(each.wal_bytes / GB) for each in days]
    yield "journal, rows a day", [number(each.journal_rows) for each in days]
    yield "history, GB", [number(each.kept_bytes / GB) for each in days]
    for name in sorted(use.name for use in days[0].uses):
        yield f"{name}, used", [_part(next(use.part for use in each.uses if use.name == name)) for each in days]
    yield "breaks first", [each.uses[0].name if each.uses[0].part > 1 else "-" for each in days]
    yield "what helps", [each.uses[0].advice if each.uses[0].part > 1 else "-" for each in days]


def _part(part: float) -> str:
    return "no room" if part == float("inf") else f"{part:.2%}" if part < 0.1 else f"{part:,.0%}"


def _costs(found: Costs) -> Sheet:
    rows: list[tuple[str, str, str]] = []
    for name, way in found.ways.items():
        rates = ", ".join(f"{workers}: {number(rate)}" for workers, rate in way.jobs_a_sec.items())
        rows += [
            (f"{name}, by workers", rates, "jobs/s"),
            ("", number(way.least_sec * 1e6), "µs of the server's CPU a job"),
            ("", number(way.wal_bytes / 1e3), "KB of WAL a job"),
        ]
    rows += [(what, number(value), unit) for what, value, unit in _single(found)]
    return Sheet("Measured", ("", "", ""), rows)


def _single(found: Costs) -> Iterable[tuple[str, float, str]]:
    yield "a job that comes and ends alone", found.arrival_sec * 1e6, "µs of the server's CPU"
    yield "a trigger in a transaction of its own", found.trigger_sec * 1e6, "µs of the server's CPU"
    yield "", found.commit_sec * 1e6, "µs that its commit waits"
    yield "", found.api_sec * 1e6, "µs of an API process's CPU"
    yield "a trigger among many", found.add_sec * 1e6, "µs of the server's CPU"
    yield "a notification, for each session that listens", found.listen_sec * 1e6, "µs of the server's CPU"
    yield "a keeper's look that finds no job", found.look_sec * 1e6, "µs of the server's CPU"
    yield "a renewal of a lease", found.beat_sec * 1e6, "µs of the server's CPU"
    yield "an idle worker", found.idle_sec * 1e6, "µs of the server's CPU a second"
    yield "a job that has ended", found.kept_bytes / 1e3, "KB kept, with its journal"
    if found.session_bytes:
        yield "a worker's session", found.session_bytes / 1e6, "MB of the server's memory"


def _comparison(beside: Sequence[Compared]) -> Sheet:
    rows = [
        (each.what, number(each.predicted), number(each.measured), each.unit, f"{each.off:+.0%}") for each in beside
    ]
    return Sheet("Predicted beside measured", ("", "predicted", "measured", "unit", "off"), rows)
