"""around_enqueue at every way into the queue: the API, a producer's own connection, the command line."""

import json
import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from api_app import BATCH, MINIMAL, TRIGGER, Refused, rows, running
from flask.testing import FlaskClient

import dataloader
from dataloader import config, log
from dataloader.cli.direct import Direct
from dataloader.client import Refused as RefusedByFarm
from dataloader.pipelines import around_enqueue
from dataloader.queue import db, enqueue, operations
from dataloader.queue.enqueue import NewJob
from dataloader.queue.hooks import AROUND_ENQUEUE

CANARY = "canary-81c4"
ORDER = {"queue": "orders", "task": "sync", "args": {"order": 7, "at": 1.5}}
AT = datetime(2026, 1, 31, 3, 30, tzinfo=UTC)


@pytest.fixture(autouse=True)
def own_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AROUND_ENQUEUE, "_functions", {})


@pytest.fixture
def by_order() -> list[dict[str, Any]]:
    """A hook that derives fields from the order; the jobs that it has seen."""
    seen: list[dict[str, Any]] = []

    @around_enqueue
    def by_order(job: dict[str, Any]) -> dict[str, Any]:
        seen.append(dict(job))
        if "order" not in job["args"]:
            raise ValueError("args.order is missing")
        key = f"order-{job['args']['order']}"
        return {"idempotency_key": f"{key}-{job['args']['at']}"} | job | {"lock_key": key, "available_at": AT}

    return seen


DERIVED = {"lock_key": "order-7", "idempotency_key": "order-7-1.5", "available_at": AT, "args": ORDER["args"]}


def derived(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in DERIVED}


def test_a_trigger_may_leave_the_key_to_the_hook(
    client: FlaskClient, conn: db.Connection, by_order: list[dict[str, Any]]
) -> None:
    first = client.post(TRIGGER, json=ORDER)
    assert first.status_code == 200
    assert derived(rows(conn)[0]) == DERIVED
    assert by_order == [ORDER]
    batch = client.post(BATCH, json={"jobs": [ORDER, ORDER | {"args": {"order": 8, "at": 2}}]}).get_json()["jobs"]
    assert batch[0] == first.get_json(), "the derived idempotency key is one"
    assert client.post(TRIGGER, json=ORDER, headers={"Idempotency-Key": "mine"}).status_code == 200
    assert sorted(row["idempotency_key"] for row in rows(conn)) == ["mine", "order-7-1.5", "order-8-2"]
    assert by_order[-1] == {"idempotency_key": "mine"} | ORDER, "it sees the header as a field"


def test_a_hook_may_replace_the_key_of_the_header(client: FlaskClient, conn: db.Connection, refused: Refused) -> None:
    around_enqueue(lambda job: job | {"idempotency_key": "the farm's"})
    assert client.post(TRIGGER, json=MINIMAL, headers={"Idempotency-Key": "mine"}).status_code == 200
    assert [row["idempotency_key"] for row in rows(conn)] == ["the farm's"]
    other = MINIMAL | {"idempotency_key": "other"}
    for body, header in ((other, "mine"), (MINIMAL, "k" * 256), (MINIMAL, "")):
        answer = client.post(TRIGGER, json=body, headers={"Idempotency-Key": header})
        refused(answer, 400, "invalid-input", "/idempotency_key")


@pytest.mark.usefixtures("by_order")
def test_the_sentence_of_a_refusal_is_the_answer(
    client: FlaskClient, conn: db.Connection, refused: Refused, dsn: str
) -> None:
    problem = refused(client.post(TRIGGER, json=ORDER | {"args": {"n": 1}}), 400, "invalid-input", "")
    assert problem["detail"] == "args.order is missing"
    answer = client.post(BATCH, json={"jobs": [ORDER, ORDER | {"args": {}}]})
    assert refused(answer, 400, "invalid-input", "/jobs/1")["detail"] == "args.order is missing"
    with Direct(dsn, config.load(_env_file=None)) as farm, pytest.raises(RefusedByFarm, match=r"args.order is missing"):
        farm.trigger("sync")
    assert rows(conn) == []


def test_no_hook_sees_what_is_not_valid(client: FlaskClient, refused: Refused, by_order: list[dict[str, Any]]) -> None:
    for job, pointer in [
        ("text", ""),
        (None, ""),
        (ORDER | {"args": [7]}, "/args"),
        ({"queue": "orders", "args": {}}, "/task"),
        (ORDER | {"lock_key": None}, "/lock_key"),
        (ORDER | {"prio": 1}, "/prio"),
    ]:
        refused(client.post(BATCH, json={"jobs": [ORDER, job]}), 400, "invalid-input", f"/jobs/1{pointer}")
        refused(client.post(TRIGGER, json=job), 400, "invalid-input", pointer)
        assert by_order == [], job


# What JSON, PostgreSQL or a worker could not hold.
NO_JSON = ["\ud800", "a\0", Decimal("1.5"), date(2026, 1, 31), {1}, float("nan"), [float("-inf")], {(1,): 1}, 10**5_000]
NO_JSON.append(json.loads("[" * 63 + "]" * 63))


def test_what_a_hook_returns_is_checked_as_a_body(client: FlaskClient, conn: db.Connection, refused: Refused) -> None:
    around_enqueue(lambda job: job | made)
    for made, pointer in [  # noqa: B007  the hook reads it
        ({"queue": "", "lock_key": "k"}, "/queue"),
        ({"keys": 1, "lock_key": "k"}, "/keys"),
        ({"lock_key": "k\0"}, "/lock_key"),
        *(({"lock_key": "k", "args": {"n": value}}, "/args") for value in NO_JSON),
        ({"lock_key": "k", "available_at": datetime(2026, 1, 31)}, "/available_at"),  # noqa: DTZ001
        ({"lock_key": "k", "available_at": AT + timedelta(days=9_999)}, "/available_at"),
    ]:
        refused(client.post(TRIGGER, json=ORDER), 400, "invalid-input", pointer)
        refused(client.post(BATCH, json={"jobs": [ORDER]}), 400, "invalid-input", f"/jobs/0{pointer}")
        assert rows(conn) == []


def test_the_args_that_a_hook_makes_have_the_bounds_and_the_schema_of_given_ones(
    client: FlaskClient, conn: db.Connection, refused: Refused
) -> None:
    around_enqueue(lambda job: job | {"args": {"n": made}})
    schema = {"type": "object", "properties": {"n": {"type": "array", "items": {"type": "integer"}}}}
    operations.publish_tasks(conn, {MINIMAL["task"]: {"args_schema": json.dumps(schema)}})
    for path, body, place in ((TRIGGER, MINIMAL, ""), (BATCH, {"jobs": [MINIMAL]}, "/jobs/0")):
        made: Any = ("x" * 300_000,)
        refused(client.post(path, json=body), 413, "too-large", f"{place}/args")
        made = (1, "x")
        refused(client.post(path, json=body), 400, "invalid-input", f"{place}/args/n/1")
        made = (1, 2)
        assert client.post(path, json=body).status_code == 200
    assert [row["args"] for row in rows(conn)] == [{"n": [1, 2]}] * 2


def returns_none(job: dict[str, Any]) -> Any:
    return None


def asks_a_database(job: dict[str, Any]) -> dict[str, Any]:
    with psycopg.connect(job["args"]["dsn"]) as conn:
        conn.execute("SELECT FROM customers")
    return job


def quotes_the_job(job: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError(f"cannot take {job}")


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (returns_none, "returns_none should return the job's fields as a dict, not NoneType"),
        (asks_a_database, "This is a fault of"),
        (quotes_the_job, "This is a fault of"),
    ],
)
def test_a_fault_of_a_hook_tells_nothing_of_the_job(
    client: FlaskClient, refused: Refused, dsn: str, capfd: pytest.CaptureFixture[str], hook: Any, words: str
) -> None:
    around_enqueue(hook)
    job = ORDER | {"args": {"order": CANARY, "dsn": dsn}}
    for path, body in ((TRIGGER, job), (BATCH, {"jobs": [job]})):
        answer = client.post(path, json=body)
        refused(answer, 500, "internal-error")
        log.flush()  # another test may have let a thread write the lines
        logged = capfd.readouterr()
        assert words in answer.text
        assert not any(text in answer.text + logged.out + logged.err for text in (CANARY, "customers"))


def test_the_api_and_the_command_line_import_dl_hooks_alone(
    dsn: str, conn: db.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "our_hooks.py").write_text(
        "from dataloader.pipelines import around_enqueue\n"
        "@around_enqueue\ndef keyed(job):\n    return job | {'lock_key': f\"order-{job['args']['order']}\"}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with running(dsn, dl_hooks="our_hooks", dl_pipelines="no_such_module") as app:
        assert app.test_client().post(TRIGGER, json=ORDER).status_code == 200
    del sys.modules["our_hooks"]
    AROUND_ENQUEUE._functions.clear()
    with Direct(dsn, config.load(_env_file=None, dl_hooks="our_hooks")) as farm:
        farm.trigger("sync", args={"order": 8})
    assert [row["lock_key"] for row in rows(conn)] == ["order-7", "order-8"]
    del sys.modules["our_hooks"]
    message = r"^DL_HOOKS: no_such_module cannot be imported: ModuleNotFoundError"
    with pytest.raises(config.ConfigError, match=message), running(dsn, dl_hooks="no_such_module"):
        pass


@pytest.fixture
def own(dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(dsn) as conn:
        yield conn


def test_a_producer_in_python(own: psycopg.Connection, conn: db.Connection, by_order: list[dict[str, Any]]) -> None:
    one, _ = dataloader.enqueue(own, lock_key="", **ORDER, schema="public")  # type: ignore[arg-type]
    jobs = [NewJob("orders", "sync", "", {"order": n, "at": 1.5}, trace="00-a") for n in (8, 9)] * 2
    added = dataloader.enqueue_many(own, jobs, schema="public")
    own.commit()
    assert by_order == [ORDER, *[ORDER | {"args": job.args} for job in jobs]], "the fields that are not as by default"
    assert [job_id for job_id, _ in added] == [added[0][0], added[1][0]] * 2
    stored = {row["lock_key"]: row for row in rows(conn)}
    assert {key: row["job_id"] for key, row in stored.items()} == {
        "order-7": one, "order-8": added[0][0], "order-9": added[1][0]
    }  # fmt: skip
    assert [stored[f"order-{n}"]["trace"] for n in (7, 8)] == [None, "00-a"]
    assert derived(stored["order-7"]) == DERIVED


def test_a_producer_in_python_is_told_which_job_is_refused(
    own: psycopg.Connection, conn: db.Connection, by_order: list[dict[str, Any]]
) -> None:
    good, bad = NewJob("orders", "sync", "", {"order": 7, "at": 1}), NewJob("orders", "sync", "", {})
    with pytest.raises(ValueError, match=r"^jobs\[1\]: args.order is missing$"):
        dataloader.enqueue_many(own, [good, bad], schema="public")
    with pytest.raises(ValueError, match=r"^args.order is missing$"):
        dataloader.enqueue(own, queue="orders", task="sync", lock_key="", schema="public")
    with pytest.raises(ValueError, match=r"^priority: Input should be a valid integer$"):
        dataloader.enqueue(own, queue="q", task="t", lock_key="", priority="1", schema="public")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^jobs\[1\].task: String should have at least 1 character$"):
        dataloader.enqueue_many(own, [bad, NewJob("orders", "", "")], schema="public")
    assert len(by_order) == 3
    around_enqueue(lambda job: job | ({} if job["args"]["at"] == 1 else {"prio": 1}))
    worse = NewJob("orders", "sync", "", {"order": 7, "at": 2})
    with pytest.raises(ValueError, match=r"^jobs\[1\].prio: Extra inputs are not permitted$"):
        dataloader.enqueue_many(own, [good, worse], schema="public")
    assert own.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert rows(conn) == []


def test_a_refusal_by_a_model_of_the_hook_quotes_no_args(own: psycopg.Connection) -> None:
    from pydantic import BaseModel

    class Args(BaseModel):
        order: int

    @around_enqueue
    def checked(job: dict[str, Any]) -> dict[str, Any]:
        Args.model_validate(job["args"])
        return job

    with pytest.raises(ValueError, match=r"^order: Input should be a valid integer") as e:
        dataloader.enqueue(own, queue="q", task="t", lock_key="k", args={"order": CANARY}, schema="public")
    assert CANARY not in str(e.value)


def test_the_queue_itself_calls_no_hook(conn: db.Connection, by_order: list[dict[str, Any]]) -> None:
    enqueue.enqueue_many(conn, [NewJob("q", "t", "k", json.loads("{}"))])
    assert by_order == []
