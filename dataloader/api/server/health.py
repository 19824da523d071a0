"""The endpoints of probes: health, readiness, version, uptime."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from time import monotonic
from typing import Any

from flask import Blueprint, current_app

import dataloader
from dataloader.api.web import auth
from dataloader.api.web.endpoint import operation
from dataloader.api.web.problems import RETRY_AFTER_SEC
from dataloader.api.web.sessions import Sessions
from dataloader.config import Settings
from dataloader.model.farm import Fault, Health, Info, Ready, Running
from dataloader.ops.errors import Problem
from dataloader.queue import db, migrations

SERVICE = "dataloader"
READY_SEC = 1.0  # for the database's answer
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
@operation("service", Health, uses_database=False)
def health() -> dict[str, Any]:
    """200 while the process answers, also without the database."""
    return {"status": "healthy"}


@blueprint.get("/info")
@auth.require()
@operation("service", Info, uses_database=False)
def info() -> dict[str, Any]:
    """The service, its version and its ENVIRONMENT."""
    settings: Settings = current_app.extensions["settings"]
    return {"service": SERVICE, "version": VERSION, "environment": settings.environment}


@blueprint.get("/status", endpoint="uptime")
@auth.require()
@operation("service", Running, uses_database=False)
def uptime() -> dict[str, Any]:
    """The version and the seconds since this process started."""
    seconds = round(monotonic() - _started, 3)
    return {"status": "running", "service": SERVICE, "version": VERSION, "uptime": seconds}


@blueprint.get("/ready")
@auth.require()
@operation("service", Ready)
def ready() -> dict[str, Any]:
    """200 while requests should be sent here: the database answers, its schema fits, the process does not end."""
    if _drains:
        raise _not_ready("draining", "this process is about to end")
    probe: Probe = current_app.extensions["probe"]
    if fault := probe.fault():
        raise _not_ready(*fault)
    return {"status": "ready", "checks": {"database": "ok", "schema": "ok", "draining": False}}


def _not_ready(check: str, reason: str) -> Problem:
    fault = Fault(pointer=f"/checks/{check}", code=check, message=reason)
    return Problem(503, f"not ready ({check}): {reason}", [fault], {"Retry-After": str(RETRY_AFTER_SEC)})


class Probe:
    """Checks that the database answers within READY_SEC and has a schema that fits.

    One check runs at a time; concurrent requests share its answer and wait no longer than it takes.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._thread = ThreadPoolExecutor(1, "dl-api-ready")  # it starts with the first check, after any fork
        self._starting = Lock()
        self._check: Future[tuple[str, str] | None] | None = None
        self._until = 0.0

    def fault(self) -> tuple[str, str] | None:
        """The name and the reason of the check that failed; None if all passed."""
        with self._starting:
            if self._check is None or self._check.done():
                self._check, self._until = self._thread.submit(self._run), monotonic() + READY_SEC
            check, until = self._check, self._until
        try:
            return check.result(timeout=max(0.0, until - monotonic()))
        except TimeoutError:
            return "database", f"no answer within {READY_SEC:g} s"

    def _run(self) -> tuple[str, str] | None:
        try:
            with self._sessions.borrow() as conn:
                migrations.check(conn)
        except migrations.SchemaError as e:
            return "schema", str(e)
        except Exception as e:
            if not db.is_passing(e):
                raise
            return "database", "it does not answer"
        return None
