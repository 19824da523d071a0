"""The HTTP API, one Flask application: `create_app`, and what every answer carries.

Holds the application factory only. The package may import `db`, `queue`, `stats`, `job`, `migrations`,
`config` and `log`; nothing else may import flask.
"""

from __future__ import annotations

from flask import Flask, Response

from dataloader import config
from dataloader.api import infra, problems, v1
from dataloader.api.schemas import BODY_LIMIT, Json
from dataloader.api.sessions import Sessions


def create_app(settings: config.Settings | None = None) -> Flask:
    """The application, by default with the environment's settings.

    It opens no connection before the first request that needs one, so it may be made before a fork and while
    the database is away. Raises config.ConfigError when a setting is wrong or no database is configured.
    """
    settings = settings or config.load()
    app = Flask("dataloader", static_folder=None)
    app.json = Json(app)
    app.config["MAX_CONTENT_LENGTH"] = BODY_LIMIT
    # An empty or odd job_id is to be refused, not redirected to another address.
    app.url_map.merge_slashes = False
    app.url_map.converters["anything"] = v1.Anything
    app.extensions["settings"] = settings
    app.extensions["sessions"] = Sessions(settings)
    app.register_blueprint(infra.blueprint)
    app.register_blueprint(v1.blueprint)
    problems.install(app)
    app.after_request(_with_headers)
    return app


def _with_headers(response: Response) -> Response:
    response.headers["X-Request-ID"] = problems.request_id()
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"
    return response
