"""Hostile texts, wherever somebody can put one, on every page: shown as they are, and nothing happens."""

import json
from collections.abc import Callable
from contextlib import closing
from typing import Any
from urllib.parse import quote

import pytest
from browsing import Visitor, is_inert, served
from playwright.sync_api import expect
from scenes import Scene

from dataloader.api.web import tokens
from dataloader.queue import operations

TEXTS = [
    "<img src=x onerror=alert(1)>",
    """javascript:alert(1)//'"/><a href=javascript:alert(2)>x</a><hx-partial hx-target="#live">y</hx-partial>"""
    "/../..//?a=b#c",
    "</title></textarea></script><script>alert(1)</script>\\u0000\r\n\t\u202e\u2028\x1b[31m{{7*7}}{% for %}%2f%00",
]


def test_a_queue_is_no_way_to_another(visitor: Visitor, scene: Scene) -> None:
    """A browser would make /queues/victim of /queues/a/../victim: then a button would hit the wrong one."""
    job = scene.job(queue="a/../victim")
    scene.end(job, "failed")
    victim = scene.job(queue="victim")
    scene.end(victim, "failed")
    page = visitor.go(f"/jobs/{job}")
    page.locator("main").get_by_role("link", name="a/../victim").first.click()
    expect(page.locator("h1")).to_have_text("a/../victim")
    assert visitor.refreshed().endswith("/queues/a%2F..%2Fvictim")
    visitor.press("Requeue all dead")
    expect(page.locator("#flash")).to_contain_text("1 job queued again")
    assert (scene.status(job), scene.status(victim)) == ("queued", "failed")
    page.goto("about:blank")  # the live page would ask for a queue that is gone
    scene.conn.execute("DELETE FROM dl_jobs WHERE job_id IN (%s, %s)", (job, victim))


def put_everywhere(scene: Scene, text: str) -> None:
    """Put it wherever a service that shares the tables can write it: the queue has no other name."""
    scene.conn.execute(
        "UPDATE dl_jobs SET queue = %(t)s, task = %(t)s, partition_key = %(t)s, producer = %(t)s,"
        " consumer_group = %(t)s, args = %(doc)s, progress = %(doc)s, idempotency_key = %(t)s || job_id, trace = %(t)s,"
        " claimed_by = CASE WHEN claimed_by IS NOT NULL THEN %(t)s END,"
        " error = CASE WHEN error IS NOT NULL THEN %(t)s END",
        {"t": text, "doc": json.dumps({text: text, "list": [text], "processed": 1, "total": 2})},
    )
    scene.conn.execute(
        "INSERT INTO dl_job_events (job_id, queue, kind, payload)"
        " SELECT job_id, %(t)s, kind, %(doc)s FROM dl_jobs, unnest(ARRAY['backoff', 'failed', 'note', %(t)s]) AS kind",
        {"t": text, "doc": json.dumps({text: text, "error": text, "by": text, "reason": text, "worker": text})},
    )
    scene.conn.execute("UPDATE dl_workers SET host = %(t)s, queue = %(t)s, state = %(t)s", {"t": text})
    operations.pause(scene.conn, text, text)


@pytest.mark.parametrize("text", TEXTS, ids=range(3))
def test_a_hostile_text_is_inert_on_every_page(lend: Any, visit: Callable[[str], Visitor], text: str) -> None:
    """Also in suggestions and previews, which htmx puts into the page beside the part that is refreshed."""
    name = quote(text, safe="")
    with lend() as dsn, served(dsn) as address, closing(Scene(dsn, address)) as scene, visit(address) as visitor:
        put_everywhere(scene, text)
        jobs = (scene.running, scene.waiting, scene.dead, scene.retry, scene.scheduled, scene.done, scene.orphan)
        filters = "&".join(f"{field}={name}" for field in ("queue", "task", "lock_key", "producer"))
        paths = ["/", "/jobs", "/workers", *(f"/jobs/{job}" for job in jobs), f"/jobs?{filters}", f"/queues/{name}"]
        for path in paths:
            page = visitor.go(path)
            visitor.refreshed()
            assert is_inert(page, address), path
        assert text[:12] in page.title()
        for label, message in (("Resume", "goes on"), ("Pause", "paused"), ("Requeue all dead", "2 jobs queued again")):
            visitor.press(label)
            expect(page.locator("#flash")).to_contain_text(message)
            assert is_inert(page, address), label
        assert scene.status(scene.dead) == "queued"

        scene.end(scene.dead, "failed")
        scene.conn.execute("UPDATE dl_jobs SET lock_key = %s WHERE status <> 'running'", (text,))
        page = visitor.go(f"/jobs?queue={name}")
        with page.expect_response(lambda answer: "/search/suggestions" in answer.url):
            page.locator("#search").fill(text[:4])
        options = page.locator("#suggestions option")
        expect(options).not_to_have_count(0)
        assert any(text[:12] in str(each.get_attribute("value")) for each in options.all())
        page.get_by_role("button", name="Select all that match").click()
        page.locator("[data-order=requeue]").click()
        page.locator("#order").get_by_role("button", name="Requeue").click()
        expect(page.locator("#order")).to_contain_text("queued again")
        assert is_inert(page, address)
        assert scene.status(scene.dead) == "queued"

        visitor.expected |= {"400", "404", "405"}
        for path in (f"/jobs?since={name}", f"/jobs?after={name}", f"/jobs?sort={name}&status={name}", f"/jobs/{name}"):
            assert is_inert(visitor.go(path), address), path
        order = f"/queues/{name}/{name}"
        page.evaluate("(path) => htmx.ajax('POST', path, {source: '#live', target: '#flash'})", order)
        assert not [url for url, _ in visitor.asked if url.endswith("/x")]


WISHES = [
    "//evil.example", "/\\evil.example", "javascript:alert(1)", "/%0d%0aSet-Cookie: a=b", "\t//evil.example",
     "/jobs?a=<img src=x>", '"><img src=x onerror=alert(1)>', "/..//evil.example", "/.//evil.example", "https:evil",
]  # fmt: skip


def test_a_sign_in_stays_here_wherever_it_should_lead(scene: Scene, visit: Callable[[str], Visitor]) -> None:
    token = tokens.new()
    with (
        served(scene.dsn, dl_api_tokens=f"[{tokens.entry(token, 'x', ['read'])}]") as address,
        visit(address) as visitor,
    ):
        visitor.expected |= {"401", "404"}
        for wish in WISHES:
            visitor.context.clear_cookies()
            page = visitor.go(f"/login?next={quote(wish, safe='')}")
            page.get_by_label("Token").fill("dl_wrong<img src=x onerror=alert(1)>")
            page.get_by_role("button", name="Sign in").click()
            expect(page.get_by_role("alert").filter(has_text="not known")).to_be_visible()
            assert is_inert(page, address), wish
            page.get_by_label("Token").fill(token)
            page.get_by_role("button", name="Sign in").click()
            page.wait_for_url(lambda url: not url.startswith(f"{address}/login"))
            assert is_inert(page, address), wish
            assert [cookie["name"] for cookie in visitor.context.cookies()] == ["dl_token"], wish


def test_the_page_of_the_api_takes_no_orders_from_its_address(visitor: Visitor) -> None:
    elsewhere = quote("https://evil.example/x.json", safe="")
    page = visitor.go(
        f"/docs?url={elsewhere}&configUrl={elsewhere}&queryConfigEnabled=true#/<img src=x onerror=alert(1)>"
    )
    expect(page.locator(".swagger-ui .info").first).to_contain_text("dataloader")
    assert page.locator("img[src='x'], [onerror]").count() == 0
