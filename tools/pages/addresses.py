"""PURE: the addresses at which every GET route of the application is asked, found by its URL map.

A route that joins the application joins here by itself where its parameters are known: those of VALUES. A route with
another parameter, or one whose query must hold something, needs a line below; the run fails and says so.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import urlencode
from uuid import UUID

from flask import Flask
from werkzeug.routing import Rule

from .history import FAIR, HOSTILE, HOSTILE_QUEUE, HOSTILE_TASK, HOT_KEY, LIMIT, ORDERED, PLAIN, PRINTABLE, TYPED_TASK

# By the name of a route's parameter, or by the route and the name: what is asked for, one after the other.
VALUES: dict[str, tuple[str, ...]] = {
    "queue": (PLAIN, ORDERED, FAIR, HOSTILE_QUEUE, "backfill.done"),
    "task": (TYPED_TASK, HOSTILE_TASK, "nobody"),
    "/api/v1/tasks/<anything:task>/schema task": (TYPED_TASK, HOSTILE_TASK),  # that workers have shown
    "limit": (LIMIT, PRINTABLE[:100]),
    "backfill": ("half", "done", "hostile"),
    "webhook": ("ops-1",),
    "/backfills/<name> name": ("half", "done", "paused", "hostile"),
    "/api/v1/queues/<anything:queue>/keys queue": (ORDERED,),
    "/api/v1/jobs/<anything:job_id>/result job_id": ("done",),  # a kind of History.job_ids
    "/jobs/<uuid:job_id>/again job_id": ("done",),  # one that has ended
    "/api/v1/schedules/<anything:name> name": ("nightly-00",),
    "/static/<path:name> name": ("app.css", "app.js"),
    "/docs/assets/<path:filename> filename": ("start.js",),
}
# The queries that a route is asked with, beside none.
QUERIES: dict[str, tuple[dict[str, str], ...]] = {
    "/jobs": (
        *({"status": each} for each in ("queued", "running", "succeeded", "canceled", "retries", "scheduled", "fresh")),
        {"queue": PLAIN, "status": "dead"},
        {"queue": PLAIN, "sort": "key"},
        {"status": "dead", "sort": "key"},
        {"queue": HOSTILE_QUEUE},
        {"task": "load.table_07"},
        {"lock_key": HOT_KEY},
        {"producer": "airflow"},
        {"task": "nobody"},
    ),
    "/errors": ({"queue": PLAIN}, {"task": "load.table_07"}, {"since": "2000-01-01T00:00"}),
    "/keys": ({"queue": ORDERED},),
    "/key": ({"queue": ORDERED, "lock_key": HOT_KEY}, {"queue": ORDERED, "lock_key": HOSTILE[:512]}),
    "/backfills/<name>": ({"after": "2000"},),
    "/trigger": ({"task": "nobody"}, {"task": TYPED_TASK}, {"task": HOSTILE_TASK}),
    "/search/suggestions": ({"q": "load"}, {"q": PRINTABLE[:20]}),
}
QUERIES |= {"/api/v1/jobs": QUERIES["/jobs"]}
QUERIES |= {"/api/v1/errors": ({"queue": PLAIN}, {"since": "2000-01-01T00:00:00Z"})}
QUERIES |= {"/api/v1/events": ({"queue": PLAIN},)}
QUERIES |= {"/api/v1/suggestions": QUERIES["/search/suggestions"]}
QUERIES |= {"/api/v1/backfills/<backfill>/partitions": ({"status": "missing"}, {"status": "failed", "limit": "1000"})}
_JOB_ID = re.compile("[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
ALWAYS = {"/keys", "/key", "/api/v1/suggestions"}  # that answer without a query with 400
PAGES = ("dashboard.", "trigger.")  # the blueprints of pages


class Unknown(Exception):
    """A route that cannot be asked: nobody has said what for."""


class Address(NamedTuple):
    """A path with its query, of a route; `is_page`: it answers with a page, to htmx with the part that it refreshes."""

    route: str
    path: str
    is_page: bool
    name: str  # the path for people: with the kind of a job in the place of its id


def addresses(app: Flask, job_ids: Mapping[str, UUID]) -> list[Address]:
    """The addresses of all GET routes; raises Unknown, which names every route that has no values."""
    found: list[Address] = []
    unknown = []
    for rule in sorted(app.url_map.iter_rules(), key=lambda rule: rule.rule):
        if "GET" in (rule.methods or ()):
            try:
                found += _of(rule, job_ids)
            except Unknown as error:
                unknown.append(str(error))
    if unknown:
        raise Unknown("; ".join(unknown))
    kinds = {str(job_id): f"({kind})" for kind, job_id in job_ids.items()}
    return [each._replace(name=_JOB_ID.sub(lambda id_: kinds[id_[0]], each.path)) for each in found]


def _of(rule: Rule, job_ids: Mapping[str, UUID]) -> Iterator[Address]:
    """Each value without a query, then the first value with each query."""
    is_page = rule.endpoint.startswith(PAGES) and not rule.rule.endswith(".txt")
    paths = [_path(rule, dict(chosen)) for chosen in itertools.product(*_choices(rule, job_ids))]
    for path in [] if rule.rule in ALWAYS else paths:
        yield Address(rule.rule, path, is_page, path)
    for query in QUERIES.get(rule.rule, ()):
        path = f"{paths[0]}?{urlencode(query)}"
        yield Address(rule.rule, path, is_page, path)


def _choices(rule: Rule, job_ids: Mapping[str, UUID]) -> Iterator[list[tuple[str, str]]]:
    for name in sorted(rule.arguments):
        named = VALUES.get(f"{rule.rule} {name}", VALUES.get(name, ()))
        if name == "job_id":
            named = tuple(str(job_ids[kind]) for kind in named or job_ids)
        if not named:
            raise Unknown(f"{rule.rule}: say in VALUES what to ask for as {name}")
        yield [(name, value) for value in named]


def _path(rule: Rule, values: dict[str, str]) -> str:
    built = rule.build(values, append_unknown=False)
    assert built is not None, rule.rule
    return built[1]
