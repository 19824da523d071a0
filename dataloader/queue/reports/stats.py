"""Reports for people and monitoring: the farm in figures, lists of jobs, the journal. May raise psycopg.Error."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, make_dataclass, replace
from datetime import UTC, datetime
from functools import cache
from operator import itemgetter
from time import monotonic
from typing import Any, NamedTuple, cast
from uuid import UUID

import psycopg

from dataloader import log, periods
from dataloader.log import masking
from dataloader.model.plans import OVERDUE_SEC
from dataloader.queue import cursor, db, drift, lifecycle, migrations
from dataloader.queue.cursor import Page
from dataloader.queue.db import Conn, Row
from dataloader.queue.fields import FILTERS
from dataloader.queue.job import DEAD, FINAL, KINDS, TALLIED, Status
from dataloader.queue.operations import DEFAULTS
from dataloader.queue.plans import times
from dataloader.queue.reports import search
from dataloader.queue.reports.words import COUNTED

# Upper bounds (seconds) of the histogram of run times in dl_totals; a last bucket without a bound follows.
BUCKETS_SEC = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 86_400.0)
REAPER_SILENT_SEC = periods.seconds("REAPER_SILENT_SEC", 45.0)
DISK_FULL_SEC = db.DISK_FULL_SEC
COUNTING_SEC = 1.0  # the time for counting; after it all numbers are the noted ones
NOTED = 1_000_000  # that the reaper counts, to note it
NOTED_KEYS = 100_000  # keys of one ordered queue that the reaper counts
NOTING_SEC = 3.0  # the time for counting the jobs, and that for the keys
NOTE_LOCK = 0x646C_6C65_6E67_7468  # an advisory lock outside the range of keys
LOCK_HELD_SEC = 60.0  # for which a session may keep a lock of the farm's duties
NOTIFY_FULL = 0.25  # of the NOTIFY queue: it is empty on a healthy server
# The limits from which on a held snapshot slows claims (see slows_claims).
HELD_SEC = periods.seconds("HELD_SEC", 30.0)
HELD_XIDS = 10_000  # the same where this role may not see the age: transactions since
MUCH_DEAD = 20_000  # dead rows of dl_jobs, beside the share that a vacuum would leave anyhow
DEAD_SHARE = 0.02
SOME_DEAD = 5_000  # is enough where due jobs wait as well
LATE_SEC = periods.seconds("LATE_SEC", 60.0)
SCAN = 4_000  # jobs of each source that a short look at a list reads: some 2 ms
FILL_SEC = 0.5  # the time limit of a page; after it the page ends after SCAN_MOST jobs of a source
SCAN_MOST = 250_000
SORTED = 20_000  # jobs that a list in the order of their keys sorts
AGGREGATED = 2_000  # rows of the journal that one call of aggregate takes
AGGREGATING_SEC = 3.0  # the time limit of that call
ANEW = -1  # what aggregate returns when the journal's sequence has been set back
LONG_STEP_SEC = 300  # steps from which on throughput is read from dl_pace_long instead of dl_pace
BRIEFLY_SEC = 0.5, 0.1  # for a statement and for a lock: keeper and reaper have one session for this and for leases
MESSAGES = {"of_each": 100, "most": 10_000}  # newest messages checked for delivery, per webhook and in all
FOUND = 20_000  # jobs that a search by id or arguments may read by an index for a page
_SQL = db.statements("stats.sql", "keys_of", "deliveries", "table_locks")
_SEARCH = db.statements("search.sql")
QUEUED = frozenset({"ready", "scheduled", "blocked"})
_CHANGED = "{changed_at}"
# The sources of lists (search.sql): when their jobs changed, and what these may count as; the last two are of searches.
_SOURCES: dict[str, tuple[str, frozenset[str]]] = {
    "of_finished": ("finished_at", frozenset(map(str, FINAL))),
    "of_dead": ("finished_at", frozenset(map(str, DEAD))),
    "of_running": ("coalesce(started_at, created_at)", frozenset({"running"})),
    "of_queued": ("created_at", QUEUED),
    "of_retries": ("created_at", QUEUED),
    "of_near": (_CHANGED, frozenset(TALLIED)),
    "of_args": (_CHANGED, frozenset(TALLIED)),
}
_WHOLE = ("of_near", "of_args")  # a list reads all of their jobs, up to FOUND
_BY_QUEUE = ("of_dead", "of_retries")  # their indexes begin with the queue
_LAST_ID = UUID(int=2**128 - 1)
_FIRST_ID = UUID(int=0)
_FINAL = frozenset(KINDS[status] for status in FINAL)
_ENDS = _FINAL | {KINDS[Status.QUEUED]}
_TOKEN_WORDS = ",".join("%%" + word.replace("_", r"\\_") + "%%" for word in masking.TOKEN_WORDS)
_TOKEN_WORDS = f"'{{{_TOKEN_WORDS}}}'::text[]"
_FACTS = ("reason", "error", "signal", "exit_status", "peak_mb", "cpu_sec")
_BOUNDED = ("length", "scheduled", "retries", "dead", "keys")
_SUMMED = ("length", "scheduled", "fresh", "retries", "busy", "dead", "at_risk")


class TooMany(ValueError):
    """A list would have to sort more jobs than it may read."""


_Named = make_dataclass("_Named", [(name, str | None, None) for name in FILTERS], frozen=True, slots=True)


@dataclass(frozen=True, slots=True)
class Wanted(_Named):  # type: ignore[misc, valid-type]
    """Which jobs a list is to have, and its order; None is no filter. `q` is a search, `status` of job.STATUSES."""

    status: str | None = None
    error_group: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    sort: str = "changed"
    q: str | None = None

    @property
    def whole(self) -> Wanted:
        """This filter with the fields that the search names; raises WrongSearch if it names another value."""
        named = search.parsed(self.q).fields
        for name, value in named.items():
            if getattr(self, name) not in (None, value):
                raise search.WrongSearch(f"{name} is {getattr(self, name)} beside q, and {value} in it: leave one out")
        return replace(self, **cast("dict[str, Any]", named))


class Attempt(NamedTuple):
    """One run of a job; `attempt` begins at 1 again when a finished job is put back, by `requeued_by`."""

    run: int
    requeued_by: str | None
    attempt: int
    worker: str | None
    started_at: datetime
    ended_at: datetime | None
    seconds: float | None
    end: str | None
    reason: str | None
    error: str | None
    signal: int | None
    exit_status: int | None
    peak_mb: float | None
    cpu_sec: float | None


def overview(conn: Conn) -> Row:
    """The farm in figures: `at`, `total` and `queues`, whose fields model.queues describes.

    The cost is bounded: a figure too large to count is the reaper's of `counted_at`, or a lower bound.
    """
    try:
        rows, most = _count(conn, COUNTED, COUNTING_SEC), COUNTED
    except psycopg.errors.QueryCanceled:
        rows, most = _SQL.rows(conn, "queues", most=0, most_keys=0), 0
    queues = sorted((figures(row, most) for row in rows), key=itemgetter("queue"))
    keys = [row["keys"] for row in queues if row["keys"] is not None]
    total = dict.fromkeys(("queue", *DEFAULTS)) | {name: sum(row[name] for row in queues) for name in _SUMMED}
    total |= _SQL.rows(conn, "live_workers")[0] | {
        "keys": sum(keys) if keys else None,
        "length_is_exact": all(row["length_is_exact"] for row in queues),
        "lag_sec": max((row["lag_sec"] for row in queues), default=0.0),
        "counted_at": min((row["counted_at"] for row in queues if row["counted_at"]), default=None),
    }
    return {"at": datetime.now(UTC), "total": total, "queues": queues}


def _count(conn: Conn, most: int, within_sec: float, most_keys: int = 0, statement: str = "queues") -> list[Row]:
    with conn.transaction(force_rollback=True):  # undoes the settings, also within another transaction
        db.give_up_after(conn, within_sec)
        db.by_index(conn, sorts=False)
        return _SQL.rows(conn, statement, most=most, most_keys=most_keys or COUNTED)


def figures(row: Row, most: int) -> Row:
    """PURE: a queue's figures; the noted figure, if larger, replaces each that has reached `most`."""
    figures_ = {name: value for name, value in row.items() if not name.startswith("noted_")}
    is_noted = False
    for name in _BOUNDED:
        noted = row[f"noted_{name}"]
        if row[name] is not None and row[name] >= most and noted is not None:
            figures_[name], is_noted = max(row[name], noted), True
    figures_["length_is_exact"] = row["length"] < most and row["scheduled"] < most
    figures_["fresh"] = max(figures_["length"] - figures_["retries"], 0)
    figures_["counted_at"] = row["counted_at"] if is_noted else None
    return figures_


def note_lengths(conn: Conn, since_sec: float) -> float | None:
    """Called by the reaper: count every queue; returns the longest lag; None: another reaper did or does it.

    Raises QueryCanceled where that takes too long; the figures of pages are lower bounds then.
    """
    with conn.transaction():
        db.give_up_after(conn, *BRIEFLY_SEC)
        if not _SQL.value(conn, "may_note", lock=NOTE_LOCK, since_sec=since_sec):
            return None
        counted, keys = _count(conn, NOTED, NOTING_SEC), dict[str, int]()
        with suppress(psycopg.errors.QueryCanceled):  # lengths count more than keys
            keys = {row["queue"]: row["keys"] for row in _count(conn, NOTED, NOTING_SEC, NOTED_KEYS, "keys")}
        noted = [row | {"keys": keys.get(row["queue"])} for row in counted]
        _SQL.do(conn, "note_lengths", queues=json.dumps(noted, default=str))
    return max((row["lag_sec"] for row in counted), default=0.0)


def wrong(conn: Conn, alerts_queue: str) -> list[Row]:
    """A schedule, a backfill, a webhook and a task that do not work although they should, as model.queues.Wrong."""
    return _SQL.rows(conn, "wrong", overdue_sec=OVERDUE_SEC, alerts_queue=alerts_queue, **MESSAGES)


def deliveries(conn: Conn) -> list[Row]:
    """The name of each webhook whose latest messages have not arrived, with `undelivered` and `last_error`."""
    return _SQL.rows(conn, "deliveries", **MESSAGES)


def beginning(conn: Conn) -> Row:
    """Whether the farm has had a job (`has_begun`)."""
    return _SQL.rows(conn, "beginning")[0]


def fitness(conn: Conn, reaper_period_sec: float = 0.0) -> Row:
    """The facts that decide whether a job could be added and ended now (alerts.unfit); writes no row.

    A reaper without a statement for three periods and for REAPER_SILENT_SEC counts as absent.
    """
    reaper_sec = max(REAPER_SILENT_SEC, 3 * reaper_period_sec)
    row = _SQL.rows(conn, "fitness", tables=drift.TABLES, reaper_sec=reaper_sec, full_sec=DISK_FULL_SEC)[0]
    is_full = monotonic() - db.Connection.disk_full_at < DISK_FULL_SEC
    return row | {"disk_full": is_full or row["disk_full"]}


def workers(conn: Conn) -> list[Row]:
    """The workers of all hosts as their keepers showed them within the last ten minutes, with what they run."""
    return _SQL.rows(conn, "workers")


def used(conn: Conn, job_id: UUID, worker: str | None) -> Row | None:
    """The resources of a job's run on this worker at `seen_at`; `stuck_since`: a stuck run's last report.

    The result is None if no keeper has reported the run within 30 s.
    """
    return _SQL.first(conn, "used", job_id=job_id, worker=worker)


def tasks(conn: Conn) -> list[Row]:
    """The declarations of tasks and the resources that runs have used; `memory_mb` and `cpus` are the valid needs."""
    return _SQL.rows(conn, "tasks")


def learned(conn: Conn) -> dict[str, tuple[float, float]]:
    """The measured needs of runs: MB and processors, for the tasks whose needs are large enough to count."""
    return {row["task"]: (row["memory_mb"], row["cpus"]) for row in _SQL.rows(conn, "learned")}


def show_workers(
    conn: Conn,
    farm: str,
    host: str,
    workers: Sequence[Mapping[str, Any]],
    host_memory_mb: float | None = None,
    reload_error: str | None = None,
) -> None:
    """Called by a keeper: store the farm's workers, their host's MB for runs, and why its latest reload was refused.

    Raises after 0.1 s without a lock.
    """
    present = json.dumps(list(workers), default=str)
    shown: Row = {"farm": farm, "host": host, "workers": present}
    shown |= {"host_memory_mb": host_memory_mb, "reload_error": reload_error}
    with conn.transaction():
        db.give_up_after(conn, *BRIEFLY_SEC)
        _SQL.do(conn, "show_workers", **shown)


def server(conn: Conn) -> Row:
    """The server: version, sizes, connections, dead tuples, its oldest transaction; what `vacuum` says."""
    return _SQL.rows(conn, "postgres")[0] | vacuum(conn)


def postgres(conn: Conn, reaper_period_sec: float = 0.0) -> Row:
    """What `server` and `fitness` say, with `blockers`; `faults` are those of the schema."""
    row = server(conn) | {"blockers": blockers(conn), "faults": migrations.faults(conn)}
    return row | fitness(conn, reaper_period_sec)


def is_locked(conn: Conn) -> bool:
    """Whether a session has locked dl_jobs (alerts.LOCKED)."""
    return bool(_SQL.do(conn, "table_locks"))


def blockers(conn: Conn) -> list[Row]:
    """The sessions that keep a lock of the farm's duties, or the notification queue full (alerts.blocked)."""
    return _SQL.rows(conn, "blockers", held_sec=LOCK_HELD_SEC, notify_full=NOTIFY_FULL)


def vacuum(conn: Conn) -> Row:
    """Dead and living tuples of dl_jobs, and `held_by`, the holder of its vacuum as far as this role may see it."""
    return _SQL.rows(conn, "vacuum")[0]


def slows_claims(vacuum: Row, lag_sec: float) -> Row | None:
    """PURE: the holder of vacuum, where dead rows slow down claims; age alone does no harm beside an idle queue."""
    held, dead = vacuum["held_by"], vacuum["jobs_dead_tuples"]
    if held is None or (held["xids"] < HELD_XIDS if held["age_sec"] is None else held["age_sec"] < HELD_SEC):
        return None
    is_much = dead >= MUCH_DEAD + DEAD_SHARE * vacuum["jobs_live_tuples"]
    is_late = dead >= SOME_DEAD and lag_sec > LATE_SEC
    return held if is_much or is_late else None


def limits(conn: Conn, name: str | None = None) -> list[Row]:
    """The limits with their use; `waiting` counts up to COUNTED, `room` up to 100."""
    return _SQL.rows(conn, "limits", wanted=name, most=COUNTED)


def pace(conn: Conn, minutes: int) -> list[Row]:
    """How many runs ended, and how many of them badly, in each ten seconds of the last minutes; the oldest first."""
    return throughput(conn, minutes * 60 + 10, 10)


def throughput(conn: Conn, span_sec: int, step_sec: int) -> list[Row]:
    """Ended and failed runs in each step of a span up to now; the steps are a multiple of 10 s."""
    statement = _SQL["throughput"].replace("{pace}", "dl_pace" if step_sec < LONG_STEP_SEC else "dl_pace_long")
    return db.rows(conn, statement, {"span_sec": span_sec, "step_sec": step_sec}, prepare=False)


def totals(conn: Conn) -> list[Row]:
    """The journal's sums by queue, task and kind; `seconds` and `buckets` (BUCKETS_SEC) are of ended runs."""
    return _SQL.rows(conn, "totals")


def aggregate(conn: Conn) -> int:
    """Add new rows of the journal to the sums; how many, at most AGGREGATED, or ANEW. Raises rather than wait."""
    with conn.transaction():
        db.give_up_after(conn, AGGREGATING_SEC, BRIEFLY_SEC[1])
        ((rolled,),) = db.call(conn, "dl_roll", AGGREGATED)
        return int(rolled)


def job(conn: Conn, job_id: UUID) -> Row | None:
    """Every field of one job, its arguments, `schedule` and `checkpoint` included; None for an unknown id."""
    shown = lifecycle.status(conn, job_id)
    rest = _SQL.first(conn, "job", job_id=job_id)
    if not shown or not rest:
        return None
    made_by = times.due_of_key(rest["idempotency_key"])
    schedule = {"name": made_by[0], "due": made_by[1]} if made_by else None
    checkpoint = _SQL.first(conn, "checkpoint", job_id=job_id)
    return shown | rest | {"schedule": schedule, "checkpoint": checkpoint}


def result(conn: Conn, job_id: UUID) -> Row | None:
    """`job_id`, `status` and `result`, without secrets, None unless the job has succeeded; None for an unknown id."""
    for row in _SQL.rows(conn, "result", job_id=job_id):
        # The args tell which words of the result are the job's own secrets.
        return row | {"result": log.masked({"args": row.pop("args"), "result": row["result"]})["result"]}
    return None


def events(conn: Conn, job_id: UUID, after: int = 0, limit: int = 200) -> list[Row]:
    """The job's journal behind the event `after`, the oldest first."""
    return _with_payload(_SQL.rows(conn, "next_events", job_id=job_id, queue=None, after=after, limit=limit))


def latest_events(conn: Conn, after: int | None, limit: int, queue: str | None = None) -> list[Row]:
    """The journal of all jobs, or of a queue's, behind the event `after`; None: the newest. The oldest first."""
    if after is None:
        return _with_payload(_SQL.rows(conn, "last_events", limit=limit, queue=queue)[::-1])
    return _with_payload(_SQL.rows(conn, "next_events", job_id=None, queue=queue, after=after, limit=limit))


def attempts(events: Iterable[Row]) -> list[Attempt]:
    """PURE: the runs of a job by its journal, the oldest first."""
    runs: list[Attempt] = []
    is_over, requeued_by = False, None
    for event in events:
        kind, payload = event["kind"], event["payload"] or {}
        if kind == "picked":
            begun = (payload.get("attempt", 0), payload.get("worker"), event["ts"])
            runs.append(Attempt(len(runs) + 1, requeued_by, *begun, *[None] * 9))
            requeued_by = None
        elif kind in _ENDS and runs and runs[-1].ended_at is None:
            facts: dict[str, Any] = {name: payload.get(name) for name in _FACTS}
            seconds = (event["ts"] - runs[-1].started_at).total_seconds()
            runs[-1] = runs[-1]._replace(ended_at=event["ts"], seconds=seconds, end=kind, **facts)
        elif kind == "requeue" and is_over:
            requeued_by = payload.get("by")
        is_over = kind in _FINAL or (is_over and kind not in ("requeue", "picked"))
    return runs


def jobs(conn: Conn, wanted: Wanted, limit: int = 50, after: str | None = None, scan: int | None = None) -> Page:
    """A page of up to `limit` jobs, without their arguments; `after` is the `next` of the page before.

    The page is full unless it is the last or FILL_SEC is over. With `scan` about so many jobs of each source are
    read. Raises ValueError for `after`, WrongSearch, TooMany.
    """
    wanted, advice = wanted.whole, None
    if wanted.sort == "key":
        rows, following = _by_key(conn, wanted, limit, after)
    elif scan is not None:
        rows, following = _by_change(conn, wanted, limit, after, scan=scan)
    else:
        try:
            with conn.transaction():
                db.give_up_after(conn, FILL_SEC)
                rows, following = _by_change(conn, wanted, limit, after)
        except psycopg.errors.QueryCanceled:
            rows, following = _by_change(conn, wanted, limit, after, scan=SCAN_MOST)
    ran = [row["job_id"] for row in rows if row["started_at"]]
    run_secs = {row["job_id"]: row["run_sec"] for row in _SQL.rows(conn, "last_runs", job_ids=ran)} if ran else {}
    if search.parsed(wanted.q).args and not has_args_index(conn):
        advice = (
            "arguments are searched job by job, the last change first: where that takes too long,"
            " `dataloader search-index create` makes an index for them"
        )
    return Page([row | {"run_sec": run_secs.get(row["job_id"])} for row in rows], following, advice)


def chosen(
    conn: Conn, wanted: Wanted, kinds: Collection[str], limit: int, after: str | None = None
) -> tuple[list[UUID], str | None]:
    """The next jobs of a list that count as one of `kinds`, and where to go on. Raises what `jobs` does."""
    rows, following = _by_change(conn, wanted.whole, limit, after, kinds, SCAN_MOST)
    return [row["job_id"] for row in rows if kind(row["status"], row["blocked_on"]) in kinds], following


def kind(status: str, blocked_on: str | None) -> str:
    """PURE: what a job counts as, one of job.TALLIED."""
    if status != Status.QUEUED:
        return status
    return {None: "ready", "time": "scheduled"}.get(blocked_on, "blocked")


def has_args_index(conn: Conn) -> bool:
    """Whether there is an index for searches by arguments, and it works."""
    return _SEARCH.value(conn, "args_index") is True


def create_args_index(conn: Conn) -> bool:
    """Make the index, outside of any transaction; False: it exists. Only for operators: each write gets slower."""
    if has_args_index(conn):
        return False
    conn.execute(_SEARCH["drop_args_index"])  # an invalid one
    conn.execute(_SEARCH["create_args_index"])
    return True


def drop_args_index(conn: Conn) -> bool:
    """Remove the index, outside of any transaction; False: there was none."""
    row = conn.execute(_SEARCH["args_index"]).fetchone()
    conn.execute(_SEARCH["drop_args_index"])
    return row is not None


def _by_change(
    conn: Conn, wanted: Wanted, limit: int, after: str | None, kinds: Collection[str] = TALLIED, scan: int | None = None
) -> tuple[list[Row], str | None]:
    until, before = _cursor(after, datetime.fromisoformat) or (wanted.until or db.LATEST, _LAST_ID)
    asked = filters(wanted) | bounds(wanted) | {"until": until, "before": before, "limit": limit + 1, "scan": scan}
    rows: list[Row] = []
    edge: datetime | None = None
    with conn.transaction():
        sources = [each for each in _sources(wanted) if _SOURCES[each][1] & set(kinds)]
        sources, named = searched(conn, wanted, sources)
        asked |= named
        db.by_index(conn, bitmaps="of_args" in sources, sorts=all(each in _WHOLE for each in sources))
        if scan is not None and (timed := [each for each in sources if each not in _WHOLE]):
            edges = db.rows(conn, _all(timed, "edge"), asked, prepare=False)
            edge = max((row["changed_at"] for row in edges), default=None)
            asked["since"] = edge or asked["since"]
        if sources:
            rows = db.rows(conn, _all(sources, "listed"), asked, prepare=False)
    rows.sort(key=itemgetter("changed_at", "job_id"), reverse=True)
    return _page(rows, limit, lambda row: row["changed_at"].isoformat(), edge.isoformat() if edge else None)


def searched(conn: Conn, wanted: Wanted, sources: list[str]) -> tuple[list[str], Row]:
    """The sources for the search, and the range of ids for the source `of_near`; in a transaction."""
    asked = search.parsed(wanted.q)

    def are_few(source: str, **named: Any) -> bool:
        db.by_index(conn, bitmaps=source == "of_args", sorts=False)
        statement = _SEARCH["are_few"].replace("{source}", _SEARCH[source])
        return bool(db.rows(conn, statement, {"most": FOUND} | named, prepare=False)[0]["are_few"])

    if asked.args and has_args_index(conn) and are_few("of_args", args=list(asked.args)):
        sources = ["of_args"]
    near = {"near_from": asked.near and asked.near.first, "near_to": asked.near and asked.near.last}
    if asked.near and are_few("of_near", **near):
        return ["of_near"] if asked.ids else [*sources, "of_near"], near
    return sources, dict.fromkeys(near)


def _by_key(conn: Conn, wanted: Wanted, limit: int, after: str | None) -> tuple[list[Row], str | None]:
    key, after_id = _cursor(after, str) or ("", _FIRST_ID)
    asked = filters(wanted) | bounds(wanted) | {"before": _LAST_ID, "scan": SORTED + 1}
    of_queue = {name: _SEARCH["of_queue"] for name in _BY_QUEUE}
    sources = " UNION ALL ".join(_of(each, "source", of_queue.get(each, "true")) for each in _sources(wanted))
    count, page = (spliced(_SQL[name].replace("{sources}", sources)) for name in ("in_time", "by_key"))
    with conn.transaction():
        db.by_index(conn)
        if db.rows(conn, count, asked, prepare=False)[0]["count"] > SORTED:
            raise TooMany(
                f"more than {SORTED:,} jobs are too many to sort by key: name a queue or a status, bound their time by"
                " since and until, or sort by change"
            )
        rows = db.rows(conn, page, asked | {"key": key, "after_id": after_id, "limit": limit + 1}, prepare=False)
    return _page(rows, limit, itemgetter("lock_key"))


def _sources(wanted: Wanted) -> tuple[str, ...]:
    """The sources that a list is merged of."""
    status = wanted.status
    if status is None:
        return ("of_finished", "of_running", "of_queued")
    if status == "dead" or status in DEAD:
        return ("of_dead",)
    if status in FINAL:
        return ("of_finished",)
    return (f"of_{status}",) if status in ("running", "retries") else ("of_queued",)  # also ready, blocked, fresh


def bounds(wanted: Wanted) -> Row:
    """The times between which the jobs of a list have changed."""
    return {"since": wanted.since or db.EARLIEST, "until": wanted.until or db.LATEST}


def filters(wanted: Wanted) -> Row:
    """The parameters of `matches`."""
    given = {name: value for name, value in asdict(wanted).items() if name not in ("since", "until", "sort", "q")}
    return given | search.parameters(search.parsed(wanted.q))


def _page(
    rows: list[Row], limit: int, key: Callable[[Row], str], edge: str | None = None
) -> tuple[list[Row], str | None]:
    """Cut the rows at a full page; with an `edge` there may be more behind it."""
    shown = rows[:limit]
    if len(rows) > limit:
        return shown, cursor.at([key(shown[-1]), str(shown[-1]["job_id"])])
    return shown, cursor.at([edge, str(_FIRST_ID)]) if edge else None


def _cursor(text: str | None, read: Callable[[str], Any]) -> tuple[Any, UUID] | None:
    if text is None:
        return None
    key, job_id = cursor.parts(text, 2)
    try:
        return read(key), UUID(job_id)
    except ValueError:
        raise cursor.WrongCursor from None


def _with_payload(rows: list[Row]) -> list[Row]:
    """The rows of a journal, whose payload may be any JSON where another service has written it."""
    read = [(row, row["payload"] or {}) for row in rows]
    return [row | {"payload": payload if isinstance(payload, dict) else {"payload": payload}} for row, payload in read]


def _all(sources: Iterable[str], statement: str) -> str:
    """The statement for all of these sources, in one snapshot: a job that changes meanwhile is in one of them."""
    return " UNION ALL ".join(f"({_of_source(each, statement)})" for each in sources)


@cache
def _of_source(name: str, statement: str) -> str:
    if name not in _BY_QUEUE:
        return spliced(_of(name, statement), name)
    of_each = _of(name, statement, _SQL["of_its"], "queue DESC, ")
    return spliced(_of(name, "of_each_queue").replace("{statement}", of_each), name)


def _of(name: str, statement: str, of_its: str = "true", first: str = "") -> str:
    text = _SQL[statement].replace("{source}", _SQL["source"]).replace("{of_its}", of_its).replace("{first}", first)
    return text.replace("{of}", _SEARCH[name]).replace("{at}", _SOURCES[name][0])


def spliced(text: str, source: str = "") -> str:
    """A statement with the parts that lists, tallies and bulk orders share in their places."""
    parts: dict[str, str] = _SQL | _SEARCH
    parts = parts | {"far": "true"} if source in ("of_near", "of_ids") else parts
    for part in ("matches", "far", "found", "shown", "safe", "texts", "secret", "secret_words", "kind", "changed_at"):
        text = text.replace("{" + part + "}", parts[part])
    return text.replace("{tokens}", masking.TOKENS).replace("{token_words}", _TOKEN_WORDS)
