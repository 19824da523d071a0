"""An event becomes one line of at most CAP bytes, whatever its fields hold: JSON for machines, text for people.

Many processes write to one pipe, and Linux writes up to 4,096 bytes to a pipe in one piece. A larger event is made to
fit by shortening its values, so that the line stays valid JSON.
"""

from __future__ import annotations

import json
import math
import re
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from itertools import islice
from time import time_ns
from typing import Any, NamedTuple

from dataloader.log.masking import MASK, clipped, is_secret, masked_text

CAP = 4_000
WINDOW = 20_000  # characters; a longer text is cut in its middle before it is masked
Event = Mapping[str, Any]


class _Room(NamedTuple):
    text: int  # characters of each text
    items: int  # of each dict and list
    depth: int


_ROOMS = (_Room(3_000, 50, 6), _Room(600, 20, 4), _Room(120, 10, 2))
_STAMPS = {"timestamp", "level", "event", "logger", "stream", "exc_info"}
_CORE = ("timestamp", "level", "event", "logger", "stream", "job_id", "request_id", "task", "worker")
_INT64 = 2**63
quoted = json.encoder.encode_basestring
encoded = json.JSONEncoder(ensure_ascii=False).encode
_SURROGATE = re.compile("[\ud800-\udfff]")
# Line ends of some readers, controls of terminals, marks of right-to-left text, and lone surrogates (no UTF-8).
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def stamped(event: Event, level: str, logger: str, stream: str) -> dict[str, Any]:
    """The event with the fields of every line; its exception becomes text."""
    whole = {"timestamp": now(), "level": level, "event": "", "logger": logger, "stream": stream, **event}
    if trouble := whole.pop("exc_info", None):
        try:
            parts = (trouble,) if isinstance(trouble, BaseException) else trouble
            lines = traceback.format_exception(*parts) if isinstance(parts, tuple) else [traceback.format_exc()]
            whole["exception"] = "".join(lines).rstrip()
        except (Exception, SystemExit):
            whole["exception"] = f"{type(trouble).__name__}, which cannot be written"
    if whole.pop("stack_info", None):
        whole["stack"] = "".join(traceback.format_stack(limit=30))
    return whole


def now() -> str:
    second, of_second = divmod(time_ns() // 1_000, 1_000_000)
    return f"{_date(second)}.{of_second:06d}Z"


@lru_cache(maxsize=2)  # a busy worker writes thousands of lines in a second
def _date(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).isoformat()[:-6]


def as_json(event: Event) -> bytes:
    """The event as one line of valid JSON, masked, of at most CAP bytes."""
    for room in _ROOMS:
        try:
            plain = {str(name): _field(name, value, room) for name, value in event.items()}
            line = _line(plain if room is _ROOMS[0] else plain | {"truncated": True})
        except (Exception, SystemExit) as e:
            return _core(event, f"cannot be written: {type(e).__name__}")
        if len(line) <= CAP:
            return line
    return _core(event, "too large")


def as_texts(event: Event, colors: bool, zone: tzinfo = UTC) -> list[bytes]:
    """The event for people, with its time in `zone`: a line, and texts of several lines below it, indented.

    The indent keeps a text from looking like a line of the log. A long exception is whole, each line of it cut to CAP.
    The result is in pieces of at most CAP bytes: lines of other processes come between two pieces, not within one.
    """
    import structlog  # not at the top: it imports rich

    exception = event.get("exception")
    shown = json.loads(as_json({name: value for name, value in event.items() if name != "exception"}))
    shown = {name: visible(each) if isinstance(each, str) else each for name, each in shown.items() if name != "stream"}
    try:
        moment = datetime.fromisoformat(shown["timestamp"]).astimezone(zone)
        shown["timestamp"] = moment.isoformat(" ", "milliseconds")
    except (TypeError, ValueError, OverflowError):  # a pipeline may log a field of this name
        pass
    below = [shown.pop("stack")] if "stack" in shown else []
    for name, value in shown.items():
        if isinstance(value, str) and "\n" in value:
            shown[name], _, rest = value.partition("\n")
            below.append(rest)
    if exception is not None:
        below.insert(0, visible(_fitted(_text(exception), WINDOW)))
    lines = [structlog.dev.ConsoleRenderer(colors=colors)(None, "", shown)]
    lines += [f"    {line}" for text in below for line in str(text).strip("\n").split("\n")]
    pieces = [b""]
    for line in lines:
        data = line.encode("utf-8", "replace")[: CAP - 1].decode("utf-8", "ignore").encode() + b"\n"
        if len(pieces[-1]) + len(data) > CAP:
            pieces.append(b"")
        pieces[-1] += data
    return pieces


def as_lines(event: Event, known: frozenset[str] = frozenset()) -> str:
    """An event as masked lines for a reader who knows these fields: text, further fields, and its whole exception."""
    shown = {str(name): value for name, value in event.items() if name not in _STAMPS and name not in known}
    below = [shown.pop(name) for name in ("exception", "stack") if name in shown]
    text = masked_text(str(event["event"]))
    for name, value in shown.items():
        plain = _field(name, value, _ROOMS[0])
        text += f" {name}={plain if isinstance(plain, str) else encoded(plain)}"
    return "\n".join([text, *(masked_text(str(each)) for each in below)])


def _line(plain: dict[str, Any]) -> bytes:
    text = encoded(plain)
    if not text.isascii():
        text = _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", _SURROGATE.sub("\ufffd", text))
    return text.encode() + b"\n"


def _core(event: Event, why: str) -> bytes:
    """The few fields that identify the event, always small enough for a line."""
    fields = {name: _field(name, event[name], _Room(100, 0, 0)) for name in _CORE if name in event}
    return _line(fields | {"truncated": why})


def _field(name: object, value: Any, room: _Room) -> Any:
    return MASK if is_secret(name, value) else _plain(value, room)


def _plain(value: Any, room: _Room) -> Any:
    """The value as JSON types, masked and shortened to `room`."""
    kind = type(value)
    if kind is str:
        return _fitted(value, room.text)
    if value is None or kind is bool:
        return value
    if isinstance(value, int):
        return int(value) if -_INT64 < value < _INT64 else _fitted(_text(value), room.text)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        return _fitted(_text(value), room.text)
    if room.depth <= 0:
        return f"[... {len(value)} {'fields' if isinstance(value, Mapping) else 'items'} ...]"
    less, left = room._replace(depth=room.depth - 1), len(value) - room.items
    if not isinstance(value, Mapping):
        items = [_plain(item, less) for item in islice(value, room.items)]
        return items if left <= 0 else [*items, f"... {left} more"]
    fields = {_fitted(_text(name), 200): _field(name, item, less) for name, item in islice(value.items(), room.items)}
    return fields if left <= 0 else fields | {"...": f"{left} more"}


def _text(value: object) -> str:
    """The object as text, even when its own methods fail."""
    if hasattr(value, "get_secret_value"):
        return MASK
    try:
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, bytes | bytearray):
            return str(bytes(value[:WINDOW]))
        return str.__str__(str(value))
    except (Exception, SystemExit):
        return f"<{type(value).__name__}>"


def _fitted(text: str, limit: int) -> str:
    """The text, masked; a long text keeps its begin and its end, where a traceback names the error."""
    if len(text) > WINDOW:
        text = clipped(text, WINDOW)
    return shortened(masked_text(text), limit)


def shortened(text: str, limit: int) -> str:
    """The text, or the begin and the end of a longer one."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}[... {len(text) - 2 * half} characters ...]{text[-half:]}"


def visible(text: str) -> str:
    """The text with its controls escaped, but for tabs and line ends."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
