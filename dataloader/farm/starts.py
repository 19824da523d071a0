"""A worker process imports users' modules and calls their hooks before its first claim, and at its death. No SQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dataloader import pipelines
from dataloader.config import Settings
from dataloader.farm.failures import headline, own_stack
from dataloader.farm.runner import call_hook
from dataloader.farm.slots import Slot
from dataloader.pipelines import hooks
from dataloader.pipelines.children import own_process
from dataloader.queue.hooks import Hook, identity

TURN_SEC = 0.1  # between two looks of a worker that waits for on_farm_start in another one


class CannotStart(Exception):
    """A users' module or hook keeps this worker from starting. The log has it; its cause is their exception."""


class Report:
    """The errors of a start, each logged once for the farm."""

    def __init__(self, log: Any, is_first: Callable[[str], bool], slot: Slot) -> None:
        """`is_first`: whether no worker of the farm has asked about this text since the start or the reload.

        The supervisor reads in `slot` which code the worker calls: it may end the process without an exception.
        """
        self._log, self._is_first, self._slot = log, is_first, slot

    def begins(self, call: str) -> None:
        """The worker calls this code of the user's next; "": it has returned."""
        self._slot.calling = call.encode()[:199]

    def failed(self, event: str, error: BaseException, **seen: str) -> None:
        """Log the error with the user's frames; again it is a debug line."""
        head = headline(error)
        write = self._log.error if self._is_first(f"{event} {seen} {head}") else self._log.debug
        write(event, **seen, error=head, exception=own_stack(error))


def load(settings: Settings, report: Report) -> None:
    """Import the modules of DL_HOOKS and DL_PIPELINES; raises CannotStart. `report` has the error."""
    try:
        with own_process():
            pipelines.load(())
            for module in (*settings.hook_modules, *settings.pipeline_modules):
                report.begins(f"import of {module}")
                pipelines.import_users(module)
            report.begins("")
    except BaseException as e:
        report.failed("worker.pipelines.failed", e)
        raise CannotStart from e


def call(hook: Hook, report: Report) -> None:
    """Call the functions of a hook at a start; raises CannotStart at the first that fails."""
    for function in hook:
        report.begins(f"{hook.name} {identity(function)}")
        try:
            with own_process():
                function()
        except BaseException as e:
            report.failed("hook.failed", e, hook=hook.name, function=identity(function))
            raise CannotStart from e
    report.begins("")


@contextmanager
def last_words() -> Iterator[None]:
    """Call the functions of the hook `last_words` with the exception that ends the block, if one does."""
    try:
        yield
    except BaseException as e:
        call_hook(hooks.LAST_WORDS, e.__cause__ if isinstance(e, CannotStart) else e)
        raise
