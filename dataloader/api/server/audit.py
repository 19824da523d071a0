"""The API's log lines about requests: the caller, the address, the result; and gunicorn's own lines.

Each request has two audit lines, begin and end, and one metric line. No line holds a body, a query or a header, except
the address that a proxy names.
"""

from __future__ import annotations

import os
from collections import Counter
from threading import Lock
from time import monotonic
from typing import Any

import structlog
from flask import Flask, Response, g, request
from gunicorn.glogging import Logger  # type: ignore[import-untyped]
from prometheus_client import Histogram

from dataloader import config, log
from dataloader.api.web import auth, problems

FILES = "files.static"
DURATIONS = Histogram(
    "dl_http_request_duration_seconds",
    "Time to answer a request",
    ("pid", "method", "route"),
    registry=None,
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 30.0),
)
_counting = Lock()
_requests: Counter[tuple[str, str]] = Counter()  # by method and route, in this process
_responses: Counter[tuple[str, str, int]] = Counter()  # by status as well


def responses() -> dict[tuple[str, str, int], int]:
    """How many answers this process has given, by method, route and status."""
    with _counting:
        return dict(_responses)


def install(app: Flask) -> None:
    """Log every request of `app`; log lines during a request carry its request_id."""
    app.before_request(_begin)
    app.after_request(_end)
    app.teardown_request(_unbind)


def _begin() -> None:
    g.began = monotonic()
    g.log_context = structlog.contextvars.bind_contextvars(request_id=problems.request_id())
    with _counting:
        _requests[_route()] += 1
    if not _is_routine():
        log.audit("request.begin", **_caller())


def _end(response: Response) -> Response:
    seconds, status = monotonic() - g.began, response.status_code
    method, route = _route()
    with _counting:
        _responses[method, route, status] += 1
        totals = {"requests_total": _requests[method, route], "responses_total": _responses[method, route, status]}
    DURATIONS.labels(str(os.getpid()), method, route).observe(seconds)
    if not (_is_routine() and (status == 304 or request.endpoint == FILES)):
        end = {"status": status, "duration_ms": round(seconds * 1_000, 2)}
        log.audit("request.end", **_caller() | g.get("changed", {}), **end)  # a view sets what it has changed
        log.metric("http.request", method=method, route=route, **end, **totals)
    return response


def _is_routine() -> bool:
    """True for the refresh of an open page, every two seconds, and for static files: they would fill the logs."""
    if request.method != "GET":
        return False
    refreshes = (request.endpoint or "").startswith("dashboard.") and "HX-Request" in request.headers
    return refreshes or request.endpoint == FILES


def _unbind(_error: BaseException | None) -> None:
    if tokens := g.pop("log_context", None):
        structlog.contextvars.reset_contextvars(**tokens)


def _caller() -> dict[str, Any]:
    """The caller, its address and the request; auth sets `g.token_name`."""
    caller = {"who": g.get("token_name", auth.ANYBODY), "remote": request.remote_addr}
    if forwarded := request.headers.get("X-Forwarded-For"):
        caller["forwarded_for"] = forwarded  # not verified
    return caller | {"method": request.method, "path": request.path}


def _route() -> tuple[str, str]:
    """The method and the pattern of the route; all unknown paths are one pair, so the number of pairs is bounded."""
    rule = request.url_rule
    return (request.method if rule else "any"), (rule.rule if rule else "unmatched")


class GunicornLogger(Logger):  # type: ignore[misc]  # gunicorn has no types
    """gunicorn's messages as log lines, in the arbiter and, before the application exists, in its workers."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        for logger in (self.error_log, self.access_log):
            logger.handlers.clear()
            logger.propagate = True
        log.configure(config.load())
