"""Fixtures of the process tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from farming import Farm


@pytest.fixture
def farm(own_db: str, tmp_path: Path) -> Iterator[Farm]:
    """A queue of its own, and whatever programs the test starts on it."""
    farm = Farm(own_db, tmp_path)
    yield farm
    farm.close()


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
