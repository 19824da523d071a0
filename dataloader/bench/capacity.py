"""PURE what one primary bears, from costs that `costs` has measured: rates, workers, days, and what breaks first.

The law of the rates is that of a closed system: N workers ask the processors for `demand` seconds a job, and spend the
rest of the job elsewhere (the machine-repairman model M/M/c//N; L. Kleinrock, Queueing Systems I, Wiley 1975, 3.8).
Sums over a day follow from the utilisation law. `simulation` checks the law where no machine of ours reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log

DAY_SEC = 86_400.0
ONE_BY_ONE, IN_BATCHES = "one by one", "in batches"
BATCH = 100  # jobs of a transaction, where they are triggered in batches
UTILISATION = 0.7  # of the processors' time; above it waiting times grow steeply
ROOM = 0.8  # of the workers that are busy at the peak: the others catch what comes at once


@dataclass(frozen=True, slots=True)
class Way:
    """The costs of a job that does nothing, by one way to claim, with some numbers of workers that never lack work.

    The CPU seconds are of the server's machine: of the server, and of the workers where they share its processors.
    Mappings go by the number of workers.
    """

    jobs_a_sec: Mapping[int, float]
    server_sec: Mapping[int, float]
    worker_sec: Mapping[int, float]
    wal_bytes: float = 0.0

    @property
    def least_sec(self) -> float:
        """The CPU seconds of the server for a job, where the server is busiest."""
        return self.server_sec[max(self.server_sec)]


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs measured on a server with `cores` processors; `_sec` are CPU seconds of the server, or as said.

    `ways` are ONE_BY_ONE and IN_BATCHES. `trigger_sec` is for a trigger in a transaction of its own, `add_sec` for a
    job that is added among many, `arrival_sec` for a job that is triggered alone and runs on a farm that waits: from
    the trigger to its end. `commit_sec` are the seconds by the clock that a trigger's commit waits, `api_sec` the CPU
    seconds of an API process for it. `listen_sec` is for each notification and session that listens, `look_sec` for
    a keeper's look for jobs, as each farm but one with an idle worker sends for a notification, `beat_sec` for each
    renewal of a lease, `idle_sec` for each second of an idle worker. `kept_bytes` and `journal_rows` are what is
    left of a job that has ended, without its renewals, which leave a row each.
    """

    cores: int
    ways: Mapping[str, Way]
    trigger_sec: float
    trigger_wal: float
    add_sec: float
    arrival_sec: float
    commit_sec: float
    api_sec: float
    listen_sec: float
    look_sec: float
    beat_sec: float
    beat_wal: float
    beat_bytes: float
    idle_sec: float
    kept_bytes: float
    journal_rows: float
    session_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Primary:
    """A server: its processors, and the sessions that it has left for farms."""

    cores: int
    sessions: int

    @property
    def cpu(self) -> float:
        """CPU seconds a second that may be used."""
        return self.cores * UTILISATION


@dataclass(frozen=True, slots=True)
class Load:
    """A day's work. `peak` is the busiest hour's rate beside the mean one; `run_sec` the mean seconds of a run.

    `in_batches` is true where jobs are triggered and claimed many at a time: short ones.
    """

    jobs_a_day: float
    run_sec: float
    peak: float = 4.0
    in_batches: bool = False

    @property
    def peak_jobs_a_sec(self) -> float:
        """In the busiest hour."""
        return self.jobs_a_day / DAY_SEC * self.peak

    def times(self, factor: float) -> Load:
        """The same runs, `factor` times as many."""
        return Load(self.jobs_a_day * factor, self.run_sec, self.peak, self.in_batches)


@dataclass(frozen=True, slots=True)
class Habits:
    """How a farm is set: seconds between two renewals, days of history, workers and further sessions of a host."""

    beat_every_sec: float = 10.0
    kept_days: float = 30.0
    workers_a_host: int = 8
    sessions_a_host: int = 2  # keeper and reaper
    api_sessions: int = 10


@dataclass(frozen=True, slots=True)
class Use:
    """A limit, how much of it a load uses in its busiest hour, how much there is, and what helps."""

    name: str
    used: float
    limit: float
    advice: str

    @property
    def part(self) -> float:
        """Above 1, the load does not fit; a limit of nothing fits no use."""
        return self.used / self.limit if self.limit > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Day:
    """The needs of a load: workers, hosts, sessions, WAL, journal and history, and how full each limit is."""

    load: Load
    workers: int
    hosts: int
    sessions: int
    wal_bytes: float
    journal_rows: float
    kept_bytes: float
    uses: tuple[Use, ...]  # the fullest first


@dataclass(frozen=True, slots=True)
class Compared:
    """A prediction, the median of what runs measured, and the unit of both."""

    what: str
    predicted: float
    measured: float
    unit: str

    @property
    def off(self) -> float:
        """By how much the prediction is too high, as a part of what was measured."""
        return self.predicted / self.measured - 1


# --- rates ---


def closed_rate(workers: int, demand_sec: float, elsewhere_sec: float, cores: int) -> float:
    """The jobs/s of workers that never lack work: a job takes a processor `demand_sec`, and `elsewhere_sec` beside."""
    if elsewhere_sec <= 0:
        return min(workers, cores) / demand_sec
    weight, whole, served = 1.0, 1.0, 0.0
    for asking in range(1, workers + 1):
        serving = min(asking, cores)
        weight *= (workers - asking + 1) * demand_sec / elsewhere_sec / serving
        whole, served = whole + weight, served + weight * serving
        if whole > 1e200:  # only the ratio counts
            weight, whole, served = weight / whole, 1.0, served / whole
    return served / whole / demand_sec


def jobs_a_sec(way: Way, workers: int, cores: int) -> float:
    """The jobs/s of so many workers where they were measured.

    The time of one worker's job without its CPU time is the time that a job spends elsewhere. The demand then follows
    from each measured rate, so that it has what CPU times do not show: waits for locks and for the disk of the WAL.
    Between the measured numbers of workers it is interpolated, above the last it is that of the last.
    """
    first = min(way.jobs_a_sec)
    alone = _between(way.server_sec, first) + _between(way.worker_sec, first)
    elsewhere = max(0.0, first / way.jobs_a_sec[first] - alone)
    demands = {n: demand_of(n, rate, elsewhere, cores) for n, rate in way.jobs_a_sec.items()}
    return closed_rate(workers, _between(demands, workers), elsewhere, cores)


def most_jobs_a_sec(way: Way, primary: Primary) -> float:
    """The jobs/s for which the primary has the CPU, with workers on other machines."""
    return primary.cpu / way.least_sec


def most_triggers_a_sec(costs: Costs, primary: Primary, listeners: int = 0) -> float:
    """Triggers/s, each in a transaction of its own, with so many sessions that listen.

    PostgreSQL commits transactions that notify one after the other (PreCommit_Notify in its commands/async.c): the
    waits of their commits add up, whatever the number of processors.
    """
    of_cpu = primary.cpu / (costs.trigger_sec + listeners * costs.listen_sec)
    return min(of_cpu, 1 / notifying_sec(costs, listeners))


def notifying_sec(costs: Costs, listeners: float) -> float:
    """For how long a commit that notifies keeps others of its kind waiting; it sends the signals to the listeners."""
    return costs.commit_sec + listeners * costs.listen_sec


def most_farms(costs: Costs, primary: Primary, notifications_a_sec: float) -> int:
    """The farms until half of the primary's CPU goes into their looks, or half of the time of commits into signals."""
    by_cpu = primary.cpu / (costs.listen_sec + costs.look_sec)
    return int(min(by_cpu, 1 / costs.listen_sec) / 2 / notifications_a_sec)


def demand_of(workers: int, rate: float, elsewhere_sec: float, cores: int) -> float:
    """The demand that explains a rate: closed_rate's inverse."""
    return _where(lambda demand: closed_rate(workers, demand, elsewhere_sec, cores) < rate, min(workers, cores) / rate)


def unread_demand(rate_1: float, workers: int, rate: float, cores: int) -> float:
    """The demand that explains the rates of one worker and of many, where nobody can read CPU times.

    An upper bound: what else slows many workers counts as CPU.
    """
    alone = 1 / rate_1
    return _where(lambda demand: closed_rate(workers, demand, alone - demand, cores) < rate, alone)


def _where(is_above: Callable[[float], bool], high: float) -> float:
    """The number up to `high` from which on this is true."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return high


def _between(points: Mapping[int, float], at: int) -> float:
    """The value at `at`, linear in its logarithm between two points, constant outside of them."""
    known = sorted(points)
    for low, high in pairwise(known):
        if low <= at <= high:
            return points[low] + (points[high] - points[low]) * log(at / low) / log(high / low)
    return points[known[0] if at < known[0] else known[-1]]


# --- days ---


def day(load: Load, costs: Costs, primary: Primary, habits: Habits) -> Day:
    """What `load` needs, and how much of each limit it uses in its busiest hour."""
    way = costs.ways[IN_BATCHES if load.in_batches else ONE_BY_ONE]
    busy = workers_busy(load, way)
    workers = max(1, ceil(busy / ROOM))
    hosts = ceil(workers / habits.workers_a_host)
    sessions = workers + hosts * habits.sessions_a_host + habits.api_sessions
    beats = load.run_sec / habits.beat_every_sec
    uses = _uses(load, costs, primary, habits, workers, hosts, sessions)
    return Day(
        load,
        workers,
        hosts,
        sessions,
        wal_bytes=load.jobs_a_day
        * (way.wal_bytes + costs.trigger_wal * (not load.in_batches) + beats * costs.beat_wal),
        journal_rows=load.jobs_a_day * (costs.journal_rows + beats),
        kept_bytes=load.jobs_a_day * habits.kept_days * (costs.kept_bytes + beats * costs.beat_bytes),
        uses=tuple(sorted(uses, key=lambda use: -use.part)),
    )


def workers_busy(load: Load, way: Way) -> float:
    """The mean number of busy workers in the busiest hour (utilisation law)."""
    first = min(way.jobs_a_sec)
    return load.peak_jobs_a_sec * (load.run_sec + first / way.jobs_a_sec[first])


def cpu_a_sec(
    costs: Costs,
    *,
    alone: float = 0,
    in_batches: float = 0,
    listeners: float = 0,
    farms: float = 1,
    beats: float = 0,
    idle: float = 0,
) -> float:
    """CPU seconds of the server in a second with so many jobs that come alone, and in batches.

    Each trigger notifies all listeners, and lets each of the farms look for its job. `beats` are renewals a second,
    `idle` workers wait.
    """
    batched = costs.ways[IN_BATCHES].least_sec + costs.add_sec if in_batches else 0.0
    told = (alone + in_batches / BATCH) * (listeners * costs.listen_sec + max(0.0, farms - 1) * costs.look_sec)
    return alone * costs.arrival_sec + in_batches * batched + told + beats * costs.beat_sec + idle * costs.idle_sec


def fits(load: Load, costs: Costs, primary: Primary, habits: Habits) -> bool:
    """Whether the load stays within all limits."""
    return all(use.part <= 1 for use in day(load, costs, primary, habits).uses)


def most_times(load: Load, costs: Costs, primary: Primary, habits: Habits) -> float:
    """How many times the load fits; to within a percent."""
    return _largest(lambda factor: fits(load.times(factor), costs, primary, habits))


def _uses(
    load: Load, costs: Costs, primary: Primary, habits: Habits, workers: int, hosts: int, sessions: int
) -> tuple[Use, Use, Use]:
    jobs = load.peak_jobs_a_sec
    busy = workers_busy(load, costs.ways[IN_BATCHES if load.in_batches else ONE_BY_ONE])
    cpu = cpu_a_sec(
        costs,
        alone=0 if load.in_batches else jobs,
        in_batches=jobs if load.in_batches else 0,
        listeners=hosts,
        farms=hosts,
        beats=jobs * load.run_sec / habits.beat_every_sec,
        idle=max(0.0, workers - busy),
    )
    triggers = jobs / BATCH if load.in_batches else jobs
    commits = triggers * notifying_sec(costs, hosts)
    return (
        Use("sessions", sessions, primary.sessions, "max_connections, with memory for each; then a second cluster"),
        Use(
            "CPU of the server",
            cpu,
            primary.cpu,
            "batches; larger hosts; more processors; then a second cluster",
        ),
        Use("commits that notify", commits, 1.0, "trigger in batches; a faster disk for the WAL"),
    )


def _largest(is_good: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    while is_good(high) and high < 1e12:
        low, high = high, high * 2
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_good(middle) else (low, middle)
        if high < 1e-12:
            return 0.0
    return low
