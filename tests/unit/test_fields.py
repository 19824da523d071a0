"""A job's fields: each place that lists them has those that queue/fields.py declares. A failure names the place."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING
from dataclasses import fields as of_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import dataloader
from dataloader.cli import jobs
from dataloader.model.jobs import Job, ListedJob, Status
from dataloader.queue import db
from dataloader.queue.enqueue import NewJob
from dataloader.queue.fields import FIELDS, LINKS, OF_PRODUCER, REQUIRED
from dataloader.queue.migrations import functions

ROOT = Path(__file__).parents[2]
PRODUCERS = {field.name for field in OF_PRODUCER}
TRIGGERED = PRODUCERS | {field.name for field in FIELDS if field.by == "api"}
INSERTED = TRIGGERED | {"job_id", "created_at", "turn_at", "blocked_on", "journaled"}
STATUS, LIST, PAGE = ({field.name for field in FIELDS if place in field.seen} for place in ("status", "list", "page"))
# What documents tell besides, which is in no column.
BESIDES = {"run_sec", "changed_at", "waiting_for", "schedule", "checkpoint"}
OF_SQL = "sql/functions/enqueue.sql"
QUEUE, STATS, OPENAPI = db.statements("queue.sql"), db.statements("stats.sql"), ROOT / "docs/openapi.json"


def text(name: str) -> str:
    return (files("dataloader.sql") / name).read_text("utf-8")


def function(name: str) -> str:
    return re.findall(rf"FUNCTION {name}\(.*?\n\$\$", functions().text, re.DOTALL)[0]


def inserted(statement: str) -> list[set[str]]:
    """The columns of each INSERT INTO dl_jobs."""
    return [
        set(re.findall(r"\w+", columns)) for columns in re.findall(r"INTO (?:%1\$I\.)?dl_jobs \(([^)]*)\)", statement)
    ]


def selected(columns: str) -> set[str]:
    """The names of a select list."""
    while re.search(r"\([^()]*\)", columns.replace("(j).", "j.")):
        columns = re.sub(r"\([^()]*\)", "", columns.replace("(j).", "j."))
    return {re.split(r" AS |\.", column.split("::")[0] if " AS " not in column else column)[-1].strip()
            for column in columns.split(",")}  # fmt: skip


def columns() -> dict[str, str]:
    """The columns of schema.sql and their types."""
    schema = text("schema.sql")
    table = re.findall(r"CREATE TABLE dl_jobs \((.*?)\n\);|ALTER TABLE dl_jobs\n(.*?)\nALTER", schema, re.DOTALL)
    return dict(
        re.findall(r"^  (?:ADD COLUMN )?([a-z_]+) (\w+(?:\[\])?)", "\n".join(map("".join, table)), re.MULTILINE)
    )


def of_openapi() -> set[str]:
    return set(json.loads(OPENAPI.read_text())["components"]["schemas"]["Trigger"]["properties"])


def parameters(of: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(of).parameters)


# The fields that a place has, and those that it should have.
PLACES: dict[str, tuple[Callable[[], Iterable[str]], set[str]]] = {
    "sql/schema.sql": (columns, {field.name for field in FIELDS}),
    "sql/queue.sql, status": (
        lambda: selected(QUEUE["status"].split("CASE WHEN why")[0].removeprefix("SELECT ").rstrip(" ,\n")) - BESIDES,
        STATUS,
    ),
    "sql/stats.sql, shown": (lambda: selected(STATS["shown"]), LIST),
    "sql/stats.sql, job": (lambda: selected(STATS["job"].split("FROM")[0].removeprefix("SELECT ")), PAGE),
    f"{OF_SQL}, dl_enqueue, parameters": (
        lambda: re.findall(r"(\w+) \w+(?:\[\])?(?: DEFAULT NULL)?[,)]", function("dl_enqueue").split("RETURNS")[0]),
        PRODUCERS,
    ),
    f"{OF_SQL}, dl_enqueue, columns": (
        lambda: inserted(function("dl_enqueue"))[0],
        INSERTED - {"turn_at", "blocked_on", "journaled", "trace"},
    ),
    f"{OF_SQL}, dl_enqueue_one, parameters": (
        lambda: (
            set(re.findall(r"p_(\w+) \w+(?:\[\])?[,)]", function("dl_enqueue_one").split("RETURNS")[0])) - {"job_id"}
        ),
        PRODUCERS,
    ),
    f"{OF_SQL}, dl_enqueue_one, columns": (lambda: inserted(function("dl_enqueue_one"))[0], INSERTED - {"trace"}),
    f"{OF_SQL}, dl_enqueue_many, parameters": (
        lambda: set(re.findall(r"p_(\w+) \w+\[\]", function("dl_enqueue_many"))) - {"job_id", "place"},
        PRODUCERS,
    ),
    f"{OF_SQL}, dl_enqueue_many, columns": (lambda: inserted(function("dl_enqueue_many"))[0], INSERTED - {"trace"}),
    f"{OF_SQL}, dl_enqueue_many, unnest": (lambda: unnested(0), PRODUCERS),
    "queue/enqueue.py, NewJob": (lambda: [field.name for field in of_dataclass(NewJob)], TRIGGERED | {*LINKS}),
    "queue/new_job.py, dataloader.enqueue": (
        lambda: parameters(dataloader.enqueue) - {"conn", "schema"},
        PRODUCERS | {*LINKS},
    ),
    "model/jobs.py, Status": (lambda: set(get_type_hints(Status)) - BESIDES, STATUS),
    "model/jobs.py, Job": (
        lambda: set(get_type_hints(Job)) - set(get_type_hints(Status)) - BESIDES,
        PAGE - STATUS,
    ),
    "model/jobs.py, ListedJob": (lambda: set(get_type_hints(ListedJob)) - BESIDES, LIST),
    "dataloader trigger --help": (
        lambda: (
            {option.name.replace("args_json", "args") for option in jobs.trigger.params if option.name}
            & (PRODUCERS | {*LINKS})
        ),
        PRODUCERS | {*LINKS},
    ),
    "docs/openapi.json": (of_openapi, PRODUCERS | {*LINKS}),
    "docs/producers.md, dl_enqueue": (
        lambda: re.findall(r"`(\w+)`", re.findall(r"The parameters are\n(.*?);", producers_page(), re.DOTALL)[0]),
        PRODUCERS,
    ),
}  # fmt: skip


def producers_page() -> str:
    return (ROOT / "docs/producers.md").read_text()


def unnested(number: int) -> set[str]:
    """The arrays that the SELECT of this number of dl_enqueue_many takes apart."""
    selects = re.findall(r"FROM \(SELECT (unnest.*?)\) n", function("dl_enqueue_many"), re.DOTALL)
    return set(re.findall(r" AS (\w+)", selects[number])) - {"job_id", "place", "nth"}


@pytest.mark.parametrize("place", PLACES)
def test_a_place_lists_the_declared_fields(place: str) -> None:
    has, wanted = PLACES[place]
    found = set(has())
    assert found == wanted, f"{place}: lacks {sorted(wanted - found)}, has too much {sorted(found - wanted)}"


def test_a_column_has_the_declared_type() -> None:
    assert columns() == {field.name: field.type for field in FIELDS}


def test_a_job_has_the_declared_defaults() -> None:
    given = {field.name: field for field in of_dataclass(NewJob)}
    for field in OF_PRODUCER:
        found = given[field.name]
        default = found.default_factory() if found.default_factory is not MISSING else found.default
        assert (REQUIRED if default is MISSING else default) == field.default, field.name
