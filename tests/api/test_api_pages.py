"""The dashboard without a browser: what its pages say and carry, who may press, and what they say when they cannot."""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import psycopg
import pytest
from api_app import HTMX, NOWHERE, journal, running, show_worker
from flask.testing import FlaskClient

from dataloader import config
from dataloader.queue import db, enqueue, operations
from dataloader.queue.plans import backfills, new_backfill, new_schedule, schedules
from dataloader.queue.reports import alerts, postgres, stats, timeline, webhooks

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
        "UPDATE dl_jobs SET status = 'succeeded', attempt = 1, claims = 2, journaled = journaled + 1, limits = '{}',"
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
    assert "<dt>Limits</dt> <dd>–</dd>" in page
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


def plan_days(conn: db.Connection, **more: Any) -> None:
    """A backfill of three days, without its jobs."""
    days = {"name": "q1", "task": "t", "since": "2026-01-01", "until": "2026-01-03", "step": "day"}
    backfills.add(conn, new_backfill.checked(days | more), "anna")


def plan(conn: db.Connection, name: str, **more: Any) -> None:
    """A schedule of each night."""
    nightly = {"name": name, "task": "t", "cron": "0 3 * * *"}
    schedules.add(conn, new_schedule.checked(nightly | more, "UTC"), "anna")


def zone(client: FlaskClient) -> str:
    found = re.search('<html lang="en" data-zone="([^"]+)"', client.get("/workers").text)
    assert found
    return found[1]


def test_a_page_is_in_the_zone_of_timezone_else_of_the_machine_else_as_chosen(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "machine_zone", lambda: "America/Lima")
    with running(dsn) as app:
        assert zone(app.test_client()) == "America/Lima"
    with running(dsn, timezone="Asia/Tokyo") as app:
        client = app.test_client()
        assert zone(client) == "Asia/Tokyo"
        for name in ("UTC", "Europe/Paris"):
            client.set_cookie("dl_zone", name)
            assert zone(client) == name
        for wrong in ("Mars/Olympus", "../../etc/passwd", "<b>", "x" * 3_000, "/etc/localtime"):
            client.set_cookie("dl_zone", wrong)
            assert zone(client) == "Asia/Tokyo"


def test_times_that_are_typed_are_in_the_zone_of_the_page(dsn: str, conn: db.Connection) -> None:
    with running(dsn, timezone="Asia/Tokyo") as app:
        client = app.test_client()
        client.set_cookie("dl_zone", "America/Lima")
        job_id, _ = enqueue.enqueue(conn, enqueue.NewJob("q", "t", "k"))
        at = conn.execute("SELECT created_at FROM dl_jobs").fetchone()[0].astimezone(ZoneInfo("America/Lima"))  # type: ignore[index]
        for since, is_shown in ((at.replace(microsecond=0), True), (at + timedelta(days=1), False)):
            page = client.get(f"/jobs?since={since:%Y-%m-%dT%H:%M:%S}").text
            assert (str(job_id) in page) == is_shown
            assert f'value="{since:%Y-%m-%dT%H:%M:%S}"' in page
        form = {"name": "nightly", "task": "noop", "cron": "0 3 * * *", "queue": "", "args": "", "timezone": ""}
        assert client.post("/do/add_schedule", data=form).status_code == 200
        assert schedules.listed(conn)[0]["timezone"] == "America/Lima"


def test_a_time_in_the_form_of_a_task_is_in_the_zone_that_the_form_names(dsn: str, conn: db.Connection) -> None:
    schema = '{"properties": {"at": {"type": "string", "format": "date-time"}}}'
    operations.publish_tasks(conn, {"t": {"args_schema": schema}})
    with running(dsn, timezone="Asia/Tokyo") as app:
        client = app.test_client()
        client.set_cookie("dl_zone", "America/Lima")
        assert "in America/Lima" in client.get("/trigger?task=t").text
        form = {"task": "t", "queue": "q", "lock_key": "k", "priority": "100", "args.at": "2026-01-31T10:00:00"}
        assert client.post("/trigger", data=form, headers=HTMX).status_code == 200
    assert conn.execute("SELECT args FROM dl_jobs").fetchall() == [({"at": "2026-01-31T10:00:00-05:00"},)]


@pytest.mark.parametrize("address", ["/jobs?{}=http", "/jobs?{}=http&q="])
def test_a_list_of_jobs_knows_its_own_parameters_only(client: FlaskClient, address: str) -> None:
    for name in ("endpoint", "_anchor", "_external", "_method", "_scheme"):
        answer = client.get(address.format(name))
        assert (answer.status_code, answer.headers.get("Location")) in ((200, None), (303, "/jobs")), name
        assert "#http" not in answer.text


def test_a_reaper_that_is_there_needs_no_start_unless_it_has_sent_nothing_for_long(
    client: FlaskClient, dsn: str, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process keeps its session."""
    with psycopg.connect(dsn, application_name="dl-reaper", autocommit=True) as reaper:
        reaper.execute("SELECT 1")
        page = client.get("/").text
        assert "No reaper works" not in page
        assert re.search("Start the reaper</strong> <span class=.badge succeeded.>done", page)
        monkeypatch.setattr(stats, "REAPER_SILENT_SEC", 0.0)
        assert stats.fitness(conn, reaper_period_sec=60)["has_reaper"]
        assert not stats.fitness(conn)["has_reaper"]


def test_the_page_of_postgresql_says_what_a_role_may_not_see(
    dsn: str, conn: db.Connection, make_role: Callable[[str], str]
) -> None:
    """A role of few rights, and a session of another one that is in a transaction: shown, without what it does."""
    role = make_role(dsn)
    name = str(psycopg.conninfo.conninfo_to_dict(role)["user"])
    conn.execute(f"GRANT USAGE ON SCHEMA public TO {name}; GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}")  # type: ignore[arg-type]
    with psycopg.connect(dsn, application_name="hidden-work") as other, running(role) as app:
        other.execute("SELECT 'a-secret-literal'")
        page = app.test_client().get("/postgres")
        assert page.status_code == 200
        assert "hidden-work" in page.text
        assert "a-secret-literal" not in page.text
        assert "not to be seen by this role" in page.text
        assert "This role may not see it." in page.text
        assert "dl_jobs" in page.text


def test_each_section_of_the_server_has_rows_or_a_reason(conn: db.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    found = postgres.health(conn)
    assert set(found) == set(postgres.SECTIONS)
    server = found["server"].row
    assert server
    assert 0 < server["connections"] <= server["max_connections"]
    names = [row["name"] for row in found["tables"].rows]
    assert {"dl_jobs", "dl_pace_long"} <= set(names)
    late = "SELECT pg_cancel_backend(pg_backend_pid()), pg_sleep(60)"  # the error is that of a statement's timeout
    gone = {"wal": "SELECT nothing_here()", "slots": late}
    monkeypatch.setattr(postgres, "_SQL", db.Statements(postgres._SQL | gone))
    found = postgres.health(conn)
    assert found["wal"] == postgres.Section([], "This server does not offer it.")
    assert found["slots"].unseen == "The server did not answer in time."
    assert found["tables"].rows


def test_bloat_and_vacuum_are_told_of_the_table_as_it_is(conn: db.Connection) -> None:
    conn.execute(
        "INSERT INTO dl_totals SELECT 'q', n::text, 'done', 1, 1, array_fill(1, '{12}')"
        " FROM generate_series(1, 40000) n"
    )
    conn.execute("DELETE FROM dl_totals WHERE task::int % 4 > 0")
    conn.execute("VACUUM ANALYZE dl_totals")
    table = next(row for row in postgres.health(conn)["tables"].rows if row["name"] == "dl_totals")
    assert table["vacuumed_at"] is not None
    assert 0.5 < table["bloat_bytes"] / table["heap_bytes"] < 0.95  # three quarters of its rows, and its fillfactor
    assert table["vacuum_at"] == 500 + 2_000  # the threshold of the table, the server's share of 10,000 rows


def test_the_limit_of_a_queue_is_set_and_lifted_on_its_page(client: FlaskClient, conn: db.Connection) -> None:
    for text, limit in (("7", 7), ("0", 0), ("", None)):
        assert client.post("/do/limit?queue=q", data={"max_length": text}, headers=HTMX).status_code == 200
        assert operations.settings(conn, "q")["max_length"] == limit


@pytest.mark.parametrize(
    ("address", "form", "words"),
    [
        *(("limit?queue=q", {"max_length": bad}, "max_length: Input should be") for bad in ("-1", "2147483648", "１")),
        ("limit?queue=q", {"max_length": "9" * 5_000}, "max_length: Input should be"),
        ("set_queue?queue=q", {"ordered": "no", "merge": "yes"}, "should be ordered as well"),
        ("set_queue?queue=q", {"merge_limit": "1e3"}, "merge_limit: Input should be an integer"),
        ("set_queue?queue=q", {"batch": "99999999999999999999"}, "batch: Input should be an integer"),
        ("add_schedule", {"name": "b", "task": "t", "cron": "x"}, "five fields"),
        ("add_schedule", {"name": "b", "task": "t", "cron": "0 3 * * *", "args": "[1]"}, "JSON object"),
        ("add_schedule", {"name": "a", "task": "t", "cron": "0 3 * * *"}, "already"),
        ("add_schedule", {"name": "b", "task": "t", "interval_sec": "soon"}, "should be an integer"),
    ],
)
def test_a_wrong_form_is_refused_in_a_sentence_and_changes_nothing(
    client: FlaskClient, conn: db.Connection, address: str, form: dict[str, str], words: str
) -> None:
    plan(conn, "a")
    operations.limit_length(conn, "q", 7, "me")
    before = operations.settings(conn, "q"), schedules.listed(conn)
    answer = client.post(f"/do/{address}", data=form, headers=HTMX)
    assert answer.status_code in (400, 409)
    assert words in answer.text
    assert (operations.settings(conn, "q"), schedules.listed(conn)) == before


def test_the_overview_names_schedules_backfills_and_webhooks_that_do_not_work(
    client: FlaskClient, conn: db.Connection
) -> None:
    for name in ("broken", "overdue", "paused", "fine"):
        plan(conn, name)
    conn.execute("UPDATE dl_schedules SET error = 'no such day', error_at = now() WHERE name IN ('broken', 'paused')")
    conn.execute("UPDATE dl_schedules SET paused_at = now() WHERE name = 'paused'")
    conn.execute("UPDATE dl_schedules SET next_due = now() - interval '1 h' WHERE name = 'overdue'")
    plan_days(conn)
    conn.execute("UPDATE dl_backfills SET next_at = now() - interval '1 h'")
    webhooks.put(conn, "ops", "https://ops.example/alerts", "anna")
    job_id, _ = enqueue.enqueue(conn, enqueue.NewJob("alerts", "t", "k"))
    conn.execute("INSERT INTO dl_messages VALUES (%s, 'ops', '{}')", (job_id,))
    conn.execute("UPDATE dl_jobs SET error = 'refused', attempt = 1 WHERE job_id = %s", (job_id,))
    page = client.get("/").text
    for text in (
        "2 schedules make no jobs, among them overdue: it is overdue.",
        "The backfill q1 makes no jobs: it is overdue.",
        "The webhook ops does not receive its messages: no worker serves the queue alerts.",
    ):
        assert text in page
    wrong = client.get("/api/v1/stats").get_json()["wrong"]  # of which doctor makes its findings
    assert [alert.text in page for alert in alerts.farm_alerts({"queues": []}, (), None, wrong)] == [True] * 3


def test_the_activity_counts_all_dead_jobs_and_says_since_when_it_is_complete(
    client: FlaskClient, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    conn.execute(
        "INSERT INTO dl_job_events (job_id, queue, kind, ts)"
        " SELECT gen_random_uuid(), 'q', 'failed', now() - n * interval '0.1 s' FROM generate_series(1, 400) n"
    )
    operations.pause(conn, "q", "anna")
    conn.execute("UPDATE dl_queues SET paused_at = now() - interval '1 day'")
    page = client.get("/activity").text
    assert "400 jobs, the last" in page
    assert "dead: failed" in page
    assert "jobs are missing here" not in page
    journal(conn, uuid4(), "q", *[("stuck", 0, {})] * 4)
    for _ in range(20):
        journal(conn, uuid4(), "q", ("requeue", 0, {"by": "anna"}))
    for bound, most, words in (("OF_JOBS", 300, "20 jobs, the last"), ("OF_STEPS", 5, "5 jobs, the last")):
        monkeypatch.setattr(timeline, bound, most)
        client.application.extensions["shared"].clear()
        page = client.get("/activity").text
        assert words in page
        assert "jobs are missing here" in page
    assert "run is stuck" in page
    assert "4 jobs" not in page, "each job counts once"


def test_the_page_of_a_stuck_run_says_so_and_offers_force_first(client: FlaskClient, conn: db.Connection) -> None:
    job_id, _ = enqueue.enqueue(conn, enqueue.NewJob("q", "t", "k"))
    conn.execute("UPDATE dl_jobs SET status = 'running', claimed_by = 'h:1:b', attempt = 1, cancel_requested = true")
    conn.execute("INSERT INTO dl_durations (task, seconds, runs, learned_at) VALUES ('t', '{100, 200}', 2, now())")
    show_worker(conn, state="busy", job_id=str(job_id), silent_sec=3_600)
    page = client.get(f"/jobs/{job_id}").text
    assert "Stuck:" not in page
    assert "ends about" in page
    assert page.index(">Cancel<") < page.index(">Force cancel<")
    show_worker(conn, state="stuck", job_id=str(job_id), silent_sec=3_600)
    page = client.get(f"/jobs/{job_id}").text
    assert "<strong>Stuck:</strong> the run has reported nothing since" in page
    assert page.index(">Force cancel<") < page.index(">Cancel<")
    assert "will at its next safe point" not in page
    assert "ends about" not in page
    assert 'href="/workers">Go to the workers' in client.get("/").text


def test_an_address_that_nothing_has_is_a_page_for_a_browser(client: FlaskClient) -> None:
    assert client.get("/tasks/").status_code == 404
    for path in ("/nope", "/schedules/nope"):
        answer = client.get(path, headers={"Accept": "text/html,*/*;q=0.8"})
        assert (answer.status_code, answer.mimetype) == (404, "text/html")
        assert "Go to the overview" in answer.text
        assert client.get(path).mimetype == "application/problem+json"
    assert client.get("/api/v1/nope", headers={"Accept": "text/html"}).mimetype == "application/problem+json"


def test_a_schedule_of_an_unknown_task_says_so_and_can_be_removed(client: FlaskClient, conn: db.Connection) -> None:
    operations.publish_tasks(conn, {"load.table": {}})
    for task in ("load.table", "load.tabel"):
        form = {"name": task, "task": task, "cron": "0 3 * * *"}
        answer = client.post("/do/add_schedule", data=form)
        assert answer.status_code == 200
        assert "Go on" not in answer.text  # a second one cannot be added
    page = client.get("/schedules").text
    assert page.count("No worker has shown a pipeline of the task load.tabel.") == 1
    assert page.count("No worker has shown") == 1
    assert client.post("/do/remove_schedule?name=load.tabel").status_code == 200
    assert [row["name"] for row in schedules.listed(conn)] == ["load.table"]


def test_a_backfill_says_what_its_partitions_wait_for_and_lack(client: FlaskClient, conn: db.Connection) -> None:
    plan_days(conn, queue="nobody")
    page = client.get("/backfills/q1").text
    for text in ("No worker serves the queue", "3 planned", "2026-01-02: planned"):
        assert text in page
    assert "missing" not in page
    assert "limit changed" not in client.get("/activity").text  # the backfill's own limit
    assert backfills.tick(conn)
    conn.execute("DELETE FROM dl_jobs WHERE partition_key = '2026-01-02'")
    conn.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now()")
    client.application.extensions["shared"].clear()
    page = client.get("/backfills/q1").text
    for text in ('<span class="bad">2 failed</span>', "1 missing", "2026-01-02: missing"):
        assert text in page
    assert not re.search("No worker serves the queue|planned", page)
    plan_days(conn, name="canceled")
    backfills.cancel(conn, "canceled", "anna")
    assert re.findall(r"\d (?:planned|missing)", client.get("/backfills/canceled").text) == ["3 missing"]


def test_a_queue_names_the_jobs_that_miss_their_deadlines(client: FlaskClient, conn: db.Connection) -> None:
    job_id, _ = enqueue.enqueue(conn, enqueue.NewJob("q", "t", "late"))
    conn.execute(
        "INSERT INTO dl_predictions (job_id, queue, made_at, deadline, expected_at)"
        " VALUES (%s, 'q', now(), now() + interval '1 h', now() + interval '2 h')",
        (job_id,),
    )
    page = client.get("/queues/q").text
    assert "Deadlines that are missed" in page
    assert "t (late)" in page
    assert f'href="/jobs/{job_id}"' in page


def test_an_empty_list_offers_the_names_that_are_like_an_unknown_one(client: FlaskClient, conn: db.Connection) -> None:
    operations.publish_tasks(conn, {"load.table": {}})
    operations.pause(conn, "etl.default", "anna")
    for address in ("/jobs?task=load.tabel", "/jobs?q=task:load.tabel"):
        assert "No job fits the filters. Is the task load.table meant?" in client.get(address).text
    assert "Is the queue etl.default meant?" in client.get("/jobs?queue=etl.defautl").text
    for address in ("/jobs?task=load.table", "/jobs?task=quite.another"):
        assert "meant?" not in client.get(address).text


def test_a_queue_that_a_plan_names_has_a_page_before_its_first_job(client: FlaskClient, conn: db.Connection) -> None:
    plan(conn, "s", queue="of.s")
    plan_days(conn, queue="of.b")
    webhooks.put(conn, "ops", "https://ops.example/alerts", "anna")
    for page, link in (
        ("/schedules", "/queues/of.s"),
        ("/backfills/q1", "/queues/of.b"),
        ("/webhooks", "/jobs?queue=alerts"),
    ):
        assert f'href="{link}"' in client.get(page).text
        assert client.get(link).status_code == 200


def test_a_queue_whose_jobs_run_is_served(client: FlaskClient, conn: db.Connection) -> None:
    job_id, _ = enqueue.enqueue(conn, enqueue.NewJob("q", "t", "k"))
    enqueue.enqueue(conn, enqueue.NewJob("q", "t", "other"))
    assert "No worker serves this queue" in client.get("/queues/q").text
    conn.execute("UPDATE dl_jobs SET status = 'running' WHERE job_id = %s", (job_id,))  # by another service
    assert "No worker serves this queue" not in client.get("/queues/q").text
