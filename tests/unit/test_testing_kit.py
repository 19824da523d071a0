"""dataloader.testing: a job's runs as on a farm, with events at the safe points that a test names."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel, Field

from dataloader import pipelines
from dataloader.pipelines import Context, PermanentError, UnknownTask, register, retries
from dataloader.testing import Deadlocked, NoDatabase, NotReached, Result, run

pytestmark = pytest.mark.usefixtures("own_registry")

pytest_plugins = ["dataloader.testing.plugin"]
RunPipeline = Callable[..., Result]


def generator(args: dict[str, Any]) -> Iterator[Any]:
    yield {"n": 1}
    yield {"n": 2}
    return {"n": 3}


def gives_a_generator(args: dict[str, Any]) -> Any:
    return generator(args)


async def async_generator(args: dict[str, Any], context: pipelines.Context) -> Any:
    for n in (1, 2):
        await asyncio.sleep(0)
        yield {"n": n}


async def coroutine(args: dict[str, Any]) -> Any:
    await asyncio.sleep(0)
    return {"n": args["n"]}


def plain(args: dict[str, Any], context: pipelines.Context) -> Any:
    for n in (1, 2):
        context.progress({"n": n})
    return {"n": context.attempt, "job_id": context.job_id}


@pytest.mark.parametrize(
    ("function", "seen"),
    [
        (generator, [1, 2, 3]),
        (gives_a_generator, [1, 2, 3]),
        (async_generator, [1, 2]),
        (coroutine, [7]),
        (plain, [1, 2, 1]),
    ],
)
def test_every_form_runs(function: Callable[..., Any], seen: list[int]) -> None:
    register("t")(function)
    for pipeline in ("t", function):
        result = run(pipeline, {"n": 7})
        assert (result.status, result.error, result.attempts) == ("succeeded", None, 1)
        assert [document["n"] for document in result.progress] == seen
        assert result.value == result.progress[-1]


def test_an_empty_dict_is_a_result_and_no_progress() -> None:
    register("t")(lambda args: {})
    result = run("t")
    assert (result.result, result.progress, result.value) == ({}, [], None)


@pytest.mark.parametrize("function", [generator, async_generator, plain])
def test_cancel_and_drain_at_a_step(function: Callable[..., Any]) -> None:
    register("t")(function)
    result = run("t", cancel_at=2)
    assert (result.status, result.progress[-1], result.steps) == ("canceled", {"n": 2}, 2)
    result = run("t", drain_at=1)
    assert (result.status, result.attempts) == ("succeeded", 1)
    assert [each.end for each in result.runs] == ["handed back", "done"]
    with pytest.raises(NotReached, match="cancel_at=9: the run was over before, after 2 safe points"):
        run("t", cancel_at=9)


@pytest.mark.parametrize(
    ("how", "reason"),
    [({"cancel_at": 2}, "canceled"), ({"drain_at": 2}, "handed back"), ({"timeout_sec": 0.001}, "timeout")],
)
def test_a_run_learns_why_it_ends(how: dict[str, Any], reason: str) -> None:
    reasons = []

    @register("t", max_attempts=1)
    def curious(args: dict[str, Any], context: Context) -> Iterator[Any]:
        reasons.append(context.stop_reason)
        try:
            while len(reasons) < 3:
                time.sleep(0.002)
                yield
        finally:
            reasons.append(context.stop_reason)

    run(curious, **how)
    assert reasons[:2] == [None, reason]


def test_a_cancellation_that_is_ignored_wins_and_the_work_stands() -> None:
    @register("t")
    def stubborn(args: dict[str, Any], context: pipelines.Context) -> int:
        assert context.stopping
        return 1

    result = run(stubborn, cancel_at=1)
    assert (result.status, result.result) == ("canceled", None)
    assert result.error == "canceled when the pipeline had finished: its work stands"


def test_errors_are_tried_again_and_permanent_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    @register("t")
    def moody(args: dict[str, Any], context: pipelines.Context) -> Iterator[Any]:
        yield {"attempt": context.attempt}
        if context.attempt < args.get("from", 9):
            raise ValueError(f"password={args['password']}")
        if args.get("bad"):
            raise PermanentError("no use")

    result = run(moody, {"from": 3, "password": "hunter22"})
    assert (result.status, result.attempts) == ("succeeded", 3)
    assert [each.end for each in result.runs] == ["error", "error", "done"]
    result = run(moody, {"password": "hunter22"}, max_attempts=2)
    assert (result.status, result.attempts) == ("failed", 2)
    assert isinstance(result.exception, ValueError)
    assert result.error is not None
    assert "Traceback" in result.error
    assert "hunter22" not in result.error + caplog.text + repr(result)
    assert "ValueError: password=***" in caplog.text
    result = run(moody, {"from": 1, "bad": True, "password": "x"})
    assert (result.status, result.attempts, result.error) == ("failed", 1, "no use")


def test_a_crash_is_a_killed_process(tmp_path: Path) -> None:
    @register("t")
    def careful(args: dict[str, Any], context: pipelines.Context) -> Iterator[Any]:
        try:
            yield {"pid": os.getpid()}
            yield {"attempt": context.attempt}
        finally:
            (tmp_path / f"ended-{context.attempt}").touch()

    result = run(careful, crash_at=[1, "end"])
    assert [each.end for each in result.runs] == ["crash", "crash", "done"]
    assert result.runs[0].error == "worker killed by signal 9 on attempt 1"
    assert result.runs[0].progress[0]["pid"] != os.getpid()
    assert (result.status, result.value, result.steps) == ("succeeded", {"attempt": 3}, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ended-2", "ended-3"]
    result = run(careful, crash_at=2, max_attempts=1)
    assert (result.status, result.error) == ("lost", "worker killed by signal 9 on attempt 1")
    with pytest.raises(NotReached, match="crash_at=3: the run was over before, after 2 safe points"):
        run(careful, crash_at=3)


def _started_pool() -> None:
    """Register the pipeline with its pool, and start the thread of the pool."""
    import pooled_pipelines

    register("t.pooled")(pooled_pipelines.pooled)
    assert run("t.pooled").status == "succeeded"


@pytest.mark.parametrize("point", [1, 2, "end"])
@pytest.mark.long
def test_a_run_that_cannot_go_on_in_a_fork_crashes_in_a_new_interpreter(
    point: int | str, caplog: pytest.LogCaptureFixture
) -> None:
    _started_pool()
    result = run("t.pooled", crash_at=point)
    assert [each.end for each in result.runs] == ["crash", "done"]
    assert result.runs[0].progress[0]["pid"] != os.getpid()
    assert len(result.runs[0].progress) == (1 if point == 1 else 2)
    assert ("a new interpreter" in caplog.text) == (point != 1)
    if point == 2:
        with pytest.raises(NotReached, match="crash_at=3: the run was over before, after 2 safe points"):
            run("t.pooled", crash_at=3)


def test_a_run_in_a_new_interpreter_keeps_its_checkpoint_database_and_folder(
    run_pipeline: RunPipeline, tmp_path: Path
) -> None:
    import pooled_pipelines

    register("t.pooled.saving")(pooled_pipelines.saving)
    assert run_pipeline("t.pooled.saving").result == 2
    result = run_pipeline("t.pooled.saving", crash_at=2, checkpoint={"at": 7})
    # Before the crash a fork was stuck behind its first transaction.
    assert [each.checkpoint for each in result.runs] == [{"at": 9}, {"at": 11}]
    assert (result.result, (tmp_path / "f").read_text()) == (11, "x" * 7)


def test_a_run_that_cannot_go_on_in_a_fork_nor_begin_in_a_new_interpreter_says_so() -> None:
    _started_pool()
    import pooled_pipelines

    @register("t")
    def local(args: dict[str, Any]) -> Iterator[Any]:
        yield from pooled_pipelines.pooled(args)

    register("t.unknown")(pooled_pipelines.pooled)
    register("t.pooled.stuck")(pooled_pipelines.stuck)
    for pipeline, why in (
        (local, r"forked after a library .* had started threads.* into a module"),
        ("t.unknown", r"pooled_pipelines does not register t\.unknown"),
        ("t.pooled.stuck", "each thread of the run waits for another one"),
    ):
        with pytest.raises(Deadlocked, match=why):
            run(pipeline, crash_at=2)


@pytest.mark.long
def test_a_run_that_waits_for_others_is_not_stuck() -> None:
    @register("t")
    def waits(args: dict[str, Any]) -> Iterator[Any]:
        yield {}
        subprocess.run([sys.executable, "-c", "import time; time.sleep(2)"], check=True)
        threading.Event().wait(2)
        yield {}

    assert [each.end for each in run(waits, crash_at=2).runs] == ["crash", "done"]


def test_what_the_test_raises_comes_through() -> None:
    @register("t")
    def interrupted(args: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("t")
    with pytest.raises(UnknownTask, match="no pipeline 'nothing' is registered here"):
        run("nothing")
    with pytest.raises(ValueError, match="plain is no pipeline: put @register"):
        run(plain)
    with pytest.raises(TypeError, match="not JSON serializable"):
        run("t", {"at": Path("/")})
    with pytest.raises(ValueError, match="counted from 1, not 0"):
        run("t", cancel_at=0)
    register("t.batches", batch_size=1)(lambda batch: None)
    with pytest.raises(ValueError, match="takes batches"):
        run("t.batches", {})


def insert(args: dict[str, Any], context: pipelines.Context) -> Iterator[Any]:
    with context.transaction() as conn:
        conn.execute("CREATE TABLE IF NOT EXISTS t (id int)")
        conn.execute("DELETE FROM t")
        for n in (1, 2):
            conn.execute("INSERT INTO t VALUES (%s)", (n,))
            yield {"n": n}


def rows(dsn: str) -> list[Any] | None:
    with psycopg.connect(dsn) as conn:
        exists = conn.execute("SELECT to_regclass('t')").fetchall() != [(None,)]
        return conn.execute("SELECT id FROM t ORDER BY id").fetchall() if exists else None


def test_transactions_need_a_database() -> None:
    register("t")(insert)
    with pytest.raises(NoDatabase, match=r"context.transaction\(\) needs a database: give `dsn`"):
        run("t")
    with pytest.raises(NotReached, match="needs a database"):
        run("t", crash_at=1)


@pytest.mark.parametrize("fate", [{"cancel_at": 2}, {"cancel_at": 3}, {"crash_at": [1, 2, 3], "max_attempts": 3}])
def test_what_stops_a_run_leaves_nothing_and_a_run_after_crashes_does_the_work_once(
    fate: Any, run_pipeline: RunPipeline, dataloader_db: str
) -> None:
    """Safe point 3 is the commit."""
    register("t")(insert)
    assert run_pipeline("t", **fate).status in ("canceled", "lost")
    assert rows(dataloader_db) is None
    result = run_pipeline(insert, crash_at=[1, 3, "end"], drain_at=2)
    assert (result.status, result.attempts, result.steps) == ("succeeded", 4, 3)
    assert rows(dataloader_db) == [(1,), (2,)]


def test_each_test_has_a_database_of_its_own(run_pipeline: RunPipeline, dataloader_db: str, tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("id,name\n1,tea\n")
    assert rows(dataloader_db) is None
    result = run_pipeline("load.csv", {"path": "f.csv", "table": "t", "key": ["id"]})
    assert (result.status, result.result["inserted"]) == ("succeeded", 1)
    assert rows(dataloader_db) == [("1",)]
    with psycopg.connect(dataloader_db) as conn:
        assert conn.execute("SELECT count(*) FROM dl_jobs").fetchall() == [(0,)]
    assert not logging.getLogger("dataloader.testing").handlers


def test_an_exception_fails_all_keys_and_of_each_the_first_job_dies_when_its_attempts_are_spent() -> None:
    """A batch gets the args of each key in their order, equal ones once."""
    seen: list[Any] = []

    def fails_with_one(batch: dict[str, list[Any]]) -> None:
        seen.append({key: [each["v"] for each in args] for key, args in batch.items()})
        if {"v": 1} in batch.get("a", ()):
            raise ValueError("1")

    register("t.fails", batch_size=3)(fails_with_one)
    args = {"a": [{"v": 2}, {"v": 3}, {"v": 2}], "b": [{"v": 3}]}
    assert run("t.fails", args).jobs == {"a": ["succeeded"] * 3, "b": ["succeeded"]}
    result = run("t.fails", {"a": [{"v": 1}, {"v": 2}], "b": [{"v": 3}]}, max_attempts=2)
    assert seen == [{"a": [2, 3], "b": [3]}] + [{"a": [1, 2], "b": [3]}] * 2 + [{"a": [2]}]
    assert (result.status, result.jobs) == ("failed", {"a": ["failed", "succeeded"], "b": ["failed"]})


def test_a_batch_decides_single_keys() -> None:
    calls: list[list[str]] = []

    def decides(batch: dict[str, list[Any]], context: Context) -> None:
        calls.append(list(batch))
        if len(calls) == 1:
            context.fail("fails", "no such order")
            context.fail("dies", PermanentError("never"))
            context.retry("later", in_sec=5)
            context.skip("skipped")
            with pytest.raises(KeyError):
                context.fail("other", "e")

    register("t.decides", batch_size=9)(decides)
    result = run("t.decides", {key: [{}] for key in ("done", "fails", "dies", "later", "skipped")})
    assert calls == [["done", "fails", "dies", "later", "skipped"], ["fails", "later", "skipped"]]
    assert result.jobs == {"dies": ["failed"]} | {key: ["succeeded"] for key in ("done", "fails", "later", "skipped")}


def test_a_batch_crashes_drains_and_is_canceled_as_a_job_is() -> None:
    def steps(batch: dict[str, list[Any]]) -> Iterator[None]:
        for _ in batch:
            yield

    register("t.steps", batch_size=2)(steps)
    args = {"a": [{}, {"v": 1}], "b": [{}]}
    assert run("t.steps", args, crash_at=1, drain_at=1).jobs == {"a": ["succeeded"] * 2, "b": ["succeeded"]}
    assert run("t.steps", args, crash_at=1, max_attempts=1).jobs == {"a": ["lost", "succeeded"], "b": ["lost"]}
    assert run("t.steps", args, cancel_at=1).jobs == {"a": ["canceled", "succeeded"], "b": ["succeeded"]}


def test_on_exhausted_gets_the_args_of_a_job_that_ends_failed_and_nobody_elses() -> None:
    exhausted: list[Any] = []

    def fails(args: Any) -> None:
        raise PermanentError("e") if args.get("v") == 1 else ValueError("e")

    register("t.dies", on_exhausted=exhausted.append)(fails)
    assert run("t.dies", {"v": 1}).attempts == 1
    assert run("t.dies", {"v": 2}, max_attempts=3).attempts == 3
    assert exhausted == [{"v": 1}, {"v": 2}]
    register("t.worse", on_exhausted=lambda args: 1 / 0)(lambda args: 1 / 0)
    assert run("t.worse", max_attempts=1).status == "failed"


def test_the_ready_made_rules() -> None:
    assert [retries.linear(30)(attempt) for attempt in (1, 2, 10_000)] == [30, 60, 86_400]
    for attempt in range(1, 26):
        least = (attempt - 1) ** 4 + 15
        assert least <= retries.polynomial()(attempt) <= least + 29 * attempt
    for attempt in (1, 4, 10_000):
        whole = min(60.0, 2.0 * 2 ** min(attempt - 1, 60))
        assert whole / 2 <= retries.exponential(2, 60)(attempt) <= whole
    with pytest.raises(ValueError, match="step_sec should be above 0"):
        retries.linear(0)


def test_args_are_checked_by_the_model_as_on_a_farm() -> None:
    class Load(BaseModel):
        day: str
        limit: int = Field(default=10, ge=1)

    exhausted: list[Any] = []
    register("typed", args=Load, on_exhausted=exhausted.append)(lambda args: {"limit": args.limit})
    register("typed.batch", args=Load, batch_size=5)(lambda args: {key: each[0].limit for key, each in args.items()})
    for args in ({"day": "x", "limit": 5}, Load(day="x", limit=5)):
        assert run("typed", args).result == {"limit": 5}
    result = run("typed", {"limit": 0})
    assert (result.status, result.attempts) == ("failed", 1)
    assert result.error == "day: Field required; limit: Input should be greater than or equal to 1"
    assert exhausted == [{"limit": 0}]
    batch = run("typed.batch", {"a": [Load(day="x")], "b": [{"day": 5}]})
    assert (batch.jobs, batch.results) == ({"a": ["succeeded"], "b": ["failed"]}, {"a": [10], "b": [None]})
    assert run("typed.batch", {"a": [{}], "b": [{}]}).jobs == {"a": ["failed"], "b": ["failed"]}
