"""PURE: the place at which the next page of a list begins, as a text that clients send back and need not read."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from dataloader.queue.job import storable


class Page(NamedTuple):
    """Some rows of a list, the place at which the next page begins (None: there is none), and `advice` for a search."""

    rows: list[dict[str, Any]]
    next: str | None
    advice: str | None = None


class WrongCursor(ValueError):
    """The place in a list is not one that a page has named as its next."""

    def __init__(self) -> None:
        super().__init__("the cursor should be the `next` of a page")


def at(parts: Sequence[str]) -> str:
    """The cursor of this place."""
    text = json.dumps(list(parts), ensure_ascii=False, separators=(",", ":"))  # a key may have 512 characters
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def parts(text: str, count: int) -> list[str]:
    """The parts of a place, which are texts that PostgreSQL can store; raises WrongCursor unless there are `count`."""
    try:
        values = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode())
    except (ValueError, RecursionError):
        raise WrongCursor from None
    is_place = isinstance(values, list) and len(values) == count
    if not is_place or any(not isinstance(part, str) or storable(part) != part for part in values):
        raise WrongCursor
    return list(values)
