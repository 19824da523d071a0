"""The page of a backfill in a browser."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from browsing import Visitor, served
from hands import Worker
from playwright.sync_api import expect

from dataloader.queue import db
from dataloader.queue.plans import backfills, new_backfill

DAYS = {"since": "2026-01-01", "until": "2026-05-31", "step": "day"}


class Plans(NamedTuple):
    """A database with a backfill, and the dashboard on it."""

    conn: db.Connection
    address: str


@pytest.fixture(scope="module")
def scene(chromium: Any, lend: Any) -> Iterator[Plans]:
    with lend() as dsn, served(dsn) as address, db.connect(dsn, name="scene", schema="public") as conn:
        new = {"name": "rates", "task": "load", "queue": "fills", "max_running": 3, **DAYS}
        backfills.add(conn, new_backfill.checked(new), "me")
        assert backfills.tick(conn)
        worker = Worker(dsn, "host:1:boot")
        for verb in ("succeed", "fail", "succeed"):
            worker.finish(worker.take("fills"), verb, error="no answer")
        worker.take("fills")
        yield Plans(conn, address)
        worker.conn.close()


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
