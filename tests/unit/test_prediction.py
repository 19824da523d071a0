"""Reports: the predicted ends of jobs and how right they are over simulated nights; histograms; why a job waits."""

import math
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import pytest
from histograms import slot_of
from hypothesis import given
from hypothesis import strategies as st
from simulated_night import Night

from dataloader.queue.reports import histogram, prediction, waiting
from dataloader.queue.reports.histogram import Histogram
from dataloader.queue.reports.prediction import Line, Range, Running, Waiting, forecast

SURE = {"load": [100.0] * 10_000}  # a task whose runs always take as long


def middles(line: Line, *jobs: str, durations: dict[str, list[float]] = SURE) -> list[float]:
    """The predicted ends of these jobs in seconds, rounded to ten: the mean of any task is a little uncertain."""
    found = forecast(line, durations, jobs)
    return [round(found.jobs[job].middle, -1) for job in jobs]


def test_a_job_that_waits_for_its_key_or_its_time_lets_others_pass() -> None:
    line = Line(2, waiting=[Waiting("a", "load", ["k"]), Waiting("b", "load", ["k"]), Waiting("c", "load", ["m"])])
    assert middles(line, *"abc") == [100, 200, 100]
    running = [Running("r", "load", 40.0, takes=["k"])]
    assert middles(Line(2, running, [Waiting("a", "load", ["k"])]), "a") == [160]
    line = Line(1, waiting=[Waiting("first", "load", due_sec=50.0), Waiting("a", "load"), Waiting("b", "load")])
    assert middles(line, "a", "first", "b") == [100, 200, 300]
    assert middles(Line(1, waiting=[Waiting("a", "load", due_sec=1_000.0)]), "a") == [1_100]
    assert middles(Line(1, waiting=[Waiting("a", "new")]), "a") == [100], "a task without runs is as the others"


def test_a_job_that_gets_room_in_its_limit_and_not_its_key_lets_the_next_of_the_limit_in() -> None:
    """`a` holds the limit, `b` the key; after `a` ends, `c` still waits for the key, and `d` needs the limit alone."""
    waiting = [Waiting("a", "load", ["x", "limit"]), Waiting("b", "long", ["k"]), Waiting("c", "load", ["limit", "k"]),
               Waiting("d", "load", ["y", "limit"])]  # fmt: skip
    durations = {"load": [100.0] * 10_000, "long": [400.0] * 10_000}
    line = Line(4, waiting=waiting, room={"limit": 1})
    assert middles(line, *"abcd", durations=durations) == [100, 400, 500, 200]


def test_the_rest_of_a_run_follows_from_its_progress_and_else_from_runs_that_took_longer() -> None:
    of_either = {"load": [100.0, 300.0] * 5_000}
    assert middles(Line(1, [Running("r", "load", 150.0)]), "r", durations=of_either) == [150]
    half = Running("r", "load", 1_000.0, share=0.5)
    assert middles(Line(1, [half]), "r")[0] == pytest.approx(1_000, rel=0.1)
    found = forecast(Line(1, [Running("r", "load", 1_000.0)]), SURE, ["r"])
    assert found is not None, "longer than any run before: up to as long again"
    assert 0 <= found.jobs["r"].low < found.jobs["r"].high <= 1_000


def test_what_cannot_start_never_ends_and_the_jobs_beyond_the_line_count_for_its_end() -> None:
    line = Line(1, waiting=[Waiting("a", "load", ["closed"]), Waiting("b", "load")], room={"closed": 0})
    found = forecast(line, SURE, ["a", "b"])
    assert found.jobs["a"] == Range(float("inf"), float("inf"), float("inf"))
    assert found.jobs["b"].middle == pytest.approx(100, rel=0.05)
    found = forecast(Line(5, waiting=[Waiting(nth, "load") for nth in range(10)], beyond=990), SURE)
    assert found.line.middle == pytest.approx(20_000, rel=0.02)
    one = Line(1, waiting=[Waiting("a", "load")])
    few, many = (forecast(one, {"load": [100.0] * runs}, ["a"]).jobs["a"] for runs in (1, 10_000))
    assert few.high - few.low > 10 * (many.high - many.low)


def test_a_correction_moves_a_range_to_where_the_ends_were_and_never_narrows_it() -> None:
    by = prediction.correction([1.0, 1.2, 1.4] * 10)
    assert by == Range(1.0, 1.2, 1.4)
    assert prediction.corrected(Range(90, 100, 110), by) == Range(100, 120, 140)
    assert prediction.corrected(Range(50, 100, 300), by) == Range(60, 120, 360)
    assert prediction.corrected(Range(50, 100, 300), Range(1.0, 1.0, 1.0)) == Range(50, 100, 300)
    assert prediction.correction([3.0] * (prediction.ENOUGH - 1)) == Range(1.0, 1.0, 1.0), "too few to correct by"
    assert prediction.correction([1_000.0] * prediction.ENOUGH) == Range(4.0, 4.0, 4.0), "bounded"


class Said(NamedTuple):
    """The predicted and the real end of a job, or of the line (job None); in seconds from the prediction."""

    job: object
    was_running: bool
    expected: Range
    took: float

    def error(self, expected: Range) -> float:
        """How far off that is, as a share of the time that was left."""
        return abs(expected.middle - self.took) / self.took


def predicted(seed: int, instants: int) -> list[Said]:
    """Every 20th waiting job, each running one and the line, predicted at so many instants of a night."""
    night = Night.of(seed)
    known, found = night.known(), []
    for at in night.instants(instants):
        night.pass_until(at)
        line = night.line()
        running = [run.job for run in line.running]
        expected = forecast(line, known, [*running, *(each.job for each in line.waiting[::20])])
        everything = [each.job for each in (*line.waiting, *line.running)]
        found += [(at, job, job in running, [job], its) for job, its in expected.jobs.items()]
        found.append((at, None, False, everything, expected.line))
    night.pass_until(100_000)
    ends = {job.number: job.ended_at for job in night.jobs}
    return [Said(job, was_running, expected, max(ends[each] for each in of) - at)
            for at, job, was_running, of, expected in found]  # fmt: skip


@pytest.mark.parametrize("seed", [1])
def test_the_predicted_ends_of_a_night_are_off_by_ten_percent_at_most_in_the_median(seed: int) -> None:
    """The error is |predicted - true end| as a share of the time from the prediction to the true end."""
    before = [each for nth in range(3) for each in predicted(seed + nth, 3) if not each.was_running]
    by = prediction.correction([each.took / each.expected.middle for each in before if each.job is not None])
    night = [each if each.was_running else each._replace(expected=prediction.corrected(each.expected, by))
             for each in predicted(seed + 3, 8)]  # fmt: skip
    jobs, lines = [each for each in night if each.job is not None], [each for each in night if each.job is None]
    waiting, running = ([each for each in jobs if each.was_running is which] for which in (False, True))
    groups = {"jobs": jobs, "waiting": waiting, "running": running, "lines": lines}
    errors = {name: median(each.error(each.expected) for each in some) for name, some in groups.items()}
    within = sum(each.expected.low <= each.took <= each.expected.high for each in jobs) / len(jobs)
    print(f"median error {errors}; {within:.0%} of {len(jobs)} ends within their ranges; {by}")
    assert max(errors["jobs"], errors["waiting"], errors["lines"]) <= 0.1
    assert errors["running"] <= 0.25, "how long one run goes on that tells nothing is chance"
    assert within >= 0.6
    assert median(each.error(each.expected) for each in waiting) < median(  # what the correction is for
        abs(each.expected.middle / by.middle - each.took) / each.took for each in waiting
    )


VALUES = st.lists(
    st.one_of(st.floats(0, 0.01), st.floats(0.001, 100), st.floats(0.001, 1e8), st.sampled_from([0.0, 0.001, 1.1])),
    min_size=1,
    max_size=300,
)


def of(values: list[float]) -> Histogram:
    return Histogram(Counter(map(slot_of, values)), sum(values), max(values))


@given(VALUES, st.sampled_from([0.01, 0.5, 0.9, 0.95, 0.99, 1.0]))
def test_a_percentile_is_off_by_less_than_ten_percent(values: list[float], share: float) -> None:
    exact = sorted(values)[max(1, math.ceil(round(share * len(values), 6))) - 1]
    percentile = of(values).percentile(share)
    assert percentile is not None
    assert abs(percentile - exact) <= 0.1 * exact * (1 + 1e-9) + histogram.LEAST
    assert percentile <= max(values)


@given(VALUES)
def test_a_value_is_within_the_bounds_of_its_slot(values: list[float]) -> None:
    for value in values:
        above, up_to = histogram.bounds(slot_of(value))
        assert above * (1 - 1e-9) <= value <= up_to * (1 + 1e-9)


@given(VALUES, VALUES)
def test_bars_have_every_value_once(some: list[float], more: list[float]) -> None:
    drawn = histogram.bars(of(some), of(more))
    assert [sum(numbers) for numbers in zip(*(bar[2] for bar in drawn), strict=True)] == [len(some), len(more)]
    assert len(drawn) <= histogram.BARS
    assert all(math.isclose(before[1], after[0]) for before, after in pairwise(drawn))


@given(VALUES, VALUES)
def test_merged_histograms_are_those_of_all_values(some: list[float], more: list[float]) -> None:
    both, whole = histogram.merged([of(some), of(more)]), of(some + more)
    assert (both.counts, both.largest) == (dict(whole.counts), whole.largest)


def test_a_spread_has_the_largest_value_itself_and_nothing_has_none() -> None:
    spread = of([1.0, 2.0, 30.0]).spread()
    assert [spread[name] for name in ("count", "mean", "largest", "p99")] == [3, 11.0, 30.0, pytest.approx(30, 0.1)]
    none = Histogram({})
    assert (none.percentile(0.5), none.spread(), histogram.bars(none, none)) == (None, None, [])


NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


SOON = (NOW + timedelta(seconds=90)).isoformat()
NEXT = "It is the next of its queue: it starts when {} of q is free."


@pytest.mark.parametrize(
    ("reason", "more", "words"),
    [
        ("worker", {"workers": 0, "ahead": 0}, NEXT.format("a worker")),
        ("worker", {"workers": 1, "ahead": 0}, NEXT.format("the only worker")),
        ("worker", {"workers": 2, "ahead": 0}, NEXT.format("one of 2 workers")),
        ("worker", {"workers": 0, "ahead": 7}, "7 jobs of the queue q go before it."),
        ("worker", {"workers": 1, "ahead": 1}, "1 job of the queue q goes before it; 1 worker serves that queue."),
        (
            "worker",
            {"workers": 2, "ahead": 1_000},
            "1,000 jobs or more of the queue q go before it; 2 workers serve that queue.",
        ),
        ("limit", {"running": 3, "most": 3}, "The limit l has no room: 3 jobs of it run, and it allows 3."),
        ("limit", {"running": 0, "until": SOON}, "The limit l lets the next job start in 1 min 30 s."),
    ],
)
def test_numbers_of_workers_jobs_and_limits(reason: str, more: dict[str, Any], words: str) -> None:
    assert waiting.words({"reason": reason, "queue": "q", "limit": "l", **more}, NOW) == words
