"""Output on a terminal: harmless texts, tables, times, JSON.

The texts of a job may hold escape sequences; they become visible and harmless here. The module imports rich, so no
process of a farm imports it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from datetime import UTC, datetime, tzinfo
from typing import IO, Any, Literal
from uuid import UUID

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dataloader.model.jobs import Reason
from dataloader.model.kinds import fraction
from dataloader.model.reading import written
from dataloader.queue.reports import waiting, words

# Controls (C0, C1), marks of the direction of writing, invisible characters, surrogates.
_UNSEEN = "\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
_HARMFUL = re.compile(f"[\x00-\x1f{_UNSEEN}\U000e0000-\U000e007f]")
_IN_JSON = re.compile(f"[{_UNSEEN}\U000e0000-\U000e007f]")
_WIDE = 400  # columns of a table in a file or pipe
_STYLES = {"running": "cyan", "busy": "cyan", "succeeded": "green", "canceled": "yellow"}
_STYLES |= dict.fromkeys(("failed", "lost", "dead", "stopped", "stuck"), "red")


def plain(value: object, lines: bool = False) -> str:
    """The value as text with escaped control characters, such as `\\x1b`; with `lines` line ends stay."""
    if lines:
        return "\n".join(map(plain, str(value).replace("\r\n", "\n").split("\n")))
    return _HARMFUL.sub(lambda match: match[0].encode("unicode_escape").decode(), str(value))


def as_json(value: Any, indent: int | None = 2, *, is_ascii: bool = False) -> str:
    """JSON that is harmless in a terminal; letters of all languages stay, unless `is_ascii`."""
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent, default=_default)
    return _IN_JSON.sub(lambda match: json.dumps(match[0])[1:-1], text)


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
        made.width = _WIDE
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

    A narrow terminal cuts the columns `loose`. Without titles long values are folded.
    """
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), show_header=bool(titles))
    for title in titles:
        made.add_column(title, justify="right" if title in right else "left", no_wrap=title not in loose)
    for row in rows:
        made.add_row(*(_cell(value, "ellipsis" if titles else "fold") for value in row))
    return made


def _cell(value: object, overflow: Literal["fold", "ellipsis"]) -> Text:
    made = value.copy() if isinstance(value, Text) else Text(plain("" if value is None else value))
    made.overflow, made.no_wrap = overflow, overflow == "ellipsis"
    return made


def status(text: str) -> Text:
    return Text(plain(text), style=_STYLES.get(text, ""))


def short(text: object, width: int = 60) -> str:
    line = plain(str(text or "").partition("\n")[0])
    return line if len(line) <= width else line[: width - 1] + "…"


def duration(seconds: float | None) -> str:
    """Seconds by their two largest units; "" for None."""
    return "" if seconds is None else words.duration(seconds)


def ago(at: datetime | None, now: datetime | None = None) -> str:
    """The rough distance of `at` from now: `3 min ago`, `in 2 h`."""
    if at is None:
        return ""
    seconds = ((now or datetime.now(UTC)) - at).total_seconds()
    rough = " ".join(duration(abs(seconds)).split()[:2])
    return f"{rough} ago" if seconds >= 0 else f"in {rough}"


def clock(at: datetime | None, zone: tzinfo) -> str:
    return at.astimezone(zone).strftime("%Y-%m-%d %H:%M:%S %Z") if at else ""


def size(count: float | None) -> str:
    return "" if count is None else f"{count / 1_000_000:,.0f} MB"


def bar(fraction: float | None) -> str:
    """A bar of 20 block characters with its percentage; "" without a fraction."""
    return "" if fraction is None else f"{'█' * int(fraction * 20):░<20} {int(fraction * 100):3}%"


def progress(document: Any) -> str:
    if not isinstance(document, dict) or not document:
        return ""
    done, total = document.get("processed"), document.get("total")
    shown = [f"{done} of {total}"] if done is not None and total is not None else []
    rest = {name: value for name, value in document.items() if not shown or name not in ("processed", "total")}
    return plain(", ".join([*shown, *(f"{name} {words.plain(value)}" for name, value in rest.items())]))


def listing(columns: str, rows: Sequence[Any]) -> Table:
    """A table of answers. `columns` names fields: `field`, `title=field`, or of a part `p95=run_sec.p95`.

    A column without a value is left out.
    """
    now = datetime.now(UTC)
    named = [(title, path or title) for title, _, path in (word.partition("=") for word in columns.split())]
    values = [[part(row, path) for _, path in named] for row in rows]
    shown = [place for place in range(len(named)) if not rows or any(row[place] not in (None, "") for row in values)]
    numbers = [place for place in shown if any(isinstance(row[place], int | float) for row in values)]
    titles = {place: named[place][0].replace("_", " ") for place in shown}
    cells = [[cell(named[place][1], row[place], now) for place in shown] for row in values]
    loose = [title for place, title in titles.items() if place not in numbers]
    return table([*titles.values()], cells, [titles[place] for place in numbers], loose)


def part(row: Any, path: str) -> Any:
    """The value of a field, or of a part of a field; None where one of them is not there."""
    for name in path.split("."):
        row = row.get(name) if isinstance(row, Mapping) else getattr(row, name, None)
    return row


def sheet(answer: Any, zone: tzinfo, but: Collection[str] = ()) -> Table:
    """The fields of an answer and its parts that are not empty and not in `but`; a list has a line for each value."""
    now, rows = datetime.now(UTC), []
    for path, value in _flat(answer):
        values = [] if path in but else value if isinstance(value, list) else [value]
        texts = [
            _long_cell(path, each, now, zone) for each in values if not is_dataclass(each) or hasattr(each, "reason")
        ]
        label = path.replace(".", " ").replace("_", " ")
        rows += [(label if not number else "", text) for number, text in enumerate(texts)]
    return table((), [(name, text) for name, text in rows if text not in ("", None)])


def _flat(answer: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """The path and the value of each field, also of the parts of an answer."""
    for name, value in vars(answer).items():
        if is_dataclass(value) and not hasattr(value, "reason"):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _long_cell(path: str, value: Any, now: datetime, zone: tzinfo) -> Any:
    """A value of a sheet, which has more room than a cell."""
    if path == "counts":
        return ", ".join(f"{each} {count:,}" for each, count in value.items() if count)
    if path == "progress":
        return f"{bar(fraction(value))} {progress(value)}".strip()
    if isinstance(value, dict):
        return as_json(value, None) if value else ""
    if isinstance(value, datetime):
        return f"{clock(value, zone)}, {ago(value, now)}"
    return value if isinstance(value, str) else cell(path, value, now)


def cell(path: str, value: Any, now: datetime) -> Any:
    """A value as a cell, by its type and by the unit that its field's name ends with."""
    name = path.rpartition(".")[2]
    if value is None or value == "" or isinstance(value, Text):
        return value
    if isinstance(value, datetime):
        return ago(value, now)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(path, value)
    if isinstance(value, list):
        return short(", ".join(map(str, value)))
    if name in ("status", "state", "end"):
        return status(value)
    if name == "progress":
        return short(progress(value))
    if name in ("error_group", "url"):  # to be copied
        return plain(value)
    if hasattr(value, "reason"):
        return short(reason(value, now), 200)
    return short(value)


def _number(path: str, value: float) -> str:
    units = {name.rpartition("_")[2] for name in path.split(".")}
    if units & {"sec", "seconds"}:
        return duration(value)
    if "rate" in units:
        return f"{value:.1%}" if 0 < value < 0.01 else f"{value:.0%}"
    text = f"{value:,.1f}".removesuffix(".0") if isinstance(value, float) else f"{value:,}"
    if "percent" in units:
        return f"{value:.0f}%"
    return f"{value:,.0f} MB" if "mb" in units else size(value) if "bytes" in units else text


def reason(waiting_for: Reason | None, now: datetime) -> str:
    """The sentence that says why a queued job does not run yet; "" without a reason."""
    if waiting_for is None:
        return ""
    try:
        return waiting.words(written(waiting_for), now)
    except (KeyError, TypeError, ValueError):  # another version of the service has other reasons
        return f"It waits for: {waiting_for.reason}."
