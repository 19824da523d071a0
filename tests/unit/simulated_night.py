"""A night of a farm as it might have been: the truth to which predictions are compared."""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Self

from dataloader.queue.reports.prediction import Line, Running, Waiting

WORKERS, JOBS = 6, 2_000
TASKS = {f"task{nth}": (mean_log, spread) for nth, (mean_log, spread) in enumerate(
    [(2.0, 0.3), (2.5, 0.8), (3.0, 0.5), (3.5, 0.4), (4.0, 0.6), (4.0, 0.2), (4.5, 0.5), (5.5, 0.4)])}  # fmt: skip
TELLS = {"task6", "task7"}  # their runs tell their progress
LOST_EVERY_SEC = 3_600.0
KNOWN = 200  # runs of each task of the nights before


@dataclass
class Job:
    """A job of the night, with the seconds that its runs take: what no prediction knows."""

    number: int
    task: str
    key: str
    priority: int
    added_at: float
    seconds: float
    started_at: float | None = None
    ended_at: float | None = None

    @property
    def turn(self) -> tuple[int, float, int]:
        return self.priority, self.added_at, self.number


@dataclass
class Night:
    """The farm at an instant `now`, in seconds since the evening."""

    random: Random
    jobs: list[Job] = field(default_factory=list)
    now: float = 0.0
    workers: set[int] = field(default_factory=lambda: set(range(WORKERS)))
    runs: dict[int, Job] = field(default_factory=dict)  # by worker
    waiting: list[tuple[int, float, int]] = field(default_factory=list)  # the turns of the queued jobs, in their order
    _events: list[tuple[float, int, str, int]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    @classmethod
    def of(cls, seed: int) -> Self:
        """The evening: most jobs are there, and what will happen in the night is decided."""
        night = cls(Random(seed))
        night.jobs = [night._job(number) for number in range(JOBS)]
        for job in night.jobs:
            night._at(job.added_at, "added", job.number)
        night._at(night.random.expovariate(1 / LOST_EVERY_SEC), "lost", 0)
        return night

    def _job(self, number: int) -> Job:
        task = self.random.choice(list(TASKS))
        is_late = self.random.random() < 0.1
        key = f"key{self.random.randrange(JOBS // 2)}"
        priority = 10 if is_late else self.random.choice([50, 100])
        added_at = self.random.uniform(0, 18_000) if is_late else 0.0
        return Job(number, task, key, priority, added_at, self.random.lognormvariate(*TASKS[task]))

    def known(self) -> dict[str, list[float]]:
        """The seconds of the latest runs of each task, of the nights before."""
        return {task: [self.random.lognormvariate(*of) for _ in range(KNOWN)] for task, of in TASKS.items()}

    def pass_until(self, at: float) -> None:
        """Let everything happen that happens up to this instant."""
        while self._events and self._events[0][0] <= at:
            self.now, _, what, which = heappop(self._events)
            getattr(self, f"_{what}")(which)
            if not self._events or self._events[0][0] > self.now:
                self._start()
        self.now = at

    def instants(self, number: int) -> Iterator[float]:
        """So many instants of the first six hours, with the same time between."""
        return (nth * 21_600.0 / number for nth in range(number))

    def line(self) -> Line:
        waiting = [self.jobs[number] for _, _, number in self.waiting]
        return Line(
            len(self.workers),
            [self._running(job) for job in self.runs.values()],
            [Waiting(job.number, job.task, [job.key]) for job in waiting],
        )

    def _running(self, job: Job) -> Running:
        ran = self.now - job.started_at
        share = ran / job.seconds if job.task in TELLS else None
        return Running(job.number, job.task, ran, share, [job.key])

    def _start(self) -> None:
        while (idle := self.workers - set(self.runs)) and (turn := self._first()):
            self.waiting.remove(turn)
            job = self.jobs[turn[-1]]
            job.started_at, self.runs[min(idle)] = self.now, job
            self._at(self.now + job.seconds, "ended", job.number)

    def _first(self) -> tuple[int, float, int] | None:
        busy = {job.key for job in self.runs.values()}
        return next((turn for turn in self.waiting if self.jobs[turn[-1]].key not in busy), None)

    def _added(self, number: int) -> None:
        insort(self.waiting, self.jobs[number].turn)

    def _ended(self, number: int) -> None:
        job = self.jobs[number]
        for worker, run in list(self.runs.items()):
            if run is job and job.started_at + job.seconds <= self.now:
                job.ended_at = self.now
                del self.runs[worker]

    def _lost(self, _: int) -> None:
        """A worker is gone; its job is queued again and takes another time."""
        if self.workers:
            worker = self.random.choice(sorted(self.workers))
            self.workers.remove(worker)
            if job := self.runs.pop(worker, None):
                job.started_at, job.seconds = None, self.random.lognormvariate(*TASKS[job.task])
                insort(self.waiting, job.turn)
            self._at(self.now + self.random.uniform(1, 600), "replaced", worker)
        self._at(self.now + self.random.expovariate(1 / LOST_EVERY_SEC), "lost", 0)

    def _replaced(self, worker: int) -> None:
        self.workers.add(worker)

    def _at(self, at: float, what: str, which: int) -> None:
        heappush(self._events, (at, next(self._numbers), what, which))
