"""Pages of errors, of an ordered queue with its keys, and of a backfill, in a browser."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from browsing import Visitor, served
from hands import Worker, enqueue, row
from playwright.sync_api import expect

from dataloader.queue import db, operations
from dataloader.queue.plans import backfills, new_backfill

BOOM = "ValueError at load.py:step: row # is wrong"
SECRET = "canary-7f3b-hunter2"
DAYS = {"since": "2026-01-01", "until": "2026-05-31", "step": "day"}


class Queues(NamedTuple):
    """A database with a worker, and the dashboard on it."""

    conn: db.Connection
    worker: Worker
    address: str

    def ended(self, verb: str, queue: str, group: str | None = None, **new: Any) -> UUID:
        """A job whose only run ends so."""
        job_id = enqueue(self.conn, queue=queue, **new)
        error = f"ConnectionError: no answer to password={SECRET}"
        self.worker.finish(self.worker.take(queue), verb, error=error, error_group=group, delay_sec=600.0)
        return job_id


@pytest.fixture(scope="module")
def scene(chromium: Any, lend: Any) -> Iterator[Queues]:
    """Dead jobs of one cause; an ordered queue with a failing head and a dead job; a backfill under way."""
    with lend() as dsn, served(dsn) as address, db.connect(dsn, name="scene", schema="public") as conn:
        scene = Queues(conn, Worker(dsn, "host:1:boot"), address)
        for _ in range(3):
            scene.ended("fail", "q", BOOM, task="load")
        operations.set_order(conn, "orders", "test", ordered=True)
        for verb in ("fail", "retry"):
            scene.ended(verb, "orders", lock_key="order-7", args={"version": 1, "state": "paid"})
        for number in range(60):
            key = "order-7" if number % 2 else f"order-{number}"
            enqueue(conn, queue="orders", lock_key=key, args={"n": number})
        new = {"name": "rates", "task": "fill", "queue": "fills", "max_running": 3, **DAYS}
        backfills.add(conn, new_backfill.checked(new), "me")
        assert backfills.tick(conn)
        for verb in ("succeed", "fail", "succeed"):
            scene.worker.finish(scene.worker.take("fills"), verb, error="no answer")
        holder = Worker(dsn, "host:2:boot")
        holder.take("fills")
        yield scene
        for worker in (scene.worker, holder):
            worker.conn.close()


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


def test_the_buttons_change_the_jobs_of_their_group_alone(visitor: Visitor, scene: Queues) -> None:
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


def test_the_form_of_a_queue_sets_its_order_once_asked(visitor: Visitor, scene: Queues) -> None:
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
