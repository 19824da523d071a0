"""The page of errors in a browser: groups, their buttons, their jobs, notes, hostile texts."""

from collections.abc import Iterator
from typing import Any

import pytest
from browsing import Placed, Visitor, placed
from hands import row
from playwright.sync_api import expect

BOOM = "ValueError at load.py:step: row # is wrong"
SECRET = "canary-7f3b-hunter2"


@pytest.fixture(scope="module")
def scene(chromium: Any, lend: Any) -> Iterator[Placed]:
    with placed(lend) as scene:
        for _ in range(3):
            scene.ended("fail", error_group=BOOM, task="load", error=f"password={SECRET}")
        yield scene


def test_a_group_tells_no_secret_and_leads_to_its_jobs(visitor: Visitor) -> None:
    page = visitor.go("/errors?queue=q")
    expect(page.locator(".error-name")).to_have_text(BOOM)
    assert SECRET not in page.content()
    page.get_by_role("link", name="3 dead").click()
    expect(page.locator("tbody tr")).to_have_count(3)


def test_a_note_is_written_for_everybody(visitor: Visitor) -> None:
    page = visitor.go("/errors?task=load")
    page.get_by_text("Write a note").click()
    page.get_by_label("Note (leave empty to delete)").fill("known, see the wiki")
    page.keyboard.press("Enter")
    expect(page.locator("#flash")).to_contain_text("the note is written.")
    expect(page.locator("dd.note")).to_contain_text("known, see the wiki anonymous from 127.0.0.1")


def test_the_buttons_change_the_jobs_of_their_group_alone(visitor: Visitor, scene: Placed) -> None:
    again, gone, other = (scene.ended("fail", "two", group) for group in ("again", "gone", "other"))
    page = visitor.go("/errors?queue=two")
    for group, label, outcome in (("again", "Requeue these", "queued again"), ("gone", "Delete these", "deleted")):
        card = page.locator(".error-group").filter(has=page.get_by_text(group, exact=True))
        card.get_by_role("button", name=label).click()
        expect(page.locator("#question")).to_contain_text("the one dead job of this group")
        page.locator("dialog[open]").get_by_role("button", name=label).click()
        expect(page.locator("#flash")).to_contain_text(f"1 job {outcome}.")
        expect(card).to_have_count(0)
    assert [row(scene.conn, job_id)["status"] for job_id in (again, other)] == ["queued", "failed"]
    found = scene.conn.execute("SELECT count(*) FROM dl_jobs WHERE job_id = %s", (gone,)).fetchone()
    assert found == (0,)
