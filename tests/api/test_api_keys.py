"""Idempotency keys where there are tokens: a token is told of the jobs that it has triggered, and of no others."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from api_app import BATCH, MINIMAL, TRIGGER, Refused, bearer, entries, running
from flask.testing import FlaskClient

import dataloader
from dataloader.queue import db, operations

TokensOf = Callable[..., FlaskClient]


@pytest.fixture
def tokened(dsn: str) -> Iterator[TokensOf]:
    """A client of the application with these tokens, each with its scopes."""
    with ExitStack() as stack:
        yield lambda **scopes: stack.enter_context(running(dsn, dl_api_tokens=entries(**scopes))).test_client()


def test_a_token_learns_no_id_of_the_job_that_its_own_waits_for(tokened: TokensOf, conn: db.Connection) -> None:
    """A guessed lock key would give it, and by the id a job is read and cancelled."""
    client = tokened(airflow="trigger", stranger="trigger", eyes="trigger read")
    holder = client.post(TRIGGER, json=MINIMAL, headers=bearer("airflow")).get_json()["job_id"]
    conn.execute("UPDATE dl_jobs SET status = 'running', lease_expires_at = now() + interval '1 min'")
    job = f"/api/v1/jobs/{client.post(TRIGGER, json=MINIMAL, headers=bearer('stranger')).get_json()['job_id']}"
    for paused in (False, True):
        if paused:
            operations.pause(conn, MINIMAL["queue"], "me")
        told = client.get(f"{job}/status", headers=bearer("stranger"))
        assert "lock" in told.text
        assert holder not in told.text
        assert holder in client.get(f"{job}/status", headers=bearer("eyes")).text


def test_a_token_learns_nothing_of_the_job_that_has_anothers_key(
    tokened: TokensOf, refused: Refused, conn: db.Connection
) -> None:
    """A guessed idempotency key gives neither the id, by which the job could be cancelled, nor the status."""
    client = tokened(airflow="trigger", stranger="trigger", ops="trigger operate", eyes="trigger read")
    keyed = MINIMAL | {"idempotency_key": "cbr-2026-01-31"}
    mine = client.post(TRIGGER, json=keyed, headers=bearer("airflow"))
    job_id = mine.get_json()["job_id"]
    for body in (keyed, keyed | {"producer": "token airflow from 127.0.0.1"}):
        answer = client.post(TRIGGER, json=body, headers=bearer("stranger"))
        problem = refused(answer, 409, "key-taken", "/idempotency_key")
        assert job_id not in str(problem)
        assert "queued" not in str(problem)
    as_header = client.post(TRIGGER, json=MINIMAL, headers=bearer("stranger") | {"Idempotency-Key": "cbr-2026-01-31"})
    refused(as_header, 409, "key-taken")
    for name in ("airflow", "ops", "eyes"):
        assert client.post(TRIGGER, json=keyed, headers=bearer(name)).get_json() == mine.get_json()
    assert conn.execute("SELECT count(*) FROM dl_jobs").fetchone() == (1,)


def test_a_batch_with_anothers_key_adds_nothing(tokened: TokensOf, refused: Refused, conn: db.Connection) -> None:
    client = tokened(airflow="trigger", stranger="trigger", ops="trigger operate")
    batch = {"jobs": [MINIMAL, MINIMAL | {"idempotency_key": "a"}, MINIMAL | {"idempotency_key": "b"}]}
    first = client.post(BATCH, json=batch, headers=bearer("airflow")).get_json()["jobs"]
    again = client.post(BATCH, json={"jobs": batch["jobs"][1:]}, headers=bearer("airflow")).get_json()["jobs"]
    assert again == first[1:]
    stolen = {"jobs": [MINIMAL, MINIMAL | {"idempotency_key": "mine"}, MINIMAL | {"idempotency_key": "b"}]}
    answer = client.post(BATCH, json=stolen, headers=bearer("stranger"))
    problem = refused(answer, 409, "key-taken", "/jobs/2/idempotency_key")
    assert first[2]["job_id"] not in str(problem)
    refused(client.post(TRIGGER, json=batch["jobs"][1], headers=bearer("stranger")), 409, "key-taken")
    assert conn.execute("SELECT count(*) FROM dl_jobs").fetchone() == (3,)
    assert client.post(BATCH, json=stolen, headers=bearer("ops")).get_json()["jobs"][2] == first[2]


def test_the_key_of_a_producer_without_a_token_is_anothers_where_there_are_tokens(
    tokened: TokensOf, client: FlaskClient, refused: Refused, conn: db.Connection
) -> None:
    job_id, _ = dataloader.enqueue(conn, **MINIMAL, idempotency_key="plain")
    conn.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, idempotency_key)"
        " VALUES (gen_random_uuid(), 'q', 't', 'k', 'sql')"
    )
    holder = tokened(airflow="trigger")
    for key in ("plain", "sql"):
        answer = holder.post(TRIGGER, json=MINIMAL | {"idempotency_key": key}, headers=bearer("airflow"))
        refused(answer, 409, "key-taken")
    answer = client.post(TRIGGER, json=MINIMAL | {"idempotency_key": "plain"})
    assert answer.get_json() == {"job_id": str(job_id), "status": "queued"}


def test_the_journal_says_which_token_has_triggered(tokened: TokensOf, conn: db.Connection) -> None:
    client = tokened(airflow="trigger")
    client.post(TRIGGER, json=MINIMAL | {"producer": "p"}, headers=bearer("airflow"))
    client.post(BATCH, json={"jobs": [MINIMAL | {"idempotency_key": "a"}]}, headers=bearer("airflow"))
    rows = conn.execute("SELECT payload - 'user' FROM dl_job_events ORDER BY event_id").fetchall()
    by = "token airflow from 127.0.0.1"
    assert rows == [({"producer": "p", "by": by},), ({"by": by},)]
