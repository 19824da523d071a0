"""GET /metrics: what Prometheus scrapes, in its strict form, with and without the database."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_app import MINIMAL, NOWHERE, TRIGGER, journal, running, show_worker
from flask import Flask
from flask.testing import FlaskClient
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from dataloader.api.server import metrics
from dataloader.queue import db
from dataloader.queue.reports import stats

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


def scraped(client: FlaskClient) -> dict[str, list[Any]]:
    """The samples by name, from both formats, which must agree on what there is."""
    answer = client.get("/metrics", headers=OPENMETRICS)
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    found: dict[str, list[Any]] = {}
    for family in openmetrics(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    answer = client.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    names = {sample.name for family in plain(answer.text) for sample in family.samples}
    assert {name for name in found if not name.startswith("dl_http_")} <= names
    return found


def value(samples: list[Any], **labels: str) -> float:
    (found,) = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
    return float(found)


def test_the_farm_and_the_requests(client: FlaskClient, conn: db.Connection) -> None:
    ids = [client.post(TRIGGER, json=MINIMAL).get_json()["job_id"] for _ in range(3)]
    client.post(TRIGGER, json=MINIMAL | {"available_at": "2030-01-01T00:00:00Z", "queue": 'a"b\\c\n'.strip()})
    conn.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now() WHERE job_id = %s", (ids[0],))
    for job_id, kind, seconds in zip(ids, ("done", "failed", "lost"), (0.3, 2.0, 100_000.0), strict=True):
        journal(conn, job_id, "load.cbr", ("picked", seconds, {}), (kind, 0, {}))
    conn.execute("UPDATE dl_jobs SET created_at = now() - interval '1 h', available_at = now() - interval '1 h'"
                 " WHERE job_id = %s", (ids[1],))  # fmt: skip
    show_worker(conn, queue="load.cbr", memory_bytes=5_000_000)
    stats.aggregate(conn)
    client.get("/nowhere")
    found = scraped(client)

    assert value(found["dl_scrape_error"]) == 0
    assert value(found["dl_jobs"], queue="load.cbr", status="queued") == 2
    assert value(found["dl_jobs"], queue="load.cbr", status="dead") == 1
    assert value(found["dl_jobs_scheduled"], queue='a"b\\c') == 1
    assert 3_600 <= value(found["dl_queue_lag_seconds"], queue="load.cbr") < 3_700
    steps = found["dl_job_steps_total"]
    assert [value(steps, queue="load.cbr", step=step) for step in ("picked", "done", "lost")] == [3, 1, 1]
    buckets = {s.labels["le"]: s.value for s in found["dl_run_duration_seconds_bucket"]}
    assert [buckets[le] for le in ("0.1", "0.5", "5.0", "86400.0", "+Inf")] == [0, 1, 2, 2, 3]
    assert value(found["dl_run_duration_seconds_count"], task="cbr.currencies") == 3
    assert value(found["dl_run_duration_seconds_sum"]) == pytest.approx(100_002.3, abs=0.1)
    assert value(found["dl_workers"], queue="load.cbr", state="idle") == 1
    assert value(found["dl_worker_memory_bytes"], host="h", pid="1") == 5_000_000
    assert value(found["dl_postgres_size_bytes"]) > 1_000_000
    assert value(found["dl_http_requests_total"], route=TRIGGER, status="200", method="POST") >= 4
    assert value(found["dl_http_requests_total"], route="unmatched", status="404") >= 1
    assert value(found["dl_http_request_duration_seconds_count"], route=TRIGGER, method="POST") >= 4


def test_without_the_database_the_last_figures_are_shown(own_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CACHED_SEC", -1)
    monkeypatch.setattr(metrics, "PAUSE_FACTOR", 0)
    with running(own_db) as app:
        client = app.test_client()
        client.post(TRIGGER, json=MINIMAL)
        assert value(scraped(client)["dl_jobs"], queue="load.cbr", status="queued") == 1
        app.extensions["sessions"].close()
        found = scraped(client)
        assert value(found["dl_scrape_error"]) == 1
        assert value(found["dl_jobs"], queue="load.cbr", status="queued") == 1
        assert value(found["dl_http_requests_total"], route="/metrics", method="GET", status="200") >= 2
    monkeypatch.undo()
    with running(NOWHERE, patient=False) as app:
        found = scraped(app.test_client())
        assert value(found["dl_scrape_error"]) == 1
        assert "dl_jobs" not in found


def test_the_database_is_asked_now_and_then_and_not_by_every_scrape(
    app: Flask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "CACHED_SEC", 3_600)
    asked, totals = [], stats.totals

    def noted(conn: db.Connection) -> Any:
        asked.append(conn.execute("SHOW statement_timeout").fetchone())
        return totals(conn)

    monkeypatch.setattr(stats, "totals", noted)
    for _ in range(5):
        assert app.test_client().get("/metrics").status_code == 200
    assert asked == [("2s",)]


def test_there_are_so_many_series_whatever_is_named(
    client: FlaskClient, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MAX_NAMES", 20)
    conn.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key)"
        " SELECT gen_random_uuid(), 'token=s3cret-' || n || repeat(' x', 200), 't' || n, 'k'"
        " FROM generate_series(1, 50) n"
    )
    stats.aggregate(conn)
    text = client.get("/metrics").text
    families = {family.name: family.samples for family in plain(text)}
    assert len(families["dl_jobs_fresh"]) <= 21
    assert sum(sample.value for sample in families["dl_jobs_fresh"]) == 50
    assert len(families["dl_job_steps"]) <= 21 * (1 + len(metrics.WATCHED))
    assert sum(sample.value for sample in families["dl_job_steps"]) == 50
    assert "s3cret" not in text
    assert max(len(sample.labels["queue"]) for sample in families["dl_jobs_fresh"]) <= 200


def test_what_alerts_count_begins_at_zero(client: FlaskClient, conn: db.Connection) -> None:
    """The first lost lease of a queue would be none to increase(), were its series not there before it."""
    client.post(TRIGGER, json=MINIMAL)
    stats.aggregate(conn)
    steps = scraped(client)["dl_job_steps_total"]
    rules = RULES.read_text()
    watched = {step for names in re.findall(r'(?:increase|rate)\(dl_job_steps_total\{step=~?"([a-z_|]+)"', rules)
               for step in names.split("|")} - {"done", "canceled"}  # fmt: skip
    assert len(watched) > 4
    for step in sorted(watched):
        assert value(steps, queue="load.cbr", task="cbr.currencies", step=step) == 0
    assert value(steps, queue="load.cbr", step="queued") == 1


def test_the_alert_rules_ask_for_what_there_is(client: FlaskClient) -> None:
    types = re.findall(r"^# TYPE (\S+) (\S+)$", client.get("/metrics").text, flags=re.MULTILINE)
    names = {"up"} | {name for name, _ in types}
    names |= {name + end for name, kind in types if kind == "histogram" for end in ("_bucket", "_sum", "_count")}
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert len(rules) == len({rule["alert"] for rule in rules}) > 10
    for rule in rules:
        words = set(re.findall(r"\b(?:up|dl_\w+)(?=[{)\[ ]|$)", rule["expr"].strip()))
        assert words
        assert words <= names, rule
    in_page = set(re.findall(r"`(dl_[a-z_]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert in_page <= names
