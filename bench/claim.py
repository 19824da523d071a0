"""One session without a worker: the time of a claim behind a backlog, and the writes of a job's life.

Each case of a backlog is a schema of its own with 1,000 claimable jobs and further rows beside them; the cases take
turns. Claims that meet jobs of a busy key or a full limit first park them, many at a time; the longest of these claims
is a line of its own. Then the bench vacuums their table, as autovacuum would within its minute.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from bench.place import SQL, BenchError, Place, answer, clear, new_jobs, seed
from bench.results import Line, percentile
from dataloader.farm.batch import Bookmark
from dataloader.queue import db, lifecycle, operations
from dataloader.queue.enqueue import enqueue, enqueue_many
from dataloader.queue.job import Finish
from dataloader.queue.lifecycle import Ended

SAMPLES = 200
CLAIMABLE = 1_000  # jobs in every case, beside what the case adds
HOUR_SEC = 3_600.0
WEEK_SEC = 168 * HOUR_SEC
BACKOFF_SEC = 15.0


@dataclass(frozen=True, slots=True)
class Case:
    """`rows` further rows of a kind, beside those of the base, which is another case.

    `busy`: their keys have running jobs. `locked`: another session has locked them. `ordered`: in an ordered queue,
    where the first of these rows has failed. `limit`: the further rows have this limit, which is full.
    """

    name: str
    rows: int
    more: Mapping[str, Any] = field(default_factory=dict)
    base: str = "base"
    busy: int = 0
    locked: bool = False
    ordered: bool = False
    limit: str = ""


OLDER, YOUNGER = {"age_sec": HOUR_SEC}, {"age_sec": -HOUR_SEC}
BASES = (Case("base", 0), Case("base, ordered", 0, ordered=True))
CASES = (
    Case("100,000 ready", 100_000, YOUNGER),
    Case("1,000,000 ready", 1_000_000, YOUNGER),
    Case("1,000,000 for next week", 1_000_000, {"delay_sec": WEEK_SEC}),
    Case("1,000,000 finished", 1_000_000, {"status": "succeeded"}),
    Case("5,000 of keys busy elsewhere", 5_000, OLDER | {"key": "busy", "keys": 5_000}, busy=5_000),
    Case("2,000 locked at the head", 2_000, OLDER | {"key": "locked"}, locked=True),
    Case("100,000 of one busy key", 100_000, OLDER | {"keys": 1}, busy=1),
    Case("100,000 of a full limit", 100_000, OLDER | {"key": "limited"}, limit="bench"),
    Case("100,000 behind a failing head", 100_000, OLDER | {"key": "f", "keys": 1}, "base, ordered", ordered=True),
)
PARKING = "100,000 of one busy key"
VACUUMED = (PARKING, "100,000 of a full limit", "100,000 behind a failing head")


class Claimer:
    """A worker's session on one case, without a worker."""

    def __init__(self, place: Place, stack: ExitStack, case: Case) -> None:
        self.schema = place.queue("claim_" + re.sub(r"\W", "_", case.name))
        self.conn = stack.enter_context(place.connect(self.schema))
        self.case = case
        self._bookmark = Bookmark()
        self._fill(place)
        self.session = lifecycle.open_session(self.conn, f"bench:{self.schema}")
        if case.ordered:
            operations.set_order(self.conn, "bench", "bench", ordered=True)
            if case.rows and (job := lifecycle.step(self.session, ["bench"], BACKOFF_SEC, 1).job):
                lifecycle.finish_some(self.conn, job.claimed_by, [Ended(job, Finish("retry", "bench", WEEK_SEC))])

    def until_claimed(self) -> list[float]:
        """Milliseconds of each claim up to the first that gets a job; the job is finished then."""
        times = []
        while True:
            start = time.perf_counter()
            step = lifecycle.step(self.session, ["bench"], BACKOFF_SEC, 1, None, self._bookmark.start())
            times.append((time.perf_counter() - start) * 1_000)
            self._bookmark.head = step.head or self._bookmark.head
            if step.job:
                lifecycle.finish_some(self.conn, step.job.claimed_by, [Ended(step.job, Finish("succeed"))])
                return times
            if not step.look_again:
                raise BenchError("a claim found nothing where there are jobs")

    def pages(self) -> int:
        """The pages that one claim reads, by EXPLAIN; the claim is rolled back."""
        ends = dict.fromkeys(("job_ids", "attempts", "verbs", "errors", "delays_sec", "progress", "facts"))
        head = self._bookmark.head
        parameters = ends | {"queues": ["bench"], "by_lag": False, "backoff_sec": BACKOFF_SEC, "most": 1}
        parameters |= {"worker": self.session.worker, "backend_start": self.session.backend_start, "prefer": None}
        parameters |= {"from_priority": head.priority, "from_time": head.time}
        explain = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + db.statements("queue.sql")["step"]
        self.conn.execute("BEGIN")
        row = self.conn.execute(explain.encode(), parameters).fetchone()
        self.conn.execute("ROLLBACK; SELECT pg_advisory_unlock_all()")
        plan = row[0][0]["Plan"] if row else {}
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])

    def vacuum(self) -> list[float]:
        """Vacuum; returns milliseconds of claims before it, which step over the dead index entries of parked jobs."""
        times = [self.until_claimed()[-1] for _ in range(50)]
        seed(self.conn, len(times), age_sec=-2 * HOUR_SEC)
        self.conn.execute("VACUUM dl_jobs")
        return times

    def _fill(self, place: Place) -> None:
        """The rows of the base and of the case; vacuumed and analysed, as by autovacuum within its minute."""
        case, conn = self.case, self.conn
        self._switch("DISABLE")
        seed(conn, CLAIMABLE)
        if case.rows:
            seed(conn, place.scaled(case.rows), **case.more)
        if case.limit:
            operations.set_limit(conn, case.limit, "bench", most=0)
            conn.execute(SQL["limit_rows"], {"limit": case.limit, "key": case.more["key"]})
        self._switch("ENABLE")
        if case.busy:
            conn.execute(SQL["hold"], {"key": case.more.get("key", "key"), "keys": case.busy})
        conn.execute("VACUUM (ANALYZE) dl_jobs")

    def _switch(self, how: str) -> None:
        for (trigger,) in self.conn.execute(SQL["quiet"]).fetchall():
            self.conn.execute(sql.SQL(f"ALTER TABLE dl_jobs {how} TRIGGER {{}}").format(sql.Identifier(trigger)))


def behind_backlogs(place: Place) -> Iterator[Line]:
    """A line for each case, and one for the claims that park a busy key's jobs."""
    samples = place.scaled(SAMPLES, least=10)
    with ExitStack() as stack:
        claimers = {case.name: Claimer(place, stack, case) for case in (*BASES, *CASES)}
        first = {name: claimer.until_claimed() for name, claimer in claimers.items()}
        before = {name: claimers[name].vacuum() for name in VACUUMED}
        for claimer in claimers.values():
            if claimer.case.locked:  # last, for open transactions delay vacuums and new indexes
                other = stack.enter_context(place.connect(claimer.schema))
                other.execute("BEGIN")
                other.execute(SQL["lock_older"], {"age_sec": HOUR_SEC / 2})
        pages = {name: claimer.pages() for name, claimer in claimers.items()}
        times: dict[str, list[list[float]]] = {name: [] for name in claimers}
        for _ in range(place.rounds):
            in_turns = [[each.until_claimed()[-1] for each in claimers.values()] for _ in range(samples)]
            for (name, claimer), sample in zip(claimers.items(), zip(*in_turns, strict=True), strict=True):
                times[name].append([*sample])
                seed(claimer.conn, samples, age_sec=-2 * HOUR_SEC)  # the number of jobs stays the same
    for case in CASES:
        ours, bare = ([percentile(sample, 50) for sample in times[name]] for name in (case.name, case.base))
        rows = place.scaled(case.rows) if case.rows else 0
        name = case.name if rows == case.rows else f"{case.name} (here {rows:,})"
        note = f"pages {pages[case.name]}, of its base {pages[case.base]}"
        yield Line("claim", name, "ms", ours, bare, most=1.2, note=note)
    parking, until = first[PARKING], statistics.median(before[PARKING])
    note = f"the longest of {len(parking)} claims, {sum(parking):,.0f} ms in all; {until:.2f} until the vacuum"
    yield Line("claim", "parking the busy key's jobs", "ms", [max(parking)], note=note)


# --- the writes of a job's life ---

LIVES = 500
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ordered": {"ordered": True},
    "merged": {"ordered": True, "merge": True},
    "fair": {"fair_by": "partition_key"},
}
UNITS = ("KB of WAL", "index entries", "row versions", "µs of the backend's CPU")


def life(place: Place) -> Iterator[Line]:
    """The writes of a job from its trigger to its end, by the kind of its queue, and the backend's CPU time.

    The bare limit is an INSERT, the plain claim and the plain finish on the contract's tables.
    """
    jobs = place.scaled(LIVES, least=100)
    with ExitStack() as stack:
        bare = stack.enter_context(place.connect(place.bare()))
        inspector = stack.enter_context(psycopg.connect(place.admin_dsn, autocommit=True))
        try:
            inspector.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(place.bare())))
            inspector.execute("CREATE EXTENSION pg_walinspect")  # in a schema of the bench, which takes it away
        except psycopg.Error as error:
            yield Line("life", "all", "", note=f"needs pg_walinspect: {error}".splitlines()[0])
            return
        sides: dict[str, Callable[[], list[float]]] = {"bare": partial(_cost, inspector, bare, jobs, _live_bare)}
        for kind, order in KINDS.items():
            conn = stack.enter_context(place.connect(place.queue(f"life_{kind}")))
            if order:
                operations.set_order(conn, "bench", "bench", **order)
            sides[f"{kind}, one by one"] = partial(_cost, inspector, conn, jobs, partial(_live, most=1))
            sides[f"{kind}, 100 at a time"] = partial(_cost, inspector, conn, jobs, partial(_live, most=100))
        costs = dict(zip(sides, place.in_turns(*sides.values()), strict=True))
    others = costs.pop("bare")
    for name, ours in costs.items():
        for at, unit in enumerate(UNITS):
            yield Line("life", name, unit, [each[at] for each in ours], [each[at] for each in others])


def _cost(
    inspector: psycopg.Connection, conn: db.Connection, jobs: int, live: Callable[[db.Connection, int], None]
) -> list[float]:
    """The value of a job for each of UNITS."""
    live(conn, jobs)  # so that plans and pages are there
    clear(conn)
    schedstat = Path(f"/proc/{conn.info.backend_pid}/schedstat")
    since, before = answer(conn, "wal_position"), int(schedstat.read_text("ascii").split()[0])
    live(conn, jobs)
    cpu_us = (int(schedstat.read_text("ascii").split()[0]) - before) / 1_000
    writes = inspector.execute(SQL["writes"].encode(), {"since": since}).fetchone() or (0.0, 0.0, 0.0)
    clear(conn)
    return [each / jobs for each in (writes[0] / 1_000, *writes[1:], cpu_us)]


def _live(conn: db.Connection, jobs: int, most: int) -> None:
    """Add, claim and finish so many jobs, as producers and a worker do; an end goes with the next claim."""
    new = new_jobs(jobs, share="tenant")
    for first in range(0, jobs, most):
        _ = enqueue(conn, new[first]) if most == 1 else enqueue_many(conn, new[first : first + most])
    session, ends, done = lifecycle.open_session(conn, "bench:life"), list[Ended](), 0
    while done < jobs or ends:
        step = lifecycle.step(session, ["bench"], BACKOFF_SEC, most, ends)
        done += len(step.jobs)
        ends = [Ended(job, Finish("succeed")) for job in step.jobs]
        if not step.jobs and not step.look_again and done < jobs:
            raise BenchError(f"a claim found nothing after {done} of {jobs} jobs")


def _live_bare(conn: db.Connection, jobs: int) -> None:
    for number in range(jobs):
        conn.execute(SQL["insert_one"], {"n": number})
    for _ in range(jobs):
        conn.execute(SQL["finish_by_id"], {"job_id": answer(conn, "claim_by_id")})
