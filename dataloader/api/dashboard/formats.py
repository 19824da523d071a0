"""Values as text for the dashboard's templates: times in the zone of the page, durations, sizes, counts. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from markupsafe import Markup, escape

from dataloader.model.kinds import fraction, number_of
from dataloader.queue.reports.words import NOTHING, plain

_BARS = "▁▂▃▄▅▆▇█"
_SIZES = ("B", "KB", "MB", "GB", "TB", "PB")


def size(octets: float | None) -> str:
    """`1.2 GB`, in powers of 1,000."""
    if octets is None:
        return NOTHING
    number, unit = float(octets), 0
    while number >= 999.5 and unit < len(_SIZES) - 1:
        number, unit = number / 1_000, unit + 1
    text = f"{number:.0f}" if unit == 0 or number >= 99.95 else f"{number:.1f}"
    return f"{text} {_SIZES[unit]}"


def number(value: float | None) -> str:
    """A number as short as it can be without a loss: `3`, `0.5`, `1795411234.123456`."""
    return NOTHING if value is None else repr(value).removesuffix(".0")


def bars(counts: Sequence[int]) -> str:
    """Counts as bars of text, the largest as high as a letter: `▁▁▂█`. Only zero has the lowest bar."""
    most = max(counts, default=0)
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // most)] if count else _BARS[0] for count in counts)


def pretty(value: Any) -> str:
    """A JSON value as indented text; a string as it is."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2, default=str)


def first_line(value: Any) -> str:
    """The first line of a text, such as an error without its stack; of any other value its JSON."""
    return plain(value).strip().partition("\n")[0]


def short(job_id: object) -> str:
    """The end of a job's id; its beginning is a time, which neighbours share."""
    return "…" + str(job_id)[-8:]


def clock(
    zone: Callable[[], ZoneInfo], now: Callable[[], datetime], is_relative: bool = False
) -> Callable[[Any], Markup]:
    """A filter that renders an instant as <time>: the zone's time as text, the exact instant there and in UTC as title.

    One that `is_relative` takes the focus; the page's script shows how long ago it is, and keeps that true.
    """
    relative = Markup(' class="ago" tabindex="0"') if is_relative else ""

    def moment(at: Any) -> Markup:
        if isinstance(at, str):  # of the journal or of `waiting_for`
            with suppress(ValueError):
                parsed = datetime.fromisoformat(at)
                at = parsed if parsed.tzinfo else at
        if not isinstance(at, datetime):
            return escape(NOTHING if at is None else at)
        utc, local, today = at.astimezone(UTC), at.astimezone(zone()), now().astimezone(zone())
        # `2026-11-21 15:00:00 Europe/Moscow = 2026-11-21 12:00:00.000000 UTC`
        exact = utc.strftime("%Y-%m-%d %H:%M:%S.%f") + " UTC"
        if str(local.tzinfo) != "UTC":
            exact = f"{local:%Y-%m-%d %H:%M:%S} {local.tzinfo} = {exact}"
        text = local.strftime("%H:%M:%S")
        if local.date() != today.date():
            text = f"{local.day} " + local.strftime("%b %H:%M:%S" if local.year == today.year else "%b %Y %H:%M")
        return Markup('<time datetime="{}" title="{}"{}>{}</time>').format(
            utc.isoformat().replace("+00:00", "Z"),
            exact,
            relative,
            text,
        )

    return moment


IN_FULL = frozenset({"stacks", "notes", "error_group"})  # facts that a page shows in another place than the line


def steps(progress: Any, most: int = 120) -> str:
    """The progress, or any facts, in one line of `most` characters: `500 of 1,000 · step load`."""
    if not isinstance(progress, Mapping):
        return ""
    texts = {name: value if number_of(value) is None else f"{value:,}" for name, value in progress.items()}
    left = {name: value for name, value in texts.items() if name not in IN_FULL}
    if fraction(progress) is not None and "processed" in left and "total" in left:
        left = {first_line(left.pop("processed")): f"of {first_line(left.pop('total'))}", **left}
    return brief(left, most)


def brief(args: Any, most: int = 120) -> str:
    """A job's arguments in one line of `most` characters, unlike `steps` without commas: `order 1042 · state paid`."""
    facts = args.items() if isinstance(args, Mapping) else ()
    return clipped(" · ".join(f"{name} {first_line(value)}" for name, value in facts), most)


def clipped(text: str, most: int) -> str:
    """The text, with … at its end where it is longer than that."""
    return text if len(text) <= most else text[: most - 1] + "…"
