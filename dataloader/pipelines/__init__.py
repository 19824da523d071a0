"""Pipelines: their registration, their lookup by task, and their run in steps.

A pipeline is a generator, a plain function, a coroutine function or an async generator. It takes `args` and, if it
has a second parameter, a Context. DL_PIPELINES names the users' modules of pipelines; each built-in pipeline is a
module of this package.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dataloader.pipelines.context import Context, PermanentError, Progress, Retry, Stopped
from dataloader.pipelines.forms import Steps, rest, steps
from dataloader.pipelines.hooks import Run, around_run, last_words, on_error, on_farm_start, on_worker_start
from dataloader.pipelines.registry import (
    Pipeline,
    UnknownTask,
    declarations,
    register,
    register_with,
    registered,
    resolve,
    tasks,
)
from dataloader.queue.hooks import around_enqueue, import_users

__all__ = ["Context", "PermanentError", "Pipeline", "Progress", "Retry", "Run", "Steps", "Stopped", "UnknownTask"]
__all__ += ["declarations", "register", "register_with", "registered", "resolve", "rest", "steps", "tasks"]
__all__ += ["around_enqueue", "around_run", "last_words", "on_error", "on_farm_start", "on_worker_start"]
__all__ += ["import_users"]

BUILT_IN = (
    "noop",
    "files",
    "cbr",
    "llm",
    "webhook",
    "command",
    "postgres",
    "database",
    "download",
    "engines",
)

M = TypeVar("M", bound=BaseModel)
FilePath = Annotated[str, Field(min_length=1, max_length=4_096, pattern=r"^[^\x00]+$")]


class Arguments(BaseModel):
    """The `args` of a built-in pipeline; it takes no others, and its errors show no values."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


def load(modules: Iterable[str]) -> None:
    """Import the built-in pipelines and the users' modules; an error of an import reaches the caller."""
    for name in BUILT_IN:
        importlib.import_module(f"{__name__}.{name}")
    for name in modules:
        import_users(name)


_SUCH_AS = {"list_type": ', such as ["a"]', "dict_type": ', such as {"a": "b"}'}


def validated(model: type[M], args: dict[str, Any]) -> M:
    """`args` as a pydantic model; raises PermanentError, which names each wrong argument and the right form."""
    faults = []
    try:
        return model.model_validate(args)
    except ValidationError as e:
        for error in e.errors(include_input=False, include_context=False, include_url=False):
            name, fault = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
            if error["type"] == "extra_forbidden":
                known = "" if len(error["loc"]) > 1 else f"; there are {', '.join(model.model_fields)}"
                name, fault = name[:63], f"there is no such argument{known}"
            fault += _SUCH_AS.get(error["type"], "")
            faults.append(f"{name}: {fault}")
    raise PermanentError("; ".join(faults))
