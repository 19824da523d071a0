"""Pages of plans in a browser: schedules, backfills, limits, webhooks, and a job with its family."""

from collections.abc import Iterator
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from browsing import Visitor, served
from hands import Worker, enqueue
from playwright.sync_api import expect

from dataloader.queue import db
from dataloader.queue.plans import backfills, new_backfill, new_schedule, schedules
from dataloader.queue.reports import webhooks

DAYS = {"since": "2026-01-01", "until": "2026-05-31", "step": "day"}


class Plans(NamedTuple):
    """A database with a schedule, a backfill, a webhook and jobs with parents, and the dashboard on it."""

    conn: db.Connection
    address: str
    child: UUID

    @property
    def paths(self) -> list[str]:
        return ["/schedules", "/backfills", "/backfills/rates", "/limits", "/webhooks", f"/jobs/{self.child}"]


@pytest.fixture(scope="module")
def scene(chromium: Any, lend: Any) -> Iterator[Plans]:
    with lend() as dsn, served(dsn) as address, db.connect(dsn, name="scene", schema="public") as conn:
        schedules.add(conn, new_schedule.checked({"name": "nightly", "task": "load", "cron": "0 3 * * *"}, "UTC"), "me")
        webhooks.put(conn, "ops", "https://chat.example/hook", "me", kinds=["dead"])
        add_backfill(conn, "rates", max_running=3, **DAYS)
        worker = Worker(dsn, "host:1:boot")
        for verb in ("succeed", "fail", "succeed"):
            worker.finish(worker.take("fills"), verb, error="no answer")
        worker.take("fills")
        parents = [enqueue(conn, task=f"part-{number}") for number in range(2)]
        yield Plans(conn, address, enqueue(conn, task="whole", depends_on=parents))
        worker.conn.close()


def add_backfill(conn: db.Connection, name: str, **fields: Any) -> None:
    """A backfill, and the jobs of its first bunch; those of others stay as they are."""
    conn.execute("UPDATE dl_backfills SET next_at = NULL")
    new = new_backfill.checked({"name": name, "task": "load", "queue": "fills", **fields})
    backfills.add(conn, new, "me")
    assert backfills.tick(conn)


@pytest.mark.parametrize("number", range(6))
def test_each_page_of_plans_is_for_everybody(visitor: Visitor, scene: Plans, number: int) -> None:
    assert visitor.faults_for_somebody(scene.paths[number]) == []


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
