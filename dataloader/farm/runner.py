"""The runner steps a job's pipeline until it ends or has to stop. No SQL but the pipeline's own transactions."""

from __future__ import annotations

import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from uuid import UUID

import psycopg
import structlog

from dataloader import config, log, periods, pipelines
from dataloader.config import Settings
from dataloader.farm import fence
from dataloader.farm.failures import described, fingerprint, headline, message
from dataloader.farm.heartbeat import Lease, progress_json
from dataloader.farm.process import children, now
from dataloader.pipelines import PermanentError, Progress, Retry, Run, Stopped, UnknownTask, hooks
from dataloader.pipelines.context import GatherFailed, Parent, Suspended
from dataloader.pipelines.forms import bound_to_process, own_process, rest
from dataloader.pipelines.registry import RETRY
from dataloader.queue import db, lifecycle, parents, typed_args
from dataloader.queue.hooks import Hook, identity
from dataloader.queue.job import (
    Checkpoint,
    Delivery,
    End,
    Job,
    Outcome,
    checkpoint_json,
    clip,
    plain,
    result_json,
    wait_sec,
)

if TYPE_CHECKING:
    import httpx

    from dataloader.pipelines.session import Session

RETRIED = (End.ERROR, End.TIMEOUT)  # the ends after which a job runs again while it has attempts
NOTES_MOST, NOTE_MOST = 20, 500  # lines of a run that the journal keeps, and the characters of one
TARGET_IS_AHEAD = "the target has a newer checkpoint than the queue: the next run goes on there"
LEAP_SEC = periods.seconds("LEAP_SEC", 10.0)  # for the answer to a leap
T = TypeVar("T")
ResourceKey = tuple[Callable[..., Any] | None, str]  # a pipeline's `prepare`, and an affinity key
Begin = Callable[[fence.Standing | None], AbstractContextManager[psycopg.Connection[Any]]]
_log = structlog.get_logger("worker")


class CannotStart(Exception):
    """A users' module or hook keeps this worker from starting. The log has it; its cause is their exception."""


class WrongPipeline(Exception):
    """The pipeline cannot take what its queue delivers. A newer farm may have another, so the farm tries again."""


class Runner:
    """Runs one job at a time, in the worker's main thread."""

    def __init__(self, settings: Settings, dsn: str) -> None:
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

    def secret(self, name: str) -> str | None:
        """A secret of a pipeline; None where it is not set."""
        return config.secret(name)

    def transport(self, check: Callable[[], None]) -> httpx.BaseTransport:
        """The way of a pipeline's requests; `check` is their safe point."""
        from dataloader.pipelines.session import Transport

        return Transport(check, self.settings.dl_http_private_hosts)

    def pace(self, limit: str, check: Callable[[], None]) -> None:
        """Wait for a token of this limit; raises PermanentError where it has no rate."""
        from dataloader.queue import operations  # most workers need none of it

        with self.queue_session() as conn:
            while wait_sec := operations.take_token(conn, limit):
                for _ in rest(wait_sec):
                    check()
        if wait_sec is None:
            remedy = f"dataloader limit set {limit} --per-minute 60"
            raise PermanentError(f"context.http.limit: there is no limit {limit} with a rate: {remedy}")

    def leap(self, job: Job, fence: int, lease: Lease) -> int | None:
        """A fencing token for this claim above the target's `fence`; None when the job is another worker's.

        By a connection of its own: after a failover the heartbeat may be replacing the worker's.
        """
        slot = lease.slot

        def ask() -> int | None:
            schema = self.settings.pg_schema_queue
            with db.connect(self._dsn, name="dl-leap", schema=schema, answer_within=LEAP_SEC, lock_timeout=5) as conn:
                return lifecycle.leap(conn, job, fence)

        token = db.patiently(ask, sleep=time.sleep, give_up=lambda: now() > slot.fence_at or 0 < slot.drain_by < now())
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
        self._tokens = {job.job_id: job.claim for job in delivery.jobs}  # the fencing tokens
        self._checkpoints: Checkpoints | None = None  # where the pipeline wants a context
        self._family: Family | None = None  # the same
        self._by_key: dict[str, Outcome] = {}  # what the pipeline has decided for single keys
        self._notes: list[str] = []  # for the journal
        self._lent: tuple[ResourceKey, Resource] | None = None
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
                    raise Stopped
        except StopIteration as e:
            return returned(delivery, pipeline, e.value, lease.reported, self._runner.settings.dl_result_kb)
        except BaseException as e:
            progress = progress_json(lease.reported)
            if lease.stop is not None:
                return Outcome(lease.stop, lease.reason, progress)
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
        self.must_stop = lease.must_stop
        self.queue_session, self.secret = self._runner.queue_session, self._runner.secret
        self.begin_at, self.save = self._checkpoints.begin, self._checkpoints.save
        self.trigger, self.gather, self.parents = self._family.trigger, self._family.gather, self._family.parents
        return pipelines.Context(
            job_id=job.job_id,
            attempt=job.attempt,
            lock_key=job.lock_key,
            partition_key=job.partition_key,
            idempotency_key=job.idempotency_key,
            logger=log.of_runs(f"pipeline.{job.task}"),
            data_dir=self._runner.settings.data_dir,
            claim=job.claim,
            affinity_key=job.affinity_key,
            _run=bound_to_process(self),
        )

    def _with_resource(self, given: Any, context: pipelines.Context | None) -> pipelines.Context | None:
        """The context with the pipeline's resource: a warm one, else one that is prepared now, within its limit."""
        pipeline, runner, lease = self._pipeline, self._runner, self._lease
        key = pipeline.prepare, self._delivery.first.affinity_key or ""
        name = f"{pipeline.task} {key[1]}".strip()
        resource = runner.warm.resources.get(key)
        if resource is None:
            runner.warm.make_room()
            resource = Resource(None, name)
            if pipeline.prepare is not None:
                lease.limit(pipeline.prepare_sec, pipeline.max_memory_mb, "prepare")
                runner.has_prepared = True
                prepare = partial(prepared, name, partial(pipeline.prepare, given, context))
                resource = runner.call(prepare, lease)
        self._lent = key, resource
        return context and replace(context, resource=resource.value)

    # --- what the context asks for ---

    @property
    def is_saved(self) -> bool:
        return self._lease.is_saved

    @property
    def stop_reason(self) -> End | None:
        return self._lease.stop_for_others

    def report(self, document: dict[str, Any]) -> None:
        self._lease.report(document)
        if not isinstance(document, Progress) or document.checkpoint is None:
            return
        if self._checkpoints is None:
            raise PermanentError("a pipeline that saves a checkpoint should take a context, and read its checkpoint")
        self._checkpoints.save(document.checkpoint)

    @cached_property
    def http(self) -> Session:
        try:
            from dataloader.pipelines.session import Session
        except ImportError:
            raise PermanentError("context.http needs httpx: pip install 'dataloader-farm[http]'") from None

        def check() -> None:
            if self._lease.must_stop():
                raise Stopped

        return Session(self._runner.transport(check), partial(self._runner.pace, check=check))

    def note(self, text: str) -> None:
        if len(self._notes) < NOTES_MOST:
            self._notes.append(clip(log.masked(text))[:NOTE_MOST])

    def drop_resource(self) -> None:
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
        assert self._checkpoints is not None  # noqa: S101  the run has a context
        with self._checkpoints.transaction(dsn is None, partial(self._fenced, dsn)) as conn:
            with own_process():  # the session is the parent's
                yield conn
            if self._lease.must_stop_now():
                raise Stopped

    @contextmanager
    def _fenced(self, dsn: str | None, standing: fence.Standing | None) -> Iterator[psycopg.Connection[Any]]:
        """A transaction that no run without its claim commits; such a run is over."""
        jobs, lease = {job.job_id: job for job in self._delivery.jobs}, self._lease

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


# --- resources: a few stay warm, by the affinity keys of the jobs ---


class Resource(NamedTuple):
    """A prepared resource, its name in the log, how to release it, and the processes that have come with it."""

    value: Any
    name: str
    held: AbstractContextManager[Any] | None = None
    pids: frozenset[int] = frozenset()

    def release(self) -> None:
        """Release it. A failure is logged: the job that the worker needs the room for has no part in it."""
        if self.held is None:
            return
        try:
            with own_process():
                self.held.__exit__(None, None, None)
            _log.info("worker.resource.released", resource=self.name)
        except BaseException as e:
            _log.error("worker.resource.failed", resource=self.name, error=log.masked(headline(e)))


def prepared(name: str, open_it: Callable[[], AbstractContextManager[Any]]) -> Resource:
    """Make a resource; raises what its pipeline's `prepare` raises, TypeError where that returns no context manager."""
    began, before = now(), children(os.getpid())
    held = open_it()
    if not isinstance(held, AbstractContextManager):
        raise TypeError("prepare should be a generator function with one yield, or return a context manager")
    value = held.__enter__()
    _log.info("worker.resource.prepared", resource=name, sec=round(now() - began, 3))
    return Resource(value, name, held, frozenset(children(os.getpid())).difference(before))


class WarmResources:
    """The prepared resources of one worker, the least recently used first; without `prepare` one is elsewhere."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.resources: OrderedDict[ResourceKey, Resource] = OrderedDict()

    @property
    def keys(self) -> list[str]:
        """The affinity keys whose resources are warm, the least recently used first."""
        return list(dict.fromkeys(key for _, key in self.resources))

    @property
    def pids(self) -> set[int]:
        return {pid for resource in self.resources.values() for pid in resource.pids}

    def make_room(self) -> None:
        """Release the least recently used resources until there is room for another one."""
        while self.resources and len(self.resources) >= max(1, self._most):
            self.resources.popitem(last=False)[1].release()

    def give_back(self, key: ResourceKey, resource: Resource, is_sound: bool) -> None:
        """After a run with this resource: keep it as the one used last, unless it is not sound or none may stay."""
        self.resources.pop(key, None)
        if is_sound and key[1] and self._most:
            self.resources[key] = resource
        else:
            resource.release()

    def close(self) -> None:
        while self.resources:
            self.resources.popitem()[1].release()


# --- what the context of a run does ---


class Checkpoints:
    """The checkpoints of one run: where it goes on, and those that it saves; its lease has the latest for the queue.

    A checkpoint is in two places. The queue has the latest one, up to a second old. The target has the latest one that
    was committed with data. A run goes on at the queue's, unless the target has one that the queue's does not follow:
    then data were committed behind it, and the target's is the newer one. A run that learns this too late, in its first
    transaction, changes nothing and is handed back; the next run goes on at the target's.
    """

    def __init__(
        self, lease: Lease, pipeline: pipelines.Pipeline, kept: Checkpoint, ask_target: Callable[[], Checkpoint]
    ) -> None:
        """`kept` is the queue's; `ask_target` returns the target's, behind which no older run can commit another."""
        self._lease = lease
        self._pipeline = pipeline
        self._begin = kept
        self._ask_target = ask_target
        self._open: list[fence.Standing | None] = []  # of the open transactions; None: no save is allowed
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

    @contextmanager
    def transaction(self, is_target: bool, begin: Begin) -> Iterator[psycopg.Connection[Any]]:
        """A transaction in the target or elsewhere; in the target it commits what is saved in it.

        Raises Stopped, see above.
        """
        standing = fence.Standing(self._lease.job.job_id) if is_target and self.latest is not None else None
        with begin(standing) as conn:
            if standing is not None and self.latest is not None and standing.newest.mark > self.latest.mark:
                self._keep(standing.newest)
                self._lease.end(End.HANDED_BACK, TARGET_IS_AHEAD)
                raise Stopped
            self._open.append(standing)
            try:
                yield conn
            finally:
                self._open.remove(standing)
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


class Family:
    """The actions of one run on other jobs, by a connection of its own: the heartbeat uses the worker's."""

    def __init__(self, delivery: Delivery, connect: Callable[[], db.Connection], schema: str) -> None:
        self._delivery = delivery
        self._job = delivery.first
        self._connect = connect
        self._schema = schema
        self._conn: db.Connection | None = None
        self._added = 0

    def close(self) -> None:
        if self._conn is not None:
            with suppress(psycopg.Error):
                self._conn.close()

    def trigger(self, task: str, args: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> UUID:
        """Add a job; another attempt of this job that adds its jobs in the same order finds the same ones."""
        from dataloader.queue import new_job  # it needs pydantic, and a worker imports this module

        self._added += 1
        name = f"{self._job.job_id}:{self._added}"
        given = {"queue": self._job.queue, "lock_key": name, "idempotency_key": name, "producer": self._job.task}
        try:
            in_json = plain(typed_args.plain(args or {}), "args")
            added: dict[str, Any] = given | {**fields}
            return new_job.enqueue(self._open(), task=task, args=in_json, schema=self._schema, **added)[0]
        except (ValueError, TypeError) as e:
            raise PermanentError(f"context.trigger: {e}") from None

    def gather(self, job_ids: Sequence[UUID]) -> list[Any]:
        """The results of these jobs once all have ended; until then the run ends, and the job waits for them."""
        if len(self._delivery.jobs) > 1:
            raise PermanentError("context.gather is for a run of one job, and this one has several")
        jobs = parents.results(self._open(), job_ids)
        if not all(each.has_ended for each in jobs):
            try:
                parents.gather(self._open(), self._job, list(job_ids))  # a lost claim ends the run in any case
            except psycopg.errors.InvalidParameterValue as e:
                raise PermanentError(f"context.gather: {e.diag.message_primary}") from None
            raise Suspended(f"waits for {len(job_ids)} jobs")
        if bad := [each for each in jobs if each.status != "succeeded"]:
            raise GatherFailed(bad[0].job_id, bad[0].status, len(bad), len(jobs))
        return [each.result for each in jobs]

    def parents(self) -> list[Parent]:
        conn = self._open()
        jobs = parents.results(conn, parents.parents_of(conn, self._job.job_id))
        return [Parent(each.job_id, each.task, each.status, each.result) for each in jobs]

    def _open(self) -> db.Connection:
        if self._conn is None:
            self._conn = self._connect()
        return self._conn


# --- the input and the outcome of a run ---


def returned(
    delivery: Delivery, pipeline: pipelines.Pipeline, value: Any, progress: dict[str, Any] | None, most_kb: int
) -> Outcome:
    """The outcome of a run whose pipeline has returned `value`: the result of each job, in at most so many KB.

    With batch_size a dict that has only keys of the run holds their results.
    """
    kept = progress_json(value if isinstance(value, dict) else progress)
    if pipeline.batch_size is not None and isinstance(value, dict) and value.keys() <= delivery.keys().keys():
        by_key = {key: _done(of_key, kept, most_kb) for key, of_key in value.items()}
        return Outcome(End.DONE, progress=kept, by_key=by_key)
    return _done(value, kept, most_kb)


def _done(value: Any, progress: str | None, most_kb: int) -> Outcome:
    """The outcome with this result; another attempt would return the same, so a wrong one is a PermanentError."""
    if value is None:
        return Outcome(End.DONE, progress=progress)
    try:
        return Outcome(End.DONE, progress=progress, result=result_json(value, most_kb))
    except ValueError as e:
        return _failed(PermanentError(str(e)), progress)


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
    raised = [(delivery, TimeoutError(outcome.error) if outcome.end is End.TIMEOUT else outcome.raised)]
    for key, jobs in delivery.keys().items():
        if each := outcome.by_key.get(key):
            raised.append((Delivery(tuple(jobs)), each.raised))
    for failed, error in raised:
        if error is not None:
            given = None
            with suppress(Exception):  # the input may be missing
                given = pipeline and input_of(failed, pipeline, {})
            call_hook(hooks.ON_ERROR, _run_for_hook(failed, given), error)


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


def _run_for_hook(delivery: Delivery, given: Any) -> Run:
    job, job_ids = delivery.first, tuple([each.job_id for each in delivery.jobs])
    return Run(job.queue, job.task, job.lock_key, job.job_id, job.attempt, given, job_ids)


def _failed(error: BaseException, progress: str | None) -> Outcome:
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
            attempt = jobs[0].attempt
            try:
                with own_process():
                    each = each._replace(delay_sec=wait_sec(retry_in(attempt), f"retry_in({attempt})"))
            except BaseException as e:
                _log.warning("pipeline.retry_in.failed", error=log.masked(headline(e)))
        by_key[key] = each
    if len(by_key) == 1:
        return by_key.popitem()[1]._replace(progress=outcome.progress, worker_is_sound=outcome.worker_is_sound)
    return outcome._replace(by_key=by_key)
