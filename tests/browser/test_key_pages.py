"""Ordered queues in a browser: pages of keys, whatever they are called, and the form for how a queue treats them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
from browsing import Visitor, is_inert, served
from hands import Worker, enqueue
from playwright.sync_api import expect
from test_hostile import TEXTS

from dataloader.queue import db, operations

PATHS = ["/queues/orders", "/keys?queue=orders", "/key?queue=orders&lock_key=order-7"]


@pytest.fixture(scope="module")
def orders(chromium: Any, lend: Any) -> Iterator[tuple[db.Connection, str]]:
    """An ordered queue with a failing head and a dead job, and the dashboard on it."""
    with lend() as dsn, served(dsn) as address, db.connect(dsn, name="scene", schema="public") as conn:
        operations.set_order(conn, "orders", "test", ordered=True)
        worker = Worker(dsn, "host:1:boot")
        for key, verb in (("order-7", "fail"), ("order-7", "retry")):
            enqueue(conn, queue="orders", lock_key=key, args={"version": 1, "state": "paid"})
            worker.finish(worker.take("orders"), verb, error="ConnectionError: no answer", delay_sec=600.0)
        for number in range(60):
            enqueue(conn, queue="orders", lock_key="order-7" if number % 2 else f"order-{number}", args={"n": number})
        yield conn, address
        worker.conn.close()


@pytest.fixture
def visitor(orders: tuple[db.Connection, str], visit: Callable[[str], Visitor]) -> Iterator[Visitor]:
    with visit(orders[1]) as visitor:
        yield visitor


@pytest.mark.parametrize("path", PATHS)
def test_the_pages_of_keys_are_for_everybody(visitor: Visitor, path: str) -> None:
    page = visitor.go(path)
    for summary in page.locator("summary").all():
        summary.click()
    assert visitor.grave_faults() == []
    page.emulate_media(color_scheme="dark")
    assert visitor.grave_faults("color-contrast") == []
    page.set_viewport_size({"width": 375, "height": 812})
    assert visitor.grave_faults() == []
    assert not visitor.overflows()


def test_from_a_queue_to_a_key_and_to_its_jobs(visitor: Visitor) -> None:
    page = visitor.go("/queues/orders")
    expect(page.locator("[aria-label=Keys] tbody tr")).to_have_count(10)
    page.get_by_role("link", name="All keys").click()
    page.locator("#live").get_by_role("link", name="order-7", exact=True).first.click()
    expect(page.locator("h1")).to_have_text("order-7")
    expect(page.locator("#waiting")).to_contain_text("Its time has not come: it is due in 9 min")
    rows = page.locator("[aria-label=Queued] tbody tr")
    expect(rows).to_have_count(31)
    expect(rows.first).to_contain_text("state paid · version 1")
    expect(rows.first).to_contain_text("ConnectionError: no answer")
    expect(page.locator("[aria-label=Dead] tbody tr")).to_have_count(1)
    with page.expect_response(lambda answer: "hx-request" in answer.request.headers) as refreshed:
        page.evaluate("htmx.trigger('#live', 'refresh')")
    assert refreshed.value.url.endswith("/key?queue=orders&lock_key=order-7")
    page.get_by_role("link", name="Go to the first job").click()
    page.locator(".facts").get_by_role("link", name="order-7").click()
    expect(page.locator("h1")).to_have_text("order-7")


def test_the_form_of_a_queue_sets_its_order_once_asked(visitor: Visitor, orders: tuple[db.Connection, str]) -> None:
    def settings() -> list[Any]:
        found = operations.settings(orders[0], "steered")
        return [found[name] for name in operations.ORDER]

    operations.limit_length(orders[0], "steered", 100, "me")  # so it is known
    page = visitor.go("/queues/steered")
    page.get_by_text("Change the order of this queue").click()
    page.get_by_label("Merge:").check()
    page.get_by_label("Jobs of a key in one call").fill("50")
    page.get_by_label("A dead job").select_option("hold")
    page.get_by_label("Fair:").select_option("producer")
    enqueue(orders[0], queue="steered")  # so the next part is another
    with page.expect_response(lambda answer: answer.status == 200 and "hx-request" in answer.request.headers):
        page.evaluate("htmx.trigger('#live', 'refresh')")
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


@pytest.mark.parametrize("text", TEXTS, ids=range(3))
def test_a_hostile_key_is_inert_and_leads_to_itself(lend: Any, visit: Callable[[str], Visitor], text: str) -> None:
    with lend() as dsn, served(dsn) as address, visit(address) as visitor:
        with db.connect(dsn, name="scene", schema="public") as conn:
            operations.set_order(conn, text, text, ordered=True, on_dead="hold")
            jobs = [enqueue(conn, queue=text, lock_key=text, task=text, args={text: text}) for _ in range(3)]
            conn.execute(
                "UPDATE dl_jobs SET status = 'failed', finished_at = now(), error = %s WHERE job_id = %s",
                (text, jobs[0]),
            )
        name = quote(text, safe="")
        key = f"/key?queue={name}&lock_key={name}"
        for path in (f"/queues/{name}", f"/keys?queue={name}", key):
            page = visitor.go(path)
            with page.expect_response(lambda answer: "hx-request" in answer.request.headers):
                page.evaluate("htmx.trigger('#live', 'refresh')")
            assert is_inert(page, address), path
            assert not visitor.overflows()
        assert text[:12] in page.title()
        visitor.go(f"/queues/{name}")
        page.locator("[aria-label=Keys] td a.key").click()
        expect(page.locator("[aria-label=Queued] tbody tr")).to_have_count(2)
        page.locator("#waiting").get_by_role("link").click()
        expect(page.locator(".head .id")).to_have_text(str(jobs[0]))
        visitor.expected |= {"400", "409"}
        for path in (f"{key}&after={name}", f"/keys?queue={name}x", f"/key?queue={name}"):
            assert is_inert(visitor.go(path), address), path
