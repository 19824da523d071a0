"""Dead and retrying jobs in groups by their errors, and what people have written about a group.

The jobs of a group are requeued and deleted by the orders to its queue, which take `error_group` as a filter.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dataloader.model.runs import ErrorGroups, ErrorNote
from dataloader.ops.op import Call, Op, made
from dataloader.ops.types import Instant, Storable, Text
from dataloader.queue.reports import errors as of_errors


@Op(
    "GET /errors",
    command="errors list",
    columns="queue task dead retrying last=last_at group=error_group note",
    examples=("dataloader errors list -q etl.default --since 1d",),
)
def errors(
    call: Call,
    queue: Text | None = None,
    task: Text | None = None,
    since: Annotated[Instant, Field(description="failed then or later")] | None = None,
) -> ErrorGroups:
    """The groups of dead and retrying jobs, the largest first: up to 50 by queue, task and error group."""
    return made(ErrorGroups, of_errors.groups(call.conn, queue, task, since))


@Op(
    "PUT /errors/note",
    command="errors note NOTE",
    examples=("dataloader errors note --error-group 'OSError: No space left' --task load.csv 'the disk is full'",),
    done=lambda answer: "the note is written" if answer.note else "the note is removed",
)
def write_error_note(
    call: Call,
    task: Text,
    error_group: Text,
    note: Annotated[
        str,
        Field(max_length=of_errors.NOTE_MOST, description="for people; an empty one removes what is there"),
        Storable,
    ],
) -> ErrorNote:
    """Write a note about a group of a task, in the place of an earlier one; an empty note removes that."""
    of_errors.write_note(call.conn, task, error_group, note, call.by)
    return ErrorNote(task=task, error_group=error_group, note=note.strip() or None)
