"""The periods and time limits of 5 s or more, which tests of real processes shorten by DL_PERIODS.

DL_PERIODS='{"LEARN_SEC": 1}' gives each period named in it so many seconds in every process that is started with it.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path

_DECLARED = re.compile(r'periods\.seconds\("(\w+)"')


def seconds(name: str, default: float) -> float:
    """The period of this name; `default`, unless DL_PERIODS gives another. Raises ValueError for a bad DL_PERIODS."""
    return _given(os.environ.get("DL_PERIODS", "")).get(name, default)


@cache
def _given(text: str) -> dict[str, float]:
    if not text:
        return {}
    try:
        given = json.loads(text)
    except ValueError as e:
        raise ValueError(f'DL_PERIODS is no JSON ({e}); it should look like {{"LEARN_SEC": 1}}') from None
    if not isinstance(given, dict):
        raise ValueError(f'DL_PERIODS should be an object such as {{"LEARN_SEC": 1}}, not {text}')
    for name, value in given.items():
        if name not in declared():
            raise ValueError(f"DL_PERIODS names {name!r}; the periods are {', '.join(sorted(declared()))}")
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise ValueError(f"DL_PERIODS gives {name} {value!r}; it should be a number of seconds above 0")
    return given


@cache
def declared() -> list[str]:
    """The names of all periods: from the sources, because a process imports only the modules that it needs."""
    sources = Path(__file__).parent.rglob("*.py")
    return [name for source in sources for name in _DECLARED.findall(source.read_text("utf-8"))]
