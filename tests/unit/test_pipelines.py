"""pipelines: the registry, and the steps of each form of function."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from dataloader import pipelines
from dataloader.pipelines import Context, Pipeline, Stopped, UnknownTask, register, registry, resolve, steps
from dataloader.queue import fields


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", {})


def pipeline_of(function: Callable[..., Any]) -> Pipeline:
    registry._registry.pop("t", None)
    register("t")(function)
    return resolve("t")


def context(stop: Callable[[], bool] = lambda: False, report: Callable[[Any], None] = lambda _: None) -> Context:
    def nowhere(_dsn: str | None) -> Any:
        raise AssertionError("no database here")

    execution: Any = SimpleNamespace(must_stop=stop, report=report, transaction=nowhere, decide=print)
    return Context(uuid4(), 1, "k", "", None, logging.getLogger("t"), Path("/"), 1, execution)


def run(function: Callable[..., Any], args: dict[str, Any] | None = None) -> tuple[list[Any], Any]:
    """All steps that are not None, and the return value."""
    register("t")(function)
    running, seen = steps(resolve("t"), args or {}, context()), []
    while True:
        try:
            if (item := next(running)) is not None:
                seen.append(item)
        except StopIteration as end:
            return seen, end.value


def generator(args: dict[str, Any]) -> Iterator[Any]:
    yield {"n": 1}
    yield {"n": 2}
    return {"n": 3}


async def async_generator(args: dict[str, Any], context: Context) -> Any:
    for n in (1, 2):
        await asyncio.sleep(0)
        yield {"n": n}


async def coroutine(args: dict[str, Any]) -> Any:
    await asyncio.sleep(0)
    return {"n": 3}


def plain(args: dict[str, Any], context: Context) -> Any:
    return {"n": context.attempt}


def gives_a_generator(args: dict[str, Any]) -> Any:
    return generator(args)


@pytest.mark.parametrize(
    ("function", "seen", "result"),
    [
        (generator, [{"n": 1}, {"n": 2}], {"n": 3}),
        (gives_a_generator, [{"n": 1}, {"n": 2}], {"n": 3}),
        (async_generator, [{"n": 1}, {"n": 2}], None),
        (coroutine, [], {"n": 3}),
        (plain, [], {"n": 1}),
    ],
)
def test_every_kind_of_function_is_stepped(function: Callable[..., Any], seen: list[Any], result: Any) -> None:
    assert run(function) == (seen, result)


def test_a_waiting_coroutine_offers_safe_points_and_is_cancelled_when_closed() -> None:
    cleaned = []

    async def waits(args: dict[str, Any]) -> None:
        try:
            await asyncio.sleep(600)
        finally:
            cleaned.append(True)

    running = steps(pipeline_of(waits), {}, context())
    assert next(running) is None
    running.close()
    assert cleaned == [True]


@pytest.mark.parametrize("kind", ["generator", "async generator"])
def test_closing_runs_the_pipelines_finally(kind: str) -> None:
    cleaned = []

    def sync(args: dict[str, Any]) -> Iterator[Any]:
        try:
            while True:
                yield {}
        finally:
            cleaned.append(kind)

    async def asynchronous(args: dict[str, Any]) -> Any:
        try:
            while True:
                yield {}
        finally:
            cleaned.append(kind)

    running = steps(pipeline_of(sync if kind == "generator" else asynchronous), {}, context())
    while next(running) is None:
        pass
    running.close()
    assert cleaned == [kind]


@pytest.mark.parametrize("function", [generator, async_generator, coroutine, plain])
def test_errors_come_through(function: Callable[..., Any]) -> None:
    with pytest.raises(ZeroDivisionError):
        run(_failing_like(function))


def _failing_like(function: Callable[..., Any]) -> Callable[..., Any]:
    if function is generator:

        def fails(args: dict[str, Any]) -> Iterator[Any]:
            yield 1 / 0

        return fails
    if function is async_generator:

        async def fails_async(args: dict[str, Any]) -> Any:
            yield 1 / 0

        return fails_async
    if function is coroutine:

        async def fails_await(args: dict[str, Any]) -> Any:
            return 1 / 0

        return fails_await
    return lambda args: 1 / 0


def test_a_check_raises_only_when_the_run_should_end() -> None:
    context().check()
    context().progress({"n": 1})
    with pytest.raises(Stopped):
        context(stop=lambda: True).check()
    assert context(stop=lambda: True).stopping


def test_stopped_is_not_swallowed_by_except_exception() -> None:
    assert not issubclass(Stopped, Exception)


def test_an_unknown_task_names_the_known_ones() -> None:
    register("a")(plain)
    with pytest.raises(UnknownTask, match="no pipeline 'b' is registered here; known: a"):
        resolve("b")


def test_an_unknown_task_names_the_one_that_may_be_meant() -> None:
    register("load.customers")(plain)
    with pytest.raises(UnknownTask, match=r"no pipeline .* here \(did you mean 'load.customers'\?\); k"):
        resolve("laod.customers")


def test_a_name_belongs_to_one_function() -> None:
    register("a")(plain)
    register("a")(plain)
    with pytest.raises(ValueError, match="'a' is registered twice"):
        register("a")(generator)


@pytest.mark.parametrize("function", [lambda: None, lambda a, b, c: None, lambda a, *, b: None])
def test_what_cannot_be_called_as_a_pipeline_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"f\(args\) or f\(args, context\)"):
        register("a")(function)


@pytest.mark.parametrize(
    ("affinity", "kept"),
    [(None, None), ("model", ("model",)), (["model"], ("model",)), (("model", "Раздел 2"), ("model", "Раздел 2"))],
)
def test_what_a_pipeline_says_of_its_jobs(affinity: Any, kept: Any) -> None:
    register("ask", max_attempts=3, affinity=affinity, cpus=2)(plain)
    register("silent")(plain)
    assert resolve("ask").affinity == kept
    silent = dict.fromkeys(("max_attempts", "affinity", "limits", "memory_mb", "cpus", "args_schema"))
    assert pipelines.declarations() == {
        "ask": silent | {"max_attempts": 3, "affinity": kept, "cpus": 2},
        "silent": silent,
    }


def test_the_limits_of_a_pipeline() -> None:
    register("load", limits=["source:oracle", "раздел 2"])(plain)
    register("free", limits=[])(plain)
    assert [pipelines.declarations()[task]["limits"] for task in ("load", "free")] == [
        ("source:oracle", "раздел 2"),
        (),
    ]
    assert (registry.LIMITS_MOST, registry.LIMIT_NAME) == (fields.LIMITS_MOST, fields.LIMIT_NAME)


@pytest.mark.parametrize(
    "bad", ["oracle", 7, {"m"}, [""], ["m", 7], ["m", "m"], ["a\0"], ["m" * 101], list("abcdefghi")]
)
def test_wrong_limits_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="'load': limits should be up to 8 different names of 1 to 100 characters"):
        register("load", limits=bad)(plain)
    assert pipelines.tasks() == []


@pytest.mark.parametrize("bad", ["", 7, b"m", {"m"}, [], ["m", ""], ["m", 7], "a\0", "\ud800", "api_key"])
def test_a_wrong_affinity_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="'ask': affinity should be the name of an argument that is no secret, "):
        register("ask", affinity=bad)(plain)
    assert pipelines.tasks() == []


def test_the_built_in_pipelines_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pipelines.load([])
    assert {"noop", "load.csv", "load.cbr.rates"} <= set(pipelines.tasks())


def test_a_stop_iteration_of_a_plain_function_is_called_the_pipelines() -> None:
    def empty(args: dict[str, Any]) -> Any:
        return next(iter(()))

    with pytest.raises(RuntimeError, match=r"^pipeline raised StopIteration$"):
        next(pipelines.steps(pipeline_of(empty), {}, None))
