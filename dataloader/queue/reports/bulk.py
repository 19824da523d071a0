"""Orders to all jobs of a list, or to the ticked ones: a preview, then the change, some jobs at a time.

An order changes no job that has changed since its preview, or has left the list. Functions may raise psycopg.Error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from hashlib import sha256
from typing import Any
from uuid import UUID

from dataloader.queue import cursor, db, operations
from dataloader.queue.db import Conn, Row
from dataloader.queue.job import FINAL, TALLIED
from dataloader.queue.reports import stats, tallies

AT_ONCE = 1_000  # jobs that one call changes
_SQL = db.statements("search.sql")
_ENDED = frozenset(map(str, FINAL))
_NOT_ENDED = dict.fromkeys(stats.QUEUED | {"running"}, "has not ended: cancel it first")
# Why an order changes no jobs of a kind (job.TALLIED); those of all other kinds it changes.
ORDERS: dict[str, dict[str, str]] = {
    "requeue": _NOT_ENDED,
    "start-over": _NOT_ENDED,
    "cancel": dict.fromkeys(_ENDED, "has ended"),
    "delete": {"running": "runs: cancel it first"},
    "run-now": {
        "ready": "is due already",
        "blocked": "waits for its key, other jobs or a limit, not for its time",
        "running": "runs already",
        **dict.fromkeys(_ENDED, "has ended: requeue it"),
    },
}


class WrongTarget(ValueError):
    """An order names no jobs, or names them in two ways."""


class WrongConfirmation(ValueError):
    """The confirmation is none of a preview of this order to this list."""


@dataclass(frozen=True, slots=True)
class Target:
    """The jobs of a list; with `job_ids` only these of them."""

    wanted: stats.Wanted
    job_ids: tuple[UUID, ...] | None = None


def target(matching: Mapping[str, Any] | None, job_ids: Sequence[UUID] | None) -> Target:
    """The jobs of an order: those that pass the filters `matching`, or those of these ids; raises WrongTarget."""
    if (matching is None) == (job_ids is None):
        raise WrongTarget("an order should name jobs by one of matching and job_ids")
    if job_ids is not None:
        return Target(stats.Wanted(), tuple(dict.fromkeys(job_ids)))
    filters = {name: value for name, value in (matching or {}).items() if value is not None}
    if not filters:
        raise WrongTarget("matching should have at least one filter, such as status or q: it would be for every job")
    return Target(stats.Wanted(**filters))


def preview(conn: Conn, order: str, target: Target) -> Row:
    """The effect that the order (one of ORDERS) would have now on the list, as model.Preview. Raises WrongSearch."""
    as_of, reasons = db.now(conn), ORDERS[order]
    tally = _tally(conn, target, as_of)
    counts = {kind: number for kind, number in tally["counts"].items() if number or kind in tally["at_least"]}
    changes = {kind: number for kind, number in counts.items() if kind not in reasons}
    leaves = [{"kind": kind, "count": counts[kind], "reason": reasons[kind]} for kind in counts if kind in reasons]
    count, is_exact = sum(changes.values()), reasons.keys() >= set(tally["at_least"])
    place = [order, _digest(target), as_of.isoformat(), str(count) if is_exact else ""]
    preview = {"order": order, "count": count, "is_exact": is_exact, "changes": changes, "leaves": leaves}
    return preview | {"at_least": tally["at_least"], "as_of": as_of, "confirmation": cursor.at(place)}


def change(
    conn: Conn, order: str, target: Target, confirmation: str, by: str, after: str | None = None, limit: int = AT_ONCE
) -> operations.Changed:
    """Change up to `limit` of the previewed jobs, the last change first; `after` is the `next` of the call before.

    A repeated call changes no job twice. Raises WrongConfirmation, Conflict, WrongSearch, ValueError, having changed
    nothing.
    """
    as_of, count = _read(confirmation, order, target)
    kinds = [kind for kind in TALLIED if kind not in ORDERS[order]]
    if after is None and count is not None:
        counts = _tally(conn, target, as_of)["counts"]
        now = sum(counts[kind] for kind in kinds)
        if now > count:
            raise operations.Conflict(
                f"the preview had {count:,} jobs to {order}, and there are {now:,} now: ask for a new preview"
            )
    wanted = replace(target.wanted, until=min(as_of, target.wanted.until or as_of), sort="changed")
    with conn.transaction():
        if target.job_ids is None:
            rows, following = stats.chosen(conn, wanted, kinds, limit, after)
        else:
            (number,) = cursor.parts(after, 1) if after else ("0",)
            if not re.fullmatch("[0-9]{1,9}", number):
                raise cursor.WrongCursor
            stop = int(number) + limit
            rows = list(target.job_ids[int(number) : stop])
            following = cursor.at([str(stop)]) if stop < len(target.job_ids) else None
        parameters = stats.filters(wanted.whole) | stats.bounds(wanted)
        parameters |= {"chosen": rows, "kinds": kinds}
        still = db.rows(conn, stats.spliced(_SQL["chosen"]), parameters, prepare=False) if rows else []
        outcomes = operations.change(conn, order, [row["job_id"] for row in still], by) if still else {}
    return operations.Changed(sum(outcome == operations.DONE for outcome in outcomes.values()), following)


def _tally(conn: Conn, target: Target, as_of: datetime) -> Row:
    until = min(as_of, target.wanted.until or as_of)
    return tallies.tally(conn, replace(target.wanted, until=until), target.job_ids)


def _read(confirmation: str, order: str, target: Target) -> tuple[datetime, int | None]:
    """The time and the count of the preview; raises WrongConfirmation."""
    try:
        of_order, digest, as_of, count = cursor.parts(confirmation, 4)
        fields = datetime.fromisoformat(as_of), int(count) if count else None
    except ValueError:
        raise WrongConfirmation("confirmation should be that of a preview") from None
    if (of_order, digest) != (order, _digest(target)) or fields[0].tzinfo is None:
        raise WrongConfirmation("confirmation is that of another preview: order and filters should be as they were")
    return fields


def _digest(target: Target) -> str:
    """The digest of a list of jobs; the order of the list does not change it."""
    given: dict[str, Any] = asdict(replace(target.wanted, sort="changed"))
    named = [given, None if target.job_ids is None else sorted(map(str, target.job_ids))]
    return sha256(json.dumps(named, default=str, sort_keys=True).encode()).hexdigest()[:16]
