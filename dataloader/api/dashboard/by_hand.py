"""The orders of buttons to one job, a schedule and a backfill, until `ops` declares these operations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from typing import Any
from uuid import UUID

from flask import current_app

from dataloader.api.dashboard import formats, zones
from dataloader.api.web import auth
from dataloader.api.web.problems import Problem
from dataloader.queue import db, operations
from dataloader.queue.plans import backfills, new_schedule, schedules

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


def _schedule(change: Callable[[db.Connection, str], Any], text: str) -> Callable[[db.Connection, Given], str]:
    def order(conn: db.Connection, given: Given) -> str:
        try:
            found = change(conn, given.get("name", ""))
        except ValueError as e:
            raise Problem(409, f"That was not done: {e}.") from None
        if found is None:
            raise Problem(404, "There is no such schedule any more.")
        return text

    return order


def _run_schedule(conn: db.Connection, name: str) -> Any:
    return schedules.run(conn, name, auth.who(), current_app.extensions["settings"].dl_default_lease_ttl_sec)


def _backfill(change: Callable[..., Any], text: str) -> Callable[[db.Connection, Given], str]:
    def order(conn: db.Connection, given: Given) -> str:
        name = given.get("backfill", "")
        if "\0" in name or backfills.known(conn, name) is None:
            raise Problem(404, "There is no such backfill any more.")
        if change is not backfills.retry:
            change(conn, name, auth.who())
            return text
        until, total = monotonic() + ALL_SEC, 0
        after: str | None = "0"
        while after is not None and monotonic() < until:
            changed, after = backfills.retry(conn, name, auth.who(), int(after))
            total += changed
        jobs = "1 job is" if total == 1 else f"{formats.count(total)} jobs are"
        return f"{jobs} queued again." + ("" if after is None else " There are more: press again.")

    return order


def _add_schedule(conn: db.Connection, given: Given) -> str:
    try:
        new = new_schedule.checked(schedule_of(given), zones.chosen().key)
    except ValueError as e:
        raise Problem(400, f"That was not done: {e}.") from None
    schedules.add(conn, new, auth.who())
    return f"The schedule {new['name']} is added."


def schedule_of(form: Given) -> dict[str, Any]:
    """PURE: the words of a schedule in a form, without the empty ones; raises ValueError."""
    found: dict[str, Any] = {name: text.strip() for name, text in form.items() if text.strip()}
    if "args" in found:
        try:
            found["args"] = json.loads(found["args"])
        except (ValueError, RecursionError):
            found["args"] = None
        if not isinstance(found["args"], dict):
            raise ValueError('args: should be a JSON object, such as {"day": "{{ date }}"}')
    if text := found.get("interval_sec"):
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise ValueError("interval_sec: should be a whole number of seconds")
        found["interval_sec"] = int(text)
    return found


ORDERS: dict[str, Callable[[db.Connection, Given], str]] = {
    "cancel": _job("cancel", "The job is cancelled, or stops at its next safe point."),
    "run_now": _job("run_now", "The job may run now."),
    "requeue": _job("requeue", "The job is queued again, with a fresh budget of attempts."),
    "delete": _job("delete", "The job is deleted, with its journal."),
    "pause_schedule": _schedule(lambda conn, name: schedules.pause(conn, name, auth.who()), "The schedule is paused."),
    "resume_schedule": _schedule(schedules.resume, "The schedule goes on, from now."),
    "run_schedule": _schedule(_run_schedule, "A job of the schedule is added."),
    "add_schedule": _add_schedule,
    "pause_backfill": _backfill(backfills.pause, "The backfill is paused."),
    "resume_backfill": _backfill(backfills.resume, "The backfill goes on."),
    "cancel_backfill": _backfill(backfills.cancel, "The backfill is canceled; its jobs end within some seconds."),
    "retry_backfill": _backfill(backfills.retry, ""),
}
