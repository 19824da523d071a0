"""Jobs that wait for others, over HTTP and on the page."""

import re
from typing import Any
from uuid import uuid4

from api_app import BATCH, TRIGGER, Refused, answered, asked
from flask.testing import FlaskClient

from dataloader.queue import db


def body(**more: Any) -> dict[str, Any]:
    return {"queue": "q", "task": "t", "lock_key": "k"} | more


def added(client: FlaskClient, **more: Any) -> str:
    return str(answered(client.post(TRIGGER, json=body(**more)))["job_id"])


def family(client: FlaskClient, job_id: str) -> dict[str, list[str]]:
    found = asked(client, f"/api/v1/jobs/{job_id}/family")
    return {name: [each["job_id"] for each in jobs] for name, jobs in found.items()}


def test_a_job_says_for_which_one_it_waits(client: FlaskClient) -> None:
    parent = added(client)
    job = added(client, depends_on=[parent], on_parent_failure="hold")
    status = client.get(f"/api/v1/jobs/{job}/status").json
    named = {"job_id": parent, "task": "t", "lock_key": "k"}
    assert [each["reason"] for each in status["waiting_for"].pop("besides")] == ["no_worker"]
    assert status["waiting_for"] == {"reason": "parent", "parents": 1, "on_failure": "hold"} | named
    assert family(client, job) == {"parents": [parent], "children": []}
    assert family(client, parent) == {"parents": [], "children": [job]}
    page = client.get(f"/jobs/{job}").text
    assert "It starts when 1 job has ended: t (k)." in page
    assert 'aria-label="Jobs that this one waits for"' in page
    assert "the end of its parents" in page
    assert "already due" not in page  # "Run now" lets it start without them
    listed = client.get("/jobs?status=queued").text
    assert "waits for other jobs" in listed
    assert "9999-01-01" not in page + listed
    assert 'aria-label="Jobs that wait for this one"' in client.get(f"/jobs/{parent}").text


def test_a_job_says_which_failed_job_holds_it_once_its_end_is_noted(client: FlaskClient, conn: db.Connection) -> None:
    fine, bad = added(client), added(client, lock_key="bad")
    job = added(client, depends_on=[fine, bad], on_parent_failure="hold")
    conn.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now() WHERE job_id = %s", (bad,))
    page = client.get(f"/jobs/{job}").text
    assert re.search(
        r"Its parent t \(bad\) ended [\d.]+ m?s ago without success: requeue that, or run this job now", page
    )
    assert f'<a href="/jobs/{bad}">Go to that job</a>' in page
    assert "t (bad)" in page.partition('id="family-title"')[2]
    for status, policy in (("succeeded", "hold"), ("failed", "run"), ("canceled", "cancel")):
        job = added(client, depends_on=[added(client, lock_key=policy)], on_parent_failure=policy)
        conn.execute("ALTER TABLE dl_jobs DISABLE TRIGGER USER")
        conn.execute("UPDATE dl_jobs SET status = %s, finished_at = now() WHERE lock_key = %s", (status, policy))
        conn.execute("ALTER TABLE dl_jobs ENABLE TRIGGER USER")
        page = client.get(f"/jobs/{job}").text
        assert f"It starts when 1 job has ended: t ({policy})." in page
        assert "without success" not in page


def test_a_group_has_a_job_that_starts_when_the_others_have_ended(client: FlaskClient) -> None:
    for given, policy in (({}, "run"), ({"on_parent_failure": "hold"}, "hold")):
        answer = client.post(BATCH, json={"jobs": [body(), body()], "on_done": body(task="report", **given)})
        *jobs, report = (each["job_id"] for each in answer.json["jobs"])
        assert family(client, report) == {"parents": jobs, "children": []}
        assert client.get(f"/api/v1/jobs/{report}/status").json["waiting_for"]["on_failure"] == policy
    (alone,) = client.post(BATCH, json={"jobs": [], "on_done": body()}).json["jobs"]
    assert client.get(f"/api/v1/jobs/{alone['job_id']}/status").json["waiting_for"]["reason"] != "parent"


def test_what_is_wrong_is_named_and_nothing_is_added(client: FlaskClient, refused: Refused) -> None:
    place = "should be a job's id, or its place in the list of jobs, from 0"
    for path, wrong, words in [
        (BATCH, {"jobs": [body(depends_on=[7]), body()]}, "there is no job 7 in the list, which has 2"),
        (BATCH, {"jobs": [body(depends_on=[1]), body(depends_on=[0])]}, "wait for each other in a circle: 0 -> 1 -> 0"),
        (BATCH, {"jobs": [body(depends_on=[0]), body()]}, "wait for each other in a circle: 0 -> 0"),
        (BATCH, {"jobs": [body(depends_on=[-1])]}, place),
        (BATCH, {"jobs": [body(depends_on=[True])]}, place),
        (BATCH, {"jobs": [body(depends_on=[str(uuid4())])]}, "not known: "),
        (BATCH, {"jobs": [body()], "on_done": body(depends_on=[0])}, "'/on_done/depends_on'"),
        (BATCH, {"jobs": [body()], "on_done": "report"}, "'/on_done'"),
        (BATCH, {"jobs": [body()], "on_done": {"queue": "q"}}, "'/jobs/1/task'"),
        (TRIGGER, body(depends_on=[0]), "names the jobs that it waits for by their job_id"),
        (TRIGGER, body(depends_on=[1]), "names the jobs that it waits for by their job_id"),
    ]:
        assert words in str(refused(client.post(path, json=wrong), 400, "invalid-input")["errors"])
        assert client.get("/api/v1/jobs").json["jobs"] == []
