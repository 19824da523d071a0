"""A pipeline's view of its run: the context, and the exceptions by which a pipeline and the farm talk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from logging import Logger
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg

from dataloader.queue.job import End, Outcome

SKIP_SEC = 1.0  # until a skipped key is due again

Progress = dict[str, Any]


class PermanentError(Exception):
    """For a pipeline to raise when another attempt cannot succeed: the job ends `failed` at once."""


class Retry(Exception):
    """For a pipeline to raise when its job should run again after `in_sec` seconds; the attempt counts."""

    def __init__(self, in_sec: float, why: str = "") -> None:
        """Raises ValueError unless `in_sec` is 0 or more."""
        if not in_sec >= 0:
            raise ValueError(f"in_sec should be 0 or more, not {in_sec}")
        super().__init__(why or f"asked to be tried again in {in_sec:g} s")
        self.in_sec = in_sec


class Stopped(BaseException):
    """The run has to end now: it is canceled, drained, fenced off or over its time. A pipeline lets it pass.

    It is no Exception, so that a pipeline's `except Exception` does not catch it; `finally` blocks run.
    """


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
    _report: Callable[[Progress], None]
    _transaction: Callable[[str | None], AbstractContextManager[psycopg.Connection[Any]]]
    _decide: Callable[[str, Outcome], None]
    resource: Any = None  # what the pipeline's `prepare` has made
    affinity_key: str | None = None
    _drop: Callable[[], None] = lambda: None
    _note: Callable[[str], None] = lambda text: None
    _queue_session: Callable[[], AbstractContextManager[psycopg.Connection[Any]]] = _no_queue

    def fail(self, key: str, error: str | BaseException) -> None:
        """Decide that the run has failed for this key of a batch: its jobs are tried again while they have attempts.

        A PermanentError ends them at once. Of several decisions the last one counts. Raises KeyError for a key that is
        not in the batch, as `retry` and `skip` do.
        """
        end = End.PERMANENT if isinstance(error, PermanentError) else End.ERROR
        raised = error if isinstance(error, BaseException) else None
        self._decide(key, Outcome(end, str(error) or type(error).__name__, raised=raised))

    def retry(self, key: str, in_sec: float) -> None:
        """Decide that this key of a batch is tried again after so many seconds; the attempt counts, as for `Retry`."""
        error = Retry(in_sec)
        self._decide(key, Outcome(End.ERROR, str(error), delay_sec=in_sec))

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

    def progress(self, document: Progress) -> None:
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
