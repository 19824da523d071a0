"""The bench's arithmetic, and its drawings."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.progress import Progress

from dataloader.bench import marks, plot, program
from dataloader.bench.line import Line, Must, disorder, gaps, median, paired_ratio, percentile
from dataloader.bench.memory import pss_mb
from dataloader.bench.place import Place, Wish
from dataloader.cli import main

SAMPLES = st.lists(st.floats(-1e9, 1e9), min_size=1)


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (1, 1), (50, 50), (90, 90), (99, 99), (99.5, 100), (100, 100)])
def test_a_percentile_is_the_nearest_rank(percent: float, value: float) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == value


def test_a_percentile_of_few_is_one_of_them() -> None:
    assert percentile([3.0], 99) == 3.0
    assert percentile([4.0, 2.0], 50) == 2.0


@given(SAMPLES, st.floats(0, 100))
def test_a_percentile_has_so_many_at_or_below_it(sample: list[float], percent: float) -> None:
    value = percentile(sample, percent)
    assert value in sample
    assert sum(other <= value for other in sample) >= len(sample) * percent / 100 - 1e-9


@pytest.mark.parametrize("statistic", [median, lambda sample: percentile(sample, 50)])
def test_nothing_measured_has_no_statistic(statistic: Any) -> None:
    with pytest.raises(ValueError, match="at least one value"):
        statistic([])


@pytest.mark.parametrize("percent", [-0.1, 100.1])
def test_a_percentile_is_within_a_hundred(percent: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 100"):
        percentile([1.0], percent)


def test_a_ratio_is_taken_round_by_round() -> None:
    """A round in which the machine is ten times slower leaves the ratio unchanged."""
    assert paired_ratio([100, 10, 110], [200, 20, 200]) == 0.5


def test_a_ratio_needs_a_pair_for_each_round() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1, 2], [1])


def test_gaps_are_from_an_end_to_the_next_start() -> None:
    assert gaps([(5.0, 6.0), (1.0, 2.0), (2.5, 4.0)]) == [0.5, 1.0]
    assert gaps([(1.0, 2.0)]) == []


def test_runs_one_after_the_other_are_in_order() -> None:
    assert disorder([(1, 1, 0.0, 1.0), (2, 1, 0.5, 1.5), (1, 2, 1.0, 2.0), (2, 2, 1.5, 1.6)]) == []


def test_runs_of_a_key_side_by_side_are_found() -> None:
    assert disorder([(7, 1, 0.0, 1.0), (7, 2, 0.9, 2.0)]) == ["job 2 of key 7 overlapped job 1"]


def test_runs_of_a_key_the_wrong_way_round_are_found() -> None:
    assert disorder([(7, 2, 0.0, 1.0), (7, 1, 2.0, 3.0)]) == ["job 2 of key 7 started before job 1"]


@pytest.mark.parametrize(
    ("ours", "bare", "must", "is_met"),
    [
        ([9.0], [10.0], Must(least=0.9), True),
        ([8.9], [10.0], Must(least=0.9), False),
        ([13.0], [10.0], Must(most=1.3), True),
        ([13.1], [10.0], Must(most=1.3), False),
        ([3.0], [], Must(most=3), True),
        ([3.1], [], Must(most=3), False),
        ([], [10.0], Must(most=3), None),
        ([3.0], [10.0], None, None),
    ],
)
def test_a_line_is_judged_by_its_ratio_or_its_median(
    ours: list[float], bare: list[float], must: Must | None, is_met: bool | None
) -> None:
    assert Line("f", "n", "u", ours, bare, must).is_met is is_met


@pytest.mark.parametrize("bounds", [{}, {"least": 1, "most": 2}])
def test_a_bound_has_one_side(bounds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="either"):
        Must(**bounds)


def test_a_bound_reads_as_it_judges() -> None:
    assert (str(Must(least=0.9)), str(Must(most=3))) == ("≥ 0.9", "≤ 3")


def test_a_size_is_scaled_down_to_its_least() -> None:
    assert [Wish(scale=scale).scaled(1_000, least=50) for scale in (1, 0.1, 0.01)] == [1_000, 100, 50]


def test_two_sides_take_turns_at_being_first() -> None:
    place = Place("", Path(), Wish(rounds=3), None, Progress(disable=True))
    called: list[str] = []

    def side(name: str, value: float) -> float:
        called.append(name)
        return value + len(called)

    samples = place.in_turns("test", lambda: side("ours", 10), lambda: side("bare", 20))
    assert called == ["ours", "bare", "bare", "ours", "ours", "bare"]
    assert samples == ([11, 14, 15], [22, 23, 26])


def test_a_side_that_is_missing_has_no_sample() -> None:
    place = Place("", Path(), Wish(rounds=2), None, Progress(disable=True))
    assert place.in_turns("test", None, lambda: 1.0) == ([], [1.0, 1.0])


def test_every_figure_is_in_the_help() -> None:
    words = re.split(r"\W+", CliRunner().invoke(main, ["bench", "--help"]).output)
    assert set(program.FIGURES) <= set(words)


def test_pss_is_read_from_a_rollup() -> None:
    assert pss_mb("00400000-7ff 0 [rollup]\nRss:   5000 kB\nPss:   1000 kB\nPss_Dirty: 7 kB\n") == 1.024
    with pytest.raises(ValueError, match="Pss"):
        pss_mb("Rss: 5 kB\n")


def test_marks_come_back_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "marks"
    file.touch()
    monkeypatch.setenv(marks.WHERE, str(file))
    given_marks = [marks.Mark(1, 0.25, 0.5), marks.Mark(-7, 1e6, 2e6)]
    for mark in given_marks:
        marks.leave(mark)
    assert marks.read(file) == given_marks


def test_marks_come_through_a_pipe_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = marks.Pipe(tmp_path / "pipe")
    monkeypatch.setenv(marks.WHERE, str(pipe.path))
    marks.leave(marks.Mark(1, 0.0, 1.0))
    marks.leave(marks.Mark(2, 0.0, 1.0))
    assert pipe.next(5) == marks.Mark(1, 0.0, 1.0)
    assert pipe.next(5) == marks.Mark(2, 0.0, 1.0)
    assert pipe.next(0) is None
    pipe.close()


def results(*lines: Line) -> dict[str, Any]:
    """A document of the bench."""
    server = {"server_version": "15.1", "fsync": "on", "synchronous_commit": "on", "shared_buffers": "163848kB"}
    machine = {"cores": 2, "cpu": "CPU", "python": "3.11", "postgresql": server}
    document = {"machine": machine, "rounds": 5, "measured_at": "2026-01-31T00:00:00+00:00"}
    written: dict[str, Any] = json.loads(json.dumps(document | {"lines": [line.document() for line in lines]}))
    return written


def test_bars_are_as_long_as_their_values() -> None:
    image = plot.bars("A < B & C", ["ours", "bare"], [("first", [50.0, 100.0]), ("second", [25.0, None])], "jobs/s")
    rects = [node for node in ElementTree.fromstring(image).iter() if node.tag.endswith("rect")]
    lengths = [float(rect.attrib["width"]) for rect in rects if rect.attrib.get("height") == "12"]
    assert lengths == [200.0, 400.0, 100.0]
    assert "A &lt; B &amp; C" in image


def test_a_plot_of_nothing_is_an_empty_one() -> None:
    ElementTree.fromstring(plot.bars("empty", ["ours"], [], "ms"))


def test_the_page_gets_the_table_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    file = tmp_path / "results.json"
    lines = [
        Line("drain", "one by one | two", "jobs/s", [900.0, 1000.0], [1000.0, 1000.0], Must(least=0.9)),
        Line.skipped("enqueue", "bulk", "why"),
    ]
    file.write_text(json.dumps(results(*lines)))
    for _ in range(2):  # a second run changes nothing
        assert plot.main([str(file), str(tmp_path)]) == 0
        text = page.read_text()
    assert text.startswith("before\n<!-- results -->\n")
    assert text.endswith("\n<!-- /results -->\nafter\n")
    assert "| drain | one by one \\| two | 950 | 1,000 | jobs/s | 0.95 | ≥ 0.9 ✓ |  |" in text
    assert "skipped: why" in text
    assert "old" not in text
    assert {path.name for path in tmp_path.glob("*.svg")} == {"performance-drain.svg"}


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_results_that_are_none_are_refused(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "performance.md").write_text("<!-- results -->\n<!-- /results -->\n")
    (tmp_path / "results.json").write_text(content)
    assert plot.main([str(tmp_path / "results.json"), str(tmp_path)]) == 1
    assert "should be the output of `dataloader bench --json`" in capsys.readouterr().err


def test_a_page_without_marks_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "performance.md"
    page.write_text("text")
    (tmp_path / "results.json").write_text(json.dumps(results()))
    assert plot.main([str(tmp_path / "results.json"), str(tmp_path)]) == 1
    assert "<!-- results -->" in capsys.readouterr().err
    assert page.read_text() == "text"
