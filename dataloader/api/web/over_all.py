"""Views over several clusters: the choice of a request's cluster, before its view runs, and one answer of all.

Installed where DL_CLUSTERS is set. A view of one queue runs in the cluster where the queue lives; a view of one job, or
of another thing with a name, where that is found; a view that says how its answers are merged, in all of them; any
other in this host's cluster, or in the one that `?cluster=` names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any
from uuid import UUID

from flask import Flask, Response, g, request

from dataloader.api.web import clusters
from dataloader.api.web.clusters import Away
from dataloader.api.web.endpoint import Operation, job_id, paged, queue_name
from dataloader.api.web.problems import Problem

NAMED = {"name": "schedule", "backfill": "backfill", "webhook": "webhook", "limit": "limit", "task": "task"}
PAGES = ("dashboard", "actions", "bulk_orders", "trigger")  # blueprints
COOKIE = "dl-cluster"  # the choice of a browser, for pages alone
View = Callable[..., Any]


def install(app: Flask) -> None:
    """Let every view that is registered by now choose its cluster."""
    for endpoint, view in app.view_functions.items():
        declared: Operation | None = getattr(view, "operation", None)
        is_page = declared is None and endpoint.partition(".")[0] in PAGES
        if is_page or (declared and declared.uses_database):
            app.view_functions[endpoint] = _choosing(view, declared)
    app.after_request(_remember)


def _choosing(view: View, declared: Operation | None) -> View:
    @wraps(view)
    def called(**path: Any) -> Any:
        asked = clusters.asked()
        if declared and declared.merged and declared.merges(request.args):
            return _merged(view, declared, [asked] if asked else clusters.of_app().names)
        if asked:
            return _in(asked, view, path)
        if "queue" in path:
            name = request.args.get("name") or path["queue"]
            return _in(clusters.of_app().home(queue_name(name)), view, path)
        if order := _order(path):
            return _tried(view, path, order)
        return _in(_by_cookie() if declared is None else clusters.of_app().own, view, path)

    return called


def _in(name: str, view: View, path: dict[str, Any]) -> Any:
    g.cluster = name
    return view(**path)


def _order(path: dict[str, Any]) -> list[str]:
    """The clusters in which to look for the thing that the path names, the likeliest first; none: it names nothing."""
    every = clusters.of_app()
    if "job_id" in path:
        given = path["job_id"]
        return every.of_job(given if isinstance(given, UUID) else job_id(given))
    if path.keys() & NAMED.keys():
        return [every.own, *(name for name in every.names if name != every.own)]
    return []


def _tried(view: View, path: dict[str, Any], order: Sequence[str]) -> Any:
    """The answer of the first cluster that has the thing. A view that answers 404 has changed nothing."""
    away: list[str] = []
    missing: Problem | None = None
    for name in order:
        try:
            return _in(name, view, path)
        except Away as problem:
            away += problem.names
        except Problem as problem:
            if problem.status != 404:
                raise
            missing = missing or problem
    if away or missing is None:
        what = "job" if "job_id" in path else next((NAMED[part] for part in path if part in NAMED), "thing")
        raise Away(away, f"The {what} may be there.")
    raise missing


def _merged(view: View, declared: Operation, names: Sequence[str]) -> Response | dict[str, Any]:
    """One answer of these clusters; those that are away are in its field `away`. Raises Away where all of them are."""
    parts: list[tuple[str, dict[str, Any]]] = []
    away: list[str] = []
    g.is_part = True
    for name in names:
        try:
            parts.append((name, _in(name, view, {})))
        except Away as problem:
            away += problem.names
    if not parts:
        raise Away(away)
    assert declared.merged  # noqa: S101  the caller has looked
    answer = declared.merged(parts, request.args) | ({"away": away} if away else {})
    return paged(answer, answer["next"]) if declared.is_paged else answer


def _by_cookie() -> str:
    given, every = request.cookies.get(COOKIE), clusters.of_app()
    return given if given in every.names else every.own


def _remember(response: Response) -> Response:
    """A page whose address names a cluster chooses it for the pages that follow."""
    if response.mimetype == "text/html" and request.args.get("cluster") in clusters.of_app().names:
        response.set_cookie(COOKIE, request.args["cluster"], httponly=True, samesite="Lax", max_age=31_536_000)
    return response
