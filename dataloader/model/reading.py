"""PURE: a JSON document as a value of an answer's type, as the clients read it, and back."""

from __future__ import annotations

import types
from dataclasses import MISSING, fields, is_dataclass
from datetime import datetime
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from uuid import UUID

R = TypeVar("R")


def written(answer: Any) -> Any:
    """An answer as dicts and lists; instants, ids and numbers stay what they are.

    A field whose default is None is left out where it is None.
    """
    if isinstance(answer, list):  # not deeper: what a pipeline wrote may be nested as deep as the table allows
        return [written(each) if is_dataclass(each) else each for each in answer]
    if not is_dataclass(answer):
        return answer
    given = {each.name: (getattr(answer, each.name), each.default) for each in fields(answer)}
    return {name: written(value) for name, (value, usual) in given.items() if not (value is None and usual is None)}


class NotUnderstood(ValueError):
    """The document is no value of the type; the text names the field, and quotes no value."""


def read(kind: type[R], document: Any) -> R:
    """`document` as a value of `kind`; raises NotUnderstood.

    Fields that the type does not know are left out: a newer service has added them. A field that an older service does
    not have is None, or its default, where its type allows that.
    """
    value: R = _value(kind, document, kind.__name__)
    return value


def _value(wanted: Any, value: Any, name: str) -> Any:
    origin, args = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        kinds = [kind for kind in args if kind is not type(None)]
        return _value(kinds[0], value, name) if len(kinds) == 1 else value
    if origin is Literal:
        return _plain(type(args[0]), value, name)  # a newer service may know more words
    if is_dataclass(wanted):
        return _answer(wanted, value, name)
    if origin is list and isinstance(value, list):
        return [_value(args[0], each, name) for each in value]
    if origin is dict and isinstance(value, dict):
        return {key: _value(args[1], each, name) for key, each in value.items()}
    return _plain(origin or wanted, value, name)


def _plain(kind: Any, value: Any, name: str) -> Any:
    try:
        if kind is UUID or kind is datetime:
            return UUID(value) if kind is UUID else datetime.fromisoformat(value)
        if kind is float and isinstance(value, int):
            return float(value)
    except (TypeError, ValueError, AttributeError):
        raise NotUnderstood(f"{name}: it is of another kind") from None
    if not isinstance(value, kind):
        raise NotUnderstood(f"{name}: it is of another kind")
    return value


def _answer(kind: Any, document: Any, name: str) -> Any:
    if not isinstance(document, dict):
        raise NotUnderstood(f"{name}: it should be an object")
    given = {}
    for each in fields(kind):
        wanted = _hints(kind)[each.name]
        if each.name in document:
            given[each.name] = _value(wanted, document[each.name], each.name)
        elif each.default is MISSING and each.default_factory is MISSING:
            if not (wanted is Any or type(None) in get_args(wanted)):
                raise NotUnderstood(f"{name}: {each.name} is missing")
            given[each.name] = None
    return kind(**given)


_hints = cache(get_type_hints)
