"""The dashboard's pages in a browser: what they tell, refreshed, in the chosen colours, of use without a database."""

import re
from collections.abc import Callable

from browsing import Visitor, served
from link import linked
from playwright.sync_api import expect
from scenes import Scene


def test_the_overview_tells_what_is_wrong(visitor: Visitor, scene: Scene) -> None:
    scene.show_workers()  # within 30 s, or they are silent
    page = visitor.go("/")
    alerts = page.locator(".alerts")
    expect(alerts).to_contain_text("Queue nobody.serves has 1 due job and no worker.")
    expect(alerts).to_contain_text("2 jobs are dead in queue load.orders.")
    expect(page.get_by_role("link", name="Dead: 2")).to_be_visible()
    expect(page.locator("#workers-title ~ .scroll")).to_contain_text("640 of 1,000")
    expect(page.locator("#workers-title ~ .scroll")).to_contain_text("312 MB")
    expect(page.locator("#pace-chart canvas").first).to_be_visible()
    alerts.get_by_role("link", name="Show them").click()
    expect(page.locator("tbody tr")).to_have_count(2)


def test_a_job_says_why_it_waits_and_leads_to_the_holder(visitor: Visitor, scene: Scene) -> None:
    page = visitor.go(f"/jobs/{scene.waiting}")
    expect(page.locator("#waiting")).to_contain_text(f"held by job {scene.running}")
    page.get_by_role("link", name="Go to the job that holds the key").click()
    expect(page.locator("#live progress").first).to_be_visible()
    expect(page.locator("#args")).to_contain_text('"password": "***"')
    visitor.go(f"/jobs/{scene.scheduled}")
    expect(page.locator("#waiting")).to_contain_text(re.compile("due in 2 h 5[0-9] min"))
    visitor.go(f"/jobs/{scene.orphan}")
    expect(page.locator("#waiting")).to_contain_text("No worker serves the queue")
    visitor.go(f"/jobs/{scene.dead}")
    expect(page.locator("#error")).to_contain_text('File "load.py", line 29')
    expect(page.locator("#attempts-title ~ .scroll")).to_contain_text("failed")
    moment = page.locator(".timeline time").first
    assert str(moment.get_attribute("datetime")).endswith("Z")
    assert str(moment.get_attribute("title")).endswith("UTC")


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


def test_lists_are_filtered_and_paged_by_their_address(visitor: Visitor, scene: Scene) -> None:
    made = [scene.job(queue="many", task=f"task-{n % 2}", lock_key=f"many-{n:03}") for n in range(120)]
    page = visitor.go("/jobs")
    page.get_by_role("textbox", name="Queue").fill("many")
    page.get_by_label("Sorted by").select_option("key")
    page.get_by_role("button", name="Show").click()
    rows = page.locator("tbody tr")
    seen = []
    for expected in (50, 50, 20):
        expect(rows).to_have_count(expected)
        seen += [str(each.get_attribute("id")) for each in rows.all()]
        if expected == 50:
            page.get_by_role("link", name="After").click()
    assert seen == [f"job-{job_id}" for job_id in made]
    expect(page.get_by_role("link", name="After")).to_have_count(0)
    address = page.url
    page.get_by_role("link", name="First page").click()
    expect(rows.first).to_have_id(seen[0])
    page.goto(address)  # as somebody else would to whom it was sent
    expect(rows.first).to_have_id(seen[100])
    visitor.go("/jobs?queue=many&task=task-1&lock_key=many-007&producer=airflow&consumer_group=reports&status=fresh")
    expect(rows).to_have_count(1)
    visitor.go("/jobs?queue=none")
    expect(page.locator(".empty")).to_contain_text("No job fits the filters.")


def test_refreshing_stays_out_of_the_way(visitor: Visitor, scene: Scene) -> None:
    """An unchanged page is a 304; what is typed, opened and asked stays; paused it asks no more."""
    page = visitor.go("/jobs?queue=quiet")
    page.get_by_role("textbox", name="Task").fill("half a wor")
    page.get_by_text("More filters").click()
    with page.expect_response(lambda answer: answer.status == 304):
        pass
    scene.job(queue="quiet", lock_key="quiet")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.get_by_role("textbox", name="Task")).to_have_value("half a wor")
    expect(page.get_by_role("textbox", name="Producer")).to_be_visible()

    page = visitor.go(f"/jobs/{scene.dead}")
    page.locator("#live td details summary").click()
    page.get_by_role("button", name="Delete").click()
    with page.expect_response(lambda answer: answer.status in (200, 304)):
        pass
    expect(page.locator("dialog[open] #question")).to_contain_text("Delete this job")
    page.keyboard.press("Escape")
    expect(page.locator("dialog[open]")).to_have_count(0)
    expect(page.locator("#live td details pre")).to_be_visible()
    assert scene.status(scene.dead) == "failed"

    ticks = "for (let n = 0; n < 5; n++) htmx.trigger('#live', 'every')"
    page.get_by_role("button", name="Live").click()
    sent: list[str] = []  # not the answers: one to what was sent before may come late
    page.on("request", lambda request: sent.append(request.url))
    page.evaluate(ticks)
    page.wait_for_timeout(300)
    assert sent == []
    page.get_by_role("button", name="Paused").click()
    expect(page.get_by_role("button", name="Live")).to_be_visible()
    with page.expect_response(lambda answer: answer.status == 304):
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.evaluate("Object.defineProperty(document, 'hidden', {get: () => true})")
    sent.clear()
    page.evaluate(ticks)
    page.wait_for_timeout(300)
    assert sent == []


def test_colours_are_as_the_system_has_them_until_they_are_chosen(visitor: Visitor) -> None:
    page = visitor.go("/workers")
    ground = "getComputedStyle(document.body).backgroundColor"
    by_day = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    by_night = page.evaluate(ground)
    assert by_day != by_night
    page.get_by_role("button", name="Theme").click()
    expect(page.locator("#chosen")).to_have_text("light")
    visitor.go("/jobs")
    assert page.evaluate(ground) == by_day


def test_without_a_database_it_says_so_and_comes_back(scene: Scene, visit: Callable[[str], Visitor]) -> None:
    with (
        linked(scene.dsn) as link,
        served(link.dsn, patient=False) as address,
        visit(address) as early,
        visit(address) as late,
    ):
        early.go("/")
        early.expected.add("503")
        late.expected.add("503")
        link.leave()
        late.go(f"/jobs/{scene.running}")
        expect(late.page.locator("#live")).to_contain_text("The database does not answer")
        assert "Traceback" not in late.page.content()
        expect(early.page.locator("#banner")).to_contain_text("The database does not answer")
        expect(early.page.locator("#queues-title ~ .scroll")).to_contain_text("load.orders")  # the last values
        expect(early.page.locator("#refreshing")).to_have_text("No answer")
        link.back()
        expect(early.page.locator("#banner")).to_be_hidden()
        expect(early.page.locator("#refreshing")).to_have_text("Live")
        expect(late.page.locator("#args")).to_be_visible()
