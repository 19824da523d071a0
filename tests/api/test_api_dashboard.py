"""The dashboard without a browser: what its answers carry, who may press, what it says when it cannot."""

import re
from uuid import uuid4

import pytest
from api_app import HTMX, NOWHERE, journal, running
from flask.testing import FlaskClient

from dataloader.queue import db, enqueue, operations

PAGES = [
    "/",
    "/jobs",
    "/workers",
    "/postgres",
    "/schedules",
    "/limits",
    "/backfills",
    "/queues/load.cbr",
    "/queues/a%2Fb%20%3F%25",
    "/jobs?status=dead&sort=key",
]


@pytest.mark.usefixtures("ageless")
@pytest.mark.long
def test_a_page_keeps_to_its_own_host_and_an_unchanged_part_is_304(client: FlaskClient, conn: db.Connection) -> None:
    for queue in ("load.cbr", "a/b ?%"):
        operations.pause(conn, queue, "me")
    for path in PAGES:
        page = client.get(path)
        assert page.status_code == 200, path
        policy = page.headers["Content-Security-Policy"]
        assert "default-src 'self'; script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy
        assert page.text.startswith("<!doctype html>")
        assert " style=" not in page.text
        assert " onclick=" not in page.text
        (live,) = re.findall('id="live" hx-get="([^"]+)"', page.text)
        assert live.replace("&amp;", "&").replace("a/b", "a%2Fb") == path
        part = client.get(path, headers=HTMX)
        assert "<html" not in part.text
        again = client.get(path, headers=HTMX | {"If-None-Match": part.headers["ETag"]})
        assert (again.status_code, again.data) == (304, b"")


def test_the_page_of_an_ordered_queue_says_so_and_why_a_job_waits(client: FlaskClient, conn: db.Connection) -> None:
    operations.set_order(conn, "orders", "test", ordered=True, merge=True, batch=10, on_dead="hold")
    page = " ".join(client.get("/queues/orders").text.split())
    words = "start in the order of their scores; one call takes up to 1,000 jobs of a key; up to 10 keys in one call"
    assert words in page
    assert "a dead job stops its key." in page
    assert "in the order of their scores" not in client.get("/queues/load.cbr").text
    dead, waiting = (enqueue.enqueue(conn, enqueue.NewJob("orders", "t", "order-7"))[0] for _ in range(2))
    conn.execute("UPDATE dl_jobs SET status = 'failed' WHERE job_id = %s", (dead,))
    page = client.get(f"/jobs/{waiting}").text
    assert f"held by the dead job {dead}" in page
    assert f'href="/jobs/{dead}"' in page


def test_assets_are_kept_for_as_long_as_their_content_is_theirs(client: FlaskClient) -> None:
    assets = re.findall('(?:href|src)="(/static/[^"]+)"', client.get("/").text)
    assert assets
    for path in assets:
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["Cache-Control"] == "public, max-age=31536000, immutable"
        assert client.get(path[:-1]).headers["Cache-Control"] == "no-store"  # another hash: of another version
    for path in ("/static/../page.py", "/static/%2e%2e/page.py", "/static//etc/passwd", "/static/", "/static/vendor"):
        assert client.get(path).status_code == 404


def test_a_button_that_comes_too_late_says_so(client: FlaskClient, conn: db.Connection) -> None:
    job_id, _ = enqueue.enqueue(conn, enqueue.NewJob("q", "t", "k"))
    assert client.post(f"/do/cancel?job_id={job_id}", headers=HTMX).headers["HX-Trigger"] == "refresh"
    answer = client.post(f"/do/run_now?job_id={job_id}", headers=HTMX)
    assert answer.text == "the job is canceled; only a queued job can be made due"
    assert client.post(f"/do/delete?job_id={uuid4()}", headers=HTMX).status_code == 404
    assert "0 jobs deleted" in client.post("/do/delete_dead?queue=q", headers=HTMX).text


def test_a_long_run_is_shown_to_its_end(client: FlaskClient, conn: db.Connection) -> None:
    job_id, _ = enqueue.enqueue(conn, enqueue.NewJob("q", "t", "k"))
    conn.execute(
        "INSERT INTO dl_job_events (job_id, queue, kind, payload)"
        " SELECT %s, 'q', CASE n WHEN 0 THEN 'picked' WHEN 2500 THEN 'lost' ELSE 'heartbeat' END,"
        "        CASE n WHEN 2500 THEN '{\"signal\": 9}'::jsonb ELSE '{\"attempt\": 1}' END"
        "   FROM generate_series(0, 2500) n",
        (job_id,),
    )
    page = client.get(f"/jobs/{job_id}").text
    assert "and 2,499 heartbeats" in page
    assert "signal 9" in page
    assert "Later entries" not in page


def test_runs_before_and_after_a_requeue_are_told_apart_and_timed(client: FlaskClient, conn: db.Connection) -> None:
    """The page of a job that somebody put back has two attempts numbered 1; `took` is of a run and not of both."""
    job_id, _ = enqueue.enqueue(conn, enqueue.NewJob("q", "t", "k"))
    conn.execute(
        "UPDATE dl_jobs SET status = 'succeeded', attempt = 1, claims = 2, journaled = journaled + 1,"
        " started_at = now() - interval '1 hour', finished_at = now() - interval '1 minute' WHERE job_id = %s",
        (job_id,),
    )
    first, second = {"attempt": 1}, {"attempt": 0, "by": "token <ops> from ::1"}
    journal(conn, job_id, "q", ("picked", 3600, first), ("failed", 3598, first), ("requeue", 120, second))
    journal(conn, job_id, "q", ("picked", 64, first), ("done", 60, first))
    page = " ".join(client.get(f"/jobs/{job_id}").text.split())
    runs = re.findall(
        r'data-label="Run" class="number">(\d+)</td> <td data-label="Attempt" class="number">(.*?)</td>', page
    )
    assert runs == [
        ("1", "1"),
        ("2", '1 <span class="dim requeued">after the requeue by token &lt;ops&gt; from ::1</span>'),
    ]
    assert "<dt>Last run took</dt> <dd>4 s</dd>" in page
    assert '<span class="dim">took</span> 4 s' in client.get("/jobs").text
    assert client.get(f"/api/v1/jobs/{job_id}/status").get_json()["run_sec"] == pytest.approx(4, abs=0.5)


def test_from_elsewhere_nothing_is_pressed_and_no_button_shown(client: FlaskClient, conn: db.Connection) -> None:
    job_id, _ = enqueue.enqueue(conn, enqueue.NewJob("q", "t", "k"))
    afar = {"environ_base": {"REMOTE_ADDR": "10.0.0.7"}}
    assert client.post(f"/do/cancel?job_id={job_id}", headers=HTMX, **afar).status_code == 403
    assert "hx-post" in client.get(f"/jobs/{job_id}").text
    assert "hx-post" not in client.get(f"/jobs/{job_id}", **afar).text


def test_what_cannot_be_is_said_on_a_page(client: FlaskClient, conn: db.Connection) -> None:
    operations.set_order(conn, "orders", "test", ordered=True)
    enqueue.enqueue(conn, enqueue.NewJob("orders", "t", "order-7"))
    for path, status, words in [
        ("/jobs/00000000-0000-4000-8000-000000000000", 404, "there is no job with this job_id"),
        ("/jobs?status=odd", 400, "The status should be one of"),
        ("/?range=2h", 400, "should be one of: 1h, 6h, 24h, 7d"),
        ("/queues/nope", 404, "there is no queue of this name"),
        ("/jobs?queue=%00", 400, "U+0000"),
        ("/errors?since=yesterday", 400, "as 2026-01-31T14:30"),
        ("/jobs?since=0001-01-01T00:00%2B05:00", 400, "A time should be"),
        ("/jobs?since=yesterday", 400, "as 2026-01-31T14:30"),
        ("/jobs?after=%ff", 400, "cursor"),
        ("/key?queue=plain&lock_key=k", 409, "the queue plain is not ordered"),
        ("/keys?queue=plain", 409, "the queue plain is not ordered"),
        ("/keys", 400, "should name a queue"),
        ("/key?queue=orders", 400, "should name a lock key"),
        ("/key?queue=orders&lock_key=%00", 400, "U+0000"),
        ("/keys?queue=orders&after=YQBi", 400, "cursor"),
        ("/key?queue=orders&lock_key=order-7&after=YQBi", 400, "cursor"),
        ("/tasks?range=2h", 400, "The range should be one of"),
        ("/tasks/a%00b", 400, "U+0000"),
        ("/timeline?hours=7", 400, "The hours should be one of"),
        ("/queues/orders?range=2h", 400, "The range should be one of"),
        ("/backfills/nothing", 404, "there is no "),
    ]:
        answer = client.get(path)
        assert answer.status_code == status
        assert answer.mimetype == "text/html"
        assert words in answer.text
    client.set_cookie("dl_zone", "America/New_York")  # where this instant is in no year of Python
    assert client.get("/errors?since=0001-01-01T00:00:00Z").status_code == 400


def test_without_a_database_every_page_says_so() -> None:
    with running(NOWHERE, pg_use_pool=False) as app:
        client = app.test_client()
        for path in PAGES:
            page = client.get(path)
            assert page.status_code == 503
            assert page.headers["Retry-After"]
            assert "The database does not answer: connection to server" not in page.text
            assert "The database does not answer: Connection refused" in page.text
            part = client.get(path, headers=HTMX)
            assert (part.status_code, part.mimetype) == (503, "text/plain")
