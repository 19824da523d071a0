"""The checkpoints of one run: where it goes on, and those that it saves. No SQL: the heartbeat and the fence write.

A checkpoint is in two places. The queue has the latest one, up to a second old. The target has the latest one that was
committed with data. A run goes on at the queue's, unless the target has one that the queue's does not follow: then
data were committed behind it, and the target's is the newer one. A run that learns this too late, in its first
transaction, changes nothing and is handed back; the next run goes on at the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dataloader.farm.fence import Standing
from dataloader.farm.heartbeat import Lease
from dataloader.pipelines import PermanentError, Pipeline, Stopped
from dataloader.queue.job import Checkpoint, End, checkpoint_json

TARGET_IS_AHEAD = "the target has a newer checkpoint than the queue: the next run goes on there"


class Checkpoints:
    """The checkpoints of a run's context; its lease has the latest one for the queue."""

    def __init__(
        self, lease: Lease, pipeline: Pipeline, kept: Checkpoint, ask_target: Callable[[], Checkpoint]
    ) -> None:
        """`kept` is the queue's; `ask_target` returns the target's, behind which no older run can commit another."""
        self._lease = lease
        self._pipeline = pipeline
        self._begin = kept
        self._ask_target = ask_target
        self._open: list[Standing | None] = []  # of the open transactions; None: no save is allowed
        self.latest: Checkpoint | None = None  # None: the pipeline has not asked where to go on

    def begin(self) -> dict[str, Any] | None:
        """Where the run goes on; None: at the start. Raises PermanentError in a transaction, and for several jobs."""
        if self.latest is None:
            self._require_one_job()
            if self._open:
                raise PermanentError("read context.checkpoint before context.transaction() begins")
            if self._begin.number:  # the runs before have saved in the target
                self._begin = max(self._begin, self._ask_target(), key=lambda checkpoint: checkpoint.mark)
            self.latest = self._begin
        value: dict[str, Any] | None = self._begin.value
        return value

    def save(self, value: dict[str, Any]) -> None:
        """Keep `value`, with the data of the transaction under way if there is one; raises PermanentError."""
        self._require_one_job()
        if self.latest is None:
            raise PermanentError("read context.checkpoint before you save one: the run should go on there")
        try:
            text = checkpoint_json(value)
        except ValueError as e:
            raise PermanentError(str(e)) from None
        checkpoint = self.latest._replace(text=text, spares_attempt=self._pipeline.spares_attempts)
        if not self._open:
            return self._keep(checkpoint)
        if len(self._open) > 1:
            raise PermanentError("a checkpoint is committed with one transaction: save it when only one is open")
        (standing,) = self._open
        if standing is None:
            raise PermanentError("a checkpoint is committed in the target (DL_TARGET_DSN), not in another database")
        standing.to_save = checkpoint._replace(number=checkpoint.number + 1)

    @property
    def has_moved(self) -> bool:
        """Whether the run has come further than where it began."""
        return self.latest is not None and self.latest.value != self._begin.value

    def standing(self, is_target: bool) -> Standing | None:
        """For a transaction that is about to begin, in the target or elsewhere; None where it has no checkpoints."""
        return Standing(self._lease.job.job_id) if is_target and self.latest is not None else None

    @contextmanager
    def within(self, standing: Standing | None) -> Iterator[None]:
        """The block of a transaction that has begun: what is saved is committed with it. Raises Stopped, see above."""
        if standing is not None and self.latest is not None and standing.newest.mark > self.latest.mark:
            self._keep(standing.newest)
            self._lease.end(End.HANDED_BACK, TARGET_IS_AHEAD)
            raise Stopped
        self._open.append(standing)
        try:
            yield
        finally:
            self._open.remove(standing)

    def committed(self, standing: Standing | None) -> None:
        """The transaction is committed."""
        if standing is not None and standing.saved is not None:
            self._keep(standing.saved)

    def _keep(self, checkpoint: Checkpoint) -> None:
        self.latest = checkpoint
        self._lease.save(checkpoint)

    def _require_one_job(self) -> None:
        if self._pipeline.batch_size is not None:
            raise PermanentError(
                f"the pipeline {self._pipeline.task!r} takes several jobs in one call (batch_size), and has no"
                " checkpoints: the next call may have other jobs"
            )
