"""PURE: the checks of what askers send: the guards on JSON, and the models of parameters; a Problem names each fault.

JSON holds only what PostgreSQL can store and a worker can read; a fault has a JSON pointer to its place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dataloader.model.farm import Fault
from dataloader.ops.errors import Problem, invalid
from dataloader.ops.types import UNSTORABLE
from dataloader.queue.new_job import DEPTH_LIMIT, FAULTS_SHOWN, NUL_IN_JSON, is_deep

BODY_LIMIT = 256 * 1024  # bytes; in a batch, of each job's args
KEYS_LIMIT = 600_000  # of a body: so many, if unknown, take 130 MB
WALKED = 500_000  # values in which the place of a fault is looked for
DIGITS_LIMIT = 4_300  # of one integer; Python, and so a worker, reads no longer one
_POINTER_LIMIT = 200
_KEY = re.compile(rb'(?<!\\)"\s*:')  # and no text of JSON within a text
M = TypeVar("M", bound=BaseModel)


def document(raw: bytes, depth: int = DEPTH_LIMIT) -> dict[str, Any]:
    """The JSON object in `raw`, holding only what PostgreSQL can store and a worker can read.

    Raises a 400 Problem for anything else: bytes that are not UTF-8, no object, a key twice in one object,
    NUL and lone surrogates, numbers that are not finite or too long, nesting beyond `depth`.
    """
    if not raw:
        raise invalid("", "empty", "the body should be a JSON object; it is empty")
    if raw.count(b":") > KEYS_LIMIT and sum(1 for _ in _KEY.finditer(raw)) > KEYS_LIMIT:
        raise invalid("", "too_many_keys", f"the objects in the body should have at most {KEYS_LIMIT:,} keys")
    value = _at_once(raw, depth) or _plain(_decoded(raw, depth), [], depth, count())
    if not isinstance(value, dict):
        raise invalid("", "object_type", "the body should be a JSON object")
    return value


def _at_once(raw: bytes, depth: int) -> Any:
    """The JSON in `raw` where a quick check finds no fault, else None; much faster than _plain."""
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_without_twins, parse_float=_finite, parse_constant=_finite)
        if b"\\u0000" in raw or b"\\ud" in raw or b"\\uD" in raw:  # an emoji may be written as two surrogates
            text = json.dumps(value, ensure_ascii=False)
            if UNSTORABLE.search(text) or NUL_IN_JSON.search(text):
                return None
        return None if is_deep(value, depth) else value
    except (ValueError, RecursionError):
        return None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError
    return members


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError
    return number


class _Pairs(list[tuple[str, Any]]):
    """An object as it was written, with keys that occur twice."""


def _decoded(raw: bytes, depth: int) -> Any:
    try:
        # An integer that is too long becomes infinite, which _plain refuses.
        return json.loads(
            raw.decode(), object_pairs_hook=_Pairs, parse_int=lambda d: int(d) if len(d) <= DIGITS_LIMIT else math.inf
        )
    except UnicodeDecodeError:
        raise invalid("", "utf8", "the body should be JSON in UTF-8") from None
    except json.JSONDecodeError as e:
        where = f"line {e.lineno}, column {e.colno}"
        raise invalid("", "json", f"the body should be JSON; it is not from {where} on") from None
    except RecursionError:
        raise _too_deep([], depth) from None


def _plain(value: Any, path: list[str | int], depth: int, walked: Iterator[int]) -> Any:
    """`value` with dicts for _Pairs. `path` leads to it; the function changes `path` in place, which is cheap."""
    if next(walked) == WALKED:
        raise invalid("", "fault", f"the body should be sound JSON; behind its first {WALKED:,} values it is not")
    if isinstance(value, list) and len(path) >= depth:
        raise _too_deep(path, depth)
    if isinstance(value, list):
        items: dict[str | int, Any] = {}
        is_object = isinstance(value, _Pairs)
        steps: Iterable[tuple[Any, Any]] = value if is_object else enumerate(value)
        for step, item in steps:
            path.append(step)
            if is_object:
                _check_text(step, path)
            if step in items:
                raise invalid(pointer(path), "duplicate_key", "a key should occur once in an object")
            items[step] = _plain(item, path, depth, walked)
            path.pop()
        return items if is_object else list(items.values())
    if isinstance(value, str):
        _check_text(value, path)
    if isinstance(value, float) and not math.isfinite(value):
        raise invalid(pointer(path), "number", f"should be a finite number of at most {DIGITS_LIMIT} digits")
    return value


def _check_text(text: str, path: list[str | int]) -> None:
    if UNSTORABLE.search(text):
        raise invalid(pointer(path), "unstorable_text", "text should hold no U+0000 and no lone surrogate")


def _too_deep(path: list[str | int], depth: int) -> Problem:
    return invalid(pointer(path), "too_deep", f"objects and arrays should be nested at most {depth} deep")


def pointer(path: list[str | int] | tuple[str | int, ...]) -> str:
    """`path` as a JSON pointer (RFC 6901), shortened and made storable."""
    text = "".join("/" + str(step)[:_POINTER_LIMIT].replace("~", "~0").replace("/", "~1") for step in path)
    return UNSTORABLE.sub("\ufffd", text[:_POINTER_LIMIT])


def validated(model: type[M], document: dict[str, Any], noun: str = "field") -> M:
    """`document` as a value of `model`; raises a 400 Problem that names each `noun` that is not valid."""
    try:
        return model.model_validate(document)
    except ValidationError as e:
        raise refusal(e.errors(include_url=False, include_context=False, include_input=False), model, noun) from None


def refusal(errors: Sequence[ErrorDetails], model: type[BaseModel], noun: str, path: tuple[str, ...] = ()) -> Problem:
    """The 400 Problem of pydantic's faults in the part of a body to which `path` leads."""
    unknown = f"This {noun} is not known; the {noun}s are: {', '.join(model.model_fields) or 'none'}"
    faults = [
        Fault(
            pointer=pointer((*path, *error["loc"])),
            code=error["type"],
            message=unknown if error["type"] == "extra_forbidden" else error["msg"],
        )
        for error in errors[:FAULTS_SHOWN]
    ]
    more = "more than " if len(errors) > FAULTS_SHOWN else ""
    fields = f"one {noun} is" if len(errors) == 1 else f"{more}{len(faults)} {noun}s are"
    return Problem(400, f"{fields} not valid, see errors", faults)
