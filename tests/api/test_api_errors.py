"""/api/v1/errors: groups of dead jobs, their jobs, an order to one, notes; wrong ones change nothing."""

from typing import Any

import pytest
from api_app import MINIMAL, TRIGGER, asked
from flask.testing import FlaskClient

from dataloader.queue import db

ERRORS = "/api/v1/errors"
BOOM = "ValueError at load.py:step: row # is wrong"


@pytest.fixture
def failed(client: FlaskClient, conn: db.Connection) -> None:
    """Two dead jobs of a group, one of another."""
    for group in (BOOM, BOOM, "OSError at load.py:open: away"):
        job_id = client.post(TRIGGER, json=MINIMAL | {"queue": "q", "task": "t"}).get_json()["job_id"]
        conn.execute(
            "UPDATE dl_jobs SET status = 'failed', error = 'password=hunter2 is wrong' WHERE job_id = %s", (job_id,)
        )
        conn.execute("UPDATE dl_jobs SET error_group = %s WHERE job_id = %s", (group, job_id))


def groups(client: FlaskClient, query: str = "") -> list[Any]:
    return list(asked(client, ERRORS + query)["groups"])


@pytest.mark.usefixtures("failed")
def test_a_group_is_filtered_leads_to_its_jobs_and_is_requeued_alone(client: FlaskClient) -> None:
    first, second = groups(client)
    assert (first["queue"], first["task"], first["error_group"]) == ("q", "t", BOOM)
    assert (first["dead"], first["retrying"], sum(first["by_hour"]), second["dead"]) == (2, 0, 2, 1)
    assert "hunter2" not in str(first)
    query = {"error_group": BOOM, "status": "dead"}
    assert len(client.get("/api/v1/jobs", query_string=query).get_json()["jobs"]) == 2
    assert len(groups(client, "?queue=q&task=t&since=2020-01-01T00:00:00Z")) == 2
    for filtered in ("?queue=r", "?task=u", "?since=2031-01-01T00:00:00Z"):
        assert groups(client, filtered) == []
    order = {"task": "t", "error_group": BOOM}
    assert client.post("/api/v1/queues/q/requeue-dead", json=order).get_json()["changed"] == 2
    assert [group["error_group"] for group in groups(client)] == ["OSError at load.py:open: away"]
