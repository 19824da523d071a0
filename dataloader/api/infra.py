"""For probes and people: whether the process answers, what it is and how long it has run. No database.

May import `config`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from time import monotonic
from typing import Any

from flask import Blueprint, current_app

from dataloader.config import Settings

SERVICE = "dataloader"
blueprint = Blueprint("infra", __name__)
_started = monotonic()


def _version() -> str:
    try:
        return version(SERVICE)
    except PackageNotFoundError:
        return "unknown"  # run from a checkout that was never installed


VERSION = _version()


@blueprint.get("/health")
def health() -> dict[str, Any]:
    """200 while the process answers, whatever the database does."""
    return {"status": "healthy"}


@blueprint.get("/info")
def info() -> dict[str, Any]:
    """What runs here, and in which ENVIRONMENT."""
    settings: Settings = current_app.extensions["settings"]
    return {"service": SERVICE, "version": VERSION, "environment": settings.environment}


@blueprint.get("/status")
def status() -> dict[str, Any]:
    """The version and the seconds since this process started."""
    uptime = round(monotonic() - _started, 3)
    return {"status": "running", "service": SERVICE, "version": VERSION, "uptime": uptime}
