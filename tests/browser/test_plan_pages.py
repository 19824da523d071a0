"""The page of a backfill in a browser."""

from collections.abc import Iterator
from typing import Any

import pytest
from browsing import Placed, Visitor, placed
from playwright.sync_api import expect

from dataloader.queue.plans import backfills, new_backfill

DAYS = {"since": "2026-01-01", "until": "2026-05-31", "step": "day"}


@pytest.fixture(scope="module")
def scene(chromium: Any, lend: Any) -> Iterator[Placed]:
    """A backfill of which some partitions have ended, and one runs."""
    with placed(lend) as scene:
        new = {"name": "rates", "task": "load", "queue": "fills", "max_running": 3, **DAYS}
        backfills.add(scene.conn, new_backfill.checked(new), "me")
        assert backfills.tick(scene.conn)
        for verb in ("succeed", "fail", "succeed"):
            scene.worker.finish(scene.worker.take("fills"), verb, error="no answer")
        scene.worker.take("fills")
        yield scene


def test_a_cell_of_the_calendar_leads_to_the_job_of_its_day(visitor: Visitor) -> None:
    page = visitor.go("/backfills/rates")
    for status, count in (("succeeded", 2), ("failed", 1), ("running", 1), ("planned", 51)):
        expect(page.locator(f".calendar .cell.{status}")).to_have_count(count)
    page.locator(".calendar .cell.failed").click()
    expect(page.locator("#error")).to_contain_text("no answer")
    visitor.go("/backfills/rates")
    visitor.press("Pause")
    expect(page.locator("#live .callout")).to_contain_text("It makes and starts no jobs")
    visitor.press("Resume")
    expect(page.locator("#live .callout.warn")).to_have_count(0)
