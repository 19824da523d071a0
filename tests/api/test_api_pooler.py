"""The API behind PgBouncer: what it acknowledged is in its schema as it was sent, and no request is answered 5xx."""

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from api_app import BATCH, MINIMAL, TRIGGER, answered, asked, running
from flask import Flask
from pooling import TAKES_OUR_OPTIONS, pooler
from psycopg.rows import dict_row

from dataloader.queue import db, migrations

THREADS = 8
IN_TURN = ["default_pool_size=4", "server_round_robin=1"]  # each transaction is to meet another session
JOBS, SCHEMA = "/api/v1/jobs", "a-Farm"


def use(app: Flask, number: int) -> dict[str, tuple[str, str, int, str]]:
    """Requests of all kinds, and of the jobs that they leave the queue, the key, the argument and the status."""
    client, queue = app.test_client(), f"q{number % THREADS}"
    new = MINIMAL | {"queue": queue, "lock_key": f"k{number}", "args": {"number": number}}
    keyed = new | {"idempotency_key": f"once {number}"}
    first, again = (answered(client.post(TRIGGER, json=keyed))["job_id"] for _ in range(2))
    assert first == again
    many = {"jobs": [new] * (1_300 if number % 40 == 0 else 3)}
    second, *others = (job["job_id"] for job in answered(client.post(BATCH, json=many))["jobs"])
    assert answered(client.post(f"{JOBS}/{first}/cancel"))["status"] == "canceled"
    answered(client.delete(f"{JOBS}/{second}"))
    assert asked(client, f"{JOBS}/{others[0]}")["args"] == {"number": number}
    assert asked(client, f"{JOBS}/{first}/events")["events"][0]["kind"] == "queued"
    assert {job["queue"] for job in asked(client, f"{JOBS}?queue={queue}&sort=key")["jobs"]} == {queue}
    assert answered(client.post(f"/api/v1/queues/{queue}/pause"))["paused_at"]
    for path in ("/api/v1/queues", "/ready"):
        asked(client, path)
    left = (queue, f"k{number}", number)
    return {first: (*left, "canceled")} | dict.fromkeys(others, (*left, "queued"))


@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.long
def test_h8_a_thousand_mixed_requests(own_db: str, pool: bool) -> None:
    migrations.migrate(own_db, SCHEMA)  # besides the queue in `public`, which would be found instead
    with (
        pooler(own_db, "transaction", TAKES_OUR_OPTIONS, *IN_TURN) as through,
        running(through, pg_schema_queue=SCHEMA, pg_use_pool=pool) as app,
        ThreadPoolExecutor(THREADS) as threads,
    ):
        expected = {job: left for jobs in threads.map(use, [app] * 90, range(90)) for job, left in jobs.items()}
    with db.connect(own_db, name="test", schema=SCHEMA) as conn:
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
