"""Pipelines: how they are registered, found by their task's name, and stepped.

A pipeline is a generator, a plain function, a coroutine function or an async generator that takes `args` and,
where it asks for a second parameter, a Context. Users keep theirs in modules of their own (DL_PIPELINES); the
built-in ones are a file each in this package. May import `job`.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import os
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from logging import Logger
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from pydantic import BaseModel, ValidationError

BUILT_IN = ("noop", "csv_file", "cbr")

# How often (seconds) a coroutine that is awaiting something is looked at for a cancellation.
_ASYNC_STEP = 0.1

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound=BaseModel)
Progress = dict[str, Any]
Steps = Generator[Any, None, Any]


class PermanentError(Exception):
    """Raise it in a pipeline when trying again cannot help: the job ends `failed` at once."""


class UnknownTask(Exception):
    """No pipeline of this name is registered here; a newer farm may know it, so the job is tried again."""


class Stopped(BaseException):
    """The run has to end now: cancelled, drained, fenced off or over its time. Let it pass; `finally` blocks run.

    Not an Exception, so that a pipeline's `except Exception` does not swallow it.
    """


@dataclass(frozen=True, slots=True)
class Context:
    """What a pipeline may know of its job and ask of the farm."""

    job_id: UUID
    attempt: int
    lock_key: str
    partition_key: str
    idempotency_key: str | None
    logger: Logger
    data_dir: Path
    claim: int  # grows with each start of the job, also over those that do not count as attempts
    _stop_asked: Callable[[], bool]
    _report: Callable[[Progress], None]
    _transaction: Callable[[str | None], AbstractContextManager[psycopg.Connection[Any]]]

    @property
    def stopping(self) -> bool:
        """True once the run should end: cancelled, over its time, the worker drains, or the claim is lost."""
        return self._stop_asked()

    def check(self) -> None:
        """A safe point for code that does not yield: raises Stopped when the run should end."""
        if self._stop_asked():
            raise Stopped

    def progress(self, document: Progress) -> None:
        """Report progress, as a `yield` does, and check; written at most once a second."""
        self._report(document)
        self.check()

    def transaction(self, dsn: str | None = None) -> AbstractContextManager[psycopg.Connection[Any]]:
        """One transaction in the target database (DL_TARGET_DSN, or `dsn`), on a connection of its own.

        Commits when the block ends; an exception, a cancellation and a lost claim roll it back. So does a newer run
        of the same job, should this one be a zombie: each run's claim is noted in a table `dl_fence` there. The
        search_path is PG_SCHEMA.
        """
        return self._transaction(dsn)


class Form(Enum):
    """How a pipeline's function is written."""

    PLAIN = auto()
    GENERATOR = auto()
    COROUTINE = auto()
    ASYNC_GENERATOR = auto()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A registered function and what is known of its form."""

    task: str
    function: Callable[..., Any]
    wants_context: bool
    timeout_sec: float | None = None
    max_memory_mb: float | None = None
    form: Form = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "form", _form(self.function))  # looked at once: that costs more than a short run

    @property
    def has_safe_points(self) -> bool:
        """False for a plain function, which runs in one go."""
        return self.form is not Form.PLAIN


_registry: dict[str, Pipeline] = {}


def register(task: str, *, timeout_sec: float | None = None, max_memory_mb: float | None = None) -> Callable[[F], F]:
    """Make the decorated function the pipeline for jobs whose `task` is this name.

    A run that takes longer than `timeout_sec` (a job may name its own) has to stop: it is told at its next yield, a
    plain function by Stopped raised into it; a process that goes on for DL_KILL_GRACE_SEC more is killed. One that
    uses more memory than `max_memory_mb`, with its children, is killed at once.

    Raises ValueError when another function has the name or a limit is not above 0, TypeError when the function cannot
    be called as f(args) or f(args, context).
    """
    for name, limit in (("timeout_sec", timeout_sec), ("max_memory_mb", max_memory_mb)):
        if limit is not None and not limit > 0:
            raise ValueError(f"pipeline {task!r}: {name} should be above 0, or None")

    def decorate(function: F) -> F:
        known = _registry.get(task)
        if known and _identity(known.function) != _identity(function):
            raise ValueError(f"task {task!r} is registered twice: {_identity(known.function)}, {_identity(function)}")
        _registry[task] = Pipeline(task, function, _wants_context(task, function), timeout_sec, max_memory_mb)
        return function

    return decorate


def resolve(task: str) -> Pipeline:
    """The pipeline of this name; raises UnknownTask, naming what is known here and may be meant."""
    try:
        return _registry[task]
    except KeyError:
        close = difflib.get_close_matches(task, tasks(), 1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise UnknownTask(f"no pipeline {task!r} is registered here{meant}; known: {', '.join(tasks())}") from None


def tasks() -> list[str]:
    """The names of all registered pipelines, sorted."""
    return sorted(_registry)


def load(modules: Iterable[str]) -> None:
    """Import the built-in pipelines and the users' modules; whatever their import raises comes through."""
    for name in BUILT_IN:
        importlib.import_module(f"{__name__}.{name}")
    for name in modules:
        import_users(name)


def import_users(name: str) -> None:
    """Import a module of the users, which may lie in the current folder; whatever the import raises comes through.

    That folder is looked at last, so that no file in it (`queue.py`, `psycopg.py`) is taken for a library's.
    """
    with suppress(OSError):  # it may have been removed
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)
    importlib.import_module(name)


def validated(model: type[M], args: dict[str, Any]) -> M:
    """`args` as a pydantic model; raises PermanentError that names each wrong argument and what would be right."""
    try:
        return model.model_validate(args)
    except ValidationError as e:
        errors = e.errors(include_input=False, include_context=False, include_url=False)
        raise PermanentError("; ".join(_complaint(error, model) for error in errors)) from None


def steps(pipeline: Pipeline, args: dict[str, Any], context: Context | None) -> Steps:
    """Run the pipeline as a generator whose every yield is a safe point and carries progress or None.

    `context` may be None for one that does not want it. The generator returns what the pipeline does; closing it
    closes or cancels what runs inside.
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
            runner.run(_settle(task, _ASYNC_STEP))
            if not task.done():
                yield None
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            runner.run(_settle(task, None))


async def _as_coroutine(source: Any) -> Any:
    try:
        return await source
    except StopAsyncIteration:
        raise
    except StopIteration as e:
        raise RuntimeError("pipeline raised StopIteration") from e


async def _settle(task: asyncio.Task[Any], timeout: float | None) -> None:
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


def _identity(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
