"""Schedules and backfills over HTTP: made, changed, paused, run; their partitions; what is refused and why."""

import json
from datetime import datetime
from typing import Any

from api_app import HTMX, Refused, answered, asked, running
from flask.testing import FlaskClient

from dataloader.model.plans import Backfill, BackfillRetried, Partitions, Schedule, Schedules
from dataloader.queue import db
from dataloader.queue.plans import backfills, schedules

SCHEDULES = "/api/v1/schedules"
NIGHTLY = {"name": "nightly", "task": "load", "cron": "0 3 * * MON-FRI", "args": {"day": "{{ date }}"}}


def scheduled(client: FlaskClient, **fields: Any) -> dict[str, Any]:
    return dict(answered(client.post(SCHEDULES, json=NIGHTLY | fields), Schedule))


def test_a_schedule_is_added_with_its_defaults_and_shown_with_its_next_times(client: FlaskClient) -> None:
    document = scheduled(client)
    assert document["words"] == "At 03:00 on Monday through Friday, Europe/Moscow"
    assert (document["queue"], document["lock_key"], document["origin"]) == ("etl.default", "nightly", "people")
    assert (document["catch_up"], document["overlap"], document["jitter_sec"]) == ("last", "queue", 0)
    assert (document["priority"], document["max_attempts"], document["error"]) == (100, None, None)
    assert len(document["next"]) == 5
    assert document["next"][0] == document["next_due"]
    assert {datetime.fromisoformat(at).hour for at in document["next"]} == {0}, "03:00 in Moscow"
    assert asked(client, f"{SCHEDULES}/nightly?next=2", Schedule)["next"] == document["next"][:2]
    (listed,) = asked(client, f"{SCHEDULES}?next=0", Schedules)["schedules"]
    assert listed == document | {"next": []}


def test_a_schedule_takes_the_zone_of_the_settings_unless_it_names_one(dsn: str) -> None:
    with running(dsn, timezone="Asia/Tokyo") as app:
        assert scheduled(app.test_client())["timezone"] == "Asia/Tokyo"
        assert scheduled(app.test_client(), name="other", timezone="UTC")["timezone"] == "UTC"


def test_a_schedule_that_is_not_valid_is_refused_with_what_would_be_right(
    client: FlaskClient, refused: Refused
) -> None:
    for fields, pointer, words in [
        ({"cron": "0 3 * *"}, "/cron", "should be five fields: minute, hour"),
        ({"timezone": "Mars"}, "/timezone", "no time zone 'Mars'; it should be a name such as Europe/Moscow"),
        ({"interval_sec": 5}, "", "should have one of cron and interval_sec"),
        ({"args": {"a": "{{ dew }}"}}, "", "{{ dew }} is not known; known are {{ due }}"),
        ({"name": "a/b"}, "/name", "should be letters of A to Z, digits"),
    ]:
        problem = refused(client.post(SCHEDULES, json=NIGHTLY | fields), 400, "invalid-input", pointer)
        assert words in problem["errors"][0]["message"]
        assert client.get(SCHEDULES).get_json() == {"schedules": []}


def test_a_change_leaves_what_it_does_not_name_and_a_wrong_one_changes_nothing(
    client: FlaskClient, refused: Refused
) -> None:
    before = scheduled(client, priority=5)
    changed = answered(client.put(f"{SCHEDULES}/nightly", json={"interval_sec": 900, "priority": None}), Schedule)
    assert (changed["cron"], changed["words"], changed["priority"]) == (None, "Every 15 minutes", 100)
    assert (changed["args"], changed["changed_by"]) == (before["args"], "anonymous from 127.0.0.1")
    for body, words in (
        ({"cron": "x"}, "five fields"),
        ({"args": {"a": "{{ dew }}"}}, "{{ dew }} is not known"),
        ({"name": "x"}, "not"),
    ):
        problem = refused(client.put(f"{SCHEDULES}/nightly", json=body), 400, "invalid-input")
        assert words in problem["detail"] + str(problem["errors"])
    assert client.get(f"{SCHEDULES}/nightly").get_json() == changed


def test_secrets_in_the_args_of_a_schedule_are_masked_and_outlive_a_change(
    client: FlaskClient, conn: db.Connection
) -> None:
    body = json.dumps(NIGHTLY | {"args": {"password": "hunter2-very-secret"}})  # the test's client would mask it
    answer = client.post(SCHEDULES, data=body, content_type="application/json")
    assert answer.get_json()["args"] == {"password": "***"}
    assert "hunter2" not in client.get("/schedules").text
    client.put(f"{SCHEDULES}/nightly", json={"priority": 1})
    (stored,) = conn.execute("SELECT job ->> 'args' FROM dl_schedules").fetchone() or ("",)
    assert "hunter2-very-secret" in stored


def test_the_page_lists_schedules_with_their_times_errors_and_buttons(client: FlaskClient, conn: db.Connection) -> None:
    assert "There is no schedule yet" in client.get("/schedules").text
    scheduled(client)
    for name in ("paused", "never"):
        scheduled(client, name=name)
    client.post("/do/pause_schedule?name=paused", headers=HTMX)
    conn.execute("UPDATE dl_schedules SET next_due = now() - interval '60 days' WHERE name = 'nightly'")
    conn.execute("UPDATE dl_schedules SET next_due = NULL WHERE name = 'never'")
    text = " ".join(client.get("/schedules").text.split())
    assert "At 03:00 on Monday through Friday, Europe/Moscow" in text
    assert "overdue for 60 d" in text
    never, overdue, _ = text.split('id="schedule-')[1:]
    assert "It will never be due again." in never
    assert "<dt>Next</dt>" not in never + overdue, "no time that is over"
    assert "by anonymous from 127.0.0.1" in text
    assert 'hx-post="/do/pause_schedule?name=nightly"' in text
    assert 'hx-post="/do/resume_schedule?name=paused"' in text
    answer = client.post("/do/run_schedule?name=nightly", headers=HTMX)
    assert "is queued" in answer.text
    conn.execute("UPDATE dl_schedules SET error = 'no <b> such thing', error_at = now()")
    assert "no &lt;b&gt; such thing" in client.get("/schedules").text
    assert client.post("/do/run_schedule?name=unknown").status_code == 404


def test_the_form_adds_a_schedule(client: FlaskClient, conn: db.Connection) -> None:
    form = {"name": "hourly", "task": "noop", "cron": "0 * * * *", "args": '{"a": 1}', "queue": "", "timezone": ""}
    assert "hourly" in client.post("/do/add_schedule", data=form).text
    assert [row["args"] for row in schedules.listed(conn)] == [{"a": 1}]


BACKFILLS = "/api/v1/backfills"
RATES = {
    "name": "rates",
    "task": "load",
    "since": "2019-01-01",
    "until": "2019-01-05",
    "step": "day",
    "args": {"date": "{{ date }}"},
}


def test_the_partitions_come_page_by_page_each_with_its_job(client: FlaskClient, conn: db.Connection) -> None:
    answered(client.post(BACKFILLS, json=RATES), Backfill)
    backfills.tick(conn)
    conn.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now() WHERE partition_key = '2019-01-02'")
    first = asked(client, f"{BACKFILLS}/rates/partitions?limit=3", Partitions)
    assert [each["partition"] for each in first["partitions"]] == ["2019-01-01", "2019-01-02", "2019-01-03"]
    rest = asked(client, f"{BACKFILLS}/rates/partitions?after={first['next']}", Partitions)
    assert (len(rest["partitions"]), rest["next"]) == (2, None)
    (failed,) = asked(client, f"{BACKFILLS}/rates/partitions?status=failed", Partitions)["partitions"]
    assert client.get(f"/api/v1/jobs/{failed['job_id']}").get_json()["args"] == {"date": "2019-01-02"}
    retried = answered(client.post(f"{BACKFILLS}/rates/retry", json={}), BackfillRetried)
    assert retried == {"changed": 1, "next": None}
    assert asked(client, f"{BACKFILLS}/rates", Backfill)["counts"]["queued"] == 5
