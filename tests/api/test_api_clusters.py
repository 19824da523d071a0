"""One API over two clusters, each a database: where requests go, and answers of both. One of them may be away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from hashlib import sha256
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from api_app import TRIGGER, Refused
from flask import Flask
from flask.testing import FlaskClient
from patience import until

from dataloader import config
from dataloader.api import create_app
from dataloader.api.web import clusters
from dataloader.config import cluster_tag
from dataloader.queue import clusters as of_clusters
from dataloader.queue import db, lifecycle, operations
from dataloader.queue.enqueue import NewJob, enqueue, tag_of

V1 = "/api/v1"
CLOSED = "host=127.0.0.1 port=1 dbname=none"  # nobody listens there


@pytest.fixture
def other(own_db: str) -> Iterator[db.Connection]:
    with db.connect(own_db, name="test", schema="public") as conn:
        conn.tag = cluster_tag("west")
        yield conn


@pytest.fixture
def both(dsn: str, own_db: str) -> Iterator[Flask]:
    with over({"east": dsn, "west": own_db}) as app:
        yield app


def over(dsns: dict[str, str], **settings: Any) -> AbstractContextManager[Flask]:
    return _Over(dsns, settings)


class _Over:
    def __init__(self, dsns: dict[str, str], settings: dict[str, Any]) -> None:
        given = {"_env_file": None, "dl_clusters": json.dumps(dsns), "pg_pool_size": 2, **settings}
        self._app = create_app(config.load(**given))

    def __enter__(self) -> Flask:
        return self._app

    def __exit__(self, *exc: object) -> None:
        self._app.extensions["clusters"].close()


@pytest.fixture
def client(both: Flask) -> FlaskClient:
    return both.test_client()


@pytest.fixture
def east(conn: db.Connection) -> db.Connection:
    conn.tag = cluster_tag("east")
    return conn


@pytest.fixture
def west(other: db.Connection) -> db.Connection:
    return other


def add(conn: db.Connection, queue: str, **more: Any) -> UUID:
    return enqueue(conn, NewJob(queue, "t", "k", **more))[0]


def trigger(client: FlaskClient, queue: str, **more: Any) -> Any:
    return client.post(TRIGGER, json={"queue": queue, "task": "t", "lock_key": "k", **more})


def fresh(client: FlaskClient, queue: str, cluster: str) -> None:
    """Wait until the API knows that a queue is in this cluster."""
    every = client.application.extensions["clusters"]
    until(lambda: every.home(queue) == cluster, f"{queue} to be known in {cluster}")


# --- which cluster a request is for ---


def test_a_job_goes_where_its_queue_lives_and_its_id_says_so(
    client: FlaskClient, east: db.Connection, west: db.Connection
) -> None:
    add(west, "loads")
    for queue, conn, name in (("loads", west, "west"), ("new", east, "east")):
        job_id = UUID(trigger(client, queue).json["job_id"])
        assert lifecycle.status(conn, job_id)
        assert tag_of(job_id) == cluster_tag(name)
        assert client.get(f"{V1}/jobs/{job_id}/status").json["queue"] == queue


def test_a_job_with_any_other_id_is_found_all_the_same(client: FlaskClient, west: db.Connection) -> None:
    west.tag = None
    job_id = add(west, "loads")
    assert client.get(f"{V1}/jobs/{job_id}").json["queue"] == "loads"
    assert client.post(f"{V1}/jobs/{job_id}/cancel").json["status"] == "canceled"
    assert client.get(f"/jobs/{job_id}").status_code == 200
    assert client.get(f"{V1}/jobs/{uuid4()}").status_code == 404


def test_a_request_about_a_queue_goes_where_it_lives(client: FlaskClient, west: db.Connection) -> None:
    add(west, "loads")
    assert client.post(f"{V1}/queues/loads/pause").status_code == 200
    assert operations.settings(west, "loads")["paused_at"]
    fresh(client, "loads", "west")
    assert client.get(f"{V1}/queues/loads/prediction").status_code == 200
    assert client.get("/queues/loads").status_code == 200


def test_the_cluster_may_be_named(
    client: FlaskClient, east: db.Connection, west: db.Connection, refused: Refused
) -> None:
    operations.set_limit(west, "source:a", "ops", most=1)
    assert client.get(f"{V1}/limits/source:a").json["most"] == 1
    made = client.put(f"{V1}/limits/source:b?cluster=west", json={"most": 2})
    assert made.status_code == 200
    assert operations.remove_limit(west, "source:b", "ops")
    problem = refused(client.get(f"{V1}/queues?cluster=north"), 400, "invalid-input", "/cluster")
    assert problem["detail"] == "cluster should be one of east, west"


def test_a_batch_for_queues_of_two_clusters_is_refused(
    client: FlaskClient, east: db.Connection, west: db.Connection, refused: Refused
) -> None:
    add(east, "here"), add(west, "there")
    jobs = [{"queue": queue, "task": "t", "lock_key": "k"} for queue in ("here", "there")]
    problem = refused(client.post(f"{V1}/jobs/batch", json={"jobs": jobs}), 409, "conflict")
    assert "here in east, there in west" in problem["detail"]
    assert client.post(f"{V1}/jobs/batch", json={"jobs": jobs[1:] * 3}).status_code == 200
    assert west.execute("SELECT count(*) FROM dl_jobs").fetchone() == (4,)


def test_a_parent_in_another_cluster_is_refused_with_the_reason(
    client: FlaskClient, east: db.Connection, west: db.Connection, refused: Refused
) -> None:
    add(west, "there")
    parent = add(east, "here")
    problem = refused(trigger(client, "there", depends_on=[str(parent)]), 400, "invalid-input", "/depends_on")
    assert "a job may wait for jobs of its own cluster, west" in problem["detail"]


def test_plans_go_where_their_queues_live(client: FlaskClient, west: db.Connection) -> None:
    add(west, "there")
    schedule = {"name": "nightly", "task": "t", "queue": "there", "cron": "0 0 * * *"}
    assert client.post(f"{V1}/schedules", json=schedule).status_code == 200
    assert west.execute("SELECT name FROM dl_schedules").fetchall() == [("nightly",)]
    assert client.post(f"{V1}/schedules/nightly/pause").status_code == 200
    assert [row["cluster"] for row in client.get(f"{V1}/schedules").json["schedules"]] == ["west"]


def test_orders_to_named_jobs_reach_each_of_them(client: FlaskClient, east: db.Connection, west: db.Connection) -> None:
    west.tag = None
    ids = [str(add(east, "here")), str(add(west, "there")), str(uuid4())]
    answer = client.post(f"{V1}/jobs/bulk/cancel", json={"job_ids": ids})
    assert [job["outcome"] for job in answer.json["jobs"]] == ["done", "done", "unknown"]


def ended(conn: db.Connection, queue: str) -> UUID:
    job_id = add(conn, queue)
    conn.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now() WHERE job_id = %s", (job_id,))
    return job_id


@pytest.mark.parametrize("address", [V1 + "/jobs/{}/again", "/jobs/{}/again"])
def test_a_job_is_run_again_in_its_own_cluster_or_not_at_all(
    client: FlaskClient, east: db.Connection, west: db.Connection, address: str
) -> None:
    """In another cluster it would make a second queue of the name, which hides the first from the API."""
    add(west, "loads")
    fresh(client, "loads", "west")
    path = address.format(ended(east, "other"))

    def again(queue: str) -> Any:
        body = {"queue": queue}
        return client.post(path, json=body) if path.startswith(V1) else client.post(path, data=body)

    said = again("loads")
    assert said.status_code == 409
    assert "the queue loads lives in the cluster west, and the job that ended is in east" in said.text
    assert east.execute("SELECT count(*) FROM dl_jobs").fetchone() == (1,)
    for queue in ("other", "new"):
        assert again(queue).status_code == 200
    assert east.execute("SELECT count(*) FROM dl_jobs").fetchone() == (3,)


def test_a_job_of_a_queue_that_has_moved_is_run_again_and_carried(
    client: FlaskClient, east: db.Connection, west: db.Connection
) -> None:
    old = ended(east, "loads")
    add(east, "loads")
    moved = f"{V1}/queues/loads/move"
    until(lambda: client.post(moved, json={"cluster": "west"}).json["is_done"], "the move")
    fresh(client, "loads", "west")
    new = UUID(client.post(f"{V1}/jobs/{old}/again").json["job_id"])
    until(lambda: client.post(moved, json={"cluster": "west"}).json["is_done"], "the carriage")
    assert lifecycle.status(west, new)


def test_orders_and_triggers_keep_to_the_cluster_that_is_named(
    client: FlaskClient, east: db.Connection, west: db.Connection, refused: Refused
) -> None:
    here, there = add(east, "here"), add(west, "there")
    fresh(client, "here", "east")
    wanted = {"job_ids": [str(here), str(there)]}
    answer = client.post(f"{V1}/jobs/bulk/cancel?cluster=west", json=wanted)
    assert [job["outcome"] for job in answer.json["jobs"]] == ["unknown", "done"]
    body = {"queue": "here", "task": "t", "lock_key": "k"}
    problem = refused(client.post(f"{TRIGGER}?cluster=west", json=body), 409, "conflict")
    assert problem["detail"] == "the queue here lives in the cluster east, not in west, which `cluster` names"
    assert client.post(f"{TRIGGER}?cluster=east", json=body).status_code == 200
    assert client.post(f"{TRIGGER}?cluster=west", json=body | {"queue": "begins there"}).status_code == 200
    assert west.execute("SELECT count(*) FROM dl_jobs WHERE queue = 'begins there'").fetchone() == (1,)


@pytest.mark.parametrize("queue", ["a\0b", "a" * 1_000])
def test_a_queue_of_the_form_that_no_database_can_have_is_refused(client: FlaskClient, queue: str) -> None:
    form = {"queue": queue, "task": "t", "lock_key": "k", "priority": "100"}
    assert client.post("/trigger", data=form).status_code == 400


# --- answers of both ---


def test_lists_have_the_rows_of_both(client: FlaskClient, east: db.Connection, west: db.Connection) -> None:
    add(east, "b"), add(west, "a"), add(west, "a")
    queues = client.get(f"{V1}/queues").json
    assert [(row["queue"], row["cluster"], row["length"]) for row in queues["queues"]] == [
        ("a", "west", 2),
        ("b", "east", 1),
    ]
    assert "away" not in queues
    farm = client.get(f"{V1}/stats").json
    assert (farm["total"]["length"], len(farm["queues"])) == (3, 2)
    only = client.get(f"{V1}/queues?cluster=west").json
    assert [row["queue"] for row in only["queues"]] == ["a"]
    assert client.get(f"{V1}/tally").json["total"] == 3
    assert client.get(f"{V1}/names?queue=a").json["queue"]["is_known"]
    assert 'dl_jobs{cluster="west",queue="a",status="queued"} 2.0' in client.get("/metrics").text
    page = client.get("/").text
    assert 'href="/queues/a"' in page
    assert 'href="/queues/b"' in page
    assert "in west" in page


def test_the_overview_needs_one_session_at_a_time(dsn: str, own_db: str) -> None:
    """Where a thread holds one and waits for the next, many of them wait for each other, and the cluster seems away."""
    with over({"east": dsn, "west": own_db}, pg_pool_size=1, pg_max_overflow=0) as app:
        page = app.test_client().get("/")
        assert page.status_code == 200
        assert "does not answer" not in page.text


def test_a_source_that_goes_away_within_a_move_is_the_one_that_is_away(
    client: FlaskClient, east: db.Connection, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    add(east, "loads")
    fresh(client, "loads", "east")

    def end_source(source: of_clusters.Side, *_: Any) -> None:
        source.conn.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    monkeypatch.setattr(of_clusters, "move", end_source)
    problem = refused(client.post(f"{V1}/queues/loads/move", json={"cluster": "west"}), 503, "unavailable")
    assert problem["detail"].startswith("The cluster east does not answer")
    assert client.get(f"{V1}/queues?cluster=west").status_code == 200


class Closed:
    """Sessions of a cluster that is away."""

    def borrow(self) -> Any:
        raise psycopg.OperationalError("refused")


def test_an_outage_that_a_request_meets_first_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(clusters, "_log", SimpleNamespace(warning=lambda event, **_: said.append(event)))
    watch = clusters._Watch("west", Closed())  # type: ignore[arg-type]
    watch.failed()
    assert [watch._ask() for _ in range(3)] == [None] * 3
    assert said == ["api.cluster.away"]


def test_pages_of_jobs_are_one_list(client: FlaskClient, east: db.Connection, west: db.Connection) -> None:
    wanted = [str(add((east, west)[n % 3 == 0], "q")) for n in range(25)]
    found: list[str] = []
    after = ""
    for _ in range(20):
        answer = client.get(f"{V1}/jobs?limit=4{after}")
        page = answer.json
        found += [row["job_id"] for row in page["jobs"]]
        assert {row["cluster"] for row in page["jobs"]} <= {"east", "west"}
        if page["next"] is None:
            break
        assert page["next"] in answer.headers["Link"].replace("%3D", "=")
        after = f"&after={page['next']}"
    assert found == wanted[::-1]


def test_a_queue_moves_by_the_api_and_triggers_follow(
    client: FlaskClient, east: db.Connection, west: db.Connection, refused: Refused
) -> None:
    ids = [add(east, "loads") for _ in range(3)]
    fresh(client, "loads", "east")
    steps = []
    while not steps or not steps[-1]["is_done"]:
        answer = client.post(f"{V1}/queues/loads/move", json={"cluster": "west"})
        assert answer.status_code == 200, answer.json
        steps.append(answer.json)
        if not steps[-1]["is_done"]:  # in the middle of the move, whatever the API has in its memory
            ids.append(UUID(trigger(client, "loads").json["job_id"]))
    assert steps[0] == {
        "queue": "loads",
        "cluster": "west",
        "moved": 3,
        "running": 0,
        "left": 0,
        "is_done": False,
    }
    assert east.execute("SELECT count(*) FROM dl_jobs").fetchone() == (0,)
    assert west.execute("SELECT count(*) FROM dl_jobs").fetchone() == (len(ids),)
    assert all(client.get(f"{V1}/jobs/{job_id}/status").status_code == 200 for job_id in ids)
    fresh(client, "loads", "west")
    assert [row["cluster"] for row in client.get(f"{V1}/queues").json["queues"]] == ["west"]
    again = client.post(f"{V1}/queues/loads/move", json={"cluster": "west"})
    assert (again.json["moved"], again.json["is_done"]) == (0, True)  # it carries stragglers, if there are any
    problem = refused(client.post(f"{V1}/queues/loads/move", json={"cluster": "north"}), 400, "invalid-input")
    assert "cluster should be one of east, west" in problem["detail"]
    add(east, "stays")
    refused(client.post(f"{V1}/queues/stays/move", json={"cluster": "east"}), 400, "invalid-input", "/cluster")


def test_a_move_from_a_cluster_that_nobody_names_is_refused(
    client: FlaskClient, west: db.Connection, refused: Refused
) -> None:
    operations.pause(west, "loads", f"{operations.COMES}north")
    fresh(client, "loads", "west")
    problem = refused(client.post(f"{V1}/queues/loads/move", json={"cluster": "west"}), 409, "conflict")
    assert problem["detail"] == "loads comes from the cluster north, which this API's DL_CLUSTERS does not name"


def test_a_key_of_a_queue_that_has_moved_is_known(
    client: FlaskClient, east: db.Connection, west: db.Connection
) -> None:
    first = trigger(client, "loads", idempotency_key="once").json
    east.execute("UPDATE dl_jobs SET status = 'succeeded'")
    add(east, "loads")
    while not client.post(f"{V1}/queues/loads/move", json={"cluster": "west"}).json["is_done"]:
        pass
    fresh(client, "loads", "west")
    assert trigger(client, "loads", idempotency_key="once").json == first | {"status": "succeeded"}
    assert trigger(client, "loads", idempotency_key="twice").json["status"] == "queued"


def test_the_parameter_is_in_the_description_of_the_api(client: FlaskClient) -> None:
    listed = client.get("/openapi.json").json["paths"][f"{V1}/queues"]["get"]["parameters"]
    assert {"type": "string", "enum": ["east", "west"]} in [each.get("schema") for each in listed]


def test_a_browser_chooses_a_cluster_and_pages_of_queues_and_jobs_find_theirs(
    client: FlaskClient, east: db.Connection, west: db.Connection
) -> None:
    operations.set_limit(east, "of-east", "ops", most=1)
    operations.set_limit(west, "of-west", "ops", most=1)
    job_id = add(east, "here")
    assert "of-east" in client.get("/limits").text
    assert 'href="/?cluster=west"' in client.get("/").text
    client.get("/?cluster=west")
    page = client.get("/limits").text
    assert "of-west" in page
    assert "of-east" not in page
    assert client.get("/queues/here").status_code == 200
    assert str(job_id) in client.get(f"/jobs/{job_id}").text
    assert client.get(f"{V1}/database").status_code == 200
    operations.pause(east, "here", "ops")
    assert client.get(f"{V1}/queues").json["queues"][0]["paused_by"] == "ops"


def test_a_client_with_a_token_needs_its_scopes_in_every_cluster(dsn: str, own_db: str, west: db.Connection) -> None:
    digest = sha256(b"reads").hexdigest()
    tokens = json.dumps([{"name": "viewer", "scopes": ["read"], "sha256": digest}])
    add(west, "there")
    with over({"east": dsn, "west": own_db}, dl_api_tokens=tokens) as app:
        client, headers = app.test_client(), {"Authorization": "Bearer reads"}
        assert client.get(f"{V1}/queues?cluster=west").status_code == 401
        assert client.get(f"{V1}/queues?cluster=west", headers=headers).status_code == 200
        for path in ("/queues/there/pause", "/queues/there/pause?cluster=west", "/queues/there/move"):
            assert client.post(f"{V1}{path}", headers=headers).status_code == 403
        assert client.post(TRIGGER, json={}, headers=headers).status_code == 403


# --- without DL_CLUSTERS ---


def test_without_clusters_nothing_knows_of_them(dsn: str, refused: Refused) -> None:
    app = create_app(config.load(_env_file=None, dl_db_dsn=dsn, pg_pool_size=1))
    client = app.test_client()
    try:
        assert set(client.get(f"{V1}/queues").json) == {"queues"}
        refused(client.get(f"{V1}/queues?cluster=east"), 400, "invalid-input", "/cluster")
        trigger(client, "loads")
        moved = client.post(f"{V1}/queues/loads/move", json={"cluster": "west"})
        assert refused(moved, 400, "invalid-input", "/cluster")["detail"].endswith("DL_CLUSTERS is not set")
    finally:
        app.extensions["sessions"].close()
