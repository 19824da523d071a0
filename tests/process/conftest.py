"""Fixtures of the process tests."""

from collections.abc import Iterator
from pathlib import Path

import farming
import pytest
from farming import Farm
from servers import Database, with_queue

# These have other marks. In all other files programs are killed, reloaded, cut off, filled or watched.
NO_FARMS = {
    *("test_bench", "test_canaries", "test_chaos", "test_cli", "test_failover_page", "test_fleet"),
    *("test_order_under_fire", "test_packaging"),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of farms, before pytest chooses by marker."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem not in NO_FARMS:
            item.add_marker(pytest.mark.farm)


@pytest.fixture
def farm(own_db: str, tmp_path: Path) -> Iterator[Farm]:
    """A queue of its own, and whatever programs the test starts on it."""
    with farming.farm_on(own_db, tmp_path) as farm:
        yield farm


@pytest.fixture
def database() -> Iterator[Database]:
    """A server of the test's own with the project's schema."""
    with with_queue() as database:
        yield database


@pytest.fixture
def free_port() -> int:
    return farming.free_port()
