"""The HTTP API, one Flask application: `create_app`, and what every answer carries.

Holds the application factory only. The package may import `db`, `queue`, `stats`, `job`, `migrations`,
`config` and `log`; nothing else may import flask.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from uuid import UUID

from flask import Flask, Response, abort, request

from dataloader import config, log
from dataloader.api.dashboard import actions, login, pages, render
from dataloader.api.server import audit, health, metrics
from dataloader.api.v1 import contract, farm, jobs, openapi, queues
from dataloader.api.web import auth, endpoint, problems
from dataloader.api.web.json_body import BODY_LIMIT, Json
from dataloader.api.web.long_poll import LongPolls, Versions
from dataloader.api.web.sessions import Sessions
from dataloader.queue import lifecycle


def create_app(settings: config.Settings | None = None) -> Flask:
    """The application, by default with the environment's settings.

    With those it also sends the logs of this process where they say. It opens no connection before the first
    request that needs one, so it may be made before a fork and while the database is away. Raises
    config.ConfigError when a setting is wrong or no database is configured.
    """
    if settings is None:
        settings = config.load()
        log.configure(settings, threaded=True)
    auth.announce(settings)
    app = Flask("dataloader", static_folder=None)
    app.json = _Masked(app)
    app.config["MAX_CONTENT_LENGTH"] = BODY_LIMIT
    # An empty or odd job_id is to be refused, not redirected to another address.
    app.url_map.merge_slashes = False
    app.url_map.converters.update(endpoint.CONVERTERS)
    app.extensions["settings"] = settings
    sessions = app.extensions["sessions"] = Sessions(settings)
    polls = app.extensions["long_polls"] = LongPolls(_versions(sessions))
    app.extensions["probe"] = health.Probe(sessions)
    app.extensions["metrics"] = metrics.Metrics(sessions)
    # What server.py and patient.py call: the number of threads at the start, and when no more requests will come.
    app.extensions["on_threads"] = [lambda threads: _share(threads, sessions, polls)]
    app.extensions["on_drain"] = [polls.stop, health.drain]
    for module in (health, contract, jobs, queues, farm, openapi, metrics, login, render, pages, actions):
        app.register_blueprint(module.blueprint)
    problems.install(app)
    audit.install(app)
    auth.install(app)
    app.before_request(_refuse_chunks)
    app.after_request(_with_headers)
    return app


def _share(threads: int, sessions: Sessions, polls: LongPolls) -> None:
    """Half of a process's threads may wait for jobs, the others be at the database; two are left for all else."""
    polls.allow(threads // 2)
    sessions.allow(threads - threads // 2 - 2)


def _versions(sessions: Sessions) -> Versions:
    def ask(job_ids: Collection[UUID]) -> dict[UUID, str]:
        with sessions.borrow() as conn:
            return lifecycle.versions(conn, job_ids)

    return ask


def _refuse_chunks() -> None:
    """A chunked body would be cut at MAX_CONTENT_LENGTH without a word; so only a declared length is taken."""
    if "Transfer-Encoding" in request.headers:
        abort(411, "the request should have a Content-Length and no Transfer-Encoding")


class _Masked(Json):
    """The JSON of every answer: what pipelines and foreign workers have written leaves without secrets."""

    def dumps(self, obj: Any, **kwargs: Any) -> str:
        return super().dumps(log.masked(obj), **kwargs)


def _with_headers(response: Response) -> Response:
    response.headers["X-Request-ID"] = problems.request_id()
    response.headers.setdefault("Cache-Control", "no-store")
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.setdefault("Referrer-Policy", "no-referrer")
    return response
