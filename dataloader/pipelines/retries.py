"""PURE: ready-made rules for `register(retry_in=...)`: seconds from a failed attempt to the next one."""

from __future__ import annotations

import random
from collections.abc import Callable

Rule = Callable[[int], float]
DAY_SEC = 86_400.0


def linear(step_sec: float = 30.0) -> Rule:
    """`step_sec` for each attempt so far, at most a day; 30 is the rule of pipelines that name none."""
    _above_zero("step_sec", step_sec)
    return lambda attempt: min(step_sec * attempt, DAY_SEC)


def polynomial() -> Rule:
    """`n**4 + 15 + rand(30) * (n + 1)` for the retry n, counted from 0: the rule of Sidekiq and Lowkiq.

    15 s or more after the first attempt, 17 days after the 36th; the first 25 waits take about 20 days.
    """
    return lambda attempt: (attempt - 1) ** 4 + 15 + random.randrange(30) * attempt  # noqa: S311  jitter


def exponential(base_sec: float = 1.0, cap_sec: float = 3_600.0) -> Rule:
    """`base_sec`, then twice as long with each attempt, at most `cap_sec`; a random part of up to a half less.

    The random part keeps jobs that failed together from coming back together (M. Brooker, "Exponential Backoff And
    Jitter", AWS 2015: "equal jitter").
    """
    _above_zero("base_sec", base_sec)
    _above_zero("cap_sec", cap_sec)
    return lambda attempt: min(cap_sec, base_sec * 2.0 ** min(attempt - 1, 60)) * random.uniform(0.5, 1.0)  # noqa: S311


def _above_zero(name: str, seconds: float) -> None:
    if not seconds > 0:
        raise ValueError(f"{name} should be above 0, not {seconds}")
