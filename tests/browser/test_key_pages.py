"""Ordered queues in a browser: pages of keys, whatever they are called, and the form for how a queue treats them."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from browsing import Placed, Visitor, placed
from hands import enqueue
from playwright.sync_api import expect

from dataloader.queue import operations


@pytest.fixture(scope="module")
def scene(chromium: Any, lend: Any) -> Iterator[Placed]:
    """An ordered queue with a failing head and a dead job, and the dashboard on it."""
    with placed(lend) as scene:
        operations.set_order(scene.conn, "orders", "test", ordered=True)
        for verb in ("fail", "retry"):
            scene.ended(verb, "orders", lock_key="order-7", args={"version": 1, "state": "paid"})
        for number in range(60):
            key = "order-7" if number % 2 else f"order-{number}"
            enqueue(scene.conn, queue="orders", lock_key=key, args={"n": number})
        yield scene


def test_from_a_queue_to_a_key_and_to_its_jobs(visitor: Visitor) -> None:
    page = visitor.go("/queues/orders")
    expect(page.locator("[aria-label=Keys] tbody tr")).to_have_count(10)
    page.get_by_role("link", name="All keys").click()
    page.locator("#live").get_by_role("link", name="order-7", exact=True).first.click()
    expect(page.locator("h1")).to_have_text("order-7")
    expect(page.locator("#waiting")).to_contain_text(re.compile(r"Its time has not come: it is due in \d min"))
    rows = page.locator("[aria-label=Queued] tbody tr")
    expect(rows).to_have_count(31)
    expect(rows.first).to_contain_text("state paid · version 1")
    expect(rows.first).to_contain_text("ConnectionError: no answer")
    expect(page.locator("[aria-label=Dead] tbody tr")).to_have_count(1)
    assert visitor.refreshed().endswith("/key?queue=orders&lock_key=order-7")
    page.get_by_role("link", name="Go to the first job").click()
    page.locator(".facts").get_by_role("link", name="order-7").click()
    expect(page.locator("h1")).to_have_text("order-7")


def test_the_form_of_a_queue_sets_its_order_once_asked(visitor: Visitor, scene: Placed) -> None:
    def settings() -> list[Any]:
        found = operations.settings(scene.conn, "steered")
        return [found[name] for name in operations.ORDER]

    operations.limit_length(scene.conn, "steered", 100, "me")  # so it is known
    page = visitor.go("/queues/steered")
    page.get_by_text("Change the order of this queue").click()
    assert visitor.grave_faults() == []
    page.get_by_label("Merge:").check()
    page.get_by_label("Jobs of a key in one call").fill("50")
    page.get_by_label("A dead job").select_option("hold")
    page.get_by_label("Fair:").select_option("producer")
    enqueue(scene.conn, queue="steered")  # so the next part is another
    visitor.refreshed(200)
    expect(page.locator(".tiles:not(.runs)")).to_contain_text("Queued 1")
    expect(page.get_by_label("Jobs of a key in one call")).to_have_value("50")
    expect(page.get_by_label("Merge:")).to_be_checked()
    visitor.expected.add("400")
    visitor.press("Change")
    expect(page.locator("#flash .bad")).to_contain_text(
        "the queue steered would merge, so it should be ordered as well"
    )
    assert settings() == [False, False, 1_000, None, "continue", None]
    page.get_by_label("Ordered:").check()
    page.get_by_role("button", name="Change", exact=True).click()
    page.get_by_role("button", name="Go back").click()
    assert settings()[0] is False
    visitor.press("Change")
    expect(page.locator("#flash")).to_contain_text("steered is ordered")
    assert settings() == [True, True, 50, None, "hold", "producer"]
    expect(page.locator("#live")).to_contain_text("one call takes up to 50 jobs of a key; a dead job stops its key.")
