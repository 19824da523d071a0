"""Args by the schema of their task, and jobs that are run again: over HTTP, in the forms, and by the command line."""

import json
import re
from html import unescape
from typing import Any, Literal
from uuid import UUID

import pytest
from api_app import BATCH, TRIGGER, Refused, rows
from click.testing import CliRunner
from flask.testing import FlaskClient
from pydantic import BaseModel, ConfigDict, Field

from dataloader import config
from dataloader.cli.direct import Direct
from dataloader.cli.main import main
from dataloader.queue import args_schema, db, operations


class Load(BaseModel):
    model_config = ConfigDict(extra="forbid")
    day: str
    limit: int = Field(default=10, ge=1)
    mode: Literal["full", "delta"] = "full"
    password: str | None = None


SCHEMA = args_schema.written(Load.model_json_schema())
GOOD: dict[str, Any] = {"day": "2026-01-31"}


def job(args: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"queue": "q", "task": "load", "lock_key": "k", "args": args} | more


@pytest.fixture(autouse=True)
def declared(conn: db.Connection) -> None:
    operations.publish_tasks(conn, {"load": {"args_schema": SCHEMA}, "free": {}})


def row(conn: db.Connection, job_id: UUID) -> dict[str, Any]:
    (found,) = (each for each in rows(conn) if each["job_id"] == job_id)
    return found


def post(client: FlaskClient, path: str, body: Any) -> Any:
    """The body as it is: the JSON of the application's own client is masked."""
    return client.post(path, data=json.dumps(body), content_type="application/json")


def test_a_trigger_names_the_args_that_are_wrong(client: FlaskClient, conn: db.Connection, refused: Refused) -> None:
    answer = post(client, TRIGGER, job({"limit": 0, "mode": "s3cret", "password": 12345678}))
    problem = refused(answer, 400, "invalid-input", "/args/limit")
    assert {fault["pointer"]: fault["message"] for fault in problem["errors"]} == {
        "/args/day": "day is required",
        "/args/limit": "limit should be 1 or more",
        "/args/mode": "mode should be one of full, delta",
        "/args/password": "password should be a text or null",
    }
    assert problem["detail"] == "4 args are not valid, see errors"
    assert "s3cret" not in answer.text
    assert "12345678" not in answer.text
    one = refused(post(client, TRIGGER, job({"day": 5})), 400, "invalid-input", "/args/day")
    assert one["detail"] == "day should be a text"
    assert len(rows(conn)) == 0


def test_a_task_that_no_worker_knows_is_taken_with_a_warning(client: FlaskClient, conn: db.Connection) -> None:
    for _ in range(2):  # a job that waits makes its task no more known
        answer = post(client, TRIGGER, job({}, task="lload")).get_json()
        assert answer["warning"] == "no worker knows the task 'lload', and no job of it has run: did you mean 'load'?"
    jobs = [job({}, task=task) for task in ("free", "fre", "fre", "else")]
    warnings = [each.get("warning") for each in post(client, BATCH, {"jobs": jobs}).get_json()["jobs"]]
    assert [text and text.partition(":")[2] for text in warnings] == [None, " did you mean 'free'?", None, ""]
    assert "warning" not in post(client, TRIGGER, job(GOOD)).get_json()
    conn.execute("INSERT INTO dl_needs (task, memory_mb, runs, learned_at, peaks) VALUES ('else', 1, 1, now(), '{1}')")
    assert "warning" not in post(client, TRIGGER, job({}, task="else")).get_json()  # of another service
    conn.execute("TRUNCATE dl_tasks")
    client.application.extensions["shared"].clear()
    assert "warning" not in post(client, TRIGGER, job({}, task="lload")).get_json()  # nobody has begun


def test_a_batch_is_refused_as_a_whole_but_for_known_idempotency_keys(
    client: FlaskClient, conn: db.Connection, refused: Refused
) -> None:
    first = post(client, TRIGGER, job(GOOD, idempotency_key="a")).get_json()
    known = job({}, idempotency_key="a")
    jobs = [job(GOOD), job({"day": "x", "zone": 1}), job({}, task="free"), job({})]
    problem = refused(post(client, BATCH, {"jobs": jobs}), 400, "invalid-input")
    assert [fault["pointer"] for fault in problem["errors"]] == ["/jobs/1/args/zone", "/jobs/3/args/day"]
    assert len(rows(conn)) == 1
    assert post(client, BATCH, {"jobs": [known, jobs[2]]}).get_json()["jobs"][0] == first
    assert post(client, TRIGGER, known).get_json() == first


@pytest.fixture
def dead(client: FlaskClient, conn: db.Connection) -> UUID:
    job_id = UUID(post(client, TRIGGER, job(GOOD | {"password": "hunter2hunter2"})).get_json()["job_id"])
    conn.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now() WHERE job_id = %s", (job_id,))
    return job_id


def test_a_job_is_run_again_with_changes(client: FlaskClient, conn: db.Connection, dead: UUID) -> None:
    body = {"args": {"limit": 5, "password": "***"}, "priority": 3, "idempotency_key": "again"}
    answers = [post(client, f"/api/v1/jobs/{dead}/again", body) for _ in range(2)]
    assert {answer.status_code for answer in answers} == {200}
    (new_id,) = {answer.get_json()["job_id"] for answer in answers}
    new = row(conn, UUID(new_id))
    assert new["args"] == GOOD | {"limit": 5, "password": "hunter2hunter2"}
    assert (new["queue"], new["lock_key"], new["priority"], new["status"]) == ("q", "k", 3, "queued")
    shown = client.get(f"/api/v1/jobs/{new_id}/events").get_json()["events"][0]["payload"]
    assert shown["rerun_of"] == str(dead)
    plain = client.post(f"/api/v1/jobs/{dead}/again")
    assert row(conn, UUID(plain.get_json()["job_id"]))["args"] == GOOD | {"password": "hunter2hunter2"}
    assert "hunter2" not in "".join(answer.text for answer in [*answers, plain])


def test_a_job_that_has_not_ended_is_not_run_again(client: FlaskClient, conn: db.Connection, refused: Refused) -> None:
    job_id = post(client, TRIGGER, job(GOOD)).get_json()["job_id"]
    assert "queued" in refused(client.post(f"/api/v1/jobs/{job_id}/again"), 409, "conflict")["detail"]
    refused(client.post(f"/api/v1/jobs/{UUID(int=1)}/again"), 404, "not-found")
    assert len(rows(conn)) == 1


PAGE = {"HX-Request": "true", "Sec-Fetch-Site": "same-origin"}


def test_the_form_has_a_field_for_each_arg(client: FlaskClient) -> None:
    page = client.get("/trigger?task=load").text
    for each in ('name="args.day"', 'name="args.limit"', 'min="1"', 'value="10"', "<option selected>full</option>"):
        assert each in page, each
    assert 'type="password"' in page
    assert 'name="args."' in client.get("/trigger?task=free").text
    assert "No worker has shown" in client.get("/trigger?task=unknown").text
    assert ">load<" in client.get("/trigger").text


@pytest.mark.parametrize(
    ("wrong", "pointers"),
    [
        ({"args.limit": "many", "args.password": "hunter2hunter2"}, {"/args/day", "/args/limit"}),
        ({"args.day": "x", "priority": "x"}, {"/priority"}),
        ({"args.day": "x", "priority": "0" * 22 + "7"}, {"/priority"}),
        ({"args.day": "x", "queue": "a\0b"}, {"/queue"}),
        ({"args.day": "x", "queue": "a" * 1_000}, {"/queue"}),
        ({"task": "free", "args.": "{"}, {"/args"}),
        ({"task": "free", "args.": '{"a": "\\u0000"}'}, {"/args/a"}),
    ],
)
def test_the_form_is_told_of_its_faults(
    client: FlaskClient, conn: db.Connection, refused: Refused, wrong: dict[str, str], pointers: set[str]
) -> None:
    form = {"task": "load", "queue": "q2", "lock_key": "k2", "priority": "5"}
    problem = refused(client.post("/trigger", data=form | wrong, headers=PAGE), 400, "invalid-input")
    assert {fault["pointer"] for fault in problem["errors"]} == pointers
    assert rows(conn) == []


def test_the_page_of_a_dead_job_runs_it_again(client: FlaskClient, conn: db.Connection, dead: UUID) -> None:
    page = client.get(f"/jobs/{dead}/again").text
    assert 'value="2026-01-31"' in page
    assert "stays as it is" in page
    assert "hunter2" not in page
    assert max(page.index('name="lock_key"'), page.index('name="partition_key"')) < page.index("<details>")
    form = {"args.day": "2026-02-01", "args.limit": "", "args.mode": "", "args.password": ""}
    form |= {"lock_key": "orders:2026-02-01", "partition_key": ""}
    answer = client.post(f"/jobs/{dead}/again", data=form, headers=PAGE)
    new_id = answer.headers["HX-Redirect"].rpartition("/")[2]
    added = row(conn, UUID(new_id))
    assert added["args"] == {"day": "2026-02-01", "password": "hunter2hunter2"}
    assert (added["lock_key"], added["partition_key"]) == ("orders:2026-02-01", "")
    assert (new_id in client.get(f"/jobs/{dead}").text, new_id != str(dead)) == (True, True)
    journal = client.get(f"/api/v1/jobs/{new_id}/events").get_json()["events"]
    assert journal[0]["payload"]["by"] == "anonymous from 127.0.0.1"
    assert str(dead) in client.get(f"/jobs/{new_id}").text
    assert client.get(f"/jobs/{new_id}/again").status_code == 409


def test_a_secret_that_is_repeated_in_another_arg_is_masked_and_stays(
    client: FlaskClient, conn: db.Connection, dead: UUID
) -> None:
    conn.execute('UPDATE dl_jobs SET args = args || \'{"day": "not hunter2hunter2"}\'')
    page = client.get(f"/jobs/{dead}/again").text
    assert 'value="not ***"' in page
    assert "hunter2" not in page
    form = {"args.day": "not ***", "args.limit": "", "args.mode": "", "args.password": "", "lock_key": "a"}
    by_form = client.post(f"/jobs/{dead}/again", data=form, headers=PAGE).headers["HX-Redirect"].rpartition("/")[2]
    by_api = post(client, f"/api/v1/jobs/{dead}/again", {"args": {"day": "not ***"}}).get_json()["job_id"]
    for new_id in (by_form, by_api):
        assert row(conn, UUID(new_id))["args"]["day"] == "not hunter2hunter2"


def test_a_text_area_with_secrets_comes_back_as_it_was(client: FlaskClient, conn: db.Connection) -> None:
    args = {"password": "hunter2hunter2", "url": "https://u:hunter3hunter3@h/", "n": [{"token": "hunter4hunter4"}]}
    args["again"] = ["as hunter2hunter2", {"and": "hunter4hunter4"}]
    job_id = post(client, TRIGGER, job(args, task="free", lock_key="token=hunter5hunter5")).get_json()["job_id"]
    conn.execute("UPDATE dl_jobs SET status = 'canceled', finished_at = now()")
    page = unescape(client.get(f"/jobs/{job_id}/again").text)
    assert not re.search("hunter[0-9]", page)
    area = re.search(r"<textarea[^>]*>\n(.*?)</textarea>", page, re.DOTALL)
    key = re.search(r'name="lock_key"[^>]* value="([^"]*)"', page)
    assert area
    assert key
    assert json.loads(area[1]) == {"password": "***", "url": "https://u:***@h/", "n": [{"token": "***"}]} | {
        "again": ["as ***", {"and": "***"}]
    }
    form = {"args.": area[1].replace("\n", "\r\n"), "lock_key": key[1]}
    answer = client.post(f"/jobs/{job_id}/again", data=form, headers=PAGE)
    added = row(conn, UUID(answer.headers["HX-Redirect"].rpartition("/")[2]))
    assert (added["args"], added["lock_key"]) == (args, "token=hunter5hunter5")


def test_the_command_takes_pairs(conn: db.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DL_DB_DSN", dsn)
    operations.publish_tasks(conn, {"odd": {"args_schema": "{"}})
    with Direct(dsn, config.load(_env_file=None)) as farm:
        assert farm.trigger("odd").status == "queued"
        old = farm.trigger("free", args={"a": 1, "b": "x", "c": None})
    conn.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now()")
    pairs = ["--arg", "a=2", "--arg", "b=2026-01-31", "--arg", 'd={"e": [1]}', "--arg", "f=NaN", "--without", "c"]
    done = CliRunner().invoke(main, ["again", str(old.job_id), "--dsn", dsn, *pairs])
    assert done.exit_code == 0, done.output
    again = row(conn, UUID(json.loads(done.stdout)["job_id"]))
    assert again["args"] == {"a": 2, "b": "2026-01-31", "d": {"e": [1]}, "f": "NaN"}
    assert CliRunner().invoke(main, ["again", str(old.job_id), "--arg", "a"]).exit_code == 2
