"""Fixtures for pytest: `pytest_plugins = ["dataloader.testing.plugin"]` in a conftest.py or a module of tests.

The package registers no pytest plugin, so that the tests of other projects in the environment do not load it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from dataloader.testing.database import Databases, databases
from dataloader.testing.farm import Result, run

RunPipeline = Callable[..., Result]


@pytest.fixture(scope="session")
def dataloader_server() -> Iterator[Databases]:
    """The server of TEST_DATABASE_URL, else an embedded one, started by the first test that needs it."""
    with databases() as made:
        yield made


@pytest.fixture
def dataloader_db(dataloader_server: Databases) -> Iterator[str]:
    """The DSN of a database for this test alone, with the queue's schema and no row."""
    with dataloader_server.lent() as dsn:
        yield dsn


@pytest.fixture
def run_pipeline(request: pytest.FixtureRequest, tmp_path: Path) -> RunPipeline:
    """`dataloader.testing.run` with the test's database, made at its first use, and tmp_path as data folder."""
    return partial(run, dsn=lambda: cast(str, request.getfixturevalue("dataloader_db")), data_dir=tmp_path)
