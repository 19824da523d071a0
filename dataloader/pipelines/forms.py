"""The forms of a pipeline's function, and its run in steps.

A child that a run forks never comes back to the worker's code, and does not have the run's claim.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from dataloader.pipelines.context import Context
    from dataloader.pipelines.registry import Pipeline

_STEP = 0.1  # seconds between two safe points of what waits

T = TypeVar("T")
Steps = Generator[Any, None, Any]


class Form(Enum):
    """The kind of a pipeline's function."""

    PLAIN = auto()
    GENERATOR = auto()
    COROUTINE = auto()
    ASYNC_GENERATOR = auto()


def rest(seconds: float) -> Generator[None, None, None]:
    """Sleep for so long, with safe points."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(_STEP, left))
        yield None


def form_of(function: Callable[..., Any]) -> Form:
    """The form of a pipeline's function."""
    if inspect.isgeneratorfunction(function):
        return Form.GENERATOR
    if inspect.isasyncgenfunction(function):
        return Form.ASYNC_GENERATOR
    return Form.COROUTINE if inspect.iscoroutinefunction(function) else Form.PLAIN


def steps(pipeline: Pipeline, args: Any, context: Context | None) -> Steps:
    """Run the pipeline as a generator; each of its yields is a safe point, with the progress or None.

    `context` may be None for a pipeline without a second parameter. The generator returns the pipeline's result;
    closing the generator closes or cancels the pipeline.
    """
    given = (args, context) if pipeline.wants_context else (args,)
    if pipeline.form is Form.ASYNC_GENERATOR:
        return (yield from _async_generator(pipeline.function(*given)))
    if pipeline.form is Form.COROUTINE:
        with asyncio.Runner() as runner:
            return (yield from _awaited(runner, pipeline.function(*given)))
    with own_process():  # within the hooks around a run, which are none of a child's business
        try:
            result = pipeline.function(*given)
        except StopIteration as e:  # Python would call it one of this generator
            raise RuntimeError("pipeline raised StopIteration") from e
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


def _awaited(runner: asyncio.Runner, source: Any) -> Steps:
    """Await `source` in slices, with a safe point after each; cancel it when this generator is closed."""
    loop = runner.get_loop()
    task = loop.create_task(_as_coroutine(source))
    try:
        while not task.done():
            runner.run(asyncio.wait({task}, timeout=_STEP))
            if not task.done():
                yield None
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            runner.run(asyncio.wait({task}))
        if task.done() and not task.cancelled():
            task.exception()  # of sys.exit, which has left the loop: asyncio would log that nobody asked for it


async def _as_coroutine(source: Any) -> Any:
    try:
        with own_process():  # the loop is the parent's
            return await source
    except StopAsyncIteration:
        raise
    except StopIteration as e:
        raise RuntimeError("pipeline raised StopIteration") from e


# --- the children ---


class own_process:
    """A block around a user's code, which only the process leaves that has entered it.

    A child that the code forks ends where it would leave the block, as a script ends: its output is written, with the
    traceback of an exception, and its exit status is that of `sys.exit`. All other code belongs to the parent and
    does not run: no `finally` of a caller, no exit handler.
    """

    # No generator: a worker enters such a block for each step of a run.
    __slots__ = ("_pid",)

    def __enter__(self) -> None:
        self._pid = os.getpid()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if os.getpid() == self._pid:
            return
        status = 1  # from here on as Python ends a process with this error
        try:
            code = error.code if isinstance(error, SystemExit) else 1
            if error is None or isinstance(error, StopIteration | StopAsyncIteration | GeneratorExit):
                status = 0
            elif not isinstance(error, SystemExit):
                traceback.print_exception(error)
            elif code is None or isinstance(code, int):
                status = (code or 0) & 0xFF
            else:
                print(code, file=sys.stderr)  # noqa: T201  as Python does
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):  # the run may have closed it, or put something else there
                    stream.flush()
        finally:
            os._exit(status)


class _OfThisProcess:
    __slots__ = ("_pid", "_thing")

    def __init__(self, thing: object) -> None:
        self._thing, self._pid = thing, os.getpid()

    def __getattr__(self, name: str) -> Any:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "the context belongs to the process of the run, and this process was forked from it: let it return its"
                " result to the run, and connect to a database by itself"
            )
        return getattr(self._thing, name)


def bound_to_process(thing: T) -> T:
    """A proxy of an object; its use in a child raises RuntimeError, because a child has neither claim nor session."""
    return cast(T, _OfThisProcess(thing))
