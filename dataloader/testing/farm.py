"""One job from its first start to its end, as on a farm, but without a queue, a wait or other processes.

A test cancels, drains or crashes a run at one of its safe points. They are counted from 1: each yield, `check`,
`progress`, read of `stopping`, and the commit of `context.transaction`. A run that is to crash is a process of its
own, killed at its safe point.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar
from uuid import UUID, uuid4

from dataloader import log, pipelines
from dataloader.config import Settings
from dataloader.farm import process
from dataloader.farm.heartbeat import Lease
from dataloader.farm.process import now
from dataloader.farm.runner import Runner, last_words
from dataloader.farm.slots import SharedSlots, Slot
from dataloader.pipelines import hooks
from dataloader.queue import db, new_job
from dataloader.queue.fields import ATTEMPTS
from dataloader.queue.hooks import AROUND_ENQUEUE, Hook
from dataloader.queue.job import (
    LEADS_TO,
    Checkpoint,
    Delivery,
    End,
    Finish,
    Job,
    Outcome,
    Status,
    Verb,
    checkpoint_json,
    decide,
    to_json,
)
from dataloader.queue.typed_args import Model, plain

if TYPE_CHECKING:
    import httpx

Point = int | Literal["end"]
T = TypeVar("T")
Progress = dict[str, Any]
Dsn = str | Callable[[], str] | None
Answering = Callable[["httpx.Request"], "httpx.Response"]
KEY = "test"
_log = logging.getLogger("dataloader.testing")
_POLL_SEC = 0.5  # between two checks of a process that has not ended
# Of a wait for another thread of the same process, without a time limit: futex(2) on x86-64 and others.
_FUTEX, _PRIVATE, _WAITS = ("202", "98"), 128, (0, 9)
_MAIN = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
main, given = pickle.load(sys.stdin.buffer)
sys.exit(main(*given))
"""


class NotReached(AssertionError):
    """The run was over before the safe point that the test names."""


class Deadlocked(RuntimeError):
    """Each thread of the run waits for another one, so that the run will never go on."""


class NoDatabase(RuntimeError):
    """The pipeline began a transaction, and the test gave no database."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job.

    `end` is "done", "error", "permanent", "timeout", "canceled", "handed back" or "crash"; `steps` is the number of
    safe points passed; `exception` is the pipeline's own.
    """

    attempt: int
    end: str
    progress: list[Progress]
    steps: int
    seconds: float
    error: str | None = None
    exception: BaseException | None = field(default=None, compare=False)
    checkpoint: Progress | None = None  # the latest of the job when the run was over


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a job: its status and error, as in the API, and its runs in their order.

    Of a batch: the status and error of the first job that has not succeeded, else of the first. `jobs` has the status
    of each job, by key, in the order of its args; `results` has in the same form what the pipeline has returned for it.
    """

    job_id: UUID
    status: str
    error: str | None
    runs: list[Run]
    jobs: dict[str, list[str]] = field(default_factory=dict)
    results: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def progress(self) -> list[Progress]:
        """The last run's progress documents, as stored; a returned dict is the last of them."""
        return self.runs[-1].progress

    @property
    def result(self) -> Any:
        """The stored result of the pipeline; None unless the job has succeeded. For a batch, that of the first job."""
        return next(iter(self.results.values()))[0]

    @property
    def value(self) -> Progress | None:
        """The job's last progress, as in its status."""
        return next((run.progress[-1] for run in reversed(self.runs) if run.progress), None)

    @property
    def checkpoint(self) -> Progress | None:
        """The latest checkpoint that the job's runs have saved, also when it has succeeded; None: none."""
        return self.runs[-1].checkpoint

    @property
    def exception(self) -> BaseException | None:
        """The pipeline's exception in the last run; None without one."""
        return self.runs[-1].exception

    @property
    def attempts(self) -> int:
        """The number of runs that counted; a run that was handed back does not."""
        return self.runs[-1].attempt - (self.runs[-1].end == End.HANDED_BACK)

    @property
    def steps(self) -> int:
        """The number of safe points that the last run passed."""
        return self.runs[-1].steps

    @property
    def seconds(self) -> float:
        """The duration of all runs together."""
        return sum(run.seconds for run in self.runs)

    def __repr__(self) -> str:
        error = (self.error or "").partition("\n")[0]
        return f"<Result {self.status}, attempts={self.attempts}, steps={self.steps}, error={error!r}>"


class Fate(NamedTuple):
    kind: Literal["nothing", "cancel", "drain", "crash"]
    at: Point = 0

    def missed(self, steps: int, error: str | None) -> NotReached:
        text = f"{self.kind}_at={self.at!r}: the run was over before, after {steps} safe point{'s' * (steps != 1)}"
        return NotReached(text + (f": {error}" if error else ""))


NOTHING = Fate("nothing")


def run(
    pipeline: str | Callable[..., Any],
    args: dict[str, Any] | Model | None = None,
    *,
    dsn: Dsn = None,
    data_dir: Path | None = None,
    cancel_at: int | None = None,
    drain_at: int | None = None,
    crash_at: Point | Sequence[Point] = (),
    max_attempts: int | None = None,
    timeout_sec: int | None = None,
    job_id: UUID | None = None,
    queue: str = "test",
    lock_key: str = KEY,
    partition_key: str = "",
    idempotency_key: str | None = None,
    affinity_key: str | None = None,
    checkpoint: Progress | None = None,
    secrets: Mapping[str, str] | None = None,
    http: Answering | None = None,
) -> Result:
    """Run a job of `pipeline`, a registered function or its task's name, until its status is final.

    docs/testing.md has the parameters. For a pipeline with batch_size `args` are {lock_key: [args, ...]}, the jobs of
    one call. The runs that crash come first, each killed at its safe point ("end": after its work); the next one is
    handed back at `drain_at`, the one after it canceled at `cancel_at` (of a batch its first job).

    The hooks that the test's process has imported are called as in a farm of one worker; what a hook at the start
    raises reaches the test. Raises NotReached when a run ends before its point, NoDatabase when a transaction begins
    without `dsn`, Deadlocked when a run that is to crash waits for itself, and UnknownTask or ValueError when there is
    no such pipeline or its job is refused.
    """
    points = crash_at if isinstance(crash_at, Sequence) and not isinstance(crash_at, str) else [crash_at]
    task = _task_of(pipeline)
    is_batch = pipelines.resolve(task).batch_size is not None
    keys: dict[str, list[Any]] = plain(args or {}) if is_batch else {lock_key: [args or {}]}
    more = {
        "queue": queue,
        "task": task,
        "idempotency_key": idempotency_key,
        "partition_key": partition_key,
        "max_attempts": max_attempts,
        "timeout_sec": timeout_sec,
        "affinity_key": affinity_key,
    }
    jobs = [
        _job(None if is_batch else job_id, more | {"lock_key": key, "args": plain(each)})
        for key, of_key in keys.items()
        for each in of_key
    ]
    if not jobs:
        raise ValueError(f"{task!r} takes batches: give its args as {{lock_key: [args, ...]}}")
    begin = Checkpoint() if checkpoint is None else Checkpoint(checkpoint_json(checkpoint))
    fates = [Fate("crash", point) for point in points]
    fates += [Fate("drain", drain_at)] if drain_at is not None else []
    fates += [Fate("cancel", cancel_at)] if cancel_at is not None else []
    for fate in fates:
        if isinstance(fate.at, int) and fate.at < 1:
            raise ValueError(f"safe points are counted from 1, not {fate.at}")
    return _Trial(dsn, data_dir or Path.cwd(), begin, dict(secrets or {}), http).run(jobs, iter(fates))


def _job(job_id: UUID | None, given: dict[str, Any]) -> Job:
    """The job that a producer adds by these fields, after every `around_enqueue`; ValueError: they are not valid."""
    if AROUND_ENQUEUE:
        new_job.checked(given)
        without_key = {name: value for name, value in given.items() if (name, value) != ("lock_key", KEY)}
        given = new_job.checked({"lock_key": KEY} | new_job.hooked(new_job.without_defaults(without_key)))
    else:
        given = given | {"args": json.dumps(given["args"], allow_nan=False)}
    own = ("queue", "task", "idempotency_key", "lock_key", "partition_key", "timeout_sec", "affinity_key")
    return Job(
        job_id=job_id or uuid4(),
        args_json=given["args"],
        attempt=1,
        max_attempts=given["max_attempts"] or pipelines.resolve(given["task"]).max_attempts or ATTEMPTS,
        lease_ttl_sec=60,
        claim=1,
        claimed_by="test",
        **{name: given[name] for name in own},
    )


def _task_of(pipeline: str | Callable[..., Any]) -> str:
    pipelines.load(())
    if isinstance(pipeline, str):
        return pipelines.resolve(pipeline).task
    tasks = [task for task in pipelines.tasks() if pipelines.resolve(task).function is pipeline]
    if len(tasks) == 1:
        return tasks[0]
    name = getattr(pipeline, "__name__", repr(pipeline))
    if tasks:
        raise ValueError(f"{name} is registered as {', '.join(tasks)}: name the task to run")
    raise ValueError(f'{name} is no pipeline: put @register("...") in front of it, or name its task')


class _After(NamedTuple):
    """A job after a run: its status, its error, the number of its next attempt, and its result as JSON."""

    status: Status
    error: str | None
    attempt: int
    result: str | None = None


class _Trial:
    """The farm of one job or batch: its settings, and the database of its transactions."""

    def __init__(
        self, dsn: Dsn, data_dir: Path, checkpoint: Checkpoint, secrets: dict[str, str], http: Answering | None
    ) -> None:
        self._dsn = dsn
        self._data_dir = data_dir
        self._fakes = secrets, http
        self._checkpoint = checkpoint  # where the next run goes on
        self._has_worker = False

    def run(self, jobs: list[Job], fates: Iterator[Fate]) -> Result:
        """Run the jobs until their statuses are final; each run takes the next of the fates, if there is one."""
        _call(hooks.ON_FARM_START)
        runs: list[Run] = []
        ends: dict[UUID, _After] = {}
        waiting = jobs
        while waiting:
            fate, delivery = next(fates, NOTHING), Delivery(tuple(waiting))
            ended, after = self._crash(delivery, fate) if fate.kind == "crash" else self._run(delivery, fate)
            runs.append(ended)
            ends |= {job.job_id: each for job, each in zip(waiting, after, strict=True)}
            waiting = [
                job._replace(claim=job.claim + 1, attempt=ends[job.job_id].attempt)
                for job in waiting
                if ends[job.job_id].status is Status.QUEUED
            ]
        return _result(jobs, ends, runs)

    def _run(self, delivery: Delivery, fate: Fate) -> tuple[Run, list[_After]]:
        if not self._has_worker:
            _call(hooks.ON_WORKER_START)
            self._has_worker = True
        runner, lease = self._started(delivery, fate)
        outcome = runner.attempt(delivery, lease)
        # Ctrl-C, a failure or a time limit of the test is no outcome of the pipeline.
        is_pipelines = isinstance(runner.raised, Exception | SystemExit | pipelines.Stopped | GeneratorExit | None)
        if trouble := runner.trouble or (None if is_pipelines else runner.raised):
            raise trouble
        self._checkpoint = outcome.checkpoint or self._checkpoint
        if fate is not NOTHING and not lease.is_met:
            raise fate.missed(lease.steps, outcome.error)
        after = []
        for job, end in zip(delivery.jobs, decide(delivery, outcome), strict=True):
            if end and end.verb == Verb.FAIL:
                runner.report_exhausted(job)
            after.append(_after(job, end, was_canceled=fate.kind == "cancel" and job is delivery.first))
        last = json.loads(outcome.progress or "null")  # a returned dict
        shown = lease.shown if not last or last in lease.shown[-1:] else [*lease.shown, last]
        attempt, seconds, saved = delivery.first.attempt, now() - lease.began, self._checkpoint.value
        return Run(attempt, str(outcome.end), shown, lease.steps, seconds, outcome.error, runner.raised, saved), after

    def _crash(self, delivery: Delivery, fate: Fate) -> tuple[Run, list[_After]]:
        """Run in a process of its own, which writes a diary to a file: a pipe could fill, or stay open."""
        with suppress(Exception):  # make the database here, not in the child; the run itself raises for its lack
            self._target()
        began, before = now(), self._checkpoint
        with tempfile.NamedTemporaryFile("w+") as diary:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork beside threads
                    pid = process.fork(lambda: self.live(delivery, fate, diary))
                status = ended(pid)
            except Deadlocked as e:
                self._entries(diary)  # the fork may have committed a checkpoint
                diary.truncate(0)
                status = self._crash_anew(delivery, fate, diary, e)
            entries = self._entries(diary)
        if entries and "ended" in entries[-1]:
            raise fate.missed(entries[-1]["ended"], entries[-1]["error"])
        attempt, end = delivery.first.attempt, f"killed by signal {-status}" if status < 0 else f"exited with {status}"
        error = f"worker {end} on attempt {attempt}"
        progress = [entry["progress"] for entry in entries if "progress" in entry]
        steps = sum("step" in entry for entry in entries)
        is_free = self._checkpoint.spares_attempt and self._checkpoint.value != before.value
        ends = decide(delivery, Outcome(End.ERROR, error, is_free=is_free))  # a crash is a spent attempt
        after = [_after(job, end) for job, end in zip(delivery.jobs, ends, strict=True)]
        lost = [each._replace(status=Status.LOST) if each.status is Status.FAILED else each for each in after]
        seconds, saved = now() - began, self._checkpoint.value
        return Run(attempt, "crash", progress, steps, seconds, error, checkpoint=saved), lost

    def _entries(self, diary: IO[str]) -> list[dict[str, Any]]:
        """The diary of a run; the latest checkpoint in it is that of the job."""
        diary.seek(0)
        entries = [json.loads(line) for line in diary]
        for entry in entries:
            self._checkpoint = Checkpoint(*entry["checkpoint"]) if "checkpoint" in entry else self._checkpoint
        return entries

    def _crash_anew(self, delivery: Delivery, fate: Fate, diary: IO[str], error: Deadlocked) -> int:
        """Run in a new interpreter, which has the threads that a library starts there, but no change of the test."""
        function = pipelines.resolve(delivery.first.task).function
        module = function.__module__
        if module == "__main__" or "<locals>" in getattr(function, "__qualname__", ""):
            raise Deadlocked(
                f"{error}: its process was forked after a library of this one, such as polars, had started threads. "
                "Put the pipeline into a module, and not into a function or a script: then the run can begin in a new "
                "interpreter"
            ) from None
        _log.warning("%s; it begins once more in a new interpreter, without what the test has changed", error)
        dsn = self._dsn if isinstance(self._dsn, str) else None
        trial = _Trial(dsn, self._data_dir, self._checkpoint, *self._fakes)
        status = ended(begun(_live_anew, os.getpid(), module, trial, delivery, fate, diary.name))
        if not os.fstat(diary.fileno()).st_size:
            raise Deadlocked(f"{error}, and {module} does not register {delivery.first.task} in a new interpreter")
        return status

    def live(self, delivery: Delivery, fate: Fate, diary: IO[str]) -> int:
        """Run until the kill; a run that ends before writes its end into the diary. Called in the child."""
        process.unblock_signals()
        _call(hooks.ON_WORKER_START)
        runner, lease = self._started(delivery, fate, diary)
        outcome = runner.attempt(delivery, lease)
        if fate.at == "end" and outcome.end is End.DONE:
            die()
        lease.write(ended=lease.steps, error=str(runner.trouble or outcome.error))
        return 0

    def _started(self, delivery: Delivery, fate: Fate, diary: IO[str] | None = None) -> tuple[_Runner, _Lease]:
        slot = SharedSlots(1).slots[0]
        slot.claim([job.job_id for job in delivery.jobs], [job.attempt for job in delivery.jobs])
        slot.begin(0, len(delivery.jobs), delivery.lease_ttl_sec, now())
        # Settings of the environment are ignored: a test writes only to the database that it names.
        settings = Settings.model_construct(dl_data_dir=self._data_dir, dl_target_dsn=None, pg_schema="public")
        settings = settings.model_copy(update={"dl_http_private_hosts": ("localhost", "127.0.0.1")})  # servers of tests
        runner = _Runner(settings, self._target, *self._fakes)
        runner.kept = {delivery.first.job_id: self._checkpoint}
        return runner, _Lease(delivery, slot, fate, diary)

    def _target(self) -> str:
        if callable(self._dsn):
            self._dsn = self._dsn()
        if self._dsn is None:
            raise NoDatabase(
                "context.transaction() needs a database: give `dsn`, or take the fixture run_pipeline"
                " of dataloader.testing.plugin"
            )
        return self._dsn


def _call(hook: Hook) -> None:
    """Call the functions of a hook at a start; the first exception reaches the test, after the last words."""
    with last_words():
        for function in hook:
            function()


class _Runner(Runner):
    """A worker's runner that keeps the pipeline's exception, and asks for a database at the first transaction."""

    def __init__(
        self, settings: Settings, target: Callable[[], str], secrets: dict[str, str], http: Answering | None
    ) -> None:
        super().__init__(settings, "")
        self._secrets, self._http = secrets, http
        self._dsn_of_test = target
        self.raised: BaseException | None = None
        self.trouble: BaseException | None = None  # an error of the test, not of the pipeline

    def attempt(self, delivery: Delivery, lease: Lease) -> Outcome:
        try:
            return self.run(delivery, lease)
        finally:
            log.learn_job({})
            self.warm.close()

    def call(self, code: Callable[[], T], interruptible: Lease | None) -> T:
        try:
            return super().call(code, interruptible)
        except StopIteration:
            raise
        except BaseException as e:
            self.raised = e
            raise

    def secret(self, name: str) -> str | None:
        return self._secrets.get(name)

    def transport(self, check: Callable[[], None]) -> httpx.BaseTransport:
        import httpx

        return httpx.MockTransport(self._http) if self._http else super().transport(check)

    def pace(self, limit: str, check: Callable[[], None]) -> None:
        """Wait for nothing: a test has no farm that shares the limit."""

    def queue_session(self) -> db.Connection:
        self._dsn = self.target(None)
        return super().queue_session()

    def leap(self, job: Job, fence: int, lease: Lease) -> int | None:
        return None

    def target(self, dsn: str | None) -> str:
        try:
            return dsn or self._dsn_of_test()
        except BaseException as e:
            self.trouble = e
            raise


class _Lease(Lease):
    """A lease that no other process can take; it ends at the safe point of its fate."""

    def __init__(self, delivery: Delivery, slot: Slot, fate: Fate, diary: IO[str] | None = None) -> None:
        super().__init__(delivery, slot)
        self.steps = 0
        self.is_met = False
        self._fate = fate
        self._diary = diary
        self.shown: list[Progress] = []  # as stored

    def must_stop(self) -> bool:
        return self.must_stop_now()

    def must_stop_now(self) -> bool:
        self.slot.renewed = now()
        if not super().must_stop_now():
            self.steps += 1
            self.write(step=self.steps)
            if self.steps == self._fate.at:
                self.is_met = True
                if self._fate.kind == "crash":
                    die()
                is_drain = self._fate.kind == "drain"
                self.end(*(End.HANDED_BACK, "drain") if is_drain else (End.CANCELED, None))
        return self.stop is not None

    def report(self, progress: Progress) -> None:
        super().report(progress)
        if (document := to_json(progress)) is None:
            return _log.warning("progress that is not JSON, or too large, is dropped")
        self.shown.append(json.loads(document))
        self.write(progress=self.shown[-1])

    def save(self, checkpoint: Checkpoint) -> None:
        super().save(checkpoint)
        self.written = self.confirmed = checkpoint
        self.write(checkpoint=checkpoint)

    def write(self, **entry: Any) -> None:
        if self._diary:
            self._diary.write(json.dumps(entry) + "\n")
            self._diary.flush()


# --- the process of a run that is to crash: a fork, or a new interpreter where a fork cannot go on ---
# A fork has the memory of the test, but none of its threads. A library such as polars, which has started a pool of
# threads in the test's process, waits in the fork for a pool without threads, and nothing wakes it.


def begun(main: Callable[..., int], *given: Any) -> int:
    """Begin a new interpreter that runs `main`, a function of a module, with values that can be pickled; its pid."""
    with tempfile.TemporaryFile() as file:
        pickle.dump(sys.path, file)
        pickle.dump((main, given), file)
        file.seek(0)
        stdin = (os.POSIX_SPAWN_DUP2, file.fileno(), 0)
        command = [sys.executable, "-c", _MAIN]
        return os.posix_spawn(command[0], command, os.environ, file_actions=[stdin], setsid=True)


def ended(pid: int) -> int:
    """Wait for the process, and end its children; its exit status, or -N when signal N has killed it.

    Raises Deadlocked.
    """
    watch, before = os.pidfd_open(pid), list[str]()
    try:
        while not process.readable([watch], _POLL_SEC):
            waits = _waits(pid)
            if waits and waits == before:
                raise Deadlocked("each thread of the run waits for another one")
            before = waits
    finally:
        os.close(watch)
        process.kill_group(pid)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _waits(pid: int) -> list[str]:
    """The wait of each thread, if each waits for another one without a time limit; else none (Linux: proc(5))."""
    calls = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/syscall") as file:
                call = file.read()
            with open(f"/proc/{pid}/task/{thread}/status") as file:
                calls.append(call + file.read())  # with the number of times that the thread was woken
            number, _, operation, _, limit, *_ = [*call.split(), *["0"] * 5]
            way = int(operation, 16)
            if number not in _FUTEX or way % _PRIVATE not in _WAITS or not way & _PRIVATE or int(limit, 16):
                return []
    except OSError:
        return []
    return calls


def die() -> None:
    """Kill this process, as the kernel does for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _after(job: Job, end: Finish | None, was_canceled: bool = False) -> _After:
    """The job after a run; a requested cancellation wins (dl_finish in sql/functions/finish.sql)."""
    if end is None:
        return _After(Status.RUNNING, None, job.attempt)  # a newer run of the job has it
    if was_canceled:
        error = "canceled when the pipeline had finished: its work stands" if end.verb == Verb.SUCCEED else end.error
        return _After(Status.CANCELED, error, job.attempt)
    attempt = {Verb.HAND_BACK: job.attempt, Verb.RESTART: 1}.get(Verb(end.verb), job.attempt + 1)
    return _After(LEADS_TO[end.verb], end.error, attempt, end.result)


def _result(jobs: list[Job], ends: dict[UUID, _After], runs: list[Run]) -> Result:
    keys: dict[str, list[str]] = {}
    results: dict[str, list[Any]] = {}
    for job in jobs:
        end = ends[job.job_id]
        keys.setdefault(job.lock_key, []).append(end.status.value)
        results.setdefault(job.lock_key, []).append(json.loads(end.result or "null"))
    first = next((job for job in jobs if ends[job.job_id].status is not Status.SUCCEEDED), jobs[0])
    status, error = ends[first.job_id][:2]
    if error:
        _log.error("%s: %s", first.task, error)
    return Result(first.job_id, status.value, error, runs, keys, results)


def _live_anew(parent: int, module: str, trial: _Trial, delivery: Delivery, fate: Fate, diary: str) -> int:
    """Run until the kill, as `_Trial.live`; called in a new interpreter."""
    process.follow_parent(parent, signal.SIGTERM)
    pipelines.load((module,))
    pipelines.resolve(delivery.first.task)
    with open(diary, "a") as file:
        file.write("{}\n")  # the run has begun
        file.flush()
        return trial.live(delivery, fate, file)
