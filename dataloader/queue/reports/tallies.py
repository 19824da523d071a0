"""Counts beside a list of jobs, and suggestions of a search box; each reads a bounded number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any
from uuid import UUID

from dataloader.log import masked
from dataloader.queue import db
from dataloader.queue.db import Conn, Row
from dataloader.queue.job import DEAD, FINAL, STATUSES, TALLIED
from dataloader.queue.reports import search, stats

COUNTED = 10_000  # jobs of each source that a tally counts by an index alone
SCAN = 3_000  # jobs of each source that a tally reads
SUGGESTED = 8
SUGGESTING = 1_000  # jobs of each kind whose keys are suggested
_SQL = db.statements("search.sql")
# The source of the jobs of each kind.
_SOURCES = {
    "of_ready": {"ready"},
    "of_time": {"scheduled"},
    "of_key": {"blocked"},
    "of_limit": {"blocked"},
    "of_parent": {"blocked"},
    "of_running": {"running"},
    "of_dead": set(map(str, DEAD)),
    "of_finished": set(map(str, FINAL - DEAD)),
}
_QUEUED = set(stats.QUEUED)
_NOT_QUEUED = ("of_running", "of_dead", "of_finished")
# The kinds of the jobs of a status that is none of TALLIED.
_GROUPS = {"queued": _QUEUED, "fresh": _QUEUED, "retries": _QUEUED, "dead": set(map(str, DEAD))}


def tally(conn: Conn, wanted: stats.Wanted, job_ids: Sequence[UUID] | None = None) -> Row:
    """How many jobs of a list, or of these, count as what, as model.Tally, up to SCAN. Raises WrongSearch."""
    wanted = wanted.whole
    parameters = stats.filters(wanted) | stats.bounds(wanted) | {"job_ids": None if job_ids is None else list(job_ids)}
    is_plain = wanted in (stats.Wanted(queue=wanted.queue, sort=wanted.sort),) and job_ids is None
    counts, at_least = dict.fromkeys(TALLIED, 0), set[str]()
    with conn.transaction():
        sources, named = ([("of_ids", set(TALLIED))], {}) if job_ids is not None else _sources(conn, wanted)
        for source, kinds in sources:
            is_counted = is_plain and len(kinds) == 1
            most = COUNTED if is_counted else SCAN
            asked = parameters | named | {"scan": most, "kind": min(kinds)}
            db.by_index(conn, bitmaps=source == "of_args", sorts=False)
            rows = db.rows(conn, _statement(source, is_counted), asked, prepare=False)
            for row in rows:
                if row["kind"] in kinds:
                    counts[row["kind"]] += row["count"]
            if sum(row["looked_at"] for row in rows) >= most or (
                source == "of_parent" and _SQL.value(conn, "waiting", scan=most)
            ):
                at_least |= kinds
    at_least_of = [kind for kind in TALLIED if kind in at_least]
    return {"counts": counts, "total": sum(counts.values()), "at_least": at_least_of}


def suggest(conn: Conn, text: str) -> list[str]:
    """How a search may go on, as whole searches, at most SUGGESTED of each kind, and none that answers mask."""
    last = search.unfinished(text)
    if last is None:
        return []
    texts = [f"{last.before}{term}" for term in _terms(conn, last)]
    return [each for each in texts if len(each) <= search.LENGTH and masked(each) == each]


def _terms(conn: Conn, last: search.Unfinished) -> Iterator[str]:
    part = search.lowered(last.part)
    if last.name is None:
        yield from (f"{name}:" for name in (*search.FIELDS, "args.") if part and name.startswith(part))
    if last.name == "status":
        yield from (f"status:{status}" for status in STATUSES if part in status)
    for name, field in (("task", "task"), ("queue", "queue"), ("key", "lock_key")):
        if last.name == field or (last.name is None and len(part) > 1):
            # A value that answers mask is none, for the part may be of its secret.
            asked = {"field": field, "pattern": search.pattern(part), "most": 2 * SUGGESTED, "scan": SUGGESTING}
            with conn.transaction():
                db.by_index(conn, sorts=False)
                rows = _SQL.rows(conn, "suggested_keys" if field == "lock_key" else "suggested_names", **asked)
            values = [row["name"] for row in rows if masked(row["name"]) == row["name"]]
            yield from (f"{name}:{search.quoted(value)}" for value in values[:SUGGESTED])


def _sources(conn: Conn, wanted: stats.Wanted) -> tuple[list[tuple[str, set[str]]], dict[str, Any]]:
    """Where the jobs of a list are counted, with what they may count as, and the ids that are counted apart."""
    kinds = _GROUPS.get(wanted.status or "", {wanted.status} if wanted.status else set(TALLIED))
    sources = [(source, has) for source, has in _SOURCES.items() if has & kinds]
    if wanted.q and wanted.queue is None and wanted.status is None:  # by time: jobs that stand together
        sources = [("of_queued", _QUEUED), *((source, _SOURCES[source]) for source in _NOT_QUEUED)]
    by_name = dict(sources)
    names, named = stats.searched(conn, wanted, list(by_name))
    return [(name, by_name.get(name, kinds)) for name in names], named


@cache
def _statement(source: str, is_counted: bool = False) -> str:
    of = _SQL[source]
    if at := {"of_finished": "finished_at", "of_queued": "created_at"}.get(source):  # the latest of them
        of += f" AND {at} >= %(since)s AND {at} <= %(until)s ORDER BY {at} DESC"
    of_queue = "true" if source == "of_finished" else _SQL["of_queue"]
    statement = _SQL["counted" if is_counted else "tallied"].replace("{source}", of).replace("{of_queue}", of_queue)
    return stats.spliced(statement, source)
