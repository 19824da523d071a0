"""PURE: the texts of exceptions, whose own methods may fail."""

from __future__ import annotations

import traceback


def described(error: BaseException) -> str:
    """Type, message and stack; the exception's own methods may fail."""
    try:
        return headline(error) + "\n\n" + "".join(traceback.format_exception(error))
    except Exception:
        return type(error).__name__


def headline(error: BaseException) -> str:
    """Type and message; the exception's own methods may fail."""
    try:
        return traceback.format_exception_only(error)[-1].strip()
    except Exception:
        return type(error).__name__


def message(error: BaseException) -> str:
    """The message alone; the exception's own methods may fail."""
    try:
        return str(error)
    except Exception:
        return type(error).__name__
