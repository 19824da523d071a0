"""The database stopped, frozen, slow, restarted or not migrated: 503 in less than 3 s, then business as before."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from api_app import MINIMAL, NOWHERE, TRIGGER, Refused, running
from flask.testing import FlaskClient
from link import SILENT, Link, linked
from patience import until
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from structlog.testing import capture_logs

from dataloader import config
from dataloader.api.web import sessions
from dataloader.queue import db, enqueue

# With a second less than by default for a statement, so that a slow machine answers within 3 s, too.
hurried = partial(running, patient=False, pg_command_timeout=1)
pytestmark = pytest.mark.long

POOLS = pytest.mark.parametrize("pool", [True, False], ids=["pool", "no pool"])
SESSIONS = """SELECT count(*) FROM pg_stat_activity
  WHERE datname = current_database() AND application_name = 'dl-api'"""
END_SESSIONS = """SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity
  WHERE datname = current_database() AND application_name = 'dl-api'"""


@pytest.fixture
def link(dsn: str) -> Iterator[Link]:
    with linked(dsn) as link:
        yield link


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port where connections are accepted by the kernel and by nobody else."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


JOB = f"/api/v1/jobs/{uuid4()}"
CALLS: list[dict[str, Any]] = [
    {"path": TRIGGER, "method": "POST", "json": MINIMAL},
    {"path": JOB + "/status", "method": "GET"},
    {"path": JOB + "/cancel", "method": "POST"},
]


def away(client: FlaskClient, refused: Refused, call: dict[str, Any] = CALLS[0]) -> None:
    """A request that needs the database is told in time that it is away; the others are answered."""
    with within(3):
        answer = client.open(**call)
    refused(answer, 503, "unavailable")
    assert int(answer.headers["Retry-After"]) > 0
    with within(1):
        assert client.get("/health").status_code == client.get("/status").status_code == 200


def trigger_until_it_works(client: FlaskClient) -> None:
    until(lambda: client.post(TRIGGER, json=MINIMAL).status_code == 200, "the database", 20)


def test_the_limits_together_are_less_than_three_seconds() -> None:
    assert config.load(_env_file=None).pg_command_timeout + sessions.MARGIN_SEC < 3


@POOLS
@pytest.mark.parametrize("call", CALLS, ids=["trigger", "status", "cancel"])
def test_j11_nobody_listens(refused: Refused, pool: bool, call: dict[str, Any]) -> None:
    with hurried(NOWHERE, pg_use_pool=pool) as app:
        away(app.test_client(), refused, call)


@POOLS
def test_j11_somebody_listens_and_says_nothing_or_has_no_such_database(
    dsn: str, refused: Refused, silent_port: int, pool: bool
) -> None:
    silent = f"postgresql://nobody@localhost,127.0.0.1:{silent_port}/none?connect_timeout=4"
    for wrong in (silent, make_conninfo(dsn, dbname="no_such_database")):
        with hurried(wrong, pg_use_pool=pool) as app:
            away(app.test_client(), refused)


@POOLS
def test_j11_after_a_silent_host_the_next_one_is_asked(dsn: str, link: Link, refused: Refused, pool: bool) -> None:
    """Without a pool each request connects anew, with the host that answered last."""
    with linked(dsn) as silent:
        silent.leave(SILENT)
        folders = ",".join(str(conninfo_to_dict(each.dsn)["host"]) for each in (silent, link))
        with hurried(make_conninfo(link.dsn, host=folders), pg_use_pool=pool, pg_connect_timeout=2) as app:
            trigger_until_it_works(app.test_client())
            for _ in range(5):
                assert app.test_client().post(TRIGGER, json=MINIMAL).status_code == 200


@POOLS
def test_bad_input_is_400_all_the_same(refused: Refused, pool: bool) -> None:
    with hurried(NOWHERE, pg_use_pool=pool) as app, within(sessions.CONNECT_SEC):
        refused(app.test_client().post(TRIGGER, json={}), 400, "invalid-input", "/queue")
        refused(app.test_client().get("/api/v1/jobs/x/status"), 400, "invalid-input", "")


@POOLS
def test_a_database_that_comes_back_is_used_again(link: Link, refused: Refused, pool: bool) -> None:
    with hurried(link.dsn, pg_use_pool=pool) as app:
        client = app.test_client()
        trigger_until_it_works(client)
        link.leave()
        away(client, refused)
        link.back()
        trigger_until_it_works(client)


@POOLS
def test_a_frozen_database_is_away(link: Link, refused: Refused, pool: bool) -> None:
    with hurried(link.dsn, pg_use_pool=pool, pg_pool_size=5) as app:
        client = app.test_client()
        trigger_until_it_works(client)
        link.leave(SILENT)
        for _ in range(3):  # the first meets idle sessions, the next ones a pool that cannot connect
            away(client, refused)
        link.thaw()
        trigger_until_it_works(client)


def test_frozen_between_the_test_of_a_session_and_its_use(
    link: Link, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def frozen(conn: db.Connection, new: enqueue.NewJob, limited: bool, asker: None) -> None:
        link.leave(SILENT)
        conn.execute("SELECT 1")

    with hurried(link.dsn) as app:
        trigger_until_it_works(app.test_client())
        monkeypatch.setattr(enqueue, "enqueue", frozen)
        with within(3):
            refused(app.test_client().post(TRIGGER, json=MINIMAL), 503, "unavailable")
        link.thaw()


@POOLS
def test_sessions_that_were_ended_are_replaced(dsn: str, conn: db.Connection, pool: bool) -> None:
    with running(dsn, pg_use_pool=pool, pg_pool_size=5) as app:
        client = app.test_client()
        for _ in range(3):
            assert client.post(TRIGGER, json=MINIMAL).status_code == 200
            conn.execute(END_SESSIONS)
    assert conn.execute("SELECT count(*) FROM dl_jobs").fetchone() == (3,)


def test_j11_a_session_lost_in_a_request_confirms_nothing(
    dsn: str, conn: db.Connection, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirmed = enqueue.enqueue

    def lost(session: db.Connection, new: enqueue.NewJob, limited: bool, asker: None) -> Any:
        result = confirmed(session, new, limited, asker)
        conn.execute(END_SESSIONS)
        session.execute("SELECT 1")
        return result

    monkeypatch.setattr(enqueue, "enqueue", lost)
    with running(dsn) as app, capture_logs() as logs:
        client = app.test_client()
        refused(client.post(TRIGGER, json=MINIMAL | {"idempotency_key": "k"}), 503, "unavailable")
        assert [line["event"] for line in logs] == ["api.unavailable"]
        monkeypatch.setattr(enqueue, "enqueue", confirmed)
        assert client.post(TRIGGER, json=MINIMAL | {"idempotency_key": "k"}).status_code == 200
    assert conn.execute("SELECT count(*) FROM dl_jobs").fetchone() == (1,)


@POOLS
def test_j11_a_statement_that_waits_is_given_up_and_undone(
    dsn: str, conn: db.Connection, refused: Refused, pool: bool
) -> None:
    with hurried(dsn, pg_use_pool=pool) as app:
        client = app.test_client()
        with conn.transaction():
            conn.execute("LOCK TABLE dl_jobs IN EXCLUSIVE MODE")
            with within(3):
                refused(client.post(TRIGGER, json=MINIMAL), 503, "unavailable")
        assert conn.execute("SELECT count(*) FROM dl_jobs").fetchone() == (0,)
        trigger_until_it_works(client)


def test_e6_the_pool_grows_to_its_overflow_and_no_further(dsn: str, refused: Refused) -> None:
    with hurried(dsn, pg_pool_size=1, pg_max_overflow=1) as app:
        trigger_until_it_works(app.test_client())
        borrow = app.extensions["sessions"].borrow
        with borrow() as first, borrow() as second:
            assert first is not second
            with pytest.raises(psycopg.OperationalError), borrow():
                pass
            away(app.test_client(), refused)
        with borrow() as again:
            assert again in (first, second)


def test_without_a_pool_nothing_stays_connected(dsn: str, conn: db.Connection) -> None:
    with running(dsn, pg_use_pool=False) as app:
        for _ in range(3):
            assert app.test_client().post(TRIGGER, json=MINIMAL).status_code == 200
        # The server hears of a hang-up a little later.
        until(lambda: conn.execute(SESSIONS).fetchone() == (0,), "the end of the sessions")


def test_a_schema_that_arrives_later_is_found(own_db: str) -> None:
    with psycopg.connect(own_db, autocommit=True) as conn, running(own_db) as app:
        conn.execute("ALTER TABLE dl_migrations RENAME TO elsewhere")
        client = app.test_client()
        assert client.post(TRIGGER, json=MINIMAL).status_code == 503
        conn.execute("ALTER TABLE elsewhere RENAME TO dl_migrations")
        assert client.post(TRIGGER, json=MINIMAL).status_code == 200
