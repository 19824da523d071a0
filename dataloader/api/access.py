"""Who may do what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask import request

View = Callable[..., Any]


def require(*scopes: str) -> Callable[[View], View]:
    """Let in only those who have one of the scopes."""

    def guard(view: View) -> View:
        view.scopes = scopes  # type: ignore[attr-defined]
        return view

    return guard


def who() -> str:
    """Who asks, for the journal."""
    return f"anonymous from {request.remote_addr}"
