"""Every page and GET of the API on a farm's week with hostile texts: `python -m tools.pages`, with few jobs."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from api_app import running
from browsing import served

from tools.pages.addresses import Address, addresses
from tools.pages.history import History
from tools.pages.looks import LOOKS, looked_at
from tools.pages.timing import faults, measured

JOBS = 3_000
PARTS = 6  # of the pages, so that no test takes long
BUSY = "htmx:error: timeout"  # a refresh beside axe-core on a busy machine
MOST_MS = 20_000.0  # tells a page that hangs; the bound for 1,000,000 jobs is that of the program


@pytest.fixture(scope="module")
def farm(lend: Any) -> Iterator[tuple[str, list[Address]]]:
    """A dashboard, and the addresses of its pages."""
    with lend() as dsn:
        history = History(dsn, JOBS)
        with running(dsn) as app:
            found = addresses(app, history.job_ids)
        with served(dsn) as server:
            yield server, found


def test_every_get_answers(farm: tuple[str, list[Address]]) -> None:
    server, found = farm
    assert faults(measured(urlsplit(server).port or 0, found, rounds=1, every_sec=0), MOST_MS) == []


@pytest.mark.parametrize("part", range(PARTS))
def test_every_page_is_sound_by_day_by_night_and_on_a_phone(
    farm: tuple[str, list[Address]], chromium: Any, part: int
) -> None:
    """One page of each route, with hostile texts where it has some, and a job in each state."""
    server, found = farm
    hostile_last = sorted(found, key=lambda each: "%3C" in each.path or "hostile" in each.path)
    chosen = {each.name if each.route == "/jobs/<uuid:job_id>" else each.route: each
              for each in hostile_last if each.is_page}  # fmt: skip
    assert len(chosen) > 20
    seen = looked_at(chromium, server, [*chosen.values()][part::PARTS], LOOKS, None)
    assert [fault for fault in seen if BUSY not in fault] == []
