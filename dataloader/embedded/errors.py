"""The one error of this package."""

from __future__ import annotations


class EmbeddedError(Exception):
    """The embedded PostgreSQL cannot be used; the message says why and what to do."""
