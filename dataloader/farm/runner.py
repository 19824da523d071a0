"""The runner steps a job's pipeline until it ends or has to stop. No SQL but the pipeline's own transactions."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg

from dataloader import log, pipelines
from dataloader.config import Settings
from dataloader.farm import fence
from dataloader.farm.lease import Lease
from dataloader.pipelines import PermanentError, Stopped, UnknownTask
from dataloader.queue.job import End, Job, Outcome


class Runner:
    """Runs one job at a time, in the worker's main thread."""

    def __init__(
        self,
        settings: Settings,
        dsn: str,
        leap: Callable[[Job, int], int | None] = lambda job, fence: None,
    ) -> None:
        """`dsn` is the queue's; `leap` returns a fencing token above a fence, or None when the claim is lost."""
        self._settings = settings
        self._target_dsn = settings.target_dsn or dsn
        self._leap = leap
        self._fence_token = 0  # of the present run
        self._interruptible: Lease | None = None  # the run of a plain function

    def run(self, job: Job, lease: Lease) -> Outcome:
        """Resolve and step the pipeline; every exception becomes an outcome."""
        progress: dict[str, Any] | None = None
        self._fence_token = job.claim
        try:
            pipeline = pipelines.resolve(job.task)
            lease.limit(job.timeout_sec or pipeline.timeout_sec, pipeline.max_memory_mb)
            context = self._context(job, lease) if pipeline.wants_context else None
            steps = pipelines.steps(pipeline, _args_of(job), context)
            while True:
                item = self._next(steps, None if pipeline.has_safe_points else lease)
                if isinstance(item, dict):
                    progress = item
                    lease.report(item)
                if lease.must_stop():
                    steps.close()
                    return _stopped(lease, progress)
        except StopIteration as e:
            return Outcome(End.DONE, progress=e.value if isinstance(e.value, dict) else progress)
        except BaseException as e:
            if lease.stop is not None:
                return _stopped(lease, progress)
            return _failed(e, progress)

    def _next(self, steps: pipelines.Steps, interruptible: Lease | None) -> Any:
        """The pipeline's next step; the signal handler may raise Stopped into a step with an `interruptible` lease."""
        self._interruptible = interruptible
        try:
            return next(steps)
        finally:
            self._interruptible = None

    def interrupt(self) -> None:
        """In the signal handler of SIGUSR1: raise Stopped into a plain function, which has no safe point."""
        lease = self._interruptible
        if lease is not None and lease.must_stop_now():
            self._interruptible = None
            raise Stopped

    def _context(self, job: Job, lease: Lease) -> pipelines.Context:
        return pipelines.Context(
            job_id=job.job_id,
            attempt=job.attempt,
            lock_key=job.lock_key,
            partition_key=job.partition_key,
            idempotency_key=job.idempotency_key,
            logger=logging.getLogger(f"pipeline.{job.task}"),
            data_dir=self._settings.data_dir,
            _stop_asked=lease.must_stop,
            _report=lease.report,
            _transaction=lambda dsn: self._transaction(dsn, job, lease),
            claim=job.claim,
        )

    @contextmanager
    def _transaction(self, dsn: str | None, job: Job, lease: Lease) -> Iterator[psycopg.Connection[Any]]:
        """A transaction in the target database; it rolls back when the run has to stop before the commit."""
        where, schema = dsn or self._target_dsn, self._settings.pg_schema
        leap = partial(self._leap_over, job, lease)
        try:
            with fence.transaction(where, schema, job.job_id, self._fence_token, job.claimed_by, leap) as conn:
                yield conn
                if lease.must_stop_now():
                    raise Stopped
        except fence.Overtaken:
            lease.give_up(End.GONE, "a newer run of the job has begun")
            raise Stopped from None

    def _leap_over(self, job: Job, lease: Lease, fence: int) -> int | None:
        """A token above a fence in the target, kept for the run's next transactions; None when the claim is lost."""
        try:
            token = self._leap(job, fence)
        except psycopg.Error:
            if lease.must_stop_now():  # the queue's database was away for too long
                raise Stopped from None
            raise
        self._fence_token = token or self._fence_token
        return token


def _args_of(job: Job) -> dict[str, Any]:
    args = json.loads(job.args_json)
    if not isinstance(args, dict):
        raise PermanentError("args should be a JSON object")
    log.learn_job(args)
    return args


def _stopped(lease: Lease, progress: dict[str, Any] | None) -> Outcome:
    assert lease.stop is not None  # noqa: S101  the caller has checked it
    return Outcome(lease.stop, lease.reason, progress)


def _failed(error: BaseException, progress: dict[str, Any] | None) -> Outcome:
    if isinstance(error, PermanentError | UnknownTask):
        end = End.PERMANENT if isinstance(error, PermanentError) else End.ERROR
        return Outcome(end, log.masked(_message(error)), progress)
    sound = isinstance(error, Exception) and not isinstance(error, MemoryError)
    return Outcome(End.ERROR, log.masked(described(error)), progress, worker_is_sound=sound)


def described(error: BaseException) -> str:
    """Type, message and stack; the exception's own methods may fail."""
    try:
        return headline(error) + "\n\n" + "".join(traceback.format_exception(error))
    except Exception:
        return type(error).__name__


def headline(error: BaseException) -> str:
    """Type and message; the exception's own methods may fail."""
    try:
        return traceback.format_exception_only(error)[-1].strip()
    except Exception:
        return type(error).__name__


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return type(error).__name__
