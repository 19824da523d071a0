"""The documents: each is on the map, and no link in them leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def text_of(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    titles = re.findall(r"^#+ (.*)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not link.startswith("http") and not (target.exists() and (not anchor or anchor in anchors(target))):
            wrong.append(link)
    assert not wrong


def test_the_readme_is_short_and_names_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in text] == []
    assert len(text.splitlines()) < 170


def test_long_pages_name_their_sections() -> None:
    """A page that begins with a list of its sections names all of them."""
    for name in ("operating.md", "troubleshooting.md"):
        page = ROOT / "docs" / name
        sections = {f"(#{anchor})" for anchor in anchors(page)}
        named = set(re.findall(r"\(#[\w-]+\)", page.read_text().split("\n## ")[0]))
        second = {f"(#{re.sub(r'[^a-z0-9 -]', '', title.lower()).replace(' ', '-')})"
                  for title in re.findall(r"^## (.*)$", text_of(page), flags=re.MULTILINE)}  # fmt: skip
        assert second <= named <= sections
