"""The forms of a pipeline's function, and its run in steps."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from dataloader.pipelines.children import own_process

if TYPE_CHECKING:
    from dataloader.pipelines.context import Context
    from dataloader.pipelines.registry import Pipeline

_ASYNC_STEP = 0.1  # seconds between two safe points of a coroutine that awaits

Steps = Generator[Any, None, Any]


class Form(Enum):
    """The kind of a pipeline's function."""

    PLAIN = auto()
    GENERATOR = auto()
    COROUTINE = auto()
    ASYNC_GENERATOR = auto()


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
        with own_process():  # the loop is the parent's
            return await source
    except StopAsyncIteration:
        raise
    except StopIteration as e:
        raise RuntimeError("pipeline raised StopIteration") from e


async def _wait(task: asyncio.Task[Any], timeout: float | None) -> None:
    await asyncio.wait({task}, timeout=timeout)
