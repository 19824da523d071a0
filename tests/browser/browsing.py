"""The dashboard in a real browser: the application on a port, pages that are watched, the rules that none may break."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from api_app import listening, running
from patience import PATIENCE
from playwright.sync_api import Browser, BrowserContext, Page, expect

AXE = (Path(__file__).parent / "vendor" / "axe-4.14.1.min.js").read_text("utf-8")
MOST_MS = PATIENCE * 1_000  # until a test gives up waiting
expect.set_options(timeout=MOST_MS)
# The two elements that ask for something by themselves: the part that is refreshed, and the search box of the jobs.
ASKING = "#main > #live, #main > form.filters > .search > #search[hx-get='/search/suggestions']"
# Elements that no page has outside its header; a text that became markup would be one of these.
FOREIGN = f"""main img, main svg:not(.chart), main script, script:not([src]), iframe, object, embed, base, hx-partial,
    style, [onerror], [onload], [onclick], a[href^='javascript:' i], main [hx-get]:not({ASKING}), form[action*=':']"""
# The browser itself writes this of an answer that is an error; a test that asks for one expects it.
_STATUS = re.compile(r"Failed to load resource: .* status of (\d+)")


def is_inert(page: Page, address: str) -> bool:
    """No part of the page was made from a text, and it is still the page."""
    return page.locator(FOREIGN).count() == 0 and page.url.startswith(address + "/")


@contextmanager
def served(dsn: str, **settings: Any) -> Iterator[str]:
    """The application on a port of this machine; its address."""
    with running(dsn, environment="test", **settings) as app, listening(app) as address:
        yield address


class Visitor:
    """Somebody with a browser of his own, who notes whatever no page may do."""

    def __init__(self, browser: Browser, address: str) -> None:
        self.address = address
        self.expected: set[str] = set()  # statuses that this test asks for
        self.faults: list[str] = []
        self.asked: list[tuple[str, int]] = []  # what was asked for in the background, and the status
        self.context: BrowserContext = browser.new_context(
            color_scheme="light", viewport={"width": 1280, "height": 900}
        )
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(MOST_MS)
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        self.page.on("dialog", lambda dialog: (self.faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", self._on_request)
        self.page.on("response", lambda answer: self.asked.append((answer.url, answer.status)))

    def go(self, path: str) -> Page:
        self.page.goto(self.address + path)
        return self.page

    def refreshed(self, status: int | None = None) -> str:
        """Let the live part of the page be asked for anew; the address of the answer."""

        def is_it(answer: Any) -> bool:
            return "hx-request" in answer.request.headers and status in (None, answer.status)

        with self.page.expect_response(is_it) as found:
            self.page.evaluate("htmx.trigger('#live', 'refresh')")
        return str(found.value.url)

    def press(self, label: str) -> None:
        """Press a button, and the same in the question that it asks, if it asks one."""
        self.page.locator("#live").get_by_role("button", name=label, exact=True).click()
        question = self.page.locator("dialog[open]")
        if question.count():
            question.get_by_role("button", name=label, exact=True).click()

    def grave_faults(self, only: str = "") -> list[str]:
        """The serious and critical faults that axe-core finds on the page, by one of its rules or by all."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE)
        how = {"resultTypes": ["violations"]} | ({"runOnly": [only]} if only else {})
        found = self.page.evaluate("how => axe.run(how)", how)
        return [
            f"{violation['id']}: {node['html'][:200]}: {node.get('failureSummary', '')[:300]}"
            for violation in found["violations"]
            if violation["impact"] in ("serious", "critical")
            for node in violation["nodes"]
        ]

    def overflows(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Leave; nothing that no page may do has happened."""
        self.context.close()
        assert kind or not self.faults, self.faults[:5]

    def _note(self, kind: str, text: str) -> None:
        status = _STATUS.match(text)
        if kind in ("error", "warning") and not (status and status[1] in self.expected):
            self.faults.append(f"console {kind}: {text}")

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.address + "/", "data:")):
            self.faults.append(f"another host: {request.url}")
