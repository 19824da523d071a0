"""Every button of the dashboard, pressed in a browser; who may not press them has none."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from browsing import Visitor, served
from hands import row
from playwright.sync_api import expect
from scenes import Scene

from dataloader.api.web import tokens
from dataloader.queue import operations

LATER = {"available_at": datetime.now(UTC) + timedelta(hours=3)}


@pytest.mark.parametrize(
    ("start", "label", "then"),
    [
        ("later", "Run now", "queued"),
        ("queued", "Delete", None),
        ("running", "Force cancel", "running"),
        ("dead", "Requeue", "queued"),
    ],
)
def test_a_job_does_what_its_button_says(
    visitor: Visitor, scene: Scene, start: str, label: str, then: str | None
) -> None:
    with ExitStack() as ends:
        if start in ("running", "dead"):
            job_id = ends.enter_context(scene.claimed())
        else:
            job_id = scene.job(**LATER if start == "later" else {})
        if start == "dead":
            scene.end(job_id, "failed")
        page = visitor.go(f"/jobs/{job_id}")
        visitor.press(label)
        expect(page.locator("#flash")).to_contain_text("the job")
        if then is None:
            expect(page.locator("#live")).to_contain_text("This job is deleted.")
            assert not scene.conn.execute("SELECT FROM dl_jobs WHERE job_id = %s", (job_id,)).fetchone()
            return
        expect(page.locator(".head .badge")).to_have_text(then)
        found = row(scene.conn, job_id)
        assert found["status"] == then
        if label == "Force cancel":
            assert found["cancel_forced"]
        if label == "Run now":
            assert found["available_at"] <= found["now"]
            assert found["blocked_on"] is None
        if label == "Requeue":
            assert found["attempt"] == 0
            visitor.expected.add("409")
            again = f"/do/requeue?job_id={job_id}"
            page.evaluate("(path) => htmx.ajax('POST', path, {source: '#live', target: '#flash'})", again)
        expect(page.locator(".timeline")).to_contain_text("anonymous from 127.0.0.1")
        page.get_by_role("button", name="Dismiss this message").click()
        expect(page.locator("#flash")).to_be_empty()


def test_a_button_that_makes_no_sense_says_why(visitor: Visitor, scene: Scene) -> None:
    page = visitor.go(f"/jobs/{scene.running}")
    expect(page.get_by_role("button", name="Delete")).to_be_disabled()
    expect(page.locator(".because")).to_contain_text("A running job cannot be deleted.")
    visitor.go(f"/jobs/{scene.waiting}")
    expect(page.get_by_role("button", name="Run now")).to_be_disabled()
    operations.limit_length(scene.conn, "load.empty", 10, "me")
    visitor.go("/queues/load.empty")
    expect(page.get_by_role("button", name="Delete all dead")).to_be_disabled()


def test_going_back_from_a_question_does_nothing(visitor: Visitor, scene: Scene) -> None:
    page = visitor.go(f"/jobs/{scene.dead}")
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("button", name="Go back")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("dialog[open]")).to_have_count(0)
    assert scene.status(scene.dead) == "failed"
    assert not [url for url, _ in visitor.asked if "/do/delete" in url]


def test_a_job_that_has_changed_meanwhile_is_left_alone(visitor: Visitor, scene: Scene) -> None:
    job_id = scene.job()
    page = visitor.go(f"/jobs/{job_id}")
    page.get_by_role("button", name="Live").click()
    scene.end(job_id, "succeeded")
    visitor.press("Cancel")
    expect(page.locator("#flash")).to_contain_text("the job is succeeded already")


def test_a_queue_does_what_its_buttons_say(visitor: Visitor, scene: Scene) -> None:
    def ended(number: int) -> None:
        for _ in range(number):
            with scene.claimed(queue="steered") as job_id:
                scene.end(job_id, "lost")

    def statuses() -> list[Any]:
        return scene.conn.execute(
            "SELECT status::text, count(*) FROM dl_jobs WHERE queue = 'steered' GROUP BY 1 ORDER BY 1"
        ).fetchall()

    ended(3)
    page, flash = visitor.go("/queues/steered"), visitor.page.locator("#flash")
    visitor.press("Pause")
    expect(page.locator("#live .callout")).to_contain_text("by anonymous from 127.0.0.1")
    visitor.press("Resume")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    visitor.press("Requeue all dead")
    expect(flash).to_contain_text("3 jobs queued again.")
    assert statuses() == [("queued", 3)]
    scene.conn.execute("DELETE FROM dl_jobs WHERE queue = 'steered'")
    ended(2)
    scene.job(queue="steered", **LATER)
    expect(page.get_by_role("button", name="Run all now")).to_be_enabled()
    visitor.press("Run all now")
    expect(flash).to_contain_text("1 job due now.")
    visitor.press("Delete all dead")
    expect(flash).to_contain_text("2 jobs deleted.")
    assert statuses() == [("queued", 1)]


# All controls that change a row; a reader may copy a text and look for jobs.
CHANGING = "#live button:not([data-copies]), main [hx-post], main form:not([method=get i]), main [type=checkbox]"
GIVEN = {"reader": ["read"], "boss": ["read", "operate"]}


def test_sign_in_and_what_only_a_reader_sees(scene: Scene, visit: Callable[[str], Visitor]) -> None:
    made = {name: tokens.new() for name in GIVEN}
    entries = [json.loads(tokens.entry(made[name], name, scopes)) for name, scopes in GIVEN.items()]
    with served(scene.dsn, dl_api_tokens=json.dumps(entries)) as address, visit(address) as visitor:
        page = visitor.go(f"/jobs/{scene.dead}")
        assert visitor.grave_faults() == []
        visitor.expected |= {"401", "403"}
        page.get_by_label("Token").fill("dl_wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert").first).to_contain_text("not known")
        page.get_by_label("Token").fill(made["reader"])
        page.keyboard.press("Enter")
        expect(page.locator("#error")).to_be_visible()  # where he wanted to go
        expect(page.locator(".who.name")).to_have_text("reader")
        expect(page.locator("#live button[data-copies]")).not_to_have_count(0)
        expect(page.locator(CHANGING)).to_have_count(0)
        expect(page.get_by_role("link", name="Run again with changes")).to_have_count(0)
        expect(page.get_by_text("read only")).to_be_visible()
        assert made["reader"] not in page.content()
        visitor.go("/jobs")
        expect(page.locator("#search")).to_be_visible()
        expect(page.locator(f"{CHANGING}, #bulk")).to_have_count(0)
        visitor.go(f"/jobs/{scene.dead}")
        page.evaluate("(path) => htmx.ajax('POST', path, '#flash')", f"/do/delete?job_id={scene.dead}")
        expect(page.locator("#flash .bad")).to_contain_text("This needs the scope operate")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Token")).to_be_visible()
        page.get_by_label("Token").fill(made["boss"])
        page.keyboard.press("Enter")
        expect(page.locator(".who.name")).to_have_text("boss")
        visitor.go(f"/jobs/{scene.dead}")
        expect(page.get_by_role("button", name="Requeue")).to_be_enabled()
        expect(page.locator(CHANGING)).to_have_count(2)
        with visit(address) as victim:
            _cross_site(victim, page.context.cookies(), scene)
        page.context.clear_cookies()
        expect(page.get_by_label("Token")).to_be_visible()  # the next refresh leads there
        assert scene.status(scene.dead) == "failed"


def _cross_site(visitor: Visitor, cookies: Any, scene: Scene) -> None:
    """A form of another site that is posted by somebody who is signed in changes nothing."""
    visitor.context.add_cookies(cookies)
    visitor.expected.add("403")
    elsewhere = visitor.address.replace("127.0.0.1", "localhost")
    form = f'<form method="post" action="{visitor.address}/do/delete?job_id={scene.dead}"><button>Win</button></form>'
    visitor.page.route(f"{elsewhere}/**", lambda route: route.fulfill(body=form, content_type="text/html"))
    visitor.page.goto(f"{elsewhere}/prize")
    visitor.page.get_by_role("button", name="Win").click()
    expect(visitor.page.locator("#live")).to_contain_text("another site's page")
    visitor.faults = [fault for fault in visitor.faults if elsewhere not in fault]
