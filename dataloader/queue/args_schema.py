"""PURE: the JSON Schema of a task's args: how the queue keeps it, and the check of args by it.

Workers tell the queue the schemas of their pipelines (`operations.tell_tasks`, column `dl_tasks.args_schema`), so the
API and the command line check args without the pipelines. Their check is early help: the promise is the worker's own
look, by the model. A schema may come from whoever may write to the queue's tables, so it is read with care: only the
keywords in `_KEYWORDS` count, no `pattern` is tried, no `$ref` leads out of the schema, and a check that takes more
than STEPS steps ends without a fault. A step is some microseconds: a keyword that walks through values, compares them
or writes one into a message takes more of them.

Messages name the place and the rule; they never quote the args.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import date, datetime
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any
from uuid import UUID

from dataloader.log import masking

if TYPE_CHECKING:
    from jsonschema import ValidationError

SIZE_LIMIT = 65_536  # bytes of a schema; the column has the same bound
STEPS = 20_000  # keywords that the check of one job's args looks at
STEPS_AT_ONCE = 500_000  # the same of the jobs of one request
SCHEMA_STEPS = 300_000  # the same of the check of a schema itself, by the schema of schemas
FAULTS = 20  # of one job
UNIQUE_LIMIT = 1_000  # items that are compared with each other
_CHOICES_SHOWN = 20
_MESSAGE_LIMIT = 300
_NAMED = ("properties", "$defs", "definitions")  # keywords of which the keys are names, and no keywords
_SAMPLES = ("default", "examples", "example")
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)


class UnusableSchema(ValueError):
    """The text is no JSON Schema that can be checked; the text says why."""


@dataclass(frozen=True, slots=True)
class ArgFault:
    """One fault of args: the path to it, a code for programs, a text for people that holds no value."""

    path: tuple[str | int, ...]
    code: str
    message: str

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))[:100] or 'args'} {self.message}"


# --- the schema of a pipeline ---


def written(schema: Mapping[str, Any]) -> str:
    """The schema as the queue keeps it: without the defaults and examples of secrets, in ASCII.

    Raises ValueError for one of more than SIZE_LIMIT bytes.
    """
    text = json.dumps(_without_secrets(schema), separators=(",", ":"))
    if len(text) > SIZE_LIMIT:
        raise ValueError(f"its JSON Schema has {len(text)} bytes; it should have at most {SIZE_LIMIT}")
    return text


def _without_secrets(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_secrets(item) for item in schema]
    if not isinstance(schema, dict):
        return masking.masked(schema)
    return {
        name: {each: _of_name(each, item) for each, item in value.items()}
        if name in _NAMED and isinstance(value, dict)
        else masking.masked(value)
        if name in _SAMPLES
        else _without_secrets(value)
        for name, value in schema.items()
    }


def _of_name(name: str, schema: Any) -> Any:
    """The schema of a property, or of a definition, of this name."""
    if isinstance(schema, dict) and (masking.is_secret(name, "text") or schema.get("writeOnly")):
        schema = _without_samples(schema)
    return _without_secrets(schema)


def _without_samples(schema: Any) -> Any:
    """The schema of a secret: its choices and its items may have examples of their own."""
    if isinstance(schema, list):
        return [_without_samples(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        keyword: {name: _without_samples(item) for name, item in value.items()}
        if keyword in _NAMED and isinstance(value, dict)
        else _without_samples(value)
        for keyword, value in schema.items()
        if keyword not in _SAMPLES
    }


def read(text: str) -> dict[str, Any]:
    """The schema in a text of the queue; raises UnusableSchema."""
    return _checker(text).schema


# --- the check ---


def faults(text: str, args: Any, steps: int = STEPS) -> list[ArgFault]:
    """What is wrong with args by the schema in `text`, at most FAULTS; [] where it cannot tell.

    It cannot where the schema is none, or the check would take more than `steps` steps.
    """
    try:
        checker = _checker(text)
    except UnusableSchema:
        return []
    return checker.faults(args, steps)


class Allowance:
    """The steps that the jobs of one request share."""

    def __init__(self, steps: int = STEPS_AT_ONCE) -> None:
        self._left = steps

    def faults(self, text: str, args: Any) -> list[ArgFault]:
        """As `faults`, within what is left."""
        allowed = min(STEPS, self._left)
        left = [allowed]
        try:
            return _checker(text).faults(args, allowed, left)
        except UnusableSchema:
            return []
        finally:
            self._left -= allowed - max(left[0], 0)


class _Exhausted(Exception):
    """The check has taken its steps."""


_steps_left: ContextVar[list[int]] = ContextVar("steps_left")
_Keyword = Callable[[Any, Any, Any, Any], Iterable[Any] | None]


def _spend(steps: int) -> None:
    left = _steps_left.get()
    left[0] -= steps
    if left[0] < 0:
        raise _Exhausted


class _Checker:
    """A schema that can be checked."""

    def __init__(self, schema: dict[str, Any]) -> None:
        from referencing import Registry  # without a way to fetch anything

        self.schema = schema
        self._validator = _validator_class()(schema, registry=Registry(), format_checker=_formats())

    def faults(self, args: Any, steps: int, left: list[int] | None = None) -> list[ArgFault]:
        from referencing.exceptions import Unresolvable

        token = _steps_left.set(left or [steps])
        found: dict[ArgFault, None] = {}  # the library names an object once for each name that it lacks
        try:
            for error in self._validator.iter_errors(args):
                found |= dict.fromkeys(islice(_told(error, ()), FAULTS))
                if len(found) >= FAULTS:
                    break
        except (_Exhausted, RecursionError, Unresolvable, ArithmeticError):
            pass  # the worker looks with the model itself
        finally:
            _steps_left.reset(token)
        return [*found][:FAULTS]


def _checker(text: str) -> _Checker:
    found = _known_checker(text)
    if isinstance(found, str):
        raise UnusableSchema(found)
    return found


@lru_cache(maxsize=256)
def _known_checker(text: str) -> _Checker | str:
    """The checker of a schema, or why it has none, which is as costly to find out."""
    try:
        return _Checker(_schema(text))
    except UnusableSchema as e:
        return str(e)


def _schema(text: str) -> dict[str, Any]:
    try:
        if len(text) > SIZE_LIMIT:
            raise UnusableSchema(f"it has more than {SIZE_LIMIT} bytes")
        schema = json.loads(text, parse_constant=_refuse)
        _check_schema(schema)
    except (ValueError, RecursionError) as e:
        raise UnusableSchema(str(e)[:200] if isinstance(e, UnusableSchema) else "it is no JSON") from None
    if not isinstance(schema, dict):
        raise UnusableSchema("it should be a JSON object")
    # To find a place by its name, the library reads the whole schema for each reference.
    if away := next((ref for ref in _references(schema) if ref != "#" and not ref.startswith("#/")), None):
        raise UnusableSchema(f"a $ref should lead into the schema itself, not to {away[:100]}")
    return schema


def _refuse(constant: str) -> Any:
    raise ValueError(constant)  # NaN and Infinity, which are no JSON


def _check_schema(schema: Any) -> None:
    """Raise UnusableSchema for what is no JSON Schema, or takes more than SCHEMA_STEPS to be told from one."""
    from jsonschema import Draft202012Validator

    token = _steps_left.set([SCHEMA_STEPS])
    try:
        error = next(_validator_class(of_schemas=True)(Draft202012Validator.META_SCHEMA).iter_errors(schema), None)
    except _Exhausted:
        raise UnusableSchema("it has too many parts to be checked") from None
    finally:
        _steps_left.reset(token)
    if error is not None:
        raise UnusableSchema(f"it is no JSON Schema at /{'/'.join(map(str, error.absolute_path))}"[:200])


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
    from jsonschema import Draft202012Validator, validators

    known: dict[str, _Keyword] = dict(Draft202012Validator.VALIDATORS)
    own = {
        "additionalProperties": _additional(known["additionalProperties"]),
        "uniqueItems": _unique(known["uniqueItems"]),
    }
    keywords = {name: _counted(name, (known | own)[name]) for name in (known if of_schemas else _KEYWORDS)}
    made: Any = validators.create(
        Draft202012Validator.META_SCHEMA, keywords, type_checker=Draft202012Validator.TYPE_CHECKER
    )
    made.evolve = _evolve(made)
    return made


def _evolve(of_class: Any) -> Callable[..., Any]:
    """How a validator becomes that of a part of its schema.

    The library's own way takes another class where the part has a `$schema`: one that tries `pattern` and counts no
    step.
    """
    from attrs import fields

    given = [(field.alias or field.name, field.name) for field in fields(of_class) if field.init]

    def evolved(validator: Any, **changes: Any) -> Any:
        return of_class(**({name: getattr(validator, attribute) for name, attribute in given} | changes))

    return evolved


_KEYWORDS = (
    *("$ref", "type", "enum", "const", "properties", "required", "additionalProperties", "minProperties"),
    *("maxProperties", "items", "prefixItems", "minItems", "maxItems", "uniqueItems", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format", "anyOf", "oneOf", "allOf"),
)


def _counted(name: str, keyword: _Keyword) -> _Keyword:
    """The keyword with its steps: one, and more for what it goes through and for each message that it writes."""

    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        _spend(_steps_of(name, value, instance))
        for error in keyword(validator, value, instance, schema) or ():
            if not isinstance(error.validator, str):  # its own, and its text quotes the value; others are told already
                _spend(len(error.message) // 1_000)
            yield error

    return counted


def _steps_of(name: str, value: Any, instance: Any) -> int:
    if name in ("const", "enum"):
        return 1 + len(repr(value)) // 20  # they are compared to their depth
    steps = 1 + (len(value) if isinstance(value, list | dict) else 0)
    if name in ("items", "additionalProperties") and isinstance(instance, list | dict):
        steps += len(instance) // 8  # an item costs a little where its schema says nothing
    return steps


def _additional(keyword: _Keyword) -> _Keyword:
    """`additionalProperties`, which says nothing where patterns, which are not tried, decide what is additional."""

    def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterable[Any] | None:
        return None if "patternProperties" in schema else keyword(validator, value, instance, schema)

    return checked


def _unique(keyword: _Keyword) -> _Keyword:
    """`uniqueItems`, of lists that are short enough to compare all items."""

    def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterable[Any] | None:
        if not isinstance(instance, list) or len(instance) > UNIQUE_LIMIT:
            return None
        _spend(len(instance) ** 2 // 100 + len(instance) * len(repr(instance)) // 1_000)
        return keyword(validator, value, instance, schema)

    return checked


@lru_cache(maxsize=1)
def _formats() -> Any:
    """The formats that are checked: what they refuse pydantic refuses too."""
    from jsonschema import FormatChecker

    formats = FormatChecker(formats=())
    for name, parse in (("date", _date), ("date-time", _date_time), ("uuid", UUID)):
        formats.checks(name, raises=ValueError)(_of_text(parse))
    return formats


def _of_text(parse: Callable[[str], Any]) -> Callable[[object], bool]:
    def is_right(value: object) -> bool:
        if isinstance(value, str):
            parse(value)
        return True

    return is_right


def _date(text: str) -> None:
    if not _DATE.fullmatch(text):
        raise ValueError
    date.fromisoformat(text)


def _date_time(text: str) -> None:
    if not text.isdigit():  # seconds since 1970, which pydantic takes
        datetime.fromisoformat(text.upper())


# --- its words ---


def _told(error: ValidationError, before: tuple[str | int, ...]) -> Iterator[ArgFault]:
    """An error of the library in our words, which quote no value."""
    path, code, rule = (*before, *error.relative_path), str(error.validator), error.validator_value
    if code in ("anyOf", "oneOf"):
        yield from _of_choice(error, path)
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


def _of_choice(error: ValidationError, path: tuple[str | int, ...]) -> Iterator[ArgFault]:
    """Of the choices the first that has the right type says what is wrong, else all say what they are."""
    choices: dict[Any, list[ValidationError]] = {}
    for each in error.context or ():
        choices.setdefault(each.relative_schema_path[0], []).append(each)
    fit = [found for found in choices.values() if not _is_of_other_type(found)]
    if fit:
        for each in fit[0]:
            yield from _told(each, path)
        return
    types = [_rule("type", each.validator_value) for found in choices.values() for each in found[:1]]
    words = dict.fromkeys(text.removeprefix("should be ") for text in types)
    yield ArgFault(
        path, str(error.validator), f"should be {' or '.join(words)}" if words else "should be one of its choices only"
    )


def _is_of_other_type(found: Sequence[ValidationError]) -> bool:
    return any(error.validator == "type" and not error.relative_path for error in found)


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
    """What a keyword of a schema asks for; its values are of the schema, and so of code."""
    if code == "type":
        types = [rule] if isinstance(rule, str) else list(rule)
        return "should be " + " or ".join(_TYPES.get(each, each) for each in types)
    if code == "enum":
        return f"should be one of {_listed(map(_plain, rule))}"
    if code == "format":
        return f"should be {_FORMATS.get(rule, 'a ' + str(rule))}"
    return _RULES.get(code, "is not what the task takes").format(_plain(rule))[:_MESSAGE_LIMIT]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _listed(names: Iterable[str]) -> str:
    known = list(names)
    text = ", ".join(known[:_CHOICES_SHOWN]) or "none"
    return text[:_MESSAGE_LIMIT] + (" and more" if len(known) > _CHOICES_SHOWN or len(text) > _MESSAGE_LIMIT else "")
