"""Two clusters behind one API: the answers of each endpoint while one is stopped, and a queue that moves in use."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from farming import Farm, Program, until
from flask.testing import FlaskClient
from servers import FAST, Database, root, serving
from test_supervisord import free_port

from dataloader import Client, config
from dataloader.api import create_app
from dataloader.api.v1 import openapi
from dataloader.client import Conflict, Unavailable
from dataloader.config import cluster_tag
from dataloader.queue import db, migrations, operations
from dataloader.queue.enqueue import NewJob, enqueue, enqueue_many
from dataloader.queue.plans import backfills, schedules
from dataloader.queue.plans.new_backfill import NewBackfill
from dataloader.queue.plans.new_backfill import definition as backfill_of
from dataloader.queue.plans.new_schedule import checked
from dataloader.queue.reports import webhooks

V1 = "/api/v1"
NAMES = ("east", "west")
A_MINUTE = 60.0


# --- one of the two is stopped ---


class Stopped(NamedTuple):
    """An application over two servers, of which `west` is stopped; the job that each had."""

    client: FlaskClient
    west: Database
    jobs: dict[str, UUID]


@pytest.fixture(scope="module")
def stopped() -> Iterator[Stopped]:
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(stack.enter_context(root()))) for name in NAMES}
        jobs = {}
        for name, server in servers.items():
            migrations.migrate(server.dsn, schema="public")
            jobs |= {
                each: filled(server.dsn, name, each) for each in (name, f"{name}-gone")
            }  # the second to be deleted
        dsns = json.dumps({name: server.dsn for name, server in servers.items()})
        app = create_app(config.load(_env_file=None, dl_clusters=dsns, pg_pool_size=2))
        stack.callback(app.extensions["clusters"].close)
        client = app.test_client()
        until(
            lambda: {row["cluster"] for row in client.get(f"{V1}/queues").json.get("queues", ())} == {*NAMES},
            "both to answer",
        )
        servers["west"].end(FAST)
        until(lambda: client.get(f"{V1}/queues").json.get("away") == ["west"], "the API to know it")
        yield Stopped(client, servers["west"], jobs)


def filled(dsn: str, cluster: str, name: str) -> UUID:
    """A job of a queue, a schedule, a backfill, a limit and a webhook, all of this name; returns the job's id."""
    with db.connect(dsn, name="test", schema="public") as conn:
        conn.tag = cluster_tag(cluster)
        job_id, _ = enqueue(conn, NewJob(name, "t", "k"))
        schedules.add(conn, checked({"name": name, "task": "t", "queue": name, "cron": "0 0 * * *"}, "UTC"), "ops")
        new = NewBackfill.model_validate({"name": name, "task": "t", "queue": name, "partitions": ["a"]})
        backfills.add(conn, backfill_of(new), "ops")
        operations.set_limit(conn, name, "ops", most=1)
        webhooks.put(conn, webhooks.Wanted(name, "https://example.com/hook", kinds=None, queues=None), "ops")
    return job_id


# The lists of all clusters: they answer, and say which is away.
LISTS = {
    *("/queues", "/stats", "/workers", "/tasks", "/jobs", "/tally", "/suggestions?q=e", "/names?queue=east", "/errors"),
    *("/pace", "/schedules", "/backfills", "/limits", "/webhooks"),
}
# Answers of one cluster: this host's, which answers.
OWN = {"/events", "/database", "/tasks/{task}", "/tasks/{task}/schema"}
# By the queue, the job or the name in the path: what is in the cluster that is away is a 503.
JOB = {"queue": "{q}", "task": "t", "lock_key": "k"}
OF_ONE: dict[tuple[str, str], Any] = {
    **{("GET", f"/queues/{{queue}}/{verb}"): None for verb in ("keys", "prediction", "runs")},
    **{("POST", f"/queues/{{queue}}/{verb}"): {} for verb in ("pause", "resume", "run-all", "kill-retries")},
    **{("POST", f"/queues/{{queue}}/{verb}"): {} for verb in ("requeue-dead", "delete-dead")},
    ("POST", "/queues/{queue}/move"): {"to": "elsewhere"},
    ("PUT", "/queues/{queue}/limit"): {"max_length": 7},
    ("PUT", "/queues/{queue}"): {"on_dead": "continue"},
    **{("GET", f"/jobs/{{job_id}}{part}"): None for part in ("", "/result", "/family", "/prediction", "/events")},
    **{("GET", f"/jobs/{{job_id}}{part}"): None for part in ("/logs", "/status")},
    **{("POST", f"/jobs/{{job_id}}/{verb}"): {} for verb in ("run-now", "cancel", "again", "requeue")},
    ("GET", "/schedules/{name}"): None,
    ("PUT", "/schedules/{name}"): {"cron": "1 0 * * *"},
    **{("POST", f"/schedules/{{name}}/{verb}"): {} for verb in ("pause", "resume", "run")},
    ("GET", "/backfills/{backfill}"): None,
    ("GET", "/backfills/{backfill}/partitions"): None,
    ("PUT", "/backfills/{backfill}"): {"max_running": 1},
    **{("POST", f"/backfills/{{backfill}}/{verb}"): {} for verb in ("pause", "resume", "cancel", "retry")},
    ("GET", "/limits/{limit}"): None,
    **{("POST", f"/webhooks/{{webhook}}/{verb}"): {} for verb in ("pause", "resume", "test")},
    ("DELETE", "/schedules/{name}"): None,
    ("DELETE", "/backfills/{backfill}"): None,
    ("DELETE", "/limits/{limit}"): None,
    ("DELETE", "/webhooks/{webhook}"): None,
    ("DELETE", "/jobs/{job_id}"): None,
    # by the queue in the body
    ("POST", "/jobs/trigger"): JOB,
    ("POST", "/jobs/batch"): {"jobs": [JOB]},
    ("POST", "/schedules"): {"name": "new-{q}", "task": "t", "queue": "{q}", "cron": "0 0 * * *"},
    ("POST", "/backfills"): {"name": "new-{q}", "task": "t", "queue": "{q}", "partitions": ["a"]},
    ("POST", "/backfills/dry-run"): {"name": "dry", "task": "t", "queue": "{q}", "partitions": ["a"]},
}
# To this host's cluster, or to many jobs: each of them has its outcome.
TO_OWN: dict[tuple[str, str], Any] = {
    ("PUT", "/limits/{limit}"): {"most": 1},
    ("PUT", "/webhooks/{webhook}"): {"url": "https://example.com/hook"},
    ("PUT", "/errors/note"): {"task": "t", "error_group": "e", "note": "n"},
    ("POST", "/jobs/bulk/preview"): {"order": "cancel", "job_ids": [str(UUID(int=7))]},
    ("POST", "/jobs/bulk"): {"order": "cancel", "job_ids": [str(UUID(int=7))], "confirmation": "none"},
}
TO_MANY = tuple(f"/jobs/bulk/{verb}" for verb in ("cancel", "requeue", "start-over", "run-now", "delete"))


def test_every_endpoint_is_looked_at(stopped: Stopped) -> None:
    every = {
        (method, openapi.path_of(rule).removeprefix(V1))
        for rule, method, view in openapi.operations(stopped.client.application)
        if rule.rule.startswith(V1)
    }
    lists = {("GET", path.partition("?")[0]) for path in LISTS | OWN}
    assert every == lists | OF_ONE.keys() | TO_OWN.keys() | {("POST", path) for path in TO_MANY}


@pytest.mark.parametrize("path", sorted(LISTS))
def test_a_list_answers_for_the_others_and_says_which_is_away(stopped: Stopped, path: str) -> None:
    began = time.monotonic()
    answer = stopped.client.get(V1 + path)
    assert (answer.status_code, answer.json["away"]) == (200, ["west"])
    assert time.monotonic() - began < 3  # the promise of every request
    for rows in answer.json.values():
        if isinstance(rows, list) and rows and isinstance(rows[0], dict) and "cluster" in rows[0]:
            assert {row["cluster"] for row in rows} == {"east"}
    path += "&" if "?" in path else "?"
    refused(stopped.client.get(f"{V1}{path}cluster=west"))


@pytest.mark.parametrize("path", sorted(OWN))
def test_what_one_cluster_answers_is_answered(stopped: Stopped, path: str) -> None:
    path = V1 + path.replace("{task}", "t")
    if path.endswith("/schema"):  # in no cluster that answers
        refused(stopped.client.get(path))
        return
    assert stopped.client.get(path).status_code == 200
    refused(stopped.client.get(f"{path}?cluster=west"))


@pytest.mark.parametrize(("method", "path"), OF_ONE, ids=[f"{method} {path}" for method, path in OF_ONE])
def test_what_is_in_a_cluster_that_is_away_is_a_503_and_the_rest_goes_on(
    stopped: Stopped, method: str, path: str
) -> None:
    body = OF_ONE[method, path]
    for cluster in ("west", "east"):
        name = f"{cluster}-gone" if method == "DELETE" else cluster
        began = time.monotonic()
        answer = stopped.client.open(
            V1 + in_path(path, name, stopped.jobs[name]),
            method=method,
            json=None if body is None else json.loads(json.dumps(body).replace("{q}", name)),
        )
        assert time.monotonic() - began < 3
        if cluster == "west":
            refused(answer)
        else:
            assert answer.status_code in (200, 409), answer.json  # 409: the job has not ended, and the like


def in_path(path: str, name: str, job_id: UUID) -> str:
    for part in ("queue", "name", "backfill", "limit", "webhook"):
        path = path.replace(f"{{{part}}}", name)
    return path.replace("{job_id}", str(job_id))


@pytest.mark.parametrize(("method", "path"), TO_OWN, ids=[f"{method} {path}" for method, path in TO_OWN])
def test_an_order_that_names_no_queue_is_for_this_hosts_cluster(stopped: Stopped, method: str, path: str) -> None:
    body, path = TO_OWN[method, path], V1 + in_path(path, "own", stopped.jobs["east"])
    answer = stopped.client.open(path, method=method, json=body)
    assert answer.status_code == 200 or answer.json["errors"][0]["pointer"] == "/confirmation", answer.json
    refused(stopped.client.open(f"{path}?cluster=west", method=method, json=body))


@pytest.mark.parametrize("path", TO_MANY)
def test_an_order_to_many_says_which_job_may_be_in_a_cluster_that_is_away(stopped: Stopped, path: str) -> None:
    ids = [str(stopped.jobs["west"]), str(UUID(int=7))]
    answer = stopped.client.post(V1 + path, json={"job_ids": ids})
    assert answer.status_code == 200
    assert {job["outcome"] for job in answer.json["jobs"]} == {"in no cluster that answers; away: west"}


@pytest.mark.parametrize(
    "path", ["/", "/jobs", "/workers", "/limits", "/queues/east", "/schedules", "/postgres", "/tasks"]
)
def test_pages_go_on(stopped: Stopped, path: str) -> None:
    answer = stopped.client.get(path)
    assert answer.status_code == 200
    assert "The cluster west does not answer." in answer.text or path != "/"
    assert stopped.client.get("/queues/west").status_code == 503


def test_probes_and_metrics_say_which_is_away(stopped: Stopped) -> None:
    assert stopped.client.get("/health").status_code == 200
    assert stopped.client.get("/ready").json["away"] == ["west"]
    figures = stopped.client.get("/metrics").text
    assert 'dl_scrape_error{cluster="west"} 1.0' in figures
    assert 'dl_scrape_error{cluster="east"} 0.0' in figures


def test_a_cluster_that_comes_back_is_there_and_one_that_is_frozen_holds_up_nobody(stopped: Stopped) -> None:
    client, west = stopped.client, stopped.west
    west.start_again()
    try:
        until(lambda: "away" not in client.get(f"{V1}/queues").json, "the cluster to be back")
        assert client.get(f"{V1}/jobs/{stopped.jobs['west']}").status_code == 200
        west.suspend()
        took = []
        for path in ("/queues", "/queues", "/jobs", f"/jobs/{stopped.jobs['east']}/status", "/queues"):
            began = time.monotonic()
            assert client.get(V1 + path).status_code == 200
            took.append(time.monotonic() - began)
        assert max(took) < 3
        until(lambda: client.get(f"{V1}/queues").json.get("away") == ["west"], "the API to know it")
        began = time.monotonic()
        assert trigger(client, "east").status_code == 200
        refused(trigger(client, "west"))
        assert time.monotonic() - began < 3  # the promise of every request
    finally:
        west.resume()
        west.end(FAST)
    until(lambda: client.get(f"{V1}/queues").json.get("away") == ["west"], "the API to know it again")


def trigger(client: FlaskClient, queue: str) -> Any:
    return client.post(f"{V1}/jobs/trigger", json={"queue": queue, "task": "t", "lock_key": "k"})


def refused(answer: Any) -> None:
    """A 503 that names the cluster."""
    assert answer.status_code == 503, answer.json
    assert "west" in answer.json["detail"]
    assert int(answer.headers["Retry-After"]) > 0


# --- a queue moves while it is used ---


class Pair:
    """Two clusters with a farm each, one API over both, and producers whose jobs note their runs in one file."""

    def __init__(self, farms: dict[str, Farm], folder: Path, sec: float) -> None:
        self.farms, self.file, self.sec = farms, folder / "notes", sec
        self.dsns = json.dumps({name: farm.dsn for name, farm in farms.items()})
        self.port = free_port()
        self.acknowledged: dict[str, list[int]] = defaultdict(list)
        self.failed: list[str] = []
        self.is_over = threading.Event()

    def settings(self, name: str) -> dict[str, Any]:
        own = {"dl_db_dsn": "", "dl_clusters": self.dsns, "dl_cluster": name, "dl_pipelines": "cluster_pipelines"}
        return own | {"app_host": "127.0.0.1", "app_port": self.port, "pg_pool_size": 8}

    def start(self) -> None:
        for name, farm in self.farms.items():
            farm.ready(**self.settings(name))
            farm.start("reaper", **self.settings(name))
        self.farms["east"].start("api --processes 1", **self.settings("east"))
        until(lambda: self.answers(), "the API")

    def answers(self) -> bool:
        try:
            with Client(self.url, patience=0) as client:
                return client.names(queue="q") is not None
        except Exception:
            return False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def produce(self, number: int, per_sec: float) -> None:
        """Trigger jobs of this producer's own keys, in their order, until the end."""
        with Client(self.url, patience=A_MINUTE) as client:
            at = time.monotonic()
            for n in range(1_000_000):
                if self.is_over.is_set():
                    return
                key = f"{number}-{n % 5}"
                try:
                    client.trigger(
                        "noted", queue="q", lock_key=key, args={"file": str(self.file), "n": n, "sec": self.sec}
                    )
                    self.acknowledged[key].append(n)
                except Exception as e:
                    self.failed.append(repr(e))
                at += 1 / per_sec
                time.sleep(max(0.0, at - time.monotonic()))

    def wait_in_line(self, count: int, at: str = "east") -> None:
        """Jobs that are there before the others, in the cluster where the queue lives."""
        args = {"file": str(self.file), "sec": 0}
        jobs = [NewJob("q", "noted", f"before-{n % 20}", args | {"n": n}) for n in range(count)]
        enqueue_many(self.farms[at].conn, jobs)
        for job in jobs:
            self.acknowledged[job.lock_key].append(job.args["n"])

    def is_moving(self, to: str) -> bool:
        """Whether the queue is paused where it moves to."""
        return operations.settings(self.farms[to].conn, "q")["paused_at"] is not None

    def producing(self, producers: int, per_sec: float) -> list[threading.Thread]:
        threads = [threading.Thread(target=self.produce, args=(n, per_sec / producers)) for n in range(producers)]
        for thread in threads:
            thread.start()
        return threads

    def judge(self) -> int:
        """Each acknowledged job has run once, those of a key one after the other and in order; returns how many."""
        assert self.failed == []
        runs: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for line in self.file.read_text().splitlines():
            what, key, n = line.split()
            runs[key].append((what, int(n)))
        for key, wanted in self.acknowledged.items():
            assert runs[key] == [(what, n) for n in wanted for what in ("begin", "end")], key
        return sum(map(len, self.acknowledged.values()))

    def ended(self, name: str) -> int:
        ((count,),) = self.farms[name].rows("SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'")
        return int(count)

    def move_by_the_api(self, to: str) -> int:
        """Move the queue; again where a busy machine was too slow for a step. Returns how many jobs were carried."""
        carried = 0
        with Client(self.url, timeout=30, patience=0) as client:
            for _ in range(20):
                with suppress(Conflict, Unavailable):
                    for step in client.move_to_cluster("q", to):
                        carried += step.moved
                    return carried
                time.sleep(0.5)  # after one slow answer the API holds a cluster to be away for a second
        raise AssertionError("the queue does not move")

    def is_worked_off(self) -> bool:
        left = "SELECT count(*) FROM dl_jobs WHERE status IN ('queued', 'running')"
        return all(farm.rows(left) == [(0,)] for farm in self.farms.values())


@pytest.fixture
def pair(own_db: str, lend: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    with lend() as other:
        farms = {}
        for name, dsn in zip(NAMES, (own_db, other), strict=True):
            folder = tmp_path / name
            folder.mkdir()
            farms[name] = Farm(dsn, folder)
            operations.set_order(farms[name].conn, "q", "ops", ordered=True)
        made = Pair(farms, tmp_path, getattr(request, "param", 0))
        yield made
        made.is_over.set()
        for farm in farms.values():
            farm.close()


@pytest.mark.parametrize("pair", [0.01], indirect=True)  # slower than they come: some wait
def test_a_queue_moves_live_and_nothing_is_lost_doubled_or_out_of_order(pair: Pair) -> None:
    pair.start()
    threads = pair.producing(producers=8, per_sec=200)
    until(lambda: pair.ended("east") > 100, "jobs to run here")
    carried = pair.move_by_the_api("west")
    until(lambda: pair.ended("west") > 100, "jobs to run there")
    pair.is_over.set()
    for thread in threads:
        thread.join(A_MINUTE)
    until(pair.is_worked_off, "all jobs to end")
    count, ended = pair.judge(), {name: pair.ended(name) for name in NAMES}
    assert sum(ended.values()) == count
    print(f"{count} jobs, {carried} carried, ended: {ended}")


def test_the_reaper_carries_what_comes_to_a_queue_that_has_moved(pair: Pair) -> None:
    east, west = (pair.farms[name] for name in NAMES)
    first = east.enqueue("noted")
    assert move(pair, "west").process.wait(A_MINUTE) == 0
    late = east.enqueue("noted")  # by a producer that inserts into the database itself
    assert first
    reaper = east.start("reaper", **pair.settings("east"))
    until(lambda: west.rows("SELECT FROM dl_jobs WHERE job_id = %s", late), "the job to be carried")
    until(lambda: reaper.events("reaper.jobs.carried"), "the reaper to say so")
    assert east.rows("SELECT count(*) FROM dl_jobs") == [(0,)]


def test_the_command_says_what_it_does_and_what_is_wrong(pair: Pair) -> None:
    east = pair.farms["east"]
    for _ in range(3):
        east.enqueue("noted")
    for words, log in (
        ("q --cluster north", "the cluster should be one of east, west"),
        ("nobody --cluster west", "no queue nobody is known in the cluster east"),
        ("q --cluster east", "q lives in the cluster east: name another one"),
        ("q to --cluster west", "name either the other queue, or a cluster by --cluster"),
    ):
        wrong = east.start(f"queue move {words}" + ("" if " to " in words else " --direct"), **pair.settings("east"))
        assert wrong.process.wait(A_MINUTE) != 0
        assert log in wrong.log.read_text()
    done = move(pair, "west")
    assert done.process.wait(A_MINUTE) == 0
    assert "q is in the cluster west now, and goes on there; this command carried 3 jobs." in done.log.read_text()
    resumed = east.start("resume q --direct", **pair.settings("east"))
    assert resumed.process.wait(A_MINUTE) != 0
    assert "q has moved to the cluster west: resume it there" in resumed.log.read_text()


@pytest.mark.long
@pytest.mark.parametrize("pair", [0.005], indirect=True)
def test_movers_may_be_killed_again_and_again(pair: Pair) -> None:
    """There and back, with kill -9 at random instants. The next mover completes what the killed ones have left."""
    chance = random.Random(seed := int(os.environ.get("DL_TEST_SEED", "7")))
    pair.start()
    threads = pair.producing(producers=8, per_sec=200)
    kills = within = 0
    for home, to in (("east", "west"), ("west", "east"), ("east", "west")):
        pair.wait_in_line(4_000, at=home)  # so that no move is over before its kill
        for number in range(6):
            mover = move(pair, to)
            if number % 2 == 0:  # within the move, however long a program takes to start
                until(lambda to=to, it=mover: pair.is_moving(to) or it.process.poll() is not None, "the move to begin")
            try:
                mover.process.wait(chance.uniform(0.1, 1.5) if number % 2 else chance.uniform(0, 0.1))
            except Exception:
                mover.signal(signal.SIGKILL)
                mover.process.wait()
                kills += 1
                within += pair.is_moving(to)
        until(lambda to=to: move(pair, to).process.wait(A_MINUTE) == 0, "a whole move")
        time.sleep(1)
    pair.is_over.set()
    for thread in threads:
        thread.join(A_MINUTE)
    until(pair.is_worked_off, "all jobs to end", patience=120)
    print(f"{pair.judge()} jobs, {kills} movers killed, {within} of them within a move, seed {seed}")
    assert within >= 3


def move(pair: Pair, to: str) -> Program:
    return pair.farms["east"].start(f"queue move q --cluster {to} --direct", **pair.settings("east"))
