"""Jobs that wait for others, over HTTP, by the client, the command line and on the page."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from flask.testing import FlaskClient

TRIGGER, BATCH = "/api/v1/jobs/trigger", "/api/v1/jobs/batch"


def body(**more: Any) -> dict[str, Any]:
    return {"queue": "q", "task": "t", "lock_key": "k"} | more


def added(client: FlaskClient, **more: Any) -> str:
    answer = client.post(TRIGGER, json=body(**more))
    assert answer.status_code == 200, answer.json
    return str(answer.json["job_id"])


def family(client: FlaskClient, job_id: str) -> dict[str, list[str]]:
    answer = client.get(f"/api/v1/jobs/{job_id}/family")
    assert answer.status_code == 200
    return {name: [each["job_id"] for each in jobs] for name, jobs in answer.json.items()}


def test_a_job_says_for_which_one_it_waits(client: FlaskClient) -> None:
    parent = added(client)
    job = added(client, depends_on=[parent], on_parent_failure="hold")
    status = client.get(f"/api/v1/jobs/{job}/status").json
    assert status["waiting_for"] == {"reason": "parent", "parents": 1, "on_failure": "hold", "job_id": parent}
    assert family(client, job) == {"parents": [parent], "children": []}
    assert family(client, parent) == {"parents": [], "children": [job]}
    page = client.get(f"/jobs/{job}").text
    assert f"It starts when 1 job has ended: {parent}." in page
    assert 'aria-label="Jobs that this one waits for"' in page
    assert "the end of its parents" in page
    assert "has come already" not in page  # "Run now" lets it start without them
    listed = client.get("/jobs?status=queued").text
    assert "waits for other jobs" in listed
    assert "9999" not in page + listed
    assert 'aria-label="Jobs that wait for this one"' in client.get(f"/jobs/{parent}").text


def test_a_batch_names_its_jobs_by_their_places(client: FlaskClient) -> None:
    answer = client.post(BATCH, json={"jobs": [body(), body(depends_on=[0]), body(depends_on=[0, 1])]})
    assert answer.status_code == 200
    first, second, third = (each["job_id"] for each in answer.json["jobs"])
    assert family(client, third) == {"parents": [first, second], "children": []}
    assert set(family(client, first)["children"]) == {second, third}


@pytest.mark.parametrize(("given", "policy"), [({}, "run"), ({"on_parent_failure": "hold"}, "hold")])
def test_a_group_has_a_job_that_starts_when_the_others_have_ended(
    client: FlaskClient, given: dict[str, str], policy: str
) -> None:
    answer = client.post(BATCH, json={"jobs": [body(), body()], "on_done": body(task="report", **given)})
    *jobs, report = (each["job_id"] for each in answer.json["jobs"])
    assert family(client, report) == {"parents": jobs, "children": []}
    assert client.get(f"/api/v1/jobs/{report}/status").json["waiting_for"]["on_failure"] == policy


def test_the_last_job_of_an_empty_group_waits_for_nothing(client: FlaskClient) -> None:
    (report,) = client.post(BATCH, json={"jobs": [], "on_done": body()}).json["jobs"]
    assert client.get(f"/api/v1/jobs/{report['job_id']}/status").json["waiting_for"]["reason"] != "parent"


@pytest.mark.parametrize(
    ("wrong", "pointer"),
    [(body(depends_on=[0]), "/on_done/depends_on"), ("report", "/on_done"), ({"queue": "q"}, "/jobs/1/task")],
)
def test_a_wrong_last_job_adds_none_of_the_group(client: FlaskClient, wrong: Any, pointer: str) -> None:
    answer = client.post(BATCH, json={"jobs": [body()], "on_done": wrong})
    assert answer.status_code == 400
    assert pointer in [each["pointer"] for each in answer.json["errors"]]
    assert client.get("/api/v1/jobs").json["jobs"] == []


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        ([{"depends_on": [7]}], "there is no job 7 in the list, which has 2"),
        ([{"depends_on": [1]}, {"depends_on": [0]}], "wait for each other in a circle: 0 -> 1 -> 0"),
        ([{"depends_on": [0]}], "wait for each other in a circle: 0 -> 0"),
        ([{"depends_on": ["x"]}], "should be a job's id, or its place in the list of jobs, from 0"),
        ([{"depends_on": [-1]}], "should be a job's id, or its place in the list of jobs, from 0"),
        ([{"depends_on": [True]}], "should be a job's id, or its place in the list of jobs, from 0"),
        ([{"depends_on": [str(uuid4())]}], "not known: "),
        ([{"on_parent_failure": "ignore"}], "should be 'cancel', 'hold' or 'run'"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_added(
    client: FlaskClient, jobs: list[dict[str, Any]], said: str
) -> None:
    answer = client.post(BATCH, json={"jobs": [body(**job) for job in [*jobs, {}][:2]]})
    assert answer.status_code == 400
    assert said in str(answer.json["errors"])
    assert client.get("/api/v1/jobs").json["jobs"] == []


def test_a_trigger_may_name_no_places(client: FlaskClient) -> None:
    for place in (0, 1):
        answer = client.post(TRIGGER, json=body(depends_on=[place]))
        assert (answer.status_code, answer.json["errors"][0]["pointer"]) == (400, "/depends_on")
        assert "names the jobs that it waits for by their job_id" in answer.json["errors"][0]["message"]
