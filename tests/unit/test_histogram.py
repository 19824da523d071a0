"""Histograms of fixed slots: percentiles are near the exact ones, whatever the values are."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloader.queue.reports import histogram
from dataloader.queue.reports.histogram import Histogram

VALUES = st.lists(
    st.one_of(st.floats(0, 0.01), st.floats(0.001, 100), st.floats(0.001, 1e8), st.sampled_from([0.0, 0.001, 1.1])),
    min_size=1,
    max_size=300,
)


def of(values: list[float]) -> Histogram:
    return Histogram(Counter(map(histogram.slot_of, values)), sum(values), max(values))


@given(VALUES, st.sampled_from([0.01, 0.5, 0.9, 0.95, 0.99, 1.0]))
def test_a_percentile_is_off_by_less_than_ten_percent(values: list[float], share: float) -> None:
    exact = sorted(values)[max(1, math.ceil(round(share * len(values), 6))) - 1]
    told = of(values).percentile(share)
    assert told is not None
    assert abs(told - exact) <= 0.1 * exact * (1 + 1e-9) + histogram.LEAST
    assert told <= max(values)


@given(VALUES)
def test_a_value_is_within_the_bounds_of_its_slot(values: list[float]) -> None:
    for value in values:
        above, up_to = histogram.bounds(histogram.slot_of(value))
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


def test_nothing_has_no_percentile() -> None:
    assert Histogram({}).percentile(0.5) is None
    assert Histogram({}).spread() is None
    assert histogram.bars(Histogram({}), Histogram({})) == []


def test_a_spread_has_the_largest_value_itself() -> None:
    spread = of([1.0, 2.0, 30.0]).spread()
    found = [spread[name] for name in ("count", "mean", "largest", "p99")]
    assert found == [3, 11.0, 30.0, pytest.approx(30, 0.1)]
