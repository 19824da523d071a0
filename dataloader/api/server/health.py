"""The endpoints of probes: health, readiness, version, uptime."""

from __future__ import annotations

from time import monotonic
from typing import Any

from flask import Blueprint

import dataloader
from dataloader.api.web import auth
from dataloader.api.web.endpoint import session
from dataloader.api.web.problems import RETRY_AFTER_SEC
from dataloader.model.farm import Fault
from dataloader.ops.errors import Problem
from dataloader.queue import db, migrations
from dataloader.queue.reports import alerts, stats

SERVICE = "dataloader"
blueprint = Blueprint("health", __name__)
_started = monotonic()
_drains = False
VERSION = dataloader.version()


def drain() -> None:
    """From now on /ready answers 503; the process still answers other requests."""
    global _drains
    _drains = True


@blueprint.get("/health")
@auth.require()
def health() -> dict[str, Any]:
    """200 while the process answers, also without the database."""
    return {"status": "healthy"}


@blueprint.get("/info")
@auth.require()
def info() -> dict[str, Any]:
    """The service, its version and its ENVIRONMENT."""
    return {"service": SERVICE, "version": VERSION, "environment": auth.settings().environment}


@blueprint.get("/status", endpoint="uptime")
@auth.require()
def uptime() -> dict[str, Any]:
    """The version and the seconds since this process started."""
    seconds = round(monotonic() - _started, 3)
    return {"status": "running", "service": SERVICE, "version": VERSION, "uptime": seconds}


@blueprint.get("/ready")
@auth.require()
def ready() -> dict[str, Any]:
    """200 while a job could be added and ended here: the schema and the role's rights fit, and writes are possible."""
    if _drains:
        raise _not_ready("draining", "this process is about to end")
    try:
        with session() as conn:
            migrations.check(conn)
            wrong = next(alerts.unfit(stats.fitness(conn)), None)
            is_locked = stats.is_locked(conn)
    except migrations.SchemaError as e:
        raise _not_ready("schema", str(e)) from None
    except Exception as e:
        if not db.is_passing(e):
            raise
        raise _not_ready("database", db.reason(e) or "it does not answer") from None
    if wrong:
        raise _not_ready("database", f"{wrong.text} {wrong.advice}")
    if is_locked:  # everybody may ask: no role and no application
        raise _not_ready("database", f"A session {alerts.LOCKED} `dataloader check` names the session.")
    return {"status": "ready", "checks": {"database": "ok", "schema": "ok", "draining": False}}


def _not_ready(check: str, reason: str) -> Problem:
    fault = Fault(pointer=f"/checks/{check}", code=check, message=reason)
    return Problem(503, f"not ready ({check}): {reason}", [fault], {"Retry-After": str(RETRY_AFTER_SEC)})
