"""Hooks in the kit: what they are given, in which order they are called, and what they may change."""

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import sentry_sdk
import structlog
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from dataloader import pipelines
from dataloader.pipelines import (
    Context,
    PermanentError,
    Retry,
    Run,
    around_enqueue,
    around_run,
    hooks,
    last_words,
    on_error,
    on_farm_start,
    on_worker_start,
    register,
    sentry,
)
from dataloader.testing import run

pytestmark = pytest.mark.usefixtures("own_registry")

SECRET = "s3cret-canary-77"


@pytest.fixture
def seen() -> list[Any]:
    return []


def generator(args: dict[str, Any]) -> Iterator[Any]:
    yield {"n": 1}
    if args.get("wrong"):
        raise RuntimeError("wrong")
    return {"n": 2}


async def coroutine(args: dict[str, Any]) -> Any:
    await asyncio.sleep(0)
    if args.get("wrong"):
        raise RuntimeError("wrong")
    return {"n": 2}


def plain(args: dict[str, Any], context: Context) -> Any:
    context.check()
    if args.get("wrong"):
        raise RuntimeError("wrong")
    return {"n": 2}


@pytest.mark.parametrize(
    ("decorator", "function", "should_be"),
    [
        (around_run, lambda one: None, "a generator function, called as f(run), with one yield"),
        (around_run, lambda: None, "a function that can be called as f(run)"),
        (on_error, lambda one: None, "a function that can be called as f(run, exc)"),
        (on_farm_start, lambda one: None, "a function that can be called as f()"),
        (on_worker_start, lambda one, two: None, "a function that can be called as f()"),
        (last_words, lambda: None, "a function that can be called as f(exc)"),
        (last_words, coroutine, "a plain function, without async"),
        (last_words, generator, "a function without yield"),
        (around_enqueue, lambda one, two: None, "a function that can be called as f(job)"),
        (around_enqueue, generator, "a function without yield"),
        (around_enqueue, "text", "a function that can be called as f(job)"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_its_decorator(
    decorator: Callable[[Any], Any], function: Any, should_be: str
) -> None:
    with pytest.raises(TypeError, match=rf"@{decorator.__name__}: [\w.<>]+ should be ") as e:
        decorator(function)
    assert str(e.value).endswith(should_be)
    assert not any(map(len, hooks.ALL))


def test_a_module_that_is_imported_anew_registers_its_functions_once() -> None:
    code = "from dataloader.pipelines import on_error\n@on_error\ndef f(run, exc): ...\n@on_error\ndef g(run, exc): ..."
    for _ in range(2):
        exec(compile(code, "mine.py", "exec"), {"__name__": "mine"})
    assert [function.__name__ for function in hooks.ON_ERROR] == ["f", "g"]


@pytest.mark.parametrize("function", [generator, coroutine, plain])
def test_around_run_wraps_all_steps_the_first_one_outermost(function: Callable[..., Any], seen: list[Any]) -> None:
    register("t")(function)

    @around_run
    def outer(run: Run) -> Iterator[None]:
        seen.append(("outer", run))
        yield
        seen.append("outer ends")

    @around_run
    def inner(run: Run) -> Iterator[None]:
        seen.append("inner")
        try:
            yield
        finally:
            seen.append("inner ends")

    result = run("t", {"a": 1}, lock_key="k", queue="q")
    assert (result.status, result.value) == ("succeeded", {"n": 2})
    (_, given), *rest = seen
    assert rest == ["inner", "inner ends", "outer ends"]
    assert (given.queue, given.task, given.lock_key, given.attempt) == ("q", "t", "k", 1)
    assert (given.job_id, given.job_ids, given.args) == (result.job_id, (result.job_id,), {"a": 1})
    assert "args" not in repr(given)


@pytest.mark.parametrize("function", [generator, coroutine, plain])
def test_around_run_may_replace_or_swallow_an_exception(function: Callable[..., Any], seen: list[Any]) -> None:
    register("t")(function)

    @around_run
    def kinder(run: Run) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:
            seen.append(str(e))
            if run.args["wrong"] == "replace":
                raise PermanentError("replaced") from e

    on_error(lambda run, exc: seen.append(exc))
    assert run("t", {"wrong": "swallow"}).status == "succeeded"
    assert seen == ["wrong"]
    result = run("t", {"wrong": "replace"})
    assert (result.status, result.error, result.attempts) == ("failed", "replaced", 1)
    assert [type(each) for each in seen[1:]] == [str, PermanentError]


@pytest.mark.parametrize("function", [generator, plain])
@pytest.mark.parametrize("at", ["cancel_at", "drain_at"])
def test_no_around_run_swallows_the_order_to_stop(function: Callable[..., Any], at: str, seen: list[Any]) -> None:
    register("t")(function)

    @around_run
    def deaf(run: Run) -> Iterator[None]:
        try:
            yield
        except BaseException as e:
            seen.append(type(e).__name__)
        finally:
            seen.append("finally")

    on_error(lambda run, exc: seen.append(exc))
    result = run("t", **{at: 1})  # type: ignore[arg-type]
    assert result.runs[0].end == {"cancel_at": "canceled", "drain_at": "handed back"}[at]
    assert seen[:2] == ["GeneratorExit" if function is generator else "Stopped", "finally"]
    assert seen[2:] == (["finally"] if at == "drain_at" else [])


@pytest.mark.parametrize("yields", [0, 2])
def test_an_around_run_with_another_number_of_yields_fails_the_run(yields: int) -> None:
    register("t")(plain)

    @around_run
    def wrong(run: Run) -> Iterator[None]:
        for _ in range(yields):
            yield

    result = run("t", max_attempts=1)
    assert result.status == "failed"
    assert "generator didn't" in str(result.error)


@pytest.mark.parametrize("function", [generator, coroutine, plain])
def test_a_run_whose_pipeline_no_around_run_let_begin_has_failed(function: Callable[..., Any], seen: list[Any]) -> None:
    register("t")(function)

    @around_run
    def kind(run: Run) -> Iterator[None]:
        with suppress(Exception):
            yield

    @around_run
    def connects(run: Run) -> Iterator[None]:
        raise OSError("no connection")
        yield

    on_error(lambda run, exc: seen.append(exc))
    result = run("t", max_attempts=1)
    assert result.status == "failed"
    message = "RuntimeError: the pipeline has not begun: @around_run test_hooks."
    assert str(result.error).startswith(message)
    assert ".kind has swallowed the OSError of another" in str(result.error).splitlines()[0]
    assert [type(exc.__cause__) for exc in seen] == [OSError]


@pytest.mark.parametrize("where", ["before", "pipeline", "after"])
@pytest.mark.parametrize("answer", [None, PermanentError("mine")])
@pytest.mark.parametrize("error", [MemoryError("out of memory"), SystemExit("3")])
def test_no_around_run_keeps_a_worker_that_has_to_end(
    error: BaseException, answer: Exception | None, where: str, seen: list[Any]
) -> None:
    @register("t")
    def greedy(args: dict[str, Any]) -> None:
        if where == "pipeline":
            raise error

    @around_run
    def outermost(run: Run) -> Iterator[None]:
        with suppress(Exception):
            yield

    @around_run
    def swallows(run: Run) -> Iterator[None]:
        try:
            yield
        except BaseException as e:
            seen.append(e)
            if answer:
                raise answer from e

    @around_run
    def inner(run: Run) -> Iterator[None]:
        if where == "before":
            raise error
        yield
        if where == "after":
            raise error

    steps = pipelines.steps(pipelines.resolve("t"), {}, None)
    with pytest.raises(type(error)) as e:
        list(hooks.wrapped(Run("q", "t", "k", UUID(int=1), 1, {}, ()), steps))
    assert e.value is error
    assert seen == [error]


def test_on_error_is_called_once_for_each_failed_run_also_for_a_timeout(seen: list[Any]) -> None:
    @register("t", timeout_sec=0.01)
    def fails(args: dict[str, Any], context: Context) -> Iterator[None]:
        while context.attempt == 1:
            yield
        if context.attempt == 2:
            raise OSError("1")
        if context.attempt == 3:
            raise Retry(5, why="the file is not there yet")

    on_error(lambda run, exc: seen.append((run.attempt, run.args, type(exc), str(exc))))
    result = run("t", {"a": 1})
    assert result.status == "succeeded"
    why = ["timeout: the run took more than 0.01 s", "1", "the file is not there yet"]
    assert result.runs[0].end == "timeout"
    assert [result.runs[0].error, result.runs[2].error] == [why[0], why[2]]
    kinds = (TimeoutError, OSError, Retry)
    assert seen == [(n, {"a": 1}, kind, text) for n, kind, text in zip((1, 2, 3), kinds, why, strict=True)]


def test_an_on_error_that_fails_changes_nothing(seen: list[Any]) -> None:
    register("t")(plain)

    @on_error
    def wrong(run: Run, exc: BaseException) -> None:
        raise KeyError("oh")

    @on_error
    def leaves(run: Run, exc: BaseException) -> None:
        raise SystemExit(3)

    on_error(lambda run, exc: seen.append(exc))
    with structlog.testing.capture_logs() as lines:
        result = run("t", {"wrong": True}, max_attempts=1)
    assert (result.status, [type(exc) for exc in seen]) == ("failed", [RuntimeError])
    assert "hook.failed" in {line["event"] for line in lines}


def test_on_error_of_a_batch(seen: list[Any]) -> None:
    @register("t", batch_size=3)
    def sync(keys: dict[str, list[Any]], context: Context) -> None:
        context.fail("a", ValueError("first"))
        context.fail("a", PermanentError("last"))
        context.fail("b", "a text is no exception")
        if keys["c"] == [{"n": 3}]:
            raise OSError("all")

    on_error(lambda run, exc: seen.append((run.lock_key, run.args, len(run.job_ids), type(exc))))
    args = {"a": [{"n": 1}, {"n": 1}], "b": [{"n": 2}], "c": [{"n": 3}]}
    run("t", args, max_attempts=1)  # type: ignore[arg-type]
    unique = {"a": [{"n": 1}], "b": [{"n": 2}], "c": [{"n": 3}]}
    assert seen[:2] == [("a", unique, 4, OSError), ("a", {"a": [{"n": 1}]}, 2, PermanentError)]


@pytest.mark.parametrize("start", [on_farm_start, on_worker_start])
def test_each_run_of_the_kit_is_a_farm_whose_failed_start_reaches_the_test_after_the_last_words(
    start: Callable[[Any], Any], seen: list[Any]
) -> None:
    register("t")(generator)
    on_worker_start(lambda: seen.append("worker"))
    on_farm_start(lambda: seen.append("farm"))
    run("t", {"wrong": True}, max_attempts=3)
    assert seen == ["farm", "worker"]

    @start
    def wrong() -> None:
        raise LookupError("no model")

    @last_words
    def rude(exc: BaseException) -> None:
        raise KeyError("oh")

    last_words(seen.append)
    with structlog.testing.capture_logs() as lines, pytest.raises(LookupError, match="no model"):
        run("t")
    assert str(seen[-1]) == "no model"
    assert "hook.failed" in {line["event"] for line in lines}


def test_around_enqueue_may_derive_fields_from_args(seen: list[Any]) -> None:
    @register("t")
    def keyed(args: dict[str, Any], context: Context) -> dict[str, Any]:
        return {"lock_key": context.lock_key, "key": context.idempotency_key, "args": args}

    @around_enqueue
    def by_order(job: dict[str, Any]) -> dict[str, Any]:
        seen.append(dict(job))
        job["args"]["seen"] = True
        return job | {"lock_key": f"order-{job['args']['order']}", "score": 7}

    @around_enqueue
    def second(job: dict[str, Any]) -> dict[str, Any]:
        return job | {"idempotency_key": job["lock_key"]}

    args = {"order": 7}
    result = run("t", args, queue="orders")
    assert result.value == {"lock_key": "order-7", "key": "order-7", "args": {"order": 7, "seen": True}}
    assert list(result.jobs) == ["order-7"]
    assert seen == [{"queue": "orders", "task": "t", "args": {"order": 7, "seen": True}}]
    assert args == {"order": 7}, "the producer's own"


def test_the_examples_of_the_document_work(seen: list[Any]) -> None:
    from unittest.mock import MagicMock

    page = (Path(__file__).parents[2] / "docs/hooks.md").read_text()
    names = {name: getattr(pipelines, name) for name in ("on_error", "on_farm_start", "on_worker_start", "last_words")}
    world: dict[str, Any] = {"__name__": "document", **{name: MagicMock() for name in ("metrics", "chat", "models")}}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, world | names if "import" not in block else world)
    assert [len(hook) for hook in hooks.ALL] == [1] * 6

    @register("sync")
    def fails(args: dict[str, Any], context: Context) -> None:
        seen.append(context.lock_key)
        raise OSError

    run("sync", {"order": 7, "version": 1.5}, queue="orders", max_attempts=1)
    assert seen == ["order-7"]
    assert world["metrics"].timing.called
    assert world["chat"].post.call_args[0][0].endswith(": OSError at attempt 1")
    assert world["models"].download.called


class Collected(Transport):
    sent: list[Envelope] = []  # noqa: RUF012  the SDK makes the object

    def capture_envelope(self, envelope: Envelope) -> None:
        self.sent.append(envelope)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Envelope]]:
    monkeypatch.setattr(sentry, "TRANSPORT", Collected)
    monkeypatch.setattr(Collected, "sent", [])
    monkeypatch.setattr(sentry, "_flushed_at", None)
    monkeypatch.setenv("SENTRY_DSN", "https://key@sentry.example.com/1")
    on_worker_start(sentry.start)
    on_error(sentry.report)
    last_words(sentry.report_death)
    yield Collected.sent
    sentry_sdk.get_client().close()
    sentry_sdk.get_global_scope().set_client(None)


def test_sentry_gets_a_failed_run_without_its_secrets(sent: list[Envelope]) -> None:
    @register("load.orders")
    def fails(args: dict[str, Any]) -> None:
        local = args["password"]
        raise RuntimeError(f"the server refused {local} and token={'x' * 12} {args['city']}")

    @register("retries")
    def retries(args: dict[str, Any]) -> None:
        raise Retry(1)

    run("retries", max_attempts=1)
    assert sent == [], "a request for another run is no failure"
    note = "-".join(("args", "canary"))  # an event shows lines of the source
    result = run("load.orders", {"password": SECRET, "city": note[:4], "note": note}, queue="q", max_attempts=2)
    events: list[Any] = [envelope.get_event() for envelope in sent]
    tags = {"task": "load.orders", "queue": "q", "job_id": str(result.job_id)}
    assert [event["tags"] for event in events] == [tags | {"attempt": number} for number in (1, 2)]
    (value,) = events[0]["exception"]["values"]
    assert (value["type"], value["value"]) == ("RuntimeError", "the server refused *** and token=*** args")
    assert value["stacktrace"]["frames"][-1]["function"] == "fails"
    whole = b"".join(envelope.serialize() for envelope in sent)
    assert not [text for text in (SECRET, note, '"vars"') if text.encode() in whole]


def test_the_failed_keys_of_a_run_wait_once_for_a_sentry_that_is_away(
    sent: list[Envelope], seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000.0]

    def flush(sec: float) -> None:
        seen.append(len(sent))
        now[0] += sec

    monkeypatch.setattr(sentry_sdk, "flush", flush)
    monkeypatch.setattr(sentry, "monotonic", lambda: now[0])

    @register("t", batch_size=3)
    def fails(keys: dict[str, list[Any]], context: Context) -> None:
        for key in keys:
            context.fail(key, ValueError(key))

    args = {f"k{n}": [{"n": n}] for n in range(3)}
    run("t", args, max_attempts=1)  # type: ignore[arg-type]
    assert (len(sent), seen) == (3, [1])
    now[0] += sentry.FLUSH_SEC
    run("t", args, max_attempts=1)  # type: ignore[arg-type]
    sentry.report_death(LookupError("no model"))
    assert (len(sent), seen) == (7, [1, 4, 7]), "the last words are flushed in every case"


def test_a_wrong_sentry_dsn_is_named_and_not_shown(sent: list[Envelope], monkeypatch: pytest.MonkeyPatch) -> None:
    register("t")(generator)
    monkeypatch.setenv("SENTRY_DSN", f"{SECRET}://x")
    with pytest.raises(ValueError, match="SENTRY_DSN should be a DSN such as") as e:
        run("t")
    assert SECRET not in str(e.value)


def test_without_the_extra_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import sys

    monkeypatch.setitem(sys.modules, "sentry_sdk", None)
    monkeypatch.delitem(sys.modules, "dataloader.pipelines.sentry")
    with pytest.raises(ImportError, match=r"install 'dataloader-farm\[sentry\]'"):
        importlib.import_module("dataloader.pipelines.sentry")
