"""/api/v1/errors: dead and retrying jobs in groups by their errors, and what people have written about a group.

The jobs of a group are requeued and deleted by the orders to its queue, which take `error_group` as a filter.
"""

from __future__ import annotations

from typing import Any

from flask import Blueprint, g

from dataloader.api.v1 import requests
from dataloader.api.web import auth
from dataloader.api.web.endpoint import operation, session
from dataloader.model.runs import ErrorGroups, ErrorNote
from dataloader.queue.reports import errors

blueprint = Blueprint("errors", __name__, url_prefix="/api/v1/errors")


@blueprint.get("")
@auth.require("read")
@operation("errors", ErrorGroups, query=requests.Errors)
def list_errors(query: requests.Errors) -> dict[str, Any]:
    """The groups of dead and retrying jobs, the largest first: up to 100 by queue, task and error group."""
    with session() as conn:
        found = errors.groups(conn, query.queue, query.task, query.since)
    return {"groups": found.groups, "is_cut": found.is_cut}


@blueprint.put("/note")
@auth.require("operate")
@operation("errors", ErrorNote, body=requests.ErrorNoteSet, query=requests.Query)
def note_error(body: requests.ErrorNoteSet) -> dict[str, Any]:
    """Write a note about a group of a task, in the place of an earlier one; an empty note removes that."""
    with session() as conn:
        errors.write_note(conn, body.task, body.error_group, body.note, auth.who())
    g.changed = {"task": body.task, "error_group": body.error_group}
    return {"task": body.task, "error_group": body.error_group, "note": body.note.strip() or None}
