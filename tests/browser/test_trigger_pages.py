"""The form that triggers a job, and the one that runs a job again, in a browser."""

from datetime import date, datetime
from typing import Literal
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from browsing import Visitor
from hands import row
from playwright.sync_api import Page, expect
from pydantic import BaseModel, Field
from scenes import SECRET, Scene

from dataloader.config import machine_zone
from dataloader.queue import args_schema, operations


class Load(BaseModel):
    day: date
    at: datetime | None = None
    limit: int = Field(default=10, ge=1, description="rows of a part")
    mode: Literal["full", "delta"] = "full"
    is_dry: bool = False
    password: str | None = None
    tags: list[str] = []


@pytest.fixture(autouse=True)
def declared(scene: Scene) -> None:
    schemas = {"load.typed": {"args_schema": args_schema.written(Load.model_json_schema())}, "load.free": {}}
    operations.publish_tasks(scene.conn, schemas)


def led_to(page: Page) -> UUID:
    page.wait_for_url(lambda url: "/jobs/" in url and "again" not in url)
    return UUID(page.url.rpartition("/")[2])


def test_a_form_shows_faults_at_their_fields_and_then_adds_the_job(visitor: Visitor, scene: Scene) -> None:
    visitor.expected = {"400"}
    page = visitor.go("/jobs")
    page.get_by_role("link", name="Trigger a job").click()
    page.get_by_role("link", name="load.typed").click()
    expect(page.get_by_label("limit")).to_have_value("10")
    assert not visitor.grave_faults()
    page.get_by_label("day").fill("2026-01-31")
    page.get_by_label("password").fill(SECRET)
    page.get_by_label("tags").fill('["a", 1]')
    page.get_by_role("button", name="Trigger").click()
    expect(page.locator("#fault-7")).to_have_text("tags.1 should be a text")
    expect(page.get_by_label("tags")).to_be_focused()
    expect(page.get_by_label("password")).to_have_value(SECRET)  # nothing has to be written twice
    page.get_by_label("tags").fill('["a"]')
    page.get_by_label("at").fill("2026-01-31T06:30:00")
    page.get_by_label("is_dry").select_option("true")
    page.get_by_role("button", name="Trigger").click()
    added = row(scene.conn, led_to(page))
    at = datetime(2026, 1, 31, 6, 30, tzinfo=ZoneInfo(machine_zone())).isoformat()  # of the page, which names it
    assert added["args"] == {
        **{"day": "2026-01-31", "at": at, "limit": 10, "mode": "full"},
        **{"is_dry": True, "password": SECRET, "tags": ["a"]},
    }
    assert (added["queue"], added["lock_key"]) == ("etl.default", "load.typed")
