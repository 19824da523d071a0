"""GET /ready: whether requests should be sent here, and if not, why; however the database is, it answers soon."""

import html
import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from time import monotonic, time
from typing import Any

import psycopg
import pytest
import structlog
from api_app import MINIMAL, NOWHERE, TRIGGER, Refused, running
from flask import Flask
from flask.testing import FlaskClient
from link import SILENT, linked
from patience import until
from psycopg.conninfo import conninfo_to_dict
from structlog.testing import capture_logs

from dataloader.api.server import health
from dataloader.farm.common_log import FarmOutage, Note
from dataloader.farm.session import Lost, Session, opened
from dataloader.queue import db, migrations
from dataloader.queue.reports import stats

FULL = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$;
CREATE TRIGGER full_disk BEFORE INSERT ON dl_jobs FOR EACH ROW EXECUTE FUNCTION refuse()
"""


def refusal(client: FlaskClient, refused: Refused, check: str) -> dict[str, Any]:
    answer = client.get("/ready")
    problem = refused(answer, 503, "unavailable", f"/checks/{check}")
    assert check in problem["detail"]
    assert int(answer.headers["Retry-After"]) > 0
    return problem


def test_it_is_ready(client: FlaskClient) -> None:
    answer = client.get("/ready")
    assert (answer.status_code, answer.get_json()) == (
        200,
        {"status": "ready", "checks": {"database": "ok", "schema": "ok", "draining": False}},
    )


def test_a_process_that_ends_is_not(client: FlaskClient, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_drains", False)
    health.drain()
    refusal(client, refused, "draining")
    assert client.get("/health").status_code == 200


def test_a_schema_that_does_not_fit(empty_db: str, own_db: str, refused: Refused) -> None:
    with running(empty_db) as app, capture_logs() as logs:
        assert "dataloader migrate" in refusal(app.test_client(), refused, "schema")["detail"]
        problem = refused(app.test_client().post(TRIGGER, json=MINIMAL), 503, "unavailable")
        assert "run `dataloader migrate`" in problem["detail"]
    assert "api.schema_refused" in {line["event"] for line in logs}
    with running(own_db) as app, db.connect(own_db, name="test", schema="public") as conn:
        assert _status(app) == 200
        conn.execute("UPDATE dl_migrations SET oldest_code = 9999 WHERE number = 1")
        refusal(app.test_client(), refused, "schema")


@pytest.mark.long
def test_a_database_that_hangs_holds_nobody_up_and_heals(own_db: str, refused: Refused) -> None:
    with linked(own_db) as link, running(link.dsn, patient=False) as app:
        until(lambda: _status(app) == 200, "the first session")
        link.leave(SILENT)
        began = monotonic()
        with ThreadPoolExecutor(10) as pool:
            assert set(pool.map(lambda _: _status(app), range(10))) == {503}
        refusal(app.test_client(), refused, "database")
        assert monotonic() - began < 10  # one after the other they would wait for thirty seconds
        link.thaw()
        until(lambda: _status(app) == 200, "the database")


def _overview(app: Flask) -> str:
    return html.unescape(app.test_client().get("/").get_data(as_text=True))


def _status(app: Flask) -> int:
    return app.test_client().get("/ready").status_code


@pytest.mark.long
def test_a_refused_connection_has_the_servers_reason(refused: Refused, own_db: str, server_dsn: str) -> None:
    with running(NOWHERE, patient=False) as app:
        assert "Connection refused" in refusal(app.test_client(), refused, "database")["detail"]
    with running("host=/nonexistent", patient=False) as app:
        assert "its socket does not exist" in refusal(app.test_client(), refused, "database")["detail"]
    name = conninfo_to_dict(own_db)["dbname"]
    with running(own_db, patient=False) as app, psycopg.connect(server_dsn, autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        assert "session is read-only" in refusal(app.test_client(), refused, "database")["detail"]
        admin.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        until(lambda: _status(app) == 200, "the API to be content")


@pytest.mark.long
def test_a_server_that_ends_sessions_by_a_timeout(own_db: str, refused: Refused, server_dsn: str) -> None:
    """A session that ends so is one that is lost: reaper and workers connect again, and the API says why it waits."""
    name = conninfo_to_dict(own_db)["dbname"]
    with running(own_db, patient=False) as app, psycopg.connect(server_dsn, autocommit=True) as admin:
        if admin.info.server_version < 170_000:
            pytest.skip("transaction_timeout is new in PostgreSQL 17")
        admin.execute(f"ALTER DATABASE {name} SET transaction_timeout = '1ms'")
        assert "transaction timeout" in refusal(app.test_client(), refused, "database")["detail"]
        admin.execute(f"ALTER DATABASE {name} RESET transaction_timeout")
        until(lambda: _status(app) == 200, "the API to be content")


@contextmanager
def of_role(own_db: str, role: str) -> Iterator[tuple[Flask, db.Connection, str]]:
    """The API of a farm's role, a connection of the owner, and the role's name."""
    name = str(conninfo_to_dict(role)["user"])
    with running(role) as app, db.connect(own_db, name="test", schema="public") as conn:
        migrations.grant(own_db, "public", [("farm", name)])
        yield app, conn, name


def test_a_role_without_the_rights_to_add_and_end_jobs(
    own_db: str, make_role: Callable[[str], str], refused: Refused
) -> None:
    with of_role(own_db, make_role(own_db)) as (app, conn, name):
        until(lambda: _status(app) == 200, "the API to be ready")
        for right in (
            "INSERT ON dl_jobs",
            "UPDATE ON dl_jobs",
            "EXECUTE ON FUNCTION dl_finish",
            "UPDATE ON dl_queues",
            "INSERT ON dl_job_logs",
            "USAGE ON SEQUENCE dl_job_events_event_id_seq",
        ):
            conn.execute(f"REVOKE {right} FROM {name}")
            lacking = re.sub(" ON (FUNCTION |SEQUENCE |)", " on ", right)
            text = f"The farm's role lacks {lacking}."
            assert text in refusal(app.test_client(), refused, "database")["detail"]
            until(lambda text=text: text in _overview(app), "the overview to say so")  # type: ignore[misc]
            conn.execute(f"GRANT {right} TO {name}")
            assert _status(app) == 200


def test_a_table_that_the_role_may_not_read_or_that_is_gone(
    own_db: str, make_role: Callable[[str], str], refused: Refused
) -> None:
    with of_role(own_db, make_role(own_db)) as (app, conn, name):
        conn.execute(f"REVOKE SELECT ON dl_workers FROM {name}")
        assert "lacks SELECT on dl_workers." in refusal(app.test_client(), refused, "database")["detail"]
        for page in ("/", "/api/v1/workers"):
            answer = app.test_client().get(page)
            assert answer.status_code == 503
            assert "permission denied for table dl_workers" in answer.get_data(as_text=True)
        conn.execute("ALTER TABLE dl_workers RENAME TO old_workers")
        answer = app.test_client().get("/api/v1/workers")
        assert 'relation "dl_workers" does not exist' in refused(answer, 503, "unavailable")["detail"]
        assert "lacks the table dl_workers." in refusal(app.test_client(), refused, "database")["detail"]


@pytest.mark.parametrize("table", ["dl_jobs", "dl_migrations"])
def test_rows_that_row_security_hides(
    own_db: str, make_role: Callable[[str], str], refused: Refused, table: str
) -> None:
    """A session that was opened before sees an empty queue, and no statement fails."""
    with of_role(own_db, make_role(own_db)) as (app, conn, _):
        until(lambda: _status(app) == 200, "the API to be ready")
        conn.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        text = f"row security hides the rows of {table} from this role"
        assert text in refusal(app.test_client(), refused, "schema")["detail"]
        until(lambda: text in _overview(app), "the overview to say so")
        conn.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
        until(lambda: text not in _overview(app), "the overview to be content")


@pytest.mark.parametrize("mode", ["SHARE", "ACCESS EXCLUSIVE"])
def test_a_table_that_a_session_has_locked(own_db: str, refused: Refused, mode: str) -> None:
    with running(own_db) as app, psycopg.connect(own_db, application_name="psql", autocommit=True) as conn:
        until(lambda: _status(app) == 200, "the API to be ready")
        with conn.transaction():
            conn.execute(f"LOCK TABLE dl_jobs IN {mode} MODE")
            does = "has locked dl_jobs: no job can be added or ended."
            text = f"(psql), backend {conn.info.backend_pid}, {does}"
            until(lambda: _status(app) == 503, "the lock to count")
            answer = refusal(app.test_client(), refused, "database")["detail"]
            assert f"A session {does}" in answer
            assert "psql" not in answer, "everybody may ask"
            if mode == "SHARE":  # which lets others read
                until(lambda: text in _overview(app), "the overview to say so")
        assert _status(app) == 200
        until(lambda: text not in _overview(app), "the overview to be content")


def test_triggers_and_indexes_that_do_not_work(own_db: str) -> None:
    with running(own_db) as app, db.connect(own_db, name="test", schema="public") as conn:
        conn.execute("ALTER TABLE dl_jobs DISABLE TRIGGER dl_jobs_notify_upd; DROP INDEX ix_dl_jobs_turn")
        text = "The schema has 2 faults; the first: trigger dl_jobs_notify_upd is disabled."
        until(lambda: text in _overview(app), "the overview to say so")
        assert app.test_client().get("/api/v1/database").get_json()["faults"] == [
            "trigger dl_jobs_notify_upd is disabled",
            "index ix_dl_jobs_turn is missing",
        ]
        assert _status(app) == 200, "a job could be added and ended"
        migrations.migrate(own_db, schema="public")
        until(lambda: text not in _overview(app), "the overview to be content")


def test_a_server_without_room_also_where_only_a_worker_met_it(
    own_db: str, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db.Connection, "disk_full_at", db.Connection.disk_full_at)  # other tests share the process
    outage = FarmOutage(Note(), structlog.get_logger("worker"))
    worker = Session(lambda: opened(own_db, "dl-worker:q", "public", 5, 5, 5), lambda *_: None, outage, "lost")
    with ExitStack() as stack:
        app = stack.enter_context(running(own_db))
        conn = stack.enter_context(db.connect(own_db, name="test", schema="public"))
        stack.callback(lambda: worker.call(lambda session: session.conn.close()))
        conn.execute(FULL)
        insert = "INSERT INTO dl_jobs (job_id, queue, task, lock_key) VALUES (gen_random_uuid(), 'q', 't', 'k')"
        with pytest.raises(Lost):
            worker.call(lambda session: session.conn.execute(insert))
        until(lambda: 0.5 < time() % 1 < 0.8, "the half of a second whose rounded time lies in the future")
        worker.call(lambda session: session.conn.execute("SELECT"))
        monkeypatch.setattr(db.Connection, "disk_full_at", -math.inf)  # the worker's process is another one
        assert "The server's disk is full" in refusal(app.test_client(), refused, "database")["detail"]
        assert "No space left on device" in app.test_client().post(TRIGGER, json=MINIMAL).get_json()["detail"]
        until(lambda: "The server's disk is full" in _overview(app), "the overview to say so")
        assert app.test_client().get("/api/v1/database").get_json()["disk_full"]
        monkeypatch.setattr(stats, "DISK_FULL_SEC", 0)
        assert _status(app) == 200


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("failed to resolve host 'pg.internal': [Errno -2] Name or service not known", ""),
        ("{}Connection refused\n\tIs the server running on that host?", "Connection refused"),
        ('{}FATAL:  no pg_hba.conf entry for host "10.2.3.4", user "farm"', "FATAL: no pg_hba.conf entry…"),
        ('{}FATAL:  role "farm" does not exist', "FATAL: role … does not exist"),
        ("{}FATAL:  Rolle »farm« existiert nicht, Host »10.2.3.4«", "FATAL: Rolle … existiert nicht, Host …"),
        ("{}FATAL:  le rôle « farm » n'existe pas", "FATAL: le rôle … n'existe pas"),
    ],
)
def test_a_refusal_names_no_host_role_or_database(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise psycopg.OperationalError(text.format('connection failed: connection to server at "h", port 1 failed: '))

    monkeypatch.setattr(db.Connection, "refusal", db.Connection.refusal)
    monkeypatch.setattr(psycopg.Connection, "connect", refuse)
    with pytest.raises(psycopg.OperationalError) as raised:
        db.Connection.connect("")
    assert db.reason(raised.value) == shown
