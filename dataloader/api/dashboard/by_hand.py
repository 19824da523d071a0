"""The orders of buttons to one job, until `ops` declares these operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from uuid import UUID

from dataloader.api.web import auth
from dataloader.api.web.problems import Problem
from dataloader.queue import db, operations

ALL_SEC = 1.5
Given = Mapping[str, str]


def _job(verb: str, text: str) -> Callable[[db.Connection, Given], str]:
    def order(conn: db.Connection, given: Given) -> str:
        try:
            job_id = UUID(given["job_id"])
        except (KeyError, ValueError):
            raise Problem(404, "There is no such job any more.") from None
        change: Callable[..., dict[UUID, str]] = getattr(operations, verb)
        if "force" in given:
            change = partial(change, force=True)
        outcome = change(conn, [job_id], auth.who())[job_id]
        if outcome == operations.UNKNOWN:
            raise Problem(404, "There is no such job any more.")
        if outcome != operations.DONE:
            raise Problem(409, f"That was not done: the job is {outcome} by now.")
        return "The job is being stopped by force." if "force" in given else text

    return order


ORDERS: dict[str, Callable[[db.Connection, Given], str]] = {
    "cancel": _job("cancel", "The job is cancelled, or stops at its next safe point."),
    "run_now": _job("run_now", "The job may run now."),
    "requeue": _job("requeue", "The job is queued again, with a fresh budget of attempts."),
    "delete": _job("delete", "The job is deleted, with its journal."),
}
