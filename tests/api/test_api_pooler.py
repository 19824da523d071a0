"""The API behind PgBouncer: what it acknowledged is in its schema as it was sent, and no request is answered 5xx."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from api_app import MINIMAL, TRIGGER, running
from flask import Flask
from pooling import TAKES_OUR_OPTIONS, pooler
from psycopg.rows import dict_row

from dataloader.queue import db, migrations

THREADS, REQUESTS = 8, 125  # and so many of each
# In transaction mode each transaction is to meet another session.
MODES = {"transaction": ["default_pool_size=4", "server_round_robin=1"], "session": []}
JOBS = "/api/v1/jobs"
Expected = dict[str, tuple[str, str, int, str]]  # queue, lock_key, the argument, status of each job


class Caller:
    """One client: it sends requests of all kinds, checks each answer, and keeps account of its jobs."""

    def __init__(self, app: Flask, number: int) -> None:
        self.client = app.test_client()
        self.random = random.Random(number)
        self.name = f"caller{number}"
        self.sent = 0
        self.jobs: Expected = {}

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        self.sent += 1
        answer = self.client.open(path, method=method, json=body)
        assert answer.status_code == 200, f"{method} {path}: {answer.status_code} {answer.get_data(as_text=True)}"
        return answer.get_json()

    def run(self) -> Expected:
        steps: list[Callable[[], None]] = [self.trigger] * 4 + [self.batch, self.cancel, self.delete, self.pause]
        steps += [self.status, self.detail, self.lists, self.figures]
        while self.sent < REQUESTS:
            self.random.choice(steps)()
        return self.jobs

    def new(self) -> dict[str, Any]:
        number = self.random.randrange(1_000_000)
        return MINIMAL | {"queue": self.name, "lock_key": f"{self.name}-{number}", "args": {"number": number}}

    def expect(self, new: dict[str, Any], answer: dict[str, Any]) -> None:
        assert answer["status"] == "queued"
        self.jobs[answer["job_id"]] = (new["queue"], new["lock_key"], new["args"]["number"], "queued")

    def trigger(self) -> None:
        new = self.new() | {"idempotency_key": f"{self.name}-{self.random.random()}"}
        answer = self.call("POST", TRIGGER, new)
        self.expect(new, answer)
        assert self.call("POST", TRIGGER, new) == answer

    def batch(self) -> None:
        many = [self.new() for _ in range(self.random.choice([1, 3, 1_300]))]
        for new, answer in zip(many, self.call("POST", f"{JOBS}/batch", {"jobs": many})["jobs"], strict=True):
            self.expect(new, answer)

    def some(self) -> str:
        if not self.jobs:
            self.trigger()
        return self.random.choice(list(self.jobs))

    def cancel(self) -> None:
        job_id = self.some()
        assert self.call("POST", f"{JOBS}/{job_id}/cancel")["status"] == "canceled"
        self.jobs[job_id] = (*self.jobs[job_id][:3], "canceled")

    def delete(self) -> None:
        job_id = self.some()
        self.call("DELETE", f"{JOBS}/{job_id}")
        del self.jobs[job_id]

    def pause(self) -> None:
        assert self.call("POST", f"/api/v1/queues/{self.name}/pause")["paused_at"]
        assert self.call("POST", f"/api/v1/queues/{self.name}/resume")["paused_at"] is None

    def status(self) -> None:
        job_id = self.some()
        shown = self.call("GET", f"{JOBS}/{job_id}/status")
        assert (shown["queue"], shown["lock_key"], shown["status"]) == (*self.jobs[job_id][:2], self.jobs[job_id][3])
        assert shown["created_at"].endswith("Z")

    def detail(self) -> None:
        job_id = self.some()
        assert self.call("GET", f"{JOBS}/{job_id}")["args"] == {"number": self.jobs[job_id][2]}
        assert self.call("GET", f"{JOBS}/{job_id}/events")["events"][0]["kind"] == "queued"

    def lists(self) -> None:
        page = self.call("GET", f"{JOBS}?queue={self.name}&sort={self.random.choice(['key', 'changed'])}")
        assert {job["job_id"] for job in page["jobs"]} <= set(self.jobs)

    def figures(self) -> None:
        self.call("GET", "/api/v1/queues")
        self.call("GET", "/ready")


@pytest.mark.parametrize(
    ("mode", "schema", "pool"),
    [
        pytest.param("transaction", "a-Farm", True, marks=pytest.mark.long),
        pytest.param("transaction", "a-Farm", False, marks=pytest.mark.long),
        pytest.param("transaction", "public", True, marks=pytest.mark.slow),
        pytest.param("session", "a-Farm", True, marks=pytest.mark.slow),
        pytest.param("session", "a-Farm", False, marks=pytest.mark.slow),
    ],
)
def test_h8_a_thousand_mixed_requests(own_db: str, mode: str, schema: str, pool: bool) -> None:
    migrations.migrate(own_db, schema)  # besides the queue in `public`, which would be found instead
    with (
        pooler(own_db, mode, TAKES_OUR_OPTIONS, *MODES[mode]) as through,
        running(through, pg_schema_queue=schema, pg_use_pool=pool) as app,
        ThreadPoolExecutor(THREADS) as threads,
    ):
        callers = [Caller(app, number) for number in range(THREADS)]
        accounts = list(threads.map(Caller.run, callers))
    assert sum(caller.sent for caller in callers) >= THREADS * REQUESTS
    expected = {job_id: job for account in accounts for job_id, job in account.items()}
    with db.connect(own_db, name="test", schema=schema) as conn:
        rows = conn.execute(
            "SELECT job_id::text, queue, lock_key, (args ->> 'number')::int, status::text FROM dl_jobs"
        ).fetchall()
    assert {row[0]: row[1:] for row in rows} == expected


def test_nothing_of_us_stays_in_the_poolers_sessions(own_db: str) -> None:
    settings = "search_path", "statement_timeout", "idle_in_transaction_session_timeout", "TimeZone"
    shown = "SELECT " + ", ".join(f"current_setting('{name}') AS {name}" for name in settings)
    prepared = "SELECT count(*) FROM pg_prepared_statements"
    migrations.migrate(own_db, "farm")
    with (
        pooler(own_db, "transaction", TAKES_OUR_OPTIONS, "default_pool_size=1") as through,
        psycopg.connect(through, autocommit=True, row_factory=dict_row, prepare_threshold=None) as other,
    ):
        before = other.execute(shown).fetchone()
        with running(through, pg_schema_queue="farm") as app:
            for _ in range(20):
                assert app.test_client().post(TRIGGER, json=MINIMAL).status_code == 200
            assert other.execute(shown).fetchone() == before
            assert other.execute(prepared).fetchone() == {"count": 0}
