"""The HTTP API, one Flask application: the factory `create_app`, and the headers of every answer."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

from flask import Flask, Response, abort, request
from flask.json.provider import DefaultJSONProvider

from dataloader import config, log
from dataloader.api import dispatch
from dataloader.api.dashboard import actions, login, pages, render, trigger
from dataloader.api.server import audit, health, metrics
from dataloader.api.v1 import openapi
from dataloader.api.web import auth, endpoint, problems
from dataloader.api.web.long_poll import LongPolls
from dataloader.api.web.sessions import Sessions
from dataloader.obs import telemetry
from dataloader.ops.checks import BODY_LIMIT
from dataloader.ops.errors import invalid
from dataloader.queue import hooks


def create_app(settings: config.Settings | None = None) -> Flask:
    """The application; without `settings` it reads the environment's and configures this process's logs by them.

    It opens no connection before a request needs one: it may be created before a fork and while the database is away.
    Raises config.ConfigError when a setting is wrong, no database is configured or a module of DL_HOOKS cannot be
    imported.
    """
    if settings is None:
        settings = config.load()
        log.configure(settings, threaded=True)
    hooks.load(settings.dl_hooks)
    auth.announce(settings)
    app = Flask("dataloader", static_folder=None)
    app.json = _Masked(app)
    app.config["MAX_CONTENT_LENGTH"] = BODY_LIMIT
    # The API refuses an empty or malformed job_id; werkzeug would redirect to another address.
    app.url_map.merge_slashes = False
    app.url_map.converters.update(endpoint.CONVERTERS)
    app.extensions["settings"] = settings
    sessions = app.extensions["sessions"] = Sessions(settings)
    polls = app.extensions["long_polls"] = LongPolls(sessions)
    app.extensions["metrics"] = metrics.Metrics(sessions)
    # gunicorn_config calls on_threads in a forked process, slow_clients calls on_drain when the process stops.
    app.extensions["on_threads"] = partial(_share_threads, app)
    app.extensions["on_drain"] = [polls.stop, health.drain]
    for module in (health, openapi, metrics, login, render, pages, actions, trigger):
        app.register_blueprint(module.blueprint)
    app.register_blueprint(dispatch.routes())
    app.register_error_handler(Exception, render.failed)
    audit.install(app)
    auth.install(app)
    app.before_request(_refuse_odd)
    app.after_request(_with_headers)
    return app


def _share_threads(app: Flask, threads: int) -> None:
    """Half of the threads may hold long polls, two stay free, the others may use the database.

    The process also sends the figures of /metrics, where the environment asks for it.
    """
    app.extensions["long_polls"].allow(threads // 2)
    app.extensions["sessions"].allow(threads - threads // 2 - 2)
    if sender := telemetry.start_sender(app.extensions["metrics"].collect):
        app.extensions["on_drain"].append(sender.close)


def _refuse_odd() -> None:
    """Refuse a chunked body, which werkzeug would cut at its limit, and U+0000, which PostgreSQL cannot store.

    An operation itself refuses U+0000 in a query, and names the parameter.
    """
    if "Transfer-Encoding" in request.headers:
        abort(411, "the request should have a Content-Length and no Transfer-Encoding")
    texts = [request.path, *(() if request.path.startswith("/api/") else request.args.values())]
    if request.url_rule and any("\0" in text for text in texts):
        raise invalid("", "unstorable_text", "the address should hold no U+0000")


class _Masked(DefaultJSONProvider):
    """The JSON of every answer, with the secrets masked that pipelines and foreign workers wrote."""

    sort_keys = False

    @staticmethod
    def default(value: Any) -> Any:
        """The JSON of other types: an instant as RFC 3339; UUID, Decimal and more as Flask writes them."""
        if isinstance(value, datetime):
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        return DefaultJSONProvider.default(value)

    def dumps(self, obj: Any, **kwargs: Any) -> str:
        return super().dumps(log.masked(obj), **kwargs)


def _with_headers(response: Response) -> Response:
    response.headers["X-Request-ID"] = problems.request_id()
    response.headers.setdefault("Cache-Control", "no-store")
    response.headers["X-Content-Type-Options"] = "nosniff"
    is_page = response.mimetype == "text/html"
    if is_page:
        response.headers["Content-Security-Policy"] = render.CSP
    # With no-referrer a browser sends the origin null with a form, and auth would refuse it as another site's.
    response.headers["Referrer-Policy"] = "same-origin" if is_page else "no-referrer"
    return response
