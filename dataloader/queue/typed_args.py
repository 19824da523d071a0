"""PURE: args as an instance of the pipeline's model, as the JSON object that a job keeps; without pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Model(Protocol):
    """A pydantic model, as far as `plain` asks it."""

    def model_dump(self, *, mode: str, by_alias: bool) -> dict[str, Any]: ...


def plain(args: Any) -> Any:
    """A mapping, or a pydantic model by its aliases with its secrets, as a dict; anything else as it is."""
    if not hasattr(args, "model_dump"):
        return dict(args) if isinstance(args, Mapping) else args
    return _revealed(args.model_dump(mode="json", by_alias=True), args.model_dump(by_alias=True))


def _revealed(written: Any, value: Any) -> Any:
    """The JSON of a value with what pydantic hides in it: a Secret is written as stars."""
    if hasattr(value, "get_secret_value"):
        return value.get_secret_value()
    if isinstance(written, dict) and isinstance(value, Mapping):
        return {name: _revealed(written[name], each) for name, each in zip(written, value.values(), strict=True)}
    if isinstance(written, list) and isinstance(value, list | tuple):
        return [_revealed(*each) for each in zip(written, value, strict=True)]
    return written
