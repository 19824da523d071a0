"""Fixtures of the process tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import farming
import psycopg
import pytest
from farming import Farm

# Programs that are killed, reloaded, cut off, filled or watched: each test starts processes of its own.
FARMS = {
    *("test_api_stop", "test_beside_others", "test_bounds", "test_check", "test_clocks", "test_crashes"),
    *(
        "test_database_faults",
        "test_embedded",
        "test_failover",
        "test_families",
        "test_floods",
        "test_idle_farm",
        "test_lifecycle",
        "test_light_workers",
        "test_loads",
        "test_lock_table",
    ),
    *(
        "test_locked_ends",
        "test_logs",
        "test_prefetch",
        "test_process_faults",
        "test_pruning",
        "test_reload",
        "test_room",
        "test_stuck",
        "test_warm_workers",
    ),
    *("test_slow_clients", "test_supervisord", "test_traces", "test_two_hosts", "test_up", "test_example_orders"),
    "test_results_of_farms",
    "test_schedules_of_farms",
    "test_backfills_of_farms",
    "test_checkpoints_of_farms",
    "test_alerts_of_farms",
    "test_workers_of_several_queues",
    "test_worker_hooks",
    "test_surroundings",
    "test_llm_of_farms",
    "test_example_llm",
    "test_limits_of_farms",
    "test_commands_of_farms",
    "test_compose",
    "test_monitored",
    "test_proxies",
    "test_errors_of_farms",
    "test_logs_of_jobs",
    "test_newcomer",
    "test_args_of_farms",
    "test_outages",
    "test_guests",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of these files, before pytest chooses by marker."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem in FARMS:
            item.add_marker(pytest.mark.farm)


@pytest.fixture
def farm(own_db: str, tmp_path: Path) -> Iterator[Farm]:
    """A queue of its own, and whatever programs the test starts on it."""
    farm = Farm(own_db, tmp_path)
    yield farm
    farm.close()


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on."""
    return farming.free_port()


@pytest.fixture
def backend(own_db: str) -> Callable[[str], int]:
    """Kill the database sessions whose name contains a text; their number."""

    def kill(name: str) -> int:
        with psycopg.connect(own_db, autocommit=True) as conn:
            rows = conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE %s",
                (f"%{name}%",),
            )
            return len(rows.fetchall())

    return kill
