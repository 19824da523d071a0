"""The parts of addresses, and what views share."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import quote
from uuid import UUID

from flask import current_app
from werkzeug.routing import BaseConverter

from dataloader import ops
from dataloader.api.web.sessions import Sessions
from dataloader.ops.errors import invalid
from dataloader.queue import db

JSON = "application/json"
# The last parts of the addresses below a queue.
OF_QUEUE = tuple(op.path.rpartition("/")[2] for op in ops.load().values() if op.path.startswith("/queues/{queue}/"))
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII)


class Anything(BaseConverter):
    """A part of the path with any percent-encoded text; the view refuses a wrong one with a reason."""

    regex = r"[\s\S]*?"
    part_isolating = False
    weight = 200

    def to_url(self, value: Any) -> str:
        """One part of an address. Unquoted, a browser would make `b` of the queue `a/../b`."""
        return quote(str(value), safe="")


class JobId(BaseConverter):
    """The last part of a job's path: any text that is no other address below /jobs."""

    regex = "(?!(?:trigger|batch|bulk)$)[^/]+"


class Queue(Anything):
    """The end of a queue's path: any text that is no other address below /queues."""

    regex = rf"(?![\s\S]*/(?:{'|'.join(OF_QUEUE)})$)[\s\S]*?"


CONVERTERS = {"anything": Anything, "job": JobId, "queue": Queue}


def job_id(text: str) -> UUID:
    """The UUID of the canonical form, which `text` should be; raises a 400 Problem."""
    if not _UUID.fullmatch(text):
        raise invalid("", "uuid", "job_id should be a UUID such as 01890a5d-ac96-774b-bcce-b302099a8057")
    return UUID(text)


def session() -> AbstractContextManager[db.Connection]:
    """A session of the queue's database for this request (see Sessions.borrow)."""
    sessions: Sessions = current_app.extensions["sessions"]
    return sessions.borrow()
