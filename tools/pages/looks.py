"""Pictures of pages by day, by night and on a phone, and what is wrong with them.

A page is at fault where axe-core finds something serious or critical, where a text has become markup, where a script
complains, or where a phone has to scroll to the side.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from browsing import Visitor, is_inert
from playwright.sync_api import Browser, expect

from .addresses import Address
from .history import FILLED_IN, HOSTILE

TALLEST = 3_000  # pixels of a picture


class Look(NamedTuple):
    """How somebody looks at a page, and the one rule of axe-core that is asked for; "" is all of them."""

    name: str
    scheme: str
    width: int
    height: int
    only: str = ""


LOOKS = (
    Look("light", "light", 1280, 900),
    Look("dark", "dark", 1280, 900, "color-contrast"),
    Look("phone", "light", 390, 844),
)


def looked_at(
    browser: Browser, server: str, addresses: Iterable[Address], looks: Iterable[Look], into: Path | None
) -> list[str]:
    """The faults of the pages, each with its address; a picture of each page and look goes `into` a folder."""
    found: list[str] = []
    looks = tuple(looks)
    for number, address in enumerate(addresses):
        visitor = Visitor(browser, server)
        with visitor.context:
            page = visitor.go(address.path)
            expect(page.locator("h1").first).not_to_be_empty()
            for look in looks:
                page.emulate_media(color_scheme=look.scheme)
                page.set_viewport_size({"width": look.width, "height": look.height})
                found += [f"{look.name} {address.name[:100]}: {fault}" for fault in _faults(visitor, look)]
                if into:
                    height = min(page.evaluate("document.documentElement.scrollHeight"), TALLEST)
                    page.set_viewport_size({"width": look.width, "height": max(height, look.height)})
                    page.screenshot(path=into / f"{number:03}-{_name(address.name)}-{look.name}.png")
        found += [f"{address.name[:100]}: {fault}" for fault in visitor.faults]
    return found


def _faults(visitor: Visitor, look: Look) -> Iterator[str]:
    page = visitor.page
    yield from visitor.grave_faults(look.only)
    if not is_inert(page, visitor.address) or page.evaluate("window.pwned") is not None:
        yield f"a text like {HOSTILE[:40]!r} has become markup"
    if visitor.overflows():
        yield f"wider than {look.width} pixels: {_widest(visitor)}"
    if FILLED_IN in page.content():
        yield "a template in a text has been filled in"


def _widest(visitor: Visitor) -> str:
    """The elements that reach beyond the window and are not in a part that scrolls by itself."""
    return str(
        visitor.page.evaluate(
            """() => [...document.querySelectorAll('body *')]
                .filter(one => one.getBoundingClientRect().right > document.documentElement.clientWidth + 1
                            && !one.closest('.scroll, pre'))
                .slice(0, 3).map(one => one.outerHTML.slice(0, 160)).join(' ')"""
        )
    )


def _name(path: str) -> str:
    return re.sub(r"[^\w.-]+", "_", path).strip("_")[:60] or "overview"
