"""The outcome of a run: its latest progress in every form of pipeline, its result, or an error that names the fault."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from claimed import delivery as jobs
from structlog.testing import capture_logs

from dataloader import pipelines
from dataloader.config import Settings
from dataloader.farm.heartbeat import Lease
from dataloader.farm.process import now
from dataloader.farm.runner import Runner, returned
from dataloader.farm.slots import SharedSlots
from dataloader.pipelines import Context, Progress, Retry, Stopped, on_error, register
from dataloader.pipelines.context import Suspended
from dataloader.queue.job import Delivery, End, Outcome, decide
from dataloader.testing import run

pytestmark = pytest.mark.usefixtures("own_registry")

EARLY, LAST, FINAL = {"n": 1, "of": 3}, {"n": 2, "of": 3}, {"n": 3, "of": 3}
ENDS = {
    "return": End.DONE,
    "error": End.ERROR,
    "exit": End.ERROR,
    "retry": End.ERROR,
    "suspended": End.HANDED_BACK,
    "interrupted": End.TIMEOUT,
    "canceled": End.CANCELED,
    "timeout": End.TIMEOUT,
    "drain": End.HANDED_BACK,
}
RAISED = {"error": ValueError, "exit": SystemExit, "suspended": Suspended, "interrupted": Stopped}


def ran(function: Callable[..., Any], delivery: Delivery | None = None, **options: Any) -> Outcome:
    """The outcome of a run of this function, which may end its own lease by `function.lease`."""
    register("t", **options)(function)
    delivery = delivery or jobs()
    slot = SharedSlots(1).slots[0]
    slot.claim([job.job_id for job in delivery.jobs], [1] * len(delivery.jobs))
    slot.begin(0, len(delivery.jobs), 60, now())
    lease = Lease(delivery, slot)
    function.lease = lease  # type: ignore[attr-defined]
    outcome = Runner(Settings.model_construct(dl_target_dsn=None, pg_schema="public"), "").run(delivery, lease)
    lease.progress = None  # as the heartbeat leaves it that has written an earlier report
    return outcome


def finish(function: Callable[..., Any], end: str, context: Context) -> None:
    """Come to this end, behind the last report."""
    if end in ("canceled", "timeout", "drain", "interrupted"):
        function.lease.end(ENDS[end], end)  # type: ignore[attr-defined]
    if end == "retry":
        raise Retry(1)
    if end in RAISED:
        raise RAISED[end]
    context.check()


def form(name: str, end: str, in_finally: bool) -> Callable[..., Any]:
    """A pipeline of this form that reports by the context, at last in a `finally` where it is asked for."""

    def steps(function: Callable[..., Any], context: Context) -> Iterator[None]:
        context.progress(EARLY)
        try:
            yield
            context.progress(LAST)
            finish(function, end, context)
            yield
        finally:
            if in_finally:
                context.progress(FINAL)

    def plain(args: Any, context: Context) -> None:
        list(steps(plain, context))

    def generator(args: Any, context: Context) -> Iterator[Any]:
        yield from steps(generator, context)

    async def coroutine(args: Any, context: Context) -> None:
        with closing(steps(coroutine, context)) as own:
            for _ in own:
                await asyncio.sleep(0)

    async def async_generator(args: Any, context: Context) -> AsyncIterator[Any]:
        with closing(steps(async_generator, context)) as own:
            for _ in own:
                yield None

    return {f.__name__: f for f in (plain, generator, coroutine, async_generator)}[name]


@pytest.mark.parametrize("in_finally", [False, True], ids=["before", "finally"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", ["plain", "generator", "coroutine", "async_generator"])
def test_the_latest_report_is_written_with_the_end(name: str, end: str, in_finally: bool) -> None:
    outcome = ran(form(name, end, in_finally))
    assert outcome.end is ENDS[end]
    assert json.loads(outcome.progress or "") == (FINAL if in_finally else LAST)


@pytest.mark.parametrize("end", ENDS)
def test_a_report_behind_a_yield_is_the_latest(end: str) -> None:
    def loads(args: Any, context: Context) -> Iterator[Any]:
        yield Progress(1, 3)
        if end in ("canceled", "timeout", "drain"):
            loads.lease.end(ENDS[end], end)  # type: ignore[attr-defined]
        yield Progress(2, 3)
        finish(loads, end, context)

    assert ran(loads).progress == '{"processed": 2, "total": 3}'


def test_a_key_of_a_batch_with_an_end_of_its_own_has_the_last_word_too() -> None:
    def batch(given: Any, context: Context) -> None:
        context.progress(LAST)
        context.fail("k", "bad")
        context.skip("l")
        context.retry("m", timedelta(seconds=5))

    delivery = jobs("klmn")
    finishes = decide(delivery, ran(batch, delivery, batch_size=9))
    assert [end and (end.verb, end.progress, end.delay_sec) for end in finishes] == [
        ("retry", '{"n": 2, "of": 3}', None),
        ("hand_back", '{"n": 2, "of": 3}', 1.0),
        ("retry", '{"n": 2, "of": 3}', 5.0),
        ("succeed", '{"n": 2, "of": 3}', None),
    ]


def test_what_a_pipeline_changes_behind_its_last_report_is_not_reported() -> None:
    def counts(args: Any, context: Context) -> None:
        report = {"n": 1}
        context.progress(report)
        report["n"] = 2

    assert ran(counts).progress == '{"n": 1}'


def test_a_last_word_that_cannot_be_kept_is_logged() -> None:
    with capture_logs() as lines:
        (end,) = decide(jobs(), ran(lambda args, context: context.progress({"text": "x" * 70_000})))
    assert (end.verb, end.progress, [line["event"] for line in lines]) == ("succeed", None, ["progress.dropped"])


def test_a_pipeline_for_one_job_says_what_to_do_where_its_queue_merges() -> None:
    outcome = ran(lambda args: None, jobs("kk"))
    assert (outcome.end, "the pipeline 't' takes one job: register it" in str(outcome.error)) == (End.ERROR, True)


class Rude:
    def __float__(self) -> float:
        raise SystemError


@pytest.mark.parametrize(
    "wait", [float("inf"), float("nan"), -1, 1e12, 10**400, "5", b"5", None, Rude(), [5], timedelta(days=367)]
)
def test_a_wait_is_looked_at_when_it_is_given_and_again_when_the_end_is_decided(wait: Any) -> None:
    with pytest.raises(ValueError, match=r"^in_sec should be from 0 to 31,622,400 seconds or a timedelta, not "):
        Retry(wait)

    def fails(args: Any) -> None:
        error = Retry(5, "busy")
        error.in_sec = wait
        raise error

    outcome = ran(fails)
    (end,) = decide(jobs(), outcome)
    assert (end.verb, end.delay_sec) == ("retry", None)
    assert (end.error or "").startswith("busy\nValueError: in_sec should be from 0 to 31,622,400 seconds")


@pytest.mark.parametrize("wait", [5, 5.0, timedelta(seconds=5)])
def test_a_wait_is_a_plain_number_of_seconds_whatever_it_was_given_as(wait: Any) -> None:
    def fails(args: Any) -> None:
        raise Retry(wait)

    (end,) = decide(jobs(), ran(fails))
    assert (type(end.delay_sec), end.delay_sec, end.error) == (float, 5.0, "asked to be tried again in 5 s")


@pytest.mark.parametrize("wait", [float("inf"), "5", None, timedelta(days=400)])
def test_a_rule_that_gives_no_time_gives_the_usual_one(wait: Any) -> None:
    (end,) = decide(jobs(), ran(lambda args: 1 / 0, retry_in=lambda attempt: wait))
    assert (end.verb, end.delay_sec) == ("retry", None)


def test_a_coroutine_that_exits_leaves_no_exception_to_asyncio(caplog: pytest.LogCaptureFixture) -> None:
    """Asyncio logs an exception of a task that nobody has asked for, whenever Python collects the task."""

    async def exits(args: Any) -> None:
        raise SystemExit(3)

    assert ran(exits).end is End.ERROR
    gc.collect()
    assert "never retrieved" not in caplog.text


SECRET = "s3cret-canary-91"


def outcome(value: Any, keys: str = "k", batch_size: int | None = None, most_kb: int = 1) -> Outcome:
    pipelines.register("t", batch_size=batch_size)(lambda args: None)
    return returned(jobs(keys), pipelines.resolve("t"), value, {"last": "report"}, most_kb)


def results(value: Any, keys: str, batch_size: int | None = 9) -> list[str | None]:
    return [end and end.result for end in decide(jobs(keys), outcome(value, keys, batch_size))]


@pytest.mark.parametrize(
    ("value", "progress", "result"),
    [
        (None, {"last": "report"}, None),
        ([1], {"last": "report"}, "[1]"),
        ("", {"last": "report"}, '""'),
        (0, {"last": "report"}, "0"),
        (False, {"last": "report"}, "false"),
        ({}, {}, "{}"),
        ({"n": 1}, {"n": 1}, '{"n": 1}'),
    ],
)
def test_a_run_has_a_result_unless_it_returned_none_and_a_dict_is_its_progress_too(
    value: Any, progress: Any, result: str | None
) -> None:
    assert outcome(value) == Outcome(End.DONE, progress=json.dumps(progress), result=result)


@pytest.mark.parametrize(
    ("value", "keys", "found"),
    [
        ([1], "kkl", ["[1]"] * 3),
        ({"n": 1}, "kkl", ['{"n": 1}'] * 3),
        ({"k": [1], "l": 0}, "kkl", ["[1]", "[1]", "0"]),
        ({"l": "x"}, "kl", [None, '"x"']),
        ({"k": None}, "kl", [None, None]),
        ({}, "kl", [None, None]),
        ({"k": 1, "other": 2}, "kl", ['{"k": 1, "other": 2}'] * 2),
    ],
)
def test_a_dict_of_keys_of_a_batch_has_a_result_for_each_and_any_other_value_is_that_of_all(
    value: Any, keys: str, found: list[str | None]
) -> None:
    assert results(value, keys) == found


def test_one_wrong_result_of_a_batch_is_the_error_of_its_key_alone() -> None:
    found = outcome({"k": object(), "l": "x" * 2_000, "m": 3}, "klm", 9)
    assert found.end is End.DONE
    assert {key: each.end for key, each in found.by_key.items()} == {
        "k": End.PERMANENT,
        "l": End.PERMANENT,
        "m": End.DONE,
    }
    assert [end and end.verb for end in decide(jobs("klm"), found)] == ["fail", "fail", "succeed"]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("x" * 300_000, "the pipeline returned 300,002 bytes of JSON, and DL_RESULT_KB=256 allows 262,144: write large"
         " results to the target or to a file, and return their place"),
        ({"rows": [object()]}, "what the pipeline returned is not JSON: result.rows[0] is of the type builtins.object;"
         " return dicts, lists, texts, numbers, booleans and None (sets, dataclasses, Enums, numpy's numbers,"
         " times, decimals, UUIDs and paths have a form too)"),
    ],
)  # fmt: skip
def test_a_wrong_result_fails_the_job_at_once_and_hooks_hear_of_it(value: Any, error: str) -> None:
    register("t.wrong")(lambda args: value)
    heard: list[BaseException] = []
    on_error(lambda run, exc: heard.append(exc))
    result = run("t.wrong")
    assert (result.status, result.error, result.attempts, result.result) == ("failed", error, 1, None)
    assert [str(exc) for exc in heard] == [error]


def test_results_and_progress_are_stored_as_they_are_and_the_error_of_a_wrong_one_is_masked() -> None:
    class Rude:
        def __str__(self) -> str:
            raise ValueError(SECRET)

    @register("t.tells")
    def tells(args: dict[str, Any], context: Context) -> Any:
        context.progress({"token": SECRET})
        return {"token": SECRET, "said": f"it was {SECRET}", "bad": {Rude(): 1} if args["bad"] else None}

    result = run(tells, {"password": SECRET, "bad": False})
    assert result.result == {"token": SECRET, "said": f"it was {SECRET}", "bad": None}
    assert result.progress[0] == {"token": SECRET}
    result = run(tells, {"password": SECRET, "bad": True})
    assert result.status == "failed"
    assert SECRET not in (result.error or "")
    assert "not JSON: result.bad cannot be read (ValueError)" in (result.error or "")
