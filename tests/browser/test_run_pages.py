"""The pages about runs in a browser: tasks, one task, a queue's figures, the timeline, what happened; hostile names."""

import json

import pytest
from browsing import Visitor
from playwright.sync_api import expect
from scenes import Scene


@pytest.mark.parametrize("path", ["/tasks", "/tasks/load.customers", "/timeline", "/activity", "/queues/load.orders"])
def test_a_page_of_runs_is_for_everybody(visitor: Visitor, path: str) -> None:
    assert visitor.faults_for_somebody(path) == []


def test_a_task_leads_to_its_page_its_queue_and_its_jobs(visitor: Visitor) -> None:
    page = visitor.go("/tasks")
    page.get_by_role("link", name="load.customers").first.click()
    expect(page.locator("h1")).to_have_text("load.customers")
    expect(page.locator(".tiles")).to_contain_text("Failure rate")
    expect(page.locator("svg.chart rect").first).to_be_attached()
    page.get_by_text("As a table").first.click()
    expect(page.get_by_role("table", name="Runs over time")).to_be_visible()
    page.get_by_role("link", name="7d", exact=True).click()
    expect(page.locator("[aria-current=true]")).to_have_text("7d")
    page.get_by_role("link", name="load.orders").first.click()
    expect(page.locator("h1")).to_have_text("load.orders")
    expect(page.get_by_role("table", name="Percentiles")).to_be_visible()


@pytest.mark.parametrize("width", [700, 1440])
def test_the_names_of_workers_stand_beside_their_lanes(visitor: Visitor, width: int) -> None:
    page = visitor.go("/timeline")
    page.set_viewport_size({"width": width, "height": 900})
    ends = """() => ['.lanes li:first-child', '.lanes li:last-child', '.lanes svg'].map(
                 part => document.querySelector(part).getBoundingClientRect()).map(box => [box.top, box.bottom])"""
    (first, _), (_, last), (top, bottom) = page.evaluate(ends)
    assert abs(first - top) < 1
    assert abs(last - bottom) < 1


def test_stacks_and_errors_of_a_log_have_the_width_of_their_cards(visitor: Visitor, scene: Scene) -> None:
    scene.conn.execute(
        "INSERT INTO dl_job_events (job_id, queue, kind, payload) SELECT job_id, queue, 'stuck', %s FROM dl_jobs"
        " WHERE job_id = %s",
        (json.dumps({"silent_sec": 60, "stacks": "x" * 60}), scene.running),
    )
    scene.conn.execute(
        "INSERT INTO dl_job_logs SELECT job_id, claims, attempt, 1, now(), 'error', 'log', repeat('word ', 100)"
        " FROM dl_jobs WHERE job_id = %s",
        (scene.running,),
    )
    page = visitor.go(f"/jobs/{scene.running}")
    page.set_viewport_size({"width": 1440, "height": 900})
    page.get_by_text("Where its threads hang").click()
    for part, card in ((".timeline pre", ".timeline"), (".log li.error", ".log")):
        inner, outer = page.locator(part).bounding_box(), page.locator(card).bounding_box()
        assert inner
        assert outer
        assert outer["width"] * 0.9 < inner["width"] <= outer["width"]


def test_a_queue_gets_a_limit_on_its_page(visitor: Visitor, scene: Scene) -> None:
    page = visitor.go("/queues/load.orders")
    page.get_by_text("Change the limit of this queue").click()
    page.get_by_label("Queued jobs, at most").fill("1234")
    page.keyboard.press("Enter")
    expect(page.locator("#flash")).to_contain_text("takes new jobs until 1,234 are queued.")
    assert scene.conn.execute("SELECT max_length FROM dl_queues WHERE queue = 'load.orders'").fetchone() == (1234,)
    expect(page.locator("#settings")).to_contain_text("at most 1,234 queued jobs")
