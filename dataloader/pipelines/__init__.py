"""Pipelines: their registration, their lookup by task, and their run in steps.

A pipeline is a generator, a plain function, a coroutine function or an async generator. It takes `args` and, if it
has a second parameter, a Context. DL_PIPELINES names the users' modules of pipelines; each built-in pipeline is a
module of this package.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum, auto
from logging import Logger
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from pydantic import BaseModel, ValidationError

from dataloader.pipelines.hooks import Run as Run
from dataloader.pipelines.hooks import around_run as around_run
from dataloader.pipelines.hooks import last_words as last_words
from dataloader.pipelines.hooks import on_error as on_error
from dataloader.pipelines.hooks import on_farm_start as on_farm_start
from dataloader.pipelines.hooks import on_worker_start as on_worker_start
from dataloader.queue.hooks import around_enqueue as around_enqueue
from dataloader.queue.hooks import identity
from dataloader.queue.hooks import import_users as import_users
from dataloader.queue.job import End, Outcome

BUILT_IN = ("noop", "csv_file", "cbr", "llm")

BATCH_MOST = 1_000  # keys of one call
ATTEMPTS_MOST = 2_147_483_647  # PostgreSQL's int
SKIP_SEC = 1.0  # until a skipped key is due again
_ASYNC_STEP = 0.1  # seconds between two safe points of a coroutine that awaits

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound=BaseModel)
Progress = dict[str, Any]
Steps = Generator[Any, None, Any]


class PermanentError(Exception):
    """For a pipeline to raise when another attempt cannot succeed: the job ends `failed` at once."""


class UnknownTask(Exception):
    """This process knows no pipeline for the task. A newer farm may know it, so the farm tries the job again."""


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

    def transaction(self, dsn: str | None = None) -> AbstractContextManager[psycopg.Connection[Any]]:
        """A transaction in the target database (DL_TARGET_DSN, or `dsn`), on a connection of its own.

        The end of the block commits it. An exception, a cancellation or a lost claim rolls it back. A newer run of
        the same job rolls it back too: each run notes its claim in the table `dl_fence` of the target database. The
        search_path is PG_SCHEMA.
        """
        return self._transaction(dsn)


class Form(Enum):
    """The kind of a pipeline's function."""

    PLAIN = auto()
    GENERATOR = auto()
    COROUTINE = auto()
    ASYNC_GENERATOR = auto()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A registered function, its form and its limits."""

    task: str
    function: Callable[..., Any]
    wants_context: bool
    timeout_sec: float | None = None
    max_memory_mb: float | None = None
    batch_size: int | None = None
    retry_in: Callable[[int], float] | None = None
    on_exhausted: Callable[[Any], object] | None = None
    max_attempts: int | None = None
    form: Form = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "form", _form(self.function))  # found once: the inspection costs more than a short run

    @property
    def has_safe_points(self) -> bool:
        """False for a plain function, which runs without a pause."""
        return self.form is not Form.PLAIN


_registry: dict[str, Pipeline] = {}
_absent: dict[str, str] = {}  # tasks that this installation lacks, and what would bring them


def register(
    task: str,
    *,
    timeout_sec: float | None = None,
    max_memory_mb: float | None = None,
    batch_size: int | None = None,
    max_attempts: int | None = None,
    retry_in: Callable[[int], float] | None = None,
    on_exhausted: Callable[[Any], object] | None = None,
) -> Callable[[F], F]:
    """Make the decorated function the pipeline of the jobs with this `task`.

    A run longer than `timeout_sec` (a job may name its own) ends at its next yield; a plain function gets Stopped
    raised into it. The farm kills a worker that goes on for another DL_KILL_GRACE_SEC. It kills a worker at once that
    uses, with its children, more than `max_memory_mb`.

    With `batch_size` one call takes the jobs of up to so many keys: the function's first argument is
    {lock_key: [args, ...]}, the args of a key from old to new. An exception fails all keys, each by its own attempts;
    `context.fail`, `context.retry` and `context.skip` decide single ones.

    `max_attempts` is how many runs a job may have whose trigger does not say it: 5 without either. A job keeps what it
    got when it was added. Producers learn of it from the database, when a worker with the pipeline has started.

    `retry_in` returns the seconds from the end of the failed attempt of this number (from 1) to the next one, 0 to
    366 days; by default `retries.linear(30)`. `on_exhausted` is called with the args of a job that is about to end
    `failed`, for its attempts are spent or its error is permanent; with `batch_size` with {lock_key: [args]}. Its own
    exception is logged and changes nothing. A job that a crash ends `lost` is not reported to it.

    Raises ValueError when another function has the name or a limit is not above 0, TypeError when the function cannot
    be called as f(args) or f(args, context).
    """
    for name, limit in (("timeout_sec", timeout_sec), ("max_memory_mb", max_memory_mb)):
        if limit is not None and not limit > 0:
            raise ValueError(f"pipeline {task!r}: {name} should be above 0, or None")
    if batch_size is not None and not (isinstance(batch_size, int) and 1 <= batch_size <= BATCH_MOST):
        raise ValueError(f"pipeline {task!r}: batch_size should be a whole number from 1 to {BATCH_MOST}, or None")
    if max_attempts is not None and not (isinstance(max_attempts, int) and 1 <= max_attempts <= ATTEMPTS_MOST):
        raise ValueError(f"pipeline {task!r}: max_attempts should be a whole number of 1 or more, or None")
    if retry_in is not None and not callable(retry_in):
        raise TypeError(f"pipeline {task!r}: retry_in should be a function of the attempt, such as retries.linear(30)")
    if on_exhausted is not None and not callable(on_exhausted):
        raise TypeError(f"pipeline {task!r}: on_exhausted should be a function of the job's args")

    def decorate(function: F) -> F:
        known = _registry.get(task)
        if known and identity(known.function) != identity(function):
            raise ValueError(f"task {task!r} is registered twice: {identity(known.function)}, {identity(function)}")
        wants_context = _wants_context(task, function)
        _registry[task] = Pipeline(
            task, function, wants_context, timeout_sec, max_memory_mb, batch_size, retry_in, on_exhausted, max_attempts
        )
        return function

    return decorate


def absent(task: str, why: str) -> None:
    """Say why a known task has no pipeline in this installation; `resolve` tells it to a job that asks for the task."""
    _absent[task] = why


def batch_size(task: str) -> int:
    """How many keys a run of this task takes; 1 for a task that is not known here."""
    pipeline = _registry.get(task)
    return (pipeline and pipeline.batch_size) or 1


def attempts() -> dict[str, int | None]:
    """How many attempts the jobs of each registered task have where their trigger does not say; None: as usual."""
    return {task: pipeline.max_attempts for task, pipeline in _registry.items()}


def resolve(task: str) -> Pipeline:
    """The pipeline of this name; raises UnknownTask, which names the known tasks and the one probably meant.

    For a task that this installation lacks, the error says what would bring it.
    """
    try:
        return _registry[task]
    except KeyError:
        if why := _absent.get(task):
            raise UnknownTask(f"the pipeline {task!r} is not installed here: {why}") from None
        close = difflib.get_close_matches(task, tasks(), 1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise UnknownTask(f"no pipeline {task!r} is registered here{meant}; known: {', '.join(tasks())}") from None


def tasks() -> list[str]:
    """The names of all registered pipelines, sorted."""
    return sorted(_registry)


def load(modules: Iterable[str]) -> None:
    """Import the built-in pipelines and the users' modules; an error of an import reaches the caller."""
    for name in BUILT_IN:
        importlib.import_module(f"{__name__}.{name}")
    for name in modules:
        import_users(name)


def validated(model: type[M], args: dict[str, Any]) -> M:
    """`args` as a pydantic model; raises PermanentError, which names each wrong argument and the right form."""
    try:
        return model.model_validate(args)
    except ValidationError as e:
        errors = e.errors(include_input=False, include_context=False, include_url=False)
        raise PermanentError("; ".join(_complaint(error, model) for error in errors)) from None


def steps(pipeline: Pipeline, args: Any, context: Context | None) -> Steps:
    """Run the pipeline as a generator; each of its yields is a safe point, with the progress or None.

    `context` may be None for a pipeline without a second parameter. The generator returns the pipeline's result;
    closing the generator closes or cancels the pipeline.
    """
    given = (args, context) if pipeline.wants_context else (args,)
    if pipeline.form is Form.ASYNC_GENERATOR:
        return (yield from _async_generator(pipeline.function(*given)))
    if pipeline.form is Form.COROUTINE:
        return (yield from _coroutine(pipeline.function(*given)))
    result = pipeline.function(*given)
    if inspect.isgenerator(result):
        return (yield from result)
    return result


def _async_generator(source: AsyncGenerator[Any, None]) -> Steps:
    with asyncio.Runner() as runner:
        try:
            while True:
                try:
                    item = yield from _awaited(runner, anext(source))
                except StopAsyncIteration:
                    return None
                yield item
        finally:
            runner.run(source.aclose())


def _coroutine(source: Coroutine[Any, Any, Any]) -> Steps:
    with asyncio.Runner() as runner:
        return (yield from _awaited(runner, source))


def _awaited(runner: asyncio.Runner, source: Any) -> Steps:
    """Await `source` in slices, with a safe point after each; cancel it when this generator is closed."""
    loop = runner.get_loop()
    task = loop.create_task(_as_coroutine(source))
    try:
        while not task.done():
            runner.run(_wait(task, _ASYNC_STEP))
            if not task.done():
                yield None
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            runner.run(_wait(task, None))


async def _as_coroutine(source: Any) -> Any:
    try:
        return await source
    except StopAsyncIteration:
        raise
    except StopIteration as e:
        raise RuntimeError("pipeline raised StopIteration") from e


async def _wait(task: asyncio.Task[Any], timeout: float | None) -> None:
    await asyncio.wait({task}, timeout=timeout)


def _complaint(error: Any, model: type[BaseModel]) -> str:
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"{where[:63]}: there is no such argument; there are {', '.join(model.model_fields)}"
    return f"{where}: {error['msg'].removeprefix('Value error, ')}"


def _form(function: Callable[..., Any]) -> Form:
    if inspect.isgeneratorfunction(function):
        return Form.GENERATOR
    if inspect.isasyncgenfunction(function):
        return Form.ASYNC_GENERATOR
    return Form.COROUTINE if inspect.iscoroutinefunction(function) else Form.PLAIN


def _wants_context(task: str, function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    keyword = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if not positional or len(required) > 2 or keyword:
        raise TypeError(f"pipeline {task!r} should be callable as f(args) or f(args, context)")
    return len(positional) >= 2
