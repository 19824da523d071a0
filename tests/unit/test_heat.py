"""The heat map of a backfill: which cell stands where."""

from __future__ import annotations

from typing import Any

from dataloader.api.dashboard import heat
from dataloader.queue.plans import partitions


def rows(*names: str) -> list[dict[str, Any]]:
    return [{"partition": name, "status": "queued"} for name in names]


def test_days_are_a_calendar_a_year_whose_columns_are_weeks() -> None:
    days = rows(*partitions.partitions_between("2019-12-30", "2020-01-02", "day"))
    first, second = heat.blocks(days)
    assert (first.label, first.is_calendar, second.label) == ("2019", True, "2020")
    assert first.cells[:2] == [None, None], "1 January 2019 is a Tuesday: one empty cell, and no partition"
    assert [cell["partition"] for cell in first.cells if cell] == ["2019-12-30", "2019-12-31"]
    assert first.cells.index(days[0]) % 7 == 0, "a Monday"
    assert second.cells.index(days[2]) == 2, "a Wednesday"


def test_other_partitions_flow_by_year_or_in_one_block() -> None:
    hours = rows(*partitions.partitions_between("2019-12-31T12:00", "2020-01-01", "6 hours"))
    assert [(block.label, block.is_calendar, len(block.cells)) for block in heat.blocks(hours)] == [
        ("2019", False, 2),
        ("2020", False, 1),
    ]
    months = rows(*partitions.partitions_between("2019-01", "2019-12", "month"))
    assert [(block.is_calendar, len(block.cells)) for block in heat.blocks(months)] == [(False, 12)]
    assert [(block.label, len(block.cells)) for block in heat.blocks(rows("moscow", "2019-01-01"))] == [("", 2)]
    assert heat.blocks([]) == []
