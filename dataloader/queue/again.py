"""A job that has ended is run again with changes: as a new job. The journal of each of the two names the other one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

from dataloader import log
from dataloader.queue import db, enqueue
from dataloader.queue.db import Conn
from dataloader.queue.enqueue import Asker, NewJob
from dataloader.queue.job import FINAL
from dataloader.queue.operations import Conflict

KIND = "again"  # in the journal of the job that has ended
_SQL = db.statements("again.sql")


def fields_of(conn: Conn, job_id: UUID) -> dict[str, Any] | None:
    """The fields of a trigger that adds the job once more, with secrets; None for an unknown id. Raises Conflict."""
    if (row := _SQL.first(conn, "fields", job_id=job_id)) is None:
        return None
    status = row.pop("status")
    if status not in FINAL:
        raise Conflict(f"the job is {status}; only a job that has ended can be run again with changes")
    return {name: value for name, value in row.items() if value is not None or name == "args"}


def changed(args: Any, changes: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """PURE: args with these changes and without these names; a mask stays what it was. Raises ValueError."""
    old = args if isinstance(args, dict) else {}
    if wrong := [name for name in without if name not in old or name in changes]:
        raise ValueError(
            f"{wrong[0][:100]} is no argument of the job that stays: there are {', '.join(old)[:300] or 'none'}"
        )
    kept = {name: value for name, value in old.items() if name not in without}
    masked = shown(old)
    return kept | {
        name: restored(value, old[name], masked[name]) if name in old else value for name, value in changes.items()
    }


def shown(args: Mapping[str, Any]) -> dict[str, Any]:
    """PURE: the args as people see them: a secret is masked in the other args too. The names stay."""
    return dict(zip(args, log.masked({"args": dict(args)})["args"].values(), strict=False))


def restored(new: Any, old: Any, shown: Any) -> Any:
    """PURE: `new`, with the parts of `old` where `new` has them as in `shown`, the masked `old`.

    Raises ValueError where that is not clear.
    """
    if _written(new) == _written(shown):  # 1 and true are equal, and not the same
        return old
    if isinstance(new, dict) and isinstance(old, dict) and isinstance(shown, dict):
        parts = {name: (old[name], part) for name, part in zip(old, shown.values(), strict=False)}
        return {
            name: restored(value, *parts[name]) if name in parts else _unmasked(value, shown, old)
            for name, value in new.items()
        }
    if isinstance(new, list) and isinstance(old, list) and isinstance(shown, list) and len(new) == len(old):
        return [restored(*each) for each in zip(new, old, shown, strict=True)]
    return _unmasked(new, shown, old)


def _unmasked(new: Any, shown: Any, old: Any) -> Any:
    """`new`, which has no old part of its own; raises ValueError where the mask of a part of `old` is in it."""
    if log.MASK in _written(new) and _written(shown) != _written(old):
        raise ValueError(f"should be written as a whole, with the secret that {log.MASK} stands for")
    return new


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def add(conn: Conn, old_id: UUID, new: NewJob, by: str, asker: Asker | None = None) -> tuple[UUID, str]:
    """Add `new`, which runs `old_id` again; its id and status, as `enqueue.enqueue` of a limited job."""
    with conn.transaction():
        known = enqueue.are_known(conn, {new.idempotency_key})
        job_id, status = enqueue.enqueue(conn, new, limited=True, asker=asker)
        if not known:
            _SQL.do(conn, "note", new_id=job_id, old_id=old_id, by=by)
    return job_id, status


def links(events: Collection[Mapping[str, Any]]) -> dict[str, Any]:
    """PURE: of a job's journal, the job that it runs again, if any, and the jobs that have run it again since."""
    payloads = [(event["kind"], event["payload"] or {}) for event in events]
    before = [payload["rerun_of"] for kind, payload in payloads if kind == "queued" and "rerun_of" in payload]
    return {
        "rerun_of": before[0] if before else None,
        "reruns": [payload["rerun_by"] for kind, payload in payloads if kind == KIND and "rerun_by" in payload],
    }
