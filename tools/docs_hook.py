"""The hooks for mkdocs: GitHub's anchors, and links out of docs/, which a site does not have, to the repository.

The pages stay as a git host shows them. A link to a file beside docs/, as deploy/nginx.conf, leads to `repo_url`
of mkdocs.yml; without one it is shown as text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def slug(title: str, separator: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"<[^>]+>|`", "", title).lower()).strip().replace(" ", separator)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page with its links out of docs/ made links to the repository; mkdocs calls this for each page."""
    folder = Path(page.file.abs_src_path).parent
    return LINK.sub(lambda link: _inside(link, folder, config.repo_url), markdown)


def _inside(link: re.Match[str], folder: Path, repo_url: str | None) -> str:
    text, target, anchor = link[1], (folder / link[2]).resolve(), link[3] or ""
    if target.is_relative_to(ROOT / "docs") or not target.exists():
        return link[0]
    there = f"{repo_url.rstrip('/')}/blob/HEAD/{target.relative_to(ROOT)}{anchor}" if repo_url else ""
    return f"[{text}]({there})" if there else text
