"""The rendering of all pages: layout, errors, content security policy, the templates' filters and variables.

Pages leave by `show` and `done` alone, which mask secrets. Times are in the zone that the reader has chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from flask import Blueprint, Response, current_app, g, render_template, request, url_for
from flask.blueprints import BlueprintSetupState
from werkzeug.exceptions import HTTPException, NotFound

from dataloader import log
from dataloader.api.dashboard import formats
from dataloader.api.server.health import VERSION
from dataloader.api.web import auth, problems
from dataloader.config import is_zone
from dataloader.model.kinds import fraction
from dataloader.queue.reports import words

CSP = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; object-src 'none'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
_STATIC = Path(__file__).parent / "static"
# All files are in memory: no request opens a file, and no name leads out of the folder.
_FILES = {str(path.relative_to(_STATIC)): path.read_bytes() for path in _STATIC.rglob("*") if path.is_file()}
_KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Functions that the templates know by their names.
FILTERS: list[Callable[..., Any]] = [words.count, words.duration, words.figure, words.percent]
FILTERS += [formats.bars, formats.brief, formats.first_line, formats.number, formats.pretty, formats.short]
FILTERS += [formats.size, formats.steps]
PAGES = ("dashboard", "actions", "trigger")  # the blueprints whose errors are pages
ZONE_COOKIE = "dl_zone"  # a zone's name, stored by the page's script; no cookie: the installation's zone
_LONGEST_ZONE = 64  # characters of a name
blueprint = Blueprint("files", __name__, template_folder="templates")


@blueprint.get("/static/<path:name>")
@auth.require()
def static(name: str) -> Response:
    """A file of the pages. With its hash in the address browsers may cache it for ever."""
    if name not in _FILES:
        raise NotFound
    response = Response(_FILES[name], mimetype=_KINDS.get(Path(name).suffix, "text/plain"))
    if request.args.get("v") == _digest(name):
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
    return response


def show(template: str, status: int = 200, **data: Any) -> Response:
    """A page, or for htmx its changing part. Secrets in the texts of jobs and workers are masked here."""
    is_part = "HX-Request" in request.headers
    layout = "part.html" if is_part else "page.html"
    body = render_template(template, layout=layout, now=datetime.now(UTC), **log.masked(data))
    response = Response(body, status, mimetype="text/html")
    response.headers["Vary"] = "HX-Request"
    if is_part and status == 200:
        response.set_etag(sha256(body.encode()).hexdigest()[:32])
        response.make_conditional(request)
    return response


def done(text: str, is_gone: bool = False, more: str = "") -> Response:
    """The message after a button was pressed; the page then refreshes. `more` is the address of what is left to do."""
    body = render_template("done.html", text=log.masked(text), is_gone=is_gone, more=more)
    response = Response(body, mimetype="text/html")
    response.headers["HX-Trigger"] = "refresh"
    return response


def failed(error: Exception) -> Response | HTTPException:
    """An error as a page, for htmx as a text, and for programs as a problem document.

    The form of a job's args takes the document as well: it shows each fault at its field.
    """
    if isinstance(error, HTTPException) and (error.code or 500) < 400:
        return error
    answer = problems.answer_to(error)
    problem = answer.get_json()
    is_by_htmx, is_in_form = "HX-Request" in request.headers, request.blueprint == "trigger" and problem["errors"]
    if (is_by_htmx and is_in_form) or not (request.blueprint in PAGES or auth.wants_a_page()):
        return answer
    if is_by_htmx:
        response = Response(problem["detail"], answer.status_code, mimetype="text/plain")
    else:
        response = show("problem.html", answer.status_code, problem=problem)
    if "Retry-After" in answer.headers:
        response.headers["Retry-After"] = answer.headers["Retry-After"]
    return response


@blueprint.app_context_processor
def _page_context() -> dict[str, Any]:
    settings = auth.settings()
    zone, own_zone = chosen_zone().key, current_app.extensions["zone"].key
    return {
        "asset": lambda name: url_for("files.static", name=name, v=_digest(name)),  # changes with the content
        "queue_url": partial(named_url, "queue"),
        "action_url": action_url,
        "task_url": partial(named_url, "task"),
        "environment": settings.environment,
        "version": VERSION,
        "zone": zone,
        "server_zone": own_zone,
        "zone_choice": "server" if zone == own_zone else "utc" if zone == "UTC" else "browser",
        "here": auth.here(),
        "who": g.get("token_name"),
        "may_operate": auth.may("operate"),
        "has_tokens": bool(settings.dl_api_tokens),
    }


@blueprint.record_once
def _set_up_templates(state: BlueprintSetupState) -> None:
    environment = state.app.jinja_env
    environment.trim_blocks = environment.lstrip_blocks = True
    state.app.extensions["zone"] = ZoneInfo(state.app.extensions["settings"].people_zone)
    now = partial(datetime.now, UTC)
    environment.filters |= {
        "moment": formats.clock(chosen_zone, now),
        "ago": formats.clock(chosen_zone, now, is_relative=True),
        "share": fraction,
        **{function.__name__: function for function in FILTERS},
    }
    environment.tests["instant"] = lambda value: isinstance(value, datetime)


def chosen_zone() -> ZoneInfo:
    """The zone of this request's times. A cookie that names no zone counts as none."""
    if "zone" not in g:
        name = request.cookies.get(ZONE_COOKIE, "")
        g.zone = ZoneInfo(name) if len(name) <= _LONGEST_ZONE and is_zone(name) else current_app.extensions["zone"]
    zone: ZoneInfo = g.zone
    return zone


def action_url(operation: str, /, **parameters: object) -> str:
    """The address of a button that carries out an operation with these parameters."""
    return url_for("actions.carry_out", name=operation) + (f"?{urlencode(parameters)}" if parameters else "")


def named_url(noun: str, name: str, **parameters: str | None) -> str:
    """The address of the page of a queue or a task, with these parameters as far as they are given.

    A browser removes `.` and `..` from a path, also percent-encoded: these two names stand in the query.
    """
    is_dots = name in (".", "..")
    path: dict[str, Any] = {noun: "-" if is_dots else name}
    query = urlencode(({"name": name} if is_dots else {}) | {each: text for each, text in parameters.items() if text})
    return url_for(f"dashboard.{noun}", **path) + (f"?{query}" if query else "")


def named_queue(in_path: str) -> str:
    """The queue or task of an address made by `named_url`."""
    name = request.args.get("name")
    return name if name in (".", "..") else in_path


@cache
def _digest(name: str) -> str:
    return sha256(_FILES[name]).hexdigest()[:12]
