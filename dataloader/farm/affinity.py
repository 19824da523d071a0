"""Which jobs the claims of a worker prefer: those whose resources are warm, within a bound of unfairness. No SQL."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime

from dataloader import periods
from dataloader.config import Settings
from dataloader.farm.process import now
from dataloader.queue.job import Job
from dataloader.queue.lifecycle import Affinity, Reached

# After a job with an affinity key a worker's claims ask for more of them.
MEMORY_SEC = periods.seconds("MEMORY_SEC", 600.0)
MARKS = 64  # within the longest wait: the bound is as exact as that
PRIORITIES_MOST = 16  # classes whose bounds a worker keeps


class Overdue:
    """Since when the claims of a worker have passed jobs over: the jobs that have waited so for long enough go first.

    The age of a job is no measure. In a backlog of an hour every job is old, and each would load another resource.
    """

    def __init__(self, wait_sec: float) -> None:
        self._wait_sec = wait_sec
        self._marks: dict[int, deque[tuple[float, datetime]]] = {}

    def passed(self, reached: Reached) -> None:
        """A claim has passed over the jobs of this priority that were created before this instant."""
        marks = self._marks.pop(reached.priority, deque())
        self._marks[reached.priority] = marks  # the last
        if not marks or (reached.since > marks[-1][1] and now() > marks[-1][0] + self._wait_sec / MARKS):
            marks.append((now(), reached.since))
        if len(self._marks) > PRIORITIES_MOST:
            del self._marks[next(iter(self._marks))]

    def instants(self) -> dict[int, datetime]:
        """By priority: jobs that were created before that instant were passed over for as long as they may be."""
        since, found = now() - self._wait_sec, {}
        for priority, marks in self._marks.items():
            while len(marks) > 1 and marks[1][0] <= since:
                marks.popleft()
            if marks[0][0] <= since:
                found[priority] = marks[0][1]
        return found


class Preference:
    """What the next claim of a worker prefers."""

    def __init__(
        self, settings: Settings, warm: Callable[[], Sequence[str]], elsewhere: Callable[[], Sequence[str]]
    ) -> None:
        """`warm` are the affinity keys of the worker's resources, `elsewhere` those of its siblings'."""
        self._settings = settings
        self._warm = warm
        self._elsewhere = elsewhere
        self._overdue = Overdue(settings.dl_affinity_wait_sec)
        self._until = 0.0

    def next(self) -> Affinity | None:
        """For the next claim; None: the order of the queue, as long as no job has an affinity key."""
        if now() >= self._until:
            return None
        return Affinity(self._warm(), self._elsewhere(), self._settings.dl_lookahead, self._overdue.instants())

    def took(self, jobs: Sequence[Job], reached: Reached | None) -> None:
        """The claim has returned these jobs."""
        if self._settings.dl_affinity and any([job.affinity_key for job in jobs]):
            self._until = now() + MEMORY_SEC
        if reached:
            self._overdue.passed(reached)
