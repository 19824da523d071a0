"""Affinity keys: what stays warm, and for how long jobs are passed over for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from claimed import job
from structlog.testing import capture_logs

from dataloader.config import Settings
from dataloader.farm import batch
from dataloader.farm.batch import Preference
from dataloader.farm.heartbeat import Lease
from dataloader.farm.process import now
from dataloader.farm.runner import Resource, Runner, WarmResources, prepared
from dataloader.farm.slots import SharedSlots
from dataloader.pipelines import Context, register, resolve
from dataloader.queue.job import Delivery
from dataloader.queue.lifecycle import Reached
from dataloader.testing import run

pytestmark = pytest.mark.usefixtures("own_registry")

START = datetime(2026, 11, 23, tzinfo=UTC)


def opened(log: list[str], name: str, error: Exception | None = None) -> Callable[[], Any]:
    @contextmanager
    def resource() -> Iterator[str]:
        log.append(f"+{name}")
        yield name
        log.append(f"-{name}")
        if error:
            raise error

    return resource


def test_a_resource_that_cannot_be_released_stops_nobody() -> None:
    kept, log = WarmResources(1), list[str]()
    kept.give_back((None, "a"), prepared("t a", opened(log, "a", ValueError("stays"))), is_sound=True)
    with capture_logs() as logged:
        kept.make_room()
    assert (logged[0]["event"], logged[0]["error"]) == ("worker.resource.failed", "ValueError: stays")
    assert kept.keys == []


def test_two_pipelines_have_resources_of_their_own_for_one_key() -> None:
    kept = WarmResources(3)
    for prepare in (print, repr):
        kept.give_back((prepare, "a"), Resource(prepare, "a"), is_sound=True)
    assert (kept.keys, kept.resources.get((repr, "a"))) == (["a"], Resource(repr, "a"))


def test_what_is_prepared_should_be_a_context_manager() -> None:
    with pytest.raises(TypeError, match="generator function with one yield, or return a context manager"):
        prepared("t", lambda: 3)  # type: ignore[arg-type,return-value]


def test_jobs_are_overdue_once_they_were_passed_over_for_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, first, second = [1_000.0], START, START + timedelta(seconds=4)
    monkeypatch.setattr(batch, "now", lambda: clock[0])
    overdue, off = Preference(True, 60), Preference(False, 60)
    for preference in (overdue, off):
        preference.claimed([job(affinity_key="a")], None)
    overdue.claimed([], Reached(100, first))
    clock[0] = 1_030
    overdue.claimed([], Reached(100, second))
    found = []
    for clock[0] in (1_030, 1_060, 1_090, 1_599):
        found.append(overdue.overdue())
    assert found == [{}, {100: first}, {100: second}, {100: second}], "what was left then goes first, however late"
    assert off.overdue() is None


def test_a_pipeline_gets_what_it_has_prepared_in_every_way_to_write_it() -> None:
    log: list[str] = []

    def by_generator(args: dict[str, Any], context: Context) -> Iterator[str]:
        yield f"{args['n']} {context.affinity_key}"
        log.append("released")

    @register("generator", prepare=by_generator)
    def with_generator(args: dict[str, Any], context: Context) -> str:
        return str(context.resource)

    @register("manager", prepare=lambda args: opened(log, "m")())
    def with_manager(args: dict[str, Any], context: Context) -> str:
        return str(context.resource)

    @register("none", prepare=lambda args: opened(log, "n")())
    def without_context(args: dict[str, Any]) -> int:
        return len(log)

    assert run("generator", {"n": 1}, affinity_key="a").result == "1 a"
    assert (run("manager", {}).result, run("none", {}).result) == ("m", 4)
    assert log == ["released", "+m", "-m", "+n", "-n"]


@pytest.mark.parametrize(
    ("factor", "affinity_key", "args", "seconds"),
    [
        (None, "x70b", {}, 60),
        ({"*70b*": 1.5, "*": 2}, "llama:70b-q4", {}, 90),
        ({"*70b*": 1.5}, "mistral", {}, 60),
        ({"*70b*": 1.5}, None, {}, 60),
        (lambda args: args["n"], None, {"n": 3}, 180),
    ],
)
def test_a_run_may_take_as_long_as_its_class(
    factor: Any, affinity_key: str | None, args: dict[str, Any], seconds: float
) -> None:
    register("t", timeout_sec=60, timeout_factor=factor)(lambda args: None)
    assert resolve("t").timeout_of(args, affinity_key) == seconds


@pytest.mark.parametrize("factor", [0, -1, float("nan"), "2", None])
def test_a_factor_that_is_none_is_the_error_of_the_run(factor: Any) -> None:
    register("t", timeout_sec=60, timeout_factor=lambda args: factor)(lambda args: None)
    found = run("t", {}, max_attempts=1)
    assert found.status == "failed"
    assert "timeout_factor of 't' should be a number above 0" in str(found.error)


def test_notes_are_few_short_and_storable() -> None:
    @register("t")
    def talks(args: dict[str, Any], context: Context) -> None:
        context.note("a\x00b" + "x" * 1_000)
        for _ in range(30):
            context.note("y")

    delivery = Delivery((job(),))
    slot = SharedSlots(1).slots[0]
    slot.begin(0, 1, 60, now())
    notes = Runner(Settings.model_construct(), "").run(delivery, Lease(delivery, slot)).notes
    assert (len(notes), notes[0][:3], len(notes[0])) == (20, "a\ufffdb", 500)
