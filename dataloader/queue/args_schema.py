"""PURE: the JSON Schema of a task's args: how the queue keeps it, and the check of args by it.

The check is early help for API and command line; only the worker's own check, by the model, counts. A schema may come
from anybody, so only _KEYWORDS count, no `pattern` is tried, no `$ref` leads out, and a check that takes more than
CHECK_SEC ends without a fault (jsonschema-rs has no such bound). Messages name the place and the rule, and never quote
the args.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import date, datetime
from functools import lru_cache
from itertools import islice
from time import thread_time
from typing import TYPE_CHECKING, Any
from uuid import UUID

from dataloader.log import masking
from dataloader.queue.reports.words import plain

if TYPE_CHECKING:
    from jsonschema import ValidationError

SIZE_LIMIT = 65_536  # bytes of a schema; the column has the same bound
CHECK_SEC = 0.2  # of the processor's time, for the check of one job's args
CHECKS_SEC = 2.0  # the same for the jobs of one request
SCHEMA_SEC = 3.0  # the same for the check of a schema itself, by the schema of schemas
FAULTS = 20  # of one job
UNIQUE_MOST = 1_000_000  # the number of a list's items by their characters, up to which the items are compared
_CHOICES_SHOWN = 20
_MESSAGE_LIMIT = 300
_NAMED = ("properties", "$defs", "definitions")  # keywords of which the keys are names, and no keywords
_SAMPLES = ("default", "examples", "example")


@dataclass(frozen=True, slots=True)
class ArgFault:
    """One fault of args: the path to it, a code for programs, a text for people that holds no value."""

    path: tuple[str | int, ...]
    code: str
    message: str

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))[:100] or 'args'} {self.message}"


def written(schema: Mapping[str, Any]) -> str:
    """The schema as the queue keeps it, without the samples of secrets; raises ValueError above SIZE_LIMIT bytes."""
    text = json.dumps(_without_samples(schema), separators=(",", ":"))
    if len(text) > SIZE_LIMIT:
        raise ValueError(f"its JSON Schema has {len(text)} bytes; it should have at most {SIZE_LIMIT}")
    return text


def _without_samples(schema: Any, is_secret: bool = False) -> Any:
    """Without samples where the schema is a secret's, with masked ones elsewhere."""
    if isinstance(schema, list):
        return [_without_samples(item, is_secret) for item in schema]
    if not isinstance(schema, dict):
        return masking.masked(schema)
    masked: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            masked[keyword] = {}
            for name, each in value.items():
                is_its = isinstance(each, dict) and (masking.is_secret(name, "text") or each.get("writeOnly"))
                masked[keyword][name] = _without_samples(each, bool(is_secret or is_its))
        elif keyword not in _SAMPLES:
            masked[keyword] = _without_samples(value, is_secret)
        elif not is_secret:
            masked[keyword] = masking.masked(value)
    return masked


def readable(text: str | None) -> dict[str, Any] | None:
    """The schema in this text; None where there is none, or it is none that can be checked."""
    validator = None if text is None else _validator(text)
    return validator and validator.schema


class Allowance:
    """The processor's time that the jobs of one request share."""

    def __init__(self, seconds: float = CHECKS_SEC) -> None:
        self.left = seconds

    def faults(self, text: str, args: Any) -> list[ArgFault]:
        """The faults of args by the schema in `text`, at most FAULTS; [] where the time does not suffice to tell."""
        from referencing.exceptions import Unresolvable

        validator = _validator(text)
        if validator is None:
            return []
        began = thread_time()
        token = _ends_at.set(began + min(CHECK_SEC, self.left))
        unique: dict[ArgFault, None] = {}  # the library names an object once for each name that it lacks
        try:
            for error in validator.iter_errors(args):
                unique |= dict.fromkeys(islice(_described(error, ()), FAULTS))
                if len(unique) >= FAULTS:
                    break
        except (_Exhausted, RecursionError, Unresolvable, ArithmeticError):
            pass  # the worker checks with the model itself
        finally:
            self.left -= thread_time() - began
            _ends_at.reset(token)
        return [*unique][:FAULTS]


class _Exhausted(Exception):
    """The check has taken its time."""


_ends_at: ContextVar[float] = ContextVar("ends_at")
_Keyword = Callable[[Any, Any, Any, Any], Iterable[Any] | None]


def _require_time() -> None:
    if thread_time() > _ends_at.get():
        raise _Exhausted


@lru_cache(maxsize=256)
def _validator(text: str) -> Any:
    """The validator of a schema; None where it is none that can be checked, which is as costly to find out."""
    from jsonschema import Draft202012Validator
    from referencing import Registry  # without a way to fetch anything

    if len(text) > SIZE_LIMIT:
        return None
    token = _ends_at.set(thread_time() + SCHEMA_SEC)
    try:
        schema = json.loads(text, parse_constant=lambda constant: int(constant))
        is_schema = _validator_class(of_schemas=True)(Draft202012Validator.META_SCHEMA).is_valid(schema)
        # To find a place by its name, the library reads the whole schema for each reference.
        leads_out = any(ref != "#" and not ref.startswith("#/") for ref in _references(schema))
    except (ValueError, RecursionError, _Exhausted):
        return None
    finally:
        _ends_at.reset(token)
    if leads_out or not is_schema or not isinstance(schema, dict):
        return None
    return _validator_class()(schema, registry=Registry(), format_checker=_formats())


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for item in schema:
            yield from _references(item)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name in ("$ref", "$dynamicRef", "$id") and isinstance(value, str):
                yield value
            yield from _references(value)


@lru_cache(maxsize=2)
def _validator_class(of_schemas: bool = False) -> Any:
    """A validator by _KEYWORDS; `of_schemas`: by all, for the schema of schemas, in which each is harmless."""
    from attrs import fields
    from jsonschema import Draft202012Validator, validators

    known: dict[str, _Keyword] = dict(Draft202012Validator.VALIDATORS)
    keywords = {name: _bounded(name, known[name]) for name in (known if of_schemas else _KEYWORDS)}
    made: Any = validators.create(
        Draft202012Validator.META_SCHEMA, keywords, type_checker=Draft202012Validator.TYPE_CHECKER
    )
    given = [(field.alias or field.name, field.name) for field in fields(made) if field.init]

    def evolve(validator: Any, **changes: Any) -> Any:
        # The library's own way takes another class for a part with a `$schema`: one that tries `pattern`, without end.
        _require_time()  # an item costs time even if its schema has no keyword
        return made(**({name: getattr(validator, attribute) for name, attribute in given} | changes))

    made.evolve = evolve
    return made


_KEYWORDS = (
    *("$ref", "type", "enum", "const", "properties", "required", "additionalProperties", "minProperties"),
    *("maxProperties", "items", "prefixItems", "minItems", "maxItems", "uniqueItems", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format", "anyOf", "oneOf", "allOf"),
)


def _bounded(name: str, keyword: _Keyword) -> _Keyword:
    """The keyword, as long as the check has time left; without what a pattern decides, and what takes long at once."""

    def bounded(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        _require_time()
        is_by_pattern = name == "additionalProperties" and "patternProperties" in schema
        is_list = name == "uniqueItems" and isinstance(instance, list)
        is_long = is_list and len(instance) * len(repr(instance)) > UNIQUE_MOST  # each two items may be compared
        if not is_by_pattern and not is_long:
            yield from keyword(validator, value, instance, schema) or ()

    return bounded


# The formats that are checked: what they refuse with False or a ValueError pydantic refuses too.
_CHECKED_FORMATS: dict[str, Callable[[str], object]] = {
    "date": lambda text: re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) and date.fromisoformat(text),
    "date-time": lambda text: text.isdigit() or datetime.fromisoformat(text.upper()),  # digits: seconds since 1970
    "uuid": UUID,
}


@lru_cache(maxsize=1)
def _formats() -> Any:
    from jsonschema import FormatChecker

    formats = FormatChecker(formats=())
    for name, is_right in _CHECKED_FORMATS.items():
        formats.checks(name, raises=ValueError)(
            lambda value, is_right=is_right: not isinstance(value, str) or bool(is_right(value))
        )
    return formats


def _described(error: ValidationError, before: tuple[str | int, ...]) -> Iterator[ArgFault]:
    """An error of the library in our words, which quote no value."""
    path, code, rule = (*before, *error.relative_path), str(error.validator), error.validator_value
    if code in ("anyOf", "oneOf"):
        yield from _choice_faults(error, path)
    elif code == "required":
        for name in rule:
            if name not in error.instance:
                yield ArgFault((*path, name), "missing", "is required")
    elif code == "additionalProperties":
        known = error.schema.get("properties", {})
        for name in error.instance:
            if name not in known:
                yield ArgFault((*path, name), "unknown", f"is not known; known are: {_listed(known)}")
    else:
        yield ArgFault(path, code, _rule(code, rule))


def _choice_faults(error: ValidationError, path: tuple[str | int, ...]) -> Iterator[ArgFault]:
    """The faults by the first choice of the right type; without one, the types of all choices."""
    choices: dict[Any, list[ValidationError]] = {}
    for each in error.context or ():
        choices.setdefault(each.relative_schema_path[0], []).append(each)
    for errors in choices.values():
        if not any(each.validator == "type" and not each.relative_path for each in errors):
            for each in errors:
                yield from _described(each, path)
            return
    types = [_rule("type", errors[0].validator_value) for errors in choices.values()]
    words = dict.fromkeys(text.removeprefix("should be ") for text in types)
    rule = f"should be {' or '.join(words)}" if words else "should be one of its choices only"
    yield ArgFault(path, str(error.validator), rule)


_TYPES = {
    **{"string": "a text", "integer": "a whole number", "number": "a number", "boolean": "true or false"},
    **{"object": "a JSON object", "array": "a list", "null": "null"},
}
_FORMATS = {
    "date": "a date such as 2026-01-31",
    "date-time": "a time such as 2026-01-31T06:30:00+03:00",
    "uuid": "a UUID such as 01890a5d-ac96-774b-bcce-b302099a8057",
}
_RULES: dict[str, str] = {
    "minimum": "should be {} or more",
    "maximum": "should be {} or less",
    "exclusiveMinimum": "should be more than {}",
    "exclusiveMaximum": "should be less than {}",
    "multipleOf": "should be a multiple of {}",
    "minLength": "should have at least {} characters",
    "maxLength": "should have at most {} characters",
    "minItems": "should have at least {} items",
    "maxItems": "should have at most {} items",
    "minProperties": "should have at least {} entries",
    "maxProperties": "should have at most {} entries",
    "uniqueItems": "should hold each item once",
    "const": "should be {}",
}


def _rule(code: str, rule: Any) -> str:
    """The rule of a keyword in words; the values come from the schema, and so from code."""
    if code == "type":
        types = [rule] if isinstance(rule, str) else list(rule)
        return "should be " + " or ".join(_TYPES.get(each, each) for each in types)
    if code == "enum":
        return f"should be one of {_listed(map(plain, rule))}"
    if code == "format":
        return f"should be {_FORMATS.get(rule, 'a ' + str(rule))}"
    return _RULES.get(code, "is not what the task takes").format(plain(rule))[:_MESSAGE_LIMIT]


def _listed(names: Iterable[str]) -> str:
    known = list(names)
    text = ", ".join(known[:_CHOICES_SHOWN]) or "none"
    return text[:_MESSAGE_LIMIT] + (" and more" if len(known) > _CHOICES_SHOWN or len(text) > _MESSAGE_LIMIT else "")
