"""PURE: the places `{{ name }}` in the texts of a JSON value, and what fills them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_PLACE = re.compile(r"\{\{\s*(.*?)\s*\}\}", re.DOTALL)


def filled(value: Any, facts: Mapping[str, Any]) -> Any:
    """`value` with the fact of its name for each `{{ name }}` in a text, at any depth; raises ValueError for an unknown
    name.

    A text that is one place becomes the fact itself; within a longer text it stands as text or JSON.
    """
    if isinstance(value, str):
        whole = _PLACE.fullmatch(value)
        return _fact(whole[1], facts) if whole and "}}" not in whole[1] else filled_text(value, facts)
    if isinstance(value, Mapping):
        return {key: filled(item, facts) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [filled(item, facts) for item in value]
    return value


def filled_text(text: str, facts: Mapping[str, Any]) -> str:
    """The same for a text that stays one; raises ValueError as `filled`."""
    return _PLACE.sub(lambda place: _as_text(_fact(place[1], facts)), text)


def _fact(name: str, facts: Mapping[str, Any]) -> Any:
    if name not in facts:
        known = ", ".join(f"{{{{ {known} }}}}" for known in facts)
        raise ValueError(f"{{{{ {name} }}}} is not known; known are {known}")
    return facts[name]


def _as_text(fact: Any) -> str:
    return fact if isinstance(fact, str) else json.dumps(fact, ensure_ascii=False)
