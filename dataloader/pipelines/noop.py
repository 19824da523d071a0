"""`noop`: three steps that only sleep, for a first try of a farm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dataloader.pipelines import PermanentError, register, rest

STEPS = ("sleep1", "sleep2", "sleep3")


@register("noop")
def noop(args: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
    """Sleep `sleep1`, `sleep2`, `sleep3` seconds (default 0 each) and report a step after each."""
    pauses = [_seconds(args, name) for name in STEPS]
    for number, (name, seconds) in enumerate(zip(STEPS, pauses, strict=True), start=1):
        yield from rest(seconds)
        yield {"processed": number, "total": len(STEPS), "step": name}


def _seconds(args: dict[str, Any], name: str) -> float:
    value = args.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 86_400:
        raise PermanentError(f"{name} should be a number of seconds from 0 to 86400")
    return float(value)
