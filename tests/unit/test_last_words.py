"""The last word of a run: the latest progress is written with its end, whatever the pipeline's form and its end are."""

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

from dataloader.config import Settings
from dataloader.farm.heartbeat import Lease
from dataloader.farm.process import now
from dataloader.farm.runner import Runner
from dataloader.farm.slots import SharedSlots
from dataloader.pipelines import Context, Progress, Retry, Stopped, register
from dataloader.pipelines.context import Suspended
from dataloader.queue.job import Delivery, End, Outcome, decide

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
    def tells_all(args: Any, context: Context) -> None:
        context.progress({"text": "x" * 70_000})

    with capture_logs() as lines:
        (end,) = decide(jobs(), ran(tells_all))
    assert (end.verb, end.progress) == ("succeed", None)
    assert [line["event"] for line in lines] == ["progress.dropped"]


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
    def fails(args: Any) -> None:
        raise ValueError

    (end,) = decide(jobs(), ran(fails, retry_in=lambda attempt: wait))
    assert (end.verb, end.delay_sec) == ("retry", None)


def test_a_coroutine_that_exits_leaves_no_exception_to_asyncio(caplog: pytest.LogCaptureFixture) -> None:
    """Asyncio logs an exception of a task that nobody has asked for, whenever Python collects the task."""

    async def exits(args: Any) -> None:
        raise SystemExit(3)

    assert ran(exits).end is End.ERROR
    gc.collect()
    assert "never retrieved" not in caplog.text
