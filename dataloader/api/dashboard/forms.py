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


class Form:
    """The fields for `old`, the args of a job that is run again; None: of a new job, with the defaults.

    Without a schema of properties, or with too many, the form is one text area for all args.
    """

    def __init__(self, schema: Mapping[str, Any] | None, old: Mapping[str, Any] | None, zone: ZoneInfo) -> None:
        self._schema, self._zone = schema or {}, zone
        self._is_new, self._old, self._masked = old is None, old or {}, again.shown(old or {})
        properties = self._schema.get("properties")
        listed = properties if isinstance(properties, dict) and len(properties) <= INPUTS else {}
        self._properties = {name: self._resolved(own) for name, own in listed.items()}
        self.inputs = [self._input(name, own) for name, own in self._properties.items()]
        more = {name: value for name, value in self._masked.items() if name not in self._properties}
        if not self._properties:
            self.inputs.append(Input("", "json", "Arguments, as a JSON object", value=_pretty(more)))
        elif more or self._schema.get("additionalProperties"):
            value = _pretty(more) if more else ""
            self.inputs.append(Input(MORE, "json", "Other arguments, as a JSON object", value=value))

    def _resolved(self, own: Any) -> dict[str, Any]:
        """A property with its `$ref` resolved; of a choice between a schema and null, that schema."""
        node: dict[str, Any] = dict(own) if isinstance(own, dict) else {}
        for _ in range(4):  # a ref to a ref may go round
            choices = [
                each for each in node.get("anyOf") or () if isinstance(each, dict) and each.get("type") != "null"
            ]
            name = str(node.get("$ref", "")).removeprefix("#/$defs/")
            if len(choices) == 1 and len(node["anyOf"]) == 2:
                node = choices[0] | {each: value for each, value in node.items() if each != "anyOf"}
            elif isinstance(definition := (self._schema.get("$defs") or {}).get(name), dict):
                node = definition | {each: value for each, value in node.items() if each != "$ref"}
        return node

    def _input(self, name: str, own: Mapping[str, Any]) -> Input:
        kind = "secret" if masking.is_secret(name, "text") or own.get("writeOnly") else _kind(own)
        value = own.get("default") if self._is_new else self._old.get(name)
        if value is not None and not _fits(kind, value, own):
            kind = "json"
        title, default = str(own.get("title", ""))[:200], ""
        if title.lower().replace(" ", "_") == name.lower():  # pydantic makes it of the name
            title = ""
        if own.get("default") is not None and kind != "secret":
            default = f"default {plain(own['default'])[:100]}"
        masked = self._masked[name] if name in self._masked else again.shown({name: value})[name]
        return Input(
            name,
            kind,
            name,
            help=log.masked("; ".join(filter(None, [title, str(own.get("description", ""))[:1_000], default]))),
            is_required=name in (self._schema.get("required") or ()),
            value=self._shown(kind, value, masked),
            choices=log.masked(tuple(map(plain, own["enum"]))) if kind == "choice" else (),
            least=_number(own.get("minimum")),
            most=_number(own.get("maximum")),
            is_kept=kind == "secret" and name in self._old,
        )

    def _shown(self, kind: str, value: Any, masked: Any) -> str:
        """A value, which is masked so, as the field shows it: "" for a secret and for null."""
        if value is None or kind == "secret":
            return ""
        if kind == "json":
            return _pretty(masked)
        if kind == "datetime":
            at = _instant(value)
            return "" if at is None else (at.astimezone(self._zone) if at.tzinfo else at).strftime(_LOCAL)
        return plain(masked)

    def args(self, form: Mapping[str, str]) -> dict[str, Any]:
        """The args that somebody has filled in. Raises a 400 Problem.

        An empty field is left out, unless the form has shown the job's own value as empty.
        """
        args: dict[str, Any] = {}
        for field in self.inputs:
            text = form.get(f"args.{field.name}", "").replace("\r\n", "\n")
            if field.name not in self._properties:
                others = _json(text) if text.strip() else {}
                if not isinstance(others, dict):
                    raise _wrong(field.name, 'should be a JSON object, such as {"day": "2026-01-31"}')
                if twice := next((name for name in others if name in args), None):
                    raise _wrong(field.name, f"has a field of its own: {twice[:100]}")
                args |= {name: self._restored(name, value) for name, value in others.items()}
            elif field.name in self._old and text == field.value.replace("\r\n", "\n"):
                args[field.name] = self._old[field.name]
            elif text != "":
                args[field.name] = self._restored(field.name, self._read(field, text))
        return args

    def _restored(self, name: str, value: Any) -> Any:
        try:
            return again.restored(value, self._old[name], self._masked[name]) if name in self._old else value
        except ValueError as e:
            raise _wrong(name, str(e)) from None

    def _read(self, field: Input, text: str) -> Any:
        """The value of a field; one that is not what its kind wants stays a text, and the schema says what is wrong."""
        own = self._properties[field.name]
        if field.kind == "choice":
            return next((each for each in own["enum"] if plain(each) == text), text)
        if field.kind == "datetime":
            at = _instant(text)
            return text if at is None else (at if at.tzinfo else at.replace(tzinfo=self._zone)).isoformat()
        if field.kind == "json" and _json(text) is _NOT_JSON:
            raise _wrong(field.name, 'should be JSON, such as ["a", "b"]; a text stands in quotes')
        is_text = field.kind in ("text", "date") or (field.kind == "secret" and own.get("type", "string") == "string")
        return text if is_text else _json(text, text)


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


def _pretty(value: Any) -> str:
    return json.dumps(log.masked(value), ensure_ascii=False, indent=2)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def _instant(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text.upper())
    except ValueError:
        return None


_NOT_JSON = object()


def _json(text: str, otherwise: Any = _NOT_JSON) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise
