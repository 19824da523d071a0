"""The application on a test's database, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flask import Flask

from dataloader import config
from dataloader.api import create_app

TRIGGER = "/api/v1/jobs/trigger"
MINIMAL = {"queue": "load.cbr", "task": "cbr.currencies", "lock_key": "cbr"}
Refused = Callable[..., dict[str, Any]]


@contextmanager
def running(dsn: str, **settings: Any) -> Iterator[Flask]:
    """The application on `dsn`; its sessions are closed at the end."""
    given = {"_env_file": None, "dl_db_dsn": dsn, "pg_pool_size": 2, **settings}
    app = create_app(config.load(**given))
    try:
        yield app
    finally:
        app.extensions["sessions"].close()
