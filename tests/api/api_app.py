"""The application on a test's database, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from flask import Flask
from werkzeug.routing import Rule

from dataloader import config
from dataloader.api import create_app

TRIGGER = "/api/v1/jobs/trigger"
MINIMAL = {"queue": "load.cbr", "task": "cbr.currencies", "lock_key": "cbr"}
Refused = Callable[..., dict[str, Any]]


class KnownRule(Rule):
    """A rule of the URL map that keeps for the next application what werkzeug has compiled of its text.

    Compiled anew, the hundred rules take a third of the time of these tests.
    """

    _compiled: ClassVar[dict[tuple[Any, ...], Callable[..., tuple[str, str]]]] = {}

    def _compile_builder(self, append_unknown: bool = True) -> Callable[..., tuple[str, str]]:
        text = (tuple(self._trace), repr(self.defaults), append_unknown)
        if text not in self._compiled:
            self._compiled[text] = super()._compile_builder(append_unknown)
        return self._compiled[text]


Flask.url_rule_class = KnownRule


@contextmanager
def running(dsn: str, **settings: Any) -> Iterator[Flask]:
    """The application on `dsn`; its sessions are closed at the end."""
    given = {"_env_file": None, "dl_db_dsn": dsn, "pg_pool_size": 2, **settings}
    app = create_app(config.load(**given))
    try:
        yield app
    finally:
        app.extensions["sessions"].close()
