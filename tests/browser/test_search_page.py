"""The search box, its keys, the ticks and the orders to many jobs, in a browser."""

from typing import Any

import pytest
from browsing import Visitor
from playwright.sync_api import expect
from scenes import Scene

from dataloader.queue.reports import bulk


def dead(scene: Scene, queue: str, number: int) -> list[Any]:
    found = [scene.job(queue=queue) for _ in range(number)]
    scene.conn.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now() WHERE job_id = ANY (%s)", (found,))
    return found


def test_the_keys_move_tick_open_and_explain(visitor: Visitor, scene: Scene) -> None:
    dead(scene, "by-keys", 3)
    page = visitor.go("/jobs?queue=by-keys")
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("jjx?/")  # typed, and no key of the page
    expect(page.locator("#search")).to_have_value("jjx?/")
    expect(page.locator("dialog[open]")).to_have_count(0)
    page.keyboard.press("Escape")
    links = page.locator("#live tr[id^=job-] a.id")
    for key, at in (("j", 0), ("j", 1), ("j", 2), ("j", 2), ("k", 1)):
        page.keyboard.press(key)
        expect(links.nth(at)).to_be_focused()
    page.keyboard.press("x")
    expect(page.locator("#ticked")).to_have_text("1 selected")
    expect(page.locator("#live input[name=job_id]").nth(1)).to_be_checked()
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    assert not visitor.grave_faults()
    page.keyboard.press("Escape")
    expect(links.nth(1)).to_be_focused()
    address = links.nth(1).get_attribute("href")
    scene.job(queue="by-keys")
    page.evaluate("refresh()")  # it keeps ticks and focus
    expect(page.locator("#live input[name=job_id]")).to_have_count(4)
    expect(page.locator("#live input[name=job_id]:checked")).to_have_count(1)
    expect(page.locator("#ticked")).to_have_text("1 selected")
    expect(page.locator(f"#live a.id[href='{address}']")).to_be_focused()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**{address}")
    page.keyboard.press("/")
    page.wait_for_url("**/jobs")
    expect(page.get_by_role("button", name="Select all that match")).to_be_disabled()  # without a filter


def test_the_box_suggests_and_its_address_is_short(visitor: Visitor, scene: Scene) -> None:
    scene.job(task="load.suggested", lock_key="suggested key")
    page = visitor.go("/jobs")
    page.locator("#search").press_sequentially("suggested", delay=5)
    expect(page.locator("#suggestions option[value='key:\"suggested key\"']")).to_have_count(1)
    page.keyboard.press("Enter")
    page.wait_for_url("**/jobs?q=suggested*")
    assert "=&" not in page.url
    assert not page.url.endswith("=")
    expect(page.locator("#live tr[id^=job-]")).to_have_count(1)
    expect(page.locator(".tally")).to_contain_text("1 ready")
    page.locator(".tally a", has_text="failed").click()
    expect(page.locator("#live")).to_contain_text("No job fits the filters.")


def test_ticked_jobs_are_previewed_and_changed_alone(visitor: Visitor, scene: Scene) -> None:
    jobs = dead(scene, "ticked", 3)
    waits = scene.job(queue="ticked")
    page = visitor.go("/jobs?queue=ticked")
    for job_id in (jobs[0], waits):
        page.locator(f"input[value='{job_id}']").check()
    page.locator("[data-order=requeue]").click()
    dialog = page.locator("#order")
    expect(dialog).to_contain_text("Requeue 1 job?")
    expect(dialog).to_contain_text("1 ready: each has not ended: cancel it first.")
    assert not visitor.grave_faults()
    dialog.get_by_role("button", name="Go back").click()
    assert scene.status(jobs[0]) == "failed"
    page.locator("[data-order=requeue]").click()
    dialog.get_by_role("button", name="Requeue 1 job").click()
    expect(dialog).to_contain_text("1 job is queued again.")
    assert [scene.status(job_id) for job_id in (*jobs, waits)] == ["queued", "failed", "failed", "queued"]
    dialog.get_by_role("button", name="Close").click()
    expect(page.locator("#ticked")).to_have_text("None is selected")


def test_all_that_match_are_changed_also_on_other_pages(
    visitor: Visitor, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = dead(scene, "many", 60)
    others = dead(scene, "many-others", 1)
    monkeypatch.setattr("dataloader.api.dashboard.actions.ALL_SEC", 0.0)  # an answer for each step
    monkeypatch.setattr(bulk.change, "__defaults__", (None, 25))
    page = visitor.go("/jobs?q=queue:many")
    page.get_by_role("button", name="Select all that match").click()
    expect(page.locator("#ticked")).to_have_text("All that match are selected: 60")
    page.locator("[data-order=delete]").click()
    page.locator("#order").get_by_role("button", name="Delete 60 jobs").click()
    expect(page.locator("#order")).to_contain_text("60 jobs are deleted, with their journals.")
    left = scene.conn.execute("SELECT count(*) FROM dl_jobs WHERE job_id = ANY (%s)", (jobs + others,)).fetchone()
    assert left == (1,)
    page.locator("#order").get_by_role("button", name="Close").click()
    expect(page.locator("#live")).to_contain_text("No job fits the filters.")
