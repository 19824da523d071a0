"""Backfills over HTTP: made, tried, paused, canceled; what is refused and why."""

from typing import Any

import pytest
from api_app import answered, asked
from flask.testing import FlaskClient

from dataloader.model.plans import Backfill, BackfillPreview, BackfillRetried, Partitions
from dataloader.queue import db
from dataloader.queue.plans import backfills

PATH = "/api/v1/backfills"
RATES = {
    "name": "rates",
    "task": "load",
    "since": "2019-01-01",
    "until": "2019-01-05",
    "step": "day",
    "args": {"date": "{{ date }}"},
}


def added(client: FlaskClient, **fields: Any) -> dict[str, Any]:
    return dict(answered(client.post(PATH, json=RATES | fields), Backfill))


def test_a_dry_run_shows_jobs_and_changes_nothing(client: FlaskClient) -> None:
    shown = answered(client.post(f"{PATH}/dry-run", json=RATES), BackfillPreview)
    assert (shown["total"], shown["samples"][-1]["args"]) == (5, {"date": "2019-01-05"})
    assert client.get(PATH).get_json() == {"backfills": []}


def test_the_partitions_come_page_by_page_each_with_its_job(client: FlaskClient, conn: db.Connection) -> None:
    added(client)
    backfills.tick(conn)
    conn.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now() WHERE partition_key = '2019-01-02'")
    first = asked(client, f"{PATH}/rates/partitions?limit=3", Partitions)
    assert [each["partition"] for each in first["partitions"]] == ["2019-01-01", "2019-01-02", "2019-01-03"]
    rest = asked(client, f"{PATH}/rates/partitions?after={first['next']}", Partitions)
    assert (len(rest["partitions"]), rest["next"]) == (2, None)
    (failed,) = asked(client, f"{PATH}/rates/partitions?status=failed", Partitions)["partitions"]
    assert client.get(f"/api/v1/jobs/{failed['job_id']}").get_json()["args"] == {"date": "2019-01-02"}
    retried = answered(client.post(f"{PATH}/rates/retry", json={}), BackfillRetried)
    assert retried == {"changed": 1, "next": None}
    assert asked(client, f"{PATH}/rates", Backfill)["counts"]["queued"] == 5


def test_the_page_shows_each_partition_as_a_cell_that_leads_to_its_job(
    client: FlaskClient, conn: db.Connection
) -> None:
    added(client, max_running=3)
    page = client.get("/backfills/rates").text
    assert page.count('class="cell planned" title="2019-01-0') == 5
    backfills.tick(conn)
    conn.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now() WHERE partition_key = '2019-01-02'")
    failed = backfills.ledger_rows(conn, "rates", 1, 1)[0]["job_id"]
    client.application.extensions["shared"].clear()
    page = client.get("/backfills/rates").text
    assert f'<a class="cell failed" href="/jobs/{failed}" title="2019-01-02: failed"' in page
    assert page.count('class="cell queued" href=') == 4
    assert "at most" in page.lower()
    assert 'href="/backfills/rates"' in client.get("/backfills").text
    assert client.get("/backfills/nothing").status_code == 404


@pytest.mark.usefixtures("ageless")
def test_the_counts_of_a_large_backfill_are_shared(
    client: FlaskClient, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfills, "LARGE", 5)
    added(client)
    small = client.post(PATH, json={"name": "small", "task": "load", "partitions": ["x"]})
    assert small.status_code == 200, small.text
    counts = [each["counts"]["missing"] for each in client.get(PATH).json["backfills"]]
    conn.execute("DELETE FROM dl_partitions")
    then = [each["counts"]["missing"] for each in client.get(PATH).json["backfills"]]
    assert (sorted(counts), sorted(then)) == ([1, 5], [0, 5]), "up to some seconds old, and of the moment"
