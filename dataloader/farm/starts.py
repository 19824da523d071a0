"""A worker process imports users' modules and calls their hooks before its first claim, and at its death. No SQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dataloader import pipelines
from dataloader.config import Settings
from dataloader.farm.failures import headline
from dataloader.farm.runner import tell
from dataloader.pipelines import hooks
from dataloader.queue.hooks import Hook, identity

TURN_SEC = 0.1  # between two looks of a worker that waits for on_farm_start in another one


class CannotStart(Exception):
    """A users' module or hook keeps this worker from starting. The log has it; its cause is their exception."""


def load(settings: Settings, log: Any, explains: bool) -> None:
    """Import the modules of DL_HOOKS and DL_PIPELINES; raises CannotStart. `explains`: log the stack of an error."""
    try:
        pipelines.load([*settings.hook_modules, *settings.pipeline_modules])
    except BaseException as e:
        log.error("worker.pipelines.failed", error=headline(e), **_at_length(e, explains))
        raise CannotStart from e


def call(hook: Hook, log: Any, explains: bool) -> None:
    """Call the functions of a hook at a start; raises CannotStart at the first that fails."""
    for function in hook:
        try:
            function()
        except BaseException as e:
            seen = {"hook": hook.name, "function": identity(function), "error": headline(e)}
            log.error("hook.failed", **seen, **_at_length(e, explains))
            raise CannotStart from e


@contextmanager
def last_words() -> Iterator[None]:
    """Call the functions of the hook `last_words` with the exception that ends the block, if one does."""
    try:
        yield
    except BaseException as e:
        tell(hooks.LAST_WORDS, e.__cause__ if isinstance(e, CannotStart) else e)
        raise


def _at_length(error: BaseException, explains: bool) -> dict[str, BaseException]:
    return {"exc_info": error} if explains else {}
