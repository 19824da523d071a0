"""The zone of pages, the chart's range, the page of PostgreSQL, the limit of a queue: without a browser."""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import psycopg
import pytest
from api_app import HTMX, journal, running, show_worker
from flask.testing import FlaskClient

from dataloader import config
from dataloader.queue import db, enqueue, operations, parents
from dataloader.queue.plans import backfills, new_backfill, new_schedule, schedules
from dataloader.queue.reports import alerts, errors, postgres, stats, timeline, webhooks


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


def test_an_empty_farm_leads_to_its_first_job_and_no_longer_once_there_is_one(
    client: FlaskClient, conn: db.Connection
) -> None:
    page = client.get("/").text
    assert "what to do next" in page
    assert "dataloader workers" in page
    assert '<a href="/trigger?task=noop">' in page
    assert '<a href="/trigger">Trigger one</a>' in client.get("/jobs").text
    client.application.extensions["shared"].clear()
    enqueue.enqueue(conn, enqueue.NewJob("q", "t", "k"))
    assert "what to do next" not in client.get("/").text


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
    for wrong in ("-1", "many", "2147483648", "9" * 5_000, "１"):
        answer = client.post("/do/limit?queue=q", data={"max_length": wrong}, headers=HTMX)
        assert answer.status_code == 400
        assert "max_length: Input should be" in answer.text
    assert operations.settings(conn, "q")["max_length"] is None
    operations.limit_length(conn, "q", 7, "me")
    assert "at most 7 queued jobs" in client.get("/queues/q").text


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


def test_a_backfill_without_workers_or_with_failures_says_so(client: FlaskClient, conn: db.Connection) -> None:
    plan_days(conn, queue="nobody")
    assert "No worker serves the queue" in client.get("/backfills/q1").text
    assert backfills.tick(conn)
    conn.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now()")
    client.application.extensions["shared"].clear()
    page = client.get("/backfills/q1").text
    assert '<span class="bad">3 failed</span>' in page
    assert "No worker serves the queue" not in page


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


def test_a_task_lists_its_jobs_behind_many_later_ones(client: FlaskClient, conn: db.Connection) -> None:
    job_id, _ = enqueue.enqueue(conn, enqueue.NewJob("q", "rare", "k"))
    conn.execute("UPDATE dl_jobs SET created_at = now() - interval '1 h'")
    conn.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, args)"
        " SELECT gen_random_uuid(), 'other', 'often', n::text, '{}' FROM generate_series(1, 3500) n"
    )
    assert str(job_id) in client.get("/tasks/rare").text


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


def test_figures_that_only_begin_to_count_are_lower_bounds(client: FlaskClient, conn: db.Connection) -> None:
    conn.execute("ALTER TABLE dl_jobs DISABLE TRIGGER USER")
    conn.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, finished_at, attempt, blocked_on)"
        " SELECT gen_random_uuid(), kind.queue, 't', n::text, kind.status::dl_status, kind.ended, 1, kind.blocked_on"
        " FROM generate_series(1, 1_500) n, (VALUES ('dead', 'failed', now(), NULL), ('tried', 'queued', NULL, 'time'))"
        " AS kind (queue, status, ended, blocked_on)"
    )
    conn.execute("ALTER TABLE dl_jobs ENABLE TRIGGER USER")
    page = client.get("/").text
    assert "1,000+ jobs are dead in queue dead." in page
    labels = re.findall(r'aria-label="(\w+: [^"]+)"', page)
    assert {"Dead: 1,000+", "Retries: 1,000+", "Fresh: 0+", "Running: 0"} <= {*labels}
    assert "Delete all 1,000+ dead jobs, with" in client.get("/queues/dead").text
    tried = client.get("/queues/tried").text
    assert "1,000+ scheduled" in tried
    assert "Let all 1,000+ scheduled jobs run now" in tried
    assert "Let all 1,000+ jobs that wait for a retry fail" in tried
    assert stats.note_lengths(conn, 0) is not None
    client.application.extensions["shared"].clear()
    assert "~1,500 jobs are dead in queue dead." in client.get("/").text


def test_lists_that_are_cut_say_so(client: FlaskClient, conn: db.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, _ = enqueue.enqueue(conn, enqueue.NewJob("q", "t", "k"))
    for n in range(2):
        enqueue.enqueue(conn, enqueue.NewJob("q", "t", f"c{n}", depends_on=[parent]))
    conn.execute("UPDATE dl_jobs SET attempt = 1, error_group = 'E' || lock_key, blocked_on = 'time'")
    conn.execute("INSERT INTO dl_job_events (job_id, queue, kind) SELECT job_id, queue, 'requeue' FROM dl_jobs")
    for page in (f"/jobs/{parent}", "/errors"):
        assert " 2 largest" not in client.get(page).text
        assert "the first 2" not in client.get(page).text
    monkeypatch.setattr(parents, "SHOWN", 2)
    monkeypatch.setattr(errors, "GROUPS", 2)
    client.application.extensions["shared"].clear()
    assert "the first 2, there may be more" in client.get(f"/jobs/{parent}").text
    assert "These are the 2 largest groups." in client.get("/errors").text


def test_a_queue_whose_jobs_run_is_served(client: FlaskClient, conn: db.Connection) -> None:
    job_id, _ = enqueue.enqueue(conn, enqueue.NewJob("q", "t", "k"))
    enqueue.enqueue(conn, enqueue.NewJob("q", "t", "other"))
    assert "No worker serves this queue" in client.get("/queues/q").text
    conn.execute("UPDATE dl_jobs SET status = 'running' WHERE job_id = %s", (job_id,))  # by another service
    assert "No worker serves this queue" not in client.get("/queues/q").text


def test_partitions_without_a_job_are_planned_before_they_are_missing(client: FlaskClient, conn: db.Connection) -> None:
    plan_days(conn)
    page = client.get("/backfills/q1").text
    assert "3 planned" in page
    assert "limit changed" not in client.get("/activity").text  # the backfill's own limit
    assert "2026-01-02: planned" in page
    assert "missing" not in page
    assert backfills.tick(conn)
    conn.execute("DELETE FROM dl_jobs WHERE partition_key = '2026-01-02'")
    client.application.extensions["shared"].clear()
    page = client.get("/backfills/q1").text
    assert "planned" not in page
    assert "1 missing" in page
    assert "2026-01-02: missing" in page
    plan_days(conn, name="canceled")
    backfills.cancel(conn, "canceled", "anna")
    page = client.get("/backfills/canceled").text
    assert "planned" not in page
    assert "3 missing" in page
