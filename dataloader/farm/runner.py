"""The runner steps a job's pipeline until it ends or has to stop. No SQL but the pipeline's own transactions."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar
from uuid import UUID

import psycopg
import structlog

from dataloader import log, periods, pipelines
from dataloader.config import Settings
from dataloader.farm import fence
from dataloader.farm.checkpoints import Checkpoints
from dataloader.farm.failures import described, fingerprint, headline, message
from dataloader.farm.family import Family
from dataloader.farm.heartbeat import Lease
from dataloader.farm.process import now
from dataloader.farm.warm import Place, Resource, WarmResources, prepared
from dataloader.pipelines import PermanentError, Progress, Retry, Run, Stopped, UnknownTask, hooks
from dataloader.pipelines.children import bound_to_process, own_process
from dataloader.pipelines.context import Suspended
from dataloader.pipelines.registry import RETRY
from dataloader.queue import db, lifecycle
from dataloader.queue.hooks import Hook, identity
from dataloader.queue.job import (
    Checkpoint,
    Delivery,
    End,
    Job,
    Outcome,
    as_progress,
    clip,
    result_json,
    to_json,
    wait_sec,
)

RETRIED = (End.ERROR, End.TIMEOUT)  # the ends after which a job runs again while it has attempts
NOTES_MOST, NOTE_MOST = 20, 500  # lines of a run that the journal keeps, and the characters of one
LEAP_SEC = periods.seconds("LEAP_SEC", 10.0)  # for the answer to a leap
T = TypeVar("T")
_log = structlog.get_logger("worker")


class CannotStart(Exception):
    """A users' module or hook keeps this worker from starting. The log has it; its cause is their exception."""


class WrongPipeline(Exception):
    """The pipeline cannot take what its queue delivers. A newer farm may have another, so the farm tries again."""


class Runner:
    """Runs one job at a time, in the worker's main thread."""

    def __init__(self, settings: Settings, dsn: str) -> None:
        """`dsn` is the queue's."""
        self.settings = settings
        self._dsn = dsn
        self.warm = WarmResources(settings.dl_warm)
        self.kept: Mapping[UUID, Checkpoint] = {}  # of jobs that have run before, as the queue has them
        self.has_prepared = False  # the latest run has made its resource
        self._interruptible: Lease | None = None  # the run of a plain function, or of what prepares a resource

    def run(self, delivery: Delivery, lease: Lease) -> Outcome:
        """Resolve and step the pipeline; every exception becomes an outcome, in which secrets are masked."""
        self.has_prepared = False
        try:
            pipeline = pipelines.resolve(delivery.first.task)
        except UnknownTask as e:
            report_failure(delivery, None, outcome := _failed(e, None))
            return outcome
        execution = Execution(self, delivery, lease, pipeline)
        try:
            with own_process():
                outcome = execution.step()
        except BaseException as e:  # of the methods of what the pipeline has yielded or returned
            outcome = _failed(e, None)
        outcome = execution.close(outcome)
        if outcome.end is not End.DONE or outcome.by_key:
            report_failure(delivery, pipeline, outcome)
        return delayed(delivery, outcome, pipeline.retry_in) if pipeline.retry_in else outcome

    def interrupt(self, *_: object) -> None:
        """In the signal handler of SIGUSR1: raise Stopped into a plain function, which has no safe point."""
        lease = self._interruptible
        if lease is not None and lease.must_stop_now():
            self._interruptible = None
            raise Stopped

    def call(self, code: Callable[[], T], interruptible: Lease | None) -> T:
        """Call the pipeline's code; the signal handler may raise Stopped into it where a lease is `interruptible`."""
        self._interruptible = interruptible
        try:
            with own_process():
                return code()
        finally:
            self._interruptible = None

    def report_exhausted(self, job: Job) -> None:
        """The job is about to end `failed`: call its pipeline's `on_exhausted`, if it has one; never raises."""
        try:
            pipeline = pipelines.resolve(job.task)
            if pipeline.on_exhausted:
                with own_process():
                    try:
                        given = input_of(Delivery((job,)), pipeline, {})
                    except PermanentError:  # args that the model refuses, as they are
                        given = input_of(Delivery((job,)), replace(pipeline, args=None), {})
                    pipeline.on_exhausted(given)
        except UnknownTask:
            return
        except BaseException as e:
            _log.error("pipeline.on_exhausted.failed", error=log.masked(headline(e)))

    # --- databases ---

    def queue_session(self) -> db.Connection:
        """A session on the queue's database for the present run: the heartbeat has the worker's."""
        schema, within = self.settings.pg_schema_queue, self.settings.pg_connect_timeout
        return db.connect(self._dsn, name="dl-pipeline", schema=schema, connect_timeout=within, answer_within=30)

    def target(self, dsn: str | None) -> str:
        """Where a transaction goes whose pipeline asks for `dsn`, or for None."""
        return dsn or self.settings.target_dsn or self._dsn

    def leap(self, job: Job, fence: int, lease: Lease) -> int | None:
        """A fencing token for this claim above the target's `fence`; None when the job is another worker's.

        By a connection of its own: after a failover the heartbeat may be replacing the worker's.
        """
        slot = lease.slot

        def ask() -> int | None:
            schema = self.settings.pg_schema_queue
            with db.connect(self._dsn, name="dl-leap", schema=schema, answer_within=LEAP_SEC, lock_timeout=5) as conn:
                return lifecycle.leap(conn, job, fence)

        def is_too_late() -> bool:
            return now() > slot.fence_at or 0 < slot.drain_by < now()

        token = db.patiently(ask, sleep=time.sleep, give_up=is_too_late)
        if token is not None:
            facts = {"worker": job.claimed_by, "queue": job.queue, "claim": job.claim}
            _log.warning("worker.fence.ahead", **facts, fence=fence, leapt_to=token)
        return token


class Execution:
    """One run: it steps the pipeline, and does what the pipeline's context asks for."""

    def __init__(self, runner: Runner, delivery: Delivery, lease: Lease, pipeline: pipelines.Pipeline) -> None:
        self._runner = runner
        self._delivery = delivery
        self._lease = lease
        self._pipeline = pipeline
        self._tokens: dict[UUID, int] | None = None  # the fencing tokens of the run's jobs, once it asks
        self._checkpoints: Checkpoints | None = None  # where the pipeline wants a context
        self._family: Family | None = None  # the same
        self._by_key: dict[str, Outcome] = {}  # what the pipeline has decided for single keys
        self._notes: list[str] = []  # for the journal
        self._lent: tuple[Place, Resource] | None = None
        self._drops_resource = False

    def step(self) -> Outcome:
        """Step the pipeline until it ends or has to stop."""
        delivery, lease, pipeline = self._delivery, self._lease, self._pipeline
        try:
            context = self._context() if pipeline.wants_context or pipeline.prepare else None
            given = input_of(delivery, pipeline, self._by_key)
            if pipeline.prepare or delivery.first.affinity_key:
                context = self._with_resource(given, context)
            lease.watch(pipeline.stall_sec, pipeline.on_stall == RETRY)
            timeout_sec = delivery.timeout_sec or pipeline.timeout_of(given, delivery.first.affinity_key)
            lease.limit(timeout_sec, pipeline.max_memory_mb)
            steps = pipelines.steps(pipeline, given, context)
            if hooks.AROUND_RUN:
                steps = hooks.wrapped(_run_for_hook(delivery, given), steps)
            interruptible = None if pipeline.has_safe_points else lease
            while True:
                item = self._runner.call(steps.__next__, interruptible)
                if isinstance(item, dict):
                    try:
                        self.report(item)
                    except PermanentError:  # a checkpoint that cannot be kept
                        steps.close()  # its transaction rolls back now, not when Python collects it
                        raise
                if lease.must_stop():
                    steps.close()
                    return _stopped(lease, _shown(lease.reported))
        except StopIteration as e:
            return returned(delivery, pipeline, e.value, lease.reported, self._runner.settings.dl_result_kb)
        except BaseException as e:
            progress = _shown(lease.reported)
            if lease.stop is not None:
                return _stopped(lease, progress)
            if isinstance(e, Suspended):
                return Outcome(End.HANDED_BACK, str(e), progress)
            return _failed(e, progress)

    def close(self, outcome: Outcome) -> Outcome:
        """Give back what the run has used; the outcome with the notes, checkpoint and ends of keys."""
        lease = self._lease
        if self._lent is not None:  # the state of a resource is unknown after its run had to stop
            self._runner.warm.give_back(*self._lent, is_sound=lease.stop is None and not self._drops_resource)
        if self._family is not None:
            self._family.close()
        if self._by_key and lease.stop is None:
            outcome = outcome._replace(by_key={**outcome.by_key, **self._by_key})
        if self._notes:
            outcome = outcome._replace(notes=tuple(self._notes))
        if self._checkpoints is not None and (latest := self._checkpoints.latest) and latest.text is not None:
            is_free = self._pipeline.spares_attempts and outcome.end in RETRIED and self._checkpoints.has_moved
            outcome = outcome._replace(checkpoint=latest, is_free=is_free)
        return outcome

    def _context(self) -> pipelines.Context:
        delivery, lease, job = self._delivery, self._lease, self._delivery.first
        self._family = Family(delivery, self._runner.queue_session, self._runner.settings.pg_schema_queue)
        kept = self._runner.kept.get(job.job_id, Checkpoint())
        self._checkpoints = Checkpoints(lease, self._pipeline, kept, self._target_checkpoint)
        self.must_stop, self.queue_session = lease.must_stop, self._runner.queue_session
        self.begin_at, self.save = self._checkpoints.begin, self._checkpoints.save
        self.trigger, self.gather, self.parents = self._family.trigger, self._family.gather, self._family.parents
        return pipelines.Context(
            job_id=job.job_id,
            attempt=job.attempt,
            lock_key=job.lock_key,
            partition_key=job.partition_key,
            idempotency_key=job.idempotency_key,
            logger=logging.getLogger(f"pipeline.{job.task}"),
            data_dir=self._runner.settings.data_dir,
            claim=job.claim,
            affinity_key=job.affinity_key,
            _run=bound_to_process(self),
        )

    def _with_resource(self, given: Any, context: pipelines.Context | None) -> pipelines.Context | None:
        """The context with the pipeline's resource: a warm one, else one that is prepared now, within its limit."""
        pipeline, runner, lease = self._pipeline, self._runner, self._lease
        place = pipeline.prepare, self._delivery.first.affinity_key or ""
        name = f"{pipeline.task} {place[1]}".strip()
        resource = runner.warm.resources.get(place)
        if resource is None:
            runner.warm.make_room()
            resource = Resource(None, name)
            if pipeline.prepare is not None:
                lease.limit(pipeline.prepare_sec, pipeline.max_memory_mb, "prepare")
                runner.has_prepared = True
                prepare = partial(prepared, name, partial(pipeline.prepare, given, context))
                resource = runner.call(prepare, lease)
        self._lent = place, resource
        return context and replace(context, resource=resource.value)

    # --- what the context asks for ---

    @property
    def is_saved(self) -> bool:
        """See Context."""
        return self._lease.is_saved

    @property
    def stop_reason(self) -> End | None:
        """See Context."""
        return self._lease.stop_for_others

    def report(self, document: dict[str, Any]) -> None:
        """Keep progress, and the checkpoint that it carries."""
        self._lease.report(document)
        if not isinstance(document, Progress) or document.checkpoint is None:
            return
        if self._checkpoints is None:
            raise PermanentError("a pipeline that saves a checkpoint should take a context, and read its checkpoint")
        self._checkpoints.save(document.checkpoint)

    def note(self, text: str) -> None:
        """Keep a line for the journal."""
        if len(self._notes) < NOTES_MOST:
            self._notes.append(clip(log.masked(text))[:NOTE_MOST])

    def drop_resource(self) -> None:
        """No other run gets this run's resource."""
        self._drops_resource = True

    def decide(self, key: str, outcome: Outcome) -> None:
        """How the run ends for one key of a batch."""
        if key not in {job.lock_key for job in self._delivery.jobs}:
            raise KeyError(f"{key!r} is no key of this run")
        error = outcome.error if outcome.error is None else log.masked(outcome.error)
        group = None if outcome.raised is None else _group_of(outcome.raised)
        self._by_key[key] = outcome._replace(error=error, error_group=group)

    @contextmanager
    def transaction(self, dsn: str | None) -> Iterator[psycopg.Connection[Any]]:
        """A transaction in the target database; it rolls back when the run has to stop before the commit."""
        checkpoints = self._checkpoints
        assert checkpoints is not None  # noqa: S101  the run has a context
        standing = checkpoints.standing(dsn is None)
        with self._fenced(dsn, standing) as conn, checkpoints.within(standing):
            with own_process():  # the session is the parent's
                yield conn
            if self._lease.must_stop_now():
                raise Stopped
        checkpoints.committed(standing)

    @contextmanager
    def _fenced(self, dsn: str | None, standing: fence.Standing | None) -> Iterator[psycopg.Connection[Any]]:
        """A transaction that no run without its claim commits; such a run is over."""
        jobs, lease = {job.job_id: job for job in self._delivery.jobs}, self._lease
        if self._tokens is None:
            self._tokens = {job_id: job.claim for job_id, job in jobs.items()}

        def leap(job_id: UUID, height: int) -> int | None:
            try:
                return self._runner.leap(jobs[job_id], height, lease)
            except psycopg.Error:
                if lease.must_stop_now():  # the queue's database was away for too long
                    raise Stopped from None
                raise

        target, schema = self._runner.target(dsn), self._runner.settings.pg_schema
        owner = self._delivery.first.claimed_by
        try:
            with fence.transaction(target, schema, self._tokens, owner, leap, standing) as conn:
                yield conn
        except fence.Overtaken:
            lease.give_up(End.GONE, "a newer run of the job has begun")
            raise Stopped from None

    def _target_checkpoint(self) -> Checkpoint:
        """The job's checkpoint in the target, behind which no run without its claim commits another."""
        standing = fence.Standing(self._delivery.first.job_id)
        with self._fenced(None, standing):
            return standing.newest


def returned(
    delivery: Delivery, pipeline: pipelines.Pipeline, value: Any, progress: dict[str, Any] | None, most_kb: int
) -> Outcome:
    """The outcome of a run whose pipeline has returned `value`: the result of each job, in at most so many KB.

    With batch_size a dict that has only keys of the run holds their results.
    """
    progress = _shown(value if isinstance(value, dict) else progress)
    if pipeline.batch_size is not None and isinstance(value, dict) and value.keys() <= delivery.keys().keys():
        by_key = {key: _done(of_key, progress, most_kb) for key, of_key in value.items()}
        return Outcome(End.DONE, progress=progress, by_key=by_key)
    return _done(value, progress, most_kb)


def _done(value: Any, progress: dict[str, Any] | None, most_kb: int) -> Outcome:
    """The outcome with this result; another attempt would return the same, so a wrong one is a PermanentError."""
    if value is None:
        return Outcome(End.DONE, progress=progress)
    try:
        return Outcome(End.DONE, progress=progress, result=result_json(value, most_kb))
    except ValueError as e:
        return _failed(PermanentError(str(e)), progress)


def _shown(progress: dict[str, Any] | None) -> dict[str, Any] | None:
    """The last progress in JSON's types."""
    shown: dict[str, Any] | None = log.without_known(as_progress(progress))
    if progress and to_json(shown) is None:
        _log.warning("progress.dropped", why="not JSON, or too large")
    return shown


def input_of(delivery: Delivery, pipeline: pipelines.Pipeline, by_key: dict[str, Outcome]) -> Any:
    """The pipeline's first argument: the job's args; for one with batch_size {lock_key: [args, ...]}, old to new.

    Equal args of a key stand there once. From now on the log masks their secrets. Raises PermanentError for args that
    the model refuses; of a batch the other keys go on, and `by_key` gets how these end.
    """
    if pipeline.batch_size is None and len(delivery.jobs) > 1:
        raise WrongPipeline(
            f"the queue {delivery.first.queue!r} merges the jobs of a key, and the pipeline {pipeline.task!r} takes"
            " one job: register it with batch_size=1 or more"
        )
    model = partial(pipelines.validated, pipeline.args) if pipeline.args is not None else lambda args: args
    given = {
        key: [*map(json.loads, dict.fromkeys(job.args_json for job in jobs))] for key, jobs in delivery.keys().items()
    }
    args = [*chain.from_iterable(given.values())]
    if not all(isinstance(each, dict) for each in args):
        raise PermanentError("args should be a JSON object")
    log.learn_job(args[0] if len(args) == 1 else {"jobs": args})
    if pipeline.batch_size is None:
        return model(args[0])
    modelled = {}
    for key, of_key in given.items():
        try:
            modelled[key] = list(map(model, of_key))
        except PermanentError as e:
            by_key[key] = _failed(e, None)
            refused = e
    if not modelled:
        raise refused
    return modelled


def report_failure(delivery: Delivery, pipeline: pipelines.Pipeline | None, outcome: Outcome) -> None:
    """Call `on_error` for the run's exception, and for those that the pipeline has given to `context.fail`."""
    if not hooks.ON_ERROR:
        return
    raised = TimeoutError(outcome.error) if outcome.end is End.TIMEOUT else outcome.raised
    if raised is not None:
        call_hook(hooks.ON_ERROR, _of(delivery, pipeline), raised)
    for key, jobs in delivery.keys().items() if outcome.by_key else ():
        each = outcome.by_key.get(key)
        if each is not None and each.raised is not None:
            call_hook(hooks.ON_ERROR, _of(Delivery(tuple(jobs)), pipeline), each.raised)


def call_hook(hook: Hook, *facts: object) -> None:
    """Call the functions of a hook; their exceptions are only logged."""
    for function in hook:
        try:
            with own_process():
                function(*facts)
        except BaseException as e:
            error = log.masked(headline(e))
            _log.error("hook.failed", hook=hook.name, function=identity(function), error=error)


@contextmanager
def last_words() -> Iterator[None]:
    """Call the functions of the hook `last_words` with the exception that ends the block, if one does."""
    try:
        yield
    except BaseException as e:
        call_hook(hooks.LAST_WORDS, e.__cause__ if isinstance(e, CannotStart) else e)
        raise


def _of(delivery: Delivery, pipeline: pipelines.Pipeline | None) -> Run:
    """The run for the error hook; the input of the pipeline may be missing."""
    with suppress(Exception):
        return _run_for_hook(delivery, pipeline and input_of(delivery, pipeline, {}))
    return _run_for_hook(delivery, None)


def _run_for_hook(delivery: Delivery, given: Any) -> Run:
    job, job_ids = delivery.first, tuple([each.job_id for each in delivery.jobs])
    return Run(job.queue, job.task, job.lock_key, job.job_id, job.attempt, given, job_ids)


def _stopped(lease: Lease, progress: dict[str, Any] | None) -> Outcome:
    assert lease.stop is not None  # noqa: S101  the caller has checked it
    return Outcome(lease.stop, lease.reason, progress)


def _failed(error: BaseException, progress: dict[str, Any] | None) -> Outcome:
    if isinstance(error, PermanentError | UnknownTask | WrongPipeline | Retry):
        end = End.PERMANENT if isinstance(error, PermanentError) else End.ERROR
        text, delay_sec = log.masked(message(error)), None
        if isinstance(error, Retry):
            try:
                delay_sec = wait_sec(error.in_sec, "in_sec")  # the pipeline may have changed it since
            except Exception as e:
                text = f"{text}\n{log.masked(headline(e))}"
        return Outcome(end, text, progress, delay_sec=delay_sec, raised=error, error_group=_group_of(error))
    sound = isinstance(error, Exception) and not isinstance(error, MemoryError)
    text, group = log.masked(described(error)), _group_of(error)
    return Outcome(End.ERROR, text, progress, worker_is_sound=sound, raised=error, error_group=group)


def _group_of(error: BaseException) -> str:
    """The error group, of the masked message: what is secret has to go before its digits do."""
    return clip(fingerprint(error, log.masked(message(error))))


def delayed(delivery: Delivery, outcome: Outcome, retry_in: Callable[[int], float]) -> Outcome:
    """The outcome with the delays of the pipeline's rule, by key; where the rule fails, the default counts."""
    if outcome.end not in RETRIED and not outcome.by_key:
        return outcome
    by_key = {}
    for key, jobs in delivery.keys().items():
        each = outcome.by_key.get(key, outcome._replace(by_key={}))
        if each.end in RETRIED and each.delay_sec is None:
            each = each._replace(delay_sec=_delay(retry_in, jobs[0].attempt))
        by_key[key] = each
    if len(by_key) == 1:
        return by_key.popitem()[1]._replace(progress=outcome.progress, worker_is_sound=outcome.worker_is_sound)
    return outcome._replace(by_key=by_key)


def _delay(retry_in: Callable[[int], float], attempt: int) -> float | None:
    try:
        with own_process():
            return wait_sec(retry_in(attempt), f"retry_in({attempt})")
    except BaseException as e:
        _log.warning("pipeline.retry_in.failed", error=log.masked(headline(e)))
        return None
