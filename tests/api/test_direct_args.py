"""Args by a schema, and jobs that are run again, from the command line on the queue's database."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from dataloader import config
from dataloader.cli.direct import Direct
from dataloader.cli.main import main
from dataloader.client import Refused
from dataloader.queue import db, operations

SCHEMA = json.dumps({"type": "object", "properties": {"day": {"type": "string"}}, "required": ["day"]})


@pytest.fixture
def farm(dsn: str, conn: db.Connection) -> Iterator[Direct]:
    operations.publish_tasks(conn, {"load": {"args_schema": SCHEMA}, "free": {}, "odd": {"args_schema": "{"}})
    with Direct(dsn, config.load(_env_file=None)) as farm:
        yield farm


def args_of(conn: db.Connection, job_id: Any) -> Any:
    ((args,),) = conn.execute("SELECT args FROM dl_jobs WHERE job_id = %s", (job_id,))
    return args


def end(conn: db.Connection) -> None:
    conn.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now()")


def test_wrong_args_are_refused_and_a_known_key_is_answered(farm: Direct, conn: db.Connection) -> None:
    """As over HTTP (test_api_args.py), but for the schemas, which are asked for each time."""
    first = farm.trigger("load", args={"day": "x"}, idempotency_key="a")
    assert farm.trigger("load", idempotency_key="a").job_id == first.job_id
    with pytest.raises(Refused) as refused:
        farm.trigger("load", args={"day": 5})
    assert [(fault.pointer, fault.message) for fault in refused.value.faults] == [("/args/day", "day should be a text")]
    assert farm.trigger("odd").status == "queued"
    assert len(conn.execute("SELECT FROM dl_jobs").fetchall()) == 2


def test_the_command_takes_pairs(farm: Direct, conn: db.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DL_DB_DSN", dsn)
    old = farm.trigger("free", args={"a": 1, "b": "x", "c": None})
    end(conn)
    pairs = ["--arg", "a=2", "--arg", "b=2026-01-31", "--arg", 'd={"e": [1]}', "--arg", "f=NaN", "--without", "c"]
    done = CliRunner().invoke(main, ["again", str(old.job_id), "--dsn", dsn, *pairs])
    assert done.exit_code == 0, done.output
    new_id = json.loads(done.stdout)["job_id"]
    assert args_of(conn, new_id) == {"a": 2, "b": "2026-01-31", "d": {"e": [1]}, "f": "NaN"}
    assert CliRunner().invoke(main, ["again", str(old.job_id), "--arg", "a"]).exit_code == 2


def test_an_answer_of_a_declared_operation_is_masked_as_over_http(farm: Direct, conn: db.Connection) -> None:
    """A limit's name is free text, so it may hold a connection string."""
    secret = "postgresql://u:canary-canary@host/d"
    conn.execute("INSERT INTO dl_limits (name, most, changed_by) VALUES (%s, 1, 'me')", (secret,))
    (limit,) = farm.limits()
    assert "canary" not in limit.name
    assert limit.most == 1
