"""PURE: the checks of what askers send: the guards on JSON, and the models of parameters; a Problem names each fault.

JSON holds only what PostgreSQL can store and a worker can read.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dataloader.model.farm import Fault
from dataloader.ops.errors import Problem, invalid
from dataloader.ops.types import UNSTORABLE
from dataloader.queue.new_job import DEPTH_LIMIT, FAULTS_SHOWN, NUL_IN_JSON, is_deep

BODY_LIMIT = 256 * 1024  # bytes; in a batch, of each job's args
KEYS_LIMIT = 600_000  # of a body; so many different keys take 130 MB
_POINTER_LIMIT = 200
_KEY = re.compile(rb'(?<!\\)"\s*:')  # the end of a key, but not of one in a text that holds JSON itself
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
    too_deep = f"objects and arrays should be nested at most {depth} deep"
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_object, parse_float=_finite, parse_constant=_finite)
    except UnicodeDecodeError:
        raise invalid("", "utf8", "the body should be JSON in UTF-8") from None
    except json.JSONDecodeError as e:
        where = f"line {e.lineno}, column {e.colno}"
        raise invalid("", "json", f"the body should be JSON; it is not from {where} on") from None
    except ValueError:  # of _finite, or of an integer that Python, and so a worker, does not read
        message = "each number should be finite, and each integer have at most 4,300 digits"
        raise invalid("", "number", message) from None
    except RecursionError:
        raise invalid("", "too_deep", too_deep) from None
    if not isinstance(value, dict):
        raise invalid("", "object_type", "the body should be a JSON object")
    if is_deep(value, depth):
        raise invalid("", "too_deep", too_deep)
    if b"\\u0000" in raw or b"\\ud" in raw or b"\\uD" in raw:  # an emoji may be written as two surrogates
        text = json.dumps(value, ensure_ascii=False)
        if UNSTORABLE.search(text) or NUL_IN_JSON.search(text):
            message = "text should hold no U+0000 and no lone surrogate"
            raise invalid(pointer(_place(value) or ()), "unstorable_text", message)
    return value


def _place(value: Any) -> tuple[str | int, ...] | None:
    """The path to the first text or key in a JSON value that PostgreSQL cannot store; None if there is none."""
    if isinstance(value, str):
        return () if UNSTORABLE.search(value) else None
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, item in steps:
        if isinstance(step, str) and UNSTORABLE.search(step):
            return (step,)
        if isinstance(item, str | dict | list) and (rest := _place(item)) is not None:
            return (step, *rest)
    return None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise invalid("", "duplicate_key", f"the key {pointer([name])[1:]} should occur once in its object")
    return members


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError
    return number


def pointer(path: Sequence[str | int]) -> str:
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
