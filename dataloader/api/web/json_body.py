"""Read the JSON of bodies, name their faults, and write the JSON of answers.

A body is refused if PostgreSQL cannot store it or a worker cannot read it. A fault has a JSON pointer to its place.
"""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime
from typing import Any, TypeVar

from flask.json.provider import DefaultJSONProvider
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dataloader.api.web.problems import Fault, Problem, invalid
from dataloader.queue.new_job import DEPTH_LIMIT, FAULTS_SHOWN, is_deep

BODY_LIMIT = 256 * 1024  # bytes; in a batch, of each job's args
DIGITS_LIMIT = 4_300  # of one integer; Python, and so a worker, cannot read a longer one
UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
PRINTABLE = "^[^\\u0000-\\u001f\\u007f-\\u009f]*$"  # text without control characters, as a pattern of JSON Schema
_POINTER_LIMIT = 200
M = TypeVar("M", bound=BaseModel)


def document(raw: bytes, depth: int = DEPTH_LIMIT) -> dict[str, Any]:
    """The JSON object in `raw`, holding only what PostgreSQL can store and a worker can read.

    Raises a 400 Problem for anything else: bytes that are not UTF-8, no object, a key twice in one object,
    NUL and lone surrogates, numbers that are not finite or too long, nesting beyond `depth`.
    """
    if not raw:
        raise invalid("", "empty", "the body should be a JSON object; it is empty")
    value = _parsed_fast(raw, depth) or _checked(_parsed(raw, depth), [], depth)
    if not isinstance(value, dict):
        raise invalid("", "object_type", "the body should be a JSON object")
    return value


def _parsed_fast(raw: bytes, depth: int) -> Any:
    """The JSON in `raw` if a quick check finds no fault, else None; much faster than _checked."""
    if b"\\u0000" in raw or b"\\ud" in raw or b"\\uD" in raw:
        return None
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
        return None if is_deep(value, depth) else value
    except (ValueError, RecursionError):
        return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError
    return unique


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError
    return number


class _Pairs(list[tuple[str, Any]]):
    """The pairs of a JSON object, with duplicate keys."""


def _parsed(raw: bytes, depth: int) -> Any:
    try:
        return json.loads(raw.decode(), object_pairs_hook=_Pairs, parse_int=_integer)
    except UnicodeDecodeError:
        raise invalid("", "utf8", "the body should be JSON in UTF-8") from None
    except json.JSONDecodeError as e:
        place = f"line {e.lineno}, column {e.colno}"
        raise invalid("", "json", f"the body should be JSON; its first fault is at {place}") from None
    except RecursionError:
        raise _too_deep([], depth) from None


def _integer(digits: str) -> float | int:
    return int(digits) if len(digits) <= DIGITS_LIMIT else math.inf


def _checked(value: Any, path: list[str | int], depth: int) -> Any:
    """`value` with a dict for each _Pairs. `path` is its place; it is changed in place, to save time."""
    if isinstance(value, list) and len(path) >= depth:
        raise _too_deep(path, depth)
    if isinstance(value, _Pairs):
        return _checked_object(value, path, depth)
    if isinstance(value, list):
        return [_checked_item(path, index, item, depth) for index, item in enumerate(value)]
    if isinstance(value, str):
        _check_text(value, path)
    if isinstance(value, float) and not math.isfinite(value):
        raise invalid(pointer(path), "number", f"should be a finite number of at most {DIGITS_LIMIT} digits")
    return value


def _checked_object(pairs: _Pairs, path: list[str | int], depth: int) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for key, item in pairs:
        _check_text(key, [*path, key])
        if key in checked:
            raise invalid(pointer([*path, key]), "duplicate_key", "a key should occur once in an object")
        checked[key] = _checked_item(path, key, item, depth)
    return checked


def _checked_item(path: list[str | int], step: str | int, item: Any, depth: int) -> Any:
    path.append(step)
    checked = _checked(item, path, depth)
    path.pop()
    return checked


def _check_text(text: str, path: list[str | int]) -> None:
    if UNSTORABLE.search(text):
        raise invalid(pointer(path), "unstorable_text", "text should hold no U+0000 and no lone surrogate")


def _too_deep(path: list[str | int], depth: int) -> Problem:
    message = f"objects and arrays should be nested at most {depth} deep"
    return invalid(pointer(path), "too_deep", message)


def pointer(path: list[str | int] | tuple[str | int, ...]) -> str:
    """`path` as a JSON pointer (RFC 6901), shortened and made storable."""
    text = "".join("/" + str(step)[:_POINTER_LIMIT].replace("~", "~0").replace("/", "~1") for step in path)
    return UNSTORABLE.sub("\ufffd", text[:_POINTER_LIMIT])


def validated(model: type[M], document: dict[str, Any], noun: str = "field") -> M:
    """`document` as a value of `model`; raises a 400 Problem that names each `noun` that is not valid."""
    try:
        return model.model_validate(document)
    except ValidationError as e:
        raise refusal(e, model, noun) from None


def refusal(error: ValidationError, model: type[BaseModel], noun: str, path: tuple[str, ...] = ()) -> Problem:
    """A 400 Problem with the errors of pydantic; `path` is the place of the value in the body."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    faults = [_fault(each, model, noun, path) for each in errors[:FAULTS_SHOWN]]
    count = f"one {noun} is" if len(errors) == 1 else f"{len(errors)} {noun}s are"
    return Problem(400, f"{count} not valid, see errors", faults)


def _fault(error: ErrorDetails, model: type[BaseModel], noun: str, path: tuple[str, ...]) -> Fault:
    message = error["msg"]
    if error["type"] == "extra_forbidden":
        known = ", ".join(model.model_fields) or "none"
        message = f"This {noun} is not known; the {noun}s are: {known}"
    return Fault(pointer((*path, *error["loc"])), error["type"], message)


class Json(DefaultJSONProvider):
    """The JSON of answers: fields in their order, instants as RFC 3339 in UTC."""

    sort_keys = False

    @staticmethod
    def default(value: Any) -> Any:
        """The JSON of other types: an instant as RFC 3339; UUID, Decimal and more as Flask writes them."""
        if isinstance(value, datetime):
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        return DefaultJSONProvider.default(value)
