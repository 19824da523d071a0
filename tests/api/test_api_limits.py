"""/api/v1/limits: made, shown, replaced and removed over HTTP; wrong ones change nothing."""

from api_app import MINIMAL, TRIGGER
from flask.testing import FlaskClient

from dataloader import config
from dataloader.cli.direct import Direct
from dataloader.queue import db

LIMITS = "/api/v1/limits"
ORACLE = f"{LIMITS}/source%3Aoracle"


def test_a_limit_from_its_making_to_its_end(client: FlaskClient) -> None:
    made = client.put(ORACLE, json={"most": 3, "per_minute": 90}).get_json()
    known = {"name": "source:oracle", "most": 3, "per_minute": 90.0, "burst": 2, "running": 0, "waiting": 0, "room": 2}
    assert made.items() >= known.items()
    assert made["changed_by"]
    replaced = client.put(ORACLE, json={"most": 1}).get_json()
    assert (replaced["most"], replaced["per_minute"], replaced["burst"], replaced["tokens"]) == (1, None, None, None)
    assert client.get(LIMITS).get_json() == {"limits": [replaced]} == {"limits": [client.get(ORACLE).get_json()]}
    assert client.delete(ORACLE).get_json() == {"name": "source:oracle"}
    assert client.get(LIMITS).get_json() == {"limits": []}


def test_a_wrong_limit_is_a_400_and_changes_nothing(client: FlaskClient) -> None:
    for wrong in ({}, {"most": 1, "burst": 2}):
        assert client.put(ORACLE, json=wrong).status_code == 400
        assert client.get(LIMITS).get_json() == {"limits": []}


def test_a_job_names_its_limits_and_says_which_one_is_full(client: FlaskClient) -> None:
    client.put(ORACLE, json={"most": 0})
    job_id = client.post(TRIGGER, json=MINIMAL | {"limits": ["other", "source:oracle"]}).get_json()["job_id"]
    shown = client.get(f"/api/v1/jobs/{job_id}/status").get_json()
    assert shown["limits"] == ["other", "source:oracle"]
    assert [each["reason"] for each in shown["waiting_for"].pop("besides")] == ["no_worker"]
    assert shown["waiting_for"] == {"reason": "limit", "limit": "source:oracle", "running": 0, "most": 0}


def test_metrics_and_the_page_show_a_limit(client: FlaskClient) -> None:
    client.put(ORACLE, json={"most": 3})
    assert 'dl_limit_most{limit="source:oracle"} 3.0' in client.get("/metrics").get_data(as_text=True)
    assert "source:oracle" in client.get("/limits").get_data(as_text=True)


def test_an_answer_in_process_is_masked_as_over_http(conn: db.Connection, dsn: str) -> None:
    """A limit's name is free text, so it may hold a connection string."""
    secret = "postgresql://u:canary-canary@host/d"
    conn.execute("INSERT INTO dl_limits (name, most, changed_by) VALUES (%s, 1, 'me')", (secret,))
    with Direct(dsn, config.load(_env_file=None)) as farm:
        (limit,) = farm.limits()
    assert ("canary" in limit.name, limit.most) == (False, 1)
