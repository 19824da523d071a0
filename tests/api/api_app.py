"""The application on a test's database, for the tests of this folder."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from threading import Thread
from typing import Any, ClassVar, get_args, get_type_hints

from flask import Flask
from flask.testing import FlaskClient
from patience import PATIENCE
from psycopg.rows import dict_row
from werkzeug.routing import Rule
from werkzeug.serving import WSGIRequestHandler, make_server

from dataloader import config
from dataloader.api import create_app, dispatch
from dataloader.api.dashboard import actions
from dataloader.api.web import sessions, tokens
from dataloader.ops.op import adapter
from dataloader.queue import db
from dataloader.queue.reports import stats

TRIGGER, BATCH = "/api/v1/jobs/trigger", "/api/v1/jobs/batch"
HTMX = {"HX-Request": "true"}
NOWHERE = "postgresql://nobody@127.0.0.1:1/none"  # no server listens on port 1
MINIMAL = {"queue": "load.cbr", "task": "cbr.currencies", "lock_key": "cbr"}
TOKENS: defaultdict[str, str] = defaultdict(tokens.new)  # by their names
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


def bearer(name: str) -> dict[str, str]:
    """The header with the token of this name."""
    return {"Authorization": f"Bearer {TOKENS[name]}"}


def entries(**scopes: str) -> str:
    """DL_API_TOKENS with a token of each of these names, which has these scopes."""
    return json.dumps([json.loads(tokens.entry(TOKENS[name], name, held.split())) for name, held in scopes.items()])


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


def journal(conn: db.Connection, job_id: object, queue: str, *steps: tuple[str, float, dict[str, Any]]) -> None:
    """Write these steps of a job into its journal: of each the kind, how many seconds ago it was, and the payload."""
    with conn.transaction():  # in which now() is the same
        for kind, ago, payload in steps:
            conn.execute(
                "INSERT INTO dl_job_events (job_id, queue, kind, ts, payload)"
                " VALUES (%s, %s, %s, now() - make_interval(secs => %s), %s)",
                (job_id, queue, kind, ago, json.dumps(payload)),
            )


def show_worker(conn: db.Connection, **fields: Any) -> None:
    """Let the queue `q` have a worker, or another one with these fields."""
    worker = {"worker": "h:1:b", "pid": 1, "queue": "q", "state": "idle", "jobs": 0}
    stats.show_workers(conn, "f", "h", [worker | fields])


def next_page(answer: Any) -> str:
    """The address in the answer's Link; "" without one."""
    return str(answer.headers.get("Link", "").partition(">")[0].lstrip("<"))


# The API's time limits of up to two seconds, which a checkpoint or a busy machine may exceed.
LIMITS: list[tuple[Any, str, Any]] = [
    *((sessions, name, getattr(sessions, name)) for name in ("CONNECT_SEC", "PROBE_SEC", "STALL_SEC")),
    *((stats, name, getattr(stats, name)) for name in ("COUNTING_SEC", "BRIEFLY_SEC")),
    (actions, "ALL_SEC", actions.ALL_SEC),
]


_OPEN: list[list[bool]] = []  # for each application that is open, whether it is patient


def _set_limits() -> None:
    for module, name, limit in LIMITS:
        long = (PATIENCE, PATIENCE) if isinstance(limit, tuple) else PATIENCE
        setattr(module, name, long if _OPEN and _OPEN[-1][0] else limit)


@contextmanager
def running(dsn: str, patient: bool = True, **settings: Any) -> Iterator[Flask]:
    """The application on `dsn`; its sessions are closed at the end.

    A `patient` one has no short time limit, so that a machine that stalls turns no answer into a 503. An impatient one
    has the product's limits, for tests of a database that does not answer. Applications may close in any order.
    """
    given = {"_env_file": None, "dl_db_dsn": dsn, "pg_pool_size": 2, **settings}
    if patient:
        given.setdefault("pg_command_timeout", PATIENCE)
    mark = [patient]
    _OPEN.append(mark)
    try:
        _set_limits()
        app = create_app(config.load(**given))
        try:
            yield app
        finally:
            app.extensions["sessions"].close()
    finally:
        _OPEN[:] = [each for each in _OPEN if each is not mark]
        _set_limits()


class _Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        """The requests are not what a test's output should be full of."""


@contextmanager
def listening(app: Flask) -> Iterator[str]:
    """The address of an application on a port of this machine, as long as the block."""
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    server.daemon_threads = False  # so that none is left when the sessions are closed
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
