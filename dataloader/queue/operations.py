"""Operators' changes to jobs and queues. `by` is the asker, for the journal. Every function may raise psycopg.Error."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg import errors

from dataloader import periods
from dataloader.queue import cursor, db, fields, lifecycle
from dataloader.queue.db import Conn

DONE = "done"
UNKNOWN = "unknown"
NAMES = 2_000  # of queues, among which similar names are searched
SIMILAR = 3
AT_ONCE = 1_000  # jobs that one transaction of the functions for a whole queue changes
SCAN = 20_000  # jobs that one transaction checks by a filter

_SQL = db.statements("operate.sql", "settings")
# The groups of a queue's jobs, and the order in which each is read: the oldest end, the earliest time, the oldest job.
_GROUPS = {
    "of_dead": ("finished_at", "job_id"),
    "of_time": ("available_at", "priority", "created_at", "job_id"),
    "of_retries": ("created_at", "job_id"),
}
_TYPES = {field.name: field.type for field in fields.FIELDS}
_BEFORE_ALL = {"timestamptz": "-infinity", "int": "0", "uuid": str(UUID(int=0))}
# The orders to named jobs, each with its statement; the orders to a queue, each with its group of jobs and statement.
VERBS = {"cancel": "", "requeue": "requeue", "start-over": "requeue", "run-now": "run_now", "delete": "delete"}
QUEUE_VERBS = {
    "requeue-dead": ("of_dead", "requeue"),
    "delete-dead": ("of_dead", "delete"),
    "run-all": ("of_time", "run_now"),
    "kill-retries": ("of_retries", "kill"),
}
SCORES_AT_ONCE = 10_000  # jobs that one statement gives their scores
TURNS_AT_ONCE = 1_000  # jobs that one statement gives their turns
OLDER_SEC = 2.0  # how long the switch waits for transactions that began before it
# How long a move waits for claims that began before the pause; a claim takes about 1 s at most.
CLAIMS_SEC = periods.seconds("CLAIMS_SEC", 5.0)
_MOVE = "queue move "  # begins the author of a move's pauses
ORDER = ("ordered", "merge", "merge_limit", "batch", "on_dead", "fair_by")  # the settings of `set_order`
Outcomes = dict[UUID, str]
_Settings = Mapping[str, Any]
# The default settings of a queue.
DEFAULTS: dict[str, Any] = {
    "paused_at": None,
    "paused_by": None,
    "max_length": None,
    "ordered": False,
    "merge": False,
    "merge_limit": 1_000,
    "batch": None,
    "on_dead": "continue",
    "fair_by": None,
}


class Contradiction(Exception):
    """The settings of a queue do not go together, or not with those that it has."""


class Conflict(Exception):
    """The state of a job, a queue, a schedule or a backfill does not allow the change; the text says why."""


class WrongName(ValueError):
    """No queue can be moved to itself."""


class WrongLimit(ValueError):
    """A limit would allow any number of jobs, or a burst without a rate."""


class Changed(NamedTuple):
    """How many jobs one call has changed, perhaps none of SCAN, and the next one's `after`; None: it was the last."""

    changed: int
    next: str | None


FILTERS = ("task", "lock_key", "partition_key", "error", "error_group")  # of a change; `error` is a part of the text


def pause(conn: Conn, queue: str, by: str) -> dict[str, Any]:
    """Keep every claim from now on from starting a job of this queue; what runs goes on. Returns its settings."""
    return _one(conn, "pause", queue=queue, by=by, is_mark=False)


def resume(conn: Conn, queue: str, by: str) -> dict[str, Any]:
    """End the queue's pause, if there is one, and wake its workers; returns what `pause` does."""
    _SQL.do(conn, "resume", queue=queue, by=None)
    return settings(conn, queue)


def limit_length(conn: Conn, queue: str, max_length: int | None, by: str) -> dict[str, Any]:
    """Let the API refuse jobs for this queue (QueueFull) once it holds `max_length` queued ones; None: no limit."""
    return _one(conn, "limit_length", queue=queue, max_length=max_length)


def set_order(conn: Conn, queue: str, by: str, **changes: Any) -> dict[str, Any]:
    """Change the settings of a queue for the order of its jobs (ORDER); others stay. Returns the same as `pause`.

    Jobs go on meanwhile; from the return on each claim goes by it, and queued jobs have their places by their creation.
    Raises Contradiction for `merge` without `ordered`, having changed nothing.
    """
    _change_order(conn, queue, changes)
    after = None  # jobs that waited for one before them may not do so any more
    while (after := lifecycle.unpark_stranded(conn, after, AT_ONCE)) is not None:
        pass
    return settings(conn, queue)


def _change_order(conn: Conn, queue: str, changes: _Settings) -> None:
    if changes.get("ordered"):
        _give(conn, "give_scores", queue, SCORES_AT_ONCE)  # before the switch, for it may take long
    with conn.transaction():
        current = _one(conn, "lock_queue", queue=queue) | dict(changes)
        if current["merge"] and not current["ordered"]:
            raise Contradiction(f"the queue {queue} would merge, so it should be ordered as well")
        transaction = _SQL.value(conn, "set_order", queue=queue, **current)
    if changes.get("ordered") or changes.get("fair_by"):
        for _ in _tries(OLDER_SEC):  # until no transaction is left that may add jobs without seeing this one
            if _SQL.value(conn, "is_past", transaction=transaction):
                break
    if changes.get("ordered"):
        _give(conn, "give_scores", queue, SCORES_AT_ONCE)
    if changes.get("fair_by"):
        _give(conn, "give_turns", queue, TURNS_AT_ONCE)


def agree(conn: Conn, queue: str, ordered: bool | None, merge: bool | None) -> None:
    """Apply the settings of WORKERS_JSON that the queue does not have yet; raises Contradiction for other values."""
    wanted = {name: value for name, value in (("ordered", ordered), ("merge", merge)) if value is not None}
    chosen = _SQL.first(conn, "order_of", queue=queue) or {} if wanted else {}
    for name, value in wanted.items():
        if chosen.get(name) not in (None, value):
            asked, stored = (str(each).lower() for each in (value, chosen[name]))
            raise Contradiction(
                f'WORKERS_JSON says "{name}": {asked} of the queue {queue}, and the database {stored}: correct it, or'
                f" `dataloader queue set {queue} --{'' if value else 'no-'}{name}`"
            )
    if changes := {name: value for name, value in wanted.items() if chosen.get(name) is None}:
        set_order(conn, queue, "WORKERS_JSON", **changes)


def publish_tasks(conn: Conn, declared: Mapping[str, Mapping[str, Any]]) -> None:
    """Publish the declarations of these tasks (`pipelines.declarations`) to producers; queued jobs do not change."""
    _SQL.do(conn, "publish_tasks", tasks=json.dumps([{"task": task, **declared[task]} for task in declared]))


def args_schemas(conn: Conn, tasks: Collection[str]) -> dict[str, str | None]:
    """The JSON Schema of the args of each of these tasks that workers have shown, as text; None: any object will do."""
    return {row["task"]: row["args_schema"] for row in _SQL.rows(conn, "args_schemas", tasks=list(tasks))}


def set_limit(
    conn: Conn, name: str, by: str, most: int | None = None, per_minute: float | None = None, burst: int | None = None
) -> None:
    """Let at most `most` jobs of this limit run at once, and `per_minute` start in a minute, on all hosts together.

    None: any number. `burst`: by default as many as a second has. Runs go on. Raises WrongLimit.
    """
    if most is None and per_minute is None:
        raise WrongLimit("a limit should say how many jobs may run at once (most), or start in a minute (per_minute)")
    if burst is not None and per_minute is None:
        raise WrongLimit("burst should stand beside per_minute")
    allows = {"most": most, "per_minute": per_minute, "burst": burst or max(1, math.ceil((per_minute or 0) / 60))}
    _change_limit(conn, "set_limit", {"name": name, "by": by} | allows)


def remove_limit(conn: Conn, name: str, by: str) -> bool:
    """Let any number of jobs of this limit run; False when there is no limit of this name. The jobs keep the name."""
    return _change_limit(conn, "remove_limit", {"name": name}) == 1


def take_token(conn: Conn, name: str) -> float | None:
    """Take one of the limit's tokens for something that is no start of a job: 0, or in how many seconds one comes.

    The result is None where the farm has no limit of this name with a rate.
    """
    return next((row["wait_sec"] for row in _SQL.rows(conn, "take_token", name=name)), None)


def _change_limit(conn: Conn, statement: str, parameters: Mapping[str, Any]) -> int:
    with conn.transaction():
        conn.execute(_SQL["lock_limit"], parameters)
        conn.execute(_SQL["due_at_token"], parameters)
        changed = conn.execute(_SQL[statement], parameters).rowcount
        db.call(conn, "dl_let_in", [parameters["name"]])
    return changed


def _give(conn: Conn, statement: str, queue: str, limit: int) -> None:
    after: str | None = "-infinity"
    while after:
        ((given, reached),) = conn.execute(_SQL[statement], {"queue": queue, "after": after, "limit": limit})
        after = reached if given else None


def _tries(within_sec: float) -> Iterator[None]:
    """One try after the other, until so many seconds are over; at least one."""
    until = time.monotonic() + within_sec
    yield
    while time.monotonic() < until:
        time.sleep(0.02)
        yield


def known(conn: Conn, kind: str, name: str) -> dict[str, Any]:
    """Whether a queue or a task (`kind`) of this name has jobs, a worker, a setting or a past (`is_known`).

    Else `similar` names; and the `count` of known names: without any none is mistyped.
    """
    names = [row[kind] for row in _SQL.rows(conn, f"{kind}_names", **{kind: name}, most=NAMES)]
    similar = [] if name in names else get_close_matches(name, names, SIMILAR)
    return {"name": name, "is_known": name in names, "similar": similar, "count": len(names)}


def similar_tasks(conn: Conn, task: str) -> list[str] | None:
    """The workers' tasks most like one that none of them has shown and that has not run; None: it is no such task."""
    facts = _SQL.first(conn, "task_facts", task=task, most=NAMES)
    return get_close_matches(task, facts["names"], SIMILAR) if facts and not facts["is_known"] else None


def change(conn: Conn, verb: str, job_ids: Sequence[UUID], by: str, *, force: bool = False) -> Outcomes:
    """Change jobs as the verb (VERBS) says. Returns for each job DONE, UNKNOWN, or the status that forbids it.

    `requeue` queues finished jobs with all attempts, `start-over` without their checkpoints; `run-now` makes due;
    `delete` spares running jobs; `cancel` asks running ones, by `force` at once.
    """
    wanted = list(dict.fromkeys(job_ids))
    with conn.transaction():
        if verb == "cancel":
            lifecycle.request_cancels(conn, wanted, force, by)
            done = set()
        else:
            done = {row[0] for row in conn.execute(_SQL[VERBS[verb]], {"job_ids": wanted, "by": by})}
        if verb == "start-over":
            conn.execute(_SQL["start_over"], {"job_ids": list(done)})
        left = [job_id for job_id in wanted if job_id not in done]
        rows = conn.execute(_SQL["statuses"], {"job_ids": left}).fetchall() if left else []
    if verb == "cancel":
        done = {job_id for job_id, status, is_asked in rows if is_asked or status == "canceled"}
    others = {job_id: status for job_id, status, _ in rows}
    return {job_id: DONE if job_id in done else others.get(job_id, UNKNOWN) for job_id in wanted}


def change_queue(
    conn: Conn,
    verb: str,
    queue: str,
    by: str,
    limit: int = AT_ONCE,
    only: Mapping[str, str | None] = {},
    after: str | None = None,
) -> Changed:
    """Change up to `limit` jobs of a queue that pass FILTERS as the verb (QUEUE_VERBS) says, the oldest first.

    `after` is the `next` of the call before. Raises WrongCursor for another.
    """
    group, step = QUEUE_VERBS[verb]
    scan = SCAN if any(value is not None for value in only.values()) else limit
    place = _before_all(group) if after is None else cursor.parts(after, len(_GROUPS[group]))
    parameters = dict.fromkeys(FILTERS) | dict(only) | {"queue": queue, "after": place, "limit": limit, "scan": scan}
    try:
        with conn.transaction():
            _SQL.do(conn, "plans")
            rows = conn.execute(_chosen(group), parameters, prepare=False).fetchall()
            job_ids = [row[0] for row in rows if row[0]]
            changed = conn.execute(_SQL[step], {"job_ids": job_ids, "by": by}).fetchall() if job_ids else []
    except psycopg.DataError:
        if after is None:
            raise
        raise cursor.WrongCursor from None
    is_more = len(rows) == limit or any(row[2] for row in rows)
    return Changed(len(changed), cursor.at(rows[-1][1]) if is_more else None)


def _before_all(group: str) -> list[str]:
    return [_BEFORE_ALL[_TYPES[name]] for name in _GROUPS[group]]


@cache
def _chosen(group: str) -> str:
    columns, condition = _GROUPS[group], db.statements("search.sql")[group]
    return _SQL["chosen"].format(
        group=condition,
        still=condition.replace("status", "status::text"),  # lets no index serve but that of the ids
        passes=_SQL["passes"],
        columns=", ".join(columns),
        texts=", ".join(f"{name}::text" for name in columns),
        after=", ".join(f"(%(after)s::text[])[{nth}]::{_TYPES[name]}" for nth, name in enumerate(columns, 1)),
    )


def move(conn: Conn, source: str, target: str, by: str, limit: int = AT_ONCE) -> tuple[int, bool]:
    """Make up to `limit` queued, running and dead jobs of `source` jobs of `target`; their number, and if it is done.

    Each key keeps its order: both queues are paused meanwhile. `target` gets the settings of ORDER that it lacks, and
    goes on in the end; `source` stays paused. A repeated call completes what was interrupted. Raises WrongName and
    Conflict, having changed nothing; Conflict, with both queues paused, where other sessions are in the way.
    """
    if source == target:
        raise WrongName(f"{source} would be moved to itself: name another queue")
    if not known(conn, "queue", source)["is_known"]:
        raise Conflict(f"no queue {source} is known now: it has no job, no worker and no setting")
    authors = _authors(source, target)
    with conn.transaction():
        queues = {queue: _one(conn, "lock_queue", queue=queue) for queue in sorted((source, target))}
        for queue, author in authors.items():
            paused_by = queues[queue]["paused_by"]
            if paused_by and paused_by.startswith(_MOVE) and paused_by != author:
                raise Conflict(f"{queue} is paused by a {paused_by}: when that is over, `dataloader resume {queue}`")
        # The pause of another move to `source` may have been replaced by hand.
        is_unknown = queues[source]["paused_at"] is not None and queues[source]["paused_by"] != authors[source]
        if is_unknown and (other := _SQL.value(conn, "moves_to", by=f"{_MOVE}to {source}")):
            raise Conflict(
                f"{other} is paused by a {_MOVE}to {source} and has jobs left: complete that, or"
                f" `dataloader resume {other}`"
            )
        changes = inherited(source, queues[source], target, queues[target])
        for queue, is_mark in ((source, True), (target, False)):
            _SQL.do(conn, "pause", queue=queue, by=authors[queue], is_mark=is_mark)
    if changes:
        _change_order(conn, target, changes)  # from the defaults, so no job is parked that should be ready
    # Until no claim is left that may not have seen the pause.
    statements = [row[0] for row in conn.execute(_SQL["claims_under_way"], {"statements": None}).fetchall()]
    for _ in _tries(CLAIMS_SEC):
        if not (claims := conn.execute(_SQL["claims_under_way"], {"statements": statements}).fetchall()):
            break
    else:
        _, pid, application = claims[0]
        raise Conflict(
            f"{source} and {target} are paused, but a statement of session {pid} ({application}) began before"
            " and may not know it: move again when it has ended"
        )
    for _ in _tries(OLDER_SEC):
        with suppress(errors.LockNotAvailable):
            return _move_some(conn, source, target, limit)
    raise Conflict(f"{source} and {target} are paused, and another session has jobs of {source} locked. Move again")


def _authors(source: str, target: str) -> dict[str, str]:
    """The `paused_by` of the queues of a move, by which a repeated move recognizes its pauses."""
    return {source: f"{_MOVE}to {target}", target: f"{_MOVE}from {source}"}


def inherited(source: str, of_source: _Settings, target: str, of_target: _Settings) -> dict[str, Any]:
    """PURE: the settings of the order that a move brings to `target`; raises Conflict where the two contradict."""
    if all(of_source[name] is None for name in ORDER):
        return {}
    for name in ORDER:
        source_value, target_value = DEFAULTS[name] if of_source[name] is None else of_source[name], of_target[name]
        if target_value is not None and target_value != source_value:
            asked, stored = (json.dumps(value) for value in (source_value, target_value))
            raise Conflict(
                f"{source} has {name} {asked} and {target} has {stored}: let them agree by `dataloader queue set`"
            )
    return {name: of_source[name] for name in ORDER if of_source[name] is not None and of_target[name] is None}


def _move_some(conn: Conn, source: str, target: str, limit: int) -> tuple[int, bool]:
    """Move jobs of one group, running ones first: none returns to a group that is done already."""
    with conn.transaction():
        queues = [_one(conn, "lock_queue", queue=queue) for queue in sorted((source, target))]
        if any(each["paused_at"] is None for each in queues):
            return 0, False  # somebody has resumed it, or another session has ended this move
        _SQL.do(conn, "plans")
        places = {"from": source, "to": target}
        for group in ("running", "queued", "dead"):
            if job_ids := [row["job_id"] for row in _SQL.rows(conn, f"{group}_to_move", **places, limit=limit)]:
                return _SQL.do(conn, "move", **places, job_ids=job_ids), False
        _SQL.do(conn, "resume", queue=target, by=_authors(source, target)[target])
    return 0, True


def settings(conn: Conn, queue: str) -> dict[str, Any]:
    """The settings of a queue; DEFAULTS for the ones that are not set."""
    return _SQL.first(conn, "queue", queue=queue) or DEFAULTS | {"queue": queue}


def _one(conn: Conn, name: str, **parameters: Any) -> dict[str, Any]:
    (row,) = db.rows(conn, _SQL[name], parameters)
    return row
