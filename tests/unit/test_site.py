"""The site of the documents: every page is in its navigation, and no link leads nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def mkdocs(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """`mkdocs build --strict`, which fails at a page that is left out and at a link or an anchor that leads nowhere."""
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    env = os.environ | {"PYTHONPATH": str(ROOT / "tools"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    return subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_site_is_built_strictly(mkdocs: subprocess.CompletedProcess[str], tmp_path: Path) -> None:
    assert mkdocs.returncode == 0, mkdocs.stdout
    built = {page.relative_to(tmp_path).parts[0] for page in tmp_path.glob("*/index.html")}
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"} <= built
    pages = [page for page in tmp_path.rglob("*.html") if 'src="http' in page.read_text("utf-8")]
    assert pages == [], "no page asks another server"
