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

from dataloader.pipelines.context import Context as Context
from dataloader.pipelines.context import PermanentError as PermanentError
from dataloader.pipelines.context import Progress as Progress
from dataloader.pipelines.context import Retry as Retry
from dataloader.pipelines.context import Stopped as Stopped
from dataloader.pipelines.forms import Steps as Steps
from dataloader.pipelines.forms import steps as steps
from dataloader.pipelines.hooks import Run as Run
from dataloader.pipelines.hooks import around_run as around_run
from dataloader.pipelines.hooks import last_words as last_words
from dataloader.pipelines.hooks import on_error as on_error
from dataloader.pipelines.hooks import on_farm_start as on_farm_start
from dataloader.pipelines.hooks import on_worker_start as on_worker_start
from dataloader.pipelines.registry import Pipeline as Pipeline
from dataloader.pipelines.registry import UnknownTask as UnknownTask
from dataloader.pipelines.registry import absent as absent
from dataloader.pipelines.registry import batch_size as batch_size
from dataloader.pipelines.registry import declarations as declarations
from dataloader.pipelines.registry import keeps_logs as keeps_logs
from dataloader.pipelines.registry import needs as needs
from dataloader.pipelines.registry import register as register
from dataloader.pipelines.registry import resolve as resolve
from dataloader.pipelines.registry import schedules as schedules
from dataloader.pipelines.registry import tasks as tasks
from dataloader.pipelines.registry import wants_context as wants_context
from dataloader.queue.hooks import around_enqueue as around_enqueue
from dataloader.queue.hooks import import_users as import_users

BUILT_IN = ("noop", "csv_file", "cbr", "llm", "webhook", "command", "postgres", "download", "parquet", "engines")

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


def validated(model: type[M], args: dict[str, Any]) -> M:
    """`args` as a pydantic model; raises PermanentError, which names each wrong argument and the right form."""
    try:
        return model.model_validate(args)
    except ValidationError as e:
        errors = e.errors(include_input=False, include_context=False, include_url=False)
        raise PermanentError("; ".join(_complaint(error, model) for error in errors)) from None


def _complaint(error: Any, model: type[BaseModel]) -> str:
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        known = "" if len(error["loc"]) > 1 else f"; there are {', '.join(model.model_fields)}"
        return f"{name[:63]}: there is no such argument{known}"
    return f"{name}: {error['msg'].removeprefix('Value error, ')}"
