"""The words for states, ends, steps and reasons: each place that repeats them says the same as queue/job.py."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from importlib.resources import files

import pytest

from dataloader.api.dashboard import pages
from dataloader.api.server import metrics
from dataloader.cli import watch
from dataloader.model.kinds import JobStatus
from dataloader.queue.job import (
    DEAD,
    FINAL,
    GROUPS,
    KINDS,
    SETTLED,
    STATUSES,
    Status,
    Verb,
)
from dataloader.queue.reports import stats, waiting

FINAL_KINDS = {KINDS[status] for status in FINAL}
RUN_ENDS = FINAL_KINDS | {KINDS[Status.QUEUED]}


def text(name: str) -> str:
    """A file of sql/."""
    folder, _, file = f"dataloader.sql.{name}".removesuffix(".sql").rpartition(".")
    return (files(folder) / f"{file}.sql").read_text("utf-8")


def body(name: str, number: int = 0) -> str:
    """A function's text; the number counts its overloads."""
    every = "".join(
        path.read_text("utf-8")
        for path in sorted(files("dataloader.sql.functions").iterdir(), key=str)
        if ".sql" in path.name
    )
    return re.findall(rf"FUNCTION {name}\(.*?\n\$\$", every, re.DOTALL)[number]


def literals(within: str, pattern: str) -> list[str]:
    """The SQL literals in what the pattern's group finds."""
    return [word for part in re.findall(pattern, within, re.DOTALL) for word in re.findall(r"'(\w+)'", part)]


def status_statement() -> str:
    return text("queue.sql").split("-- name: status\n")[1].split("-- name:")[0]


def matches() -> str:
    return text("stats.sql").split("-- name: matches\n")[1].split("-- name:")[0]


# The words that a place has, and those that it should have.
PLACES: dict[str, tuple[Callable[[], Iterable[object]], Iterable[object]]] = {
    "dl_status in schema.sql": (lambda: literals(text("schema.sql"), r"AS ENUM \((.*?)\)"), Status),
    "dl_prune": (lambda: literals(body("dl_prune"), r"status::text IN \((.*?)\)"), FINAL),
    "requeue in operate.sql": (lambda: literals(text("operate.sql"), r"status IN (\('succeeded'.*?\))"), FINAL),
    "the groups of matches in stats.sql": (lambda: literals(matches(), r"(WHEN '\w+') THEN"), GROUPS),
    "the dead of stats.sql": (lambda: literals(text("stats.sql"), r"status IN \((.*?)\)"), DEAD),
    "the dead of operate.sql": (lambda: literals(text("operate.sql"), r"status IN (\('failed'.*?\))"), DEAD),
    "dl_last_run_sec": (lambda: literals(body("dl_last_run_sec"), r"kind IN \((.*?)\)"), RUN_ENDS),
    "stats.attempts": (lambda: stats._ENDS, RUN_ENDS),
    "dl_jobs_journal": (
        lambda: re.findall(r"(?:THEN|ELSE) '(picked|done|requeue)'", body("dl_jobs_journal")),
        {KINDS[Status.RUNNING], KINDS[Status.SUCCEEDED], KINDS[Status.QUEUED]},
    ),
    "metrics.STEPS": (
        lambda: metrics.STEPS,
        {*re.findall(r"(?:THEN|ELSE) '(\w+)'", body("dl_step_of")), *KINDS.values(), "queued", "cancel_requested"},
    ),
    "the verbs of dl_finish": (
        lambda: re.findall(r"'(succeed|retry|fail|cancel|hand_back|restart)'", body("dl_finish")),
        Verb,
    ),
    "the ends of dl_give_back": (lambda: re.findall(r"^--   '(\w+)'", comment(), re.MULTILINE), SETTLED.values()),
    "the reasons of the statement status": (
        lambda: re.findall(r"'reason', '(\w+)'", status_statement()),
        re.findall(r'case "(\w+)"', inspect.getsource(waiting.words)),
    ),
    "cli.watch.EXITS": (lambda: watch.EXITS, FINAL),
    "dashboard.pages.STATUSES": (lambda: dict(pages.STATUSES), STATUSES),
    "JobStatus": (lambda: JobStatus.__args__, Status),
}  # fmt: skip


def comment() -> str:
    """That of dl_give_back."""
    before = text("functions.recover.sql").split("CREATE OR REPLACE FUNCTION dl_give_back")[0]
    return before.rsplit("\n\n", 1)[1]


@pytest.mark.parametrize("place", PLACES)
def test_a_place_has_the_words_of_job(place: str) -> None:
    has, wanted = PLACES[place]
    found = set(map(str, has()))
    assert found == set(map(str, wanted)), f"{place}: lacks or has too much: {found ^ set(map(str, wanted))}"


def test_the_bounds_of_the_histogram_are_those_of_stats() -> None:
    bounds = [float(bound) for bound in re.findall(r"FILTER \(WHERE .*?seconds <= ([\d.]+)\)", body("dl_roll"))]
    assert tuple(bounds) == stats.BUCKETS_SEC
