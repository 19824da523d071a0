"""Names of queues and tasks as people type them: one that the farm does not know is refused, but for `--new`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import click

from dataloader.cli import base, screen
from dataloader.cli.connection import Reached
from dataloader.client import Forbidden, NotFound
from dataloader.exits import EXIT_FAILED
from dataloader.model.farm import Name

F = TypeVar("F", bound=Callable[..., Any])
TO_TAKE_IT = " (--new takes it all the same)"
_WHY = {"queue": "it has no job, no worker and no setting", "task": "no worker has shown it, and no job names it"}


def may_be_new(command: F) -> F:
    """The command, with the option that lets it take a name that the farm does not know: `is_new`."""
    help_text = "take a queue or a task that the farm does not know yet"
    return click.option("--new", "is_new", is_flag=True, help=help_text)(command)


def require(reached: Reached, is_new: bool | None = None, *, queue: str | None = None, task: str | None = None) -> None:
    """Refuse a queue or a task that the farm does not know, unless `is_new`; a missing name is not checked.

    `is_new` is None for a command without `--new`. Where the farm knows no name at all, it has not begun, and where
    the asker may not know (an older service, a role without the right), the farm itself has to judge.
    """
    if is_new or (queue is None and task is None):
        return
    for kind, known in _asked(reached, queue, task).items():
        if known and known.count and not known.is_known:
            base.refuse(_unknown(kind, known) + ("" if is_new is None else TO_TAKE_IT), EXIT_FAILED)


def hint(reached: Reached, *, queue: str | None = None, task: str | None = None) -> None:
    """Tell on stderr that a list is empty because the farm does not know these names."""
    if queue is None and task is None:
        return
    for kind, known in _asked(reached, queue, task).items():
        if known and not known.is_known:
            click.echo(f"dataloader: {_unknown(kind, known)}", err=True)


def _asked(reached: Reached, queue: str | None, task: str | None) -> dict[str, Name | None]:
    with suppress(NotFound, Forbidden):
        names = reached.farm.names(queue=queue, task=task)
        return {"queue": names.queue, "task": names.task}
    return {}


def _unknown(kind: str, known: Name) -> str:
    text = f"no {kind} {screen.short(known.name, 100)!r} is known: {_WHY[kind]}"
    similar = [screen.short(each, 100) for each in known.similar]
    return f"{text}. {base.did_you_mean(similar)}".removesuffix(".") if similar else text
