"""PURE: when the jobs of a queue will end, by what runs, what waits before them, and how long such runs have taken.

The future is played several times: free workers take jobs in the claim's order, and a run takes as long as a drawn one
of its task. An end is the median of the plays, its range has eight of ten. What plays do not know (new jobs, failures,
other workers) shows in earlier predictions, of which a `Correction` follows.
"""

from __future__ import annotations

from collections import defaultdict, deque
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
TOLD = 0.05  # the share of a run from which on its progress tells how long the rest takes
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
    """A claimed job; `share` of it is done. Of several jobs of one worker the first runs, the others follow."""

    job: Any
    task: str
    worker: str
    ran_sec: float
    share: float | None = None
    takes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """What is known of a queue: `waiting` in order, `beyond` further jobs; `room` of limits, a key has room for one."""

    workers: int
    running: Sequence[Running] = ()
    waiting: Sequence[Waiting] = ()
    beyond: int = 0
    room: Mapping[str, int] = field(default_factory=dict)


class Range(NamedTuple):
    """An end, in seconds: of ten plays one before `low`, five by `middle`, one after `high`; infinite: never."""

    low: float
    middle: float
    high: float


class Correction(NamedTuple):
    """By which factors jobs took longer than predicted: one in ten less than `low`, half up to `middle`, one in ten
    more."""

    low: float = 1.0
    middle: float = 1.0
    high: float = 1.0


class Forecast(NamedTuple):
    """The ends of the jobs that were asked for and that the line has, and of the whole line with what is beyond."""

    jobs: dict[Any, Range]
    line: Range


def forecast(line: Line, durations: Durations, asked: Collection[Any] = (), seed: int = 0) -> Forecast | None:
    """When these jobs will end, and all of the line; None where no run is known, or nothing can run.

    `durations` are of the latest runs by task. Deterministic; its cost is bounded by RUNS.
    """
    known = {task: seconds for task, seconds in durations.items() if seconds}
    if not known or not (line.workers or line.running):
        return None
    jobs: list[Waiting | Running] = [*line.waiting, *line.running]
    wanted = set(asked)
    places = {each.job: place for place, each in enumerate(jobs) if each.job in wanted}
    ends, lines = _played(line, _Drawing(known, Random(seed)), list(places.values()))  # noqa: S311  no secret
    return Forecast({job: _range(found) for job, found in zip(places, ends, strict=True)}, _range(lines))


def _played(line: Line, drawing: _Drawing, places: Sequence[int]) -> tuple[list[list[float]], list[float]]:
    """The ends of the jobs at these places, and those of the line, in each play."""
    ends: list[list[float]] = [[] for _ in places]
    lines: list[float] = []
    jobs = len(line.waiting) + len(line.running)
    for _ in range(min(max(RUNS // max(jobs, 1), PLAYS[0]), PLAYS[1])):
        drawing.begin()
        play = _Play(line, drawing)
        lines.append(play.end_of_all())
        for found, place in zip(ends, places, strict=True):
            found.append(play.ends[place])
    return ends, lines


def between(first: Range, last: Range) -> Range:
    """The end of a job of which only this is known: that it comes behind the first of these ends, and by the last."""
    return Range(first.low, (first.middle + last.middle) / 2, last.high)


def correction(ratios: Sequence[float]) -> Correction:
    """The correction of earlier predictions, by the ratios of taken to predicted time; none below ENOUGH."""
    if len(ratios) < ENOUGH:
        return Correction()
    low, middle, high = (min(max(ratio, FACTORS[0]), FACTORS[1]) for ratio in _range(list(ratios)))
    return Correction(low, middle, high)


def corrected(said: Range, by: Correction) -> Range:
    """The range of the plays, moved to where the ends usually are, and as wide as they usually are at least."""
    low, middle, high = (end * by.middle for end in said)
    return Range(min(low, said.middle * by.low), middle, max(high, said.middle * by.high))


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
        self._doubts = {task: _doubt(seconds) for task, seconds in self._seconds.items()}
        self._known: dict[str | None, tuple[Sequence[float], float]] = {}

    def begin(self) -> None:
        """To be called before each play: by which factors its means are others than those of the known runs."""
        self._known = {
            task: (seconds, self.random.lognormvariate(0, self._doubts[task]))
            for task, seconds in self._seconds.items()
        }

    def whole(self, task: str) -> float:
        """The duration of a run that has not begun."""
        seconds, off = self._known.get(task) or self._known[None]
        return seconds[int(self.random.random() * len(seconds))] * off

    def rest(self, run: Running) -> float:
        """The time that is left of a run: by its progress, else as of those runs that took longer than it has."""
        if run.share is not None and run.share >= TOLD:
            return run.ran_sec * (1 - run.share) / run.share * self.random.lognormvariate(0, UNEVEN)
        seconds, off = self._known.get(run.task) or self._known[None]
        longer = [whole * off - run.ran_sec for whole in seconds if whole * off > run.ran_sec]
        return self.random.choice(longer) if longer else self.random.uniform(0, run.ran_sec)


def _doubt(seconds: Sequence[float]) -> float:
    """How far the true mean of a task may be from that of these runs, as a share of it."""
    mean = sum(seconds) / len(seconds)
    spread = sqrt(sum((each - mean) ** 2 for each in seconds) / len(seconds))
    return max(spread / mean if mean else 0.0, SPREAD) / sqrt(len(seconds))


class _Play:
    """One play of the queue's future: `ends` has that of each job, the waiting ones first, by place in the claim's
    order."""

    def __init__(self, line: Line, drawing: _Drawing) -> None:
        self._jobs: Sequence[Waiting | Running] = [*line.waiting, *line.running]
        self.ends = [inf] * len(self._jobs)
        self._line, self._drawing = line, drawing
        self._workers = max(line.workers, len({run.worker for run in line.running}))
        self._numbers = count()
        self._taken: dict[str, int] = defaultdict(int)
        self._parked: dict[str, list[int]] = defaultdict(list)
        self._follow: dict[int, deque[int]] = {}  # by the place of a running job: those that its worker runs next
        self._drawn: list[float] = []
        self._ready = [place for place, each in enumerate(line.waiting) if each.due_sec <= 0]
        self._events = [
            (each.due_sec, next(self._numbers), place, False)
            for place, each in enumerate(line.waiting)
            if each.due_sec > 0
        ]
        heapify(self._events)
        self._idle = self._workers - self._go_on()
        self._run()

    def end_of_all(self) -> float:
        """When everything has ended, with what is beyond: as many runs as those of the line, on all workers."""
        last = max(self.ends, default=0.0)
        beyond = self._line.beyond
        if not beyond or not self._drawn:
            return last
        each, spread = fmean(self._drawn), pstdev(self._drawn)
        return last + max(self._drawing.random.gauss(beyond * each, sqrt(beyond) * spread), 0) / self._workers

    def _go_on(self) -> int:
        """Let what runs go on, on each worker the first of its jobs; returns how many workers that are."""
        of_worker: dict[str, deque[int]] = defaultdict(deque)
        for place, run in enumerate(self._line.running, start=len(self._line.waiting)):
            of_worker[run.worker].append(place)
            self._take(run.takes)
        for places in of_worker.values():
            first = places.popleft()
            self._follow[first] = places
            self._end_at(first, self._drawing.rest(self._line.running[first - len(self._line.waiting)]))
        return len(of_worker)

    def _run(self) -> None:
        """Until nothing more happens: start what can be, and go to the next event."""
        self._start(0.0)
        while self._events:
            at, _, place, is_end = heappop(self._events)
            if is_end:
                self._end(at, place)
            else:
                heappush(self._ready, place)
            if self._idle:
                self._start(at)

    def _start(self, at: float) -> None:
        """Idle workers take the first ready jobs; those that find something taken wait behind it."""
        while self._idle and self._ready:
            place = heappop(self._ready)
            takes = self._jobs[place].takes
            taken = next((name for name in takes if not self._has_room(name)), None)
            if taken is None:
                self._take(takes)
                self._idle -= 1
                self._begin(place, at)
            else:
                heappush(self._parked[taken], place)
                self._let_in(takes)

    def _let_in(self, names: Sequence[str]) -> None:
        """The first job that waits for each of these becomes ready, as far as there is room."""
        for name in names:
            if self._parked[name] and self._has_room(name):
                heappush(self._ready, heappop(self._parked[name]))

    def _has_room(self, name: str) -> bool:
        return self._taken[name] < self._line.room.get(name, 1)

    def _begin(self, place: int, at: float) -> None:
        seconds = self._drawing.whole(self._jobs[place].task)
        self._drawn.append(seconds)
        self._end_at(place, at + seconds)

    def _end(self, at: float, place: int) -> None:
        takes = self._jobs[place].takes
        for name in takes:
            self._taken[name] -= 1
        self._let_in(takes)
        if following := self._follow.pop(place, None):
            self._follow[following[0]] = following
            self._begin(following.popleft(), at)
        else:
            self._idle += 1

    def _end_at(self, place: int, at: float) -> None:
        self.ends[place] = at
        heappush(self._events, (at, next(self._numbers), place, True))

    def _take(self, names: Sequence[str]) -> None:
        for name in names:
            self._taken[name] += 1
