"""The answers of the service as frozen values. A field that a newer service adds stands in `document`."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from dataloader.client.errors import Unexpected

R = TypeVar("R")
Document = Mapping[str, Any]
FINAL = frozenset({"succeeded", "failed", "canceled", "lost"})


@dataclass(frozen=True, slots=True)
class Started:
    """A triggered job and its status, which is not always `queued`: the idempotency key may have been known."""

    job_id: UUID
    status: str
    document: Document = field(default_factory=dict, repr=False, compare=False)


def read(kind: type[R], document: Any) -> R:
    """`document` as a value of `kind`; raises Unexpected where it does not fit."""
    if not isinstance(document, dict):
        raise _not_understood(kind.__name__, "it should be an object")
    given: dict[str, Any] = {"document": document}
    for name, wanted, is_required in _wanted(kind):  # type: ignore[arg-type]
        if name in document:
            given[name] = _value(wanted, document[name], name)
        elif is_required:
            raise _not_understood(kind.__name__, f"{name} is missing")
    return kind(**given)


def read_all(kind: type[R], document: Any, name: str) -> list[R]:
    """The list `name` of `document`, as values of `kind`; raises Unexpected where it does not fit."""
    listed = document.get(name) if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise _not_understood(name, "it should be a list")
    return [read(kind, each) for each in listed]


@cache
def _wanted(kind: Any) -> list[tuple[str, Any, bool]]:
    hints = get_type_hints(kind)
    return [
        (each.name, hints[each.name], each.default is MISSING and each.default_factory is MISSING)
        for each in fields(kind)
        if each.name != "document"
    ]


def _value(wanted: Any, value: Any, name: str) -> Any:
    """`value` as the type in the annotation `wanted`."""
    if wanted is Any:
        return value
    kinds = get_args(wanted) if get_origin(wanted) in (Union, types.UnionType) else (wanted,)
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0]
    try:
        if get_origin(kind) is tuple:
            each_kind = get_args(kind)[0]
            if each_kind is datetime:
                return tuple(map(datetime.fromisoformat, value))
            if each_kind in (str, int):
                return tuple(map(each_kind, value))
            return tuple(read(each_kind, each) for each in value)
        if kind in (UUID, datetime):
            return UUID(value) if kind is UUID else datetime.fromisoformat(value)
        if kind is float:
            return float(value)
    except (TypeError, ValueError, AttributeError):
        raise _not_understood(name, "it is of another kind") from None
    if not isinstance(value, get_origin(kind) or kind):
        raise _not_understood(name, "it is of another kind")
    return value


def _not_understood(what: str, why: str) -> Unexpected:
    return Unexpected("The answer is not understood", f"{what}: {why}")
