"""The partitions and the counts of backfills over HTTP."""

from typing import Any

import pytest
from api_app import answered, asked
from flask.testing import FlaskClient

from dataloader.model.plans import Backfill, BackfillRetried, Partitions
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
