"""Checkpoints: a run goes on where the one before stopped, and what is committed with data happens once."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from judging import Load, Rows, fails_for_good

from dataloader.farm.runner import TARGET_IS_AHEAD, Checkpoints
from dataloader.pipelines import Context, Progress, register
from dataloader.queue.job import Checkpoint
from dataloader.testing import run as run_job

SEEN: list[Any] = []  # where the runs of this process began


def begun(context: Context) -> int:
    found = context.checkpoint
    SEEN.append(found)
    return found["done"] if found else 0


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


@register("checkpoints.counts", max_attempts=20)
def counts(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Count from the checkpoint to `to`, and fail once behind each of `fails`."""
    for number in range(begun(context) + 1, args.get("to", 5) + 1):
        yield Progress(number, 5, checkpoint={"done": number})
        if number in args.get("fails", ()):
            raise ValueError("bad luck")


@register("checkpoints.writes", max_attempts=20)
def writes(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Add a row for each number from the checkpoint on; nothing in the table keeps it from having one twice."""
    for number in range(begun(context) + 1, 5):
        with context.transaction() as conn:
            conn.execute("CREATE TABLE IF NOT EXISTS written (number int)")
            conn.execute("INSERT INTO written VALUES (%s)", (number,))
            yield Progress(number, checkpoint={"done": number})
            conn.execute("INSERT INTO written VALUES (%s)", (number,))


@register("checkpoints.spares", max_attempts=2, spares_attempts=True)
def spares(args: dict[str, Any], context: Context) -> None:
    """Come one further in each run, up to `stuck`, and fail or die."""
    number = min(begun(context) + 1, args["stuck"])
    context.save({"done": number})
    if number == args.get("to"):
        return
    if args["dies"]:
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("bad luck")


def test_progress_is_what_people_see_without_the_checkpoint() -> None:
    progress = Progress(2, 5, checkpoint={"secret": 1}, file="a.csv")
    assert (progress, progress.checkpoint) == ({"processed": 2, "total": 5, "file": "a.csv"}, {"secret": 1})
    assert (Progress(2), Progress(2).checkpoint) == ({"processed": 2}, None)


def test_a_run_goes_on_where_the_one_before_failed() -> None:
    result = run_job(counts, {"fails": [2, 3]})
    assert (result.status, SEEN) == ("succeeded", [None, {"done": 2}, {"done": 3}])
    assert [run.progress[-1]["processed"] for run in result.runs] == [2, 3, 5]
    assert (result.checkpoint, result.runs[0].checkpoint) == ({"done": 5}, {"done": 2})


@pytest.mark.parametrize("how", ["drain_at", "crash_at"])
@pytest.mark.parametrize("point", range(1, 9))
def test_what_is_committed_with_data_happens_once(job: Load, rows: Rows, how: str, point: int) -> None:
    """The odd points are yields in transactions, the even ones their commits."""
    assert job(writes, **{how: point}).status == "succeeded"
    assert rows("SELECT number, count(*) FROM written GROUP BY 1 ORDER BY 1") == [(n, 2) for n in range(1, 5)]


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_run_killed_between_the_commit_and_the_queue_is_not_repeated(
    job: Load, rows: Rows, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The queue has the checkpoint before, or none; the next run asks the target, or finds it in its transaction."""
    keep, left = Checkpoints._keep, iter(range(after, 0, -1))
    parent = os.getpid()

    def dying(self: Checkpoints, checkpoint: Checkpoint) -> None:
        if os.getpid() != parent and next(left) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        keep(self, checkpoint)

    monkeypatch.setattr(Checkpoints, "_keep", dying)
    result = job(writes, crash_at=100)
    assert result.status == "succeeded"
    assert rows("SELECT number, count(*) FROM written GROUP BY 1 ORDER BY 1") == [(n, 2) for n in range(1, 5)]
    if after == 1:
        assert ([run.end for run in result.runs], SEEN) == (["crash", "handed back", "done"], [None, {"done": 1}])
        assert result.runs[1].error == TARGET_IS_AHEAD
    else:
        assert ([run.end for run in result.runs], SEEN) == (["crash", "done"], [{"done": after}])


def test_a_transaction_that_is_rolled_back_takes_its_checkpoint_along(job: Load, rows: Rows) -> None:
    @register("checkpoints.rolls_back", max_attempts=2)
    def rolls_back(args: dict[str, Any], context: Context) -> None:
        begun(context)
        context.save({"done": 1})
        with context.transaction() as conn:
            conn.execute("SELECT")
            context.save({"done": 2})
            raise ValueError("bad luck")

    assert job(rolls_back).checkpoint == {"done": 1}
    assert SEEN == [None, {"done": 1}]
    assert rows("SELECT checkpoint FROM dl_fence") == [(None,)]


def test_a_checkpoint_behind_a_transaction_is_the_newer_one(job: Load) -> None:
    @register("checkpoints.mixes", max_attempts=3)
    def mixes(args: dict[str, Any], context: Context) -> None:
        done = begun(context)
        if done == 0:
            with context.transaction():
                context.save({"done": 1})
            context.save({"done": 2})
        if done < 3:
            context.save({"done": done + 2})
            raise ValueError("bad luck")
        with context.transaction():
            context.save({"done": 9})

    assert job(mixes).checkpoint == {"done": 9}
    assert SEEN == [None, {"done": 2}, {"done": 4}]


def test_a_run_that_comes_further_spares_its_attempt() -> None:
    result = run_job(spares, {"dies": False, "to": 6, "stuck": 9})
    assert (result.status, result.attempts, len(result.runs)) == ("succeeded", 1, 6)


@pytest.mark.parametrize("dies", [False, True])
def test_one_that_saves_the_same_again_does_not(dies: bool) -> None:
    result = run_job(spares, {"dies": dies, "stuck": 3}, crash_at=[99] * 5 if dies else ())
    assert (result.status, len(result.runs)) == ("lost" if dies else "failed", 5)
    assert [run.attempt for run in result.runs] == [1, 1, 1, 1, 2]


def test_a_pipeline_that_does_not_say_so_spends_its_attempts() -> None:
    result = run_job(counts, {"fails": [1, 2, 3]}, max_attempts=2)
    assert (result.status, result.attempts) == ("failed", 2)


def _unread(args: dict[str, Any], context: Context) -> None:
    context.save({})


def _reads_late(args: dict[str, Any], context: Context) -> None:
    with context.transaction():
        context.checkpoint  # noqa: B018


def _in_two(args: dict[str, Any], context: Context) -> None:
    context.checkpoint  # noqa: B018
    with context.transaction(), context.transaction():
        context.save({})


def _elsewhere(args: dict[str, Any], context: Context) -> None:
    context.checkpoint  # noqa: B018
    with context.transaction(args["dsn"]):
        context.save({})


def _yields_without_context(args: dict[str, Any]) -> Iterator[Progress]:
    yield Progress(1, checkpoint={})


def _saves_much(args: dict[str, Any], context: Context) -> None:
    context.checkpoint  # noqa: B018
    context.save({"a": "x" * 65_530})


def _yields_nonsense(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    context.checkpoint  # noqa: B018
    with context.transaction() as conn:
        conn.execute("CREATE TABLE written ()")
        yield Progress(1, checkpoint={"at": object()})


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        (_unread, "read context.checkpoint before you save one"),
        (_reads_late, "read context.checkpoint before context.transaction() begins"),
        (_in_two, "save it when only one is open"),
        (_elsewhere, "committed in the target (DL_TARGET_DSN), not in another database"),
        (_yields_without_context, "should take a context"),
        (_yields_nonsense, "a checkpoint should be a dict of JSON"),
        (_saves_much, "65,539 bytes of JSON, and 65,536 are the most"),
    ],
)
def test_what_would_not_be_right_ends_the_job(
    job: Load, rows: Rows, dsn: str, pipeline: Callable[..., Any], reason: str
) -> None:
    register(task := f"checkpoints.{pipeline.__name__}")(pipeline)
    fails_for_good(job(task, {"dsn": dsn}), reason)
    assert rows("SELECT to_regclass('written')") == [(None,)]


@pytest.mark.parametrize("use", [lambda context: context.checkpoint, lambda context: context.save({})])
def test_a_call_with_several_jobs_has_none(use: Callable[[Context], Any]) -> None:
    @register("checkpoints.batch", batch_size=2)
    def batch(orders: dict[str, Any], context: Context) -> None:
        use(context)

    result = run_job(batch, {"a": [{}]})
    fails_for_good(result, "takes several jobs in one call (batch_size), and has no checkpoints")
    batch_ = "spares no attempts"
    with pytest.raises(ValueError, match=batch_):
        register("checkpoints.batch2", batch_size=2, spares_attempts=True)
