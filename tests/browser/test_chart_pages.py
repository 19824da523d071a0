"""The chart, times and zones, copying and the first steps, in a browser."""

import re
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from browsing import Visitor, served
from playwright.sync_api import Page, expect
from scenes import Scene

LONG = """INSERT INTO dl_pace_long (at, queue, processed, failed)
SELECT date_bin('5 min', now() - make_interval(hours => hours), '2000-01-01'), 'q', 1000 + hours, hours % 2
  FROM unnest(ARRAY[2, 5, 20, 100]) hours"""
ALLOWS = ["clipboard-read", "clipboard-write"]


@pytest.fixture(scope="module")
def address(chromium: Any, lend: Any) -> Any:
    """A dashboard with throughput of some days, and no job; times of the installation are in Tokyo."""
    with lend() as dsn, served(dsn, timezone="Asia/Tokyo") as address, psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(LONG)
        conn.execute(
            "INSERT INTO dl_pace (at, queue, processed, failed)"
            " SELECT date_bin('10 s', now() - interval '10 min', '2000-01-01'), 'q', 1234567, 3"
        )
        yield address


def point(page: Page, share: float, lane: str = "processed") -> str:
    """Point at a place of the chart; what the page says of it."""
    over = page.locator(f"#{lane}-lane .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] / 2)
    expect(page.locator("#pace-point")).not_to_contain_text("Point at the chart")
    return page.locator("#pace-point").inner_text()


def test_the_chart_says_the_exact_figures_of_the_step_that_is_pointed_at(
    visit: Callable[[str], Visitor], address: str
) -> None:
    with visit(address) as visitor:
        page = visitor.go("/")
        page.locator("#failed-lane canvas").wait_for()
        shares = range(600, 860, 8)  # the step was 10 minutes old when the first test of this module began
        for lane in ("processed", "failed"):
            labels = [point(page, share / 1000, lane) for share in shares]
            words = r"\d\d:\d\d to \d\d:\d\d: 1,234,567 ended, 3 of them failed"
            assert any(re.fullmatch(words, each) for each in labels), labels
        assert "to now: " in point(page, 0.99)


@pytest.mark.parametrize(("name", "bars", "rows"), [("1h", 60, 2), ("7d", 168, 5)])
def test_each_range_is_in_the_address_and_its_figures_in_a_table(
    visit: Callable[[str], Visitor], address: str, name: str, bars: int, rows: int
) -> None:
    with visit(address) as visitor:
        page = visitor.go("/")
        page.get_by_role("link", name=name, exact=True).click()
        expect(page.locator(".ranges [aria-current]")).to_have_text(name)
        assert page.url.endswith(f"range={name}")
        assert page.evaluate("JSON.parse(document.getElementById('pace-data').dataset.columns)[0].length") == bars
        page.get_by_text("The figures as a table").click()
        table = page.get_by_role("table", name="Throughput")
        expect(table.locator("tbody tr")).to_have_count(rows)
        expect(table.locator("tbody tr").first).to_contain_text("so far")
        assert visitor.grave_faults() == []


def test_times_are_relative_stay_true_and_have_the_instant_beside_them(visitor: Visitor, scene: Scene) -> None:
    job_id = scene.job(queue="ages")
    scene.conn.execute("UPDATE dl_jobs SET created_at = now() - interval '3 min' WHERE job_id = %s", (job_id,))
    page = visitor.go("/jobs?queue=ages")
    moment = page.locator("tbody time.ago")
    expect(moment).to_have_text("3 min ago")
    assert str(moment.get_attribute("title")).endswith("UTC")
    page.evaluate("Date.now = ((real) => () => real() + 7_200_000)(Date.now)")
    expect(moment).to_have_text("2 h ago")  # without a request for it
    page.evaluate("htmx.trigger('#live', 'refresh')")
    expect(moment).to_have_text("2 h ago")
    moment.focus()
    assert page.evaluate("e => getComputedStyle(e, '::after').content", moment.element_handle()).endswith('UTC"')


def test_the_zone_is_chosen_once_for_all_pages(visit: Callable[[str], Visitor], address: str) -> None:
    with visit(address) as visitor:
        page = visitor.go("/?range=1h")
        zone = page.get_by_label("Times are")
        expect(zone.locator("option:checked")).to_have_text("Asia/Tokyo (this installation)")
        for choice, name in (
            ("utc", "UTC"),
            ("browser", page.evaluate("Intl.DateTimeFormat().resolvedOptions().timeZone")),
        ):
            with page.expect_navigation():
                zone.select_option(choice)
            visitor.go("/jobs?since=2026-01-31T12:00:00Z")
            assert page.locator("html").get_attribute("data-zone") == name
        visitor.go("/jobs?since=2026-01-31T12:00:00")
        expect(page.locator("[name=since]")).to_have_value("2026-01-31T12:00")
        with page.expect_navigation():
            zone.select_option("server")
        expect(page.locator("html")).to_have_attribute("data-zone", "Asia/Tokyo")
        visitor.go("/jobs?since=2026-01-31T12:00:00Z")
        expect(page.locator("[name=since]")).to_have_value("2026-01-31T21:00")


def test_ids_keys_and_arguments_are_copied_also_without_a_clipboard(visitor: Visitor, scene: Scene) -> None:
    visitor.context.grant_permissions(ALLOWS)
    page = visitor.go(f"/jobs/{scene.running}")
    for what, text in (("the id", str(scene.running)), ("the key", "orders"), ("the arguments", '"region": "north"')):
        page.get_by_role("button", name=f"Copy {what}", exact=True).click()
        expect(page.locator("#flash")).to_contain_text(f"Copied {what}.")
        assert text in page.evaluate("navigator.clipboard.readText()")
    # A browser gives pages a clipboard with https alone.
    page.evaluate("() => { window.kept = navigator.clipboard; }")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined, configurable: true})")
    page.get_by_role("button", name="Copy the id", exact=True).click()
    expect(page.locator("#flash")).to_contain_text("Copied the id.")
    assert page.evaluate("window.kept.readText()") == str(scene.running)


def test_a_running_job_says_what_is_left_and_what_it_uses(visitor: Visitor, scene: Scene) -> None:
    scene.show_workers()
    page = visitor.go(f"/jobs/{scene.running}")
    expect(page.locator("#used")).to_contain_text("It uses 312 MB of memory and 97 % of one core")
    expect(page.locator("#left")).to_contain_text(re.compile(r"About .+ left, by its progress so far\."))
    facts = page.locator("#facts dt")
    assert facts.all_inner_texts() == ["State", "Task", "Key", "Attempt", "Started", "Worker"]
    expect(page.get_by_text("Consumer group")).to_be_hidden()
    page.get_by_text("All other fields").click()
    expect(page.get_by_text("Consumer group")).to_be_visible()


def test_an_empty_farm_says_what_to_do_next(visit: Callable[[str], Visitor], address: str) -> None:
    with visit(address) as visitor:
        visitor.context.grant_permissions(ALLOWS)
        page = visitor.go("/")
        assert visitor.grave_faults() == []
        steps = page.locator("#first-steps")
        expect(steps).to_contain_text("Start workers")
        steps.get_by_role("button", name="Copy the command").nth(2).click()
        expect(page.locator("#flash")).to_contain_text("Copied the command.")
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied == "dataloader trigger noop --wait"
