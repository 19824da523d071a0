"""The bench's arithmetic."""

from __future__ import annotations

import pytest

from bench.results import Line, disorder, percentile


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (1, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)])
def test_a_percentile_is_the_nearest_rank(percent: float, value: float) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == value


def test_a_ratio_is_taken_round_by_round() -> None:
    """A round in which the machine is ten times slower leaves the ratio unchanged."""
    assert Line("f", "n", "u", [100, 10, 110], [200, 20, 200]).ratio == 0.5


def test_runs_of_a_key_are_in_order_and_never_side_by_side() -> None:
    assert disorder([(1, 1, 0.0, 1.0), (2, 1, 0.5, 1.5), (1, 2, 1.0, 2.0), (2, 2, 1.5, 1.6)]) == []
    assert disorder([(7, 1, 0.0, 1.0), (7, 2, 0.9, 2.0)]) == ["job 2 of key 7 overlapped job 1"]
    assert disorder([(7, 2, 0.0, 1.0), (7, 1, 2.0, 3.0)]) == ["job 2 of key 7 started before job 1"]


def test_a_line_is_judged_by_its_ratio_or_else_its_median() -> None:
    assert Line("f", "n", "u", [9.0], [10.0], least=0.9).is_met
    assert Line("f", "n", "u", [13.1], [10.0], most=1.3).is_met is False
    assert Line("f", "n", "u", [3.0], most=3).is_met
    assert Line("f", "n", "u", [3.0], [10.0]).is_met is None
    assert Line("f", "n", "u", [9.0], [10.0], least=0.9).cells()[4:7] == ["u", "0.90", "≥ 0.9 ✓"]
