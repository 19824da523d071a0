"""Output on a terminal: harmless texts, tables, times, JSON.

The texts of a job may hold escape sequences; they become visible and harmless here. The module imports rich, so no
process of a farm imports it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from datetime import UTC, datetime, tzinfo
from typing import IO, Any, Literal
from uuid import UUID

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dataloader.model.reading import written

# Controls (C0, C1), marks of the direction of writing, invisible characters, surrogates.
_UNSEEN = "\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
_HARMFUL = re.compile(f"[\x00-\x1f{_UNSEEN}\U000e0000-\U000e007f]")
_IN_JSON = re.compile(f"[{_UNSEEN}\U000e0000-\U000e007f]")
_WIDE = 400  # columns of a table in a file or pipe
_STYLES = {
    "running": "cyan",
    "succeeded": "green",
    "failed": "red",
    "lost": "red",
    "canceled": "yellow",
    "busy": "cyan",
    "dead": "red",
    "stopped": "red",
    "stuck": "red",
}


def plain(value: object, lines: bool = False) -> str:
    """The value as text with escaped control characters, such as `\\x1b`; with `lines` line ends stay."""
    text = str(value).replace("\r\n", "\n") if lines else str(value)
    return _HARMFUL.sub(lambda found: found[0] if lines and found[0] == "\n" else _spelled(found[0]), text)


def _spelled(letter: str) -> str:
    number = ord(letter)
    known = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(letter)
    return known or (f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}")


def as_json(value: Any, indent: int | None = 2) -> str:
    """JSON that is harmless in a terminal; letters of all languages stay."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=_default)
    return _IN_JSON.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


def _default(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, UUID):
        return str(value)
    if is_dataclass(value):
        return written(value)
    return float(value)


def console(stream: IO[str] | None = None) -> Console:
    """A console on stdout or `stream`; without a terminal lines are not folded."""
    stream = stream or sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")  # the terminal may lack letters
    made = Console(file=stream, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made = Console(file=stream, highlight=False, markup=False, emoji=False, width=_WIDE)
    return made


def show(renderable: RenderableType) -> None:
    """Print to stdout; without a terminal the lines of a table end without blanks."""
    out = console()
    if out.is_terminal:
        out.print(renderable)
        return
    with out.capture() as captured:
        out.print(renderable)
    out.file.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def table(
    titles: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = (), loose: Sequence[str] = ()
) -> Table:
    """A table with a line for each row; None is empty. The columns `right` are aligned to the right.

    A narrow terminal cuts the columns `loose`.
    """
    made = _empty()
    for title in titles:
        made.add_column(title, justify="right" if title in right else "left", no_wrap=title not in loose)
    for row in rows:
        made.add_row(*(_cell(value, "ellipsis") for value in row))
    return made


def fields(rows: Iterable[tuple[str, object]]) -> Table:
    """Names and values; long values are folded."""
    made = _empty(show_header=False)
    for name, value in rows:
        made.add_row(_cell(name, "fold"), _cell(value, "fold"))
    return made


def _empty(**options: Any) -> Table:
    return Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), **options)


def _cell(value: object, overflow: Literal["fold", "ellipsis"]) -> Text:
    made = value.copy() if isinstance(value, Text) else Text(plain("" if value is None else value))
    made.overflow, made.no_wrap = overflow, overflow == "ellipsis"
    return made


def status(text: str) -> Text:
    """A status or state in its colour."""
    return Text(plain(text), style=_STYLES.get(text, ""))


def short(text: object, width: int = 60) -> str:
    """The beginning of the first line."""
    line = plain(str(text or "").partition("\n")[0])
    return line if len(line) <= width else line[: width - 1] + "…"


def duration(seconds: float | None) -> str:
    """Seconds as 0.4 s, 12 s, 3 min 20 s, 2 h 05 min or 3 d 4 h."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def ago(at: datetime | None, now: datetime | None = None) -> str:
    """The rough distance of `at` from now: `3 min ago`, `in 2 h`."""
    if at is None:
        return ""
    seconds = ((now or datetime.now(UTC)) - at).total_seconds()
    rough = " ".join(duration(abs(seconds)).split()[:2])
    return f"{rough} ago" if seconds >= 0 else f"in {rough}"


def clock(at: datetime | None, zone: tzinfo) -> str:
    """Date and time of day in `zone`."""
    return at.astimezone(zone).strftime("%Y-%m-%d %H:%M:%S %Z") if at else ""


def number(value: float | None) -> str:
    """A number as short as it can be without a loss: 3, 0.5, 1795411234.123456."""
    return "" if value is None else repr(value).removesuffix(".0")


def size(count: float | None) -> str:
    """Bytes in MB."""
    return "" if count is None else f"{count / 1_000_000:,.0f} MB"


def bar(fraction: float | None, width: int = 20) -> str:
    """A bar of block characters with its percentage; "" without a fraction."""
    if fraction is None:
        return ""
    done = int(fraction * width)
    return f"{'█' * done}{'░' * (width - done)} {int(fraction * 100):3}%"


def progress(document: Any) -> str:
    """The progress of a job on one line."""
    if not isinstance(document, dict) or not document:
        return ""
    done, total = document.get("processed"), document.get("total")
    words = [f"{done} of {total}"] if done is not None and total is not None else []
    rest = {name: value for name, value in document.items() if not words or name not in ("processed", "total")}
    return plain(", ".join([*words, *(f"{name} {_value(value)}" for name, value in rest.items())]))


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
