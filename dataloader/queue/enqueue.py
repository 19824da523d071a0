"""How jobs are added: one, or many by columns, where the cost of each job counts. May raise psycopg.Error."""

from __future__ import annotations

import json
import os
import re
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import cache
from itertools import islice
from operator import attrgetter
from typing import Any
from uuid import UUID
from weakref import WeakSet

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from dataloader.queue import db
from dataloader.queue.db import Conn, array
from dataloader.queue.fields import NewJob as NewJob
from dataloader.queue.foreign import Foreign
from dataloader.queue.parents import UnknownParents, links

AT_ONCE = 1_000  # jobs that enqueue_many adds in one statement


_SQL = db.statements("queue.sql")
_PARENTS = db.statements("parents.sql")
_NOT_YET = UUID(int=0)
_loader = psycopg.adapters.get_loader(psycopg.adapters.types["uuid"].oid, psycopg.pq.Format.BINARY)
assert _loader  # noqa: S101  psycopg knows the type
_halves = struct.Struct(">QQ").pack
_uuid_of = _loader(0).load  # of sixteen bytes; in half of the time that UUID() takes where psycopg is in C

# Sessions that PostgreSQL itself has opened, by their first answer: a pooler hands out process ids of its own making.
# Behind one the name of a prepared statement may be another client's.
_direct: WeakSet[Conn] = WeakSet()

Columns = dict[str, list[Any]]


class QueueFull(Exception):
    """The queue holds as many jobs as it may (`operations.limit_length`)."""

    def __init__(self, queue: str, max_length: int, length: int) -> None:
        counted = f"{length:,}{' or more' if length == 10_000 else ''} jobs are queued"
        super().__init__(f"the queue {queue} is full: {counted}, and its limit is {max_length:,}")
        self.queue = queue
        self.max_length = max_length


class KeyTaken(Exception):
    """The idempotency key (of a list, that at this place) belongs to another producer's job, which is hidden."""

    def __init__(self, place: int | None = None) -> None:
        super().__init__("the idempotency key belongs to a job of another producer")
        self.place = place


@dataclass(frozen=True, slots=True)
class Asker:
    """On whose behalf jobs are added: `by` is kept in the journal, as `token airflow from 10.0.0.7`."""

    by: str
    sees_all: bool  # also the jobs of others that have the same idempotency key


_GETTERS = {field.name: attrgetter(field.name) for field in fields(NewJob)}
as_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def enqueue(
    conn: Conn, new: NewJob, limited: bool = False, asker: Asker | None = None, job_id: UUID | None = None
) -> tuple[UUID, str]:
    """Add a job and return its id and status; for an idempotency key seen before, those of the job that has it.

    `job_id`: a `new_id`. `limited`: raises QueueFull for a full queue. Raises KeyTaken and UnknownParents for jobs that
    the `asker` may not see.
    """
    job_id = job_id or new_id()
    parameters = {name: get(new) for name, get in _GETTERS.items()}
    parameters |= {"job_id": job_id, "args": as_json(new.args), "limited": limited, "by": asker and asker.by}
    with _in_one_transaction(conn) if new.depends_on else nullcontext():
        while True:
            if conn.execute(_SQL["enqueue"].encode(), parameters).fetchone():
                if new.depends_on:
                    _depend(conn, links([new.depends_on], [new.on_parent_failure], [job_id]), None, asker)
                return job_id, "queued"
            # A statement of its own, for its own snapshot: in one with the insert the twin's row stays invisible.
            if row := conn.execute(_SQL["find"], {"keys": [new.idempotency_key]}).fetchone():
                if asker and not_for(conn, asker, [row[0]]):
                    raise KeyTaken
                return row[0], row[1]
            if limited:
                require_room(conn, [new.queue])
            # The job that had the key was deleted between the two: the key is free again.


def new_id() -> UUID:
    """The id of a job that will be added."""
    return next(_new_ids(1))


def enqueue_one(conn: Conn, fields: Mapping[str, Any], schema: str | None = None) -> tuple[UUID, str]:
    """Add one job as enqueue_many does, in one statement; `fields` has a value for each field, `args` as JSON."""
    job_id, is_direct = new_id(), conn in _direct
    cursor = psycopg.Cursor(conn, row_factory=tuple_row)
    statement = _in_schema(_SQL["enqueue_one"], schema).encode()
    cursor.execute(statement, {**fields, "job_id": job_id}, prepare=None if is_direct else False)
    ((known, backend_pid),) = cursor.fetchall()
    if not is_direct and backend_pid == conn.info.backend_pid:
        _direct.add(conn)
    if known is None:
        return job_id, "queued"
    known_id, status = known.split()
    return UUID(known_id), status


def not_for(conn: Conn | Foreign, asker: Asker, job_ids: Collection[UUID]) -> set[UUID]:
    """The ids of these jobs without the ids that the asker may see."""
    if asker.sees_all or not job_ids:
        return set()
    return {row[0] for row in _execute(conn, _SQL["not_added_by"], {"job_ids": list(job_ids), "by": asker.by})}


def require_room(conn: Conn, queues: Iterable[str]) -> None:
    """Raise QueueFull for the first of these queues that holds as many jobs as it may."""
    if full := _SQL.first(conn, "full", queues=sorted(queues)):
        raise QueueFull(**full)


def enqueue_many(conn: Conn, jobs: Sequence[NewJob], schema: str | None = None) -> list[tuple[UUID, str]]:
    """Add jobs, all or none, on any connection, in its transaction if any; for each what `enqueue` returns, in order.

    `schema` is the queue's where the search_path does not lead to it. Above AT_ONCE jobs several statements are sent.
    """
    return enqueue_columns(conn, columns(jobs), schema)


def columns(jobs: Sequence[NewJob]) -> Columns:
    """Jobs as enqueue_columns takes them."""
    by_name = {name: merged(values) for name, values in spread(jobs).items() if name != "args"}
    return by_name | {"args": as_texts([job.args for job in jobs])}


def spread(jobs: Sequence[NewJob]) -> Columns:
    """A list for each field."""
    return {name: list(map(get, jobs)) for name, get in _GETTERS.items()}


def merged(values: list[Any]) -> list[Any]:
    """One value in place of many that are the same."""
    if not values or values[0] != values[-1]:  # it need not be counted
        return values
    alike = values.count(values[0]) == len(values) and len(set(map(type, values))) == 1
    return values[:1] if alike else values


def as_texts(objects: list[Mapping[str, Any]]) -> list[str]:
    """Each dict as JSON, by one call for all where that can be cut apart: it takes a fifth of the time."""
    texts = as_json(objects)[1:-1].split(",{")  # which stands between any two of them
    if len(texts) != len(objects):  # and also within one
        return list(map(as_json, objects))
    return [texts[0], *["{" + text for text in texts[1:]]]


def enqueue_columns(
    conn: Conn | Foreign, columns: Columns, schema: str | None = None, asker: Asker | None = None
) -> list[tuple[UUID, str]]:
    """Add jobs as enqueue_many does, from a list for each field: of values for each job, or of one for all.

    `args` are JSON texts. Raises KeyTaken and UnknownParents, having added nothing; the journal of jobs names the
    asker.
    """
    columns = columns | {"limits": [None if names is None else array(names) for names in columns["limits"]]}
    count = len(columns["args"])
    results = [(_NOT_YET, "queued")] * count
    existing: set[int] = set()
    left: Sequence[int] = range(count)
    keys = columns["idempotency_key"]
    if count > AT_ONCE and len(keys) == count:  # a fixed order over all statements, against deadlocks of two lists
        left = sorted(left, key=lambda number: keys[number] or "")
    is_one_statement = count <= AT_ONCE and keys == [None]
    is_one_statement &= not any(any(columns.get(name, ())) for name in ("depends_on", "trace"))
    with nullcontext() if is_one_statement else _in_one_transaction(conn):
        since = None
        if count > AT_ONCE:
            ((since,),) = _execute(conn, "SELECT clock_timestamp()::text", {})
        while left:
            left = _add(conn, columns, results, existing, left, since, schema)
        traces = columns.get("trace", [])
        for trace in set(traces) - {None}:  # a list mostly has one or none
            of_it = [result[0] for number, result in enumerate(results) if traces[number % len(traces)] == trace]
            _execute(conn, _in_schema(_SQL["set_trace"], schema), {"trace": trace, "job_ids": of_it})
        if any(columns.get("depends_on", ())):
            job_ids = [job_id for job_id, _ in results]
            _depend(conn, links(columns["depends_on"], columns["on_parent_failure"], job_ids), schema, asker)
        if asker and keys != [None]:
            # See that the jobs that were `found` are the asker's, and note that the others are.
            added = {result[0] for number, result in enumerate(results) if number not in existing}
            taken = not_for(conn, asker, {results[number][0] for number in existing} - added)
            if taken:
                raise KeyTaken(min(number for number in existing if results[number][0] in taken))
            _execute(conn, _SQL["sign"], {"by": asker.by, "job_ids": list(added)})
    return results


def require_room_for(conn: Conn, columns: Columns) -> None:
    """Raise QueueFull where a queue of these jobs is full, unless all are there already: a list may be sent again."""
    try:
        require_room(conn, set(columns["queue"]))
    except QueueFull:
        if not are_known(conn, set(columns["idempotency_key"])):
            raise


def are_known(conn: Conn, keys: set[str | None]) -> bool:
    """Whether each of these idempotency keys has a job."""
    return _SQL.do(conn, "find", keys=list(keys)) == len(keys)  # None, a job without a key, never matches


def _depend(
    conn: Conn | Foreign, links: Iterable[tuple[UUID, UUID, str]], schema: str | None, asker: Asker | None
) -> None:
    job_ids, parent_ids, on_failure = (list(each) for each in zip(*links, strict=True))
    hidden = not_for(conn, asker, {*parent_ids}.difference(job_ids)) if asker else set()
    parameters = {"job_ids": job_ids, "parent_ids": parent_ids, "on_failure": on_failure}
    ((unknown,),) = _execute(conn, _in_schema(_PARENTS["depend"], schema), parameters)
    if unknown or hidden:
        raise UnknownParents({*map(UUID, unknown)} | hidden)


def _add(
    conn: Conn | Foreign,
    columns: Columns,
    results: list[tuple[UUID, str]],
    existing: set[int],
    wanted: Sequence[int],
    since: str | None,
    schema: str | None,
) -> list[int]:
    """Add the jobs of these numbers to `results`; returns those whose key is free by now: its job was deleted."""
    statement, steps = _in_schema(_SQL["enqueue_many"], schema), _steps(wanted)
    new_ids = _new_ids(len(wanted))
    sent, gone = [], []
    with nullcontext() if isinstance(conn, Foreign) or len(steps) == 1 else conn.pipeline():
        for step in steps:  # while the server adds one, the next is made ready here
            ids = list(islice(new_ids, len(step)))
            some = {name: _part(values, step) if len(values) > 1 else values for name, values in columns.items()}
            place = None if since is None else [number + 1 for number in step]
            sent.append(_execute(conn, statement, {**some, "job_id": ids, "since": since, "place": place}))
            for number, new_id in zip(step, ids, strict=True):
                results[number] = new_id, "queued"
        for step, cursor in zip(steps, sent, strict=True):
            for nth, job_id, status in cursor:
                if job_id:
                    results[step[nth - 1]] = UUID(job_id), status
                    existing.add(step[nth - 1])
                else:
                    gone.append(step[nth - 1])
    return gone


def _part(values: Sequence[Any], step: Sequence[int]) -> Sequence[Any]:
    """The values of these jobs; a slice, which is quicker, where the jobs are neighbours."""
    return values[step.start : step.stop] if isinstance(step, range) else [values[n] for n in step]


def _steps(wanted: Sequence[int]) -> list[Sequence[int]]:
    """The jobs of each statement, by number. The first of several statements is small: the server begins sooner."""
    if len(wanted) <= AT_ONCE:
        return [wanted]
    starts = [0, *range(1 + AT_ONCE // 4, len(wanted), AT_ONCE)]
    return [wanted[start:end] for start, end in zip(starts, [*starts[1:], len(wanted)], strict=True)]


def _execute(conn: Conn | Foreign, statement: str, parameters: Mapping[str, Any]) -> Iterable[Sequence[Any]]:
    """A cursor with tuples on any connection, also one with another row factory; unprepared, for poolers."""
    if isinstance(conn, Foreign):
        return conn.execute(statement, parameters)
    return psycopg.Cursor(conn, row_factory=tuple_row).execute(statement.encode(), parameters, prepare=False)


@cache
def _in_schema(statement: str, schema: str | None) -> str:
    """The statement with the function that it calls named in full."""
    if schema is None:
        return statement
    name = psycopg.sql.Identifier(schema).as_string().replace("%", "%%")
    return re.sub(r"^(SELECT|.* FROM) dl_", lambda match: f"{match[1]} {name}.dl_", statement)


def _in_one_transaction(conn: Conn | Foreign) -> AbstractContextManager[Any]:
    """A transaction of our own where the caller has none; a caller ends its own transaction."""
    if isinstance(conn, Foreign):
        return conn.in_one_transaction()
    idle = conn.info.transaction_status == TransactionStatus.IDLE
    return conn.transaction() if conn.autocommit and idle else nullcontext()


def _new_ids(count: int) -> Iterator[UUID]:
    """Time-ordered UUIDs (version 7, RFC 9562), a microsecond apart: an index takes them at its right edge."""
    first = time.time_ns() // 1_000
    noise = struct.unpack(f">{count}Q", os.urandom(8 * count))
    return (
        _uuid_of(_halves(at // 1_000 << 16 | 0x7000 | at % 1_000 * 4_096 // 1_000, 1 << 63 | random >> 2))
        for at, random in enumerate(noise, first)
    )
