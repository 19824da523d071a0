"""What `dataloader capacity` says of costs that are known: its tables, its JSON, and whose load it takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from test_capacity import COSTS

from dataloader.bench import curves, forecast
from dataloader.bench.capacity import Compared, Habits, Load, Primary
from dataloader.bench.forecast import EXAMPLE, Wish
from dataloader.bench.sheets import Forecast, read, read_costs
from dataloader.cli.capacity import capacity

HISTORY = Load(5_000, 12.5, 2.5)


def told(load: Load = EXAMPLE, beside: Sequence[Compared] = ()) -> Forecast:
    """A forecast for the costs of the model's tests."""
    return Forecast(load, Habits(), COSTS, Primary(2, 190), list(beside))


def text(of: Forecast) -> str:
    """As a terminal shows it."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(forecast._text(of))
    return capture.get()


def test_the_tables_name_what_breaks_first() -> None:
    shown = text(told(Load(20_000, 60)))
    assert "breaks first" in shown
    assert "sessions" in shown
    assert "1,000x" in shown


def test_a_comparison_is_shown_where_there_is_one() -> None:
    shown = text(told(beside=[Compared("one by one, 4 workers", 110, 100, "jobs/s")]))
    assert "+10%" in shown
    assert "Predicted beside measured" not in text(told())


def test_costs_can_be_given_back() -> None:
    document = told().document()
    assert read_costs(document) == COSTS
    assert read(document) == told()
    assert [each["times"] for each in json.loads(document)["days"]] == [1, 10, 100, 1_000]
    assert [each["cores"] for each in json.loads(document)["bears"]] == [2, 8, 32]


@pytest.mark.parametrize("wrong", ["", "[]", "{}", '{"costs": {}}', '{"costs": {"ways": {"one by one": 1}}}', "\x00"])
def test_another_file_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="dataloader capacity --json FILE"):
        read_costs(wrong)


@pytest.mark.parametrize(
    ("cost", "value", "said"),
    [
        ("trigger_sec", -5, "costs.trigger_sec should be a number of 0 or more, not -5"),
        ("trigger_sec", "1", "costs.trigger_sec should be a number of 0 or more, not 1"),
        ("beat_bytes", float("nan"), "costs.beat_bytes should be a number of 0 or more, not nan"),
        ("arrival_sec", 0, "costs.arrival_sec should be above 0"),
        ("arrival_sec", 10**400, "dataloader capacity --json FILE"),
    ],
)
def test_costs_that_no_server_has_are_refused(cost: str, value: Any, said: str) -> None:
    document = json.loads(told().document())
    document["costs"][cost] = value
    with pytest.raises(ValueError, match=said):
        read_costs(json.dumps(document))
    document["costs"][cost] = asdict(COSTS)[cost]
    document["costs"]["ways"]["one by one"]["jobs_a_sec"]["2"] = 0
    with pytest.raises(ValueError, match=r"costs\.ways\.one by one\.jobs_a_sec\.2 should be above 0"):
        read_costs(json.dumps(document))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--jobs-per-day=nan", "'nan' should be a finite number"),
        ("--peak=inf", "'inf' should be a finite number"),
        ("--jobs-per-day=200,000", "'200,000' should be a number such as 1500 or 0.5"),
        ("--jobs-per-day=1e300", "is not in the range 0<x<=1000000000.0"),
        ("--run-sec=-1", "is not in the range 0<=x<=1000000.0"),
        ("--retention-days=1e400", "'1e400' should be a finite number"),
    ],
)
def test_a_number_that_is_none_is_refused_before_anything_is_measured(given: str, said: str) -> None:
    answer = CliRunner().invoke(capacity, [given])
    assert (answer.exit_code, answer.exception and type(answer.exception)) == (2, SystemExit)
    assert said in answer.output


def test_what_is_said_goes_before_the_history() -> None:
    assert Wish().load(None) == EXAMPLE
    assert Wish().load(HISTORY) == HISTORY
    assert Wish(jobs_a_day=9, run_sec=0.0, peak=1, in_batches=True).load(HISTORY) == Load(9, 0.0, 1, True)


def test_a_server_elsewhere_needs_its_processors() -> None:
    with pytest.raises(forecast.bench.BenchError, match="--cores"):
        forecast._cores_here(False)


def test_the_page_and_the_curves_come_from_the_document(tmp_path: Path) -> None:
    document, page = tmp_path / "forecast.json", tmp_path / "scaling.md"
    document.write_text(told().document())
    page.write_text("# Scaling\n\n<!-- results -->\nold\n<!-- /results -->\nend\n")
    assert curves.main([str(document), str(tmp_path)]) == 0
    assert "old" not in page.read_text()
    assert "| breaks first |" in page.read_text()
    assert page.read_text().endswith("<!-- /results -->\nend\n")
    assert (tmp_path / "scaling.svg").read_text().count("<circle") == 3 * len(curves.WORKERS)


def test_a_document_of_another_kind_changes_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, page = tmp_path / "forecast.json", tmp_path / "scaling.md"
    document.write_text("{}")
    page.write_text("as it was")
    assert curves.main([str(document), str(tmp_path)]) == 1
    assert "dataloader capacity --json" in capsys.readouterr().err
    assert page.read_text() == "as it was"


def test_the_law_of_the_curves_is_near_the_simulation() -> None:
    for points in curves.curves(told()).values():
        for _, law, simulated in points:
            assert law == pytest.approx(simulated, rel=0.05)
