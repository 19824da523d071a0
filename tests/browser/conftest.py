"""Fixtures of the browser's tests: one Chromium for all of them, a farm's database with jobs in every state."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# The modules that they share with the tests of the API and of the SQL.
sys.path += [str(Path(__file__).parent.parent / name) for name in ("api", "sql")]

# The fast tests do without Playwright: CI installs it.
collect_ignore_glob = ["test_*.py"] if find_spec("playwright") is None else []

Lend = Callable[[], AbstractContextManager[str]]

if TYPE_CHECKING:
    from browsing import Visitor
    from playwright.sync_api import Browser
    from scenes import Scene


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These are run apart, by `-m browser`: Playwright keeps an event loop running in the tests' thread."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("browser")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no chromium here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # As root, Chromium has no sandbox of its own.
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def scene(chromium: Browser, lend: Lend) -> Iterator[Scene]:
    """A farm as it stands at three in the morning, and the dashboard on it for everybody on this machine."""
    from browsing import served
    from scenes import Scene

    with lend() as dsn, served(dsn) as address:
        scene = Scene(dsn, address)
        yield scene
        scene.close()


@pytest.fixture
def visitor(chromium: Browser, scene: Scene) -> Iterator[Visitor]:
    """Somebody who looks at it."""
    from browsing import Visitor

    with Visitor(chromium, scene.address) as visitor:
        yield visitor


@pytest.fixture
def visit(chromium: Browser) -> Callable[[str], Visitor]:
    """Go to any dashboard, for as long as a block; it should end before the server does."""
    from browsing import Visitor

    return partial(Visitor, chromium)
