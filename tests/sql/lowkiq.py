"""PURE: ordered and merged queues by their rules, without SQL: what a claim may start, and what each end makes of it.

Named after the library whose deliveries a merged queue imitates. Time is a number of hours that only `pass_time` moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

DEAD = ("failed", "lost")


@dataclass
class Payload:
    """One job: its place in its key is (score, number)."""

    key: str
    task: str
    score: float
    number: int
    most: int  # attempts
    at: int  # the hour from which on it is due
    status: str = "queued"
    attempt: int = 0
    by: str | None = None
    cancel: bool = False

    def leave(self, status: str, attempt: int, at: int) -> None:
        """It runs no more; a cancellation that was asked for wins."""
        self.status, self.attempt, self.at = "canceled" if self.cancel else status, attempt, at
        self.by = None


@dataclass
class Lowkiq:
    """All jobs of one queue."""

    merge: bool
    limit: int  # jobs of a delivery
    holds: bool  # a dead job stops its key
    now: int = 0
    jobs: dict[UUID, Payload] = field(default_factory=dict)

    def of(self, key: str, *statuses: str) -> list[Payload]:
        """The jobs of a key, in their order."""
        found = [job for job in self.jobs.values() if job.key == key and job.status in statuses]
        return sorted(found, key=lambda job: (job.score, job.number))

    def keys(self) -> set[str]:
        """The keys that ever had a job."""
        return {job.key for job in self.jobs.values()}

    def due_at(self, key: str) -> int | None:
        """The hour from which on the key may start; None: not before somebody does something."""
        queued = self.of(key, "queued")
        if not queued or self.of(key, "running") or (self.holds and self.of(key, *DEAD)):
            return None
        if not self.merge:
            return queued[0].at
        tried = [job.at for job in queued if job.attempt > 0]
        return max(tried) if tried else min(job.at for job in queued)

    def due(self) -> set[str]:
        """The keys that may start now."""
        return {key for key in self.keys() if (at := self.due_at(key)) is not None and at <= self.now}

    def next_due(self) -> int | None:
        """The first hour at which a key may start by itself."""
        return min((at for key in self.keys() if (at := self.due_at(key)) is not None), default=None)

    def start(self, key: str, worker: str) -> list[Payload]:
        """A claim of the key: its head, or with merge the jobs from the head on that have its task."""
        taken: list[Payload] = []
        for job in self.of(key, "queued")[: self.limit if self.merge else 1]:
            if job.task != (taken or [job])[0].task:
                break
            taken.append(job)
        attempt = max(job.attempt for job in taken) + 1
        for job in taken:
            job.status, job.attempt, job.by = "running", attempt, worker
        return taken

    def done(self, delivery: Sequence[Payload]) -> None:
        for job in delivery:
            job.leave("succeeded", job.attempt, job.at)

    def error(self, delivery: Sequence[Payload], delay: int) -> None:
        """Goes back as one, while the job with the fewest attempts has some left."""
        if delivery[0].attempt >= min(job.most for job in delivery):
            self.spent(delivery, "failed", delivery[0])
            return
        for job in delivery:
            job.leave("queued", job.attempt, self.now + delay)

    def spent(self, delivery: Iterable[Payload], status: str, first: Payload | None) -> None:
        """The first is dead; the others are due with all their attempts."""
        for job in delivery:
            if job is first:
                job.leave(status, job.attempt, job.at)
            else:
                job.leave("queued", 0, self.now)

    def hand_back(self, delivery: Iterable[Payload]) -> None:
        """Uncounted. A job that joined a key of more attempts than it may have keeps its last one."""
        for job in delivery:
            job.leave("queued", min(job.attempt, job.most) - 1, self.now)

    def crash(self, delivery: Sequence[Payload]) -> None:
        """The worker is gone: at once again after the first attempt, later after an hour."""
        if delivery[0].attempt >= min(job.most for job in delivery):
            self.spent(delivery, "lost", next((job for job in delivery if not job.cancel), None))
        else:
            self.error(delivery, 0 if delivery[0].attempt <= 1 else 1)

    def request_cancel(self, job: Payload) -> None:
        if job.status == "queued":
            job.status = "canceled"
        elif job.status == "running":
            job.cancel = True

    def requeue(self, job: Payload) -> None:
        """A finished job comes back with all attempts, and with merge the key's jobs that wait for a retry with it."""
        if job.status not in ("queued", "running"):
            tried = [other for other in self.of(job.key, "queued") if other.attempt > 0] if self.merge else []
            for each in [job, *tried]:
                each.status, each.attempt, each.at, each.cancel = "queued", 0, self.now, False

    def run_now(self, job: Payload) -> None:
        """A queued job is due, and with merge the key's jobs that wait for a retry with it."""
        if job.status == "queued" and job.at > self.now:
            tried = [other for other in self.of(job.key, "queued") if other.attempt > 0] if self.merge else []
            for each in [job, *tried]:
                each.at = self.now
