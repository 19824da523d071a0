"""Words and fields: each place that repeats what queue/job.py and queue/fields.py declare says the same."""

import inspect
import re
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import get_type_hints

import pytest

import dataloader
from dataloader.api.server import metrics
from dataloader.cli import jobs
from dataloader.model import jobs as shown
from dataloader.model.kinds import JobStatus
from dataloader.queue.fields import FIELDS, LINKS, OF_PRODUCER, Field
from dataloader.queue.job import KINDS, Status, Verb
from dataloader.queue.reports import waiting


def text(name: str) -> str:
    folder, _, file = f"dataloader.sql.{name}".removesuffix(".sql").rpartition(".")
    return (files(folder) / f"{file}.sql").read_text("utf-8")


def body(name: str) -> str:
    every = "".join(
        path.read_text("utf-8")
        for path in sorted(files("dataloader.sql.functions").iterdir(), key=str)
        if ".sql" in path.name
    )
    return re.findall(rf"FUNCTION {name}\(.*?\n\$\$", every, re.DOTALL)[0]


def columns() -> dict[str, str]:
    schema = text("schema.sql")
    table = re.findall(r"CREATE TABLE dl_jobs \((.*?)\n\);|ALTER TABLE dl_jobs\n(.*?)\nALTER", schema, re.DOTALL)
    return dict(
        re.findall(r"^  (?:ADD COLUMN )?([a-z_]+) (\w+(?:\[\])?)", "\n".join(map("".join, table)), re.MULTILINE)
    )


def page(name: str) -> str:
    return (Path(__file__).parents[2] / "docs" / name).read_text()


PRODUCERS = {field.name for field in OF_PRODUCER}
ADDED = PRODUCERS | {*LINKS}
STATUS, LIST, PAGE = ({field.name for field in FIELDS if place in field.seen} for place in ("status", "list", "page"))
# Words of the documents for which there is no column.
BESIDES = {"run_sec", "changed_at", "waiting_for", "schedule", "checkpoint"}
# The words or fields that a place has, and those that it should have.
PLACES: dict[str, tuple[Callable[[], Iterable[object]], Iterable[object]]] = {
    "metrics.STEPS": (
        lambda: metrics.STEPS,
        {*re.findall(r"(?:THEN|ELSE) '(\w+)'", body("dl_step_of")), *KINDS.values(), "queued", "cancel_requested"},
    ),
    "the verbs of dl_finish": (
        lambda: re.findall(r"'(succeed|retry|fail|cancel|hand_back|restart)'", body("dl_finish")),
        Verb,
    ),
    "the reasons of the statement status": (
        lambda: re.findall(r"'reason', '(\w+)'", text("queue.sql").split("-- name: status\n")[1].split("-- name:")[0]),
        re.findall(r'case "(\w+)"', inspect.getsource(waiting)),
    ),
    "JobStatus": (lambda: JobStatus.__args__, Status),
    "queue/new_job.py, dataloader.enqueue": (
        lambda: set(inspect.signature(dataloader.enqueue).parameters) - {"conn", "schema"},
        ADDED,
    ),
    "model/jobs.py, Status": (lambda: set(get_type_hints(shown.Status)) - BESIDES, STATUS),
    "model/jobs.py, Job": (
        lambda: set(get_type_hints(shown.Job)) - set(get_type_hints(shown.Status)) - BESIDES,
        PAGE - STATUS,
    ),
    "model/jobs.py, ListedJob": (lambda: set(get_type_hints(shown.ListedJob)) - BESIDES, LIST),
    "dataloader trigger --help": (
        lambda: ADDED & {option.name.replace("args_json", "args") for option in jobs.trigger.params if option.name},
        ADDED,
    ),
    "docs/producers.md, dl_enqueue": (
        lambda: re.findall(r"`(\w+)`", re.findall(r"The parameters are\n(.*?);", page("producers.md"), re.DOTALL)[0]),
        PRODUCERS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_place_has_what_is_declared(place: str) -> None:
    has, wanted = PLACES[place]
    found, declared = set(map(str, has())), set(map(str, wanted))
    assert found == declared, f"{place}: lacks {sorted(declared - found)}, has too much {sorted(found - declared)}"


def test_each_field_is_a_column_of_the_declared_type() -> None:
    assert columns() == {field.name: field.type for field in FIELDS}


@pytest.mark.parametrize(
    "field", [field for field in OF_PRODUCER if isinstance(field.default, int)], ids=lambda f: f.name
)
def test_a_column_has_the_declared_default(field: Field) -> None:
    assert f"  {field.name} int NOT NULL DEFAULT {field.default}," in text("schema.sql")
