"""The periods and time limits of 5 s or more, which tests of real processes shorten by DL_PERIODS.

DL_PERIODS='{"LEARN_SEC": 1}' gives each period named in it so many seconds in every process that is started with it.
"""

from __future__ import annotations

import json
import os


def seconds(name: str, default: float) -> float:
    """The period of this name; `default`, unless DL_PERIODS gives another. Raises ValueError for a bad DL_PERIODS."""
    given = json.loads(os.environ.get("DL_PERIODS") or "{}").get(name, default)
    if type(given) not in (int, float) or not 0 < given < float("inf"):
        raise ValueError(f"DL_PERIODS gives {name} {given!r}; it should be a number of seconds above 0")
    return float(given)
