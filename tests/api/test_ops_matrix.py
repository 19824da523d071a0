"""Each declared operation at each surface: it answers, refuses a wrong input in the same words, and is audited.

The surfaces are HTTP, the client, the call in process (`--direct`) and the command. The scopes that docs/openapi.json
names are tested in test_api_access.py.
"""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin
from urllib.parse import quote
from uuid import UUID, uuid4

import pytest
from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from api_app import HTMX, Refused, listening, strict
from click.testing import CliRunner
from flask import Flask
from flask.testing import FlaskClient

from dataloader import client as of_client
from dataloader import config, ops
from dataloader.api.server import audit
from dataloader.cli.direct import Direct
from dataloader.cli.main import main
from dataloader.client.methods import finished
from dataloader.ops.op import Call, Op, Parameter, adapter, bounds, plain_type
from dataloader.queue import db, operations
from dataloader.queue.plans import backfills

OPS = ops.load()
DEAD, QUEUED = (UUID(f"01890a5d-ac96-774b-bcce-b3020000000{n}") for n in (1, 2))
DAYS = {"since": "2019-01-01", "until": "2019-01-05", "step": "day"}
# The values of the parts of paths in the tests' farm, and the parameters of each operation that needs some.
NAMED = {"job_id": DEAD, "queue": "orders", "task": "load", "limit": "source:oracle", "name": "nightly",
         "backfill": "rates", "webhook": "ops", "verb": "requeue"}  # fmt: skip
GIVEN: dict[str, dict[str, Any]] = {
    "trigger": {"queue": "orders", "task": "load", "lock_key": "k"},
    "trigger_many": {"jobs": [{"queue": "orders", "task": "load", "lock_key": "k"}]},
    "again": {"args": {"day": "2026-01-31"}},
    "suggest": {"q": "lo"},
    "run_now": {"job_id": QUEUED},
    "cancel_jobs": {"job_ids": [str(QUEUED)]},
    "change_jobs": {"job_ids": [str(DEAD)]},
    "preview": {"order": "requeue", "matching": {"task": "load"}},
    "order_jobs": {"order": "requeue", "matching": {"task": "load"}},
    "limit": {"max_length": 7},
    "set_queue": {"ordered": True, "merge": True},
    "move": {"to": "orders_v2"},
    "set_limit": {"most": 3},
    "write_error_note": {"task": "load", "error_group": "OSError", "note": "known"},
    "put_webhook": {"url": "${DL_WEBHOOK_OPS}"},
    "add_schedule": {"name": "hourly", "task": "load", "cron": "0 * * * *"},
    "change_schedule": {"priority": 3},
    "add_backfill": {"name": "history", "task": "load", **DAYS},
    "try_backfill": {"name": "history", "task": "load", **DAYS},
    "set_backfill": {"max_running": 4},
}
BEFORE = {"resume_backfill": "pause_backfill", "remove_backfill": "cancel_backfill"}


def path_of(op: Op) -> dict[str, Any]:
    return {name: NAMED[name] for name in op.in_path}


def given_to(op: Op, conn: db.Connection) -> dict[str, Any]:
    """Parameters with which the operation succeeds in the tests' farm."""
    found = path_of(op) | GIVEN.get(op.name, {})
    if op.name == "order_jobs":
        call = Call(lambda: conn, "me", config.load(_env_file=None))
        preview = OPS["preview"]
        found["confirmation"] = preview.run(call, path_of(preview) | GIVEN["preview"]).confirmation
    return found


@pytest.fixture
def farm(conn: db.Connection) -> db.Connection:
    """A database with one of each thing that an operation may name."""
    operations.publish_tasks(conn, {"load": {}})
    operations.set_order(conn, "orders", "test", ordered=True)
    for job_id in (DEAD, QUEUED):
        conn.execute(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key, available_at)"
            " VALUES (%s, 'orders', 'load', 'k', now() + interval '1 hour')",
            (job_id,),
        )
    conn.execute("UPDATE dl_jobs SET status = 'failed', error = 'OSError', attempt = 5, finished_at = now()"
                 " WHERE job_id = %s", (DEAD,))  # fmt: skip
    call = Call(lambda: conn, "test", config.load(_env_file=None))
    for name in ("set_limit", "put_webhook"):
        OPS[name].run(call, path_of(OPS[name]) | GIVEN[name])
    OPS["add_schedule"].run(call, GIVEN["add_schedule"] | {"name": "nightly"})
    OPS["add_backfill"].run(call, GIVEN["add_backfill"] | {"name": "rates"})
    return conn


def prepare(op: Op, conn: db.Connection) -> None:
    if op.name in BEFORE:
        OPS[BEFORE[op.name]].run(Call(lambda: conn, "test", config.load(_env_file=None)), {"backfill": "rates"})
        while op.name == "remove_backfill" and backfills.tick(conn):
            pass


def over_http(client: FlaskClient, op: Op, given: dict[str, Any]) -> Any:
    path = "/api/v1" + op.path
    for name in op.in_path:
        path = path.replace(f"{{{name}}}", quote(str(given[name]), safe=""))
    rest = {name: value for name, value in given.items() if name not in op.in_path}
    if op.method in ("POST", "PUT"):  # as it is: the JSON of the application's own client is masked
        return client.open(path, method=op.method, data=json.dumps(rest), content_type="application/json")
    return client.open(path, method=op.method, query_string=rest)


@pytest.fixture
def service(app: Flask) -> Iterator[str]:
    """The address of the application."""
    with listening(app) as address:
        yield address


@pytest.mark.parametrize("name", OPS)
def test_an_operation_answers_over_http_with_its_type_and_is_audited(
    client: FlaskClient, farm: db.Connection, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    op, lines = OPS[name], []
    prepare(op, farm)
    given = given_to(op, farm)
    monkeypatch.setattr(audit.log, "audit", lambda event, **facts: lines.append({"event": event, **facts}))
    answer = over_http(client, op, given)
    assert answer.status_code == 200, answer.text
    strict(op.answer, answer.get_json())
    begin, end = lines
    assert (begin["event"], end["event"]) == ("request.begin", "request.end")
    assert (end["status"], end["who"]) == (200, "anonymous")
    if op.is_change and name not in ("again", "change_jobs"):
        assert {each: str(end[each]) for each in op.in_path} == {each: str(given[each]) for each in op.in_path}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("surface", ["client", "in process"])
@pytest.mark.long
def test_a_method_returns_the_answer_of_http(
    service: str, client: FlaskClient, farm: db.Connection, dsn: str, surface: str, name: str
) -> None:
    op = OPS[name]
    prepare(op, farm)
    given = given_to(op, farm)
    if op.name in ("jobs", "keys", "job_events", "logs", "partitions"):
        given |= {"limit": 5}
    with of_client.Client(service) if surface == "client" else Direct(dsn, config.load(_env_file=None)) as reached:
        found = getattr(reached, name)(**given)
        found = list(found) if isinstance(found, Iterator) else found
    if op.is_change:
        assert found is not None
        return
    document = over_http(client, op, {**given}).get_json()
    if isinstance(found, list):
        rows = document[op.rows] if op.rows else next(value for value in document.values() if isinstance(value, list))
        assert len(rows) == len(found)
    elif is_dataclass(found):
        assert type(found) is op.answer
        assert {each.name for each in fields(found)} >= set(document)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.command])
def test_a_command_shows_the_answer(farm: db.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    op = OPS[name]
    monkeypatch.setenv("DL_DB_DSN", dsn)
    prepare(op, farm)
    given = given_to(op, farm)
    words = []
    for word in op.command.split():
        words.append(str(given.pop(word.lower())) if word.isupper() else word)
    for option, value in given.items():
        words += [f"--{option.replace('_', '-')}"] + ([] if value is True else [str(value)])
    command = [word for word in op.command.split() if not word.isupper()]
    asks = "--yes" in CliRunner().invoke(main, [*command, "--help"]).output
    flags = ["--dsn", dsn, "--json", *(["--yes"] if asks else [])]
    done = CliRunner().invoke(main, [*words, *flags])
    assert done.exit_code == 0, done.output
    for line in done.stdout.splitlines()[:1]:
        assert json.loads(line if line.endswith("}") else done.stdout) is not None


def wrong(each: Parameter) -> Any:
    """A value that the parameter may not have, in a body and in a query alike; None: any text will do."""
    kind = plain_type(each.annotation)
    found = {type(bound): bound for bound in bounds(each.annotation)}
    if kind in (int, float):
        if not {Ge, Gt, Le} & found.keys():
            return "x"
        least = next((found[kind] for kind in (Ge, Gt) if kind in found), None)
        return found[Le].le + 1 if Le in found else (getattr(least, "ge", getattr(least, "gt", 0)) - 1)
    if kind is str or get_origin(kind) is Literal:
        longest = found[MaxLen].max_length + 1 if MaxLen in found else 0
        return "" if MinLen in found and get_origin(kind) is not Literal else "x" * (longest or 2_500)
    return {UUID: "7", bool: "yes"}.get(kind, 7)


def wrong_inputs(op: Op) -> Iterator[tuple[str, Any]]:
    for each in op.parameters.values():
        in_path = each.name in op.in_path
        if in_path and each.name in ("verb", "name", "backfill", "webhook"):
            continue  # any text is the name of one; a verb is part of the address
        if get_origin(plain_type(each.annotation)) in (Union, UnionType):
            continue  # such as a number or a word
        is_any = plain_type(each.annotation) is str and not {MinLen, MaxLen} & {*map(type, bounds(each.annotation))}
        if not is_any and (in_path or op.method != "DELETE"):
            yield each.name, wrong(each) or ("x" * 2_500 if in_path else wrong(each))


@pytest.mark.parametrize("name", OPS)
def test_a_wrong_input_is_refused_in_the_same_words_everywhere(
    client: FlaskClient, conn: db.Connection, refused: Refused, dsn: str, name: str
) -> None:
    op = OPS[name]
    for each, value in wrong_inputs(op):
        given = {"confirmation": "x"} if name == "order_jobs" else {}
        given |= path_of(op) | GIVEN.get(name, {}) | {each: value}
        (fault,) = refused(over_http(client, op, given), 400, "invalid-input")["errors"]
        if each in op.in_path:
            assert fault["pointer"] in ("", f"/{each}")
            continue
        assert fault["pointer"].startswith(f"/{each}")
        with Direct(dsn, config.load(_env_file=None)) as direct, pytest.raises(of_client.Refused) as e:
            finished(direct._call(op.route, op.answer, given))
        assert fault["message"] in [each.message for each in e.value.faults] or fault["message"] in str(e.value)
    if name == "status":  # it ignores what it does not know (web.long_poll)
        return
    problem = refused(
        over_http(client, op, path_of(op) | GIVEN.get(name, {}) | {"colour": "red"}), 400, "invalid-input"
    )
    (message,) = [fault["message"] for fault in problem["errors"] if fault["pointer"] == "/colour"]
    known = [each for each in op.parameters if each not in op.in_path] if op.method != "DELETE" else []
    assert all(each in message for each in known), "the known ones are named"


UNKNOWN = {"job_id": uuid4(), "name": "nobody", "backfill": "nothing", "webhook": "none", "limit": "unknown"}


def test_a_thing_that_is_not_there_is_a_404(client: FlaskClient, refused: Refused, dsn: str) -> None:
    for name, op in OPS.items():
        if not {*op.in_path} & UNKNOWN.keys() or name in ("set_limit", "put_webhook"):
            continue
        given = {each: UNKNOWN[each] for each in op.in_path} | GIVEN.get(name, {})
        given |= {"job_id": UNKNOWN["job_id"]} if "job_id" in given else {}
        problem = refused(over_http(client, op, given), 404, "not-found")
        assert problem["detail"].startswith("there is no ")
        with Direct(dsn, config.load(_env_file=None)) as direct, pytest.raises(of_client.NotFound) as e:
            finished(direct._call(op.route, op.answer, given))
        assert problem["detail"] in str(e.value)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.is_change and "job_ids" not in op.parameters])
@pytest.mark.long
def test_a_button_carries_the_operation_out(client: FlaskClient, farm: db.Connection, name: str) -> None:
    op = OPS[name]
    prepare(op, farm)
    texts = given_to(op, farm).items()
    given = {each: json.dumps(value) if isinstance(value, dict) else str(value) for each, value in texts}
    answer = client.post(f"/do/{name}", data=given, headers=HTMX)
    assert answer.status_code == (200 if "operate" in op.scope else 404), answer.text
    assert (answer.headers.get("HX-Trigger") == "refresh") == ("operate" in op.scope)


def test_the_matrix_knows_each_operation() -> None:
    assert GIVEN.keys() <= OPS.keys()
    assert {part for op in OPS.values() for part in op.in_path} <= NAMED.keys()
    assert all(get_args(op.answer) or adapter(op.answer) for op in OPS.values())
