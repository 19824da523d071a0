"""PURE: the form of a job's args, made of the schema of its task; and the args that somebody has filled into it.

The form never holds a part of a job's args that a page masks. Where the mask comes back, the old value stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from dataloader import log
from dataloader.log import masking
from dataloader.ops.checks import pointer
from dataloader.ops.errors import Problem, invalid
from dataloader.queue import again
from dataloader.queue.reports.words import plain

INPUTS = 200  # of one form; a task with more args has a text area for all of them
CHOICES = 200  # of one arg
MORE = "*"  # the field of the args that the schema does not name
_LOCAL = "%Y-%m-%dT%H:%M:%S"


def _wrong(name: str, message: str) -> Problem:
    """A field that cannot be read, and what it should be."""
    return invalid(pointer(["args", name] if name else ["args"]), "form", f"{name or 'args'} {message}")


@dataclass(frozen=True, slots=True)
class Input:
    """One field of the form. `value` is what it shows, `kind` how it is written: see `_read`.

    All texts of it are masked; to mask a JSON text once more, as `show` does with a text, would spoil it.
    """

    name: str
    kind: str
    label: str
    help: str = ""
    is_required: bool = False
    value: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    is_kept: bool = False  # a secret that stays unchanged if the field is empty

    @property
    def at(self) -> str:
        """The JSON pointer of the arg, as faults name it."""
        return pointer(["args", self.name] if self.name else ["args"])


# --- the form ---


def inputs(schema: Mapping[str, Any] | None, args: Mapping[str, Any] | None, zone: ZoneInfo) -> list[Input]:
    """The fields for these args, those of the job that is run again; None: of a new job, with the defaults.

    Without a schema of properties, one text area for all args.
    """
    properties = schema.get("properties") if schema else None
    masked = again.shown(args or {})
    if not schema or not isinstance(properties, dict) or not 0 < len(properties) <= INPUTS:
        return [Input("", "json", "Arguments, as a JSON object", value=_pretty(masked))]
    fields = [_input(schema, name, _resolved(schema, own), args, masked, zone) for name, own in properties.items()]
    more = {name: value for name, value in masked.items() if name not in properties}
    if more or schema.get("additionalProperties"):
        fields.append(Input(MORE, "json", "Other arguments, as a JSON object", value=_pretty(more) if more else ""))
    return fields


def _input(
    schema: Mapping[str, Any],
    name: str,
    own: Mapping[str, Any],
    args: Mapping[str, Any] | None,
    masked: Mapping[str, Any],
    zone: ZoneInfo,
) -> Input:
    kind = "secret" if masking.is_secret(name, "text") or own.get("writeOnly") else _kind(own)
    value = own.get("default") if args is None else args.get(name)
    if value is not None and not _fits(kind, value, own):
        kind = "json"
    title = str(own.get("title", ""))[:200]
    title = "" if title.lower().replace(" ", "_") == name.lower() else title  # pydantic makes it of the name
    default = f"default {plain(own['default'])[:100]}" if own.get("default") is not None and kind != "secret" else ""
    return Input(
        name,
        kind,
        name,
        log.masked("; ".join(filter(None, [title, str(own.get("description", ""))[:1_000], default]))),
        name in (schema.get("required") or ()),
        _shown(kind, value, masked[name] if name in masked else again.shown({name: value})[name], zone),
        log.masked(tuple(map(plain, own["enum"]))) if kind == "choice" else (),
        _number(own.get("minimum")),
        _number(own.get("maximum")),
        kind == "secret" and name in (args or ()),
    )


def _resolved(schema: Mapping[str, Any], own: Any) -> dict[str, Any]:
    """A property with its `$ref` resolved; of a choice between a schema and null, that schema."""
    node: dict[str, Any] = dict(own) if isinstance(own, dict) else {}
    for _ in range(4):  # a ref to a ref may go round
        choices = [each for each in node.get("anyOf") or () if isinstance(each, dict) and each.get("type") != "null"]
        name = str(node.get("$ref", "")).removeprefix("#/$defs/")
        if len(choices) == 1 and len(node["anyOf"]) == 2:
            node = choices[0] | {each: value for each, value in node.items() if each != "anyOf"}
        elif isinstance(definition := (schema.get("$defs") or {}).get(name), dict):
            node = definition | {each: value for each, value in node.items() if each != "$ref"}
    return node


def _kind(own: Mapping[str, Any]) -> str:
    if isinstance(choices := own.get("enum"), list) and 0 < len(choices) <= CHOICES:
        return "choice"
    kinds = {"string": {"date": "date", "date-time": "datetime"}.get(str(own.get("format")), "text")}
    kinds |= {"integer": "integer", "number": "number", "boolean": "boolean"}
    return kinds.get(str(own.get("type")), "json")


def _fits(kind: str, value: Any, own: Mapping[str, Any]) -> bool:
    """Whether a field of this kind can show the value."""
    if kind == "choice":
        return value in own["enum"]
    if kind in ("integer", "number"):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "datetime":
        return isinstance(value, str) and _instant(value) is not None
    return kind in ("json", "secret") or isinstance(value, str)


def _shown(kind: str, value: Any, masked: Any, zone: ZoneInfo) -> str:
    """A value, which is masked so, as the field shows it: "" for a secret and for null."""
    if value is None or kind == "secret":
        return ""
    if kind == "json":
        return _pretty(masked)
    if kind == "datetime":
        at = _instant(value)
        return "" if at is None else (at.astimezone(zone) if at.tzinfo else at).strftime(_LOCAL)
    return plain(masked)


def _pretty(value: Any) -> str:
    return json.dumps(log.masked(value), ensure_ascii=False, indent=2)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def _instant(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text.upper())
    except ValueError:
        return None


# --- what comes back ---


def args_of(
    fields: list[Input],
    form: Mapping[str, str],
    schema: Mapping[str, Any] | None,
    old: Mapping[str, Any],
    zone: ZoneInfo,
) -> dict[str, Any]:
    """The args that the form says; `old` are those of the job that is run again, else {}. Raises a 400 Problem.

    An empty field is left out, unless the form has shown the job's own value as empty.
    """
    properties = (schema or {}).get("properties") or {}
    args: dict[str, Any] = {}
    masked = again.shown(old)
    for field in fields:
        text = form.get(f"args.{field.name}", "").replace("\r\n", "\n")
        if field.name in ("", MORE) and field.name not in properties:
            others = _json(text) if text.strip() else {}
            if not isinstance(others, dict):
                raise _wrong(field.name, 'should be a JSON object, such as {"day": "2026-01-31"}')
            if twice := next((name for name in others if name in args), None):
                raise _wrong(field.name, f"has a field of its own: {twice[:100]}")
            args |= {name: _restored(name, value, old, masked) for name, value in others.items()}
        elif field.name in old and text == field.value.replace("\r\n", "\n"):
            args[field.name] = old[field.name]
        elif text != "":
            value = _read(field, text, _resolved(schema or {}, properties.get(field.name)), zone)
            args[field.name] = _restored(field.name, value, old, masked)
    return args


def _restored(name: str, value: Any, old: Mapping[str, Any], masked: Mapping[str, Any]) -> Any:
    try:
        return again.restored(value, old[name], masked[name]) if name in old else value
    except ValueError as e:
        raise _wrong(name, str(e)) from None


def _read(field: Input, text: str, own: Mapping[str, Any], zone: ZoneInfo) -> Any:
    """The value of a field; one that is not what its kind wants stays a text, and the schema says what is wrong."""
    if field.kind == "choice":
        return next((each for each in own.get("enum", ()) if plain(each) == text), text)
    if field.kind == "secret":
        return text if own.get("type", "string") == "string" else _json(text, text)
    if field.kind == "datetime":
        at = _instant(text)
        return text if at is None else (at if at.tzinfo else at.replace(tzinfo=zone)).isoformat()
    if field.kind == "json":
        if (value := _json(text)) is _NOT_JSON:
            raise _wrong(field.name, 'should be JSON, such as ["a", "b"]; a text stands in quotes')
        return value
    return text if field.kind in ("text", "date") else _json(text, text)


_NOT_JSON = object()


def _json(text: str, otherwise: Any = _NOT_JSON) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise
