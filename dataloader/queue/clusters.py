"""Queues of several clusters, each a database of its own: where a queue lives, and its move to another cluster.

No transaction spans two clusters. A job that is carried is in both for an instant, and starts in neither: its queue is
paused in the cluster that it leaves, and where it arrives it waits (`blocked_on` 'cluster', listed in dl_arrivals)
until the other one has it no more. Each call goes on where an earlier one was cut off. Statements:
`sql/clusters.sql`. Every function may raise psycopg.Error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import errors, sql
from psycopg.rows import dict_row, tuple_row

from dataloader.queue import db, operations
from dataloader.queue.db import Conn
from dataloader.queue.operations import Busy, Contradiction

AT_ONCE = 1_000  # jobs that one step carries
BYTES_AT_ONCE = 8 * 1024 * 1024  # about so much of them
PLACES = 10_000  # queues of one cluster
LEFT = 1_000  # up to which `Moved` counts what is left
NAMED = 10  # ids that a message names
RUNS_SEC = 0.5  # how long a step waits for jobs that run
_MARK = operations.ACROSS
_SQL = db.statements("clusters.sql")
_SQL = {name: text.replace("{stays}", _SQL["stays"]).replace("{noted}", _SQL["noted"]) for name, text in _SQL.items()}
_SQL["placed"] = _SQL["placed"].replace("{named}", db.statements("stats.sql")["named"])
_TABLES = ("events", "checkpoints", "logs")  # what belongs to a job


class LivesThere(ValueError):
    """The queue lives in the cluster to which it would be moved."""


@dataclass(frozen=True, slots=True)
class Side:
    """A cluster of a move: its name, and a session in its database."""

    name: str
    conn: Conn


class Moved(NamedTuple):
    """How many jobs one step has carried; how many still run in the cluster that the queue leaves; what stays there."""

    moved: int
    running: int
    left: int  # queued and dead jobs that cannot be carried now, up to LEFT
    is_done: bool


def placed(conn: Conn) -> dict[str, str | None]:
    """The queues that this cluster knows, each with the cluster that it has moved to; None: it has not."""
    try:
        with conn.transaction():
            conn.execute(_SQL["plans"])
            return dict(_tuples(conn, "placed", most=PLACES))
    except errors.QueryCanceled:
        return dict(_tuples(conn, "placed_as_noted", most=PLACES))


def has_jobs(conn: Conn, queue: str) -> bool:
    """Whether jobs of this queue wait, run or are dead in this cluster."""
    ((found,),) = _tuples(conn, "has_jobs", queue=queue)
    return bool(found)


def moved_away(conn: Conn, queues: Collection[str]) -> dict[str, str]:
    """Those of these queues that have moved, with their clusters; the others do not move before the transaction's end.

    That is as far as no other session is in the way of knowing it: after half a second the answer is what is read.
    """
    return dict(_tuples(conn, "moved", queues=list(queues)))


def stragglers(conn: Conn) -> list[tuple[str, str]]:
    """The queues that have moved from this cluster and of which jobs are still to be carried, with their clusters."""
    return _tuples(conn, "stragglers")


def home(queue: str, known: Sequence[tuple[str, Any]], own: str) -> str:
    """PURE: the cluster in which a queue lives, by what each cluster, in their order, says of the queues (`placed`).

    It lives where the first one that knows it says; this is followed from cluster to cluster, to none twice. A queue
    that none knows lives in `own`.
    """
    places = {name: said[queue] for name, said in known if queue in said}
    at = next(iter(places), own)
    seen = {at}
    while (following := places.get(at)) and following not in seen:
        seen.add(following)
        at = following
    return at


def route(to: str, home: str, left: Sequence[str], comes_from: str | None) -> list[str]:
    """PURE: the cluster from which a queue moves to the cluster `to`, and then the others that may have jobs for it.

    `home` is where the queue lives; `left` are the clusters that say that it has moved from them to `to`, and
    `comes_from` is the one that its pause there names, if any: a move that was begun goes on from where it came.
    """
    source = home if home != to else comes_from or next(iter(left), home)
    return [source, *(name for name in left if name != source)]


def sides(every: Sequence[Side], queue: str, to: str, own: str) -> tuple[list[Side], Side]:
    """The sources (`route`) and the target of a queue's move to a cluster."""
    by_name = {side.name: side for side in every}
    left = [side.name for side in every if side.name != to and placed_at(side.conn, queue) == to]
    sources = route(to, _home(every, queue, own), left, coming_from(by_name[to].conn, queue))
    if unknown := [name for name in sources if name not in by_name]:
        raise Contradiction(
            f"{queue} is in the cluster {unknown[0]}, which does not answer, or which DL_CLUSTERS does not name"
        )
    return [by_name[name] for name in sources], by_name[to]


def _home(every: Sequence[Side], queue: str, own: str) -> str:
    known = [(side.name, placed(side.conn)) for side in every]
    if not any(queue in said for _, said in known):
        known = [(side.name, {queue: None} if has_jobs(side.conn, queue) else {}) for side in every]
    return home(queue, known, own)


def move_from(sources: Sequence[Side], target: Side, queue: str, limit: int = AT_ONCE) -> Moved:
    """A step of a queue's move from the first of the sources (`move`); the others carry what earlier moves left."""
    step = move(sources[0], target, queue, limit)
    late = sum(carry(source, target, queue, limit) for source in sources[1:])
    return step._replace(moved=step.moved + late)


def move(source: Side, target: Side, queue: str, limit: int = AT_ONCE) -> Moved:
    """One step of a queue's move to another cluster; to be called until `is_done`.

    Queued and dead jobs are carried, with the order of each key, their journals, checkpoints and logs; what runs goes
    on where it is, and the step that finds nothing else waits for it for RUNS_SEC at most. The queue is paused in both
    clusters meanwhile; in the end it goes on in the target, unless somebody else has paused it there.

    Raises, having changed nothing, LivesThere for a source that is the target, Contradiction for a queue that cannot
    move. Raises, with the queue paused in the target or in both, Busy where other sessions are in the way, and
    Contradiction where the target has another job with the id of one that would be carried: such a step carries none.
    """
    if source.name == target.name:
        raise LivesThere(f"{queue} lives in the cluster {target.name}: name another one")
    if placed_at(source.conn, queue) != target.name:
        if placed_at(target.conn, queue) == source.name:  # it moves back: what came from there is settled first
            carry(target, source, queue, limit=0)
        _refuse(source, queue)
        _refuse_doubles(source.conn, target, queue)
    try:
        _begin(source, target, queue)
    except errors.LockNotAvailable:
        raise Busy(f"other sessions add jobs to {queue} and do not end: move it again") from None
    operations.wait_for_claims(source.conn, queue)
    if carried := carry(source, target, queue, limit):
        return Moved(carried, *_left(source, queue), is_done=False)
    return _end(source, target, queue)


def carry(source: Side, target: Side, queue: str, limit: int = AT_ONCE) -> int:
    """Carry up to `limit` jobs of a queue that has moved; returns how many.

    Raises, having carried none, Busy, and Contradiction where the target has another job with the id of one of them.
    """
    for _ in operations.tries(operations.OLDER_SEC):
        try:
            return _carry(source, target, queue, limit)
        except errors.LockNotAvailable:
            continue
    raise Busy(f"{queue} is moving, and another session carries its jobs, or has some locked: move it again")


def placed_at(conn: Conn, queue: str) -> str | None:
    """The cluster that the queue has moved to from this one; None: it has not."""
    row = conn.execute("SELECT cluster FROM dl_queues WHERE queue = %s", (queue,)).fetchone()
    return row[0] if row else None


def _refuse(source: Side, queue: str) -> None:
    """Raise Contradiction for a queue of which the source cannot give all."""
    if not has_jobs(source.conn, queue) and queue not in placed(source.conn):
        raise Contradiction(f"no queue {queue} is known in the cluster {source.name}")
    found = _tuples(source.conn, "refusals", queue=queue)
    if found:
        reasons = "; ".join(reason for (reason,) in found)
        raise Contradiction(
            f"{queue} cannot leave the cluster {source.name}: {reasons}. Such jobs have to end there, and a schedule is"
            " removed here and added again in the other cluster"
        )


def _refuse_doubles(source: Conn, target: Side, queue: str) -> None:
    """Raise Contradiction where the target has ids of the jobs that come first; later ones are seen by `_carry`."""
    first = [row[0] for row in _tuples(source, "first", queue=queue, limit=AT_ONCE)]
    _check_doubles(target.name, queue, [row[0] for row in _tuples(target.conn, "doubles", job_ids=first)])


def _check_doubles(cluster: str, queue: str, job_ids: Collection[UUID]) -> None:
    """Raise Contradiction where there are such ids: of two jobs, one would be lost."""
    if job_ids:
        named = ", ".join(map(str, sorted(job_ids)[:NAMED]))
        more = f" and {len(job_ids) - NAMED} more" if len(job_ids) > NAMED else ""
        raise Contradiction(
            f"the cluster {cluster} has other jobs with ids of {queue}, {named}{more}: delete each where it does not"
            f" belong, in {cluster} with `DL_CLUSTER={cluster} dataloader delete ID --direct`, and move the queue again"
        )


def _begin(source: Side, target: Side, queue: str) -> None:
    """Pause the queue in both clusters and let the source say where it has moved to.

    The target first: from the moment that the source says so the API adds jobs there, and none of them may start. Until
    then the target points back to the source.
    """
    with source.conn.transaction():
        here = _checked(source, target, queue)
    if here["cluster"] == target.name:
        target.conn.execute(_SQL["settle_in"], {"queue": queue, "cluster": source.name})
        return
    with target.conn.transaction():
        there = _locked(target.conn, queue)
        _check_author(there if there["cluster"] is None else {}, queue, target.name, _author(of=source.name))
        order = _order_to_take(source.name, here, target.name, there, queue)
        pause = {"queue": queue, "by": _author(of=source.name), "max_length": here["max_length"]}
        target.conn.execute(_SQL["take_in"], pause | {"cluster": source.name})
    if order:
        operations.set_order(target.conn, queue, _author(of=source.name), **order)
    try:
        _send_away(source, target, queue)
    except Contradiction:
        target.conn.execute(_SQL["give_back"], there | {"queue": queue, "source": source.name})
        raise
    target.conn.execute(_SQL["settle_in"], {"queue": queue, "cluster": source.name})


def _send_away(source: Side, target: Side, queue: str) -> None:
    with source.conn.transaction():
        source.conn.execute(_SQL["briefly"])
        source.conn.execute(_SQL["without_adders"], {"queue": queue})  # first: who waits for adders holds no row
        _checked(source, target, queue)  # once more: another mover may have been here since
        away = {"queue": queue, "cluster": target.name, "by": _author(to=target.name)}
        source.conn.execute(_SQL["send_away"], away)


def _checked(source: Side, target: Side, queue: str) -> dict[str, Any]:
    """The source's row of the queue, which it locks; raises Contradiction where another move has paused the queue."""
    here = _locked(source.conn, queue)
    _check_author(here, queue, source.name, _author(to=target.name), _author(of=target.name))
    return here


def _order_to_take(source: str, here: dict[str, Any], target: str, there: dict[str, Any], queue: str) -> dict[str, Any]:
    """What the target is to say of the order; where the queue comes back, what was said there before counts no more."""
    if there["cluster"]:
        return {name: here[name] for name in operations.ORDER if here[name] is not None}
    return operations.inherited(f"{queue} in {source}", here, f"{queue} in {target}", there)


def target_of(paused_by: str | None) -> str | None:
    """PURE: the cluster that a queue has moved to, or is moving to, by the author of its pause; None: it is not."""
    by = paused_by or ""
    return by.removeprefix(f"{_MARK}to ") if by.startswith(f"{_MARK}to ") else None


def source_of(paused_by: str | None) -> str | None:
    """PURE: the cluster from which a queue comes, by the author of its pause; None: it comes from none."""
    by = paused_by or ""
    return by.removeprefix(operations.COMES) if by.startswith(operations.COMES) else None


def coming_from(conn: Conn, queue: str) -> str | None:
    """The cluster from which this queue comes; None: it comes from none."""
    return source_of(operations.settings(conn, queue)["paused_by"])


def coming(conn: Conn) -> list[tuple[str, str]]:
    """The queues that come from another cluster, with that: none of their jobs starts before the move is over."""
    return [(queue, by.removeprefix(operations.COMES)) for queue, by in _tuples(conn, "coming", comes=operations.COMES)]


def has_gone(row: Mapping[str, Any]) -> bool:
    """PURE: whether these figures are of a queue that has moved to another cluster, and has left nothing behind."""
    return target_of(row.get("paused_by")) is not None and not any(row.get(name) for name in ("length", "busy", "dead"))


def _author(*, to: str | None = None, of: str | None = None) -> str:
    return _MARK + (f"to {to}" if to else f"from {of}")


def _check_author(said: dict[str, Any], queue: str, cluster: str, *authors: str) -> None:
    """Raise Contradiction where another move has paused the queue: none of these, which are this one or its reverse."""
    by = said.get("paused_by") or ""
    if by.startswith("queue move ") and by not in authors:
        instead = "first" if by.startswith(operations.ACROSS) else f"or `dataloader resume {queue}`"
        raise Contradiction(f"{queue} is paused in the cluster {cluster} by a {by}: complete that, {instead}")


def _carry(source: Side, target: Side, queue: str, limit: int) -> int:
    """Copy, commit in the target; delete, commit in the source: rows that are locked there meanwhile."""
    with source.conn.transaction():
        if _tuples(source.conn, "alone", queue=queue) != [(True,)]:
            raise errors.LockNotAvailable
        with target.conn.transaction():
            target.conn.execute(_SQL["briefly"])
            target.conn.execute(_SQL["alone_there"])
            ended = _settle(source, target.conn, queue)
            job_ids = _first(source.conn, queue, target.name, limit)
            if job_ids:  # `_settle` has left no copy of them there
                _check_doubles(target.name, queue, set(job_ids) - _copy(source, target.conn, job_ids))
        if job_ids:
            source.conn.execute(_SQL["forget"], {"job_ids": job_ids})
    if job_ids or ended:
        with target.conn.transaction():
            _admit(target.conn, [*job_ids, *ended])
    return len(job_ids)


def _admit(conn: Conn, job_ids: list[UUID]) -> None:
    """Let copies be jobs like any others: the source has them no more."""
    conn.execute(_SQL["admit"], {"job_ids": job_ids})
    conn.execute(_SQL["give_turns"], {"job_ids": job_ids})


def _settle(source: Side, target: Conn, queue: str) -> list[UUID]:
    """Decide on copies of which nobody knows whether the source has deleted its rows: a step was cut off.

    What a move has deleted in the source is admitted. What the source has is carried anew, and what people have deleted
    there is dropped. What people have ended or deleted in the target meanwhile goes from the source too; returns these
    jobs, which stay noted until that is committed.
    """
    arrived = {row[0] for row in _tuples(target, "arrivals", queue=queue, source=source.name)}
    ended: set[UUID] = set()
    if arrived:
        there = {row[0] for row in _tuples(source.conn, "still_there", job_ids=list(arrived))}
        departed = {row[0] for row in _tuples(source.conn, "departed", job_ids=list(arrived))} - there
        _admit(target, list(departed))
        unsure = arrived - departed
        ended = unsure - {row[0] for row in _tuples(target, "drop_copies", job_ids=list(unsure))}
        source.conn.execute(_SQL["forget"], {"job_ids": list(ended)})
    source.conn.execute(_SQL["clear_departures"], {"queue": queue})
    return list(ended)


def _first(conn: Conn, queue: str, cluster: str, limit: int) -> list[UUID]:
    wanted = {"queue": queue, "cluster": cluster, "limit": limit, "bytes": BYTES_AT_ONCE}
    return [row[0] for row in _tuples(conn, "to_carry", **wanted)]


def _copy(source: Side, target: Conn, job_ids: list[UUID]) -> set[UUID]:
    """Write copies of these jobs, and of what belongs to them; returns those whose ids were not there.

    They pass as texts of JSON: no value passes through Python.
    """
    columns = [sql.Identifier(row[0]) for row in _tuples(source.conn, "columns")]
    names = sql.SQL(", ").join(columns).as_string()
    values = sql.SQL(", ").join(sql.SQL("(r).{}").format(column) for column in columns).as_string()
    statement = _SQL["add_jobs"].replace("{columns}", names).replace("{values}", values)
    given = {"rows": _texts(source.conn, "jobs", job_ids), "source": source.name}
    added = [row[0] for row in _read(target, statement, given)]
    for table in _TABLES:
        if rows := _texts(source.conn, table, job_ids):
            target.execute(_SQL[f"add_{table}"], {"rows": rows, "added": added})
    return set(added)


def _texts(conn: Conn, name: str, job_ids: list[UUID]) -> list[str]:
    return [row[0] for row in _tuples(conn, name, job_ids=job_ids)]


def _end(source: Side, target: Side, queue: str) -> Moved:
    """The target goes on when nothing runs in the source any more, and a last look has found nothing to carry."""
    for _ in operations.tries(RUNS_SEC):
        running, left = _left(source, queue)
        if not running:
            break
    if running or (carried := carry(source, target, queue)):
        return Moved(0 if running else carried, running, left, is_done=False)
    target.conn.execute(_SQL["resume_own"], {"queue": queue, "by": _author(of=source.name)})
    return Moved(0, 0, left, is_done=True)


def _left(source: Side, queue: str) -> tuple[int, int]:
    ((running, queued, dead),) = _tuples(source.conn, "left", queue=queue, most=LEFT)
    return running, queued + dead


def _locked(conn: Conn, queue: str) -> dict[str, Any]:
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(_SQL["lock_queue"], {"queue": queue}).fetchone()
    assert row is not None  # noqa: S101  the statement always returns its row
    return row


def _tuples(conn: Conn, name: str, **parameters: Any) -> list[Any]:
    return _read(conn, _SQL[name], parameters)


def _read(conn: Conn, statement: str, parameters: Any) -> list[Any]:
    with conn.cursor(row_factory=tuple_row) as cursor:
        return cursor.execute(statement.encode(), parameters).fetchall()
