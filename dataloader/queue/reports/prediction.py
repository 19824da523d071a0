"""PURE: when the jobs of a queue will end, by what runs, what waits before them, and how long such runs have taken.

The future is played several times: free workers take jobs in the claim's order, and a run takes as long as a drawn one
of its task. An end is the median of the plays, its range has eight of ten. Plays know no new jobs, failures and other
workers. Their effect shows in earlier predictions, from which a correction follows: a Range of factors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf, sqrt
from random import Random
from statistics import fmean, pstdev
from typing import Any, NamedTuple

LOW, MIDDLE, HIGH = 0.1, 0.5, 0.9  # which parts of the plays' ends are not later than the figures of a Range
PLAYS = (11, 51)  # at least, and at most
RUNS = 30_000  # of all plays together: some tenths of a second
SPREAD = 0.3  # of the durations of a task, at least, as a share of their mean: of few runs not much is known
MIN_SHARE = 0.05  # the share of a run from which on its progress is used to predict the rest
UNEVEN = 0.15  # how far that rest may be off, as a share of it
ENOUGH = 20  # earlier predictions from which a correction follows
FACTORS = (0.25, 4.0)  # between which a correction is
Durations = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued job: any name `job`, what its run takes (key, limits), and in how many seconds it may start."""

    job: Any
    task: str
    takes: Sequence[str] = ()
    due_sec: float = 0.0


@dataclass(frozen=True, slots=True)
class Running:
    """A job that a worker runs; `share` of it is done."""

    job: Any
    task: str
    ran_sec: float
    share: float | None = None
    takes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """The facts of a queue: `waiting` in order, `beyond` further jobs; `room` of limits, a key has room for one."""

    workers: int
    running: Sequence[Running] = ()
    waiting: Sequence[Waiting] = ()
    beyond: int = 0
    room: Mapping[str, int] = field(default_factory=dict)


class Range(NamedTuple):
    """An end, in seconds: of ten simulations one ends before `low`, five by `middle`, one after `high`; inf: never."""

    low: float
    middle: float
    high: float


class Forecast(NamedTuple):
    """The ends of the jobs that were asked for; `line` is the end of all that runs or is due, with what is beyond."""

    jobs: dict[Any, Range]
    line: Range


def forecast(line: Line, durations: Durations, asked: Collection[Any] = ()) -> Forecast | None:
    """The ends of these jobs and of the whole line; None if no run is known, or no job can run.

    `durations` are of the latest runs by task. Deterministic; its cost is bounded by RUNS.
    """
    known = {task: seconds for task, seconds in durations.items() if seconds}
    if not known or not (line.workers or line.running):
        return None
    jobs: list[Waiting | Running] = [*line.waiting, *line.running]
    drawing = _Drawing(known, Random(0))  # noqa: S311  no secret
    plays = []
    for _ in range(min(max(RUNS // max(len(jobs), 1), PLAYS[0]), PLAYS[1])):
        drawing.begin()
        plays.append(_play(line, drawing))
    wanted = set(asked)
    ends = {
        each.job: _range([played[place] for played, _ in plays])
        for place, each in enumerate(jobs)
        if each.job in wanted
    }
    return Forecast(ends, _range([last for _, last in plays]))


def correction(ratios: Sequence[float]) -> Range:
    """By which factors jobs took longer than predicted, by the ratios of taken to predicted time; 1 below ENOUGH."""
    if len(ratios) < ENOUGH:
        return Range(1.0, 1.0, 1.0)
    return Range(*(min(max(ratio, FACTORS[0]), FACTORS[1]) for ratio in _range(list(ratios))))


def corrected(range_: Range, by: Range) -> Range:
    """The range of the plays, moved to where the ends usually are, and as wide as they usually are at least."""
    low, middle, high = (end * by.middle for end in range_)
    return Range(min(low, range_.middle * by.low), middle, max(high, range_.middle * by.high))


def _range(ends: list[float]) -> Range:
    ends.sort()
    last = len(ends) - 1
    return Range(*(ends[round(part * last)] for part in (LOW, MIDDLE, HIGH)))


class _Drawing:
    """Draws durations. The mean of few runs is not sure, so each play has it a little different."""

    def __init__(self, durations: Durations, random: Random) -> None:
        self.random = random
        of_any = [second for seconds in durations.values() for second in seconds]
        self._seconds: dict[str | None, Sequence[float]] = {None: of_any}
        self._seconds.update(durations)
        # How far the true mean of a task may be from that of its known runs, as a share of it.
        self._doubts = {
            task: max(pstdev(seconds) / mean if (mean := fmean(seconds)) else 0.0, SPREAD) / sqrt(len(seconds))
            for task, seconds in self._seconds.items()
        }
        self._known: dict[str | None, tuple[Sequence[float], float]] = {}

    def begin(self) -> None:
        """To be called before each play: by which factors its means are others than those of the known runs."""
        self._known = {
            task: (seconds, self.random.lognormvariate(0, self._doubts[task]))
            for task, seconds in self._seconds.items()
        }

    def whole(self, task: str) -> float:
        """The duration of a run that has not begun."""
        seconds, factor = self._known.get(task) or self._known[None]
        return seconds[int(self.random.random() * len(seconds))] * factor

    def rest(self, run: Running) -> float:
        """The time that is left of a run: by its progress, else as of those runs that took longer than it has."""
        if run.share is not None and run.share >= MIN_SHARE:
            return run.ran_sec * (1 - run.share) / run.share * self.random.lognormvariate(0, UNEVEN)
        seconds, factor = self._known.get(run.task) or self._known[None]
        longer = [whole * factor - run.ran_sec for whole in seconds if whole * factor > run.ran_sec]
        return self.random.choice(longer) if longer else self.random.uniform(0, run.ran_sec)


def _play(line: Line, drawing: _Drawing) -> tuple[list[float], float]:
    """One play of the queue's future: the end of each job, the waiting ones first, and that of all that runs or is due.

    A job's place among them is also its place in the claim's order. An event is an instant, a number that keeps events
    of one instant in order, a place, and whether a run of that job ends then; else the job becomes due.
    """
    jobs: Sequence[Waiting | Running] = [*line.waiting, *line.running]
    ends, drawn, numbers = [inf] * len(jobs), list[float](), count()
    taken: dict[str, int] = defaultdict(int)
    parked: dict[str, list[int]] = defaultdict(list)
    ready = [place for place, each in enumerate(line.waiting) if each.due_sec <= 0]
    later = {place: each.due_sec for place, each in enumerate(line.waiting) if each.due_sec > 0}
    events = [(due_sec, next(numbers), place, False) for place, due_sec in later.items()]
    heapify(events)

    def end_at(place: int, at: float) -> None:
        ends[place] = at
        heappush(events, (at, next(numbers), place, True))

    def has_room(name: str) -> bool:
        return taken[name] < line.room.get(name, 1)

    def let_in(names: Sequence[str]) -> None:  # the first job that waits for each of these, as far as there is room
        for name in names:
            if parked[name] and has_room(name):
                heappush(ready, heappop(parked[name]))

    for place, run in enumerate(line.running, start=len(line.waiting)):
        for name in run.takes:
            taken[name] += 1
        end_at(place, drawing.rest(run))
    workers = max(line.workers, len(line.running))
    idle, at = workers - len(line.running), 0.0
    while True:
        while idle and ready:  # idle workers take the first ready jobs; those that find something taken wait behind it
            place = heappop(ready)
            takes = jobs[place].takes
            full = next((name for name in takes if not has_room(name)), None)
            if full is None:
                for name in takes:
                    taken[name] += 1
                idle -= 1
                drawn.append(drawing.whole(jobs[place].task))
                end_at(place, at + drawn[-1])
            else:
                heappush(parked[full], place)
                let_in(takes)
        if not events:
            break
        at, _, place, is_end = heappop(events)
        if not is_end:
            heappush(ready, place)
            continue
        for name in jobs[place].takes:
            taken[name] -= 1
        let_in(jobs[place].takes)
        idle += 1
    last = max((end for place, end in enumerate(ends) if place not in later), default=0.0)
    if line.beyond and drawn:  # runs as those of the line, on all workers
        last += line.beyond * fmean(drawn) / workers
    return ends, last
