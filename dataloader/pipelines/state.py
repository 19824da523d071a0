"""The state of a name beside the target's data: `context.state`, the cursor of a load, `dataloader state`.

The table `dl_state` is in the first schema of the target's search_path, as `dl_fence` is. A run writes its state in the
transaction that writes its data, so both commit or none, and behind the fence. Two runs that have begun at one value
cannot both go on from it: the second one changes nothing, and begins again at the new value.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg

from dataloader.pipelines.context import PermanentError, Retry
from dataloader.queue import db

NAME_MOST = 200  # characters
_SQL = db.statements("state.sql")
TABLE = _SQL["create"]


@dataclass(slots=True)
class State:
    """A value of JSON that runs keep under a name; `value` is None until a run or a person has set one."""

    name: str
    job_id: UUID
    value: Any
    _seen: str | None = field(init=False, repr=False)  # as it was read or set: `value` may be changed in place

    def __post_init__(self) -> None:
        self._seen = _json(self.value)

    def set(self, value: Any, conn: psycopg.Connection[Any]) -> None:
        """Write the value in this transaction of the target, with which it commits.

        Raises Retry where another run or a person has changed the state since it was read, PermanentError for what is
        no JSON.
        """
        if not _written(conn, self.name, value, job_id=self.job_id, seen=self._seen):
            raise Retry(1, f"the state {self.name} has changed meanwhile: the next run begins at its new value")
        self.value, self._seen = value, _json(value)


def states(conn: psycopg.Connection[Any], name: str | None = None) -> list[dict[str, Any]]:
    """All states, or the one of this name, with who has changed each; none where there is no table."""
    [found] = _SQL.rows(conn, "is_there")
    return _SQL.rows(conn, "states", name=name) if found["is_there"] else []


def give(conn: psycopg.Connection[Any], name: str, value: Any, by: str) -> None:
    """Set a state by a person's order; a run that has begun at another value cannot commit its own."""
    create(conn, TABLE)
    _written(conn, checked(name), value, by=by)


def create(conn: psycopg.Connection[Any], ddl: str) -> None:
    """Execute the DDL in this transaction, behind any other that this function executes there."""
    _SQL.do(conn, "lock")
    conn.execute(ddl.encode())


def checked(name: str) -> str:
    """The name; raises PermanentError for one that people could not type."""
    if not 0 < len(name) <= NAME_MOST or not name.isprintable():
        raise PermanentError(f"the name of a state should have 1 to {NAME_MOST} printable characters")
    return name


def _written(conn: psycopg.Connection[Any], name: str, value: Any, **more: Any) -> bool:
    given = {"name": name, "value": _json(value), "job_id": None, "seen": None, "by": None} | more
    return _SQL.do(conn, "set", **given) == 1


def _json(value: Any) -> str | None:
    try:
        return None if value is None else json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise PermanentError("a state should be a value of JSON, such as a text, a number or a dict of them") from None
