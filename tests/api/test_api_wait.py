"""GET /api/v1/jobs/{id}/status?wait=: an answer once the job has changed, and what ends a wait otherwise."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from api_app import MINIMAL, TRIGGER, Refused, bearer, entries, running
from flask import Flask
from flask.testing import FlaskClient
from link import SILENT, linked
from patience import until

from dataloader.api.web.long_poll import Outcome
from dataloader.queue import db

Asked = Callable[..., Future[Any]]


@pytest.fixture
def asked(app: Flask) -> Iterator[Asked]:
    """Ask in a thread of its own, and go on once the request waits."""
    with ThreadPoolExecutor() as threads:

        def ask(path: str, **headers: str) -> Future[Any]:
            polls = app.extensions["long_polls"]
            before = len(polls._waiting)
            answer = threads.submit(lambda: app.test_client().get(path, headers=headers))
            until(lambda: len(polls._waiting) > before or answer.done(), "the request to wait")
            return answer

        yield ask
        app.extensions["long_polls"].stop()


@pytest.fixture
def job(client: FlaskClient) -> str:
    """The address of a queued job's status."""
    return f"/api/v1/jobs/{client.post(TRIGGER, json=MINIMAL).get_json()['job_id']}/status"


def test_a_wait_is_0_to_30_seconds(client: FlaskClient, refused: Refused, job: str) -> None:
    for wait in ["", "x", "-1", "31", "0.5", "1e1", "nan", "99999", "١"]:
        refused(client.get(job, query_string={"wait": wait}), 400, "invalid-input", "/wait")
        assert client.get(job, query_string={"wait": "0"}).status_code == 200


def test_the_tag_changes_with_the_job(client: FlaskClient, conn: db.Connection, job: str) -> None:
    first = client.get(job)
    assert first.headers["ETag"] == client.get(job).headers["ETag"]
    known = {"If-None-Match": first.headers["ETag"]}
    same = client.get(job, headers=known)
    assert (same.status_code, same.data, same.headers["ETag"]) == (304, b"", first.headers["ETag"])
    conn.execute("""UPDATE dl_jobs SET progress = '{"a": 1}'""")
    other = client.get(job + "?wait=30", headers=known)
    assert (other.status_code, other.get_json()["progress"]) == (200, {"a": 1})
    assert other.headers["ETag"] != first.headers["ETag"]


def test_a_wait_ends_when_the_job_changes_or_is_deleted(
    client: FlaskClient, conn: db.Connection, job: str, asked: Asked
) -> None:
    waiting = [asked(job + "?wait=30"), asked(job + "?wait=30", **{"If-None-Match": client.get(job).headers["ETag"]})]
    assert not any(answer.done() for answer in waiting)
    client.post(job.replace("/status", "/cancel"))
    for answer in waiting:
        assert answer.result(20).get_json()["status"] == "canceled"
    assert client.get(job + "?wait=30").get_json()["status"] == "canceled"  # at once: nothing more will come
    conn.execute("UPDATE dl_jobs SET status = 'queued', finished_at = NULL")
    answer = asked(job + "?wait=30")
    conn.execute("DELETE FROM dl_jobs")
    assert answer.result(20).status_code == 404


PAUSED = "INSERT INTO dl_queues (queue, paused_at, paused_by) VALUES ('load.cbr', now(), 'x')"
SHOWN = """INSERT INTO dl_workers (worker, farm, host, pid, queue, state, started_at)
  VALUES (gen_random_uuid()::text, 'f', 'h', 1, 'load.cbr', 'idle', now())"""
BUSY = """INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, lease_expires_at)
  VALUES (gen_random_uuid(), 'load.cbr', 't', 'cbr', 'running', now() + interval '1 min')"""


def test_a_wait_ends_when_the_job_waits_for_something_else(
    client: FlaskClient, conn: db.Connection, job: str, asked: Asked
) -> None:
    assert client.get(job).get_json()["waiting_for"]["reason"] == "no_worker"
    for statement, wanted in [
        (PAUSED, "paused"),
        ("DELETE FROM dl_queues", "no_worker"),
        (SHOWN, "worker"),
        ("DELETE FROM dl_workers", "no_worker"),
        (BUSY, "lock"),
        ("UPDATE dl_jobs SET lease_expires_at = now() WHERE status = 'running'", "no_worker"),
    ]:
        known = {"If-None-Match": client.get(job).headers["ETag"]}
        answer = asked(job + "?wait=30", **known)
        assert not answer.done()
        conn.execute(statement)
        reply = answer.result(20)
        assert (reply.status_code, reply.get_json()["waiting_for"]["reason"]) == (200, wanted)
        assert reply.headers["ETag"] not in known.values()


def test_figures_end_no_wait(client: FlaskClient, conn: db.Connection) -> None:
    """Jobs before it come and go all the time, and workers: of these the answer tells, but they are no change."""
    job = f"/api/v1/jobs/{client.post(TRIGGER, json=MINIMAL | {'lock_key': 'last'}).get_json()['job_id']}/status"
    conn.execute(SHOWN)
    before = client.get(job)
    conn.execute(SHOWN)
    client.post(TRIGGER, json=MINIMAL | {"priority": 1})
    after = client.get(job)
    assert [reply.get_json()["waiting_for"]["ahead"] for reply in (before, after)] == [0, 1]
    assert [reply.get_json()["waiting_for"]["workers"] for reply in (before, after)] == [1, 2]
    assert before.headers["ETag"] == after.headers["ETag"]


def test_a_wait_ends_with_its_time(client: FlaskClient, job: str) -> None:
    known = {"If-None-Match": client.get(job).headers["ETag"]}
    assert client.get(job + "?wait=1", headers=known).status_code == 304
    assert client.get(job + "?wait=1").get_json()["status"] == "queued"


def test_who_waits_holds_no_session_and_the_surplus_is_answered(dsn: str) -> None:
    with running(dsn, pg_pool_size=1, pg_max_overflow=0) as app, ThreadPoolExecutor() as threads:
        app.extensions["on_threads"](4)
        client = app.test_client()
        job = f"/api/v1/jobs/{client.post(TRIGGER, json=MINIMAL).get_json()['job_id']}/status"
        waiting = [threads.submit(lambda: app.test_client().get(job + "?wait=30")) for _ in range(2)]
        until(lambda: len(app.extensions["long_polls"]._waiting) == 2, "two to wait")
        surplus = client.get(job + "?wait=30")
        assert surplus.get_json()["status"] == "queued"
        assert int(surplus.headers["Retry-After"]) > 0
        app.extensions["on_drain"][0]()
        assert [answer.result(20).get_json()["status"] for answer in waiting] == ["queued", "queued"]
        assert app.extensions["long_polls"].wait(None, "", 30) is Outcome.SAME


def test_a_token_leaves_places_to_the_others(dsn: str) -> None:
    tokens = entries(many="trigger", other="trigger")
    with running(dsn, dl_api_tokens=tokens) as app, ThreadPoolExecutor() as threads:
        app.extensions["on_threads"](8)  # so four may wait
        polls = app.extensions["long_polls"]

        def ask(name: str, path: str, method: str = "GET", **more: Any) -> Any:
            return app.test_client().open(path, method=method, headers=bearer(name), **more)

        added = [ask(name, TRIGGER, "POST", json=MINIMAL | {"lock_key": name}) for name in ("many", "other")]
        many, other = (f"/api/v1/jobs/{answer.get_json()['job_id']}/status?wait=30" for answer in added)
        waiting = [threads.submit(ask, "many", many) for _ in range(3)]
        until(lambda: len(polls._waiting) == 3, "three to wait")
        assert "Retry-After" in ask("many", many).headers
        waiting.append(threads.submit(ask, "other", other))
        until(lambda: len(polls._waiting) == 4, "the other to wait")
        polls.stop()
        assert all("Retry-After" not in answer.result(20).headers for answer in waiting)


def test_a_database_that_stops_ends_a_wait(dsn: str, refused: Refused) -> None:
    with linked(dsn) as link, running(link.dsn, patient=False) as app, ThreadPoolExecutor() as threads:
        client = app.test_client()
        added = until(lambda: client.post(TRIGGER, json=MINIMAL).get_json().get("job_id"), "the first session")
        answer = threads.submit(lambda: app.test_client().get(f"/api/v1/jobs/{added}/status?wait=30"))
        until(lambda: app.extensions["long_polls"]._waiting, "the request to wait")
        link.leave(SILENT)
        refused(answer.result(20), 503, "unavailable")
        link.thaw()
