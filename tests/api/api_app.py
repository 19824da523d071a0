"""The application on a test's database, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from typing import Any, ClassVar, get_args, get_type_hints

from flask import Flask
from flask.testing import FlaskClient
from psycopg.rows import dict_row
from werkzeug.routing import Rule

from dataloader import config
from dataloader.api import create_app, dispatch
from dataloader.ops.op import adapter
from dataloader.queue import db

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
# The views of the operations are those of any application; their pydantic models take half the time of one.
dispatch._view = cache(dispatch._view)  # type: ignore[assignment]


def made(client: FlaskClient, **fields: Any) -> str:
    """Trigger a job, and return its id."""
    return str(client.post(TRIGGER, json=MINIMAL | fields).get_json()["job_id"])


def rows(conn: db.Connection) -> list[dict[str, Any]]:
    """All jobs, in the order in which they were added."""
    return conn.cursor(row_factory=dict_row).execute("SELECT * FROM dl_jobs ORDER BY created_at, job_id").fetchall()


def answered(answer: Any, model: type | None = None) -> Any:
    """The document of an answer of success; of a model it has the fields and no others."""
    assert answer.status_code == 200, answer.text
    document = answer.get_json()
    if model:
        strict(model, document)
    return document


def asked(client: FlaskClient, path: str, model: type | None = None) -> Any:
    return answered(client.get(path), model)


def strict(model: type, document: Any) -> None:
    """Check that the document has the fields of the model, and no others."""
    adapter(model).validate_python(document)
    known = get_type_hints(model)
    assert set(document) <= set(known)
    for name, value in document.items():
        for inner in (known[name], *get_args(known[name])):
            for row in value if isinstance(value, list) else [value]:
                if is_dataclass(inner) and isinstance(inner, type) and row is not None:
                    strict(inner, row)


@contextmanager
def running(dsn: str, **settings: Any) -> Iterator[Flask]:
    """The application on `dsn`; its sessions are closed at the end."""
    given = {"_env_file": None, "dl_db_dsn": dsn, "pg_pool_size": 2, **settings}
    app = create_app(config.load(**given))
    try:
        yield app
    finally:
        app.extensions["sessions"].close()
