"""A pipeline's view of its run: the context, and the exceptions by which a pipeline and the farm talk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from logging import Logger
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import psycopg

from dataloader.queue.job import End, Outcome, wait_sec

SKIP_SEC = 1.0  # until a skipped key is due again


class Progress(dict[str, Any]):
    """What a pipeline yields to say how far it is: `processed`, `total`, and more; a plain dict will do as well.

    `checkpoint`, a dict of JSON of at most 64 KB, is where the next run of the job goes on (`context.checkpoint`), as
    by `context.save`. It is no part of the progress, which people see.
    """

    def __init__(
        self, done: float, total: float | None = None, *, checkpoint: dict[str, Any] | None = None, **more: Any
    ) -> None:
        super().__init__({"processed": done} | ({} if total is None else {"total": total}) | more)
        self.checkpoint = checkpoint


class PermanentError(Exception):
    """For a pipeline to raise when another attempt cannot succeed: the job ends `failed` at once."""


class Retry(Exception):
    """For a pipeline to raise when its job should run again after `in_sec` seconds; the attempt counts."""

    def __init__(self, in_sec: float | timedelta, why: str = "") -> None:
        """Raises ValueError unless `in_sec` is from 0 seconds to 366 days."""
        self.in_sec = wait_sec(in_sec, "in_sec")
        super().__init__(why or f"asked to be tried again in {self.in_sec:g} s")


class Stopped(BaseException):
    """The run has to end now: it is canceled, drained, fenced off or over its time. A pipeline lets it pass.

    It is no Exception, so that a pipeline's `except Exception` does not catch it; `finally` blocks run.
    """


class Suspended(BaseException):
    """The run ends here, for its job waits for others (`Context.gather`). A pipeline lets it pass, as Stopped."""


class GatherFailed(PermanentError):
    """Jobs that a run has gathered did not succeed; `job_id` is the first of them."""

    def __init__(self, job_id: UUID, status: str | None, number: int, of: int) -> None:
        super().__init__(f"{number} of {of} gathered jobs did not succeed; job {job_id} is {status or 'deleted'}")
        self.job_id = job_id


class Parent(NamedTuple):
    """A job that another one has waited for; `task` and `status` are None where it was deleted."""

    job_id: UUID
    task: str | None
    status: str | None
    result: Any


class Relatives(Protocol):
    """The other jobs that a run has to do with, as the farm or the testing kit knows them."""

    def trigger(self, task: str, args: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> UUID:
        """See Context.trigger."""

    def gather(self, job_ids: Sequence[UUID]) -> list[Any]:
        """See Context.gather."""

    def parents(self) -> list[Parent]:
        """See Context.parents."""


def _no_queue() -> AbstractContextManager[psycopg.Connection[Any]]:
    raise RuntimeError("this run has no database of a queue")


@dataclass(frozen=True, slots=True)
class Context:
    """A pipeline's view of its job, and its requests to the farm."""

    job_id: UUID
    attempt: int
    lock_key: str
    partition_key: str
    idempotency_key: str | None
    logger: Logger
    data_dir: Path
    claim: int  # the fence token: it grows with each start of the job, also with starts that are no attempt
    _stop_asked: Callable[[], bool]
    _report: Callable[[dict[str, Any]], None]
    _transaction: Callable[[str | None], AbstractContextManager[psycopg.Connection[Any]]]
    _decide: Callable[[str, Outcome], None]
    resource: Any = None  # what the pipeline's `prepare` has made
    affinity_key: str | None = None
    _drop: Callable[[], None] = lambda: None
    _note: Callable[[str], None] = lambda text: None
    _family: Relatives | None = None
    _checkpoint: Callable[[], dict[str, Any] | None] = lambda: None
    _save: Callable[[dict[str, Any]], None] = lambda checkpoint: None
    _queue_session: Callable[[], AbstractContextManager[psycopg.Connection[Any]]] = _no_queue
    _is_saved: Callable[[], bool] = lambda: True
    _stop_reason: Callable[[], End | None] = lambda: None

    @property
    def checkpoint(self) -> dict[str, Any] | None:
        """Where the run before this one stopped: the newest checkpoint of the job as this run began, or None.

        Read it before the first transaction, also to save one. Raises PermanentError within a transaction, and in a
        call with several jobs.
        """
        return self._checkpoint()

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Keep where the next run of the job goes on, after an error, a crash, a drain or a release of this one.

        Within `transaction()` it is committed with the data; else it is written about once a second, and before the
        end of the run is. Raises PermanentError for what is no dict of JSON of at most 64 KB, for a pipeline that has
        not read `checkpoint`, in a call with several jobs, and within two transactions at a time or one of another
        database than the target.
        """
        self._save(checkpoint)

    @property
    def is_saved(self) -> bool:
        """Whether the latest checkpoint that was saved outside of a transaction is in the queue.

        Then the next run gets it, however this one ends: an order to another system that must not be given twice may go
        out. It takes some ms, and up to a second where the run has saved before.
        """
        return self._is_saved()

    @property
    def stop_reason(self) -> str | None:
        """Why the run has to end: "canceled", "timeout", "handed back" (a drain) or "gone"; None while it may go on.

        After "handed back" and "gone" another run goes on with the job, so what this one has begun in other systems is
        the other's. It is "gone" too once the lease is over: the next run may have begun.
        """
        return self._stop_reason()

    def trigger(self, task: str, args: Mapping[str, Any] | None = None, **fields: Any) -> UUID:
        """Add a job and return its id; `fields` are those of `dataloader.enqueue`, its queue by default this job's.

        Its idempotency key is made of this job's id and a number, so a later attempt of this job that triggers in the
        same order adds nothing twice. Raises PermanentError for fields that are not valid.
        """
        assert self._family is not None  # noqa: S101  a farm's run has one
        return self._family.trigger(task, args, fields)

    def gather(self, job_ids: Sequence[UUID]) -> list[Any]:
        """The results of these jobs, in their order, once all have ended.

        Until then the run ends at this call and frees its worker. Its job waits for the others, and then runs from its
        begin again; the attempt is given back. Raises GatherFailed where one has not succeeded.
        """
        assert self._family is not None  # noqa: S101  a farm's run has one
        return self._family.gather(job_ids)

    @property
    def parents(self) -> list[Parent]:
        """The jobs that this one has waited for, with their results: first those of `depends_on`, in its order."""
        assert self._family is not None  # noqa: S101  a farm's run has one
        return self._family.parents()

    def fail(self, key: str, error: str | BaseException) -> None:
        """Decide that the run has failed for this key of a batch: its jobs are tried again while they have attempts.

        A PermanentError ends them at once. Of several decisions the last one counts. Raises KeyError for a key that is
        not in the batch, as `retry` and `skip` do.
        """
        end = End.PERMANENT if isinstance(error, PermanentError) else End.ERROR
        raised = error if isinstance(error, BaseException) else None
        self._decide(key, Outcome(end, str(error) or type(error).__name__, raised=raised))

    def retry(self, key: str, in_sec: float | timedelta) -> None:
        """Decide that this key of a batch is tried again after so many seconds; the attempt counts, as for `Retry`."""
        error = Retry(in_sec)
        self._decide(key, Outcome(End.ERROR, str(error), delay_sec=error.in_sec))

    def skip(self, key: str) -> None:
        """Decide that the run has left this key of a batch alone: its jobs go back uncounted, due after SKIP_SEC."""
        self._decide(key, Outcome(End.HANDED_BACK, "skipped by its pipeline", delay_sec=SKIP_SEC))

    def note(self, text: str) -> None:
        """Keep a line in the job's journal, beside the end of this run: up to 20 of 500 characters, secrets masked."""
        self._note(text)

    def drop_resource(self) -> None:
        """Keep the resource of this run for no other one: the worker releases it behind the run."""
        self._drop()

    @property
    def stopping(self) -> bool:
        """True once the run has to end: it is canceled or over its time, its worker drains, or its claim is lost."""
        return self._stop_asked()

    def check(self) -> None:
        """A safe point for code that does not yield: raises Stopped when the run has to end."""
        if self._stop_asked():
            raise Stopped

    def progress(self, document: dict[str, Any]) -> None:
        """Report progress and check, as a `yield` does. The worker writes progress at most once a second."""
        self._report(document)
        self.check()

    def queue_session(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        """A session of its own on the queue's database, for the built-in pipelines that read the farm's own tables."""
        return self._queue_session()

    def transaction(self, dsn: str | None = None) -> AbstractContextManager[psycopg.Connection[Any]]:
        """A transaction in the target database (DL_TARGET_DSN, or `dsn`), on a connection of its own.

        The end of the block commits it. An exception, a cancellation or a lost claim rolls it back. A newer run of
        the same job rolls it back too: each run notes its claim in the table `dl_fence` of the target database. The
        search_path is PG_SCHEMA.
        """
        return self._transaction(dsn)
